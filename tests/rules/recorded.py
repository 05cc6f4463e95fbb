"""A model run as it is, under autocast and cast as a whole, and what each of its operations read and gave."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from auditor.capture.emulation import Emulation
from auditor.capture.intercept import intercepted
from auditor.numerics.nodes import op_name
from auditor.records import Capture, Finding

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def largest(tree: Any) -> float:
    """The largest finite magnitude among floating tensors."""
    sizes = [x.abs()[x.isfinite()].max() for x in tensors(tree) if x.is_floating_point() and x.isfinite().any()]
    return float(max(sizes, default=torch.tensor(math.nan)))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Its floating tensors in a dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


@dataclass(frozen=True)
class Call:
    """One operation of a run. fixed: ids of tensors that no input of the model reaches."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    fixed: frozenset[int] = frozenset()

    @property
    def out(self) -> Tensor:
        return tensors(self.result)[0]

    @property
    def activations(self) -> list[Tensor]:
        return [x for x in tensors((self.args, self.kwargs)) if id(x) not in self.fixed]


@dataclass
class Run:
    """The operations of a run, in order, by name."""

    calls: dict[str, list[Call]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Call]:
        return (call for calls in self.calls.values() for call in calls)


class _Recording(Emulation):
    def __init__(self, fixed: set[int]) -> None:
        super().__init__(lenient=True)
        self.run, self._fixed = Run(), fixed

    def part(self, op: Any, args: Any, kwargs: Any, region: Any) -> Any:
        result = super().part(op, args, kwargs, region)
        if all(id(x) in self._fixed for x in tensors((args, kwargs))):
            self._fixed.update(id(x) for x in tensors(result))
        name = op_name(op)
        self.run.calls.setdefault(name, []).append(Call(name, args, kwargs, result, frozenset(self._fixed)))
        return result


def recorded(model: nn.Module, inputs: tuple[Tensor, ...], use: str = "", fmt: str = "bf16") -> Run:
    """A run as it is (""), under "autocast" or in a "cast" model, as far as it goes."""
    model = copy.deepcopy(model)
    if use == "cast":
        model, inputs = model.to(LOW[fmt]), cast(inputs, LOW[fmt])
    held = {id(x) for x in (*model.parameters(), *model.buffers())}
    recording = _Recording(held)
    with torch.no_grad(), intercepted(recording), _scope(use, LOW[fmt]):  # autocast for CUDA, made inside, is on
        try:
            model(*inputs)
        except (RuntimeError, ValueError):
            if not use:
                raise
    return recording.run


def _scope(use: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=dtype) if use == "autocast" else nullcontext()


def call_of(finding: Finding, capture: Capture, run: Run) -> Call | None:
    """The call that a finding is about: as many of its name come before it as in the graph. None where the run ended before."""
    same = [name for name, node in capture.nodes.items() if node.op == finding.op]
    calls = run.calls.get(finding.op, [])
    at = same.index(finding.node)
    return calls[at] if at < len(calls) else None
