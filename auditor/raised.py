"""What a run raised, and whether that is about what ran: time limits and want of memory are not."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType

from .errors import AuditorError, CallbackError, DiskError, first_line

PACKAGES = ("torch", "networkx", "jinja2", "rich", "safetensors", "numpy", "shtab", "pydantic")
"""What the auditor imports beside Python's own modules."""

_NO_MEMORY = re.compile(
    r"can('t|not) allocate memory|out of memory|not enough memory|failed to map segment|STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)

_FULL_DEVICE = re.compile(r"CU(DA|BLAS|DNN)[^\n]*(out of memory|ALLOC_FAILED)", re.IGNORECASE)
"""What CUDA and its libraries say that allocate beside torch."""

_NO_WORDS = re.compile(r"without (setting an )?exception")
"""What Python says of C code that failed and did not say why: an allocation that nobody expected to fail."""


def out_of_memory(error: BaseException) -> bool:
    """Whether it says that there is no memory left, as Python, the linker, CUDA or torch's allocators say it."""
    worded = isinstance(error, RuntimeError | OSError | ImportError) and bool(_NO_MEMORY.search(str(error)))
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    speechless = isinstance(error, SystemError) and bool(_NO_WORDS.search(str(error))) and _is_limited()
    return worded or named or speechless or isinstance(error, MemoryError)


def device_is_full(error: BaseException) -> bool:
    """Whether what brought it about is that a GPU has no memory left; that the host has none is another matter."""
    return any(_is_full(one) for one in _raised_from(error))


def _is_full(error: BaseException) -> bool:
    named = any(kind.__name__ == "OutOfMemoryError" for kind in type(error).__mro__)
    return named or (isinstance(error, RuntimeError) and bool(_FULL_DEVICE.search(str(error))))


def device_failed(error: BaseException) -> bool:
    """Whether a GPU gave up, as after an assertion in a kernel: nothing runs on it any more in this process."""
    failed = any(kind.__name__ == "AcceleratorError" for one in _raised_from(error) for kind in type(one).__mro__)
    return failed and not device_is_full(error)


def gave_up(error: BaseException, where: str = "") -> AuditorError:
    """What to say of a GPU that failed. where: in which stage."""
    said = f"{type(error).__name__}: {first_line(error)[:200]}"
    return AuditorError(
        f"the GPU failed{where} ({said}), and nothing runs on it any more in this process: audit with device=cpu, or run "
        "again with CUDA_LAUNCH_BLOCKING=1 to see where",
        slug="device-failed",
    )


def disk_is_full(error: BaseException) -> DiskError | None:
    """What was raised where a disk had no room left, if that is what brought it about."""
    return next((one for one in _raised_from(error) if isinstance(one, DiskError)), None)


def origin_of(error: BaseException) -> BaseException:
    """The first of the errors that it was raised from."""
    *_, first = _raised_from(error)
    return first


def _raised_from(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _is_limited() -> bool:
    """Whether the process may have so much address space and no more (`ulimit -v`)."""
    try:
        import resource
    except ImportError:  # Windows
        return False
    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def time_is_up(error: BaseException) -> bool:
    """Whether it is a time limit of the caller's: a TimeoutError, or anything that a handler of signals raised."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, TimeoutError) or not _codes(cause).isdisjoint(_handlers()):
            return True
        cause = cause.__cause__
    return False


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


def hiding(error: BaseException) -> AuditorError | None:
    """What to say of an error that a file brought about which was imported in place of a package; None of any other.

    `python -m` looks into the working directory first: a `json.py` there is what everybody imports as `json`.
    """
    took_part, seen = {getattr(error, "path", None)}, set[int]()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        took_part |= {code.co_filename for code in _codes(cause)}
        cause = cause.__cause__ or cause.__context__
    for name in sorted({*sys.stdlib_module_names, *PACKAGES}):
        files = [str(path) for path in (Path.cwd() / f"{name}.py", Path.cwd() / name / "__init__.py")]
        if getattr(sys.modules.get(name), "__file__", None) in files or not took_part.isdisjoint(files):
            where = f"{name!r} in the working directory was imported in place of the package of that name"
            said = f"{type(error).__name__}: {first_line(error)}"
            return AuditorError(f"{where} ({said}): rename it, or run python -P", slug="hidden-package")
    return None


def _codes(error: BaseException) -> set[CodeType]:
    found, place = set(), error.__traceback__
    while place is not None:
        found.add(place.tb_frame.f_code)
        place = place.tb_next
    return found


def _handlers() -> set[CodeType]:
    """What Python runs when signals arrive, but for the one of its own that makes a KeyboardInterrupt."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    functions = [getattr(handler, "func", handler) for handler in handlers if callable(handler)]
    calls = [f if hasattr(f, "__code__") or hasattr(f, "__func__") else type(f).__call__ for f in functions]
    return {code for call in calls if isinstance(code := getattr(call, "__code__", None), CodeType)}
