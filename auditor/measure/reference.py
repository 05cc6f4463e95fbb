"""The FP32 run that everything is held against, under autograd: every value has a gradient of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..execution.execute import apart
from ..numerics.entries import is_plain
from ..numerics.kernels import is_product
from ..numerics.nodes import row_of, settled, target_of, tensors_of, viewed
from .derivatives import batch_norm, differentiated, takes_statistics

Back = Literal["trusted", "tried", "none"]
TRUSTED: Back = "trusted"
TRIED: Back = "tried"
NONE: Back = "none"


class Reference(fx.Interpreter):
    """Runs a graph whose inputs are leaves of an autograd graph.

    back: whether autograd's way back through an operation is trusted, tried as soon as it has run, or not taken.
    anchors: leaves behind results which depend on no float input. lost: nodes that an operation reads without a
    derivative. readings: {product: {value it reads: that value as this product alone reads it, or None if no other node
    does}}.
    """

    def __init__(self, graph_module: fx.GraphModule, back: Back = TRUSTED) -> None:
        super().__init__(graph_module)
        self.extra_traceback = False  # it rewrites what an operation raised
        self.back = back
        self.anchors: list[torch.Tensor] = []
        self.lost: set[fx.Node] = set()
        self.readings: dict[str, dict[str, torch.Tensor | None]] = {}

    def run_node(self, n: fx.Node) -> Any:
        """What the node computes, connected."""
        if n.op != "call_function":
            return super().run_node(n)
        return self._connected(apart(self._computed(n), [self.env[source] for source in n.all_input_nodes]))

    def _computed(self, n: fx.Node) -> Any:
        if self.back == NONE:
            self.lost |= set(n.all_input_nodes)
            with torch.no_grad():
                return settled(n.target, super().run_node(n))
        if row_of(n).packet == "detach":  # its value reaches the outputs, so its error must be attributed
            return torch.ops.aten.alias.default(self.env[n.all_input_nodes[0]])
        if takes_statistics(n.target):
            args, _ = self.fetch_args_kwargs_from_env(n)
            return batch_norm(target_of(n), *args)
        if not any(x.is_floating_point() or x.is_complex() for x in tensors_of(n.meta.get("val"))):
            with torch.no_grad():  # counting on a connected value has no derivative, and asking for one raises
                return settled(n.target, super().run_node(n))
        known = [leaf for source in n.all_input_nodes for leaf in tensors_of(self.env[source])]
        if is_product(target_of(n)) and all(map(is_plain, known)):
            return self._product(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result, lost = differentiated(target_of(n), args, kwargs, self.back == TRIED)
        if lost:
            leaves = {source: tensors_of(self.env[source]) for source in n.all_input_nodes}
            self.lost |= {source for source in leaves if any(x is y for x in leaves[source] for y in lost)}
        if row_of(n).steps:
            self.lost |= set(n.all_input_nodes)
        return result

    def _product(self, n: fx.Node) -> Any:
        """The product, reading shared values under names of their own: the gradient there is that of this reading."""
        values = {source: self.env[source] for source in n.all_input_nodes}
        if _told_apart(values):
            shared = {s: torch.ops.aten.alias.default(x) for s, x in values.items() if len(s.users) > 1}
            self.readings[n.name] = {source.name: shared.get(source) for source in values}
            self.env.update(shared)
        try:
            return super().run_node(n)
        finally:
            self.env.update(values)

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
