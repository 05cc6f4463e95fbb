"""What a graph's plan is solved from: every operation of the exported graph that may run low, and the values between them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..execution.execute import Executor, low_literals, with_literals
from ..isolation import isolated
from ..numerics import operations as table
from ..numerics.formats import dtype_of
from ..numerics.nodes import op_name, row_of, target_of, tensors_of
from ..plan.costs import Cost, cast_seconds, seconds
from ..plan.energy import FORBIDDEN
from ..plan.workbench import Workbench
from ..raised import let_through
from ..records import Batch, Literals
from .aligned import aligned
from .exported import Exported


@dataclass(frozen=True)
class Operation:
    """An operation that reads FP32 values. low, high: seconds in the format and in FP32; error: what it adds to the
    squared error of the outputs, low; flops: multiply-adds counted as two. captured: its name in the recorded graph.
    kept: why it may not run low, "" where it may; refused: whether that is since it cannot.
    """

    name: str
    op: str
    reads: tuple[str, ...]
    low: float
    high: float
    error: float
    flops: int
    captured: str | None
    kept: str = ""
    refused: bool = False
    literals: Literals | None = None


@dataclass(frozen=True)
class Value:
    """An FP32 value. made_by: the operation that gives it, None for what is there before. cast: seconds of a conversion;
    error: what rounding it adds to the squared error. stored: whether it is a weight, converted once and for all. returned:
    whether the caller gets it.
    """

    name: str
    made_by: str | None
    cast: float
    error: float
    stored: bool = False
    returned: bool = False


@dataclass(frozen=True)
class Table:
    """operations, values: by name, in order."""

    format: str
    operations: Mapping[str, Operation]
    values: Mapping[str, Value]

    def may_be_low(self) -> frozenset[str]:
        """Operations that a plan may lower."""
        return frozenset(name for name, operation in self.operations.items() if not operation.kept)

    def can_be_low(self) -> frozenset[str]:
        """Operations that run low at all, whatever comes of it."""
        return frozenset(name for name, operation in self.operations.items() if not operation.refused)


class Seen:
    """One FP32 run of an exported graph: outlines of what every node gave, and which recorded operation each one is."""

    def __init__(self, exported: Exported, batch: Batch, bench: Workbench) -> None:
        self.graph = exported.graph_module.graph
        self.values: dict[str, Any] = {}
        with isolated(exported.graph_module, batch), torch.no_grad():
            for n, result in Executor(exported.graph_module).steps(*pytree.tree_leaves(batch)):
                self.values[n.name] = pytree.tree_map_only(torch.Tensor, lambda x: _outline(x, x.dtype), result)
        self.captured = aligned(self.graph, self.values, bench.capture.first)
        self._costs = bench.costs

    def cost(self, node: fx.Node) -> Cost:
        """That of the recorded operation; of one that has none, what it moves."""
        known = self._costs.get(self.captured.get(node.name, ""))
        return known or Cost(0, self._elements(node), bool(row_of(node).view))

    def given(self, node: fx.Node) -> int:
        """Floating elements of what a node gives."""
        return sum(x.numel() for x in tensors_of(self.values.get(node.name)) if x.is_floating_point())

    def _elements(self, node: fx.Node) -> int:
        return self.given(node) + sum(map(self.given, node.all_input_nodes))


def table_of(seen: Seen, format: str, bench: Workbench) -> Table:
    """What a plan in a format is solved from."""
    makers = _makers(seen)
    found = _Reader(seen, format, bench, makers)
    operations = {node.name: found.operation(node) for node in seen.graph.nodes if found.reads(node)}
    returned = {node.name for node in seen.graph.output_node().all_input_nodes}
    values = {}
    for node in seen.graph.nodes:
        if node.op != "output" and is_fp32(seen.values.get(node.name)):
            maker = makers.get(node.name)
            values[node.name] = found.value(node, maker if maker in operations else None, node.name in returned)
    return Table(format, operations, values)


def is_fp32(value: Any) -> bool:
    """Whether it is one FP32 tensor."""
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _makers(seen: Seen) -> dict[str, str]:
    """{value: the operation that gives it}: of one picked from several, the one that gave these."""
    found: dict[str, str] = {}
    for node in seen.graph.nodes:
        if node.op == "call_function":
            picked = is_pick(node) and node.args[0].op == "call_function"
            found[node.name] = found[node.args[0].name] if picked else node.name
    return found


def is_pick(node: fx.Node) -> bool:
    """Whether it only picks one of several."""
    return op_name(node.target) == "getitem"


class _Reader:
    """Reads operations and values off a run."""

    def __init__(self, seen: Seen, format: str, bench: Workbench, makers: Mapping[str, str]) -> None:
        self.seen, self.format, self.bench, self.makers = seen, format, bench, makers
        self.dtype = dtype_of(format)
        self.contributions, self.verdicts = bench.contributions[format], bench.verdicts[format]
        recorded = bench.capture.first.placeholders
        self.places = {p.fqn: p.name for p in recorded if p.fqn is not None}
        inputs = (n for n in seen.graph.nodes if n.op == "placeholder" and tensors_of(seen.values[n.name]))
        taken = (p.name for p in recorded if p.kind == "input")
        self.inputs = {node.name: name for node, name in zip(inputs, taken, strict=False)}

    def reads(self, node: fx.Node) -> tuple[str, ...]:
        """FP32 values that an operation reads; none for one that only picks from several."""
        if node.op not in ("call_function", "call_module") or is_pick(node):
            return ()
        return tuple(source.name for source in node.all_input_nodes if is_fp32(self.seen.values.get(source.name)))

    def operation(self, node: fx.Node) -> Operation:
        captured = self.seen.captured.get(node.name)
        literals = self._literals(node, captured)
        refused = _refused(node, self.seen.values, self.dtype, literals)
        cost = self.seen.cost(node)
        contribution = self.contributions.get(captured or "")
        return Operation(
            node.name,
            op_name(node.target),
            self.reads(node),
            self._price(cost, node, self.format),
            self._price(cost, node, "fp32"),
            _square(contribution.own) if contribution else 0.0,
            cost.flops,
            captured,
            refused or self._forbidden(node, captured),
            bool(refused),
            literals,
        )

    def value(self, node: fx.Node, made_by: str | None, returned: bool) -> Value:
        stored = node.op == "get_attr"
        held = self.places.get(str(node.target).partition(".")[2]) if stored else self.seen.captured.get(node.name)
        contribution = self.contributions.get(held or self.inputs.get(node.name, ""))
        cast = cast_seconds(self.seen.values[node.name].numel(), self.format, self.bench.gpu)
        share = FUSED if self.bench.objective == "time" else TIE
        square = _square(contribution.cast) if contribution else 0.0
        return Value(node.name, made_by, share * cast, square, stored, returned)

    def _literals(self, node: fx.Node, captured: str | None) -> Literals | None:
        """What Python writes at an operation in the format, where that has the arguments that it was recorded with."""
        known = self.bench.capture.nodes.get(captured or "")
        return low_literals(known, self.format) if known and known.op == op_name(node.target) else None

    def _price(self, cost: Cost, node: fx.Node, format: str) -> float:
        """What it counts for, as the objective has it: in seconds, those of bytes and FLOPs too."""
        elapsed = seconds(cost, format, self.bench.gpu)
        if self.bench.objective == "time":
            return elapsed
        if self.bench.objective == "flops":
            own = seconds(Cost(cost.flops, 0, False), "fp32", self.bench.gpu) if format == "fp32" else 0.0
        else:
            own = 0.0 if cost.free else seconds(Cost(0, self.seen.given(node), False), format, self.bench.gpu)
        return own + TIE * elapsed

    def _forbidden(self, node: fx.Node, captured: str | None) -> str:
        """Why an operation may not run low though it can."""
        if captured is None:
            return "" if _only_moves(row_of(node)) else "the recorded run has no operation that it could be told to be"
        verdict = self.verdicts.get(captured)
        if verdict is None or verdict.verdict not in ("unsafe", "untested"):
            return ""
        return f"{verdict.verdict}: {verdict.reason}"


def _only_moves(row: table.Operation) -> bool:
    """Whether entries that are low already are handed on as they are."""
    return bool(row.entries or row.exact or row.joins or row.asks_shape) or row.packet in _writers()


@cache
def _writers() -> frozenset[str]:
    """Operations that write to a part of a tensor."""
    return frozenset(table.operation(name).scatter for name in table.packets()) - {""}


FUSED = 0.1
"""Share of the time of a cast that it takes in a graph: what compiles one makes it part of the operation beside it, and
what does not is better off with few of them."""

TIE = 1e-3
"""What a second counts for where the objective is not time: of plans that are as good, the faster one."""


def _square(effect: float) -> float:
    """Squared, what is not finite being more than any budget."""
    return min(effect**2, FORBIDDEN) if math.isfinite(effect) else FORBIDDEN


def _refused(node: fx.Node, values: Mapping[str, Any], dtype: torch.dtype, literals: Literals | None) -> str:
    """Why an operation cannot run low: found on the shapes alone. "" where it gives low tensors for low ones."""
    if node.op != "call_function":
        return "it is a module of its own"
    given = [x for source in node.all_input_nodes for x in tensors_of(values.get(source.name))]
    floats = {x.dtype for x in given if x.is_floating_point() or x.is_complex()}
    if floats != {torch.float32}:
        return "it reads what is neither FP32 nor of whole numbers"

    def outline(source: fx.Node) -> Any:
        return pytree.tree_map_only(
            torch.Tensor, lambda x: _outline(x, dtype if x.dtype is torch.float32 else x.dtype), values[source.name]
        )

    args, kwargs = fx.node.map_arg(low_arguments(node, dtype, literals), outline)
    try:
        with torch.no_grad():
            result = target_of(node)(*args, **kwargs)
    except Exception as error:
        let_through(error)
        return "torch has no kernel for it that takes low values of these shapes"
    found = {x.dtype for x in tensors_of(result) if x.is_floating_point() or x.is_complex()}
    return "" if found <= {dtype} else "it gives FP32 whatever it reads"


def _outline(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One of its shape without entries."""
    return torch.empty_like(x, dtype=dtype, device="meta")


def low_arguments(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> tuple[Any, Any]:
    """What a node is called with when it runs low: numbers as Python would write them then, FP32 nowhere asked for."""

    def asked(value: Any) -> Any:
        return dtype if value is torch.float32 else value

    args, kwargs = with_literals(node.args, dict(node.kwargs), literals)
    return tuple(map(asked, args)), {key: asked(value) for key, value in kwargs.items()}


def low_flops(table: Table, low: frozenset[str]) -> float:
    """Share of the floating-point operations that run low."""
    whole = sum(operation.flops for operation in table.operations.values())
    return sum(table.operations[name].flops for name in low) / whole if whole else 0.0
