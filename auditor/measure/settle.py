"""Runs operations in low precision if their first-order estimates are missing or too close to the budget: as groups,
halves, single operations.

A group that changes the outputs little bounds the effect of each member; a harmful group is halved, down to single
operations, whose effect is measured. Operations beyond the run limit are untested.
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from ..execution.resolve import reached_by
from ..numerics.casting import round_tree, widen
from ..numerics.formats import FORMATS
from ..numerics.metrics import output_error
from ..records import Contribution, Linearity
from ..stages import tick
from .attribute import Contributions, FirstOrder, lone_views
from .measure import Measurement
from .rerun import PLAIN, SENSITIVE_SHARE, Reruns, Yardstick

RUNS = 96
"""Maximum cost of runs per format, in forward passes of the whole model; partial runs count by their operations."""

TRUSTED = 8
"""Number of runs per format that check predictions; if these refute predictions, up to RUNS runs in total."""

SAMPLE = 6
"""Number of predictions that are run first, spread over their sizes, to test whether first order holds."""

OFF = 1.6
"""Factor by which a prediction may be too large or too small; with few probes and samples, 1.3 is usual."""

REFUTED = 0.1
"""Predictions are no longer trusted if runs refute more than this share of the checked predictions above the budget."""

_TOLD = 1e-3
"""Share of the error budget below which a prediction is irrelevant and is not compared with a run."""


def settle(
    measurement: Measurement, first: FirstOrder, yardstick: Yardstick = PLAIN
) -> tuple[Contributions, dict[str, Linearity]]:
    """Return contributions, measured by runs if first order is insufficient, and first order's accuracy by format."""
    result = {name: dict(by_format) for name, by_format in first.contributions.items()}
    checks: dict[str, Linearity] = {}
    for fmt in measurement.formats:
        settling = FormatRuns(Reruns(measurement, fmt, yardstick), first)
        settling.settle_unknown()
        if (check := settling.check_predictions()) is not None:
            checks[fmt] = check
        for name, one in settling.found.items():
            result[name][fmt] = one
    return result, checks


@dataclass(frozen=True)
class _Ran:
    """A run with some operations in low precision: error, whether a discrete result changed, the tightest criterion."""

    names: Sequence[str] = ()
    error: float = math.inf
    flipped: bool = True
    criterion: str = ""


Waiting = list[tuple[float, int, Sequence[str], _Ran]]
"""A heap of groups to run: negated expected error, order of arrival, operations, and the run of the larger group that
contained them."""


