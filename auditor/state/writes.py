"""Which arguments an operation of torch writes into, and a mode that is told of them just before."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Arguments = tuple[tuple[int, str], ...]

_WRITTEN: dict[Any, Arguments | None] = {}


class SaveBeforeWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `save` with the tensors that the next operation writes into."""

    supports_higher_order_operators = True

    def __init__(self, save: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            _admit_higher_order_operators()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            written = _WRITTEN[func]
        except KeyError:
            written = _WRITTEN[func] = written_by(func)
        if written is None:
            self._save(list(_tensors((args, kwargs))))
        elif written:
            values = [args[i] if i < len(args) else kwargs.get(name) for i, name in written]
            self._save(list(_tensors(values)))
        return func(*args, **kwargs)


def written_by(func: Any) -> Arguments | None:
    """Position and name of every argument that `func` may write into; None: any of them.

    Declared writes, and those that some schemas leave out: the running statistics of the older batch norms, the
    collectives of c10d, operations whose name ends in an underscore.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    namespace, name = schema.name.split("::")
    named = tuple((i, a.name) for i, a in enumerate(schema.arguments) if _is_written(a))
    if not named and (namespace == "c10d" or (name.endswith("_") and not name.endswith("__"))):
        return None
    return named


def _is_written(argument: Any) -> bool:
    alias = argument.alias_info
    return bool(alias is not None and alias.is_write) or str(argument.name).startswith("running_")


def _admit_higher_order_operators() -> None:
    """Early releases refuse them under a mode for which they have no rule."""
    for operator in torch._ops._higher_order_ops.values():
        operator.python_key_table.setdefault(SaveBeforeWrite, partial(_dispatch, operator))


def _dispatch(operator: Any, mode: SaveBeforeWrite, *args: Any, **kwargs: Any) -> Any:
    return mode.__torch_dispatch__(operator, (), args, kwargs)


def _tensors(values: Any) -> Iterator[torch.Tensor]:
    if isinstance(values, torch.Tensor):
        yield values
    elif isinstance(values, list | tuple | dict):
        for value in values.values() if isinstance(values, dict) else values:
            yield from _tensors(value)
