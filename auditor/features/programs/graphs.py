"""Plans for exported graphs: minimum cuts propose sets of operations to lower, runs of the graph select a set, and a
fresh process verifies and scores the saved program."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ...artefact.strategies import GRAPHS
from ...emulation.emulate import emulate_unless_native
from ...errors import MeasureError, PlanError, first_line, let_through
from ...execution.execute import Executor
from ...execution.policy import Policy, plain
from ...execution.resolve import resolve
from ...isolation.outputs import NamedTensors, tensor_outputs
from ...isolation.run_model import from_the_start
from ...numerics.casting import widen
from ...numerics.formats import dtype_of, runs
from ...numerics.fp32_output import multiply
from ...numerics.nodes import operation_of, tensors_in
from ...plan.context import PlanningContext, worst_of
from ...plan.costs import costs_of, memory_of, most_alive
from ...plan.made import MadePlans
from ...plan.search import HIGH, LOW, MARGIN, Arc, Candidate, Choice, Cuts, Space, choose, find_verified
from ...plan.verified import judge_replay, verify
from ...records import Batch, KeptOperation, MemoryUse, Plan, Program, ScopeChoice, Verification
from ...records.paths import FP32_OUTPUT
from ...stages import tick
from ...verify.loaders import PROGRAM
from .exported import ExportedModel, SavedProgram, export_error, export_model, outlines, save_program
from .operations import Table, low_arguments, table_of

COPIED = "copied"
"""Key in a node's `meta` for the original node's name; inserted casts lack this key."""


def graphs_of(planning: PlanningContext) -> MadePlans:
    """Make a plan of strategy `graph` for every format that torch computes in, verified on held-out inputs if any.

    If the model cannot be exported, a warning says so, and plans of other strategies remain. Raises:
    PlanError(slug="cannot-export") if no other strategy was requested.
    """
    subject = planning.subject
    try:
        tick("exporting the model")
        trial = Trial(export_model(subject.model, subject.batches[0]), planning)
        if not trial.agrees(subject.batches[0]):
            raise export_error("the exported graph does not reproduce the model's outputs")
        batches, held_out = (tuple(filter(trial.agrees, some)) for some in (subject.batches, subject.held_out))
        if len(batches) + len(held_out) < len(subject.batches) + len(subject.held_out):
            agreeing = replace(subject, batches=batches, held_out=held_out)
            trial = replace(trial, planning=replace(planning, subject=agreeing))
        return _make_plans(trial)
    except PlanError as error:
        if error.slug != "cannot-export" or not planning.options.scope_strategies:
            raise
        return MadePlans(warnings=(f"There is no plan of strategy {GRAPHS[0]}: {error}",))


def _make_plans(trial: Trial) -> MadePlans:
    """Find, build and verify a plan of an exported program in each format."""
    planning = trial.planning
    baselines = dict[str, Verification]()
    spaces = dict[str, Operations]()
    files = dict[str, bytes]()
    for format in filter(runs, planning.options.formats):
        name = f"{GRAPHS[0]}_{format}"
        everything = table_of(trial.exported.graph_module.graph, format, planning)
        table, baselines[name] = _all_low(trial, everything)
        spaces[name] = Operations(table, trial)

    def make(limits: Mapping[str, float]) -> dict[str, Candidate]:
        candidates = dict[str, Candidate]()
        for name, limit in limits.items():
            tick(name.replace("_", " "))
            space = spaces[name]
            candidates[name] = space.propose(limit) if planning.options.quick else choose(space, limit)
        return candidates

    def run(chosen: Mapping[str, Candidate]) -> dict[str, Plan]:
        built = dict[str, Plan]()
        for name, choice in chosen.items():
            built[name], files[f"{name}{PROGRAM}"] = _build_plan(name, spaces[name], choice)
        return verify(planning, built, files)

    plans = find_verified(spaces, planning.max_error, make, run)
    return MadePlans(plans, baselines, files)


def _all_low(trial: Trial, table: Table) -> tuple[Table, Verification]:
    """Run all operations in low precision. Return the table, with operations that raise as `refused`, and the error."""
    low = frozenset(name for name, operation in table.operations.items() if operation.kind != "refused")
    while True:
        try:
            error = trial.error(table, low)
            # The plan of modules that is nearest to the program, in which Inf or NaN can be located.
            policy = Policy(trial.planning.capture, "cast", plain(table.format), table.format)
            return table, judge_replay(trial.planning, error, policy)
        except OperationRefused as refused:
            name = refused.name
            if name not in low:
                return table, Verification(None, failure=first_line(refused.error))
            if name in table.free:
                kept = f"raises in low precision: {refused}"[:200]
                changed = {n: replace(table.operations[n], kind="refused", kept=kept) for n in table.whole(name)}
                table = replace(table, operations={**table.operations, **changed})
            low -= table.whole(name)


def _build_plan(name: str, space: Operations, choice: Candidate) -> tuple[Plan, bytes]:
    """The plan of a choice of precisions, and its program."""
    planning = space.trial.planning
    table = space.table
    low = table.free - choice.high
    module = lower_operations(space.trial.exported, table, low)
    saved = save_program(module, space.trial.exported)
    all_fp32 = resolve(Policy.wide(planning.capture))
    plan = Plan(
        name=name,
        strategy=GRAPHS[0],
        format=table.format,
        scopes={"": ScopeChoice(table.format if low else "fp32")},
        predicted_error=choice.predicted_error,
        low_precision_flops=table.low_flops(low),
        predicted_speedup=_predict_speedup(space, low),
        objective=planning.options.objective,
        target=planning.options.gpu_spec,
        program=_describe_program(name, space, low, saved),
        memory=memory_needed(module),
        fp32_memory=memory_of(planning.capture, planning.costs, all_fp32, table.format),
    )
    return plan, saved.content


def _predict_speedup(space: Operations, low: frozenset[str]) -> float:
    """Predicted time in FP32 divided by the time with the operations `low` in low precision."""
    planning = space.trial.planning
    timed = space.table
    if planning.options.objective != "time":  # the table's costs are not times
        options = planning.options.model_copy(update={"objective": "time"})
        graph = space.trial.exported.graph_module.graph
        timed = table_of(graph, space.table.format, replace(planning, options=options))
    seconds, _ = timed.price(low)
    fp32_seconds, _ = timed.price(frozenset())
    return fp32_seconds / seconds if seconds else 1.0


def _describe_program(name: str, space: Operations, low: frozenset[str], saved: SavedProgram) -> Program:
    """The plan's record of a saved program with the operations `low` in low precision."""
    table = space.table
    operations = [operation for operation in table.operations if not operation.endswith(FP32_OUTPUT)]
    entirely_low = [operation for operation in operations if table.whole(operation) <= low]
    return Program(
        file=f"{name}{PROGRAM}",
        operations=len(operations),
        low=len(entirely_low),
        casts=saved.casts,
        kept=kept_of(table, low, MARGIN * space.trial.planning.max_error),
        fixed=saved.fixed or None,
    )


