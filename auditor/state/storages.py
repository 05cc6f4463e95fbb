"""The memory behind tensors: small pieces are copied at once, the others just before they are first written."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from enum import IntEnum
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..raised import device_is_full
from .writes import SaveBeforeWrite

_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class Role(IntEnum):
    """How likely a run is to write into a tensor: the lower, the sooner it is copied at once."""

    BUFFER = 0
    PLAIN = 1
    PARAMETER = 2


# Copied before every run, in bytes: what models do write, and the little that guards against writes nothing can see.
AT_ONCE = {Role.BUFFER: 64 << 20, Role.PLAIN: 64 << 20, Role.PARAMETER: 1 << 20}


@contextmanager
def plain_torch() -> Iterator[None]:
    """No gradients, and neither modes nor subclasses of tensors take part."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch(), torch.no_grad():
        yield


class Storages:
    """The storages of some tensors, and what they held at the start."""

    def __init__(self) -> None:
        self._known: dict[int, torch.UntypedStorage] = {}
        self._sizes: dict[int, int] = {}
        self._roles: dict[int, Role] = {}
        self._copies: dict[int, torch.UntypedStorage] = {}
        self._starts: list[int] = []
        self._at: list[int] = []

    def add(self, found: list[torch.UntypedStorage], role: Role) -> bool:
        """Watch them; False if there are none."""
        for storage in found:
            key = storage._cdata
            self._known[key] = storage
            self._sizes[key] = storage.nbytes()
            self._roles[key] = min(role, self._roles.get(key, role))
        return bool(found)

    def copy_small(self) -> None:
        """Copy, within the budget of each role, buffers before the rest and small before large."""
        left = dict(AT_ONCE)
        for key in sorted(self._known, key=lambda key: (self._roles[key], self._sizes[key])):
            size, role = self._sizes[key], self._roles[key]
            if size <= left[role]:
                left[role] -= size
                self._save(key)

    def saved_before_written(self) -> AbstractContextManager[object]:
        """A context in which what was not copied yet is copied before the first operation that writes into it."""
        watched = [key for key in self._known if key not in self._copies]
        if not watched:
            return nullcontext()
        starts = sorted((pointer, key) for key in watched if (pointer := _address(self._known[key])))
        self._starts, self._at = [start for start, _ in starts], [key for _, key in starts]
        return SaveBeforeWrite(self._before_write)

    def written(self) -> bool:
        """Whether other bytes are there than at the start, in what was copied since or then."""
        return any(not _equal(self._known[key], copy) for key, copy in self._copies.items()) or any(
            storage.nbytes() != self._sizes[key] for key, storage in self._known.items()
        )

    def restore(self) -> Iterator[str]:
        """Put the bytes back and yield what could not be.

        The last copy goes first: where two storages lie over the same memory, the earlier copy is the true one.
        Raises: torch.OutOfMemoryError, where a GPU has no memory left to compare with.
        """
        for key, copy in reversed(self._copies.items()):
            try:
                _write(self._known[key], copy)
            except RuntimeError as error:
                if device_is_full(error):
                    raise
                yield f"a storage of {self._sizes[key]} bytes: {error}"
        for key, storage in self._known.items():
            if storage.nbytes() != self._sizes[key]:
                yield f"a storage of {self._sizes[key]} bytes was given {storage.nbytes()} by no operation that torch shows"
        # An error on its way holds on to this object.
        self._copies.clear()

    def _before_write(self, tensors: Iterable[torch.Tensor]) -> None:
        # Not plain_torch, which takes longer than all the rest: most writes are into tensors that nobody watches.
        with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
            for storage in (storage for tensor in tensors for storage in memory(tensor)):
                for key in [storage._cdata] if storage._cdata in self._known else self._under(storage):
                    if key not in self._copies:
                        with torch.no_grad():
                            self._save(key)

    def _under(self, storage: torch.UntypedStorage) -> Iterator[int]:
        """The watched storages over whose memory this one lies: torch.from_numpy makes such second ones."""
        begin = _address(storage)
        for place in range(max(bisect_right(self._starts, begin) - 1, 0), len(self._starts)):
            start, key = self._starts[place], self._at[place]
            if start >= begin + storage.nbytes():
                return
            if start + self._sizes[key] > begin:
                yield key

    def _save(self, key: int) -> None:
        storage = self._known[key]
        self._copies[key] = storage.clone()  # type: ignore[no-untyped-call]


def memory(tensor: torch.Tensor) -> list[torch.UntypedStorage]:
    """The storages in which the entries of `tensor` lie: several for sparse tensors and for subclasses that wrap."""
    try:
        if names := _wrapped(tensor):
            return [s for name in names for s in memory(getattr(tensor, name))]
        if tensor.layout != torch.strided:
            return [s for part in _sparse_parts(tensor) for s in memory(part)]
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):
        return []
    # Meta and fake tensors, and some that wrap others, name a size, but have no memory.
    if storage.device.type == "meta" or (storage.nbytes() and not _address(storage)):
        return []
    return [storage]


def _wrapped(tensor: Any) -> list[str]:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) or not is_traceable_wrapper_subclass(tensor):
        return []
    names, _ = tensor.__tensor_flatten__()
    return list(names)


def _sparse_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a sparse one is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in _COMPRESSED:
        by_row = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        ends = (
            [tensor.crow_indices(), tensor.col_indices()] if by_row else [tensor.ccol_indices(), tensor.row_indices()]
        )
        return [*ends, tensor.values()]
    return []


def _address(storage: torch.UntypedStorage) -> int:
    try:
        return storage.data_ptr()
    except RuntimeError:
        return 0


def _write(storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> None:
    """Equal bytes are left alone: the memory may be mapped from a file, or not writable at all."""
    if storage.nbytes() != copy.nbytes():
        storage.resize_(copy.nbytes())
    elif _equal(storage, copy):
        return
    storage.copy_(copy)


def _equal(storage: torch.UntypedStorage, copy: torch.UntypedStorage) -> bool:
    same = storage.nbytes() == copy.nbytes()
    pairs = zip(_words(storage), _words(copy), strict=True) if same else ()
    return same and all(torch.equal(x, y) for x, y in pairs)


def _words(storage: torch.UntypedStorage) -> list[torch.Tensor]:
    """All bytes: as integers of eight bytes, which compare six times as fast, and the odd ones at the end."""
    whole, odd = divmod(storage.nbytes(), 8)
    words = [torch.empty(0, dtype=torch.int64, device=storage.device).set_(storage, 0, (whole,), (1,))]
    if odd:
        words += [torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, 8 * whole, (odd,), (1,))]
    return words
