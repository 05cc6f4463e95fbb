"""What the trials of edited sources say: plain data, which passes between processes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from ...records import Span

Kinds = Mapping[tuple[str, int, str], str]
"""{(file, first line of a function, name or dotted name): what its value was}: `float` or `int` for tensors, `layer` for
modules with a weight, `module` for other modules."""


class Promotion(NamedTuple):
    """A line of the user's that made an FP32 value. beside: variables there that were in low precision."""

    file: str
    line: int
    beside: tuple[str, ...]


@dataclass(frozen=True)
class Run:
    """A run of the whole model in low precision, without a plan.

    error: against FP32, inf for Inf or NaN; None if it raised. seconds: predicted time, up to the exception. place: the
    user's expressions that raised, the innermost first. promotions: lines that made FP32 values beside low-precision
    ones, in the order in which they ran. operations: number of operations that ran.
    """

    error: float | None
    seconds: float
    failure: str = ""
    place: tuple[Span, ...] = ()
    promotions: tuple[Promotion, ...] = ()
    operations: int = 0


@dataclass(frozen=True)
class Trial:
    """The results of running one edited source. runs: {strategy_format: its Run}.

    distance: of the FP32 outputs from the reference, FP64 if the model runs in it; the largest of all outputs. crash:
    why there is no result, in one line.
    """

    runs: Mapping[str, Run] = field(default_factory=dict)
    distance: float = math.inf
    seconds: float = math.inf
    crash: str = ""


@dataclass(frozen=True)
class Baseline:
    """The results of running the source as it is. wide: whether the reference is FP64's. kinds: see `Kinds`."""

    trial: Trial
    wide: bool
    kinds: Kinds


@dataclass(frozen=True)
class Standing:
    """What an audit says of a source: the recommended plan, its speed-up and error, all problems, and failing runs.

    problems: (rule, module, operation) of errors and warnings. failing: names of the runs without a plan that raise, or
    exceed the error budget.
    """

    plan: str | None
    speedup: float
    error: float | None
    problems: frozenset[tuple[str, str, str]]
    failing: frozenset[str]
    distance: float = 0.0
    crash: str = ""
