"""Literals that Python derived from a tensor's dtype, found by recording the model once more in each format."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from difflib import SequenceMatcher
from functools import cache
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.utils._pytree import tree_leaves

from ..isolation.answer import from_the_start, lowered_batch, stored_in
from ..numerics.formats import FORMATS, Format, dtype_of
from ..numerics.nodes import op_name, row_of
from ..raised import let_through
from ..records import Batch, Capture, Literals
from .builder import Tape
from .imitation import Imitation
from .outlines import Outlines
from .record import record
from .regions import Region
from .stand_in import stand_in, translated

ByNode = dict[str, Literals]
T = TypeVar("T")

_INFO = torch.finfo(torch.float32)
_LEAST, _TIMES = 1_000, 2
"""A low run that takes more operations, for each of the FP32 run, is on a path of its own: solvers halve their steps."""
_RESOLUTION = _INFO.resolution
_TELLTALE = (_INFO.max, _INFO.tiny, _INFO.eps, _RESOLUTION)

_LEAST_ORDINARY, _MOST_ORDINARY = 1 / 512, 8
"""Numbers between these are at home in every format: smaller ones keep from a division by 0, e to a larger one may overflow."""


def compared(
    captured: Capture, tape: Tape, model: nn.Module, batch: Batch, formats: tuple[str, ...], seed: int
) -> Capture:
    """The capture with what its nodes, and the constants among its placeholders, become when the model is low.

    A format that torch has no dtype for is stood in for by one that it has, see stand_in.py.
    The model is run again only where its tape holds a dtype, a limit of float32, or, once Python looked at a dtype, a
    constant, or a very small or large number, which it may have chosen by that; and not for 1e-6 alone, which is the resolution of float32, and
    what many models write, where Python was seen to look at none. A run that breaks in the format leaves the FP32 literals standing: the measurements name why.
    """
    kinds = {kind for node in tape.graph.nodes for kind in _told((node.args, node.kwargs))}
    if tape.asked and any(
        x.is_floating_point() for name, x in tape.constants.items() if tape.kinds[name] == "constant"
    ):
        kinds.add(None)
    if tape.asked and any(_is_extreme(x) for node in tape.graph.nodes for x in _numbers(node)):
        kinds.add(None)
    if not kinds:
        return captured
    if kinds == {_RESOLUTION} and not tape.asked:
        return replace(captured, compared=True)
    most = _LEAST + _TIMES * tape.operations
    literals: dict[str, ByNode] = {}
    under_autocast: dict[str, ByNode] = {}
    made_in: dict[str, dict[str, torch.dtype]] = {}
    for name in formats:
        row = FORMATS[name]
        dtype = dtype_of(stand_in(row).name)
        stored = _in_dtype(model, batch, dtype, seed, most)
        if stored is not None:
            literals[name], made_in[name] = _in_format(_differences(tape, stored), row), _constants_in(tape, stored)
        regional = _in_region(model, batch, dtype, seed, most)
        if regional is not None:
            under_autocast[name] = _in_format(_differences(tape, regional), row)
    return replace(
        captured,
        nodes={
            name: replace(node, literals=_of(name, literals), autocast_literals=_of(name, under_autocast))
            for name, node in captured.nodes.items()
        },
        placeholders=tuple(replace(place, made_in=_of(place.name, made_in)) for place in captured.placeholders),
        compared=bool(literals or under_autocast),
    )


def _in_format(found: ByNode, row: Format) -> ByNode:
    return {name: translated(literals, row) for name, literals in found.items()}


def _of(name: str, found: Mapping[str, Mapping[str, T]]) -> dict[str, T]:
    """What was found in each format, of one node or placeholder."""
    return {fmt: by_name[name] for fmt, by_name in found.items() if name in by_name}


def _told(value: Any) -> Iterator[float | None]:
    """The limits of float32 among a node's arguments; None for a dtype, and for a number just below one."""
    if isinstance(value, (tuple, list)):
        for part in value:
            yield from _told(part)
    elif isinstance(value, dict):
        yield from _told(tuple(value.values()))
    elif isinstance(value, slice):
        yield from _told((value.start, value.stop, value.step))
    elif isinstance(value, torch.dtype):
        yield None
    elif isinstance(value, float):
        if value == 1 - _INFO.eps:
            yield None
        yield from (limit for limit in _TELLTALE if math.isclose(abs(value), limit, rel_tol=1e-6))


def _numbers(node: fx.Node) -> Iterator[float]:
    """Those among an operation's arguments; integers where any number would do, of what reads tensors and gives no integers:
    others are sizes, or places."""
    yield from (x for x in tree_leaves((node.args, node.kwargs)) if isinstance(x, float))
    value = node.meta.get("val")
    if not node.all_input_nodes or not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return
    given: list[tuple[int | str, Any]] = [*enumerate(node.args), *node.kwargs.items()]
    yield from (float(x) for key, x in given if type(x) is int and key in _scalars(node.target))


