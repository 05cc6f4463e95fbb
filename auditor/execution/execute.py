"""The one who runs a graph: as it was recorded, under a policy, with some operations low, or begun from another run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..numerics.autocast import autocast_arguments
from ..numerics.carried import asked_for, carried_in, format_in, like
from ..numerics.casting import lowered, raised
from ..numerics.entries import entries, is_plain
from ..numerics.formats import FORMATS
from ..numerics.kernels import UnsupportedInFormat, run_op
from ..numerics.nodes import settled, target_of, tensors_of
from ..records import Capture, Literals, Node
from .running import Running

Observe = Callable[[fx.Node, Any], None]
ValueOf = Callable[[fx.Node], Any]


class Policy:
    """What a run computes in: FP32, as it was recorded, but for what other policies say otherwise."""

    def given(self, n: fx.Node, value: Any) -> Any:
        """What a placeholder gives for what the caller hands over."""
        return value

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What an operation, or the output, gives. value_of: what the nodes that it reads gave."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        return args[0] if n.op == "output" else in_fp32(target_of(n), args, kwargs)

    def differing(self, graph: fx.Graph, then: Policy) -> set[fx.Node]:
        """Nodes that compute something else than they did in a run under another policy, whatever they read."""
        return set()


RECORDED = Policy()


class Apart(Policy):
    """As recorded, each result a tensor of its own, with a gradient of its own."""

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node gives, where that is one of its inputs another tensor of the same value."""
        return apart(super().compute(n, value_of), [value_of(source) for source in n.all_input_nodes])


class Disturbed(Policy):
    """As recorded, but that some nodes give other values than they would, by name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def given(self, n: fx.Node, value: Any) -> Any:
        """What is handed over, or stands in its place."""
        return self.values.get(n.name, value)

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """The other value, or what the node computes."""
        return self.values[n.name] if n.name in self.values else super().compute(n, value_of)

    def differing(self, graph: fx.Graph, then: Policy) -> set[fx.Node]:
        """The nodes with other values."""
        return {n for n in graph.nodes if n.name in self.values}


class Under(Policy):
    """A choice of precisions: casts as autocast would and as the boundaries of scopes would.

    told: hears of every operation its node, its arguments as they reach it and as autocast hands them on, and what it
    computes. A run raises UnsupportedInFormat.
    """

    def __init__(
        self, capture: Capture, how: Running, told: Callable[[fx.Node, Any, Any, Any], None] | None = None
    ) -> None:
        self.capture, self.how, self._told = capture, how, told

    def given(self, n: fx.Node, value: Any) -> Any:
        """What is handed over, as it is stored."""
        precision = self.how.placeholder_precision.get(n.name)
        return value if precision is None else lowered(value, FORMATS[precision])

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node computes, in the dtype its scope and autocast give it."""
        if n.op == "output":
            return self._arrived(n, n.args, value_of)[0]
        try:
            return self._called(n, value_of)
        except UnsupportedInFormat as error:
            node = self.capture.nodes[n.name]
            where = f"{node.owner or 'the model'} ({node.source or node.op})"
            raise UnsupportedInFormat(f"{error} in {where}", node.owner) from error

    def _called(self, n: fx.Node, value_of: ValueOf) -> Any:
        node = self.capture.nodes[n.name]
        casts = self.how.casts(node)
        args, kwargs = self._arrived(n, (n.args, n.kwargs), value_of)
        arrived = args, kwargs = with_literals(args, kwargs, casts.literals)
        if casts.autocast != "none":
            args, kwargs = autocast_arguments(node.op, args, kwargs, FORMATS[casts.precision])
        result = run_op(target_of(n), args, kwargs)
        if node.in_place and isinstance(result, torch.Tensor) and format_in(result) is not None:
            result = like(result, tensors_of(args)[0])
        if self._told is not None:
            self._told(n, arrived, (args, kwargs), result)
        cast = asked_for(casts.literals.result)
        return result if cast is None else lowered(result, cast)

    def _arrived(self, n: fx.Node, arguments: Any, value_of: ValueOf) -> Any:
        """Arguments of a node as they reach it, once the wrapped modules on the way have converted them."""

        def arrived(source: fx.Node) -> Any:
            value = value_of(source)
            for precision in self.how.crossing(source.name, n.name):
                value = lowered(value, FORMATS[precision])
            return value

        return fx.node.map_arg(arguments, arrived)

    def differing(self, graph: fx.Graph, then: Policy) -> set[fx.Node]:
        """Nodes at which the two choices cast otherwise."""
        assert isinstance(then, Under)
        paths = self.how.wrapping.otherwise(then.how.wrapping) if self.how.wrapping else None
        touched = None
        if paths is not None:
            nodes = self.capture.nodes.items()
            touched = {name for name, n in nodes if any(call.path in paths for call in n.calls)}
        return {n for n in graph.nodes if not self._alike(n, then.how, touched)}

    def _alike(self, n: fx.Node, then: Running, touched: Collection[str] | None) -> bool:
        """Whether both do the same at a node. touched: operations where they may not; None where any may be one."""
        now = self.how
        if n.op == "placeholder":
            return then.placeholder_precision.get(n.name) == now.placeholder_precision.get(n.name)
        if n.op not in ("call_function", "output"):
            return True
        if touched is not None and not any(name in touched for name in (n.name, *(s.name for s in n.all_input_nodes))):
            return True
        if any(then.crossing(s.name, n.name) != now.crossing(s.name, n.name) for s in n.all_input_nodes):
            return False
        return n.op == "output" or self._casts(n, then) == self._casts(n, now)

    def _casts(self, n: fx.Node, how: Running) -> tuple[str, str, int]:
        """What a choice does at an operation, as far as it matters there."""
        casts = how.casts(self.capture.nodes[n.name])
        return casts.autocast, casts.precision if casts.autocast != "none" else "", id(casts.literals)


