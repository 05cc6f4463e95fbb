"""A limit on resident memory: mapped files are dropped when this process approaches the limit."""

from __future__ import annotations

import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from ..errors import AuditorError, DiskError, caused_by
from .files import OffloadMode, in_file, is_large, is_offloaded, laid_as, release

NEARLY = 0.75
"""Share of the limit above which mapped files are dropped; memory may still grow until the next check."""

STEP = 1 / 32
"""After files were dropped, memory must grow by this share of the limit before files are dropped again."""

LOOK = 0.004
"""Seconds between two checks of resident memory."""

OWN = 0.5
"""Share of the limit up to which results of operations stay in memory: most are soon freed."""

ROOM = 64 << 20
"""Minimum difference between a limit and the resident memory when the limit is checked, in bytes."""

HELD = 3.0
"""Memory of an audit without a limit, both processes together, as a multiple of the FP32 weights."""

EACH = 0.4
"""Share of the free memory that each of the two processes may use under a limit that the audit sets itself."""

STATM, MEMINFO, GROUP = Path("/proc/self/statm"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")

SINGLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Environment variable: transformers then converts weights in this thread, where a dispatch mode sees them."""

_now: list[Limit] = []


class Limit:
    """Keeps the process below `size` bytes of resident memory if possible; `peak` is the maximum observed."""

    def __init__(self, size: int) -> None:
        """Raises: AuditorError(slug="memory-too-small") if the process already uses nearly `size` bytes."""
        self.size, self.peak, self._after = size, resident(), 0
        self.need(0)

    def need(self, size: int) -> None:
        """Free memory for `size` bytes at once. Raises: AuditorError(slug="memory-too-small") if that exceeds the
        limit."""
        self.drop_mapped_files()
        if self.size < (least := resident() + ROOM + size):
            raise AuditorError(
                f"the limit of --memory is too low for this audit: give {words(least)} or more",
                slug="memory-too-small",
            )

    def stays(self, size: int) -> bool:
        """Whether a result of `size` bytes may stay in memory instead of a file."""
        return resident(mapped=False) + size <= OWN * self.size

    def ease(self) -> None:
        """Drop mapped files when resident memory approaches the limit."""
        used = resident()
        self.peak, self._after = max(self.peak, used), min(self._after, used)
        if used > NEARLY * self.size and used - self._after > STEP * self.size:
            self.drop_mapped_files()

    def drop_mapped_files(self) -> None:
        """Drop mapped files now; if memory is still near the limit, also files that libraries mapped."""
        release(others=False)
        if resident() > NEARLY * self.size:
            release(others=True)
        self._after = resident()


@contextmanager
def resident_limit(size: int | None) -> Iterator[Limit | None]:
    """In the `with` block, keep the process below `size` resident bytes, as far as results of operations fill them.

    size: None for no limit. Raises: AuditorError(slug="memory-too-small"); AuditorError(slug="no-paging") if the system
    does not report a process's memory; DiskError if the block failed for lack of disk space.
    """
    if size is None:
        yield None
        return
    if not STATM.exists():
        raise AuditorError(
            "this system does not report a process's memory (/proc/self/statm): leave --memory out", "no-paging"
        )
    limit, ended = Limit(size), threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK):
            limit.ease()

    thread = threading.Thread(target=watch, name="auditor-memory", daemon=True)
    _now.append(limit)
    thread.start()
    try:
        os.environ[SINGLE] = "1"
        with OffloadMode(limit.stays):  # type: ignore[no-untyped-call]
            yield limit
    except Exception as error:
        if (full := caused_by(error, DiskError)) is not None and full is not error:
            raise full from None
        raise
    finally:
        os.environ.pop(SINGLE, None)
        ended.set()
        thread.join()
        _now.remove(limit)


def onto(model: nn.Module) -> None:
    """Under a limit, move every large parameter and buffer to a file; tensors that share a storage still share it."""
    together: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in (*model.parameters(), *model.buffers()) if _now else ():
        if is_large(tensor) and not is_offloaded(tensor):
            together[tensor.untyped_storage()._cdata].append(tensor)
    for tensors in together.values():
        storage = in_file(tensors[0].untyped_storage())
        for tensor in tensors:
            tensor.data = laid_as(tensor, storage)


def now() -> Limit | None:
    """The current limit on resident memory; None without one."""
    return _now[-1] if _now else None


def within() -> tuple[str, ...]:
    """How the audit keeps within the limit, in words; empty without a limit."""
    return tuple(f"large tensors in memory-mapped files, with a limit of {words(one.size)}" for one in _now[-1:])


def came_to() -> str | None:
    """A text about the peak memory so far, compared with the limit; None without a limit."""
    if (limit := now()) is None:
        return None
    of = "more than" if limit.peak > limit.size else "of"
    return f"{limit.peak / 1e9:.2f} GB in memory at most, {of} the {words(limit.size)} allowed"


def limit_for(weights: int) -> int | None:
    """The limit for a model whose FP32 weights take this many bytes; None if the audit fits anyway, or free memory is
    unknown."""
    left = free()
    return int(EACH * left) if left is not None and HELD * weights > left else None


def free() -> int | None:
    """Available memory in bytes: the machine's, or this process's cgroup's if smaller; None if unknown."""
    with suppress(OSError):
        left = 1024 * int(MEMINFO.read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0])
        with suppress(OSError, ValueError):  # "max": without a limit
            limit, used = (int((GROUP / name).read_text("utf-8")) for name in ("memory.max", "memory.current"))
            return min(left, max(limit - used, 0))
        return left
    return None


def resident(*, mapped: bool = True) -> int:
    """Resident bytes of this process. mapped: including mapped files."""
    pages, files = map(int, STATM.read_bytes().split()[1:3])
    return (pages if mapped else pages - files) * mmap.PAGESIZE


def words(size: float) -> str:
    """A size in the form that options accept: 4GB, 1.5GB, 650MB; rounded up."""
    return f"{-int(-size * 10 // 10**9) / 10:g}GB" if size > 99 * 10**7 else f"{-int(-size // 10**7) * 10}MB"
