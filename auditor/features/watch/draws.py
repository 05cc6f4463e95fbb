"""Random numbers of a forward pass: recorded on the training machine, and put in place of a CPU's own in a replay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...isolation.draws import may_draw
from ...numerics.entries import tensors_in
from ...numerics.nodes import mutates

MASKED = "native_dropout"
"""A GPU's dropout, in one operation, whose second result is the mask. On a CPU, `bernoulli_` draws the mask."""
FUSED = "attention"
"""Part of the names of fused attention kernels, whose dropout is not a tensor."""


class RecordDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the results of random operations. draws: (operation, values) in order; None for values of a fused kernel."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.draws: list[tuple[str, torch.Tensor | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if may_draw(func) and func._opname != "dropout":
            self.draws.append((func._opname, _values(func, result)))
        return result


def _values(op: Any, result: Any) -> torch.Tensor | None:
    if FUSED in op._opname:
        return None
    drawn = tensors_in(result)
    values = drawn[1] if op._opname == MASKED else drawn[0]
    return values.detach().cpu().clone()


class PlayDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives random operations the recorded values, in order, as long as operations and shapes agree.

    failed: whether an operation did not agree; all later ones draw their own.
    """

    def __init__(self, draws: Sequence[tuple[str, torch.Tensor | None]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._left: Iterator[tuple[str, torch.Tensor | None]] = iter(draws)
        self.failed = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.failed and may_draw(func) and func._opname != "dropout":
            self._replace(func, args, result)
        return result

    def _replace(self, op: Any, args: Any, result: Any) -> None:
        name, values = next(self._left, ("", None))
        drawn = tensors_in(result)
        target = drawn[1] if op._opname == MASKED and len(drawn) > 1 else drawn[0]
        is_mask = name == MASKED and op._opname in (MASKED, "bernoulli", "bernoulli_")
        agrees = is_mask or name.rstrip("_") == op._opname.rstrip("_")
        if values is None or not agrees or values.shape != target.shape:
            self.failed = True
            return
        if op._opname == MASKED:  # (output, mask): the output is the input where the mask is set, over 1 - p
            drawn[0].copy_(args[0] * values / (1 - args[1]))
        target.copy_(values)
        assert mutates(op) or target is not args
