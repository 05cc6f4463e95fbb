"""The tape run as it never ran: all in FP32, under a policy, or with some operations low."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..formats.carried import asked_for, format_in, like
from ..formats.entries import is_plain
from ..formats.table import FORMATS
from ..ops.autocast import autocast_arguments
from ..ops.casting import lowered, raised
from ..ops.kernels import UnsupportedInFormat, run_op
from ..ops.nodes import settled, target_of, tensors_of
from ..records import Capture, Literals, Node
from .running import Running

Observe = Callable[[fx.Node, Any], None]


class Replay(fx.Interpreter):
    """Runs a capture in FP32, node by node; observe(node, output) sees every result. keep: values outlive their readers."""

    def __init__(self, capture: Capture, observe: Observe | None = None, *, keep: bool = False) -> None:
        super().__init__(capture.graph_module, garbage_collect_values=not keep)
        self.extra_traceback = False  # it rewrites what an operation raised
        self.capture, self._observe = capture, observe

    def run_node(self, n: fx.Node) -> Any:
        """Result of one node."""
        result = self.result_of(n)
        if self._observe is not None:
            self._observe(n, result)
        return result

    def result_of(self, n: fx.Node) -> Any:
        """What the node computes; a subclass says otherwise."""
        if n.op != "call_function":
            return super().run_node(n)
        return in_fp32(target_of(n), *self.fetch_args_kwargs_from_env(n))


class PolicyInterpreter(Replay):
    """Runs a capture under a choice of precisions, casting as autocast would and as the boundaries of scopes would.

    Raises UnsupportedInFormat.
    """

    def __init__(self, capture: Capture, how: Running, observe: Observe | None = None) -> None:
        super().__init__(capture, observe)
        self._how = how

    def result_of(self, n: fx.Node) -> Any:
        """What the node computes, in the dtype its scope and autocast give it."""
        if n.op == "placeholder":
            value = super().result_of(n)
            precision = self._how.placeholder_precision.get(n.name)
            return value if precision is None else lowered(value, FORMATS[precision])
        if n.op == "output":
            return self._arrived(n, n.args)[0]
        if n.op != "call_function":
            return super().result_of(n)
        try:
            return self._called(n)
        except UnsupportedInFormat as error:
            node = self.capture.nodes[n.name]
            where = f"{node.owner or 'the model'} ({node.source or node.op})"
            raise UnsupportedInFormat(f"{error} in {where}", node.owner) from error

    def _called(self, n: fx.Node) -> Any:
        node = self.capture.nodes[n.name]
        casts = self._how.casts(node)
        arrived = args, kwargs = with_literals(self._arrived(n, n.args), self._arrived(n, n.kwargs), casts.literals)
        if casts.autocast != "none":
            args, kwargs = autocast_arguments(node.op, args, kwargs, FORMATS[casts.precision])
        result = run_op(target_of(n), args, kwargs)
        if node.in_place and isinstance(result, torch.Tensor) and format_in(result) is not None:
            result = like(result, tensors_of(args)[0])
        self.ran(n, arrived, (args, kwargs), result)
        cast = asked_for(casts.literals.result)
        return result if cast is None else lowered(result, cast)

    def ran(self, n: fx.Node, arrived: Any, handed: Any, result: Any) -> None:
        """Told of every operation. arrived: its arguments as they reach it; handed: as autocast hands them on."""

    def _arrived(self, n: fx.Node, arguments: Any) -> Any:
        """Arguments of a node as they reach it, once the wrapped modules on the way have converted them."""

        def arrived(source: fx.Node) -> Any:
            value = self.env[source]
            for precision in self._how.crossing(source.name, n.name):
                value = lowered(value, FORMATS[precision])
            return value

        return fx.node.map_arg(arguments, arrived)


class PartlyLow(Replay):
    """Runs some operations of a capture in a format, and all else in FP32.

    inside: names of the operations. What enters them passes `round`, what leaves them is raised, once. Raises
    UnsupportedInFormat, and what an operation raises.
    """

    def __init__(
        self,
        capture: Capture,
        inside: Collection[str],
        format: str,
        round: Callable[[Any], Any],
        observe: Observe | None = None,
    ) -> None:
        super().__init__(capture, observe)
        self._inside, self._format, self._round = inside, format, round
        self._left: dict[fx.Node, Any] = {}

    def result_of(self, n: fx.Node) -> Any:
        """Result of one node, low if it is one of them."""
        if n.op not in ("call_function", "output"):
            return super().result_of(n)
        low = n.name in self._inside
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), self.reading(n))
        if n.op == "output":
            return args[0]
        if not low:
            return in_fp32(target_of(n), args, kwargs)
        literals = low_literals(self.capture.nodes[n.name], self._format)
        result = run_op(target_of(n), *with_literals(args, kwargs, literals))
        if any(user.name not in self._inside for user in n.users):
            self._left[n] = raised(result)
        return result

    def reading(self, n: fx.Node) -> Callable[[fx.Node], Any]:
        """How a node, or the output, sees the value of another."""
        return self._read_inside if n.name in self._inside else self._read_outside

    def _read_inside(self, source: fx.Node) -> Any:
        return self.env[source] if source.name in self._inside else self._round(self.env[source])

    def _read_outside(self, source: fx.Node) -> Any:
        return self._left[source] if source in self._left else self.env[source]


def in_fp32(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The operation as it was recorded."""
    return settled(target, target(*args, **kwargs))


def apart(result: Any, inputs: Sequence[Any]) -> Any:
    """An operation may return its own input (a cast that changes nothing): each node has a gradient of its own."""
    own = {id(leaf) for value in inputs for leaf in tensors_of(value)}
    return pytree.tree_map_only(torch.Tensor, lambda x: _another(x) if id(x) in own else x, result)


def _another(x: torch.Tensor) -> torch.Tensor:
    """The same value as another tensor; sparse and nested ones know no views."""
    return torch.ops.aten.alias.default(x) if is_plain(x) else x.clone()


def low_literals(node: Node, format: str) -> Literals | None:
    """What Python writes at an operation that runs in the format, in whichever run of the model that is.

    A model that is stored low may compute it in FP32 all the same, tables in FP32 being among what it reads: then the
    number that it writes there says nothing, and the one that it writes under autocast does.
    """
    stored, regional = node.literals.get(format), node.autocast_literals.get(format)
    numbers = {key: x for key, x in regional.arguments.items() if isinstance(x, (int, float))} if regional else {}
    if not numbers:
        return stored
    return replace(stored or Literals(), arguments=numbers | dict(stored.arguments if stored else {}))


def with_literals(
    args: tuple[Any, ...], kwargs: dict[str, Any], literals: Literals | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with dtype-derived literals replaced."""
    if literals is None or not literals.arguments:
        return args, kwargs
    changed = literals.arguments
    positional = tuple(changed.get(index, value) for index, value in enumerate(args))
    return positional, {key: changed.get(key, value) for key, value in kwargs.items()}
