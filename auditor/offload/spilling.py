"""Every large result of an operation of torch goes into mapped files as soon as it is there."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ..numerics.nodes import is_torchs_own
from ..trees import over_tensors, tensors_in
from .arena import Arena

LARGE = 1 << 16
"""Bytes from which a tensor is kept in a file."""

_FIXED = "resize storage that is not resizable"
"""What torch says where an operation is to make a tensor larger than the memory it lies in, which is no other tensor's to give."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)


class Spilling(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """In its body large results of operations lie in the arena, with the same entries at the same strides.

    That goes for what autograd keeps too, and for what it computes. large: bytes from which a result is large.
    stays: asked whether one of so many bytes may stay in memory. after: called after every operation.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        arena: Arena,
        large: int = LARGE,
        stays: Callable[[int], bool] = lambda size: False,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.arena, self.large, self._stays, self._after = arena, large, stays, after

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Not: it would import the compiler."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """What the model compiles runs compiled; it would raise where it may not be split (`fullgraph`)."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        run = _recorded(func) if _is_looked_into(func) else func
        try:
            given = run(*args, **kwargs)
        except RuntimeError as error:
            if not (_FIXED in str(error) and taken_out((args, kwargs))):
                raise
            given = run(*args, **kwargs)
        result = self._kept(given, args, kwargs)
        self._after()
        return result

    def _kept(self, result: Any, args: Any, kwargs: Any) -> Any:
        if type(result) is torch.Tensor:
            return self._moved(result, args, kwargs) if is_large(result, self.large) else result
        if isinstance(result, (tuple, list)) and any(is_large(x, self.large) for x in tensors_in(result)):
            return over_tensors(lambda x: self._moved(x, args, kwargs) if is_large(x, self.large) else x, result)
        return result

    def _moved(self, x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """The result in the arena, but for one that lies in memory which was there before."""
        storage = x.untyped_storage()
        if is_mapped(storage) or self._stays(storage.nbytes()):
            return x
        given = (y for y in tensors_in((args, kwargs)) if y.layout is torch.strided and not y.is_nested)
        if any(y is x or _same(y, storage) for y in given):
            return x
        return moved(x, self.arena)


@cache
def _is_looked_into(func: Any) -> bool:
    """Whether autograd records the parts of an operation: one of the user's own, of whose derivative nothing is registered."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = isinstance(func, torch._ops.OpOverload) and not is_torchs_own(func)
    return own and not any(has(func.name(), key) for key in ("Autograd", "AutogradCPU"))


def _recorded(func: Callable[..., Any]) -> Callable[..., Any]:
    """The operation, its parts seen by autograd, which torch leaves out inside a mode, and nowhere else."""
    of, without = torch._C._dispatch_key_parse, torch._C._SetExcludeDispatchKeyGuard

    def run(*args: Any, **kwargs: Any) -> Any:
        with without(of("AutogradFunctionality"), False), without(of("ADInplaceOrView"), False):
            return func(*args, **kwargs)

    return run


def is_large(x: Any, large: int) -> bool:
    """Whether it is an ordinary tensor in the memory of the CPU, over at least so many bytes."""
    return (
        type(x) in _PLAIN
        and x.device.type == "cpu"
        and x.layout is torch.strided
        and not (x.is_nested or x.is_quantized or x.is_conj() or x.is_neg())
        and x.untyped_storage().nbytes() >= large
    )


def moved(x: torch.Tensor, arena: Arena) -> torch.Tensor:
    """A tensor of the same entries, strides and offset over a copy of the whole storage in the arena."""
    return laid_as(x, arena.copy_of(x.untyped_storage()))


def laid_as(x: torch.Tensor, storage: torch.UntypedStorage) -> torch.Tensor:
    """Another tensor, over a storage as the given one lies over its own."""
    place = x.storage_offset(), x.shape, x.stride()
    with torch.no_grad():
        return torch.empty(0, dtype=x.dtype).set_(storage, *place)


def taken_out(given: Any) -> bool:
    """Put mapped tensors among what an operation is given into memory of their own, which can grow; whether there were any.

    Others over the same storage stay where they are.
    """
    found = [x for x in tensors_in(given) if is_large(x, 1) and is_mapped(x.untyped_storage())]
    for x in found:
        x.data = laid_as(x, x.untyped_storage().clone())  # type: ignore[no-untyped-call]
    return bool(found)


def is_mapped(storage: torch.UntypedStorage) -> bool:
    """Whether it lies in a mapped file of this process already."""
    return not bool(storage.resizable())


def _same(y: torch.Tensor, storage: torch.UntypedStorage) -> bool:
    try:
        return bool(y.untyped_storage()._cdata == storage._cdata)
    except (RuntimeError, NotImplementedError):  # it has none
        return False