class FormatRuns:
    """Runs of operations in one format. found: {operation: its Contribution, as measured by runs}."""

    def __init__(self, reruns: Reruns, first: FirstOrder) -> None:
        self.reruns = reruns
        self.found: dict[str, Contribution] = {}
        self._measurement, self._answers, self._unseen = reruns.measurement, first.answers, first.unseen
        self._limit, fmt = reruns.yardstick.limit, reruns.format
        self._first = {name: by_format[fmt] for name, by_format in first.contributions.items()}
        self._errors = {name: by_format[fmt] for name, by_format in self._measurement.errors.items()}
        self._traces = {name: by_format[fmt] for name, by_format in self._measurement.traces.items()}
        heads: dict[str, str] = {}  # views of one value have equal errors, so one run suffices
        firsts = {view: heads.setdefault(root, view) for view, root in lone_views(self._measurement).items()}
        self._twins = {view: first for view, first in firsts.items() if view != first}
        self._compared: dict[str, tuple[float, float]] = {}
        self._rates: list[float] = []
        self._numbers = count()

    def settle_unknown(self) -> None:
        """Run the operations whose effect has no first-order estimate, of those that a strategy runs in low precision."""
        unknown, waiting = dict[str, None](), Waiting()
        reached = reached_by(self._measurement.capture, self.reruns.format)
        for name, trace in self._traces.items():
            error = self._errors[name]
            errs = trace.broken or (bool(error.local_error) and (trace.near or self._is_blind(name)))
            if errs and not error.unsupported:
                unknown[self._twins.get(name, name)] = None  # of views of one value, only the first
        self._bound_group([name for name in unknown if not reached[name]], _Ran())
        left = [name for name in unknown if reached[name]]
        for names in ([n for n in left if self._is_blind(n)], [n for n in left if not self._is_blind(n)]):
            if names:
                self._queue(waiting, sorted(names, key=lambda name: -self._first[name].isolated), _Ran())
        while waiting:
            _, _, group, of = heapq.heappop(waiting)
            if self.reruns.spent >= RUNS:
                self._bound_group(group, of)
            elif len(group) == 1:
                self.found[group[0]] = self._run_alone(group[0])
            else:
                self._run_group(group, waiting)
        if not self._answers:  # values that no run can measure: weights, inputs, and operations beyond the run limit
            rate = statistics.median(self._rates or [0.0])
            for name, first in self._first.items():
                one = self.found.get(name, first)
                if one.decided_by in ("first-order", "not-run"):
                    isolated, own, cast = (rate * x if rate else 0.0 for x in (one.isolated, one.own, one.cast))
                    self.found[name] = replace(one, isolated=isolated, own=own, cast=cast)
        self._copy_to_twins()

    def check_predictions(self) -> Linearity | None:
        """Run operations to check predictions: first a sample, then predictions above the budget, from the nearest to
        the farthest; more operations if predictions are inaccurate."""
        if not self._answers or not 0 < self._limit < math.inf:
            return None
        known = {**self._first, **self.found}
        said = {  # predictions without a run, for operations that can run in the format
            name: known[name].isolated
            for name, error in self._errors.items()
            if known[name].decided_by == "first-order" and error.unsupported is None
        }
        claims = [name for name, one in said.items() if one > self._limit]
        whole = self._whole() if self.reruns.yardstick.contribution_metric is output_error else None
        near = any(one > SENSITIVE_SHARE * self._limit for one in said.values())
        if not near or (not claims and whole is not None and _near(*whole)):
            return None
        trusted = self.reruns.spent + TRUSTED
        told = [name for name, one in said.items() if _TOLD * self._limit < one < math.inf]
        ranked = sorted(told, key=lambda name: -said[name])  # a sample over all relevant sizes
        self._compare(ranked[:: max(len(ranked) // SAMPLE, 1)][:SAMPLE], said, trusted)
        self._compare(self._nearest(claims, said), said, trusted)
        run, refuted = self._outcome(claims)
        if not self._holds() or refuted > REFUTED * run:
            short = max([1.0, *(1 / ratio for ratio in self._ratios())])
            doubtful = [name for name, one in said.items() if one > self._limit / short]
            self._compare(self._nearest(doubtful, said), said, RUNS)
            run, refuted = self._outcome(claims)
        self._copy_to_twins()
        if not self._relevant_pairs():
            return None
        ratios = self._ratios() or [0.0]
        return Linearity(
            format=self.reruns.format,
            compared=len(self._relevant_pairs()),
            least=min(ratios),
            median=statistics.median(ratios),
            most=max(ratios),
            holds=self._holds(),
            whole_predicted=whole[0] if whole else None,
            whole_run=whole[1] if whole else None,
            confirmed=run - refuted,
            refuted=refuted,
            left=len(claims) - run,
        )

    def _is_blind(self, name: str) -> bool:
        """Whether an operation's effect is not, or only partly, visible to first order."""
        return not self._answers or self._traces[name].broken or name in self._unseen

    def _queue(self, waiting: Waiting, names: Sequence[str], of: _Ran) -> None:
        expected = of.error if of.error < math.inf else math.inf  # nan counts as inf
        heapq.heappush(waiting, (-expected, next(self._numbers), names, of))

    def _run_group(self, names: Sequence[str], waiting: Waiting) -> None:
        tick(names[0])
        error, flipped = self.reruns.together(names)
        ran = _Ran(names, error, flipped, self.reruns.criterion)
        if error <= SENSITIVE_SHARE * self._limit:
            self._bound_group(names, ran)
        elif math.isfinite(error) and not flipped and not any(map(self._is_blind, names)):
            self.found |= {name: self._first[name] for name in names}  # first order sees the whole effect
        else:
            middle = len(names) // 2
            self._queue(waiting, names[:middle], ran)
            self._queue(waiting, names[middle:], ran)

    def _bound_group(self, names: Sequence[str], ran: _Ran) -> None:
        """If a group's error is within the budget, it bounds each member's effect, since squares of independent errors
        add up. If the error exceeds the budget, the members are untested."""
        for name in names:
            first = self._first[name]
            if not ran.error <= self._limit:
                self.found[name] = replace(first, decided_by="not-run")
                continue
            own = cast = ran.error / math.sqrt(len(ran.names))
            if first.own and not ran.flipped:
                rate = self._rate(ran.error, *(self._first[one].isolated for one in ran.names))
                own, cast = min(first.own * rate, ran.error), min(first.cast * rate, ran.error)
            bound = Contribution(ran.error, own, cast, "group", len(ran.names), ran.criterion, reads=first.reads)
            self.found[name] = bound

    def _run_alone(self, name: str) -> Contribution:
        """Run the model with only this operation in low precision. First order or another run splits the effect into
        the operation's own error and the rounding of its result."""
        tick(name)
        fmt, first = self.reruns.format, self._first[name]
        isolated, _ = self.reruns.together([name])
        criterion, failure = self.reruns.criterion, self.reruns.failure
        ran = Contribution(isolated, isolated, isolated, "re-run", 1, criterion, failure, reads=first.reads)
        trace = self._traces[name]
        apart = trace.broken or trace.near or name in self._unseen or not first.isolated
        if not apart:
            share = isolated / first.isolated if math.isfinite(isolated) else 1.0
            self._rates.append(share)
            return replace(ran, own=first.own * share, cast=first.cast * share)
        if not isolated or not self._measurement.capture.nodes[name].floating:
            return ran
        rounded = widen(round_tree(self._measurement.values[name], FORMATS[fmt]))
        return replace(ran, cast=self.reruns.error(name, rounded))

    def _rate(self, error: float, *predicted: float) -> float:
        """Ratio of measured effects to first-order effects; 1 if both have the same unit."""
        together = math.hypot(*predicted)
        if self._answers or not 0 < together < math.inf:
            return 1.0
        self._rates.append(error / together)
        return error / together

    def _copy_to_twins(self) -> None:
        self.found |= {view: self.found[first] for view, first in self._twins.items() if first in self.found}

    def _nearest(self, names: Iterable[str], said: Mapping[str, float]) -> list[str]:
        return sorted(names, key=lambda name: abs(math.log(said[name] / self._limit)))

    def _compare(self, names: Iterable[str], said: Mapping[str, float], most: float) -> None:
        for name in (self._twins.get(name, name) for name in names):
            if name not in self._compared and name in said and self.reruns.spent < most:
                self.found[name] = ran = self._run_alone(name)
                self._compared[name] = said[name], ran.isolated

    def _relevant_pairs(self) -> list[tuple[float, float]]:
        """(predicted, measured) effects of operations that were run, without pairs in which both are negligible."""
        return [(one, run) for one, run in self._compared.values() if run or one > _TOLD * self._limit]

    def _ratios(self) -> list[float]:
        return [one / run for one, run in self._relevant_pairs() if one > 0 and 0 < run < math.inf]

    def _holds(self) -> bool:
        """Whether at least 90 % of the relevant predictions are within the factor OFF of the measurement."""
        return sum(_near(ratio, 1.0) for ratio in self._ratios()) >= 0.9 * len(self._relevant_pairs())

    def _outcome(self, claims: Iterable[str]) -> tuple[int, int]:
        """Number of predictions above the error budget that runs checked, and how many of these the runs refuted."""
        run = [self._compared[first][1] for name in claims if (first := self._twins.get(name, name)) in self._compared]
        return len(run), sum(one <= self._limit for one in run)

    def _whole(self) -> tuple[float, float] | None:
        """(predicted, measured) output error with all operations in low precision; None if an operation ran in FP32 or
        an error is missing."""
        if self.reruns.format not in self._measurement.pure:
            return None
        capture, known = self._measurement.capture, {**self._first, **self.found}
        parts = [known[name].own for name in self._errors]
        parts += [known[p.name].cast for p in capture.placeholders if p.name in known]
        errors = [self._errors[name].propagated_error if name in self._errors else None for name in capture.outputs]
        told = [error for error in errors if error is not None]
        if not told or len(told) < len(errors):
            return None
        norms = [self._measurement.ranges[name].norm for name in capture.outputs]
        run = math.hypot(*(error * norm for error, norm in zip(told, norms, strict=True)))
        result = math.hypot(*parts), run / (math.hypot(*norms) or math.inf)
        return result if all(map(math.isfinite, result)) and min(result) > 0 else None


def _near(predicted: float, run: float) -> bool:
    return run / OFF <= predicted <= run * OFF
