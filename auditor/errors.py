"""Errors for the user, each with a slug that links to the docs; and classification of exceptions in the user's code."""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path

_NO_MEMORY = re.compile(
    r"can('t|not) allocate memory|out of memory|not enough memory|failed to map segment|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_FULL_DEVICE = re.compile(r"CU(DA|BLAS|DNN)[^\n]*(out of memory|ALLOC_FAILED)", re.IGNORECASE)
"""Messages of CUDA libraries that fail to allocate device memory outside torch's allocator."""


class AuditorError(Exception):
    """An error that the user can act on: the message says what to do next, and `slug` is its name in errors.md."""

    def __init__(self, message: str, slug: str) -> None:
        super().__init__(message, slug)
        self.slug = slug

    def __str__(self) -> str:
        return str(self.args[0])


class LoadError(AuditorError):
    """The target, its inputs or its weights cannot be loaded."""


class CaptureError(AuditorError):
    """A run of the model cannot be recorded or replayed, or has nothing to audit."""


class MeasureError(AuditorError):
    """A measurement is undefined for its arguments."""


class PlanError(AuditorError):
    """A plan cannot be made or read, or does not fit its model."""


class CallbackError(AuditorError):
    """A function of the caller, such as `metric` or `progress`, raised or returned an invalid value."""


class DiskError(AuditorError):
    """The disk for offloaded tensors is full; the operation that was running is not the cause."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message; its type if the message is empty or raises."""
    try:
        lines = str(error).strip().splitlines()
    except Exception:
        lines = []
    return lines[0] if lines else type(error).__name__


def describe(error: BaseException, most: int | None = 200) -> str:
    """An error's type and the first line of its message: `ValueError: unknown mode`. most: maximum length."""
    name, line = type(error).__name__, first_line(error).strip()
    return name if line == name else f"{name}: {line[:most]}"


def suggest(name: str, known: Iterable[str], otherwise: str = "", most: int = 1, cutoff: float = 0.6) -> str:
    """`did you mean X?` with the known names closest to a wrong name, ignoring case; `otherwise` if none is close."""
    names = {each.lower(): each for each in known}
    close = [names[each] for each in difflib.get_close_matches(name.lower(), names, most, cutoff)]
    return f"did you mean {' or '.join(close)}?" if close else otherwise


def printable(text: str) -> str:
    """Escape every character that could control a terminal, break a line or reorder letters."""

    def escaped(character: str) -> str:
        return character.encode("unicode_escape").decode("ascii")

    return "".join(c if c.isprintable() else escaped(c) for c in text)


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory is exhausted: an error of Python, the linker, CUDA or torch's allocators."""
    worded = isinstance(error, RuntimeError | OSError | ImportError) and bool(_NO_MEMORY.search(str(error)))
    return worded or _is_called(error, "OutOfMemoryError") or isinstance(error, MemoryError)


def device_is_full(error: BaseException) -> bool:
    """Whether the root cause is exhausted GPU memory, not host memory."""
    return any(
        _is_called(one, "OutOfMemoryError") or (isinstance(one, RuntimeError) and bool(_FULL_DEVICE.search(str(one))))
        for one in _raised_from(error)
    )


def device_failed(error: BaseException) -> bool:
    """Whether a GPU failed, for example at an assertion in a kernel, so that this process cannot use the GPU again."""
    return any(_is_called(one, "AcceleratorError") for one in _raised_from(error)) and not device_is_full(error)


def caused_by(error: BaseException, kind: type[BaseException]) -> BaseException | None:
    """The first error of type `kind` in the chain of causes, such as the TimeoutError of a time limit; else None."""
    return next((one for one in _raised_from(error) if isinstance(one, kind)), None)


def origin_of(error: BaseException) -> BaseException:
    """The root cause: the error at the start of a chain of causes."""
    *_, first = _raised_from(error)
    return first


def let_through(error: BaseException, *, memory: bool = True) -> None:
    """Raise the error again unless the operation caused it. Other causes are a time limit, the caller's function, a
    model that could not be restored and, with `memory`, exhausted memory or disk space, or a failed GPU."""
    if isinstance(error, CallbackError) or caused_by(error, TimeoutError):
        raise error
    if isinstance(error, AuditorError) and error.slug == "state-not-restored":
        raise error
    if memory and (out_of_memory(error) or device_failed(error) or caused_by(error, DiskError)):
        raise error


def from_outside(error: BaseException) -> bool:
    """Whether code outside this package raised the error: torch, a library or the user's model."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = Path(__file__).resolve().parent
    return bool(frames) and ours not in Path(frames[-1].filename).resolve().parents


def _raised_from(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_called(error: BaseException, name: str) -> bool:
    return any(kind.__name__ == name for kind in type(error).__mro__)
