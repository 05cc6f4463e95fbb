"""The choices for a plan over single operations: proposed by minimum cuts, run as the graph that the plan would be."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..capture.emulation import as_on
from ..errors import MeasureError, let_through
from ..execution.execute import Executor
from ..isolation.answer import from_the_start
from ..isolation.outputs import NamedTensors, tensor_outputs
from ..numerics.formats import dtype_of
from ..numerics.nodes import tensors_of
from ..plan import mincut
from ..plan.costs import costs_in, most_alive
from ..plan.modules import worst_of
from ..plan.workbench import Workbench
from ..records import Batch, Kept, Memory
from .exported import Exported, outlines
from .operations import Operation, Table, Value, is_pick, low_arguments

_LOW, _HIGH = ("low",), ("fp32",)
"""The ends of a network: no names of operations."""

COPIED = "copied"
"""Where a node's `meta` has the name of the one that it stands for; casts stand for none."""

STEPS = 24
"""Halvings of the range of multipliers, in which lies the last one whose prediction is within what is allowed."""

Arc = tuple[Hashable, Hashable, float, float]
"""(tail, head, price, squared error) that it costs to have the tail low and the head FP32."""


class Network:
    """The best choices of a table, as cuts: every operation is a node, those that may not be low are an end.

    For a value that is made FP32, a helper says whether some reader is low; for one that is made low, whether all are: so a
    cast is paid once, however many read it, the energy is one of pairs that only penalise unequal labels, and its minimum a cut.
    Source: Kolmogorov and Zabih, What energy functions can be minimized via graph cuts? (2004).
    """

    def __init__(self, table: Table) -> None:
        self._free = table.may_be_low()
        operations = (arc for each in table.operations.values() for arc in self._of(each))
        casts = (arc for each in table.values.values() for arc in self._between(each, table.readers[each.name]))
        self._arcs = [*operations, *casts]
        self._network = mincut.Network([(tail, head) for tail, head, *_ in self._arcs], _LOW, _HIGH)
        self._unit = sum(each.low + each.high for each in table.operations.values()) or 1.0

    def low(self, multiplier: float) -> frozenset[str]:
        """The operations that are low at the minimum of price + multiplier * squared error; of equal minima, the most."""
        costs = ((price + multiplier * error) / self._unit for *_, price, error in self._arcs)
        high = self._network.sink_side([round(min(cost, 1e9) * 1e18) for cost in costs])
        return self._free - high

    def multipliers(self) -> tuple[float, float]:
        """One so small that errors do not matter, and one so large that the price does not."""
        arcs = [arc for arc in self._arcs if math.isfinite(arc[2])]
        prices, errors = sum(price for *_, price, _ in arcs), [error for *_, error in arcs if error > 1e-30]
        return (prices / sum(errors) * 1e-6, prices / min(errors)) if errors and prices else (1.0, 1.0)

    def _of(self, operation: Operation) -> Iterator[Arc]:
        """What one operation takes, low and in FP32."""
        node = self._node(operation.name)
        if node != _HIGH:
            yield node, _HIGH, operation.low, operation.error
        yield _LOW, node, operation.high, 0.0

    def _between(self, value: Value, reading: Sequence[str]) -> Iterator[Arc]:
        """The casts of one value."""
        maker, some, every = self._node(value.made_by), ("some", value.name), ("every", value.name)
        for reader in map(self._node, reading):
            yield reader, some, math.inf, 0.0
            yield every, reader, math.inf, 0.0
        if value.returned:
            yield every, _HIGH, math.inf, 0.0
        yield some, maker, 0.0 if value.stored else value.cast, value.error
        yield some if value.stored else maker, every, value.cast, 0.0

    def _node(self, operation: str | None) -> Hashable:
        return operation if operation in self._free else _HIGH


AGREES = 0.02
"""Share of the budget that the exported graph may be from the model in FP32: it may sum in another order."""


class Refused(Exception):
    """An operation raised in a run; name: which."""

    def __init__(self, name: str, said: BaseException) -> None:
        super().__init__(str(said))
        self.name, self.said = name, said


