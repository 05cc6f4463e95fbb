"""Replaces operations by functional ones: without writes, with fixed random numbers, and with one form of cast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..isolation.draws import Draw
from ..numerics.entries import over_tensors
from ..numerics.formats import format_of
from ..numerics.nodes import arguments_of, operation_of, overload_of

_aten = torch.ops.aten
_MASKS = (torch.bool, torch.uint8)


@cache
def written_arguments(op: Any) -> tuple[int | str, ...]:
    """Positions of the arguments that an operation writes to; names for keyword-only arguments."""
    written = list[int | str]()
    for position, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append(argument.name if argument.kwarg_only else position)
    return tuple(written)


def positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs), with keyword arguments converted to positional ones where the schema allows it."""
    if not kwargs:
        return args, kwargs
    kwargs, result = dict(kwargs), list(args)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs:
            break
        if argument.name not in kwargs and not argument.has_default_value():
            break
        result.append(kwargs.pop(argument.name) if argument.name in kwargs else argument.default_value)
    return tuple(result), kwargs


def with_defaults(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Append the defaults of omitted positional arguments, since the functional variant may have none: `bernoulli_` has
    a default p, `bernoulli.p` has not."""
    rest = op._schema.arguments[len(args) :]
    values = [a.default_value for a in rest if not a.kwarg_only and a.has_default_value()]
    return (*args, *values)


def promotes(op: Any, x: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    """Whether the functional variant of an in-place operation may return another dtype than `x`, the tensor that the
    in-place operation writes to."""
    if operation_of(op).truth:
        return x.dtype is not torch.bool
    rank = _rank(x.dtype)
    return any(y.dtype is not x.dtype and _rank(y.dtype) >= rank for y in given)


def _rank(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    if dtype.is_floating_point:
        return 2
    return int(dtype is not torch.bool)


@cache
def twin_of(op: Any) -> Any:
    """The functional overload of an in-place operation `op`, with the same arguments; None if torch has none.

    Examples: `add_.Tensor` -> `add.Tensor`, `copy_` -> `copy`, `add.out` -> `add.Tensor`.
    """
    row = operation_of(op)
    inputs = [argument for argument in op._schema.arguments if not argument.is_out]
    has_outs = len(inputs) < len(op._schema.arguments)
    is_in_place = row.name.endswith("_") and not row.name.endswith("__")
    if is_in_place:
        name = row.twin or row.name.rstrip("_")
    elif has_outs:
        name = row.name
    else:
        return None
    packet = getattr(getattr(torch.ops, op.namespace), name, None)
    if packet is None:
        return None
    wanted = _signature(inputs)
    fitting = list[Any]()
    for overload in packet.overloads():
        candidate = getattr(packet, overload)
        if not candidate._schema.is_mutable and _signature(candidate._schema.arguments) == wanted:
            fitting.append(candidate)
    result = min(fitting, key=lambda candidate: candidate._overloadname != op._overloadname, default=None)
    return copy if result is _aten.copy.default else result


def _signature(arguments: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Types of all arguments, and names of all but the first, which may be `self` or `input`."""
    types = [str(argument.type) for argument in arguments]
    names = [argument.name for argument in arguments[1:]]
    return types, names


def copy(target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
    """`aten.copy` with a derivative; torch defines one only for the in-place `copy_`."""
    return torch.empty_like(target).copy_(source, non_blocking)


copy.stands_for = _aten.copy.default  # type: ignore[attr-defined]


class WritesOnCopies:
    """An operation that writes to its arguments and has no functional variant; it runs on copies of these arguments.

    A call returns (the operation's result, the written copies).
    """

    def __init__(self, op: Callable[..., Any], places: tuple[int | str, ...]) -> None:
        self.op, self.places = op, places
        self.stands_for = overload_of(op)
        self.__name__ = self.__qualname__ = operation_of(op).name

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, list[torch.Tensor]]:
        given, own, copies = list(args), dict(kwargs), []
        for place in self.places:
            holder: Any = given if isinstance(place, int) else own
            if isinstance(place, int) and place >= len(given):
                continue
            holder[place] = over_tensors(torch.clone, holder[place])
            copies += [x for x in pytree.tree_leaves(holder[place]) if isinstance(x, torch.Tensor)]
        result = self.op(*given, **own)
        known = {id(x) for x in copies}
        fresh = over_tensors(lambda x: _aten.alias(x) if id(x) in known else x, result)
        return fresh, copies


class PinnedDraw:
    """A random operation that draws the same numbers in every call."""

    def __init__(self, op: Callable[..., Any], draw: Draw) -> None:
        self.op, self.draw = op, draw
        self.stands_for = overload_of(op)
        self.__name__ = self.__qualname__ = operation_of(op).name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.draw.repeat(self.op, args, kwargs)


def as_cast(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> tuple[Any, Any, Any]:
    """Convert any form of cast to `aten.to.dtype` with its arguments; other operations are returned unchanged.

    The caller moves the result to another device if the recorded operation did.
    """
    dtype = cast_to(op, given, args, kwargs)
    if dtype is None or format_of(dtype) is None:
        return op, args, kwargs
    return _aten.to.dtype, (args[0], dtype), {}


def cast_to(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
    """The dtype that an operation casts to; None if the operation is no cast."""
    if not operation_of(op).cast:
        return None
    named = arguments_of(op, args, kwargs, defaults=True)
    if "dtype" in named:
        return named["dtype"]
    return given[-1].dtype if "other" in named else None


def is_no_cast(op: Any, given: list[torch.Tensor], args: Any, kwargs: Any) -> bool:
    """For an operation that returned its input's dtype: whether the user's code requested no cast. `x.to(device)`
    requests no cast, although torch adds x's dtype to its arguments."""
    dtype = cast_to(op, given, args, kwargs)
    return dtype is None or (op is _aten.to.dtype_layout and dtype is given[0].dtype)


def shape_from(op: Any, args: tuple[Any, ...]) -> list[torch.Tensor]:
    """Arguments whose entries determine the shape of the result, such as the input of `nonzero`."""
    how = operation_of(op).shape_from
    if how == "masks":  # writing a single number does not depend on how many entries a mask selects
        single = len(args) > 2 and args[2].numel() == 1
        chosen = [] if single else [x for x in args[1] if isinstance(x, torch.Tensor) and x.dtype in _MASKS]
    elif how == "classes":
        chosen = [] if len(args) > 1 and args[1] != -1 else [args[0]]
    elif how == "second" and len(args) > 1:
        chosen = [args[1]]
    elif how == "first" or (how != "sizes" and torch.Tag.dynamic_output_shape in op.tags) or op is _aten.where.default:
        chosen = list(args[:1])
    else:
        chosen = []
    return [x for x in chosen if isinstance(x, torch.Tensor)]
