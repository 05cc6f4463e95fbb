"""Compares runs and audits of edited sources with those of the original."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .records import Baseline, Run, Standing, Trial

GAIN, FASTER = 0.2, 1.01
"""A candidate must lower the penalty of the runs by this; and accepted edits must speed the recommended plan up by it."""
STEP = 0.05
"""Penalties that differ by less are equal: the faster source is better."""
RAISED = 4.0
"""Penalty of a run that raises."""
LARGEST = 3.0
"""Largest penalty of an error: the logarithm of its size relative to the tolerated error."""
MARGIN = 0.8
"""Part of the error budget that a run may use without a penalty."""
SLACK, ROUNDING = 2.0, 1e-6
"""An edited source's distance from the reference in FP32 may be this multiple of the original's, plus this much."""
LOOSE = 1e-5
"""The largest distance from FP32's own outputs, for a model that does not run in FP64."""


@dataclass(frozen=True)
class Judge:
    """Compares trials and audits. max_error: the error budget. baseline: of the source as it is."""

    max_error: float
    baseline: Baseline

    def is_all_low(self, trial: Trial) -> bool:
        """Whether every run is within the tolerated error."""
        return all(run.error is not None and run.error <= MARGIN * self.max_error for run in trial.runs.values())

    def rank(self, trial: Trial) -> tuple[float, float]:
        """Sort key: the penalty in steps, then the time of the fastest run within the tolerated error."""
        return round(self.penalty(trial) / STEP), self.seconds(trial)

    def seconds(self, trial: Trial) -> float:
        """The time of the fastest run within the error budget, 1 without one."""
        runs = trial.runs.values()
        within = (run.seconds for run in runs if run.error is not None and run.error <= self.max_error)
        return min(within, default=1.0)

    def is_progress(self, trial: Trial, now: Trial) -> bool:
        """Whether all runs of a trial were made, and their penalty is lower by at least GAIN."""
        return trial.runs.keys() == now.runs.keys() and self.penalty(trial) <= self.penalty(now) - GAIN

    def saves_time(self, trial: Trial, now: Trial) -> bool:
        """Whether a trial is faster, with a penalty that is as low."""
        return self.rank(trial)[0] <= self.rank(now)[0] and FASTER * self.seconds(trial) < self.seconds(now)

    def is_equal(self, distance: float) -> bool:
        """Whether outputs at this distance from the reference are as good as those of the original source."""
        if not self.baseline.wide:
            return distance <= LOOSE
        return distance <= SLACK * self.baseline.trial.distance + ROUNDING

    def penalty(self, trial: Trial) -> float:
        """Sum over the runs in low precision: RAISED if it raises, else the logarithm of its error beyond the tolerated."""
        return sum(self.penalty_of(run) for run in trial.runs.values())

    def penalty_of(self, run: Run) -> float:
        """The penalty of one run. One that raises has up to 1 more, the less of the model it ran."""
        tolerated = MARGIN * self.max_error
        if run.error is None:
            progress = run.operations / max(self._operations, 1)
            return RAISED + 1.0 - min(progress, 1.0)
        if run.error <= tolerated:
            return 0.0
        if not run.error <= 10**LARGEST * tolerated:
            return LARGEST
        return math.log10(run.error / tolerated)

    @property
    def _operations(self) -> int:
        """Number of operations of the whole model."""
        return max((run.operations for run in self.baseline.trial.runs.values()), default=1)

    def is_better(self, after: Standing, before: Standing) -> bool:
        """Whether the edited source is as exact, has no new problem, and a faster plan or fewer runs that raise."""
        if after.crash or not self.is_equal(after.distance) or after.problems - before.problems:
            return False
        if after.speedup >= FASTER * before.speedup:
            return True
        return after.failing < before.failing and after.speedup >= before.speedup / FASTER

    def objection(self, after: Standing, before: Standing) -> str:
        """Why an audit of the edited source rejects it, in words."""
        if after.crash:
            return f"its audit failed: {after.crash.partition(chr(10))[0]}"
        if not self.is_equal(after.distance):
            return f"its FP32 outputs differ by {after.distance:.2g}"
        if new := after.problems - before.problems:
            return f"it has a new problem, {sorted(new)[0][0]}"
        return f"its recommended plan is predicted at {after.speedup:.2f}x, before {before.speedup:.2f}x"


def moved(before: Run | None, after: Run) -> bool:
    """Whether a run raises at a later operation than before, or did not raise before."""
    return before is None or before.error is not None or after.operations > before.operations
