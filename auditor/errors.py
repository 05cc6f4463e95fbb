"""Errors the user meets, each with a slug that links to the docs; and whether what a run raised is about what ran."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

_NO_MEMORY = re.compile(
    r"can('t|not) allocate memory|out of memory|not enough memory|failed to map segment|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_FULL_DEVICE = re.compile(r"CU(DA|BLAS|DNN)[^\n]*(out of memory|ALLOC_FAILED)", re.IGNORECASE)
"""What CUDA and its libraries say that allocate beside torch."""


class AuditorError(Exception):
    """A condition the user can act on; `slug` names it in errors.md, the message says what to do next."""

    def __init__(self, message: str, slug: str) -> None:
        super().__init__(message, slug)
        self.slug = slug

    def __str__(self) -> str:
        return str(self.args[0])


class LoadError(AuditorError):
    """The target, its inputs or its weights could not be turned into a Subject."""


class CaptureError(AuditorError):
    """A run of the model could not be recorded."""


class MeasureError(AuditorError):
    """A measurement is undefined for what it was given."""


class PlanError(AuditorError):
    """A plan cannot be read, or does not fit the model it is applied to."""


class CallbackError(AuditorError):
    """A function that the caller passed, such as `metric` or `progress`, raised or returned what it must not."""


class DiskError(AuditorError):
    """No disk has room for what waits there instead of in memory, which says nothing of what ran just then."""


def first_line(error: BaseException) -> str:
    """Of what an error says; its type where it says nothing, or cannot."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return lines[0] if lines else type(error).__name__


def printable(text: str) -> str:
    """Text with everything that could drive a terminal, break a line or reorder letters written as an escape."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that there is no memory left, as Python, the linker, CUDA or torch's allocators say it."""
    worded = isinstance(error, RuntimeError | OSError | ImportError) and bool(_NO_MEMORY.search(str(error)))
    return worded or _is_called(error, "OutOfMemoryError") or isinstance(error, MemoryError)


def device_is_full(error: BaseException) -> bool:
    """Whether what brought it about is that a GPU has no memory left; that the host has none is another matter."""
    return any(
        _is_called(one, "OutOfMemoryError") or (isinstance(one, RuntimeError) and bool(_FULL_DEVICE.search(str(one))))
        for one in _raised_from(error)
    )


def device_failed(error: BaseException) -> bool:
    """Whether a GPU gave up, as after an assertion in a kernel: nothing runs on it any more in this process."""
    return any(_is_called(one, "AcceleratorError") for one in _raised_from(error)) and not device_is_full(error)


def disk_is_full(error: BaseException) -> DiskError | None:
    """What was raised where a disk had no room left, if that is what brought it about."""
    return next((one for one in _raised_from(error) if isinstance(one, DiskError)), None)


def time_is_up(error: BaseException) -> bool:
    """Whether a time limit of the caller's brought it about."""
    return any(isinstance(one, TimeoutError) for one in _raised_from(error))


def origin_of(error: BaseException) -> BaseException:
    """The first of the errors that it was raised from."""
    *_, first = _raised_from(error)
    return first


def let_through(error: BaseException, *, memory: bool = True) -> None:
    """Raise the error again where it says nothing of what ran: a time limit, a function of the caller's own,
    or, with `memory`, that there is none left, nor room on a disk instead, or that the GPU failed."""
    if isinstance(error, CallbackError) or time_is_up(error):
        raise error
    if memory and (out_of_memory(error) or device_failed(error) or disk_is_full(error) is not None):
        raise error


def from_outside(error: BaseException) -> bool:
    """Whether code other than this package's raised it: torch, a library, the user's model."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    ours = Path(__file__).resolve().parent
    return innermost is not None and ours not in Path(innermost.tb_frame.f_code.co_filename).resolve().parents


def _raised_from(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_called(error: BaseException, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)
