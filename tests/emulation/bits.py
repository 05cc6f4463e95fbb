"""The emulated results of PyTorch's operations, forwards and backwards, as a file.

`python -m tests.emulation.bits FILE` writes {operation and format: its tensors}, so that runs on other processors, or
with another torch, can be held against each other. It reads PyTorch's own table of operations (OpInfo), whose import sets
flags of torch's: hence a process of its own.
"""

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

import auditor
from tests.support.opinfo import _op_db

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SAMPLES = 3

RANDOM = (
    "empty",
    "rand",
    "dropout",
    "bernoulli",
    "multinomial",
    "normal",
    "uniform",
    "cauchy",
    "exponential",
    "geometric",
)
"""Names of operations whose results are drawn or uninitialized."""


def results() -> Iterator[tuple[str, list[torch.Tensor]]]:
    """(operation and format, results and gradients of its first samples) for every operation with a CUDA kernel."""
    for info in _op_db():
        if torch.float32 not in info.dtypes or any(name in info.name for name in RANDOM):
            continue
        for fmt, dtype in DTYPES.items():
            if dtype in info.dtypesIfCUDA:
                torch.manual_seed(0)
                tensors = [x for sample in _samples(info) for x in _run(info, sample, dtype)]
                yield f"{info.name} {info.variant_test_name} {fmt}".replace("  ", " "), tensors


def _samples(info: Any) -> list[Any]:
    try:
        return list(itertools.islice(info.sample_inputs("cpu", torch.float32), SAMPLES))
    except Exception:  # some samples need a GPU
        return []


def _run(info: Any, sample: Any, dtype: torch.dtype) -> list[torch.Tensor]:
    """The results, and the gradients of all low-precision inputs; without gradients where the operation has none."""

    def lowered(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.detach().to(dtype) if x.dtype is torch.float32 else x.detach().clone()

    low = sample.transform(lowered)
    leaves = [x for x in tree_leaves((low.input, low.args, low.kwargs)) if isinstance(x, torch.Tensor)]
    leaves = [x for x in leaves if x.dtype is dtype]
    for differentiable in (True, False):
        try:
            for x in leaves:
                x.requires_grad_(differentiable)
            return _tensors(info, low, leaves)
        except Exception:
            continue
    return []


def _tensors(info: Any, low: Any, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    with auditor.emulate("cuda"):
        results = [x for x in tree_leaves(info(low.input, *low.args, **low.kwargs)) if isinstance(x, torch.Tensor)]
        ends = [x for x in results if x.requires_grad and x.is_floating_point()]
        arriving = [_ramp(x) for x in ends]
        gradients = torch.autograd.grad(ends, leaves, arriving, allow_unused=True) if ends else ()
    return [x.detach().to_dense() for x in (*results, *gradients) if x is not None]


def _ramp(x: torch.Tensor) -> torch.Tensor:
    """A gradient of eighths from -1 to 1, the same on every processor."""
    return ((torch.arange(x.numel()) % 17 - 8) / 8).reshape(x.shape).to(x.dtype)


if __name__ == "__main__":
    torch.save(dict(results()), sys.argv[1])
