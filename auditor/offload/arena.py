"""Memory for tensors that lies in files without names: the system writes it out and reads it back as it is needed."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
import threading
import weakref
from bisect import insort
from collections import deque
from pathlib import Path

import torch

from ..errors import DiskError
from ..folder import own

PAGE = mmap.PAGESIZE
FIRST, LARGEST = 16 << 20, 1 << 30
"""Bytes of the first file, and of the largest but for one tensor that needs a larger: each is as large as all before it."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
VOLATILE = ("tmpfs", "ramfs", "devtmpfs")
"""File systems that are memory themselves."""


class _File:
    """One file, mapped as a whole; it goes when nothing refers to its memory any more."""

    def __init__(self, folder: Path, size: int) -> None:
        self._descriptor = _nameless(folder)
        weakref.finalize(self, os.close, self._descriptor).atexit = False
        os.posix_fallocate(self._descriptor, 0, size)  # a page that finds no room later would end the process
        self.memory = mmap.mmap(self._descriptor, size)
        self.size = size
        self.free: list[tuple[int, int]] = [(0, size)]

    def write(self, start: int, storage: torch.UntypedStorage) -> None:
        """Put the bytes of a storage there, past the mapping: a page that is written through it costs a fault."""
        left = memoryview((ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
        while left:
            done = os.pwrite(self._descriptor, left, start)
            left, start = left[done:], start + done

    def taken(self, size: int) -> int | None:
        """The start of a free run, the lowest: pages that were used before are used again. None where none is left."""
        for place, (start, length) in enumerate(self.free):
            if length >= size:
                self.free[place : place + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def given_back(self, start: int, size: int) -> None:
        """A run is free again."""
        insort(self.free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self.free:
            if merged and sum(merged[-1]) == begin:
                begin, length = merged[-1][0], merged.pop()[1] + length
            merged.append((begin, length))
        self.free = merged


class Arena:
    """Storages in mapped files. folder: where those are made, by default where there is a disk below.

    Memory that nothing refers to any more is used again; the files grow and go with the last tensor in them, or the process.
    written: bytes that were copied there. dropped: how often what was resident of them was let go.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or roomy()
        self.written = self.dropped = 0
        self._files: list[_File] = []
        self._returned: deque[tuple[_File, int, int]] = deque()
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self._files)

    def storage(self, size: int) -> torch.UntypedStorage:
        """`size` bytes, whatever is in them. Raises: DiskError(slug="disk-full")."""
        return self._made(size)[0]

    def _made(self, size: int) -> tuple[torch.UntypedStorage, _File, int]:
        """The storage, and where it lies."""
        rounded = max(-(-size // PAGE), 1) * PAGE
        with self._lock:
            while self._returned:  # finalizers run anywhere, also inside of this
                file, start, length = self._returned.popleft()
                file.given_back(start, length)
            file, start = self._place(rounded)
        view = memoryview(file.memory)[start : start + size]
        weakref.finalize(view, self._returned.append, (file, start, rounded)).atexit = False
        return torch.frombuffer(view, dtype=torch.uint8).untyped_storage(), file, start

    def copy_of(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """The same bytes here. Raises: DiskError(slug="disk-full")."""
        copy, file, start = self._made(storage.nbytes())
        try:
            file.write(start, storage)
        except OSError as error:
            raise self._refused(storage.nbytes(), error) from error
        self.written += storage.nbytes()
        return copy

    def let_go(self) -> None:
        """What is resident of the files need not be any more; it is read back where it is needed."""
        self.dropped += 1
        for file in list(self._files):
            file.memory.madvise(mmap.MADV_DONTNEED)

    def _place(self, size: int) -> tuple[_File, int]:
        for file in self._files:
            if (start := file.taken(size)) is not None:
                return file, start
        file = self._grown(size)
        self._files.append(file)
        found = file.taken(size)
        assert found is not None
        return file, found

    def _grown(self, size: int) -> _File:
        wanted = max(size, FIRST, min(self.size, LARGEST))
        try:
            return _File(self.folder, wanted)
        except OSError as error:
            if error.errno not in FULL:
                raise self._refused(size, error) from error
        try:
            return _File(self.folder, size)
        except OSError as error:
            raise self._refused(size, error) from error

    def _refused(self, size: int, error: OSError) -> DiskError:
        held = f"{self.size / 2**20:.0f} MiB are there already" if self.size else "nothing is there yet"
        return DiskError(
            f"no room for {size / 2**20:.3g} MiB more in {self.folder}, where values wait that --memory keeps out of memory "
            f"({held}; {error.strerror or error}): free some, or name a larger folder in TMPDIR",
            slug="disk-full",
        )


def roomy() -> Path:
    """The folder for temporary files; where nobody chose it and it is memory itself, one on a disk."""
    usual = Path(tempfile.gettempdir())
    chosen = any(os.environ.get(name) for name in ("TMPDIR", "TEMP", "TMP"))
    others = [] if chosen else [Path("/var/tmp"), Path.cwd()]
    writable = (folder for folder in (usual, *others) if os.access(folder, os.W_OK))
    return next((folder for folder in writable if not _in_memory(folder)), usual)


def _in_memory(folder: Path) -> bool:
    try:
        lines = Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    mounts = {Path(line.split()[1]): line.split()[2] for line in lines if len(line.split()) > 2}
    real = folder.resolve()
    return next((mounts[place] for place in (real, *real.parents) if place in mounts), "") in VOLATILE


def _nameless(folder: Path) -> int:
    """A descriptor of a file that nobody else can find, and that is gone with the process however that ends."""
    flag = getattr(os, "O_TMPFILE", None)
    if flag is not None:
        try:
            return os.open(folder, flag | os.O_RDWR, 0o600)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT, errno.EINVAL):
                raise
    descriptor, name = tempfile.mkstemp(prefix=own(), dir=folder)
    Path(name).unlink()
    return descriptor
