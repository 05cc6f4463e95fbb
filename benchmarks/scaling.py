"""Whole audits of models with thousands of operations, and of one model at growing depth: time, and memory beside a training
step's."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from auditor.flow import run
from auditor.loading import load
from auditor.settings import Settings
from benchmarks.audit_cost import StageClock, spent
from benchmarks.deep import DEEP, DEPTHS, made
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, peak_mib, report
from benchmarks.memory import children_watched

COLUMNS = {
    "model": "",
    "operations": "d",
    "forward s": ".3f",
    "audit s": ".1f",
    "audit x": ".0f",
    "ms per operation": ".1f",
    "peak MiB": ".0f",
    "verifying MiB": ".0f",
    "training MiB": ".0f",
    "memory x": ".2f",
}
STAGES = {f"{stage} s": ".1f" for stage in ("capture", "measure", "classify", "baseline", "plan")}

SOURCE = """from benchmarks.deep import made
def get_model(): return made({name!r})[0]
def example_inputs(): return made({name!r})[1]
"""


def audited(name: str) -> Row:
    """One audit of a file, its verifying process included; a forward is timed before it."""
    model, args = made(name)
    forward = forward_seconds(model, args)
    del model, args
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.py")
        file.write_text(SOURCE.format(name=name), encoding="utf-8")
        subject, clock, since = load(str(file)), StageClock(), time.monotonic()
        begun = spent()
        with children_watched() as peaks:
            audit = run(subject, Settings(command="", device="cpu", progress=clock))
        elapsed = spent() - begun
        clock("end", "", 0, 0)
    return {
        "operations": len(audit.nodes),
        "forward s": forward,
        "audit s": elapsed,
        "wall s": time.monotonic() - since,
        "audit x": elapsed / forward,
        "ms per operation": 1000 * elapsed / len(audit.nodes),
        "peak MiB": peak_mib(),
        "verifying MiB": max(peaks.values(), default=0.0),
        "verified": sum(plan.is_verified is True for plan in audit.plans.values()),
        **{f"{stage} s": seconds for stage, seconds in clock.by_stage.items()},
    }


def trained(name: str) -> Row:
    """One step of plain SGD, the least that training can take."""
    model, args = made(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    outputs: Any = model(*args)
    outputs = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    outputs.float().square().mean().backward()
    optimizer.step()
    return {"training MiB": peak_mib()}


def combined(name: str) -> Row:
    """An audit and a training step, each in a process of its own."""
    one, step = (in_process_of_its_own("benchmarks.scaling", "--measure", kind, name) for kind in MEASUREMENTS)
    most = max(one["peak MiB"], one["verifying MiB"])
    return {"model": name, **dict.fromkeys(STAGES, 0.0), **one, **step, "memory x": most / step["training MiB"]}


def growth(rows: list[Row]) -> float:
    """Exponent p of time ~ operations^p, between the first row and the last; 1 is linear."""
    first, last = rows[0], rows[-1]
    return math.log(last["audit s"] / first["audit s"]) / math.log(last["operations"] / first["operations"])


MEASUREMENTS = {"audit": audited, "training": trained}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="those of benchmarks.deep if left out", default=list(DEEP))
    parser.add_argument("--depth", action="store_true", help="a GPT-2 from 2 to 64 layers instead")
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one measurement of one model, as JSON")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    if options.measure:
        print(json.dumps(MEASUREMENTS[options.measure](options.models[0])))
    elif options.depth:
        rows = [combined(name) for name in DEPTHS]
        report(
            "scaling_depth", rows, COLUMNS | STAGES, {"growth": {"audit s": growth(rows), "last": growth(rows[-2:])}}
        )
        print(f"\nexponent of the growth with operations, 2 to 64 layers: {growth(rows):.2f}", end="")
        print(f"; from 32 to 64: {growth(rows[-2:]):.2f}")
    else:
        report("scaling", [combined(name) for name in options.models], COLUMNS | STAGES)


if __name__ == "__main__":
    main()
