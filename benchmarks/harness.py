"""One process and one thread per measurement, its processor time and peak memory, and tables that name the machine."""

from __future__ import annotations

import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

RESULTS = Path(__file__).resolve().parent / "results"
FORWARDS = 5

torch.set_num_threads(1)

Row = dict[str, Any]


def in_process_of_its_own(module: str, *arguments: str) -> Row:
    """What `python -m module arguments` prints as its last line, read as JSON."""
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stderr[-4000:]}")
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def seconds(action: Callable[[], object]) -> float:
    """Processor time of one call: on one thread the same as the time it takes, were the machine idle."""
    start = time.process_time()
    action()
    return time.process_time() - start


def forward_seconds(model: nn.Module, args: Sequence[Any]) -> float:
    """Median time of a forward without autograd, after one to warm up."""

    def forward() -> None:
        with torch.no_grad():
            model(*args)

    forward()
    return statistics.median(seconds(forward) for _ in range(FORWARDS))


def peak_mib() -> float:
    """Largest resident size of this process so far."""
    gc.collect()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def report(name: str, rows: Sequence[Row], columns: Mapping[str, str], notes: Mapping[str, Any] | None = None) -> None:
    """Print the rows as a Markdown table, columns {key: format}, and write all there is to results/NAME.json."""
    print(f"\n{name}: {described(machine())}\n", flush=True)
    print("| " + " | ".join(columns) + " |")
    print("|" + "---|" * len(columns))
    for row in rows:
        print("| " + " | ".join(format(row[key], spec) for key, spec in columns.items()) + " |")
    RESULTS.mkdir(exist_ok=True)
    content = {"machine": machine(), "rows": list(rows), **(notes or {})}
    (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def machine() -> dict[str, Any]:
    """What the numbers depend on, and nothing that names an owner."""
    return {
        "processor": _processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def described(facts: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in facts.items())


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
