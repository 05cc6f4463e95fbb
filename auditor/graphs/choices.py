"""The choices for a plan over single operations: proposed by minimum cuts, run as the graph that the plan would be."""

from __future__ import annotations

import math
from collections.abc import Hashable
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
from ..plan.costs import costs_in, most_alive
from ..plan.mincut import HIGH, LOW, Arc, Cuts
from ..plan.modules import worst_of
from ..plan.search import Space
from ..plan.solve import VISITS
from ..plan.workbench import Workbench
from ..records import Batch, KeptOperation, Memory
from .exported import Exported, outlines
from .operations import Operation, Table, is_pick, low_arguments

COPIED = "copied"
"""Where a node's `meta` has the name of the one that it stands for; casts stand for none."""


def cuts_of(table: Table) -> Cuts:
    """The best choices of a table, as cuts: every operation is a node, those that may not be low are an end.

    For a value that is made FP32, a helper says whether some reader is low; for one that is made low, whether all are: so a
    cast is paid once, however many read it.
    """
    free, arcs = table.may_be_low(), list[Arc]()

    def node(operation: str | None) -> Hashable:
        return operation if operation in free else HIGH

    for each in table.operations.values():
        if each.name in free:
            arcs.append(Arc(each.name, HIGH, each.low, each.error))
        arcs.append(Arc(LOW, node(each.name), each.high))
    for value in table.values.values():
        maker, some, every = node(value.made_by), ("some", value.name), ("every", value.name)
        for reader in map(node, table.readers[value.name]):
            arcs += [Arc(reader, some, math.inf), Arc(every, reader, math.inf)]
        if value.returned:
            arcs.append(Arc(every, HIGH, math.inf))
        arcs.append(Arc(some, maker, 0.0 if value.stored else value.cast, value.error))
        arcs.append(Arc(some if value.stored else maker, every, value.cast))
    return Cuts(arcs, sum(each.low + each.high for each in table.operations.values()))


AGREES = 0.02
"""Share of the budget that the exported graph may be from the model in FP32: it may sum in another order."""


class OperationRefused(Exception):
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
        """Error of the outputs with these operations low, the worst batch's. Raises: OperationRefused where an operation raises."""
        module = lowered(self.exported, table, low)
        return worst_of([self._distance(module, batch) for batch in self.bench.subject.batches])

    def agrees(self, batch: Batch) -> bool:
        """Whether the graph in FP32 answers as the model does."""
        try:
            off = self._distance(self.exported.graph_module, batch)
        except OperationRefused:
            return False
        return off <= AGREES * self.bench.max_error or off <= self.bench.noise.found.error

    def _distance(self, module: fx.GraphModule, batch: Batch) -> float:
        """Error of one run; inf for one that gives outputs of another kind. Raises: OperationRefused."""
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
            raise OperationRefused(name, error) from error
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


class Operations(Space[Choice]):
    """Choices of operations that run low."""

    def __init__(self, table: Table, trial: Trial) -> None:
        super().__init__()
        self.table, self._trial = table, trial
        self.nothing = self._choice(frozenset())

        def worth(name: str) -> tuple[float, str]:
            each = table.operations[name]
            return (each.low - each.high) / max(each.error, 1e-30), name

        self._groups: list[frozenset[Hashable]] = [frozenset((name,)) for name in sorted(table.may_be_low(), key=worth)]
        self._cuts = cuts_of(table)

    def key(self, point: Choice) -> frozenset[str]:
        """What is low."""
        return point.low

    def replay(self, point: Choice) -> float:
        """Error of the graph with a choice low."""
        return self._trial.error(self.table, point.low)

    def proposed(self, allowed: float) -> Choice:
        """The cheapest choice that is predicted to have an error of at most `allowed`."""
        free = self.table.may_be_low()
        tries = VISITS // len(self.table.operations)
        return self._cuts.cheapest(lambda high: self._choice(free.difference(high)), allowed, self._groups, tries)

    def _choice(self, low: frozenset[str]) -> Choice:
        price, square = self.table.price(low)
        return Choice(low, price, math.sqrt(square))


def kept_of(space: Operations, choice: Choice, budget: float) -> tuple[KeptOperation, ...]:
    """Every operation that reads FP32 values and does not run low, with the reason.

    budget: what the choice may take.
    """
    return tuple(
        KeptOperation(each.name, each.op, *_reason(space, choice, budget, each), each.captured)
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
    return "budget", "no choice on the curve of cuts with it low holds the budget"


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
