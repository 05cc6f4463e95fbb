"""Detects numbers in a graph that Python derived from a tensor's dtype, by recording the model again in each format."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..emulation.emulate import Emulation
from ..emulation.regions import Region
from ..errors import let_through
from ..isolation.run_model import from_the_start, lowered_batch, stored_in
from ..numerics.formats import FORMATS, Format, dtype_name
from ..numerics.nodes import op_name
from ..records import Batch, Capture, Literals, Node
from .builder import Recording
from .paths import align
from .record import record

ByNode = dict[str, Literals]
T = TypeVar("T")

_FP16 = FORMATS["fp16"]
_LEAST, _TIMES = 1_000, 2
"""A low-precision run may have _LEAST operations, plus _TIMES as many as the FP32 run. A longer run takes another path,
such as a solver with smaller steps, and counts as failed."""

_JUST_BELOW_ONE = 1 - torch.finfo(torch.float32).eps
_LEAST_ORDINARY, _MOST_ORDINARY = 1 / 512, 8
"""Magnitudes between which a number in the code is assumed not to depend on a dtype. A smaller number may prevent a
division by 0; exp of a larger one may overflow."""


def compare_literals(
    captured: Capture, recording: Recording, model: nn.Module, batch: Batch, formats: tuple[str, ...], seed: int
) -> Capture:
    """Add to the capture how numbers and constants in its graph change if the model runs in low precision.

    If a run fails in the format, the FP32 numbers are kept, and the measurements report the failure. A format that
    torch cannot compute in is replaced by FP16, since all of FP16's limits differ from FP32's.
    """
    may_follow = _may_follow_dtype(recording)
    makes_constants = any(x.is_floating_point() for _, x in _constants(recording))
    if not may_follow and not (recording.asked and makes_constants):
        return captured
    literals: dict[str, ByNode] = {}
    under_autocast: dict[str, ByNode] = {}
    made_in: dict[str, dict[str, torch.dtype]] = {}
    for name in formats:
        row = FORMATS[name]
        dtype = row.dtype if row.native else _FP16.dtype
        assert dtype is not None
        stored = _low_run(recording, model, batch, dtype, seed, stored=True)
        if stored is not None:
            literals[name] = _differences(recording, stored, row)
            made_in[name] = _dtypes_of_constants(recording, stored)
        regional = None
        if may_follow:
            regional = _low_run(recording, model, batch, dtype, seed, stored=False)
        if regional is not None:
            under_autocast[name] = _differences(recording, regional, row)
    nodes = dict[str, Node]()
    for name, node in captured.nodes.items():
        nodes[name] = replace(node, literals=_of(name, literals), autocast_literals=_of(name, under_autocast))
    placeholders = [replace(place, made_in=_of(place.name, made_in)) for place in captured.placeholders]
    return replace(
        captured,
        nodes=nodes,
        placeholders=tuple(placeholders),
        compared=bool(literals or under_autocast),
    )


def _may_follow_dtype(recording: Recording) -> bool:
    """Whether a number in the graph may depend on the dtype of a tensor, such as a limit of float32."""
    leaves = tree_leaves([(node.args, node.kwargs) for node in recording.graph.nodes])
    if any(isinstance(leaf, torch.dtype) for leaf in leaves):
        return True
    numbers = {abs(leaf) for leaf in leaves if isinstance(leaf, float)}
    return recording.asked and any(map(_is_extraordinary, numbers))


def _is_extraordinary(number: float) -> bool:
    """Whether a magnitude in the code is assumed to depend on a dtype."""
    return 0 < number < _LEAST_ORDINARY or number > _MOST_ORDINARY or number == _JUST_BELOW_ONE


def _dtypes_of_constants(ours: Recording, theirs: Recording) -> dict[str, torch.dtype]:
    """{constant: its dtype in the other recording}, if it differs. Constants match by shape and order."""
    pairs = align(_constants_to_align(ours), _constants_to_align(theirs))
    return {name: low.dtype for (name, x), (_, low) in pairs if low.dtype != x.dtype}


def _constants_to_align(
    recording: Recording,
) -> Iterator[tuple[str, Hashable, tuple[str, torch.Tensor]]]:
    for name, x in _constants(recording):
        yield "", tuple(x.shape), (name, x)


def _of(name: str, by_format: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """{format: entry of `name` in `by_format[format]`}; `name` is a node or placeholder."""
    return {fmt: by_name[name] for fmt, by_name in by_format.items() if name in by_name}


def _low_run(
    recording: Recording, model: nn.Module, batch: Batch, dtype: torch.dtype, seed: int, *, stored: bool
) -> Recording | None:
    """The recording of the model stored in the format, or under autocast; None if the run fails."""
    handler = Emulation(lenient=True, most=_LEAST + _TIMES * recording.operations)
    around = None if stored else Region(True, dtype_name(dtype))
    batch = lowered_batch(batch, dtype) if stored else batch

    def run() -> Recording:
        return record(model, batch, handler=handler, around=around)[0]

    try:
        with stored_in(model, dtype) if stored else nullcontext():
            return from_the_start(model, batch, run, seed)
    except Exception as error:
        let_through(error)
        return None


def _constants(recording: Recording) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, x) for name, x in recording.constants.items() if recording.kinds[name] == "constant")


def _differences(ours: Recording, theirs: Recording, row: Format) -> ByNode:
    """{node: numbers in its arguments that differ in the low-precision run}, translated to the format `row`."""
    result: ByNode = {}
    twins = {other: node for node, other in align(_operations(ours), _operations(theirs))}
    for other, node in twins.items():
        changed = _changed_numbers(node, other)
        if changed:
            result[node.name] = Literals(changed)
    for other in theirs.graph.nodes:
        is_new = other.op == "call_function" and other not in twins
        if not is_new or op_name(other.target) != "aten.to.dtype":
            continue
        (source,) = other.all_input_nodes
        if source in twins and len(source.users) == 1:
            name = twins[source].name
            dtype = other.args[1]
            assert isinstance(dtype, torch.dtype)
            result[name] = replace(result.get(name, Literals()), result=dtype)
    if row.native:
        return result
    return {name: translate(literals, row) for name, literals in result.items()}


def _changed_numbers(node: fx.Node, other: fx.Node) -> dict[int | str, Any]:
    """{position or name of an argument: its value in the other node} of the numbers and dtypes that differ."""
    pairs = list[tuple[int | str, Any, Any]]()
    for index, (value, other_value) in enumerate(zip(node.args, other.args, strict=False)):
        pairs.append((index, value, other_value))
    for name in node.kwargs.keys() & other.kwargs.keys():
        pairs.append((name, node.kwargs[name], other.kwargs[name]))
    kinds = ({float}, {float, int}, {torch.dtype})  # not {int}: two integers are sizes or indices
    return {
        key: other_value
        for key, value, other_value in pairs
        if {type(value), type(other_value)} in kinds and value != other_value
    }


def _operations(recording: Recording) -> Iterator[tuple[str, Hashable, fx.Node]]:
    nodes = (node for node in recording.graph.nodes if node.op == "call_function")
    return ((recording.marks[node.name].calls[-1].path, op_name(node.target), node) for node in nodes)


def translate(literals: Literals, row: Format) -> Literals:
    """Convert numbers in the code of an FP16 run to a format that torch cannot compute in.

    FP16 and its limits become the format and its limits. All other numbers in the code keep their FP32 values.
    """
    limits = dict(zip(_limits(_FP16), _limits(row), strict=True))

    def in_format(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return row if value is _FP16.dtype else value
        limit = limits.get(abs(value))
        return None if limit is None else math.copysign(limit, value)

    arguments = {key: in_format(value) for key, value in literals.arguments.items()}
    known = {key: value for key, value in arguments.items() if value is not None}
    return Literals(known, literals.result and in_format(literals.result))


def _limits(row: Format) -> tuple[float, ...]:
    """The values of `torch.finfo` for a format (max, tiny, eps, resolution), and 1 - eps, a common clamp."""
    resolution = 10.0 ** -math.floor(row.mantissa * math.log10(2))
    return row.largest, row.smallest_normal, row.epsilon, resolution, 1 - row.epsilon
