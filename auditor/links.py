"""Which names lead to which: what is reached from some of them, and what hangs together. A library of graphs takes longer to import."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Steps = dict[Name, dict[Name, None]]
"""{name: those one step away}, all in the order in which they came."""


def steps(pairs: Iterable[tuple[Name, Name]], alone: Iterable[Name] = ()) -> Steps[Name]:
    """From the first of each pair to the second. alone: names that need not be in any pair."""
    found: Steps[Name] = {name: {} for name in alone}
    for first, second in pairs:
        found.setdefault(first, {})[second] = None
        found.setdefault(second, {})
    return found


def both_ways(pairs: Iterable[tuple[Name, Name]], alone: Iterable[Name] = ()) -> Steps[Name]:
    """The same, and back."""
    return steps((pair for a, b in pairs for pair in ((a, b), (b, a))), alone)


def reached(along: Mapping[Name, Iterable[Name]], starts: Iterable[Name]) -> set[Name]:
    """The starts that there are, and all that any number of steps leads to from them."""
    found = {name for name in starts if name in along}
    waiting = list(found)
    while waiting:
        for name in along[waiting.pop()]:
            if name not in found:
                found.add(name)
                waiting.append(name)
    return found


def parts(there_and_back: Mapping[Name, Iterable[Name]]) -> list[set[Name]]:
    """Names that hang together, in the order of the first of each."""
    found: list[set[Name]] = []
    seen: set[Name] = set()
    for name in there_and_back:
        if name not in seen:
            found.append(reached(there_and_back, [name]))
            seen |= found[-1]
    return found
