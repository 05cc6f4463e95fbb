"""Peak memory of an audit and of its verifying process on a model of 300 million parameters, in multiples of its weights."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from auditor.flow import run
from auditor.loading import load
from auditor.settings import Settings
from benchmarks.harness import Row, in_process_of_its_own, peak_mib, report

LAYERS = 24
SOURCE = """
import torch
from torch import nn


def get_model():
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True, norm_first=True) for _ in range({layers}))
    return nn.Sequential(*layers)


def get_inputs():
    return torch.randn(1, 16, 1024)
"""

COLUMNS = {"parameters M": ".0f", "weights MiB": ".0f", "audit x": ".2f", "verifying process x": ".2f"}


def measured(layers: int) -> Row:
    """One audit from a file, as the command line runs it; what the programs themselves take is not counted."""
    libraries = peak_mib()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("deep.py").write_text(SOURCE.format(layers=layers), encoding="utf-8")
        subject = load("deep.py")
        parameters = sum(p.numel() for p in subject.model.parameters())
        built = peak_mib()
        with children_watched() as peaks:
            run(subject, Settings(command="", device="cpu"))
        os.chdir("/")
    weights = 4 * parameters / 2**20
    return {
        "parameters M": parameters / 1e6,
        "weights MiB": weights,
        "libraries MiB": libraries,
        "load x": (built - libraries) / weights,
        "audit x": (peak_mib() - libraries) / weights,
        "verifying process x": (max(peaks.values()) - libraries) / weights,
    }


@contextmanager
def children_watched() -> Iterator[dict[str, float]]:
    """{id of a process that the body starts: its largest resident size in MiB}.

    Looked up while they run: what the system says of ended ones counts the process that they were forked from.
    """
    peaks: dict[str, float] = {}
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.02):
            for listed in Path("/proc/self/task").glob("*/children"):
                with suppress(OSError):
                    for child in listed.read_text().split():
                        status = Path("/proc", child, "status").read_text()
                        peaks[child] = max(peaks.get(child, 0.0), _peak_in(status))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        over.set()
        thread.join()


def _peak_in(status: str) -> float:
    lines = (line.split() for line in status.splitlines() if line.startswith("VmHWM"))
    return next((float(line[1]) / 1024 for line in lines), 0.0)


def main() -> None:
    """Measure in a process of its own and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=LAYERS, help="layers of 12.6 million parameters each")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.layers)))
        return
    row = in_process_of_its_own("benchmarks.memory", "--here", "--layers", str(options.layers))
    report("memory", [row], COLUMNS)


if __name__ == "__main__":
    main()
