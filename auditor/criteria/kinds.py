"""The kinds of criteria: a row each, with its direction, its unit, and what it reduces over what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

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
        lost, allowed = self._lost(value), self._lost(limit)
        if allowed <= 0:
            return 0.0 if self.holds(value, limit) else NOTHING + lost
        found = lost / allowed
        found = math.sqrt(max(found, 0.0)) if self.squares else max(found, 0.0)
        return min(found, 1.0) if self.holds(value, limit) else max(found, math.nextafter(1, 2))

    def _lost(self, value: float) -> float:
        if self.sign == AT_MOST:
            return value
        return 10 ** (-value / 20) if math.isinf(self.best) else self.best - value


_DIM: Mapping[str, type | tuple[str, ...]] = {"dim": int}
_LEAST = "min"
_MEAN = "mean"

KINDS: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("rel_l2", "1", "L2 norm of the difference over the L2 norm of the reference, over all entries"),
        Kind("max_abs", "of the output", "largest difference of any entry"),
        Kind("mean_abs", "of the output", "mean difference of all entries"),
        Kind("rel_max", "1", "largest difference of any entry over the largest magnitude of the reference"),
        Kind(
            "kl",
            "nats",
            "Kullback-Leibler divergence from the reference's distribution to the other, mean over rows; a row is the "
            "softmax of `dim`, the last one unless said, so that logits and log-probabilities count alike",
            takes=_DIM,
            squares=True,
        ),
        Kind(
            "nats",
            "nats",
            "largest difference of any log-probability; the log_softmax of `dim`, the last one unless said, is taken, so "
            "that logits and log-probabilities count alike",
            takes=_DIM,
        ),
        Kind(
            "top1",
            "1",
            "share of rows whose largest entry is the same one; a row is `dim`, the last one unless said",
            sign=AT_LEAST,
            takes=_DIM,
            most=1.0,
            best=1.0,
        ),
        Kind(
            "topk",
            "1",
            "share of the `k` largest entries of a row that are among the `k` largest of the other, mean over rows; a row "
            "is `dim`, the last one unless said",
            sign=AT_LEAST,
            takes={"k": int, **_DIM},
            most=1.0,
            best=1.0,
        ),
        Kind(
            "flips",
            "1",
            "share of entries that differ; of an output of floats, of entries with another sign (below, at or above zero), "
            "or on the other side of `threshold`",
            takes={"threshold": float},
            discrete=True,
            most=1.0,
        ),
        Kind(
            "cosine",
            "1",
            "cosine of the angle between a row and the reference's, mean over rows; a row is `dim`, the last one unless said",
            sign=AT_LEAST,
            takes=_DIM,
            squares=True,
            least=-1.0,
            most=1.0,
            best=1.0,
        ),
        Kind(
            "psnr",
            "dB",
            "10 log10(peak^2 / mean squared difference) over all entries; `peak` is the range of the reference, its "
            "largest entry less its smallest, unless said",
            sign=AT_LEAST,
            takes={"peak": float},
            least=-math.inf,
            best=math.inf,
        ),
        Kind(
            "iou",
            "1",
            "intersection over union of each box with the reference's in the same place, the smallest of all boxes, or "
            "their `mean`; a box is the last dimension, `xyxy` unless said",
            sign=AT_LEAST,
            takes={"form": ("xyxy", "xywh", "cxcywh"), "over": (_LEAST, _MEAN)},
            most=1.0,
            best=1.0,
        ),
    )
}
"""{name: kind}."""

FUNCTION = Kind(
    "function",
    "its own",
    "what a function of the user's gives for (reference, candidate), two tensors: a number that is 0 where nothing differs",
    discrete=True,
)
"""The kind of a criterion that is a Python function."""
