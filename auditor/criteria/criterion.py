"""Criteria, each with an output, an error measure and a limit. The module has the table of measures, the noise floor of
FP32, and the parser of criteria."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

from ..errors import AuditorError, LoadError, suggest

AT_MOST, AT_LEAST = "<=", ">="

NOTHING = 2.0
"""`Criterion.share` of a violated limit that allows no error; the error is added, so that larger errors rank worse."""

Options = tuple[tuple[str, "int | float | str"], ...]
"""Arguments of an error measure, such as 5 in `topk(5)`: (name, value) pairs in the order of `Kind.takes`."""


@dataclass(frozen=True)
class Kind:
    """An error measure that a criterion can limit, in units of `unit`. A limit lies between `best`, the value for equal
    outputs, and `worst`.

    says: the measure in words. takes: {argument in brackets: its type, or its allowed words}. squares: the measure
    grows with the square of an error, so independent errors add up. discrete: whether discrete outputs are allowed.
    counts: whether outputs of integers are allowed as numbers, such as counts.
    """

    name: str
    unit: str
    says: str
    takes: Mapping[str, type | tuple[str, ...]] = field(default_factory=dict)
    squares: bool = False
    discrete: bool = False
    counts: bool = False
    best: float = 0.0
    worst: float = math.inf

    @property
    def sign(self) -> str:
        """`<=` if values above the limit violate it, `>=` if values below do."""
        return AT_MOST if self.best < self.worst else AT_LEAST


_DIM: Mapping[str, type | tuple[str, ...]] = {"dim": int}
_IOU: Mapping[str, type | tuple[str, ...]] = {"form": ("xyxy", "xywh", "cxcywh"), "over": ("min", "mean")}
_of_one = partial(Kind, best=1.0, worst=0.0)

_KINDS = (
    Kind(
        "rel_l2",
        "1",
        "L2 norm of the difference of all entries, divided by the L2 norm of the reference",
        counts=True,
    ),
    Kind("max_abs", "of the output", "largest difference of any entry"),
    Kind("mean_abs", "of the output", "mean difference of all entries"),
    Kind("rel_max", "1", "largest difference of any entry, divided by the largest magnitude of the reference"),
    Kind("kl", "nats", "Kullback-Leibler divergence of the softmax of each row, mean over rows", _DIM, squares=True),
    Kind("nats", "nats", "largest difference of any entry of the log_softmax of a row", _DIM),
    Kind(
        "flips",
        "1",
        "share of entries that differ; for floats, of entries whose sign, or side of `threshold`, differs, "
        "or with `values` of those that differ at all",
        {"by": ("values",), "threshold": float},
        discrete=True,
        worst=1.0,
    ),
    _of_one("top1", "1", "share of rows whose largest entry is at the same position", _DIM),
    _of_one("topk", "1", "share of a row's top `k` entries that stay top `k`, mean over rows", {"k": int, **_DIM}),
    _of_one(
        "cosine", "1", "cosine of the angle between a row and its reference, mean over rows", _DIM, True, worst=-1.0
    ),
    _of_one(
        "iou",
        "1",
        "intersection over union of each box (last dimension, by default `xyxy`): the smallest, or the `mean` of all",
        _IOU,
    ),
    Kind(
        "psnr",
        "dB",
        "10 log10(peak^2 / mean squared difference); `peak` is by default the range of the reference",
        {"peak": float},
        best=math.inf,
        worst=-math.inf,
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in _KINDS}
"""{name: error measure}, such as `kl` and `max_abs`."""

FUNCTION = Kind(
    "function",
    "its own",
    "the value of your function for (reference, candidate), a number",
    discrete=True,
)
"""The error measure of a criterion that is a Python function."""

FLOOR = 3.0
"""Errors count only above this multiple of the difference between repeated FP32 runs."""


def floor_of(error: float, joint: float) -> float:
    """The noise floor: errors up to this size are ignored. Repeated FP32 runs differ by a third of this size.

    error: difference between repeated runs in the budget's measure; joint: their relative L2 error over all outputs.
    The result is 0 if repeated runs differ so much that every plan would pass.
    """
    return FLOOR * error if FLOOR * joint < 1 and math.isfinite(error) else 0.0


Function = Callable[[Any, Any], Any]
"""A user's error measure (reference, candidate) -> number, within the criterion's limit for equal outputs."""


def name_of(function: object) -> str:
    """A function's name for messages."""
    return str(getattr(function, "__name__", type(function).__name__))