def cuts_of(table: Table) -> Cuts:
    """The minimum-cut problem of a table: every operation is a node; operations that must stay FP32 are the sink.

    Two helper nodes per value, for whether any and whether all readers are in low precision, let each cast count once.
    """
    arcs = list[Arc]()

    def node(operation: str | None) -> Hashable:
        return operation if operation in table.free else HIGH

    for each in table.operations.values():
        if each.name in table.free:
            arcs.append(Arc(each.name, HIGH, each.low, each.error))
        arcs.append(Arc(LOW, node(each.name), each.high))
        if each.name.endswith(FP32_OUTPUT):
            product = each.name.removesuffix(FP32_OUTPUT)
            arcs.append(Arc(node(each.name), node(product), math.inf))
    for value in table.values.values():
        maker = node(value.made_by)
        some = ("some", value.name)
        every = ("every", value.name)
        for reader in map(node, table.readers[value.name]):
            arcs.append(Arc(reader, some, math.inf))
            arcs.append(Arc(every, reader, math.inf))
        if value.returned:
            arcs.append(Arc(every, HIGH, math.inf))
        if value.stored:  # converted ahead; a run pays for a cast only if the readers differ in precision
            arcs.append(Arc(some, maker, 0.0, value.error))
            arcs.append(Arc(some, every, value.cast))
        else:
            arcs.append(Arc(some, maker, value.cast, value.error))
            arcs.append(Arc(maker, every, value.cast))
    return Cuts(arcs, sum(each.low + each.high for each in table.operations.values()))


AGREES = 0.02
"""Allowed difference between the exported graph and the model in FP32, as a share of the error budget."""


class OperationRefused(Exception):
    """An operation raised an exception during a run of an exported graph. name: the operation."""

    def __init__(self, name: str, error: BaseException) -> None:
        super().__init__(str(error))
        self.name = name
        self.error = error


