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
from ..records import Batch, Capture, Literals
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
    leaves = tree_leaves([(node.args, node.kwargs) for node in recording.graph.nodes])
    numbers = {abs(x) for x in leaves if isinstance(x, float)}  # some may depend on a dtype, such as a limit of float32
    telling = any(0 < x < _LEAST_ORDINARY or x > _MOST_ORDINARY or x == _JUST_BELOW_ONE for x in numbers)
    follows = (recording.asked and telling) or any(isinstance(x, torch.dtype) for x in leaves)
    if not follows and not (recording.asked and any(x.is_floating_point() for _, x in _constants(recording))):
        return captured
    literals: dict[str, ByNode] = {}
    under_autocast: dict[str, ByNode] = {}
    made_in: dict[str, dict[str, torch.dtype]] = {}
    for name in formats:
        row = FORMATS[name]
        dtype = (row if row.native else _FP16).dtype
        assert dtype is not None
        stored = _low_run(recording, model, batch, dtype, seed, stored=True)
        if stored is not None:
            literals[name] = _differences(recording, stored, row)
            ours, theirs = ([("", tuple(x.shape), (n, x)) for n, x in _constants(each)] for each in (recording, stored))
            pairs = align(ours, theirs)  # by their order in the graphs
            made_in[name] = {n: low.dtype for (n, x), (_, low) in pairs if low.dtype != x.dtype}
        regional = _low_run(recording, model, batch, dtype, seed, stored=False) if follows else None
        if regional is not None:
            under_autocast[name] = _differences(recording, regional, row)
    return replace(
        captured,
        nodes={
            name: replace(node, literals=_of(name, literals), autocast_literals=_of(name, under_autocast))
            for name, node in captured.nodes.items()
        },
        placeholders=tuple(replace(place, made_in=_of(place.name, made_in)) for place in captured.placeholders),
        compared=bool(literals or under_autocast),
    )


def _of(name: str, found: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """{format: entry of `name` in `found[format]`}; `name` is a node or placeholder."""
    return {fmt: by_name[name] for fmt, by_name in found.items() if name in by_name}


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
    kinds = ({float}, {float, int}, {torch.dtype})  # two integers are sizes or indices
    for other, node in twins.items():
        pairs: list[tuple[int | str, Any, Any]] = [
            *((index, a, b) for index, (a, b) in enumerate(zip(node.args, other.args, strict=False))),
            *((key, node.kwargs[key], other.kwargs[key]) for key in node.kwargs.keys() & other.kwargs.keys()),
        ]
        if changed := {key: b for key, a, b in pairs if {type(a), type(b)} in kinds and a != b}:
            result[node.name] = Literals(changed)
    for other in theirs.graph.nodes:
        if other.op != "call_function" or other in twins or op_name(other.target) != "aten.to.dtype":
            continue
        (source,) = other.all_input_nodes
        if source in twins and len(source.users) == 1:
            name, dtype = twins[source].name, other.args[1]
            assert isinstance(dtype, torch.dtype)
            result[name] = replace(result.get(name, Literals()), result=dtype)
    return result if row.native else {name: translate(literals, row) for name, literals in result.items()}


def _operations(recording: Recording) -> Iterator[tuple[str, Hashable, fx.Node]]:
    nodes = (node for node in recording.graph.nodes if node.op == "call_function")
    return ((recording.marks[node.name].calls[-1].path, op_name(node.target), node) for node in nodes)


def translate(found: Literals, row: Format) -> Literals:
    """Convert numbers in the code of an FP16 run to a format that torch cannot compute in.

    FP16 and its limits become the format and its limits. All other numbers in the code keep their FP32 values.
    """

    def as_there(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return row if value is _FP16.dtype else value
        limits = zip(_limits(_FP16), _limits(row), strict=True)
        return next((math.copysign(theirs, value) for ours, theirs in limits if abs(value) == ours), None)

    arguments = {key: as_there(value) for key, value in found.arguments.items()}
    result = found.result and as_there(found.result)
    return Literals({key: value for key, value in arguments.items() if value is not None}, result)


def _limits(row: Format) -> tuple[float, ...]:
    """The values of `torch.finfo` for a format (max, tiny, eps, resolution), and 1 - eps, a common clamp."""
    resolution = 10.0 ** -math.floor(row.mantissa * math.log10(2))
    return row.largest, row.smallest_normal, row.epsilon, resolution, 1 - row.epsilon
