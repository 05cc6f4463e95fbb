"""GitHub workflow commands: findings as annotations on the user's own lines, without code scanning."""

from __future__ import annotations

from collections.abc import Iterator

from ...records.audit import Audit
from ..findings import FindingGroup, ranked
from ..paths import Place, places
from ..prose import sentence, summary
from ..view import view
from ..words import count, op, printable, scope

COMMANDS = {"error": "error", "warning": "warning", "info": "notice"}
MOST_PER_LEVEL = 10


def render(audit: Audit) -> str:
    """The verdict as plain text, then at most ten annotations of each level, and a line for those left out."""
    return "\n".join(_lines(audit)) + "\n"


def _lines(audit: Audit) -> Iterator[str]:
    yield _plain(view(audit).headline)
    where = places(audit)
    shown = dict.fromkeys(COMMANDS, 0)
    left = 0
    for group in ranked(audit):
        level = group.worst.severity
        shown[level] += 1
        if shown[level] > MOST_PER_LEVEL:
            left += 1
        else:
            yield _annotation(group, where[group.worst.node])
    if left:
        yield f"{count(left, 'more kind')} of findings are in the report."


def _annotation(group: FindingGroup, place: Place) -> str:
    worst = group.worst
    times = f" (and {count(len(group.members) - 1, 'more place')} like it)" if len(group.members) > 1 else ""
    title = _property(f"{worst.rule} {worst.name}")
    text = _data(f"{sentence(worst.message)} In {scope(worst.owner)}, {op(worst.op)}{times}. {summary(worst.advice)}")
    return f"::{COMMANDS[worst.severity]} file={_property(place.file)},line={place.line},title={title}::{text}"


def _data(text: str) -> str:
    return printable(text).replace("%", "%25")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _plain(text: str) -> str:
    """A line that the runner cannot take for a command."""
    return printable(text).replace("::", ": :")