def strict(written: str) -> bool:
    """Whether a criterion, a text such as `labels: flips <= 0`, allows no error at all."""
    return written.endswith(" <= 0") or (written.endswith(" >= 1") and ": psnr" not in written)


def counts_flips(written: str) -> bool:
    """Whether a criterion, as text, counts decisions that flip; effects of operations are then expected values."""
    return re.search(r": (top1|topk|flips)\b", written) is not None


@dataclass(frozen=True)
class Criterion:
    """An error measure with a limit for one output. output: a name in the model's return value; the name of a container
    or a pattern with `*` covers several, and the worst counts. kind: a name in KINDS, or `function`'s name.

    best: if higher values of `function` are better, its value for equal outputs, or infinity as long as this value is
    unknown; None if lower values are better, and 0 is the value for equal outputs."""

    output: str
    kind: str
    limit: float
    options: Options = ()
    function: Function | None = None
    best: float | None = None

    @property
    def how(self) -> Kind:
        """The criterion's error measure: an entry of KINDS, or FUNCTION."""
        if self.function is None:
            return KINDS[self.kind]
        return FUNCTION if self.best is None else replace(FUNCTION, best=self.best, worst=-math.inf)

    @property
    def measure_text(self) -> str:
        """The measure with its arguments, as text: `topk(5)`."""
        if not self.options:
            return self.kind
        arguments = list[str]()
        for name, value in self.options:
            is_positional = name in ("k", "form", "over", "threshold", "by", "peak")
            arguments.append(f"{value}" if is_positional else f"{name}={value}")
        return f"{self.kind}({', '.join(arguments)})"

    @property
    def allows_nothing(self) -> bool:
        """Whether the limit allows no difference at all."""
        return self.limit == self.how.best

    def option(self, name: str, default: Any) -> Any:
        """The criterion's value for an argument in brackets; `default` if absent."""
        return dict(self.options).get(name, default)

    def covers(self, name: str) -> bool:
        """Whether the criterion covers the output called `name`."""
        wanted = self.output
        return name == wanted or name.startswith(f"{wanted}.") or ("*" in wanted and fnmatchcase(name, wanted))

    def holds(self, value: float) -> bool:
        """Whether a value meets the limit; False for NaN."""
        return value <= self.limit if self.how.sign == AT_MOST else value >= self.limit

    def share(self, value: float) -> float:
        """The error divided by the largest allowed error; at most 1 if the limit holds, else above 1.

        If the measure grows with the square of the error, this is the square root of the quotient. If the limit allows
        no error, a violation gives NOTHING plus the error.
        """
        if math.isnan(value):
            return math.inf
        lost, allowed = self._loss(value), self._loss(self.limit)
        if allowed <= 0:
            return 0.0 if self.holds(value) else NOTHING + lost
        result = max(lost / allowed, 0.0)
        result = math.sqrt(result) if self.how.squares else result
        return min(result, 1.0) if self.holds(value) else max(result, math.nextafter(1, 2))

    def _loss(self, value: float) -> float:
        best = self.how.best
        if math.isinf(best):
            return float(10 ** (-value / 20))
        return value - best if self.how.sign == AT_MOST else best - value

    def __str__(self) -> str:
        return f"{self.output}: {self.measure_text} {self.how.sign} {self.limit:.12g}"


GRAMMAR = "write 'OUTPUT: KIND <= X', such as 'logits: kl <= 0.01'"
SLUG = "bad-criterion"
bad_criterion = partial(AuditorError, slug=SLUG)
WANTED = "criteria of {!r} are strings such as 'max_abs <= 0.5', or (function, limit), not"

