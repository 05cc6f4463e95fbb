"""The scoring function: located by its name, or passed directly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ..errors import LoadError
from ..loading.target import Target, named_in, parse
from ..records.plan import DIRECTIONS

LOWER, OF_MEAN = "lower_is_better", "of_mean"
"""Optional attributes of the user's function."""


@dataclass(frozen=True)
class Scoring:
    """The user's function, and how its scores are judged.

    function(model) returns a number, or an iterable with a number for each sample or batch: the score is their mean, or
    `of_mean` of it. better: one of records.score.DIRECTIONS. max_drop: the largest acceptable loss; None: scores are
    not judged. place: where a fresh process can import the function; None where it cannot.
    """

    function: Callable[[nn.Module], Any]
    name: str
    better: str = "higher"
    max_drop: float | None = None
    of_mean: Callable[[float], Any] | None = None
    place: Target | None = None


def find_function(
    text: str, target: str = "", *, better: str | None = None, max_drop: float | None = None, seed: int = 0
) -> Scoring:
    """Import the function that `file.py:name`, `package.module:name` or, in the target's own file, `name` names.

    Literal arguments in brackets are passed after the model. Raises: LoadError(slug="missing-score"), and those of
    importing a target.
    """
    if not text.strip():
        raise LoadError("--evaluate needs a function: write --evaluate file.py:name", slug="missing-score")
    own = ":" not in text and not text.endswith(".py")
    of_target = parse(target) if own else None
    if of_target is not None and of_target.hub:
        raise LoadError(f"{target} has no file that could define it: write --evaluate file.py:name", "missing-score")
    parsed = parse(f"{of_target.script}:{text}" if of_target is not None else text)
    if parsed.symbol is None or parsed.hub:
        raise LoadError(f"{text!r} does not name a function: write --evaluate file.py:name", slug="missing-score")
    result = named_in(parsed, "give --evaluate file.py:name of a function that takes the model", "missing-score", seed)
    given = [*map(repr, parsed.args), *(f"{name}={value!r}" for name, value in parsed.kwargs.items())]
    called = f"{parsed.symbol}({', '.join(given)})" if given else parsed.symbol
    place = replace(parsed, text=f"{parsed.script}:{called}")
    scoring = _scoring(result, f"{parsed.symbol} in {parsed.label}", text, better, max_drop, place)
    if not given:
        return scoring
    return replace(scoring, function=lambda model: result(model, *parsed.args, **parsed.kwargs))


def in_hand(function: Any, *, better: str | None = None, max_drop: float | None = None) -> Scoring:
    """Scoring by a function object. Raises: LoadError(slug="missing-score")."""
    name = str(getattr(function, "__name__", type(function).__name__))
    return _scoring(function, f"evaluate={name}", name, better, max_drop, None)


def _scoring(
    function: Any, what: str, name: str, better: str | None, max_drop: float | None, place: Target | None
) -> Scoring:
    if isinstance(function, type | nn.Module) or not callable(function):
        wanted = "evaluate must be a function, func(model) -> a number, or one for each sample"
        raise LoadError(f"{what} is of type {type(function).__name__}: {wanted}", slug="missing-score")
    own = DIRECTIONS[bool(getattr(function, LOWER, False))]
    return Scoring(function, name, better or own, max_drop, getattr(function, OF_MEAN, None), place)
