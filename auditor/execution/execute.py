"""Runs recorded graphs: as recorded, under a Policy, with some operations in low precision, or from earlier results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from heapq import heapify, heappop, heappush
from typing import Any

import torch
from torch import fx

from ..numerics.casting import carried_in, widen
from ..numerics.entries import entries, is_number, is_plain, over_tensors
from ..numerics.kernels import run_op
from ..numerics.nodes import arguments_with_defaults, target_of, tensors_in, wait_for_result
from ..records import Capture, Literals, Node

Observe = Callable[[fx.Node, Any], None]
ValueOf = Callable[[fx.Node], Any]


class Semantics:
    """Computes the nodes of a graph. This class computes as recorded; subclasses compute in other precisions."""

    def placeholder_value(self, n: fx.Node, value: Any) -> Any:
        """The value of a placeholder, from the caller's argument."""
        return value

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute an operation, or the graph's output. value_of: returns the result of an input node."""
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), value_of)
        return args[0] if n.op == "output" else wait_for_result(target_of(n), target_of(n)(*args, **kwargs))

    changed: Collection[str] = ()
    """Names of nodes that these semantics compute in another way than recorded."""

    def differing_nodes(self, then: Semantics) -> Collection[str]:
        """Names of nodes that compute differently under `then`, another run's semantics, even on equal inputs."""
        return self.changed

    def same(self, result: Any, other: Any) -> bool:
        """Whether two results have equal entries, shapes and dtypes; results without tensors count as different."""

        def equal(x: torch.Tensor, y: torch.Tensor) -> bool:
            if x.dtype != y.dtype or carried_in(x) is not carried_in(y) or not is_plain(x) or not is_plain(y):
                return False
            return x.shape == y.shape and torch.equal(entries(x), entries(y))

        ours, theirs = tensors_in(result), tensors_in(other)
        return bool(ours) and len(ours) == len(theirs) and all(map(equal, ours, theirs))


RECORDED = Semantics()


class SeparateResults(Semantics):
    """Computes as recorded, but returns each result as a separate tensor, with its own gradient."""

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute the node; if the result is one of its inputs, return a new tensor with the same value."""
        return separate_tensors(super().compute(n, value_of), [value_of(source) for source in n.all_input_nodes])


class SubsetLowPrecision(Semantics):
    """Computes some operations in a format and all other operations in FP32, for one run.

    inside: names of the operations that run in low precision. `round` rounds their inputs; `left` has their results,
    converted to FP32, for other operations. decisions: {operation: its result in another run}; the discrete values in it
    replace the operation's own. Raises: UnsupportedInFormat, or the exception of an operation, in `compute`.
    """

    def __init__(
        self,
        capture: Capture,
        inside: Collection[str],
        format: str,
        round: Callable[[Any], Any],
        decisions: Mapping[str, Any] | None = None,
    ) -> None:
        self._decisions = decisions or {}
        self._capture, self._format, self._round = capture, format, round
        self.changed = {name for name in inside if name not in self._decisions}
        self.left: dict[fx.Node, Any] = {}

    def compute(self, n: fx.Node, value_of: ValueOf) -> Any:
        """Compute the node, in the format if its name is in `inside`."""
        arrived = self.receive(n, value_of)
        if n.name in self._decisions:
            return hold_decisions(n, self._decisions[n.name], arrived)
        if n.name not in self.changed:
            return super().compute(n, arrived)
        literals = low_literals(self._capture.nodes[n.name], self._format)
        args, kwargs = fx.node.map_arg((n.args, n.kwargs), arrived)
        result = run_op(target_of(n), *with_literals(args, kwargs, literals))
        if any(user.name not in self.changed for user in n.users):
            self.left[n] = widen(result)
        return result

    def receive(self, n: fx.Node, value_of: ValueOf) -> ValueOf:
        """Return the function with which a node, or the output, reads the results of other nodes."""

        def inside(source: fx.Node) -> Any:
            return value_of(source) if source.name in self.changed else self._round(value_of(source))

        def outside(source: fx.Node) -> Any:
            return self.left[source] if source in self.left else value_of(source)

        return inside if n.name in self.changed else outside


def hold_decisions(n: fx.Node, decided: Any, value_of: ValueOf) -> Any:
    """Return an operation's result with another run's decisions: discrete and step-function results are from `decided`.

    Values that indices select are read from the current inputs at the other run's indices; other values are computed.
    """
    if isinstance(decided, torch.Tensor):
        return decided
    result = RECORDED.compute(n, value_of)
    dim = arguments_with_defaults(n).get("dim")
    indices = next((x for x in decided if not is_number(x)), None)
    if indices is not None and len(decided) == 2 and isinstance(dim, int):
        read = value_of(n.all_input_nodes[0])
        if indices.dim() == read.dim():
            picked = read.gather(dim, indices)
        else:  # the operation removes the dimension
            picked = read.gather(dim, indices.unsqueeze(dim)).squeeze(dim)
        result = (picked, indices)
    return tuple(now if is_number(then) else then for now, then in zip(result, decided, strict=True))


@dataclass(frozen=True)
class Replay:
    """Results of a run by node name, and the run's semantics. stale: nodes whose inputs changed after the run."""

    values: Mapping[str, Any]
    semantics: Semantics = RECORDED
    stale: frozenset[str] = frozenset()


