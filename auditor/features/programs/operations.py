"""Makes the solver's input for exported graphs: operations that may run in low precision, and the values between operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import fx

from ...capture.paths import align
from ...errors import let_through
from ...execution.execute import low_literals, with_literals
from ...numerics import operations as table
from ...numerics.formats import FORMATS, dtype_of
from ...numerics.fp32_output import FACTORS
from ...numerics.nodes import dtype, op_name, row_of, target_of, tensors_in
from ...plan.context import PlanningContext
from ...plan.costs import TIE, Cost, cast_seconds, costs_of, elements_of, price
from ...plan.outputs import fails_by_inputs
from ...plan.search import FORBIDDEN
from ...records import Capture, Literals
from ...records.paths import FP32_OUTPUT
from .exported import INNER, outlines

FUSED = 0.1
"""Cost factor of a cast in an exported graph: compilers fuse most casts, but eager execution pays for each."""


@dataclass(frozen=True)
class GraphOperation:
    """An operation with FP32 inputs; or, with the suffix FP32_OUTPUT in its name, the rounding of a product's output,
    which only a product in low precision can have. low, high: the cost in the format and in FP32; error: the part of
    the outputs' squared error in the format; flops: multiply-adds counted as two. captured: the matching operation in
    the recorded graph. kind, kept: if FP32 is required, the kind (see records.KeptOperation) and the reason."""

    name: str
    op: str
    reads: tuple[str, ...]
    low: float
    high: float
    error: float
    flops: int
    captured: str | None
    kind: str = ""
    kept: str = ""
    literals: Literals | None = None


@dataclass(frozen=True)
class Value:
    """An FP32 tensor in the graph. made_by: the producer, None for inputs and weights. cast: the cost of a conversion;
    error: the squared error that rounding the tensor adds. stored: True for a weight, which is converted only once.
    returned: True for an output of the graph."""

    name: str
    made_by: str | None
    cast: float
    error: float
    stored: bool = False
    returned: bool = False


@dataclass(frozen=True)
class Table:
    """A graph's operations with FP32 inputs, and its FP32 values: by name, in execution order."""

    format: str
    operations: Mapping[str, GraphOperation]
    values: Mapping[str, Value]

    @cached_property
    def free(self) -> frozenset[str]:
        """Names of the operations that a plan may run in low precision."""
        return frozenset(name for name, operation in self.operations.items() if not operation.kind)

    def low_flops(self, low: frozenset[str]) -> float:
        """Share of the floating-point operations that run in low precision."""
        whole = sum(operation.flops for operation in self.operations.values())
        return sum(self.operations[name].flops for name in low) / max(whole, 1)

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """{value: operations that read it}."""
        result: dict[str, list[str]] = {name: [] for name in self.values}
        for operation in self.operations.values():
            for value in operation.reads:
                result[value].append(operation.name)
        return result

    def whole(self, name: str) -> frozenset[str]:
        """An operation's name and, if the operation may have FP32 output, the name of the rounding of its output."""
        return frozenset((name, f"{name}{FP32_OUTPUT}")) & self.operations.keys()

    def price(self, low: frozenset[str], of: frozenset[str] | None = None) -> tuple[float, float]:
        """Cost (mostly seconds) and squared error with the operations `low` in low precision.

        of: if given, count only these operations, and the casts of their inputs and outputs.
        """
        operations = self.operations
        values = self.values
        if of is not None:
            operations = {name: operations[name] for name in of}
            read = {value for operation in operations.values() for value in operation.reads}
            values = {name: value for name, value in values.items() if name in read or value.made_by in of}
        price = sum(operation.low if name in low else operation.high for name, operation in operations.items())
        square = sum(operation.error for name, operation in operations.items() if name in low)
        for name, value in values.items():
            reads_low = [reader in low for reader in self.readers[name]]
            all_low = all(reads_low) and not value.returned
            if value.made_by in low:
                price += 0.0 if all_low else value.cast
            elif any(reads_low):
                is_free = all_low and value.stored  # converted once, before the first run
                price += 0.0 if is_free else value.cast
                square += value.error
        return price, square