@dataclass(frozen=True)
class Trial:
    """Runs one exported model on the audit's batches."""

    exported: ExportedModel
    planning: PlanningContext

    def error(self, table: Table, low: frozenset[str]) -> float:
        """The worst batch's output error with the operations `low` in low precision. Raises: OperationRefused."""
        module = lower_operations(self.exported, table, low)
        return worst_of([self._distance(module, batch) for batch in self.planning.subject.batches])

    def agrees(self, batch: Batch) -> bool:
        """Whether the exported graph in FP32 reproduces the model's outputs, up to AGREES or FP32's noise."""
        try:
            off = self._distance(self.exported.graph_module, batch)
        except OperationRefused:
            return False
        return off <= AGREES * self.planning.max_error or off <= self.planning.noise.measured.error

    def _distance(self, module: fx.GraphModule, batch: Batch) -> float:
        """Output error of the graph on a batch; inf if its outputs differ in structure. Raises: OperationRefused."""
        args, kwargs = batch
        leaves = pytree.tree_leaves((args, {name: kwargs[name] for name in self.exported.audited[1]}))
        executor = Executor(module)

        def run() -> NamedTensors:
            with emulate_unless_native(self.planning.options.where, self.planning.most):
                return tensor_outputs(executor.run(*leaves))

        try:
            outputs = from_the_start(module, batch, run, self.planning.options.seed)
        except Exception as error:
            let_through(error)
            name = executor.at.meta.get(COPIED, executor.at.name) if executor.at else ""
            raise OperationRefused(name, error) from error
        try:
            return self.planning.output_metric.distance(self.planning.reference(batch), outputs)
        except MeasureError:
            return math.inf


class Operations(Space):
    """The search space of a program: sets of operations that run in low precision."""

    def __init__(self, table: Table, trial: Trial) -> None:
        super().__init__()
        self.table, self.trial, self._cuts = table, trial, cuts_of(table)
        self.nothing = self._choice(table.free)

        def gain(group: frozenset[Hashable]) -> float:
            each = [table.operations[str(name)] for name in group]
            return sum(x.low - x.high for x in each) / max(sum(x.error for x in each), 1e-30)

        groups = (frozenset[Hashable](table.whole(name) & table.free) for name in sorted(table.free))
        self._groups = sorted(groups, key=gain)

    def replay(self, point: Candidate) -> float:
        """Run the graph with the operations of `point` in low precision; return the output error."""
        return self.trial.error(self.table, self.table.free - point.high)

    def propose(self, allowed: float) -> Candidate:
        """The cheapest choice whose predicted error is at most `allowed`."""
        return self._cuts.cheapest(self._choice, allowed, self._groups, len(self.table.operations))

    def _choice(self, high: Choice) -> Candidate:
        high = self.table.free & frozenset().union(*map(self.table.whole, high & self.table.free))
        price, square = self.table.price(self.table.free - high)
        return Candidate(high, math.sqrt(square), price, price)


def kept_of(table: Table, low: frozenset[str], budget: float) -> tuple[KeptOperation, ...]:
    """List every operation with FP32 inputs that stays FP32, with the reason. budget: limit of the predicted error."""
    result = list[KeptOperation]()
    _, square = table.price(low)
    for name, operation in table.operations.items():
        product = name.removesuffix(FP32_OUTPUT)
        belongs_to_fp32_product = product != name and product not in low
        if name in low or belongs_to_fp32_product:
            continue
        kind, why = _why_kept(table, low, name, square, budget)
        result.append(KeptOperation(name, operation.op, kind, why, operation.captured))
    return tuple(result)


def _why_kept(table: Table, low: frozenset[str], name: str, square: float, budget: float) -> tuple[str, str]:
    """(kind, reason) of an operation's FP32. square: predicted squared error with the operations `low` in low precision;
    budget: limit of the predicted error."""
    operation = table.operations[name]
    if operation.kind:
        return operation.kind, operation.kept
    # the costs and squared errors that depend on the operation, in FP32 and in low precision
    whole = (table.whole(name) & table.free) | {name}
    high_cost, high_square = table.price(low, whole)
    low_cost, low_square = table.price(low | whole, whole)
    if low_cost >= high_cost:
        return "no-gain", "low precision saves nothing, since the casts around it cost at least as much"
    error = math.sqrt(square)
    error_if_low = math.sqrt(max(square + low_square - high_square, 0.0))
    if error_if_low > budget:
        why = f"low precision here would raise the predicted error from {error:.2g} to {error_if_low:.2g}"
        return "budget", why
    return "budget", "no tested plan with this operation in low precision meets the error budget"


def lower_operations(exported: ExportedModel, table: Table, low: frozenset[str]) -> fx.GraphModule:
    """The exported model with the operations `low` in low precision, and the original's FP32 weights. Products with
    FP32 output are calls of a function that differs by device, until `save_program` traces the function.

    Inputs and outputs are FP32: the graph has the casts. Weights without an FP32 reader are stored in low precision.
    """
    source = exported.graph_module.graph
    lowering = Lowering(source, table, low)
    for node in source.nodes:
        lowering.copy(node)
    lowering.graph._codegen = source._codegen
    lowering.graph.lint()
    module = fx.GraphModule(exported.graph_module, lowering.graph)
    for node in source.nodes:
        if node.op == "get_attr" and lowering.is_low(node):
            _store_low(module, str(node.target), lowering.low_dtype)
    return module