_LINE = re.compile(r"(?P<kind>[^<>=(]+?)\s*(?:\((?P<said>[^()]*)\))?\s*(?P<sign><=|>=)\s*(?P<limit>\S+)", re.DOTALL)


def criteria_of(given: Any) -> tuple[Criterion, ...]:
    """Criteria from strings `OUTPUT: KIND <= X`, or from {output: `KIND <= X`, (function, limit), or a list of these}.

    A string may contain several criteria, separated by `;`. KIND may be a function, such as `f.py:name`. Raises:
    AuditorError(slug="bad-criterion").
    """
    result = () if given is None else tuple(_each(given))
    seen: dict[tuple[str, str], Criterion] = {}
    for one in result:
        if (key := (one.output, one.measure_text)) in seen:
            raise bad_criterion(f"two criteria limit {one.measure_text} of {one.output}: keep '{seen[key]}' or '{one}'")
        seen[key] = one
    return result


def _each(given: Any, output: str | None = None) -> Iterator[Criterion]:
    """Yield the criteria in strings or a dict. output: the name of the output, if a dict names it."""
    if isinstance(given, Criterion):
        yield given
    elif isinstance(given, str):
        yield from _criteria_in_text(given, output)
    elif isinstance(given, Mapping) and output is None:
        for name, criteria in given.items():
            if type(name) not in (str, int):
                raise bad_criterion(f"an output is named by a string or a position, not by {name!r}: {GRAMMAR}")
            yield from _each(criteria, str(name))
    elif output is not None and isinstance(given, tuple) and len(given) == 2 and callable(given[0]):
        yield _criterion_of_function(output, *given)
    elif isinstance(given, Collection) and not isinstance(given, bytes | Mapping):
        for item in given:
            yield from _each(item, output)
    elif output is None:
        raise bad_criterion(f"criteria are strings or a dict by output, not {given!r:.80}: {GRAMMAR}")
    else:
        raise bad_criterion(f"{WANTED.format(output)} {given!r:.80}")


def _criteria_in_text(given: str, output: str | None) -> Iterator[Criterion]:
    """Yield the criteria between semicolons, each for the output of the one before unless it names its own."""
    texts = [text.strip() for text in given.split(";") if text.strip()]
    last = output
    for text in texts or [given]:  # an empty string must raise, since it sets no limit
        name, colon, rest = text.partition(":")
        is_function = name.strip().endswith(".py")
        if output or (last and (not colon or is_function)):  # the criterion is for the output of the one before
            name = str(last)
            colon = ":"
            rest = text
        if not (texts and colon and name.strip()):
            raise bad_criterion(f"cannot parse the criterion {text!r}: {GRAMMAR}")
        last = name.strip()
        yield _parse_criterion(last, rest.strip())


def _criterion_of_function(output: str, function: Function, limit: Any) -> Criterion:
    """The criterion of a user's function; its limit is a number, or text that may start with a sign."""
    sign = None
    if isinstance(limit, str):
        text = limit.strip()
        if text[:2] in (AT_MOST, AT_LEAST):
            sign = text[:2]
            limit = text[2:].strip()
    return make_criterion(output, name_of(function), limit, sign=sign, function=function)


def _parse_criterion(output: str, text: str) -> Criterion:
    """Parse `KIND <= X`, `KIND(ARGUMENT) >= X` or `f.py:function <= X` for an output.

    Raises: AuditorError(slug="bad-criterion") for invalid syntax; LoadError if the function's file cannot be imported;
    LoadError(slug="bad-criterion") if the name in it is not callable.
    """
    match = _LINE.fullmatch(text)
    if match is None:
        raise bad_criterion(f"cannot parse the criterion {f'{output}: {text}'!r}: {GRAMMAR}")
    kind, function = match["kind"].strip(), None
    if ":" in kind:
        from ..loading.target import named_in, parse

        target, advice = parse(kind), "a criterion names a function as f.py:name, called as name(reference, candidate)"
        if not callable(function := named_in(target, advice, SLUG)):
            raise LoadError(f"{target.label} has no function {target.symbol!r}: {advice}", slug=SLUG)
    return make_criterion(output, kind, match["limit"], sign=match["sign"], arguments=match["said"], function=function)


