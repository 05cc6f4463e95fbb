"""Restores tensors: storage, entries, flags and gradients; entries are copied before they are first written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode,
    _push_mode,
    is_traceable_wrapper_subclass,
)

from ..numerics.entries import is_plain, places, tensors_in

AT_ONCE = 4 << 20
"""Bytes in total up to which all tensors are copied at the start. Above this size, a tensor is copied before its first
write, and watching for writes slows down every operation."""

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def plain_torch() -> Iterator[None]:
    """In the `with` block, gradients, torch function and dispatch modes, and tensor subclasses are disabled."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


class TensorState:
    """A tensor's storage, flags, gradient and hooks, when this object is created. children: gradient and hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._leaf, self._requires_grad = tensor.is_leaf, tensor.requires_grad
        self._grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        self._hooks = {name: getattr(tensor, name, None) for name in _HOOKS}
        self.children = (self._grad, *self._hooks.values())
        self._place = _place(tensor)
        # Another tensor with the same storage. A wrapper tensor has no storage, and tensors inside a transform of
        # torch.func cannot be assigned one.
        wraps = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
        self._alias = None if wraps or (self._place is None and is_plain(tensor)) else _alias_of(tensor)

    def restore(self) -> None:
        """Restore storage, shape, leaf status, `requires_grad` and hooks."""
        tensor = self._tensor
        if self._alias is not None and (self._place is None or _place(tensor) != self._place):
            tensor.data = self._alias
            if tensor.layout in _COMPRESSED:  # setting `data` keeps the index tensors
                tensor.resize_as_sparse_(self._alias)
        if self._leaf and not tensor.is_leaf:
            self._cut_off(tensor, tensor._base)
        if tensor.requires_grad != self._requires_grad:
            tensor.requires_grad_(self._requires_grad)
        for name, hooks in self._hooks.items():
            if hooks is None:  # torch may keep calling hooks of a removed dict
                (getattr(tensor, name, None) or {}).clear()

    def _cut_off(self, tensor: torch.Tensor, base: torch.Tensor | None) -> None:
        """Make the tensor a leaf. torch cannot detach views in place: a view is swapped with a new view of its base."""
        if base is None:
            tensor.detach_()
        elif self._place is not None:
            if not base.is_leaf:
                base.detach_()
            with torch.enable_grad():  # otherwise the view could not be written with gradients enabled
                torch._C._swap_tensor_impl(tensor, base.as_strided(*self._place[2:]))

    def restore_gradient(self) -> None:
        """Restore the original gradient, which may be None."""
        if self._leaf and self._tensor.grad is not self._grad:
            self._tensor.grad = self._grad


class StorageCopies:
    """The storages of some tensors, with their bytes before the first write."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[torch.UntypedStorage, int]] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}

    def watch(self, tensor: torch.Tensor) -> None:
        """Add a tensor's storages to the set of storages that `restore` restores."""
        self._known.update((storage._cdata, (storage, storage.nbytes())) for storage in memory(tensor))

    def saved_before_written(self) -> AbstractContextManager[object]:
        """A context manager that copies storages at once or, above `AT_ONCE` bytes, before their first write."""
        pending = {key: known for key, known in self._known.items() if key not in self._copies}
        if sum(size for _, size in pending.values()) > AT_ONCE:
            return _SaveBeforeWrite(self._before_written)
        with plain_torch():
            self._copies |= {key: storage.clone() for key, (storage, _) in pending.items()}  # type: ignore[no-untyped-call]
        return nullcontext()

    def save(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy the current bytes of `tensors`, except of storages that are already copied."""
        for storage in (storage for tensor in tensors for storage in memory(tensor)):
            if storage._cdata not in self._copies:
                self._known.setdefault(storage._cdata, (storage, storage.nbytes()))
                self._copies[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]

    def restore(self) -> Iterator[str]:
        """Restore the bytes of all storages; yield descriptions of storages that cannot be restored."""
        for key, copy in self._copies.items():
            try:
                _write(self._known[key][0], copy)
            except RuntimeError as error:
                yield f"a storage of {copy.nbytes()} bytes: {error}"
        for storage, size in self._known.values():
            if storage.nbytes() > size:  # a storage that grew still begins with the original bytes
                storage.resize_(size)
            if storage.nbytes() != size:
                yield f"a storage of {size} bytes was resized to {storage.nbytes()}, not by an operation that torch reports"
        # An exception in flight keeps this object alive.
        self._copies.clear()

    def _before_written(self, tensors: Iterable[torch.Tensor]) -> None:
        # Not plain_torch, which would take most of the time: most writes go to tensors that are not watched.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            watched = [x for x in tensors if any(storage._cdata in self._known for storage in memory(x))]
        if watched:
            with plain_torch():
                self.save(watched)


class _SaveBeforeWrite(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that calls `save` with the tensors to which the next operation writes.

    A mode slows down every operation. So a mode that is entered directly inside another one takes its place until it is
    left, and also calls its `save`.
    """

    supports_higher_order_operators = True

    def __init__(self, save: Callable[[Iterable[torch.Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._save = save
        self._replaced: _SaveBeforeWrite | None = None

    def __enter__(self) -> _SaveBeforeWrite:
        outer = _get_current_dispatch_mode()  # type: ignore[no-untyped-call]
        if isinstance(outer, _SaveBeforeWrite):
            _pop_mode()  # type: ignore[no-untyped-call]
            self._replaced = outer
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        if self._replaced is not None:
            _push_mode(self._replaced)  # type: ignore[no-untyped-call]
            self._replaced = None

    def _save_for_all(self, tensors: list[torch.Tensor]) -> None:
        """Call `save` of this mode and of the modes whose place it takes."""
        self._save(tensors)
        if self._replaced is not None:
            self._replaced._save_for_all(tensors)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        written = written_by(func)
        if written is None:
            self._save_for_all(tensors_in((args, kwargs)))
        elif written:
            self._save_for_all(tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in written]))
        return func(*args, **kwargs)


# A compiler that is already loaded must not compile this method and the functions it calls.
_Frames: Any = torch._C._dynamo.eval_frame
_alone = _Frames._FrameExecStrategy(_Frames._FrameAction.SKIP, _Frames._FrameAction.SKIP)
_Frames.set_code_exec_strategy(_SaveBeforeWrite.__torch_dispatch__.__code__, _alone)


@cache
def written_by(func: Any) -> tuple[tuple[int, str], ...] | None:
    """Position and name of every argument to which `func` may write; None if `func` may write to any argument.

    The result includes writes that schemas omit: running statistics of older batch norms, collectives of c10d, and
    operations whose name ends in an underscore.
    """
    schema = getattr(func, "_schema", None)
    if schema is None:
        return None
    namespace, name = schema.name.split("::")
    writes = (a.name.startswith("running_") or (a.alias_info and a.alias_info.is_write) for a in schema.arguments)
    named = tuple((i, schema.arguments[i].name) for i, written in enumerate(writes) if written)
    if not named and (namespace == "c10d" or (name.endswith("_") and not name.endswith("__"))):
        return None
    return named


def memory(tensor: Any) -> list[torch.UntypedStorage]:
    """The storages of a tensor's entries: several for sparse tensors and wrapper subclasses."""
    try:
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) and is_traceable_wrapper_subclass(tensor):
            names, _ = tensor.__tensor_flatten__()
            return [s for name in names for s in memory(getattr(tensor, name))]
        if tensor.layout == torch.sparse_coo:
            return [s for part in (tensor._indices(), tensor._values()) for s in memory(part)]
        if not is_plain(tensor) and not tensor.is_nested:
            return [s for part in (*places(tensor), tensor.values()) for s in memory(part)]
        storage = tensor.untyped_storage()
        # Meta, fake and some wrapper tensors report a size, but have no memory; some refuse to give an address.
        is_there = storage.device.type != "meta" and (not storage.nbytes() or storage.data_ptr())
        return [storage] if is_there else []
    except (RuntimeError, NotImplementedError):
        return []


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Storage, dtype, shape, strides and offset; None for tensors without strides, whose layout is unknown."""
    if not is_plain(tensor):
        return None
    try:
        where = tensor.untyped_storage()._cdata
        return where, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    except (RuntimeError, NotImplementedError):
        return None


def _alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor with the same memory and shape. `data` of a compressed sparse tensor shares the index tensors
    themselves, which resizing changes, so its alias has others in the same memory."""
    if tensor.layout not in _COMPRESSED:
        return tensor.data
    compressed, plain = places(tensor)
    same = partial(torch.sparse_compressed_tensor, size=tensor.shape, layout=tensor.layout, check_invariants=False)
    return same(compressed, plain, tensor.values())


def _write(storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
    """Copy bytes unless they are equal: the memory may be mapped from a file, or be read-only."""
    if storage.nbytes() != copy.nbytes():
        storage.resize_(copy.nbytes())
    elif torch.equal(_bytes(storage), _bytes(copy)):
        return
    storage.copy_(copy)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage's bytes, as 8-byte integers where possible, which compare six times as fast."""
    size, dtype = (8, torch.int64) if storage.nbytes() % 8 == 0 else (1, torch.uint8)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, 0, (storage.nbytes() // size,), (1,))