def _store_low(module: nn.Module, target: str, dtype: torch.dtype) -> None:
    """Replace the parameter or buffer at `target` in a module by its value in a low-precision dtype."""
    path, _, name = target.rpartition(".")
    tensor = attrgetter(target)(module)
    stored = tensor.detach().to(dtype)
    if isinstance(tensor, nn.Parameter):
        stored = nn.Parameter(stored, tensor.requires_grad)
    setattr(module.get_submodule(path), name, stored)


class Lowering:
    """Copies an exported graph node by node, with the operations `low` in low precision, and inserts casts.

    graph: the copy. low_dtype: the format's dtype. dtypes: {original node: the dtype of its result, if that was FP32}.
    copies: {original node: its copy}. casts: {(original node, dtype): the cast of its copy}, so that each value is cast
    once to each dtype.
    """

    def __init__(self, source: fx.Graph, table: Table, low: frozenset[str]) -> None:
        self.graph = fx.Graph()
        self.table = table
        self.low = low
        self.low_dtype = dtype_of(table.format)
        self.dtypes = {node: self._dtype_of(node) for node in source.nodes}
        self.copies = dict[fx.Node, fx.Node]()
        self.casts = dict[tuple[fx.Node, torch.dtype], fx.Node]()

    def is_low(self, node: fx.Node) -> bool:
        """Whether a formerly FP32 result is in low precision."""
        return self.dtypes[node] is self.low_dtype

    def _dtype_of(self, node: fx.Node) -> torch.dtype:
        """The dtype of a formerly FP32 result, as its producer has; a weight's producers are all operations that read it."""
        value = self.table.values.get(node.name)
        deciding: list[str | None]
        if value is None:
            deciding = [node.name]
        elif value.stored:
            deciding = [user.name for user in node.users]
        else:
            deciding = [value.made_by]
        if deciding and self.low.issuperset(deciding):
            return self.low_dtype
        return torch.float32

    def copy(self, node: fx.Node) -> None:
        """Append a copy of a node, in the precision of the plan, after casts of the values that it reads."""
        is_low = node.name in self.low
        args: Any = node.args
        kwargs: Any = node.kwargs
        if is_low:
            args, kwargs = low_arguments(node, self.low_dtype, self.table.operations[node.name].literals)
        read = partial(self._read, wanted=self._input_dtype(node))
        args, kwargs = fx.node.map_arg((args, kwargs), read)
        target = node.target
        has_fp32_output = is_low and not self.table.whole(node.name) <= self.low
        if has_fp32_output:
            args = (target, *args)
            target = _multiply
        copy = self.graph.create_node(node.op, target, args, kwargs, node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key in ("nn_module_stack", "stack_trace")}
        copy.meta[COPIED] = node.name
        copy.meta["val"] = outlines(node.meta.get("val"), self.dtypes[node])
        self.copies[node] = copy

    def _input_dtype(self, node: fx.Node) -> torch.dtype | None:
        """The dtype to which a node's formerly FP32 inputs are cast; None if the node reads them as they are."""
        if node.name in self.low:
            return self.low_dtype
        if node.op == "output" or node.name in self.table.operations:
            return torch.float32
        return None  # selecting one element of a tuple, for example, casts nothing

    def _read(self, given: fx.Node, wanted: torch.dtype | None) -> fx.Node:
        """The copy of a node, or its cast if the requested dtype differs."""
        copy = self.copies[given]
        if given.name not in self.table.values or wanted is None or self.dtypes[given] is wanted:
            return copy
        if (given, wanted) not in self.casts:
            self.casts[given, wanted] = self._cast(copy, wanted)
        return self.casts[given, wanted]

    def _cast(self, copy: fx.Node, dtype: torch.dtype) -> fx.Node:
        cast = self.graph.call_function(torch.ops.aten.to.dtype, (copy, dtype))
        cast.meta = {key: value for key, value in copy.meta.items() if key == "nn_module_stack"}
        cast.meta["val"] = copy.meta["val"].to(dtype)
        return cast


def _multiply(target: Callable[..., Any], *args: Any) -> torch.Tensor:
    return multiply(operation_of(target).packet, target, (args, {}), widen)


def memory_needed(module: fx.GraphModule) -> MemoryUse:
    """Bytes that a forward of a low-precision graph needs: the weights as stored, plus the peak of live values.

    Views take no memory; a value is freed after its last reader.
    """
    nodes = list(module.graph.nodes)
    size = {node.name: sum(x.nbytes for x in tensors_in(node.meta.get("val"))) for node in nodes}
    free = {name for name, cost in costs_of(module.graph).items() if cost.free}
    inputs = {node.name for node in nodes if node.op == "placeholder"}
    weights = sum(x.nbytes for x in (*module.parameters(), *module.buffers()))
    return MemoryUse(weights, most_alive(nodes, size, free, inputs, {}))
