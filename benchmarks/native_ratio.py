"""How well the CPU emulates a GPU: local error of every node, emulated over native, where there is a GPU."""

from __future__ import annotations

import copy
import statistics
import sys
from typing import Any

import torch
from torch.utils import _pytree as pytree

from auditor.capture.capture import capture
from auditor.measure.measure import measure
from auditor.records import Batch, NodeError, Subject
from benchmarks import subjects  # noqa: F401  (timm and transformers import through its torchvision)
from benchmarks.attribution import MODELS, specimen
from benchmarks.harness import Row, machine, report

FORMATS = ("fp16", "bf16")
COLUMNS = {
    "model": "",
    "format": "",
    "nodes": "d",
    "median": ".3f",
    "5th percentile": ".3f",
    "95th percentile": ".3f",
    "only emulated fails": "d",
    "only native fails": "d",
}

Errors = dict[tuple[str, str], NodeError]


def errors_on(device: str, name: str) -> Errors:
    """{(operation with its count, format): NodeError} of a model of tests/slow, measured on one device."""
    chosen = specimen(name)
    model = copy.deepcopy(chosen.model).to(device)
    moved: Batch = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), (chosen.args, chosen.kwargs))
    captured = capture(Subject(model, (moved,), name, name, "benchmark", "benchmark"), FORMATS)
    found = measure(captured, model, moved, FORMATS).errors
    return {(node, fmt): error for node, formats in found.items() for fmt, error in formats.items()}


def compared(name: str, fmt: str, emulated: Errors, native: Errors) -> Row:
    """Ratios of the nodes that both graphs hold and that have an error on both sides."""
    nodes = [node for node, f in emulated if f == fmt and (node, fmt) in native]
    pairs = [(emulated[node, fmt], native[node, fmt]) for node in nodes]
    ratios = [a.local_error / b.local_error for a, b in pairs if _counts(a) and _counts(b)]
    twentieths = statistics.quantiles(ratios, n=20)
    return {
        "model": name,
        "format": fmt,
        "nodes": len(ratios),
        "median": statistics.median(ratios),
        "5th percentile": twentieths[0],
        "95th percentile": twentieths[-1],
        "only emulated fails": sum(bool(a.unsupported) and not b.unsupported for a, b in pairs),
        "only native fails": sum(bool(b.unsupported) and not a.unsupported for a, b in pairs),
    }


def _counts(error: NodeError) -> Any:
    return error.local_error and error.local_error < float("inf")


def main() -> int:
    if not torch.cuda.is_available():
        print("native_ratio compares with a GPU, and torch sees none here", file=sys.stderr)
        return 2
    rows = []
    for name in MODELS:
        emulated, native = errors_on("cpu", name), errors_on("cuda", name)
        rows += [compared(name, fmt, emulated, native) for fmt in FORMATS]
    report("native_ratio", rows, COLUMNS, {"gpu": torch.cuda.get_device_name(), "host": machine()})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
