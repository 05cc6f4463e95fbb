"""Why a plan has no answer, in one line."""

from __future__ import annotations

from ..errors import AuditorError, first_line
from ..raised import out_of_memory

NO_MEMORY = "out of memory"

NOT_RUN = "not run, "
"""How the reason begins why a plan has no answer that says nothing of precision: time, a file, the end of its process."""


def failure_of(error: BaseException) -> str:
    """What a run raised, in one line, and at which line of the model."""
    from ..capture.source import raised_at  # processes that verify need none of that room otherwise

    name, text = type(error).__name__, first_line(error)
    said = text[:300] if text == name or isinstance(error, AuditorError) else f"{name}: {text[:300]}"
    place = raised_at(error)
    said += f" ({place})" if place else ""
    if out_of_memory(error):
        return f"{NO_MEMORY}, {said}"
    return NOT_RUN + said if isinstance(error, OSError | ImportError) else said


def says_nothing(failure: str | None) -> bool:
    """Whether the reason why a plan was not run has nothing to do with precision."""
    return failure is not None and (failure.startswith(NOT_RUN) or said_no_memory(failure))


def said_no_memory(failure: str) -> bool:
    """Whether memory was what was missing in the process that a plan ran in."""
    return NO_MEMORY in failure
