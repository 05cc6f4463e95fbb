"""How long an audit of several batches takes with one process and with two, started by torchrun on this machine."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.harness import Row, report

BATCHES = 16
SOURCE = """
import torch
from torch import nn


def get_model():
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer({width}, 8, batch_first=True, norm_first=True) for _ in range(6))
    return nn.Sequential(*layers)


def get_inputs():
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(8, 64, {width}, generator=generator),) for _ in range({batches})]
"""
COLUMNS = {"width": ".0f", "one s": ".1f", "two s": ".1f", "speed-up": ".2f", "measure speed-up": ".2f"}


def audited(folder: Path, processes: int) -> tuple[float, Row]:
    """Seconds on the clock for the whole command, and its plan.json."""
    several = ["torch.distributed.run", "--nproc-per-node", str(processes), "-m"] if processes > 1 else []
    out = folder / f"with_{processes}"
    command = [sys.executable, "-m", *several, "auditor", "deep.py", "--quiet", "--fail-on", "never", "--out", str(out)]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return time.perf_counter() - start, json.loads((out / "plan.json").read_text(encoding="utf-8"))


def measured(width: int) -> Row:
    """One audit with each number of processes; what they say is compared."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "deep.py").write_text(SOURCE.format(width=width, batches=BATCHES), encoding="utf-8")
        (one, alone), (two, both) = audited(folder, 1), audited(folder, 2)
    times = [record["environment"].pop("seconds") for record in (alone, both)]
    if alone != both:
        raise SystemExit("two processes say something else than one")
    stages = [seconds["measure"] for seconds in times]
    return {
        "width": width,
        "one s": one,
        "two s": two,
        "speed-up": one / two,
        "measure speed-up": stages[0] / stages[1],
        "stages": times,
    }


if __name__ == "__main__":
    report("ranks", [measured(width) for width in (256, 512)], COLUMNS, {"batches": BATCHES})
