"""What a tool can be told of a plan, and the function that says it in code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .offer import Chosen


def always_possible(chosen: Chosen) -> str | None:
    """The tool can express every plan of its strategies."""
    return None


@dataclass(frozen=True)
class Tool:
    """strategies: those the tool can follow. otherwise: what to do with a plan of another one, in a sentence.

    impossible: why a plan cannot be expressed although its strategy fits, or None.
    """

    title: str
    strategies: tuple[str, ...]
    otherwise: str
    render: Callable[[Chosen], str]
    impossible: Callable[[Chosen], str | None] = always_possible
