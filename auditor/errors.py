"""Errors the user meets: one root class, one child per stage, each with a slug that links to the docs."""

from __future__ import annotations


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


class RuleError(AuditorError):
    """A rule file is malformed; the message names file, line and key."""


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