def table_of(graph: fx.Graph, format: str, planning: PlanningContext) -> Table:
    """The solver's table of operations and values, for a format. graph: the exported graph with recorded shapes."""
    pricing = _Pricing(format, planning)
    costs = costs_of(graph)
    captured = align_nodes(graph, planning.capture.first)  # {node: its recorded operation}
    returned = graph.output_node().all_input_nodes
    operations = dict[str, GraphOperation]()
    values = dict[str, Value]()
    makers = dict[Any, str]()  # {node: the operation that makes its value}
    for node in graph.nodes:
        is_element = op_name(node.target) == "getitem"  # of a tuple
        if node.op == "call_function":
            makers[node] = makers.get(node.args[0], node.name) if is_element else node.name
        reads = tuple(source.name for source in node.all_input_nodes if dtype(source) is torch.float32)
        if reads and node.op == "call_function" and not is_element:
            whole = pricing.operation(node, reads, costs[node.name], captured.get(node.name))
            if pricing.can_give_fp32(node, whole):
                whole, output = pricing.with_fp32_output(node, whole, costs[node.name])
                operations[output.name] = output
                makers[node] = output.name
            operations[node.name] = whole
        if node.op != "output" and dtype(node) is torch.float32:
            maker = makers.get(node)
            cast = pricing.cast(node)
            rounding = pricing.errors(captured.get(node.name)).rounding
            values[node.name] = Value(
                node.name,
                maker if maker in operations else None,
                cast,
                rounding,
                stored=node.op == "get_attr",
                returned=node in returned,
            )
    return Table(format, operations, values)


class _Errors(NamedTuple):
    """Squared errors of the outputs. own: of running an operation in low precision; rounding: of rounding its result."""

    own: float
    rounding: float


class _Pricing:
    """Costs and errors of an exported graph's operations in a format."""

    def __init__(self, format: str, planning: PlanningContext) -> None:
        self.format = format
        self.planning = planning
        self.contributions = planning.contributions[format]
        self.objective = planning.options.objective
        self.gpu = planning.options.gpu_spec

    def errors(self, recorded: str | None) -> _Errors:
        """The errors of a recorded operation; none without one."""
        contribution = self.contributions.get(recorded or "")
        if not contribution:
            return _Errors(0.0, 0.0)
        return _Errors(min(contribution.own**2, FORBIDDEN), min(contribution.cast**2, FORBIDDEN))

    def cast(self, node: fx.Node) -> float:
        """The cost of a conversion of an operation's result."""
        share = FUSED if self.objective == "time" else TIE
        return share * cast_seconds(elements_of(node), self.format, self.gpu)

    def operation(self, node: fx.Node, reads: tuple[str, ...], cost: Cost, recorded: str | None) -> GraphOperation:
        """An operation, as if its result had the format in which it computes. reads: its FP32 inputs."""
        elements = elements_of(node)
        low = price(self.objective, cost, elements, self.format, self.gpu)
        high = price(self.objective, cost, elements, "fp32", self.gpu)
        error = self.errors(recorded).own
        kind, kept, literals = _reason_to_keep(node, recorded, self.format, self.planning)
        op = op_name(node.target)
        return GraphOperation(node.name, op, reads, low, high, error, cost.flops, recorded, kind, kept, literals)

    def can_give_fp32(self, node: fx.Node, whole: GraphOperation) -> bool:
        """Whether an operation in low precision may have an FP32 output: a product that low inputs do not break."""
        if row_of(node).packet not in FACTORS or node.kwargs:
            return False
        if not whole.kind:
            return True
        return whole.kind == "unsafe" and not fails_by_inputs(self.contributions.get(whole.captured or ""))

    def with_fp32_output(
        self, node: fx.Node, whole: GraphOperation, cost: Cost
    ) -> tuple[GraphOperation, GraphOperation]:
        """A product as two choices: the product itself, which only rounds its inputs, and the rounding of its output."""
        elements = elements_of(node)
        times = FORMATS["fp32"].bytes // FORMATS[self.format].bytes
        wider = replace(cost, elements=cost.elements + (times - 1) * elements)
        more = price(self.objective, wider, times * elements, self.format, self.gpu) - whole.low
        output = replace(whole, name=f"{node.name}{FP32_OUTPUT}", reads=(), low=0.0, high=more, flops=0)
        product = replace(whole, high=whole.high - more, error=0.0, kind="", kept="")
        return product, output