@dataclass(frozen=True)
class Trial:
    """Runs of one exported model on the batches of a bench."""

    exported: Exported
    bench: Workbench

    def error(self, table: Table, low: frozenset[str]) -> float:
        """Error of the outputs with these operations low, the worst batch's. Raises: Refused where an operation raises."""
        module = lowered(self.exported, table, low)
        return worst_of([self._distance(module, batch) for batch in self.bench.subject.batches])

    def agrees(self, batch: Batch) -> bool:
        """Whether the graph in FP32 answers as the model does."""
        try:
            off = self._distance(self.exported.graph_module, batch)
        except Refused:
            return False
        return off <= AGREES * self.bench.max_error or off <= self.bench.noise.found.error

    def _distance(self, module: fx.GraphModule, batch: Batch) -> float:
        """Error of one run; inf for one that gives outputs of another kind. Raises: Refused."""
        args, kwargs = batch
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in self.exported.audited[1]}))
        executor = Executor(module)

        def run() -> NamedTensors:
            with as_on(self.bench.options.where, self.bench.most):
                return tensor_outputs(executor.run(*leaves))

        try:
            outputs = from_the_start(module, batch, run, self.bench.options.seed)
        except Exception as error:
            let_through(error)
            name = executor.at.meta.get(COPIED, executor.at.name) if executor.at else ""
            raise Refused(name, error) from error
        try:
            return self.bench.yardstick.distance(self.bench.reference(batch), outputs)
        except MeasureError:
            return math.inf


@dataclass(frozen=True)
class Choice:
    """Which operations run low. price: as the objective has it."""

    low: frozenset[str]
    price: float
    predicted_error: float


class Operations:
    """Choices of operations that run low, and what runs of them came to. log: {what was low: error}, inf where it does not run."""

    def __init__(self, table: Table, trial: Trial) -> None:
        self.table, self._trial = table, trial
        self.network = Network(table)
        self.log: dict[frozenset[str], float] = {}
        self._rejected: set[frozenset[str]] = set()
        self.nothing = self._choice(frozenset())

    def error(self, point: Choice) -> float:
        """Error of the graph with a choice low."""
        if point.low not in self.log:
            try:
                self.log[point.low] = self._trial.error(self.table, point.low)
            except Refused:
                self.log[point.low] = math.inf
        return math.inf if point.low in self._rejected else self.log[point.low]

    def holding(self) -> list[Choice]:
        """Nothing is known before any run."""
        return []

    def reject(self, point: Choice) -> None:
        """Note that the artefact of a choice did not hold."""
        self._rejected.add(point.low)

    def proposed(self, allowed: float) -> Choice:
        """The cheapest choice that is predicted to have an error of at most `allowed`: a cut, and of what the next cut lowers as
        well as much as is, that first which saves most for its error."""
        fails, best = self._bracketed(allowed)
        holds, operations = best.low, self.table.operations

        def worth(name: str) -> tuple[float, str]:
            each = operations[name]
            return (each.low - each.high) / max(each.error, 1e-30), name

        pending = sorted(fails.low - holds, key=worth)
        first, last = 0, len(pending)
        while first < last:
            middle = (first + last + 1) // 2
            point = self._choice(holds.union(pending[:middle]))
            if point.predicted_error <= allowed:
                first, best = middle, min(best, point, key=lambda each: each.price)
            else:
                last = middle - 1
        return best

    def _bracketed(self, allowed: float) -> tuple[Choice, Choice]:
        """Neighbouring cuts: the one predicted to break what is allowed, and the one predicted to hold it."""
        least, most = self.network.multipliers()
        fails, holds = self._choice(self.network.low(least)), self.nothing
        if fails.predicted_error <= allowed:
            return fails, fails
        for _ in range(STEPS):
            if fails.low == holds.low:
                break
            middle = math.sqrt(least * most)
            found = self._choice(self.network.low(middle))
            if found.predicted_error <= allowed:
                most, holds = middle, found
            else:
                least, fails = middle, found
        return fails, holds

    def _choice(self, low: frozenset[str]) -> Choice:
        price, square = self.table.price(low)
        return Choice(low, price, math.sqrt(square))


def kept_of(space: Operations, choice: Choice, budget: float) -> tuple[Kept, ...]:
    """Every operation that reads FP32 values and does not run low, with the reason, from the log of what was run.

    budget: what the choice may take.
    """
    return tuple(
        Kept(each.name, each.op, *_reason(space, choice, budget, each), each.captured)
        for each in space.table.operations.values()
        if each.name not in choice.low
    )


