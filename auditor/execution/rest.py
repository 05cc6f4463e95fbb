"""The rest of a tape run again once values of it are others: only as far as the change reaches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..numerics.casting import raised
from ..numerics.entries import extent, is_number, is_plain
from ..numerics.nodes import row_of, tensors_of
from ..records import Capture
from ..stages import beat
from .execute import RECORDED, Disturbed, Executor, Run, Semantics, SomeLow, ValueOf

DRAWS = 8
"""Errors tried at each choice."""

REACH = 4.0
"""How many times as large as the error that is there, entry by entry, those that are tried may be."""


@dataclass(frozen=True)
class Followed:
    """What became of the outputs. flipped: whether a discrete result on the way, or among them, is another. left: what low
    operations gave to others, by name."""

    outputs: list[torch.Tensor]
    flipped: bool
    left: Mapping[str, Any]


class Rest:
    """The outputs of a capture once some of its values are others, all else being FP32.

    values: what every node and placeholder gave in FP32. executed: how many operations were run so far.
    """

    def __init__(self, capture: Capture, flat: Sequence[Any], values: Mapping[str, Any]) -> None:
        self._capture, self._flat, self._reference = capture, flat, Run(values)
        self._operations: int = sum(node.op == "call_function" for node in capture.graph_module.graph.nodes)
        self.executed = 0

    @property
    def replays(self) -> float:
        """Runs of the whole capture that cost as many operations as were run so far."""
        return self.executed / max(self._operations, 1)

    def outputs(self, values: Mapping[str, Any]) -> list[torch.Tensor]:
        """The tensors among the model's outputs once the values of some nodes are others.

        Raises: what an operation raises that cannot take them.
        """
        return self._follow(Disturbed(values), values).outputs

    def together(
        self, names: Collection[str], format: str, round: Callable[[Any], Any], *, provoke: bool = False
    ) -> Followed:
        """The outputs with all these operations low at once, on what reaches them; see SomeLow.

        provoke: a choice on the way is another already where it would be with somewhat other errors, see `provoked`.
        Raises: UnsupportedInFormat, and what an operation raises.
        """
        low = _Provoked(self._capture, set(names), format, round)
        if provoke:
            low.reference = self._reference.values
        return self._follow(low)

    def _follow(self, semantics: Semantics, given: Collection[str] = ()) -> Followed:
        beat()
        reference, flipped = self._reference.values, False
        executor = Executor(self._capture.graph_module, semantics, before=self._reference)
        result = None
        with torch.no_grad():
            for n, result in executor.steps(*self._flat):
                if n.op == "call_function" and n.name not in given:
                    self.executed += 1
                    if n.name in reference and is_choice(n, reference[n.name]):
                        flipped = flipped or differing(raised(result), reference[n.name], n) > 0
        left = semantics.left if isinstance(semantics, SomeLow) else {}
        return Followed(tensors_of(raised(result)), flipped, {n.name: value for n, value in left.items()})


class _Provoked(SomeLow):
    """Some operations low; with choices that somewhat other errors would make, where their values in FP32 are known."""

    reference: Mapping[str, Any] = MappingProxyType({})

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node gives, or what it chooses with other errors."""
        result = super().compute(n, value_of)
        if n.name not in self.reference or not is_choice(n, self.reference[n.name]):
            return result
        now, before = self.arriving(n, value_of), self.reference
        return provoked(n, result, before[n.name], lambda x: before[x.name], lambda x: raised(now(x)))


def is_choice(n: fx.Node, reference: Any) -> bool:
    """Whether rounding its inputs changes its result by leaps: an index, a mask, a rounding to whole numbers."""
    row = row_of(n)
    if n.op != "call_function" or row.asks_shape or row.asks_finite:
        return False
    return row.steps or any(not is_number(x) for x in tensors_of(reference))


def differing(result: Any, reference: Any, n: fx.Node) -> int:
    """How many choices are others; of rounding to whole numbers, how many numbers."""
    pairs, steps = zip(tensors_of(result), tensors_of(reference), strict=False), row_of(n).steps
    return sum(
        int((x != y).sum()) if extent(x) == extent(y) else max(y.numel(), 1)
        for x, y in pairs
        if steps or not is_number(y)
    )


def provoked(n: fx.Node, actual: Any, reference: Any, before: ValueOf, now: ValueOf) -> Any:
    """The actual result with those choices that differ most from the reference among some errors of its inputs.

    Errors of many operations may cancel just where a choice is made, and one of them alone decide it: so errors of the
    same size are drawn at random. before, now: values of its inputs, without the errors and with them.
    """
    spreads = {source: _spread(before(source), now(source)) for source in n.all_input_nodes}
    if all(spread is None for spread in spreads.values()):
        return actual
    generator = torch.Generator().manual_seed(0)
    found, most = actual, differing(actual, reference, n)

    def disturbed(source: fx.Node) -> Any:
        spread = spreads[source]
        if spread is None:
            return now(source)
        return before(source) + torch.randn(spread.shape, generator=generator).to(spread) * spread

    for _ in range(DRAWS):
        result = RECORDED.compute(n, disturbed)
        if (many := differing(result, reference, n)) > most:
            found, most = result, many
    if row_of(n).steps:
        return found
    # The actual numbers beside the choices found.
    ours, spec = pytree.tree_flatten(actual)
    pairs = zip(ours, pytree.tree_leaves(found), strict=True)
    return pytree.tree_unflatten([a if isinstance(a, torch.Tensor) and is_number(a) else b for a, b in pairs], spec)


def _spread(before: Any, now: Any) -> torch.Tensor | None:
    """How far errors are tried, per entry; None where there are none, or no numbers to compare."""
    if not (isinstance(before, torch.Tensor) and isinstance(now, torch.Tensor)):
        return None
    if not before.is_floating_point() or not is_plain(before) or before.shape != now.shape:
        return None
    off = (now - before).abs()
    if not off.numel() or not bool(torch.isfinite(off).all()) or not bool(off.any()):
        return None
    return REACH * (off + off.square().mean().sqrt())
