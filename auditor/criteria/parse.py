"""Parses criteria from strings or a dict; an invalid one raises a one-line error."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ..errors import AuditorError, LoadError, suggest
from .criterion import KINDS, Criterion, Function, Kind, Options, name_of

GRAMMAR = "write 'OUTPUT: KIND <= X', such as 'logits: kl <= 0.01'"
SLUG = "bad-criterion"
WANTED = "criteria of {!r} are strings such as 'max_abs <= 0.5', or (function, limit), not"

_LINE = re.compile(r"(?P<kind>[^<>=(]+?)\s*(?:\((?P<said>[^()]*)\))?\s*(?P<sign><=|>=)\s*(?P<limit>\S+)", re.DOTALL)


def criteria_of(given: Any) -> tuple[Criterion, ...]:
    """Criteria from strings `OUTPUT: KIND <= X`, or from {output: `KIND <= X`, (function, limit), or a list of these}.

    A string may hold several, separated by `;`. A kind may be a function, as `f.py:name`. Raises:
    AuditorError(slug="bad-criterion").
    """
    result = () if given is None else tuple(_each(given))
    seen: dict[tuple[str, str], Criterion] = {}
    for one in result:
        if (key := (one.output, one.measure_text)) in seen:
            raise AuditorError(
                f"two criteria set {one.output}: {one.measure_text}: '{seen[key]}' and '{one}'", slug=SLUG
            )
        seen[key] = one
    return result


def _each(given: Any, output: str | None = None) -> Iterator[Criterion]:
    """Yield the parsed criteria. output: the name of the output, where the dict gives it."""
    if isinstance(given, Criterion):
        yield given
    elif isinstance(given, str):
        texts = [text.strip() for text in given.split(";") if text.strip()]
        for text in texts or [given]:  # what is left empty by mistake would judge nothing
            name, colon, rest = (output, ":", text) if output else text.partition(":")
            if not (texts and colon and name.strip()):
                raise AuditorError(f"cannot parse the criterion {text!r}: {GRAMMAR}", slug=SLUG)
            yield _parse_criterion(name.strip(), rest.strip())
    elif isinstance(given, Mapping) and output is None:
        for name, said in given.items():
            if type(name) not in (str, int):
                wrong = f"an output is named by a string or a position, not by {name!r}: {GRAMMAR}"
                raise AuditorError(wrong, slug=SLUG)
            yield from _each(said, str(name))
    elif output is not None and isinstance(given, tuple) and len(given) == 2 and callable(given[0]):
        function, limit = given
        yield make_criterion(output, name_of(function), limit, function=function)
    elif isinstance(given, Collection) and not isinstance(given, bytes | Mapping):
        for one in given:
            yield from _each(one, output)
    else:
        what = "criteria are strings or a dict by output, not" if output is None else WANTED.format(output)
        raise AuditorError(f"{what} {given!r:.80}" + (f": {GRAMMAR}" if output is None else ""), slug=SLUG)


def _parse_criterion(output: str, text: str) -> Criterion:
    """Parse `KIND <= X`, `KIND(ARGUMENT) >= X` or `f.py:function <= X` for an output.

    Raises: LoadError, as for importing a target; slug="bad-criterion" where the name is not callable.
    """
    match = _LINE.fullmatch(text)
    if match is None:
        raise AuditorError(f"cannot parse the criterion {f'{output}: {text}'!r}: {GRAMMAR}", slug=SLUG)
    kind, function = match["kind"].strip(), None
    if ":" in kind:
        from ..loading.target import named_in, parse

        target, advice = parse(kind), "a criterion names a function as f.py:name, called as name(reference, candidate)"
        if not callable(function := named_in(target, advice, SLUG)):
            raise LoadError(f"{target.label} has no function {target.symbol!r}: {advice}", slug=SLUG)
    return make_criterion(output, kind, match["limit"], sign=match["sign"], said=match["said"], function=function)


def make_criterion(
    output: str,
    kind: str,
    limit: Any,
    *,
    sign: str | None = None,
    said: str | None = None,
    function: Function | None = None,
) -> Criterion:
    """A criterion, once its measure, direction, limit and arguments have been checked together."""
    if function is None and kind not in KINDS:
        hint = f": {close}" if (close := suggest(kind, KINDS)) else "."
        raise AuditorError(f"{kind!r} is not a criterion{hint} Available: {', '.join(KINDS)}", slug=SLUG)
    criterion = Criterion(output, kind, math.nan, () if function else _options(KINDS[kind], said), function)
    criterion, how = (
        replace(criterion, limit=_number(limit, f"the limit of '{output}: {criterion.measure_text}'")),
        criterion.how,
    )
    if sign is not None and sign != how.sign:
        more = "higher" if how.sign == ">=" else "lower"
        raise AuditorError(
            f"{more} values of {kind} are better: write '{criterion}'. It is: {how.says}"[:400], slug=SLUG
        )
    if not how.least <= criterion.limit <= how.most or math.isinf(criterion.limit):
        within = f"from {how.least:g} to {how.most:g}" if math.isfinite(how.most) else "0 or more, and finite"
        raise AuditorError(f"the limit of {kind} must be {within}, not {criterion.limit:g}", slug=SLUG)
    return criterion


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        result = float(value)
    except (TypeError, ValueError):
        result = math.nan
    if math.isnan(result):
        raise AuditorError(f"{what} must be a number, not {value!r}"[:300], slug=SLUG)
    return result


def _options(kind: Kind, said: str | None) -> Options:
    """Parse the arguments in brackets: values in order, words by their meaning, or `name=value`."""
    result: dict[str, int | float | str] = {}
    for part in filter(None, (part.strip() for part in (said or "").split(","))):
        name, equals, text = (side.strip() for side in part.partition("="))
        if not equals:
            left = [(one, takes) for one, takes in kind.takes.items() if one not in result]
            fitting = (one for one, takes in left if not isinstance(takes, tuple) or name in takes)
            name, text = next(fitting, ""), name
        if name not in kind.takes or name in result:
            takes = ", ".join(kind.takes) or "nothing"
            raise AuditorError(f"{kind.name} takes {takes} in brackets, not {part!r}", slug=SLUG)
        result[name] = _option(kind, name, text)
    if kind.name == "topk" and "k" not in result:
        raise AuditorError("topk needs a number in brackets: write topk(5)", slug=SLUG)
    return tuple((name, result[name]) for name in kind.takes if name in result)


def _option(kind: Kind, name: str, text: str) -> int | float | str:
    takes, what = kind.takes[name], f"{name} of {kind.name}"
    if isinstance(takes, tuple):
        if text in takes:
            return text
        raise AuditorError(f"{what} must be {' or '.join(takes)}, not {text!r}", slug=SLUG)
    result = _number(text, what)
    whole, counted = takes is int, name in ("k", "peak")
    if math.isinf(result) or (whole and result != int(result)) or (counted and result <= 0):
        words = f"a{' whole' if whole else ''} number{' above 0' if counted else ''}"
        raise AuditorError(f"{what} must be {words}, not {text}", slug=SLUG)
    return int(result) if whole else result
