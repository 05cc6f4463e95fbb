"""GitHub workflow commands: findings as annotations on the user's own lines, without code scanning."""

from __future__ import annotations

from collections.abc import Iterator

from ...records.audit import Audit
from ..findings import Cause, causes
from ..paths import Place, places
from ..view import view
from ..words import count, op, printable, sentence, summary

COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
MOST_PER_LEVEL = 10


def render(audit: Audit) -> str:
    """The verdict as plain text, then at most ten annotations of each level, a cause each, and a line for those left out."""
    return "\n".join(_lines(audit)) + "\n"


def _lines(audit: Audit) -> Iterator[str]:
    seen = view(audit)
    yield from map(_plain, (seen.headline, *seen.broken))
    where = places(audit)
    shown = dict.fromkeys(COMMANDS, 0)
    left = 0
    for cause in causes(audit).all:
        level = cause.severity
        shown[level] += 1
        if shown[level] > MOST_PER_LEVEL:
            left += 1
        else:
            yield _annotation(cause, where[cause.worst.node])
    if left:
        yield f"{count(left, 'more cause')} in the report."


def _annotation(cause: Cause, place: Place) -> str:
    worst = cause.worst
    title = _property(f"{worst.rule} {worst.name}")
    said = f"{sentence(worst.message)} In {cause.where}, {op(worst.op)}."
    text = _data(" ".join(filter(None, (said, sentence(cause.size), cause.bearing, summary(worst.advice)))))
    return f"::{COMMANDS[cause.severity]} file={_property(place.file)},line={place.line},title={title}::{text}"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    """A line that the runner cannot take for a command."""
    return printable(text).replace("::", ": :")
