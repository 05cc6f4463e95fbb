"""Which arguments an operation of torch writes into, and a mode that is told of them just before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

Arguments = tuple[tuple[int, str], ...]

_Frames: Any = torch._C._dynamo.eval_frame
_WRITTEN: dict[Any, Arguments | None] = {}
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class SaveBeforeWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls `save` with the tensors that the next operation writes into.

    Directly inside of another one no operation passes through two modes: the outer one tells both, the inner one first.
    """

    supports_higher_order_operators = True

    def __init__(self, save: Callable[[list[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._saves = [save]
        self._outer: SaveBeforeWrite | None = None
        if not hasattr(TorchDispatchMode, "supports_higher_order_operators"):
            _admit_higher_order_operators()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch keeps its compiler away from here: it imports it for that, which takes a second."""
        return not hasattr(_Frames, "set_code_exec_strategy")

    def __enter__(self) -> SaveBeforeWrite:
        innermost = _get_current_dispatch_mode()
        self._outer = innermost if isinstance(innermost, SaveBeforeWrite) else None
        if self._outer is None:
            super().__enter__()  # type: ignore[no-untyped-call]
        else:
            self._outer._saves.insert(0, self._save)
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._outer is None:
            super().__exit__(*exception)  # type: ignore[no-untyped-call]
        else:
            self._outer._saves.remove(self._save)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = _written_by(func)
        if written is None:
            self._tell(_tensors((args, kwargs)))
        elif written:
            self._tell(_tensors([args[i] if i < len(args) else kwargs.get(name) for i, name in written]))
        return func(*args, **kwargs)

    def _tell(self, written: Iterator[torch.Tensor]) -> None:
        tensors = list(written)
        for save in tuple(self._saves):
            save(tensors)


if not SaveBeforeWrite._should_skip_dynamo():  # a compiler that is there already leaves it and what it calls alone
    _alone = _Frames._FrameExecStrategy(_Frames._FrameAction.SKIP, _Frames._FrameAction.SKIP)
    _Frames.set_code_exec_strategy(SaveBeforeWrite.__torch_dispatch__.__code__, _alone)


def tells_nothing(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether what torch does for an operation on these tensors is of interest to no mode and no class of tensors.

    It is one of torch's own, writes into none of them, and only a SaveBeforeWrite looks on. Where autograd saves values,
    a hook of the user's may do anything.
    """
    if getattr(func, "namespace", None) != "aten" or _written_by(func) != ():
        return False
    if torch._C._len_torch_dispatch_stack() != 1 or not isinstance(_get_current_dispatch_mode(), SaveBeforeWrite):
        return False
    return not torch.is_grad_enabled() and all(type(x) in _PLAIN for x in tensors)


def _written_by(func: Any) -> Arguments | None:
    try:
        return _WRITTEN[func]
    except KeyError:
        written = _WRITTEN[func] = written_by(func)
        return written


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
