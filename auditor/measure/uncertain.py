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
from .rerun import PLAIN, SENSITIVE_SHARE, OutputMetric, Reruns

MAX_RUNS = 96
"""Maximum cost of runs per format, in forward passes of the whole model; partial runs count by their operations."""

TRUSTED = 8
"""Number of runs per format that check predictions; if these refute predictions, up to MAX_RUNS runs in total."""

SAMPLE = 6
"""Number of predictions that are run first, spread over their sizes, to test whether first order holds."""

OFF = 1.6
"""Factor by which a prediction may be too large or too small; with few probes and samples, 1.3 is usual."""

REFUTED = 0.1
"""Predictions are no longer trusted if runs refute more than this share of the checked predictions above the budget."""

_TOLD = 1e-3
"""Share of the error budget below which a prediction is irrelevant and is not compared with a run."""


def measure_uncertain(
    measurement: Measurement, first: FirstOrder, output_metric: OutputMetric = PLAIN
) -> tuple[Contributions, dict[str, Linearity]]:
    """Return contributions, measured by runs if first order is insufficient, and first order's accuracy by format."""
    result = {name: dict(by_format) for name, by_format in first.contributions.items()}
    checks: dict[str, Linearity] = {}
    for fmt in measurement.formats:
        runs = FormatRuns(Reruns(measurement, fmt, output_metric), first)
        runs.measure_unknown()
        check = runs.check_predictions()
        if check is not None:
            checks[fmt] = check
        for name, contribution in runs.effects.items():
            result[name][fmt] = contribution
    return result, checks


@dataclass(frozen=True)
class _GroupRun:
    """A run with some operations in low precision: error, whether a discrete result changed, the tightest criterion."""

    names: Sequence[str] = ()
    error: float = math.inf
    flipped: bool = True
    criterion: str = ""


Waiting = list[tuple[float, int, Sequence[str], _GroupRun]]
"""A heap of groups to run: negated expected error, order of arrival, operations, and the run of the larger group that
contained them."""


