"""Functional stand-ins: of operations that write to their arguments, and of those that draw random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ..isolation.draws import Draw
from ..numerics.nodes import operation_of, overload_of


def writes_nothing(op: Any) -> bool:
    """Whether the operation leaves entries, shape and memory of its argument alone."""
    return operation_of(op).writes_nothing


def moves(op: Any) -> bool:
    """Whether the operation gives its argument another shape in place."""
    return operation_of(op).view == "always"


def replaces(op: Any) -> bool:
    """Whether the operation gives its argument other memory."""
    return operation_of(op).replaces_memory


@cache
def written_arguments(op: Any) -> tuple[int | str, ...]:
    """Positions, or names where they are keywords only, of the arguments that an operation writes to."""
    found: list[int | str] = []
    for index, argument in enumerate(op._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found.append(argument.name if argument.kwarg_only else index)
    return tuple(found)


def positional(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with those in their positions that may be: Python's callers name them as they like."""
    if not kwargs:
        return args, kwargs
    kwargs, found = dict(kwargs), list(args)
    for argument in op._schema.arguments[len(args) :]:
        if argument.kwarg_only or not kwargs:
            break
        if argument.name not in kwargs and not argument.has_default_value():
            break
        found.append(kwargs.pop(argument.name) if argument.name in kwargs else argument.default_value)
    return tuple(found), kwargs


def completed(op: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with the defaults that were left out: a twin may have none, as `bernoulli.p` beside `bernoulli_`."""
    rest = op._schema.arguments[len(args) :]
    values = [a.default_value for a in rest if not a.kwarg_only and a.has_default_value()]
    return (*args, *values)


def promotes(op: Any, x: torch.Tensor, given: Sequence[torch.Tensor]) -> bool:
    """Whether an operation's twin may give another dtype than `x`, which the operation itself writes to, has."""
    if operation_of(op).truth:
        return x.dtype is not torch.bool
    rank = _rank(x.dtype)
    return any(y.dtype is not x.dtype and _rank(y.dtype) >= rank for y in given)


def _rank(dtype: torch.dtype) -> int:
    if dtype.is_complex:
        return 3
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)


@cache
def twin_of(op: Any) -> Any:
    """The overload that returns what `op` writes, with the same arguments; None where torch has none.

    Examples: `add_.Tensor` -> `add.Tensor`, `copy_` -> `copy`, `add.out` -> `add.Tensor`.
    """
    row, namespace = operation_of(op), getattr(torch.ops, op.namespace)
    wanted = [a for a in op._schema.arguments if not a.is_out]
    name = row.name
    in_place = name.endswith("_") and not name.endswith("__")
    if not in_place and not any(a.is_out for a in op._schema.arguments):
        return None
    packet = getattr(namespace, (row.twin or name.rstrip("_")) if in_place else name, None)
    if packet is None:
        return None
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    fitting = (o for o in overloads if not o._schema.is_mutable and _alike(o._schema.arguments, wanted))
    named = sorted(fitting, key=lambda o: o._overloadname != op._overloadname)
    found = named[0] if named else None
    return COPY if found is COPY.stands_for else found


def _alike(ours: Sequence[Any], theirs: Sequence[Any]) -> bool:
    """Whether arguments are the same; the first may be `self` here and `input` there."""
    same = [str(a.type) for a in ours] == [str(a.type) for a in theirs]
    return same and [a.name for a in ours[1:]] == [a.name for a in theirs[1:]]


class _Copy:
    """`aten.copy`, with the derivative that torch gives to `copy_` alone."""

    stands_for = torch.ops.aten.copy.default

    def __init__(self) -> None:
        self.__name__ = self.__qualname__ = "copy"
        self.__module__ = __name__

    def __call__(self, target: torch.Tensor, source: Any, non_blocking: bool = False) -> torch.Tensor:
        return torch.empty_like(target).copy_(source, non_blocking)


COPY = _Copy()


class Written:
    """An operation that writes to its arguments and has no twin, run on copies.

    Called, it gives (what the operation returns, the copies of what it wrote to).
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
            holder[place] = pytree.tree_map_only(torch.Tensor, torch.clone, holder[place])
            copies += [x for x in pytree.tree_leaves(holder[place]) if isinstance(x, torch.Tensor)]
        result = self.op(*given, **own)
        known = {id(x) for x in copies}
        fresh = pytree.tree_map_only(torch.Tensor, lambda x: torch.ops.aten.alias(x) if id(x) in known else x, result)
        return fresh, copies


class Drawn:
    """An operation that drew random numbers, which draws the same ones whenever it is called again."""

    def __init__(self, op: Callable[..., Any], draw: Draw) -> None:
        self.op, self.draw = op, draw
        self.stands_for = overload_of(op)
        self.__name__ = self.__qualname__ = operation_of(op).name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.draw.again(self.op, args, kwargs)
