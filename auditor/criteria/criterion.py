"""A criterion: an output, what is measured of it, the limit that this must keep to; the kinds, and what FP32 does by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

AT_MOST, AT_LEAST = "<=", ">="

NOTHING = 2.0
"""The share of a limit that allows nothing, to which what is lost is added: more is worse, and it stays a number."""

Options = tuple[tuple[str, "int | float | str"], ...]
"""What is said of a kind in brackets: names and values, in the order of its row."""


@dataclass(frozen=True)
class Kind:
    """What a kind of criterion is. Units: `unit`; a limit lies within [least, most].

    sign: on which side of the limit a plan holds. says: what is reduced over what. takes: {name in brackets: the type of
    its value, or the words it may be}. squares: it grows with the square of an error, so that of two independent errors
    the values add up. floating, discrete: which outputs it is defined for. best: its value where nothing differs.
    """

    name: str
    unit: str
    says: str
    sign: str = AT_MOST
    takes: Mapping[str, type | tuple[str, ...]] = field(default_factory=dict)
    squares: bool = False
    floating: bool = True
    discrete: bool = False
    least: float = 0.0
    most: float = math.inf
    best: float = 0.0

    def holds(self, value: float, limit: float) -> bool:
        """Whether a value keeps to a limit; NaN does not."""
        return value <= limit if self.sign == AT_MOST else value >= limit

    def share(self, value: float, limit: float) -> float:
        """How much of what the limit allows a value takes, proportional to the size of the error; at most 1 if it holds.

        Of a kind that grows with the square of an error it is the root. See NOTHING for a limit that allows nothing.
        """
        if math.isnan(value):
            return math.inf
        lost, allowed = self._loss(value), self._loss(limit)
        if allowed <= 0:
            return 0.0 if self.holds(value, limit) else NOTHING + lost
        result = lost / allowed
        result = math.sqrt(max(result, 0.0)) if self.squares else max(result, 0.0)
        return min(result, 1.0) if self.holds(value, limit) else max(result, math.nextafter(1, 2))

    def _loss(self, value: float) -> float:
        if self.sign == AT_MOST:
            return value
        return 10 ** (-value / 20) if math.isinf(self.best) else self.best - value


_DIM: Mapping[str, type | tuple[str, ...]] = {"dim": int}

_AT_MOST = (
    Kind("rel_l2", "1", "L2 norm of the difference over the L2 norm of the reference, over all entries"),
    Kind("max_abs", "of the output", "largest difference of any entry"),
    Kind("mean_abs", "of the output", "mean difference of all entries"),
    Kind("rel_max", "1", "largest difference of any entry over the largest magnitude of the reference"),
    Kind(
        "kl", "nats", "Kullback-Leibler divergence of the softmax of each row, mean over rows", takes=_DIM, squares=True
    ),
    Kind("nats", "nats", "largest difference of any entry of the log_softmax of a row", takes=_DIM),
    Kind(
        "flips",
        "1",
        "share of entries that differ; of floats, of those with another sign, or on the other side of `threshold`",
        takes={"threshold": float},
        discrete=True,
        most=1.0,
    ),
)
_of_one = partial(Kind, sign=AT_LEAST, most=1.0, best=1.0)
_AT_LEAST = (
    _of_one("top1", "1", "share of rows whose largest entry is the same one", takes=_DIM),
    _of_one(
        "topk", "1", "share of the `k` largest entries of a row that stay so, mean over rows", takes={"k": int, **_DIM}
    ),
    _of_one("cosine", "1", "cosine of the angle between the two rows, mean", takes=_DIM, squares=True, least=-1.0),
    _of_one(
        "iou",
        "1",
        "intersection over union of each box (the last dimension, `xyxy` unless said), the smallest, or their `mean`",
        takes={"form": ("xyxy", "xywh", "cxcywh"), "over": ("min", "mean")},
    ),
    Kind(
        "psnr",
        "dB",
        "10 log10(peak^2 / mean squared difference); `peak` is the range of the reference unless said",
        sign=AT_LEAST,
        takes={"peak": float},
        least=-math.inf,
        best=math.inf,
    ),
)
KINDS: dict[str, Kind] = {kind.name: kind for kind in (*_AT_MOST, *_AT_LEAST)}
"""{name: kind}."""

FUNCTION = Kind(
    "function",
    "its own",
    "what a function of the user's gives for (reference, candidate): a number that is 0 where nothing differs",
    discrete=True,
)
"""The kind of a criterion that is a Python function."""

FLOOR = 3.0
"""How many times what runs in FP32 differ by an error has to be, to be called one."""


def floor_of(error: float, joint: float) -> float:
    """Up to what nothing is called an error, where runs in FP32 differ by that much.

    error: by what the budget measures; joint: relative L2 of all outputs. 0 where the outputs of runs have so little in
    common that everything would pass.
    """
    return FLOOR * error if FLOOR * joint < 1 and math.isfinite(error) else 0.0


Function = Callable[[Any, Any], Any]
"""(reference, candidate) -> a number that is 0 where nothing differs."""


def name_of(function: Function) -> str:
    """What a function is called in words."""
    return str(getattr(function, "__name__", type(function).__name__))


def strict(written: str) -> bool:
    """Whether a criterion, as it is written, allows nothing at all to be lost."""
    return written.endswith(" <= 0") or (written.endswith(" >= 1") and ": psnr" not in written)


@dataclass(frozen=True)
class Criterion:
    """output: a name as in the model's own return; a name of something that holds several outputs, or a pattern with `*`,
    speaks of each of them, and the worst one counts. kind: a name of KINDS, or what `function` is called."""

    output: str
    kind: str
    limit: float
    options: Options = ()
    function: Function | None = None

    @property
    def how(self) -> Kind:
        """The kind's row."""
        return FUNCTION if self.function is not None else KINDS[self.kind]

    @property
    def measured(self) -> str:
        """The kind with what is said of it: `topk(5)`."""
        said = [f"{v}" if n in ("k", "form", "over", "threshold", "peak") else f"{n}={v}" for n, v in self.options]
        return f"{self.kind}({', '.join(said)})" if said else self.kind

    @property
    def allows_nothing(self) -> bool:
        """Whether nothing may differ."""
        return self.limit == (0.0 if self.how.sign == AT_MOST else self.how.best)

    def option(self, name: str, default: Any) -> Any:
        """What is said in brackets under a name."""
        return dict(self.options).get(name, default)

    def speaks_of(self, name: str) -> bool:
        """Whether an output of this name is meant."""
        wanted = self.output
        return name == wanted or name.startswith(f"{wanted}.") or ("*" in wanted and fnmatchcase(name, wanted))

    def holds(self, value: float) -> bool:
        """Whether a value keeps to the limit."""
        return self.how.holds(value, self.limit)

    def share(self, value: float) -> float:
        """How much of what the limit allows a value takes, see Kind.share."""
        return self.how.share(value, self.limit)

    def __str__(self) -> str:
        return f"{self.output}: {self.measured} {self.how.sign} {self.limit:.12g}"