@cache
def _scalars(target: Any) -> frozenset[int | str]:
    """Positions and names of an operation's arguments that are a number of any type."""
    arguments = target._schema.arguments if isinstance(target, torch._ops.OpOverload) else ()
    places = ((index, x.name) for index, x in enumerate(arguments) if "number" in str(x.type))
    return frozenset(key for pair in places for key in pair)


def _is_extreme(x: float) -> bool:
    """Whether it is a number that a format may not do with."""
    return 0 < abs(x) < _LEAST_ORDINARY or abs(x) > _MOST_ORDINARY


def _in_dtype(model: nn.Module, batch: Batch, dtype: torch.dtype, seed: int, most: int) -> Tape | None:
    """The tape of the model stored in the format."""
    low = lowered_batch(batch, dtype)
    try:
        with stored_in(model, dtype):
            return _recorded(model, low, None, seed, most)
    except Exception as error:
        let_through(error)
        return None


def _in_region(model: nn.Module, batch: Batch, dtype: torch.dtype, seed: int, most: int) -> Tape | None:
    """The tape of the model under autocast."""
    try:
        return _recorded(model, batch, Region(True, str(dtype).removeprefix("torch.")), seed, most)
    except Exception as error:
        let_through(error)
        return None


def _recorded(model: nn.Module, batch: Batch, around: Region | None, seed: int, most: int) -> Tape:
    """The tape of a low run, at a fraction of its cost where no value is read on the way."""
    try:
        tape = _run(Outlines(lenient=True, most=most), model, batch, around, seed)
    except Exception as error:  # zeros may be singular, or have no gradient
        let_through(error)
        return _run(Imitation(lenient=True, most=most), model, batch, around, seed)
    return _run(Imitation(lenient=True, most=most), model, batch, around, seed) if tape.reads else tape


def _run(handler: Imitation, model: nn.Module, batch: Batch, around: Region | None, seed: int) -> Tape:
    return from_the_start(
        model, batch, lambda: record(model, batch, handler=handler, around=around, bare=True)[0], seed
    )


def _constants_in(ours: Tape, theirs: Tape) -> dict[str, torch.dtype]:
    """Constants that the low model makes in another dtype than the FP32 one; they are known by their order."""
    mine, other = (
        [(n, x) for n, x in tape.constants.items() if tape.kinds[n] == "constant"] for tape in (ours, theirs)
    )
    pairs = _twins(mine, other, [tuple(x.shape) for _, x in mine], [tuple(x.shape) for _, x in other])
    return {name: low.dtype for (name, x), (_, low) in pairs if low.dtype != x.dtype}


def _differences(ours: Tape, theirs: Tape, *, casts: bool = True) -> ByNode:
    mine, others = _operations(ours, casts), _operations(theirs, casts)
    found: ByNode = {}
    twins: dict[fx.Node, fx.Node] = {}
    for node, other in _twins(mine, others, [_key(n, ours) for n in mine], [_key(n, theirs) for n in others]):
        twins[other] = node
        changed = _changed_literals(node, other)
        if changed:
            found[node.name] = Literals(changed)
    for other in others if casts else ():
        if other in twins or op_name(other.target) != "aten.to.dtype":
            continue
        (source,) = other.all_input_nodes
        if source in twins and len(source.users) == 1:
            name, dtype = twins[source].name, other.args[1]
            assert isinstance(dtype, torch.dtype)
            found[name] = replace(found.get(name, Literals()), result=dtype)
    return found


def _twins(
    ours: Sequence[T], theirs: Sequence[T], our_keys: Sequence[Hashable], their_keys: Sequence[Hashable]
) -> Iterator[tuple[T, T]]:
    """Items with equal keys, in the same order."""
    if our_keys == their_keys:  # nearly always; the general way takes the square of the length
        yield from zip(ours, theirs, strict=True)
        return
    matcher = SequenceMatcher(None, our_keys, their_keys, autojunk=False)
    for block in matcher.get_matching_blocks():
        yield from zip(ours[block.a :][: block.size], theirs[block.b :][: block.size], strict=True)


def _operations(tape: Tape, casts: bool) -> list[fx.Node]:
    nodes = [node for node in tape.graph.nodes if node.op == "call_function"]
    return [node for node in nodes if casts or not row_of(node).cast]


def _key(node: fx.Node, tape: Tape) -> tuple[str, str]:
    return op_name(node.target), tape.marks[node.name].calls[-1].path


def _changed_literals(mine: fx.Node, other: fx.Node) -> dict[int | str, Any]:
    pairs: list[tuple[int | str, Any, Any]] = [
        *((index, a, b) for index, (a, b) in enumerate(zip(mine.args, other.args, strict=False))),
        *((key, mine.kwargs[key], other.kwargs[key]) for key in mine.kwargs.keys() & other.kwargs.keys()),
    ]
    scalars = _scalars(mine.target)

    def told(key: int | str, a: Any, b: Any) -> bool:
        if key in scalars:
            return {type(a), type(b)} <= {int, float}
        return type(a) is type(b) and isinstance(a, (float, torch.dtype))

    return {key: b for key, a, b in pairs if told(key, a, b) and a != b}
