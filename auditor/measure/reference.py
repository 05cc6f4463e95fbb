"""The FP32 run that everything is held against, under autograd: every value has a gradient of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..execution.execute import RECORDED, Apart, ValueOf, apart
from ..numerics.entries import is_plain
from ..numerics.kernels import is_product
from ..numerics.nodes import row_of, target_of, tensors_of, viewed
from .derivatives import batch_norm, differentiated, takes_statistics

Back = Literal["trusted", "tried", "none"]
TRUSTED: Back = "trusted"
TRIED: Back = "tried"
NONE: Back = "none"


class Reference(Apart):
    """Runs a graph whose inputs are leaves of an autograd graph.

    back: whether autograd's way back through an operation is trusted, tried as soon as it has run, or not taken.
    anchors: leaves behind results which depend on no float input. lost: nodes that an operation reads without a
    derivative. readings: {product: {value it reads: that value as this product alone reads it, or None if no other node
    does}}.
    """

    def __init__(self, back: Back = TRUSTED) -> None:
        self.back = back
        self.anchors: list[torch.Tensor] = []
        self.lost: set[fx.Node] = set()
        self.readings: dict[str, dict[str, torch.Tensor | None]] = {}

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node computes, connected."""
        if n.op == "output":
            return RECORDED.compute(n, value_of)
        return self._connected(apart(self._computed(n, value_of), [value_of(source) for source in n.all_input_nodes]))

    def _computed(self, n: fx.Node, value_of: ValueOf) -> Any:
        if self.back == NONE:
            self.lost |= set(n.all_input_nodes)
            with torch.no_grad():
                return RECORDED.compute(n, value_of)
        if row_of(n).packet == "detach":  # its value reaches the outputs, so its error must be attributed
            return torch.ops.aten.alias.default(value_of(n.all_input_nodes[0]))
        args: Any
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        if takes_statistics(n.target):
            return batch_norm(target_of(n), *args)
        if not any(x.is_floating_point() or x.is_complex() for x in tensors_of(n.meta.get("val"))):
            with torch.no_grad():  # counting on a connected value has no derivative, and asking for one raises
                return RECORDED.compute(n, value_of)
        values = {source: value_of(source) for source in n.all_input_nodes}
        if is_product(target_of(n)) and all(map(is_plain, tensors_of(list(values.values())))):
            return self._product(n, values)
        result, lost = differentiated(target_of(n), args, kwargs, self.back == TRIED)
        if lost:
            self.lost |= {s for s, value in values.items() if any(x is y for x in tensors_of(value) for y in lost)}
        if row_of(n).steps:
            self.lost |= set(values)
        return result

    def _product(self, n: fx.Node, values: dict[fx.Node, Any]) -> Any:
        """The product, reading shared values under names of their own: the gradient there is that of this reading."""
        if _told_apart(values):
            shared = {s: torch.ops.aten.alias.default(x) for s, x in values.items() if len(s.users) > 1}
            self.readings[n.name] = {source.name: shared.get(source) for source in values}
            values |= shared
        return RECORDED.compute(n, values.__getitem__)

    def _connected(self, reference: Any) -> Any:
        """Results that depend on no float input (positions, masks) are given a place in the autograd graph."""

        def connect(x: torch.Tensor) -> torch.Tensor:
            if not x.is_floating_point() or x.requires_grad or not is_plain(x):
                return x
            self.anchors.append(x.requires_grad_())
            return x.clone()

        return pytree.tree_map_only(torch.Tensor, connect, reference)


def _told_apart(values: Mapping[fx.Node, Any]) -> bool:
    """Whether a product reads different FP32 tensors: two views of the same one err together."""
    roots = set()
    for source, value in values.items():
        if not isinstance(value, torch.Tensor) or value.dtype is not torch.float32:
            return False
        root = source
        while (earlier := viewed(root)) is not None:
            root = earlier
        roots.add(root)
    return len(roots) == len(values)
