"""Holds the emulation against the rule "FP32, and rounded once", operation by operation.

`python -m tests.emulation.rule FILE` pickles {operation and format: (largest share of entries that differ, kernels with a
row of their own)}, forwards and backwards, for PyTorch's own table of operations. The rule is written here once more, on
purpose, in a few lines.
"""

import contextlib
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import auditor
from auditor.numerics import kernels
from auditor.numerics.cuda_facts import facts_of
from tests.emulation.bits import DTYPES, RANDOM, _ramp, _samples
from tests.support.opinfo import _op_db

LOW = tuple(DTYPES.values())


class OnceRounded(TorchDispatchMode):
    """Every kernel computes in FP32, and its result is rounded once; torch itself says to which dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        is_low = any(isinstance(x, Tensor) and x.dtype in LOW for x in tree_leaves((args, kwargs)))
        is_composite = torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
        if not is_low or is_composite or func.is_view or func._schema.is_mutable:
            return func(*args, **kwargs)
        wide = tree_map_only(Tensor, lambda x: x.float() if x.dtype in LOW else x, (args, kwargs))
        exact, native = func(*wide[0], **wide[1]), func(*args, **kwargs)
        for low, values in zip(tree_leaves(native), tree_leaves(exact), strict=True):
            if isinstance(low, Tensor) and low.dtype in LOW and low.shape == values.shape:
                low.copy_(values)
        return native


@contextlib.contextmanager
def noting_rows(rows: set[str]) -> Iterator[None]:
    """In the `with` block, `rows` collects the kernels that run by a row of the table."""
    original, original_whole = kernels.run_kernel, kernels._run_whole

    def noted_whole(target: Any, *rest: Any) -> Any:
        rows.add(str(target))
        return original_whole(target, *rest)

    def noted(op: Any, args: Any, kwargs: Any) -> Any:
        facts = facts_of(op)
        if facts.rounding or facts.rounded or facts.whole or facts.results:
            rows.add(str(op))
        if facts.parts is not None and not facts.composite:
            rows.add(str(op))
        return original(op, args, kwargs)

    kernels.run_kernel, kernels._run_whole = noted, noted_whole
    try:
        yield
    finally:
        kernels.run_kernel, kernels._run_whole = original, original_whole


def run(info: Any, sample: Any, dtype: torch.dtype, context: Any) -> list[Tensor | None]:
    """Results and gradients of one call on low-precision tensors."""

    def lowered(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.detach().to(dtype) if x.dtype is torch.float32 else x.detach().clone()

    low = sample.transform(lowered)
    leaves = [x for x in tree_leaves((low.input, low.args, low.kwargs)) if isinstance(x, Tensor) and x.dtype is dtype]
    for x in leaves:
        x.requires_grad_()
    with context:
        results = [x for x in tree_leaves(info(low.input, *low.args, **low.kwargs)) if isinstance(x, Tensor)]
        ends = [x for x in results if x.requires_grad and x.is_floating_point()]
        arriving = [_ramp(x) for x in ends]
        gradients = torch.autograd.grad(ends, leaves, arriving, allow_unused=True) if ends else ()
    return [None if x is None else x.detach().to_dense() for x in (*results, *gradients)]


def share_off(ours: list[Tensor | None], rule: list[Tensor | None]) -> float:
    """The largest share of entries that differ in one of the tensors."""
    largest = 0.0
    for a, b in zip(ours, rule, strict=True):
        if a is None or b is None or not a.numel():
            continue
        if a.shape != b.shape or a.dtype != b.dtype:
            return 1.0
        differ = (a != b) & ~(a.isnan() & b.isnan())
        largest = max(largest, float(differ.double().mean()))
    return largest


def main(file: Path) -> None:
    found = dict[str, tuple[float, list[str]]]()
    for info in _op_db():
        if torch.float32 not in info.dtypes or any(name in info.name for name in RANDOM):
            continue
        for fmt, dtype in DTYPES.items():
            if dtype not in info.dtypesIfCUDA:
                continue
            rows, share = set[str](), 0.0
            for sample in _samples(info):
                try:
                    with noting_rows(rows):
                        ours = run(info, sample, dtype, auditor.emulate("cuda"))
                    rule = run(info, sample, dtype, OnceRounded())
                except Exception:  # one of the two has no such call, such as a gradient or a CPU kernel
                    continue
                share = max(share, share_off(ours, rule))
            found[f"{info.name} {info.variant_test_name} {fmt}"] = share, sorted(rows)
    file.write_bytes(pickle.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
