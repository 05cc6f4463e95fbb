"""Running a captured graph under a precision policy: every node in the dtype it would really have on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ..formats.carried import asked_for, format_in, like
from ..formats.table import FORMATS, format_of
from ..ops.autocast import autocast_arguments
from ..ops.casting import lowered
from ..ops.kernels import UnsupportedInFormat, run_op
from ..ops.nodes import target_of, tensors_of
from ..records import AutocastRegion, Capture, Literals


@dataclass(frozen=True)
class Setting:
    """Precision of the scope a node belongs to. autocast: whether the node sits in an enabled autocast region.

    wins: the scope is entered inside the region that the author put the node in, and sets autocast anew.
    """

    precision: str
    autocast: bool
    wins: bool = False

    def in_region(self, region: AutocastRegion | None) -> Setting:
        """What holds for a node in a region of the author's own: the region, unless the scope is entered inside it."""
        if region is None or self.wins:
            return self
        named = format_of(getattr(torch, region.dtype))
        return Setting(self.precision if named is None else named.name, autocast=region.enabled)


Crossing = Callable[[str, str], tuple[str, ...]]
"""Precisions that a value is converted to, one after the other, on its way from a node to one that reads it."""


def straight(source: str, reader: str) -> tuple[str, ...]:
    """No module is wrapped: values reach their readers as they are."""
    return ()


@dataclass(frozen=True)
class Running:
    """How a capture runs. setting: what each node's scope asks for; the author's own regions win over it.

    crossing: what the scopes on the way convert. placeholder_precision: what weights and inputs are stored in, where that
    is not FP32. literals: what Python writes otherwise then, {node: Literals}.
    """

    setting: Callable[[str], Setting]
    crossing: Crossing = straight
    placeholder_precision: Mapping[str, str] = field(default_factory=dict)
    literals: Mapping[str, Literals] = field(default_factory=dict)


FULL = Running(lambda name: Setting("fp32", autocast=False))
"""Everything in FP32."""


class PolicyInterpreter(fx.Interpreter):
    """Runs a capture node by node, casting as autocast would and as the boundaries of scopes would.

    observe(node, output) sees every result. Raises UnsupportedInFormat.
    """

    def __init__(self, capture: Capture, how: Running, observe: Callable[[fx.Node, Any], None] | None = None) -> None:
        super().__init__(capture.graph_module)
        self._capture, self._how, self._observe = capture, how, observe

    def run_node(self, n: fx.Node) -> Any:
        """Result of one node, in the dtype its scope and autocast give it."""
        if n.op == "placeholder":
            value = super().run_node(n)
            precision = self._how.placeholder_precision.get(n.name)
            result = value if precision is None else lowered(value, FORMATS[precision])
        elif n.op == "call_function":
            try:
                result = self._call(n)
            except UnsupportedInFormat as error:
                node = self._capture.nodes[n.name]
                where = f"{node.owner or 'the model'} ({node.source or node.op})"
                raise UnsupportedInFormat(f"{error} in {where}") from error
        elif n.op == "output":
            result = self._arrived(n, n.args)[0]
        else:
            result = super().run_node(n)
        if self._observe is not None:
            self._observe(n, result)
        return result

    def _call(self, n: fx.Node) -> Any:
        args, kwargs = self._arrived(n, n.args), self._arrived(n, n.kwargs)
        setting = self._how.setting(n.name)
        if setting.precision != "fp32":  # in an FP32 scope, Python looks at FP32 tensors
            args, kwargs = with_literals(args, kwargs, self._how.literals.get(n.name))
        node = self._capture.nodes[n.name]
        setting = setting.in_region(node.region)
        if setting.autocast and not node.in_place:
            args, kwargs = autocast_arguments(node.op, args, kwargs, FORMATS[setting.precision])
        result = run_op(target_of(n), args, kwargs)
        if node.in_place and isinstance(result, torch.Tensor) and format_in(result) is not None:
            result = like(result, tensors_of(args)[0])
        literals = self._how.literals.get(n.name)
        cast = None if literals is None or setting.precision == "fp32" else asked_for(literals.result)
        return result if cast is None else lowered(result, cast)

    def _arrived(self, n: fx.Node, arguments: Any) -> Any:
        """Arguments of a node as they reach it, once the wrapped modules on the way have converted them."""

        def arrived(source: fx.Node) -> Any:
            value = self.env[source]
            for precision in self._how.crossing(source.name, n.name):
                value = lowered(value, FORMATS[precision])
            return value

        return fx.node.map_arg(arguments, arrived)


def with_literals(
    args: tuple[Any, ...], kwargs: dict[str, Any], literals: Literals | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with dtype-derived literals replaced."""
    if literals is None or not literals.arguments:
        return args, kwargs
    changed = literals.arguments
    positional = tuple(changed.get(index, value) for index, value in enumerate(args))
    return positional, {key: changed.get(key, value) for key, value in kwargs.items()}
