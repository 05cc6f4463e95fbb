"""What a graph's plan is solved from: every operation of the exported graph that may run low, and the values between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from ..capture.paths import aligned as align
from ..errors import let_through
from ..execution.execute import low_literals, with_literals
from ..numerics import operations as table
from ..numerics.formats import dtype_of
from ..numerics.nodes import op_name, row_of, target_of, tensors_of
from ..plan.costs import TIE, cast_seconds, costs_of, elements_of, price
from ..plan.mincut import FORBIDDEN
from ..plan.workbench import Workbench
from ..records import Capture, Literals
from .exported import INNER, outlines

FUSED = 0.1
"""Share of the time of a cast that it takes in a graph: what compiles one makes it part of the operation beside it, and
what does not is better off with few of them."""


@dataclass(frozen=True)
class Operation:
    """An operation that reads FP32 values. low, high: its price in the format and in FP32; error: what it adds to the
    squared error of the outputs, low; flops: multiply-adds counted as two. captured: its name in the recorded graph.
    kind: of records.Kept where it may not run low, and kept: why not.
    """

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
    """An FP32 value. made_by: the operation that gives it, None for what is there before. cast: the price of a conversion;
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

    @cached_property
    def free(self) -> frozenset[str]:
        """Operations that a plan may lower."""
        return frozenset(name for name, operation in self.operations.items() if not operation.kind)

    def low_flops(self, low: frozenset[str]) -> float:
        """Share of the floating-point operations that run low."""
        whole = sum(operation.flops for operation in self.operations.values())
        return sum(self.operations[name].flops for name in low) / whole if whole else 0.0

    @cached_property
    def readers(self) -> dict[str, list[str]]:
        """{value: operations that read it}."""
        result: dict[str, list[str]] = {name: [] for name in self.values}
        for operation in self.operations.values():
            for value in operation.reads:
                result[value].append(operation.name)
        return result

    def price(self, low: frozenset[str], of: str | None = None) -> tuple[float, float]:
        """What these operations low come to: what the objective makes of it, mostly seconds, and the squared error.

        of: an operation; of its own share and of the casts around it alone.
        """
        operations, values = self.operations, self.values
        if of is not None:
            operations = {of: operations[of]}
            values = {name: x for name, x in values.items() if name in operations[of].reads or x.made_by == of}
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


def table_of(graph: fx.Graph, format: str, bench: Workbench) -> Table:
    """What a plan in a format is solved from. graph: exported, its values outlined."""
    costs, captured, asked = costs_of(graph), aligned(graph, bench.capture.first), bench.options
    returned, share = graph.output_node().all_input_nodes, FUSED if asked.objective == "time" else TIE
    operations, values, makers = dict[str, Operation](), dict[str, Value](), dict[Any, str]()
    for node in graph.nodes:
        name, elements, its = node.name, elements_of(node), captured.get(node.name)
        contribution = bench.contributions[format].get(its or "")
        effects = (contribution.own, contribution.cast) if contribution else (0.0, 0.0)
        own, rounding = (min(effect**2, FORBIDDEN) for effect in effects)
        if node.op == "call_function":
            makers[node] = makers.get(node.args[0], name) if is_pick(node) else name
        if reads := _reads(node):
            cost, figures = costs[name], asked.figures
            low, high = (price(asked.objective, cost, elements, each, figures) for each in (format, "fp32"))
            why = _kept(node, its, format, bench)
            operations[name] = Operation(name, op_name(node.target), reads, low, high, own, cost.flops, its, *why)
        if node.op != "output" and _is_fp32(node):
            maker = makers[node] if makers.get(node) in operations else None
            cast = share * cast_seconds(elements, format, asked.figures)
            values[name] = Value(name, maker, cast, rounding, node.op == "get_attr", node in returned)
    return Table(format, operations, values)


def _reads(node: fx.Node) -> tuple[str, ...]:
    """FP32 values that an operation reads; none for one that only picks from several."""
    if node.op != "call_function" or is_pick(node):
        return ()
    return tuple(source.name for source in node.all_input_nodes if _is_fp32(source))


