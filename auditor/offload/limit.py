"""A limit to what is resident: mapped files are let go of as soon as this process holds nearly as much as it may."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from torch import Tensor, nn

from ..errors import AuditorError, disk_is_full
from .files import Offloading, in_file, is_large, is_offloaded, laid_as, release

NEARLY = 0.75
"""Share of the limit from which mapped files are let go of: a moment passes between two looks."""

STEP = 1 / 32
"""Share of the limit that must have become resident since they were last let go of."""

LOOK = 0.004
"""Seconds between two looks."""

ROOM = 64 << 20
"""Bytes beside what a process with torch holds in any case without which nothing can be done."""

HELD = 3.0
"""Times its FP32 weights that the audit of a model holds, in both of its processes together, where nothing limits it."""

EACH = 0.4
"""Share of what is free that each process may hold then."""

_STATM, _MEMINFO, _GROUP = Path("/proc/self/statm"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")

SINGLE = "HF_DEACTIVATE_ASYNC_LOAD"
"""Tells transformers to raise weights to FP32 in the thread that asks for them: what others make no mode sees."""

_now: list[Limit] = []


class Limit:
    """Holds this process to some bytes of resident memory, as far as they can be let go of; `peak` is the most that was seen."""

    def __init__(self, size: int) -> None:
        """Raises: AuditorError(slug="memory-too-small") where this process alone holds as much."""
        self.size, self.peak, self._after = size, resident(), 0
        self.need(0)

    def need(self, size: int) -> None:
        """So many bytes more are needed at once. Raises: AuditorError(slug="memory-too-small") where the limit is below that."""
        self.let_go()
        if self.size < (least := resident() + ROOM + size):
            raise AuditorError(
                f"--memory {words(self.size)} is too little for this audit: give {words(least)} or more",
                slug="memory-too-small",
            )

    def ease(self) -> None:
        """Let go of mapped files where nearly as much is resident as may be."""
        held = resident()
        self.peak, self._after = max(self.peak, held), min(self._after, held)
        if held > NEARLY * self.size and held - self._after > STEP * self.size:
            self.let_go()

    def let_go(self) -> None:
        """Let go of mapped files now; of those that others mapped where that is not enough."""
        release(others=False)
        if resident() > NEARLY * self.size:
            release(others=True)
        self._after = resident()


@contextmanager
def resident_limit(size: int | None) -> Iterator[Limit | None]:
    """In the body no more than `size` bytes are resident, as far as tensors that operations make can see to that.

    None: as much as it takes. Raises: AuditorError(slug="memory-too-small" | "no-paging"), and
    DiskError where the body raised something else because of it.
    """
    if size is None:
        yield None
        return
    if not _STATM.exists():
        raise AuditorError(
            "this system does not say how much memory a process holds (/proc/self/statm): leave --memory out",
            "no-paging",
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
        _mmap_from(4 << 20)
        with Offloading():  # type: ignore[no-untyped-call]
            yield limit
    except Exception as error:
        if (full := disk_is_full(error)) is not None and full is not error:
            raise full from None
        raise
    finally:
        os.environ.pop(SINGLE, None)
        _mmap_from(32 << 20)
        ended.set()
        thread.join()
        _now.remove(limit)


def _mmap_from(size: int) -> None:
    """Let glibc give memory back to the system as soon as it is freed, in pieces of at least `size` bytes: it comes to keep
    those below 32 MiB in a heap that grows around what is still held."""
    getattr(ctypes.CDLL(None), "mallopt", lambda *_: 0)(-3, size)


def onto(model: nn.Module) -> None:
    """If there is a limit, put every large parameter and buffer into a file; those over one storage stay over one."""
    together: defaultdict[int, list[Tensor]] = defaultdict(list)
    for tensor in (*model.parameters(), *model.buffers()) if _now else ():
        if is_large(tensor) and not is_offloaded(tensor):
            together[tensor.untyped_storage()._cdata].append(tensor)
    for tensors in together.values():
        storage = in_file(tensors[0].untyped_storage())
        for tensor in tensors:
            tensor.data = laid_as(tensor, storage)


def now() -> Limit | None:
    """The limit that holds, if any."""
    return _now[-1] if _now else None


def within() -> tuple[str, ...]:
    """What is done to stay within the limit, in words; nothing where there is none."""
    limit = now()
    return () if limit is None else (f"large tensors in mapped files, to hold no more than {words(limit.size)}",)


def came_to() -> str | None:
    """What the limit came to so far, in words; None where there is none."""
    limit = now()
    if limit is None:
        return None
    of = "more than" if limit.peak > limit.size else "of"
    return f"{limit.peak / 1e9:.2f} GB in memory at most, {of} the {words(limit.size)} allowed"


def fitting(weights: int) -> int | None:
    """The limit under which a model is audited whose FP32 weights take so many bytes; None where it fits as it is, or where
    the system does not say what is free."""
    left = free()
    return int(EACH * left) if left is not None and HELD * weights > left else None


def free() -> int | None:
    """Bytes that the machine has available, or the group that this process is in, where that is less; None: nobody says."""
    with suppress(OSError):
        left = 1024 * int(_MEMINFO.read_text(encoding="utf-8").split("MemAvailable:")[1].split()[0])
        with suppress(OSError, ValueError):  # "max": without a limit
            limit, taken = (
                int((_GROUP / name).read_text(encoding="utf-8")) for name in ("memory.max", "memory.current")
            )
            return min(left, max(limit - taken, 0))
        return left
    return None


def resident() -> int:
    """Bytes of this process in memory: its own, and those of files that it has mapped."""
    return int(_STATM.read_bytes().split()[1]) * mmap.PAGESIZE


def words(size: float) -> str:
    """A size as it may be given again: 4GB, 1.5GB, 650MB; the last place is rounded up."""
    return f"{-int(-size * 10 // 10**9) / 10:g}GB" if size > 99 * 10**7 else f"{-int(-size // 10**7) * 10}MB"
