"""Memory-maps large tensors to unnamed temporary files; the system pages them in and out as needed."""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import DiskError
from ..numerics.entries import over_tensors, tensors_in
from ..numerics.nodes import is_torchs_own

LARGE = 1 << 20
"""Minimum bytes of a tensor stored in a file."""

MADV_PAGEOUT = 21
_files: dict[int, StorageWeakRef] = {}
"""{address: weak reference to the storage in a file}; a freed storage's address may be reused."""


class OffloadMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside this mode, every large result of an operation is stored in a temporary file, with unchanged strides.

    These results include tensors that autograd saves or computes. stays: whether a result of this many bytes may stay
    in memory.
    """

    supports_higher_order_operators = True

    def __init__(self, stays: Callable[[int], bool] = lambda size: False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stays = stays

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler."""
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True: the model's compiled code runs compiled, since `fullgraph` forbids splitting it."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        run = _run_recorded(func) if _is_looked_into(func) else func
        try:
            result = run(*args, **given[1])
        except RuntimeError as error:
            if "resize storage that is not resizable" not in str(error):
                raise
            # The operation enlarges a tensor beyond its file: repeat it on tensors in memory.
            for x in filter(is_offloaded, tensors_in(given)):
                x.data = laid_as(x, x.untyped_storage().clone())  # type: ignore[no-untyped-call]
            result = run(*args, **given[1])
        return over_tensors(lambda x: _to_file(x, given, self._stays) if is_large(x) else x, result)


def in_file(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    """Copy a storage to a mapped file, which is deleted with its last tensor. Raises: DiskError(slug="disk-full").

    Writing bypasses the mapping: a page fault per page would be slow, and on a full disk would end the process.
    """
    size = storage.nbytes()
    try:
        with tempfile.TemporaryFile(dir=folder()) as file:
            file.write((ctypes.c_char * size).from_address(storage.data_ptr()))
            file.flush()
            mapped: Any = torch.UntypedStorage.from_file(f"/proc/self/fd/{file.fileno()}", True, size)
    except OSError as error:
        raise DiskError(
            f"no space for {size / 2**20:.3g} MiB more in {folder()}, where --memory stores large "
            f"tensors ({error.strerror or error}): free some space, or set TMPDIR to a larger folder",
            slug="disk-full",
        ) from error
    _files[mapped.data_ptr()] = StorageWeakRef(mapped)  # type: ignore[no-untyped-call]
    return mapped  # type: ignore[no-any-return]


def folder() -> str:
    """The folder for the files: TMPDIR; if unset, a folder for large temporary files (`/tmp` may be in memory)."""
    chosen = os.environ.get("TMPDIR")
    if chosen:
        return chosen
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else tempfile.gettempdir()


def release(*, others: bool) -> None:
    """Drop mapped files and freed memory from resident memory; the files' pages are read again on access.

    The call keeps each storage alive: the addresses of a freed storage may belong to other memory, which would be
    zeroed. others: include private mappings such as a library's checkpoint, but no shared libraries. Unmodified pages
    are read from the disk again; modified pages are kept.
    """
    madvise = ctypes.CDLL(None).madvise
    getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0)(0)  # glibc keeps freed blocks below 32 MiB
    for reference in list(_files.values()):
        storage = torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[no-untyped-call]
        if storage is not None:
            madvise(ctypes.c_void_p(storage.data_ptr()), ctypes.c_size_t(storage.nbytes()), mmap.MADV_DONTNEED)
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines() if others else ():
        span, mode, _, _, _, *name = line.split(maxsplit=5)
        start, end = (int(place, 16) for place in span.split("-"))
        if end - start >= LARGE and mode[3] == "p" and name and name[0].startswith("/") and ".so" not in name[0]:
            madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_PAGEOUT)


def is_offloaded(x: Tensor) -> bool:
    """Whether the tensor is stored in a temporary file."""
    return _is_plain(x) and x.untyped_storage().filename is not None


def is_large(x: Tensor) -> bool:
    return _is_plain(x) and x.untyped_storage().nbytes() >= LARGE


def _is_plain(x: Tensor) -> bool:
    """Whether a tensor is an ordinary strided tensor in CPU memory."""
    ordinary = type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" and x.layout is torch.strided
    return ordinary and not (x.is_nested or x.is_quantized or x.is_conj() or x.is_neg())


def _to_file(x: Tensor, given: Any, stays: Callable[[int], bool]) -> Tensor:
    """Move a result to a file, unless it stays, shares memory with an input, or autograd has recorded its parts."""
    storage = x.untyped_storage()
    if (
        is_offloaded(x)
        or x.requires_grad
        or any(_is_plain(y) and y.untyped_storage()._cdata == storage._cdata for y in tensors_in(given))
        or stays(storage.nbytes())
    ):
        return x
    return laid_as(x, in_file(storage))


def laid_as(x: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """A tensor on `storage` with the offset, shape and strides of `x`."""
    place = x.storage_offset(), x.shape, x.stride()
    with torch.no_grad():
        return torch.empty(0, dtype=x.dtype).set_(storage, *place)


@cache
def _is_looked_into(func: Any) -> bool:
    """Whether autograd records the operations inside `func`: for user-defined operations without a derivative."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    own = isinstance(func, torch._ops.OpOverload) and not is_torchs_own(func)
    return own and not any(has(func.name(), key) for key in ("Autograd", "AutogradCPU"))


def _run_recorded(func: Callable[..., Any]) -> Callable[..., Any]:
    """A function that runs `func` while autograd records the operations inside, which torch's modes prevent."""
    of, without = torch._C._dispatch_key_parse, torch._C._SetExcludeDispatchKeyGuard

    def run(*args: Any, **kwargs: Any) -> Any:
        with without(of("AutogradFunctionality"), False), without(of("ADInplaceOrView"), False):
            return func(*args, **kwargs)

    return run
