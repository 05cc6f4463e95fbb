"""Whether errors that an audit for a CPU states are those of plain runs of torch, bit for bit; and its speed-ups.

    python -m benchmarks.cpu corpus
    python -m benchmarks.cpu zoo llama mamba
    python -m benchmarks.cpu examples
    python -m benchmarks.cpu times

A line for each model: the number of plans and baselines, and those with another error. `times` prints the time of one
forward in FP32, and the speed-ups of BF16 and FP16, of products and of models of several sizes.
"""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import auditor
from auditor.loading import load
from auditor.numerics.cpus import cpu_name, cpu_row
from tests.architectures.zoo import ZOO, specimen
from tests.corpus.catalogue import INFERENCE
from tests.native_cpu.plainly import DTYPES, differences

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
ROOT = Path(__file__).resolve().parents[1]

WIDTHS = (64, 256, 1024)
"""Widths of the layers that `times` measures; a batch has 64 rows."""


def corpus() -> Iterator[tuple[str, Callable[[], Call]]]:
    """The failures that users met, and their twins."""
    for case in INFERENCE:
        for name, build in ((case.name, case.build), (f"{case.name} (twin)", case.twin)):
            yield name, lambda build=build: (*build(), {})  # type: ignore[misc]


def zoo() -> Iterator[tuple[str, Callable[[], Call]]]:
    """Architectures as their libraries write them, made tiny."""

    def made(name: str) -> Call:
        found = specimen(name)
        return found.model, found.args, found.kwargs

    for name in ZOO:
        yield name, lambda name=name: made(name)  # type: ignore[misc]


def examples() -> Iterator[tuple[str, Callable[[], Call]]]:
    """The files of examples/, with their own inputs."""

    def loaded(file: Path) -> Call:
        subject = load(str(file))
        return subject.model, *subject.batches[0]

    for file in sorted((ROOT / "examples").glob("0*.py")):
        yield file.stem, lambda file=file: loaded(file)  # type: ignore[misc]


def compare(name: str, make: Callable[[], Call]) -> bool:
    """Audit one model, compare all its errors with plain runs, and print a line; returns whether all are equal."""
    model, args, kwargs = make()
    before = copy.deepcopy(model.eval())
    audit = auditor.audit(model, args, kwargs=kwargs, on="cpu", measure_time=False)
    found = differences(before, args, kwargs, audit)
    print(
        f"{name}: {len(audit.plans) + len(audit.baselines)} runs, {len(found)} unequal", *found, sep="\n  ", flush=True
    )
    return not found


def times() -> None:
    """Print a line for each width: the time of a layer in FP32, and the speed-ups of a plain cast."""
    print(f"{cpu_name()} ({cpu_row()}), {torch.get_num_threads()} threads, torch {torch.__version__}")
    for width in WIDTHS:
        layers = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)).eval()
        audit = auditor.audit(layers, (torch.randn(64, width),), on="cpu", strategies="cast", measure_time=True)
        assert audit.timing is not None
        assert audit.timing.fp32.eager is not None
        said = [f"{fmt} {audit.plans[f'cast_{fmt}'].speedup:.2f}x" for fmt in DTYPES]
        print(f"{width}: {audit.timing.fp32.eager.median * 1e3:.3g} ms in FP32; {', '.join(said)}", flush=True)


def main(which: str, names: list[str]) -> int:
    """Run one part; returns 1 if an error differs."""
    warnings.simplefilter("ignore")
    if which == "times":
        times()
        return 0
    torch.manual_seed(0)
    parts = {"corpus": corpus, "zoo": zoo, "examples": examples}
    chosen = [(name, make) for name, make in parts[which]() if not names or name in names]
    equal = [compare(name, make) for name, make in chosen]
    print(f"{sum(equal)} of {len(equal)} models: all errors equal those of plain runs")
    return int(not all(equal))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
