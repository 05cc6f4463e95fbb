"""Criteria as people write them, strings or a dict, read into records; what cannot be meant is refused in one line."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ..errors import AuditorError, LoadError
from .criterion import Criterion, Function, name_of
from .kinds import KINDS, Kind, Options


def loaded(text: str) -> Function:
    """The function that `f.py:name` or `package.module:name` names.

    Raises: LoadError, those of importing a target and slug="bad-criterion" where that is nothing to call.
    """
    from ..loading.target import named_in, parse

    target, advice = parse(text), "a criterion names a function as f.py:name, called as name(reference, candidate)"
    found = named_in(target, advice, SLUG)
    if not callable(found):
        raise LoadError(f"{target.label} has no function {target.symbol!r}: {advice}", slug=SLUG)
    return found  # type: ignore[no-any-return]


GRAMMAR = "write 'OUTPUT: KIND <= X', such as 'logits: kl <= 0.01'"
SLUG = "bad-criterion"

_LINE = re.compile(r"(?P<kind>[^<>=(]+?)\s*(?:\((?P<said>[^()]*)\))?\s*(?P<sign><=|>=)\s*(?P<limit>\S+)", re.DOTALL)


def criteria_of(given: Any) -> tuple[Criterion, ...]:
    """Criteria from strings `OUTPUT: KIND <= X`, or from {output: `KIND <= X`, (function, limit), or a list of these}.

    A string may hold several, apart by `;`. A kind may be a function, as `f.py:name`.
    Raises: AuditorError(slug="bad-criterion").
    """
    found = () if given is None else tuple(_each(given))
    seen: dict[tuple[str, str], Criterion] = {}
    for one in found:
        if (key := (one.output, one.measured)) in seen:
            raise AuditorError(f"two criteria set {one.output}: {one.measured}: '{seen[key]}' and '{one}'", slug=SLUG)
        seen[key] = one
    return found


def _each(given: Any) -> Iterable[Criterion]:
    if isinstance(given, Criterion):
        yield given
    elif isinstance(given, str):
        for text in _apart(given):
            output, colon, rest = text.partition(":")
            if not colon or not output.strip():
                raise AuditorError(f"{text!r} is no criterion: {GRAMMAR}", slug=SLUG)
            yield _written(output.strip(), rest.strip())
    elif isinstance(given, Mapping):
        for output, said in given.items():
            yield from _of_output(output, said)
    elif isinstance(given, Collection) and not isinstance(given, bytes):
        for one in given:
            yield from _each(one)
    else:
        raise AuditorError(f"criteria are strings or a dict by output, not {given!r:.80}: {GRAMMAR}", slug=SLUG)


def _apart(given: str) -> list[str]:
    """The criteria in one string, which holds at least one: what is left empty by mistake would judge nothing."""
    found = [text.strip() for text in given.split(";") if text.strip()]
    if not found:
        raise AuditorError(f"{given!r} is no criterion: {GRAMMAR}", slug=SLUG)
    return found


def _of_output(output: Any, said: Any) -> Iterable[Criterion]:
    if not isinstance(output, str | int) or isinstance(output, bool):
        raise AuditorError(f"an output is named by a string or a position, not by {output!r}: {GRAMMAR}", slug=SLUG)
    if isinstance(said, str):
        for text in _apart(said):
            yield _written(str(output), text)
    elif isinstance(said, tuple) and len(said) == 2 and callable(said[0]):
        function, limit = said
        yield made(str(output), name_of(function), limit, function=function)
    elif isinstance(said, list | tuple):
        for one in said:
            yield from _of_output(output, one)
    else:
        raise AuditorError(
            f"criteria of {output!r} are strings such as 'max_abs <= 0.5', or (function, limit), not {said!r:.80}",
            slug=SLUG,
        )


def _written(output: str, text: str) -> Criterion:
    """`KIND <= X`, `KIND(ARGUMENT) >= X` or `f.py:function <= X` of an output."""
    match = _LINE.fullmatch(text)
    if match is None:
        raise AuditorError(f"{f'{output}: {text}'!r} is no criterion: {GRAMMAR}", slug=SLUG)
    kind, sign = match["kind"].strip(), match["sign"]
    if ":" in kind:
        return made(output, kind, match["limit"], sign=sign, function=loaded(kind))
    return made(output, kind, match["limit"], sign=sign, said=match["said"])


def made(
    output: str,
    kind: str,
    limit: Any,
    *,
    sign: str | None = None,
    said: str | None = None,
    function: Function | None = None,
) -> Criterion:
    """A criterion whose kind, direction, limit and brackets make sense together."""
    if function is None and kind not in KINDS:
        close = difflib.get_close_matches(kind.lower(), KINDS, n=1)
        hint = f": did you mean {close[0]}?" if close else "."
        raise AuditorError(f"{kind!r} is no kind of criterion{hint} They are {', '.join(KINDS)}", slug=SLUG)
    found = Criterion(output, kind, math.nan, () if function else _options(KINDS[kind], said), function)
    how = found.how
    found = Criterion(
        output, kind, _number(limit, f"the limit of '{output}: {found.measured}'"), found.options, function
    )
    if sign is not None and sign != how.sign:
        more = "more" if how.sign == ">=" else "less"
        raise AuditorError(f"{more} of {kind} is better: write '{found}'. It is: {how.says}"[:400], slug=SLUG)
    if not how.least <= found.limit <= how.most or math.isinf(found.limit):
        within = f"from {how.least:g} to {how.most:g}" if math.isfinite(how.most) else "0 or more, and finite"
        raise AuditorError(f"the limit of {kind} is {within}, not {found.limit:g}", slug=SLUG)
    return found


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        found = float(value)
    except (TypeError, ValueError):
        found = math.nan
    if math.isnan(found):
        raise AuditorError(f"{what} is a number, not {value!r}"[:300], slug=SLUG)
    return found


def _options(kind: Kind, said: str | None) -> Options:
    """What stands in brackets: values in the order of the kind's row, words by what they are, or `name=value`."""
    found: dict[str, int | float | str] = {}
    for part in filter(None, (part.strip() for part in (said or "").split(","))):
        name, equals, text = (side.strip() for side in part.partition("="))
        if not equals:
            name, text = _meant(kind, name, found), name
        if name not in kind.takes or name in found:
            takes = ", ".join(kind.takes) or "nothing"
            raise AuditorError(f"{kind.name} takes {takes} in brackets, not {part!r}", slug=SLUG)
        found[name] = _option(kind, name, text)
    if kind.name == "topk" and "k" not in found:
        raise AuditorError("topk wants to know how many: write topk(5)", slug=SLUG)
    return tuple((name, found[name]) for name in kind.takes if name in found)


def _meant(kind: Kind, text: str, found: Collection[str]) -> str:
    for name, type_ in kind.takes.items():
        if name not in found and (text in type_ if isinstance(type_, tuple) else True):
            return name
    return ""


def _option(kind: Kind, name: str, text: str) -> int | float | str:
    type_ = kind.takes[name]
    if isinstance(type_, tuple):
        if text in type_:
            return text
        raise AuditorError(f"{name} of {kind.name} is {' or '.join(type_)}, not {text!r}", slug=SLUG)
    found = _number(text, f"{name} of {kind.name}")
    whole, counted = type_ is int, name in ("k", "peak")
    if math.isinf(found) or (whole and found != int(found)) or (counted and found <= 0):
        words = f"a{' whole' if whole else ''} number{' above 0' if counted else ''}"
        raise AuditorError(f"{name} of {kind.name} is {words}, not {text}", slug=SLUG)
    return int(found) if whole else found