def _reason(space: Operations, choice: Choice, budget: float, operation: Operation) -> tuple[str, str]:
    """Why an operation is FP32: in one word, and in a clause."""
    if operation.kind:
        return operation.kind, operation.kept
    name, before = operation.name, choice.predicted_error
    (now, had), (then, has) = (space.table.price(low, name) for low in (choice.low, choice.low | {name}))
    if then >= now:
        return "no-gain", "lowering it alone saves nothing: what it takes is no less than the casts around it"
    after = math.sqrt(max(before**2 + has - had, 0.0))
    if after > budget:
        return "budget", f"low as well, it takes the predicted error from {before:.2g} to {after:.2g}"
    broke = [low for low, error in space.log.items() if name in low and not error <= budget]
    if not broke:
        return "budget", "no choice on the curve of cuts with it low holds the budget"
    least = min(broke, key=lambda low: (len(low), sorted(low)))
    off = f"is off by {space.log[least]:.2g}" if math.isfinite(space.log[least]) else "gives what is not finite"
    others = len(least) - 1
    beside = f" and {others} other{'s' * (others != 1)}" if others else ""
    return "budget", f"run with it{beside} low, the graph {off}"


def lowered(exported: Exported, table: Table, low: frozenset[str]) -> fx.GraphModule:
    """The exported model with these operations low; it shares with it the weights that stay FP32.

    Inputs and outputs are FP32: their casts are in the graph. Weights that nothing reads in FP32 are converted for good.
    """
    source, dtype, graph = exported.graph_module.graph, dtype_of(table.format), fx.Graph()
    kinds = {node: dtype if _is_low(node, table, low) else torch.float32 for node in source.nodes}
    copies: dict[fx.Node, fx.Node] = {}
    casts: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}

    def read(given: fx.Node, wanted: torch.dtype | None) -> fx.Node:
        """The copy of a value, cast to what is wanted where that differs."""
        copy = copies[given]
        if given.name not in table.values or wanted is None or kinds[given] is wanted:
            return copy
        if (given, wanted) not in casts:
            cast = casts[given, wanted] = graph.call_function(torch.ops.aten.to.dtype, (copy, wanted))
            cast.meta = {key: x for key, x in copy.meta.items() if key == "nn_module_stack"}
            cast.meta["val"] = copy.meta["val"].to(wanted)
        return casts[given, wanted]

    for node in source.nodes:
        args, kwargs = node.args, node.kwargs
        wanted: torch.dtype | None = torch.float32
        if node.name in low:
            args, kwargs = low_arguments(node, dtype, table.operations[node.name].literals)
            wanted = dtype
        elif node.op != "output" and node.name not in table.operations:
            wanted = None  # as picking one of several takes them as they are
        args, kwargs = fx.node.map_arg((args, kwargs), partial(read, wanted=wanted))
        copy = copies[node] = graph.create_node(node.op, node.target, args, kwargs, node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        copy.meta |= {COPIED: node.name, "val": outlines(node.meta.get("val"), kinds[node])}
    graph._codegen = source._codegen
    graph.lint()
    module = fx.GraphModule(exported.graph_module, graph)
    for node in source.nodes:
        if node.op == "get_attr" and kinds[node] is dtype:
            path, _, name = str(node.target).rpartition(".")
            tensor = attrgetter(str(node.target))(module)
            small = tensor.detach().to(dtype)
            stored = nn.Parameter(small, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else small
            setattr(module.get_submodule(path), name, stored)
    return module


def _is_low(node: fx.Node, table: Table, low: frozenset[str]) -> bool:
    """Whether a node gives low values instead of FP32, a weight because all that read it do so low."""
    value = table.values.get(node.name)
    if value is not None and value.stored:
        return bool(node.users) and all(user.name in low for user in node.users)
    return node.name in low or (value is not None and value.made_by in low)


def memory_needed(module: fx.GraphModule) -> Memory:
    """Bytes of a forward of a lowered graph: its weights as they are stored, and the values alive at once.

    Freed, and views, as for every other plan.
    """
    nodes = list(module.graph.nodes)
    size = {node.name: sum(x.nbytes for x in tensors_of(node.meta.get("val"))) for node in nodes}
    free = {name for name, cost in costs_in(module.graph).items() if cost.free}
    free |= {node.name for node in nodes if node.op == "call_function" and is_pick(node)}
    inputs = {node.name for node in nodes if node.op == "placeholder"}
    held = [attrgetter(str(node.target))(module) for node in nodes if node.op == "get_attr"]
    weights = {id(x): x.nbytes for x in held if isinstance(x, torch.Tensor)}
    return Memory(sum(weights.values()), most_alive(nodes, size, free, inputs))