class FormatRuns:
    """Runs of operations in one format. effects: {operation: its Contribution, as measured by runs}."""

    def __init__(self, reruns: Reruns, first: FirstOrder) -> None:
        measurement = reruns.measurement
        fmt = reruns.format
        self.reruns = reruns
        self.effects: dict[str, Contribution] = {}
        self._measurement = measurement
        self._limit = reruns.output_metric.limit
        self._answers = first.answers
        self._unseen = first.unseen
        self._first = {name: by_format[fmt] for name, by_format in first.contributions.items()}
        self._errors = {name: by_format[fmt] for name, by_format in measurement.errors.items()}
        self._traces = {name: by_format[fmt] for name, by_format in measurement.traces.items()}
        self._twins = _twin_views(measurement)
        self._compared: dict[str, tuple[float, float]] = {}  # {operation: (predicted, measured) effect}
        self._rates: list[float] = []
        self._numbers = count()

    def measure_unknown(self) -> None:
        """Run the operations whose effect has no first-order estimate, of those that a strategy runs in low precision."""
        unknown = self._find_unknown()
        reached = reached_by(self._measurement.capture, self.reruns.format)
        self._bound_group([name for name in unknown if not reached[name]], _GroupRun())
        waiting = self._first_groups([name for name in unknown if reached[name]])
        while waiting:
            _, _, group, larger_group = heapq.heappop(waiting)
            if self.reruns.spent >= MAX_RUNS:
                self._bound_group(group, larger_group)
            elif len(group) == 1:
                self.effects[group[0]] = self._run_alone(group[0])
            else:
                self._run_group(group, waiting)
        if not self._answers:
            self._scale_unmeasured()
        self._copy_to_twins()

    def _find_unknown(self) -> list[str]:
        """Operations with an error whose effect has no first-order estimate; of views of one value, only the first."""
        unknown = dict[str, None]()
        for name, trace in self._traces.items():
            error = self._errors[name]
            estimate_missing = trace.near or self._is_blind(name)
            errs = trace.broken or (bool(error.local_error) and estimate_missing)
            if errs and not error.unsupported:
                unknown[self._twins.get(name, name)] = None
        return list(unknown)

    def _first_groups(self, names: Sequence[str]) -> Waiting:
        """The groups to run first: operations that first order does not see, and the others; largest effects first."""
        waiting = Waiting()
        blind = [name for name in names if self._is_blind(name)]
        visible = [name for name in names if not self._is_blind(name)]
        for group in (blind, visible):
            if group:
                self._queue(waiting, sorted(group, key=lambda name: -self._first[name].isolated), _GroupRun())
        return waiting

    def _scale_unmeasured(self) -> None:
        """Convert first-order effects that no run measures to the unit of runs, by the median ratio of all runs: those of
        weights, inputs, and operations beyond the run limit."""
        rate = statistics.median(self._rates or [0.0])

        def scaled(effect: float) -> float:
            return rate * effect if rate else 0.0  # not 0 * inf

        for name, first in self._first.items():
            known = self.effects.get(name, first)
            if known.decided_by in ("first-order", "not-run"):
                self.effects[name] = replace(
                    known, isolated=scaled(known.isolated), own=scaled(known.own), cast=scaled(known.cast)
                )

    def check_predictions(self) -> Linearity | None:
        """Run operations to check predictions: first a sample, then predictions above the budget, from the nearest to
        the farthest; more operations if predictions are inaccurate. None if there was nothing to check."""
        if not self._answers or not 0 < self._limit < math.inf:
            return None
        predictions = self._predictions()
        if not any(effect > SENSITIVE_SHARE * self._limit for effect in predictions.values()):
            return None
        harmful = [name for name, effect in predictions.items() if effect > self._limit]
        whole = self._whole() if self.reruns.output_metric.contribution_metric is output_error else None
        if not harmful and whole is not None and _near(*whole):
            return None  # no operation exceeds the budget, and the sum of all errors is as predicted
        self._run_checks(predictions, harmful)
        self._copy_to_twins()
        return self._linearity(harmful, whole)

    def _predictions(self) -> dict[str, float]:
        """{operation: predicted effect}, of all operations without a run that can run in the format."""
        known = {**self._first, **self.effects}
        return {
            name: known[name].isolated
            for name, error in self._errors.items()
            if known[name].decided_by == "first-order" and error.unsupported is None
        }

    def _run_checks(self, predictions: Mapping[str, float], harmful: Sequence[str]) -> None:
        """Run a sample of the predictions and those above the budget, `harmful`; if runs refute them, more of these."""
        most_spent = self.reruns.spent + TRUSTED
        self._compare(self._sample(predictions), predictions, most_spent)
        self._compare(self._nearest(harmful, predictions), predictions, most_spent)
        checked, refuted = self._outcome(harmful)
        if self._holds() and refuted <= REFUTED * checked:
            return
        # predictions may be too small by this factor, so that smaller ones may exceed the budget as well
        too_small = max([1.0, *(1 / ratio for ratio in self._ratios())])
        doubtful = [name for name, effect in predictions.items() if effect > self._limit / too_small]
        self._compare(self._nearest(doubtful, predictions), predictions, MAX_RUNS)

    def _sample(self, predictions: Mapping[str, float]) -> list[str]:
        """SAMPLE operations, spread evenly over the relevant sizes of their predictions."""
        relevant = [name for name, effect in predictions.items() if _TOLD * self._limit < effect < math.inf]
        relevant.sort(key=lambda name: -predictions[name])
        step = max(len(relevant) // SAMPLE, 1)
        return relevant[::step][:SAMPLE]

    def _linearity(self, harmful: Sequence[str], whole: tuple[float, float] | None) -> Linearity | None:
        """The accuracy of the predictions that runs checked; None if no run did. harmful: operations that are predicted
        to exceed the budget; whole: (predicted, measured) error with all operations in low precision."""
        compared = len(self._relevant_pairs())
        if not compared:
            return None
        ratios = self._ratios() or [0.0]
        whole_predicted, whole_run = whole or (None, None)
        checked, refuted = self._outcome(harmful)
        return Linearity(
            format=self.reruns.format,
            compared=compared,
            least=min(ratios),
            median=statistics.median(ratios),
            most=max(ratios),
            holds=self._holds(),
            whole_predicted=whole_predicted,
            whole_run=whole_run,
            confirmed=checked - refuted,
            refuted=refuted,
            left=len(harmful) - checked,
        )

    def _is_blind(self, name: str) -> bool:
        """Whether an operation's effect is not, or only partly, visible to first order."""
        return not self._answers or self._traces[name].broken or name in self._unseen

    def _queue(self, waiting: Waiting, names: Sequence[str], of: _GroupRun) -> None:
        expected = of.error if of.error < math.inf else math.inf  # nan counts as inf
        heapq.heappush(waiting, (-expected, next(self._numbers), names, of))

    def _run_group(self, names: Sequence[str], waiting: Waiting) -> None:
        tick(names[0])
        error, flipped = self.reruns.together(names)
        ran = _GroupRun(names, error, flipped, self.reruns.criterion)
        sees_all = not flipped and not any(map(self._is_blind, names))
        if error <= SENSITIVE_SHARE * self._limit:
            self._bound_group(names, ran)
        elif math.isfinite(error) and sees_all:  # first order sees the whole effect
            self.effects |= {name: self._first[name] for name in names}
        else:
            middle = len(names) // 2
            self._queue(waiting, names[:middle], ran)
            self._queue(waiting, names[middle:], ran)

    def _bound_group(self, names: Sequence[str], ran: _GroupRun) -> None:
        """If a group's error is within the budget, it bounds each member's effect, since squares of independent errors
        add up. If the error exceeds the budget, the members are untested."""
        for name in names:
            first = self._first[name]
            if not ran.error <= self._limit:
                self.effects[name] = replace(first, decided_by="not-run")
                continue
            own, cast = self._split_bound(first, ran)
            bound = Contribution(ran.error, own, cast, "group", len(ran.names), ran.criterion, reads=first.reads)
            self.effects[name] = bound

    def _split_bound(self, first: Contribution, ran: _GroupRun) -> tuple[float, float]:
        """Expected effects of an operation's own error and of the rounding of its result, within its group's error: as
        first order predicts them; without a prediction, each member's share if all have equal effects."""
        if not first.own or ran.flipped:
            share = ran.error / math.sqrt(len(ran.names))
            return share, share
        rate = self._rate(ran.error, *(self._first[name].isolated for name in ran.names))
        return min(first.own * rate, ran.error), min(first.cast * rate, ran.error)

    def _run_alone(self, name: str) -> Contribution:
        """Run the model with only this operation in low precision. First order or another run splits the effect into
        the operation's own error and the rounding of its result."""
        tick(name)
        first = self._first[name]
        isolated, _ = self.reruns.together([name])
        ran = Contribution(
            isolated=isolated,
            own=isolated,
            cast=isolated,
            decided_by="re-run",
            together=1,
            criterion=self.reruns.criterion,
            failure=self.reruns.failure,
            reads=first.reads,
        )
        if self._is_predicted(name):
            rate = isolated / first.isolated if math.isfinite(isolated) else 1.0
            self._rates.append(rate)
            return replace(ran, own=first.own * rate, cast=first.cast * rate)
        if not isolated or not self._measurement.capture.nodes[name].floating:
            return ran
        rounded = widen(round_tree(self._measurement.values[name], FORMATS[self.reruns.format]))
        return replace(ran, cast=self.reruns.error(name, rounded))

    def _is_predicted(self, name: str) -> bool:
        """Whether first order predicts how an operation's effect is split."""
        trace = self._traces[name]
        is_visible = not trace.broken and not trace.near and name not in self._unseen
        return is_visible and bool(self._first[name].isolated)

    def _rate(self, error: float, *predicted: float) -> float:
        """Ratio of measured effects to first-order effects; 1 if both have the same unit."""
        together = math.hypot(*predicted)
        if self._answers or not 0 < together < math.inf:
            return 1.0
        self._rates.append(error / together)
        return error / together

    def _copy_to_twins(self) -> None:
        self.effects |= {view: self.effects[first] for view, first in self._twins.items() if first in self.effects}

    def _nearest(self, names: Iterable[str], predictions: Mapping[str, float]) -> list[str]:
        """Operations sorted by the ratio of their predictions to the budget: those nearest to it first."""
        return sorted(names, key=lambda name: abs(math.log(predictions[name] / self._limit)))

    def _compare(self, names: Iterable[str], predictions: Mapping[str, float], most_spent: float) -> None:
        """Run operations alone and compare their effects with the predictions, until `most_spent` runs are spent."""
        for name in names:
            first_view = self._twins.get(name, name)
            if first_view in self._compared or first_view not in predictions:
                continue
            if self.reruns.spent < most_spent:
                measured = self._run_alone(first_view)
                self.effects[first_view] = measured
                self._compared[first_view] = (predictions[first_view], measured.isolated)

    def _relevant_pairs(self) -> list[tuple[float, float]]:
        """(predicted, measured) effects of operations that were run, without pairs in which both are negligible."""
        negligible = _TOLD * self._limit
        return [(predicted, run) for predicted, run in self._compared.values() if run or predicted > negligible]

    def _ratios(self) -> list[float]:
        """Predicted effects as multiples of the measured ones, where both are positive and finite."""
        return [predicted / run for predicted, run in self._relevant_pairs() if predicted > 0 and 0 < run < math.inf]

    def _holds(self) -> bool:
        """Whether at least 90 % of the relevant predictions are within the factor OFF of the measurement."""
        return sum(_near(ratio, 1.0) for ratio in self._ratios()) >= 0.9 * len(self._relevant_pairs())

    def _outcome(self, harmful: Iterable[str]) -> tuple[int, int]:
        """Number of predictions above the error budget that runs checked, and how many of these the runs refuted."""
        first_views = [self._twins.get(name, name) for name in harmful]
        measured = [self._compared[name][1] for name in first_views if name in self._compared]
        refuted = [effect for effect in measured if effect <= self._limit]
        return len(measured), len(refuted)

    def _whole(self) -> tuple[float, float] | None:
        """(predicted, measured) output error with all operations in low precision; None if an operation ran in FP32 or
        an error is missing."""
        measurement = self._measurement
        if self.reruns.format not in measurement.pure:
            return None
        predicted = math.hypot(*self._independent_errors())
        outputs = measurement.capture.outputs
        errors = [self._errors[name].propagated_error if name in self._errors else None for name in outputs]
        measured = [error for error in errors if error is not None]
        if not measured or len(measured) < len(errors):
            return None
        # errors are relative to each output's norm, and the result to the norm of all outputs
        norms = [measurement.ranges[name].norm for name in outputs]
        absolute = math.hypot(*(error * norm for error, norm in zip(measured, norms, strict=True)))
        run = absolute / (math.hypot(*norms) or math.inf)
        valid = math.isfinite(predicted) and math.isfinite(run) and min(predicted, run) > 0
        return (predicted, run) if valid else None

    def _independent_errors(self) -> list[float]:
        """Predicted effects of each operation's own error, and of the rounding of each weight and input."""
        known = {**self._first, **self.effects}
        placeholders = self._measurement.capture.placeholders
        own = [known[name].own for name in self._errors]
        rounding = [known[place.name].cast for place in placeholders if place.name in known]
        return own + rounding


def _twin_views(measurement: Measurement) -> dict[str, str]:
    """{view: the first view of the same value}: their errors are equal, so one run suffices. Without the first ones."""
    first_of = dict[str, str]()
    twins = dict[str, str]()
    for view, root in lone_views(measurement).items():
        first = first_of.setdefault(root, view)
        if view != first:
            twins[view] = first
    return twins


def _near(predicted: float, run: float) -> bool:
    return run / OFF <= predicted <= run * OFF