def _reason_to_keep(
    node: fx.Node, captured: str | None, format: str, planning: PlanningContext
) -> tuple[str, str, Literals | None]:
    """Why an operation must stay FP32, as a word and as a clause; both are "" if low precision is possible. Also the
    literals in the format of the matching recorded operation, if any."""
    recorded = planning.capture.nodes.get(captured or "")
    literals = None
    if recorded and recorded.op == op_name(node.target):
        literals = low_literals(recorded, format)
    refusal = _check_runs_low(node, dtype_of(format), literals)
    if refusal:
        return "refused", refusal, literals
    if captured is None:
        if not _only_moves_entries(node):
            return "untested", "no matching operation in the recorded run", literals
    else:
        effect = planning.contributions[format].get(captured)
        if effect is not None and effect.decided_by == "not-run":
            return "untested", "untested: only a run can measure its effect on the outputs", literals
    verdict = planning.judged.verdicts.get(captured or "", {}).get(format)
    if verdict is None or verdict.verdict not in ("unsafe", "untested"):
        return "", "", literals
    return verdict.verdict, f"{verdict.verdict}, since {verdict.reason}", literals


def _only_moves_entries(node: fx.Node) -> bool:
    """Whether an operation computes nothing: its result has entries of its inputs, or depends only on their shapes."""
    row = row_of(node)
    if row.entries or row.exact or row.joins or row.asks_shape:
        return True
    writers = {table.operation(name).scatter for name in table.packets()}
    return row.packet in writers


def _check_runs_low(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> str:
    """Return why an operation cannot run in low precision, tested on tensors without data; "" if low-precision inputs
    give low-precision results."""
    given = [x for source in node.all_input_nodes for x in tensors_in(source.meta.get("val"))]
    if {x.dtype for x in given if x.is_floating_point() or x.is_complex()} != {torch.float32}:
        return "an input is complex, or neither FP32 nor integer"
    low = low_arguments(node, dtype, literals)
    args, kwargs = fx.node.map_arg(low, lambda source: outlines(source.meta.get("val"), dtype))
    try:
        with torch.no_grad():
            result = target_of(node)(*args, **kwargs)
    except Exception as error:
        let_through(error)
        return "torch has no low-precision kernel for these shapes"
    dtypes = {x.dtype for x in tensors_in(result) if x.is_floating_point() or x.is_complex()}
    return "" if dtypes <= {dtype} else "the result is FP32 even for low-precision inputs"


def low_arguments(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> tuple[Any, Any]:
    """The arguments of a node in low precision: with the low format's literals, and `dtype` in place of FP32."""
    given: Any = with_literals(node.args, dict(node.kwargs), literals)
    result: Any = fx.node.map_aggregate(given, lambda value: dtype if value is torch.float32 else value)
    return result


def align_nodes(graph: fx.Graph, capture: Capture) -> dict[str, str]:
    """{node of the exported graph: the matching recorded operation, weight or input}, by the order in both graphs.

    Nodes without a match are left out.
    """
    tensors = [node for node in graph.nodes if tensors_in(node.meta.get("val"))]
    result = dict[str, str]()

    # Weights match by name.
    places = {place.fqn: place.name for place in capture.placeholders if place.fqn is not None}
    for node in tensors:
        fqn = str(node.target).partition(".")[2]
        if node.op == "get_attr" and fqn in places:
            result[node.name] = places[fqn]

    # Inputs match by order.
    exported_inputs = [node.name for node in tensors if node.op == "placeholder"]
    inputs = [place.name for place in capture.placeholders if place.kind == "input"]
    result |= zip(exported_inputs, inputs, strict=False)

    # Operations match by module, operation and shape, in the order of each module.
    ours = list[tuple[str, Any, str]]()
    for node in tensors:
        if node.op == "call_function":
            shape = tensors_in(node.meta["val"])[0].shape
            ours.append((*_place(owner_of(node), row_of(node).op, shape, capture), node.name))
    theirs = [(*_place(node.owner, node.op, node.shape, capture), name) for name, node in capture.nodes.items()]
    return result | dict(align(ours, theirs))


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward contains the operation; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return ""
    path = str(stack[-1][0]).partition("@")[0]
    parts = [part for part in path.split(".") if part not in ("L['self']", "L__self__")]
    if parts[:1] == [INNER]:
        parts = parts[1:]
    return ".".join(parts)


def _place(owner: str, op: str, shape: Iterable[int], capture: Capture) -> tuple[str, tuple[str, tuple[int, ...]]]:
    """A key for matching nodes of two graphs: equal for all paths of a shared module, whichever tracer made a graph."""
    first = owner
    for path, others in capture.aliases.items():
        if owner in others:
            first = path
            break
    kind = table.operation(op).traced_as
    if not kind:
        kind = table.packet(op).removesuffix("_copy")
    return first, (kind, tuple(shape))