def _is_fp32(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def is_pick(node: fx.Node) -> bool:
    """Whether it only picks one of several."""
    return op_name(node.target) == "getitem"


def _kept(node: fx.Node, captured: str | None, format: str, bench: Workbench) -> tuple[str, str, Literals | None]:
    """Why an operation may not run low, in one word and in a clause, and what Python writes at it in the format, where it has the
    arguments that it was recorded with."""
    known = bench.capture.nodes.get(captured or "")
    literals = low_literals(known, format) if known and known.op == op_name(node.target) else None
    if refused := _refused(node, dtype_of(format), literals):
        return "refused", refused, literals
    if captured is None and not _only_moves(row_of(node)):
        return "untested", "the recorded run has no operation that it could be told to be", literals
    verdict = bench.verdicts[format].get(captured or "")
    if verdict is None or verdict.verdict not in ("unsafe", "untested"):
        return "", "", literals
    return verdict.verdict, f"{verdict.verdict}: {verdict.reason}", literals


def _only_moves(row: table.Operation) -> bool:
    """Whether entries that are low already are handed on as they are, if to a part of a tensor."""
    writers = (table.operation(name).scatter for name in table.packets())
    return bool(row.entries or row.exact or row.joins or row.asks_shape) or row.packet in writers


def _refused(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> str:
    """Why an operation cannot run low: found on the shapes alone. "" where it gives low tensors for low ones."""
    given = [x for source in node.all_input_nodes for x in tensors_of(source.meta.get("val"))]
    if {x.dtype for x in given if x.is_floating_point() or x.is_complex()} != {torch.float32}:
        return "it reads what is neither FP32 nor of whole numbers"
    low = low_arguments(node, dtype, literals)
    args, kwargs = fx.node.map_arg(low, lambda source: outlines(source.meta.get("val"), dtype))
    try:
        with torch.no_grad():
            result = target_of(node)(*args, **kwargs)
    except Exception as error:
        let_through(error)
        return "torch has no kernel for it that takes low values of these shapes"
    found = {x.dtype for x in tensors_of(result) if x.is_floating_point() or x.is_complex()}
    return "" if found <= {dtype} else "it gives FP32 whatever it reads"


def low_arguments(node: fx.Node, dtype: torch.dtype, literals: Literals | None) -> tuple[Any, Any]:
    """What a node is called with when it runs low: numbers as Python would write them then, FP32 nowhere asked for."""

    def asked(value: Any) -> Any:
        return dtype if value is torch.float32 else value

    args, kwargs = with_literals(node.args, dict(node.kwargs), literals)
    return tuple(map(asked, args)), {key: asked(value) for key, value in kwargs.items()}


def aligned(graph: fx.Graph, capture: Capture) -> dict[str, str]:
    """{node of the exported graph: recorded operation, weight or input}: the same ones in the same order.

    What has no counterpart is left out.
    """
    places = {p.fqn: p.name for p in capture.placeholders if p.fqn is not None}
    inputs = [p.name for p in capture.placeholders if p.kind == "input"]
    tensors = [node for node in graph.nodes if tensors_of(node.meta.get("val"))]
    weights = {n.name: str(n.target).partition(".")[2] for n in tensors if n.op == "get_attr"}
    result = {name: places[fqn] for name, fqn in weights.items() if fqn in places}
    result |= dict(zip((node.name for node in tensors if node.op == "placeholder"), inputs, strict=False))
    computing = [node for node in tensors if node.op == "call_function"]
    ours = [
        (*_place(owner_of(n), row_of(n).op, tensors_of(n.meta["val"])[0].shape, capture), n.name) for n in computing
    ]
    theirs = [(*_place(node.owner, node.op, node.shape, capture), name) for name, node in capture.nodes.items()]
    return result | dict(align(ours, theirs))


def owner_of(node: fx.Node) -> str:
    """Path of the module whose forward wrote it, "" for the model itself."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    path = str(stack[-1][0]).partition("@")[0] if stack else ""
    parts = [part for part in path.split(".") if part not in ("L['self']", "L__self__")]
    return ".".join(parts[1:] if parts[:1] == [INNER] else parts)


def _place(owner: str, op: str, shape: Iterable[int], capture: Capture) -> tuple[str, tuple[str, tuple[int, ...]]]:
    """A module that has several paths goes by one of them; names that differ by tracer alone are one."""
    first = next((path for path, others in capture.aliases.items() if owner in others), owner)
    name = table.packet(op).removesuffix("_copy")
    return first, (table.operation(op).traced_as or name, tuple(shape))
