"""Makes the solver's input for exported graphs: operations that may run in low precision, and the values between operations."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

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
from ...plan.costs import TIE, cast_seconds, costs_of, elements_of, price
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
        operations, values = self.operations, self.values
        if of is not None:
            operations = {name: operations[name] for name in of}
            read = {name for each in operations.values() for name in each.reads}
            values = {name: x for name, x in values.items() if name in read or x.made_by in of}
        price = sum(each.low if name in low else each.high for name, each in operations.items())
        square = sum(each.error for name, each in operations.items() if name in low)
        for name, value in values.items():
            reading = [reader in low for reader in self.readers[name]]
            every = all(reading) and not value.returned
            if value.made_by in low:
                price += 0.0 if every else value.cast
            elif any(reading):
                price += 0.0 if every and value.stored else value.cast
                square += value.error
        return price, square


def table_of(graph: fx.Graph, format: str, planning: PlanningContext) -> Table:
    """The solver's table of operations and values, for a format. graph: the exported graph with recorded shapes."""
    costs = costs_of(graph)
    captured = align_nodes(graph, planning.capture.first)  # {node: its recorded operation}
    options = planning.options
    returned = graph.output_node().all_input_nodes
    share = FUSED if options.objective == "time" else TIE
    operations = dict[str, GraphOperation]()
    values = dict[str, Value]()
    makers = dict[Any, str]()  # {node: the operation that makes its value}
    for node in graph.nodes:
        name = node.name
        elements = elements_of(node)
        recorded = captured.get(name)
        contribution = planning.contributions[format].get(recorded or "")
        error = 0.0  # of running the operation in low precision
        rounding = 0.0  # of rounding its result
        if contribution:
            error = min(contribution.own**2, FORBIDDEN)
            rounding = min(contribution.cast**2, FORBIDDEN)
        picks = op_name(node.target) == "getitem"  # one element of a tuple
        if node.op == "call_function":
            makers[node] = makers.get(node.args[0], name) if picks else name
        reads = tuple(source.name for source in node.all_input_nodes if dtype(source) is torch.float32)
        if reads and node.op == "call_function" and not picks:
            cost = costs[name]
            low = price(options.objective, cost, elements, format, options.gpu_spec)
            high = price(options.objective, cost, elements, "fp32", options.gpu_spec)
            why = _reason_to_keep(node, recorded, format, planning)
            whole = GraphOperation(name, op_name(node.target), reads, low, high, error, cost.flops, recorded, *why)
            can_give_fp32 = row_of(node).packet in FACTORS and not node.kwargs
            if can_give_fp32 and (not whole.kind or (whole.kind == "unsafe" and not fails_by_inputs(contribution))):
                # The product itself is one choice, the rounding of its output another.
                output = f"{name}{FP32_OUTPUT}"
                times = FORMATS["fp32"].bytes // FORMATS[format].bytes
                wider = replace(cost, elements=cost.elements + (times - 1) * elements)
                more = price(options.objective, wider, times * elements, format, options.gpu_spec) - low
                operations[output] = replace(whole, name=output, reads=(), low=0.0, high=more, flops=0)
                whole = replace(whole, high=high - more, error=0.0, kind="", kept="")
                makers[node] = output
            operations[name] = whole
        if node.op != "output" and dtype(node) is torch.float32:
            maker = makers[node] if makers.get(node) in operations else None
            cast = share * cast_seconds(elements, format, options.gpu_spec)
            values[name] = Value(name, maker, cast, rounding, node.op == "get_attr", node in returned)
    return Table(format, operations, values)


def _reason_to_keep(
    node: fx.Node, captured: str | None, format: str, planning: PlanningContext
) -> tuple[str, str, Literals | None]:
    """Why an operation must stay FP32, as a word and as a clause; both are "" if low precision is possible. Also the
    literals in the format of the matching recorded operation, if any."""
    known = planning.capture.nodes.get(captured or "")
    literals = low_literals(known, format) if known and known.op == op_name(node.target) else None
    if refused := _check_runs_low(node, dtype_of(format), literals):
        return "refused", refused, literals
    if captured is None:
        row, writers = row_of(node), {table.operation(name).scatter for name in table.packets()}
        if not (row.entries or row.exact or row.joins or row.asks_shape or row.packet in writers):
            return "untested", "no matching operation in the recorded run", literals  # others only move entries
    elif (effect := planning.contributions[format].get(captured)) is not None and effect.decided_by == "not-run":
        return "untested", "untested: only a run can measure its effect on the outputs", literals
    verdict = planning.judged.verdicts.get(captured or "", {}).get(format)
    if verdict is None or verdict.verdict not in ("unsafe", "untested"):
        return "", "", literals
    return verdict.verdict, f"{verdict.verdict}, since {verdict.reason}", literals


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
    found = {x.dtype for x in tensors_in(result) if x.is_floating_point() or x.is_complex()}
    return "" if found <= {dtype} else "the result is FP32 even for low-precision inputs"


def low_arguments(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> tuple[Any, Any]:
    """The arguments of a node in low precision: with the low format's literals, and `dtype` in place of FP32."""
    given: Any = with_literals(node.args, dict(node.kwargs), literals)
    result: Any = fx.node.map_aggregate(given, lambda value: dtype if value is torch.float32 else value)
    return result


def align_nodes(graph: fx.Graph, capture: Capture) -> dict[str, str]:
    """{node of the exported graph: the matching recorded operation, weight or input}, by the order in both graphs.

    Nodes without a match are left out.
    """
    places = {p.fqn: p.name for p in capture.placeholders if p.fqn is not None}
    inputs = [p.name for p in capture.placeholders if p.kind == "input"]
    tensors = [node for node in graph.nodes if tensors_in(node.meta.get("val"))]
    weights = {n.name: str(n.target).partition(".")[2] for n in tensors if n.op == "get_attr"}
    result = {name: places[fqn] for name, fqn in weights.items() if fqn in places}
    result |= dict(zip((node.name for node in tensors if node.op == "placeholder"), inputs, strict=False))
    calls = [node for node in tensors if node.op == "call_function"]
    ours = [(*_place(owner_of(n), row_of(n).op, tensors_in(n.meta["val"])[0].shape, capture), n.name) for n in calls]
    theirs = [(*_place(node.owner, node.op, node.shape, capture), name) for name, node in capture.nodes.items()]
    return result | dict(align(ours, theirs))


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward contains the operation; "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).partition("@")[0] if stack else ""
    parts = [part for part in path.split(".") if part not in ("L['self']", "L__self__")]
    return ".".join(parts[1:] if parts[:1] == [INNER] else parts)


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
