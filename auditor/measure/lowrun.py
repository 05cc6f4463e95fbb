"""One format beside the reference: its values rounded on their way into an operation, and a run low from the start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import fx

from ..execution.execute import low_literals, with_literals
from ..numerics.casting import carried_in, lowered
from ..numerics.entries import extent
from ..numerics.formats import FORMATS
from ..numerics.kernels import run_op
from ..numerics.nodes import target_of, tensors_of
from ..raised import let_through
from ..records import Capture, Literals
from .rounded import rounder


class LowRun:
    """Goes along with the reference, node by node.

    values: reference results so far, by name; whoever runs the reference adds to them. env: results of the run that is
    low from the start. pure: whether every floating result of it is low, and comes
    of the run itself.
    """

    def __init__(self, capture: Capture, format: str, values: Mapping[str, Any]) -> None:
        self.name, self.row, self.round = format, FORMATS[format], rounder(capture, format)
        self.env: dict[fx.Node, Any] = {}
        self.pure = True
        self._nodes, self._values = capture.nodes, values
        self._rounded: dict[fx.Node, Any] = {}

    def literals(self, n: fx.Node) -> Literals | None:
        """What Python writes at the node in this format."""
        return low_literals(self._nodes[n.name], self.name)

    def rounded_inputs(self, n: fx.Node) -> tuple[Any, Any]:
        """The node's arguments, with reference values rounded to the format."""

        def rounded(source: fx.Node) -> Any:
            if source not in self._rounded:
                given = source.op != "call_function"
                self._rounded[source] = self._begun(source) if given else self.round(self._values[source.name])
            return self._rounded[source]

        args, kwargs = fx.node.map_arg((n.args, n.kwargs), rounded)
        return args, kwargs

    def advance(self, n: fx.Node) -> None:
        """The node in the run that is low from the start; where it cannot run, that run goes on from the reference."""
        reference = self._values[n.name]
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self._begun)
        args, kwargs = with_literals(args, kwargs, self.literals(n))
        try:
            result = run_op(target_of(n), args, kwargs)
        except Exception as error:
            let_through(error)
            result = None
        if result is None or not same_shapes(reference, result):
            result = lowered(reference, self.row)
            self.pure = False
        self.pure = self.pure and not any(
            x.dtype is torch.float32 and carried_in(x) is None for x in tensors_of(result)
        )
        self.env[n] = result

    def forget(self, nodes: Iterable[fx.Node]) -> None:
        """Nothing will read these any more."""
        for node in nodes:
            self.env.pop(node, None)
            self._rounded.pop(node, None)

    def _begun(self, source: fx.Node) -> Any:
        """A value of the run that is low from the start; weights and inputs are rounded when first read."""
        if source not in self.env:
            self.env[source] = lowered(self._values[source.name], self.row)
        return self.env[source]


def same_shapes(a: Any, b: Any) -> bool:
    """Whether the tensors of two results have the same shapes, and sparse ones as many entries."""
    ours, theirs = ([extent(x) for x in tensors_of(tree)] for tree in (a, b))
    return ours == theirs