def make_criterion(
    output: str,
    kind: str,
    limit: Any,
    *,
    sign: str | None = None,
    arguments: str | None = None,
    function: Function | None = None,
) -> Criterion:
    """Build a criterion. Raises: AuditorError(slug="bad-criterion") for a bad measure, direction, limit or argument.

    sign: `<=` or `>=`; by default the measure's own, and `>=` for a function with `higher_is_better = True`."""
    if function is None and kind not in KINDS:
        close = suggest(kind, KINDS)
        hint = f": {close}" if close else "."
        raise bad_criterion(f"{kind!r} is not a kind of criterion{hint} Available: {', '.join(KINDS)}")
    best = None
    if function is not None:
        prefers_higher = sign is None and getattr(function, "higher_is_better", None) is True
        if sign == AT_LEAST or prefers_higher:
            best = math.inf  # until its value for equal outputs is known
    options = () if function else _options(KINDS[kind], arguments)
    criterion = Criterion(output, kind, math.nan, options, function, best)
    limit = _number(limit, f"the limit of '{output}: {criterion.measure_text}'")
    criterion = replace(criterion, limit=limit)
    how = criterion.how
    if sign is not None and sign != how.sign:
        more = "higher" if how.sign == ">=" else "lower"
        message = f"{more} values of {kind} are better: write '{criterion}'. {kind}: {how.says}"
        raise bad_criterion(message[:400])
    least, most = sorted((how.best, how.worst))
    if not least <= limit <= most or math.isinf(limit):
        within = f"from {least:g} to {most:g}" if math.isfinite(most) else "0 or more, and finite"
        raise bad_criterion(f"the limit of {kind} must be {within}, not {limit:g}")
    return criterion


def _number(value: Any, what: str) -> float:
    try:
        result = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        result = math.nan
    if math.isnan(result):
        raise bad_criterion(f"{what} must be a number, not {value!r}"[:300])
    return result


def _options(kind: Kind, in_brackets: str | None) -> Options:
    """Parse arguments in brackets: `name=value`, a number by position, or a word that only one argument allows."""
    result: dict[str, int | float | str] = {}
    for part in filter(None, (part.strip() for part in (in_brackets or "").split(","))):
        name, equals, text = (side.strip() for side in part.partition("="))
        if not equals:
            left = [(one, takes) for one, takes in kind.takes.items() if one not in result]
            fitting = (one for one, takes in left if not isinstance(takes, tuple) or name in takes)
            name, text = next(fitting, ""), name
        if name not in kind.takes or name in result:
            takes = ", ".join(kind.takes) or "nothing"
            raise bad_criterion(f"{kind.name} takes {takes} in brackets, not {part!r}")
        result[name] = _option(kind, name, text)
    if kind.name == "topk" and "k" not in result:
        raise bad_criterion("topk needs a number in brackets: write topk(5)")
    return tuple((name, result[name]) for name in kind.takes if name in result)


def _option(kind: Kind, name: str, text: str) -> int | float | str:
    takes = kind.takes[name]
    what = f"{name} of {kind.name}"
    if isinstance(takes, tuple):
        if text in takes:
            return text
        raise bad_criterion(f"{what} must be {' or '.join(takes)}, not {text!r}")
    number = _number(text, what)
    is_whole = takes is int
    is_positive = name in ("k", "peak")
    is_valid = math.isfinite(number)
    if is_whole:
        is_valid = is_valid and number == int(number)
    if is_positive:
        is_valid = is_valid and number > 0
    if not is_valid:
        words = "a whole number" if is_whole else "a number"
        if is_positive:
            words += " above 0"
        raise bad_criterion(f"{what} must be {words}, not {text}")
    return int(number) if is_whole else number