class Executor(fx.Interpreter):
    """Runs a graph node by node, and calls observer(node, result) after each node.

    before: an earlier run on the same inputs. A node is computed again only if its semantics differ, its result is
    missing or stale, or one of its inputs changed; other results are reused. at: the current or last node.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        semantics: Semantics = RECORDED,
        observer: Observe | None = None,
        before: Replay | None = None,
    ) -> None:
        super().__init__(module)
        self.semantics, self.before = semantics, before
        self._observer = observer
        self.at: fx.Node | None = None

    def run(self, *inputs: Any) -> Any:  # type: ignore[override]
        """Run the graph and return its output."""
        result = None
        for n, result in self.steps(*inputs):
            if self._observer is not None:
                self._observer(n, result)
        return result

    def steps(self, *inputs: Any) -> Iterator[tuple[fx.Node, Any]]:
        """Run one node at a time and yield its result. A result is freed once its last reader has run."""
        self.env = dict[fx.Node, Any]()
        before = self.before or Replay({}, self.semantics)
        given = dict(zip(self.graph.find_nodes(op="placeholder"), inputs, strict=True))
        pending = self._nodes_to_run(before)
        heapify(pending)
        queued = {*pending}
        while pending:
            n = heappop(pending)
            self.at = n
            is_input = n.op == "placeholder"
            result = self.semantics.placeholder_value(n, given[n]) if is_input else self.run_node(n)
            is_same = n.name in before.values and self.semantics.same(result, before.values[n.name])
            if not is_same:
                self.env[n] = result
                for reader in n.users.keys() - queued:
                    heappush(pending, reader)
                    queued.add(reader)
            yield n, result
            for source in self.user_to_last_uses.get(n, ()):
                self.env.pop(source, None)

    def _nodes_to_run(self, before: Replay) -> list[fx.Node]:
        """The nodes that must run whatever their inputs: those without a result, those that changed, and the output."""
        names = self._by_name.keys()
        changed = {*before.stale, *self.semantics.differing_nodes(before.semantics)}
        due = {*(names - before.values.keys()), *(names & changed), self.graph.output_node().name}
        return [self._by_name[name] for name in due]

    @cached_property
    def _by_name(self) -> Mapping[str, fx.Node]:
        """{name: node} of the graph."""
        return {n.name: n for n in self.graph.nodes}

    def run_node(self, n: fx.Node) -> Any:
        """Compute the result of one node."""
        return super().run_node(n) if n.op == "get_attr" else self.semantics.compute(n, self.value_of)

    def value_of(self, n: fx.Node) -> Any:
        """A node's result in this run, or its earlier result if the node is not run again."""
        return self.env[n] if n in self.env or self.before is None else self.before.values[n.name]


def run_pairwise(low: Executor, reference: Executor, inputs: Sequence[Any]) -> Iterator[tuple[fx.Node, Any, Any]]:
    """Run two executors node by node on the same inputs; yield each operation with both results, freed after use."""
    for (n, result), (_, expected) in zip(low.steps(*inputs), reference.steps(*inputs), strict=True):
        if n.op == "call_function":
            yield n, result, expected


def separate_tensors(result: Any, inputs: Sequence[Any]) -> Any:
    """Copy a result that is one of the inputs, such as a cast to the same dtype: each node needs its own gradient."""
    own = {id(leaf) for value in inputs for leaf in tensors_in(value)}

    def another(x: torch.Tensor) -> torch.Tensor:
        if id(x) not in own:
            return x
        return torch.ops.aten.alias.default(x) if is_plain(x) else x.clone()  # sparse and nested tensors have no views

    return over_tensors(another, result)


def readers_of(capture: Capture) -> dict[str, tuple[str, ...]]:
    """{placeholder: paths of the modules whose operations read it}."""
    readers: dict[str, dict[str, None]] = {place.name: {} for place in capture.placeholders}
    for node in capture.nodes.values():
        for source in readers.keys() & set(node.inputs):
            readers[source][node.owner] = None
    return {name: tuple(owners) for name, owners in readers.items() if owners}


def low_literals(node: Node, format: str) -> Literals | None:
    """Constants that Python derives from a dtype, for an operation in the format; None without such constants.

    In a model stored in low precision, an operation that reads FP32 tables computes in FP32, and no constant is
    recorded for the format. An operation without a constant gets the constant that was recorded under autocast.
    """
    stored = node.literals.get(format)
    regional = node.autocast_literals.get(format)
    if regional is None:
        return stored
    numbers = {key: x for key, x in regional.arguments.items() if isinstance(x, (int, float))}
    if not numbers:
        return stored
    if stored is None:
        return Literals(arguments=numbers)
    return replace(stored, arguments={**numbers, **stored.arguments})


def with_literals(
    args: tuple[Any, ...], kwargs: dict[str, Any], literals: Literals | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Replace the arguments that depend on a dtype by the values in `literals`; returns (args, kwargs)."""
    if literals is None or not literals.arguments:
        return args, kwargs
    changed = literals.arguments
    positional = tuple(changed.get(index, value) for index, value in enumerate(args))
    return positional, {key: changed.get(key, value) for key, value in kwargs.items()}