class SomeLow(Policy):
    """Some operations in a format, and all else in FP32; of one run.

    inside: names of the operations. What enters them passes `round`, what leaves them is raised, once: that is `left`. A run
    raises UnsupportedInFormat, and what an operation raises.
    """

    def __init__(self, capture: Capture, inside: Collection[str], format: str, round: Callable[[Any], Any]) -> None:
        self._capture, self._inside, self._format, self._round = capture, inside, format, round
        self.left: dict[fx.Node, Any] = {}

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """What the node gives, low if it is one of them."""
        arrived = self.arriving(n, value_of)
        if n.name not in self._inside:
            return super().compute(n, arrived)
        literals = low_literals(self._capture.nodes[n.name], self._format)
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), arrived)
        result = run_op(target_of(n), *with_literals(args, kwargs, literals))
        if any(user.name not in self._inside for user in n.users):
            self.left[n] = raised(result)
        return result

    def arriving(self, n: fx.Node, value_of: ValueOf) -> ValueOf:
        """How a node, or the output, sees the values of others."""

        def inside(source: fx.Node) -> Any:
            return value_of(source) if source.name in self._inside else self._round(value_of(source))

        def outside(source: fx.Node) -> Any:
            return self.left[source] if source in self.left else value_of(source)

        return inside if n.name in self._inside else outside

    def differing(self, graph: fx.Graph, then: Policy) -> set[fx.Node]:
        """The operations that are low."""
        return {n for n in graph.nodes if n.name in self._inside}


@dataclass(frozen=True)
class Run:
    """What the nodes of a run gave, by name, and what it ran under."""

    values: Mapping[str, Any]
    policy: Policy = RECORDED


class Executor(fx.Interpreter):
    """Runs a graph under a policy, node by node; observer(node, result) hears of each that is run.

    before: another run on the same inputs. A node is then run again only if the policies differ there, if what it gave is
    not known, or if something that it reads is no longer equal, bit for bit; the rest is taken from there.
    at: the node that is run, or was last.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        policy: Policy = RECORDED,
        observer: Observe | None = None,
        before: Run | None = None,
    ) -> None:
        super().__init__(module)
        self.policy, self._observer, self._before = policy, observer, before
        self.at: fx.Node | None = None

    def run(self, *inputs: Any) -> Any:  # type: ignore[override]
        """What the output gives."""
        result = None
        for n, result in self.steps(*inputs):
            if self._observer is not None:
                self._observer(n, result)
        return result

    def steps(self, *inputs: Any) -> Iterator[tuple[fx.Node, Any]]:
        """The run, a node at a time, with what it gives. What no other reads is forgotten when the next one is asked for."""
        self.env, self.args_iter = {}, iter(inputs)
        known: Mapping[str, Any] = self._before.values if self._before else {}
        differing = self.policy.differing(self.graph, self._before.policy) if self._before else set()
        for n in self.graph.nodes:
            alike = n not in differing and n.name in known
            if alike and n.op != "output" and self.env.keys().isdisjoint(n.all_input_nodes):
                if n.op == "placeholder":
                    next(self.args_iter)
                continue
            self.at = n
            result = self.run_node(n)
            if not (alike and is_same(result, known[n.name])):
                self.env[n] = result
            yield n, result
            for source in self.user_to_last_uses.get(n, ()):
                self.env.pop(source, None)

    def run_node(self, n: fx.Node) -> Any:
        """What one node gives."""
        if n.op in ("call_function", "output"):
            return self.policy.compute(n, self.value_of)
        result = super().run_node(n)
        return self.policy.given(n, result) if n.op == "placeholder" else result

    def value_of(self, n: fx.Node) -> Any:
        """What a node gave that another reads now."""
        if n in self.env or self._before is None:
            return self.env[n]
        return self._before.values[n.name]


def is_same(a: Any, b: Any) -> bool:
    """Whether two results have equal tensors; what else they may hold counts as different."""
    ours, theirs = tensors_of(a), tensors_of(b)
    return bool(ours) and len(ours) == len(theirs) and all(_equal(x, y) for x, y in zip(ours, theirs, strict=True))


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    if x.dtype != y.dtype or carried_in(x) is not carried_in(y) or not is_plain(x) or not is_plain(y):
        return False
    return x.shape == y.shape and torch.equal(entries(x), entries(y))


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
