"""How much of an audit is done and when it ends, from the work that was measured so far."""

from __future__ import annotations

from dataclasses import dataclass, field

BEFORE, AFTER = ("load",), ("write",)
AUDIT = ("capture", "measure", "regions", "classify", "baseline", "plan", "follow")
TRAINED = ("capture", "measure", "regions", "training", "classify", "baseline", "plan", "low steps", "follow")

SCORED = ("FP32 score", "scores")
"""The user's own score: of the FP32 model before the audit, of the plans after they are made."""

FROM_SCORE = 4.0
"""Seconds of the second over those of the first: as many plans, at most, of which each runs as on a GPU."""

AFTER_NODES = 0.8
"""What `measure` takes once every node was run, over what that took: derivatives, and nodes run again."""

FROM_MEASURE = {
    "regions": 0.08,
    "training": 1.5,
    "classify": 0.03,
    "baseline": 0.5,
    "low steps": 0.5,
    "follow": 0.15,
    "write": 0.03,
}
"""Seconds of a stage over those of `capture` and `measure` together, as they were on models of 8 to 800 operations."""

FROM_BASELINE = 1.4
"""Seconds of `plan` over those of `baseline`, which runs every strategy and format once, where plans are searched for."""

BUILT_AGAIN = 0.5
"""Seconds of `load` that `baseline` takes once more: the process that verifies makes the model from its file, of imported libraries."""

LEAST_PLAN = 0.4
"""The least of it over `capture` and `measure` together."""

SEARCH = 0.15
"""Share of the time of a search for plans after which `plan` is taken for one: without, it ends at once."""

KNOWN = 0.1
"""Share of the nodes that must have run before anything is said of the end."""

ALMOST = 0.99


@dataclass
class Forecast:
    """Fed with what the progress callback hears, and the time; tells the share that is done and the seconds left.

    training: whether the audit has those stages. Times are in seconds, from any one clock.
    """

    training: bool = False
    stage: str = ""
    detail: str = ""
    _began: float | None = None
    _since: float = 0.0
    _nodes: tuple[int, int] = (0, 0)
    _nodes_done: float | None = None
    _took: dict[str, float] = field(default_factory=dict)
    _shown: float = 0.0
    _over: bool = False

    def heard(self, stage: str, detail: str, done: int, total: int, now: float) -> None:
        """One call of the progress callback."""
        if self._began is None:
            self._began = now
        if stage != self.stage:
            if self.stage:
                self._took[self.stage] = self._took.get(self.stage, 0.0) + now - self._since
            self.stage, self._since = stage, now
        self.detail = detail
        if stage == "measure":
            self._nodes = done, total
            if total and done >= total and self._nodes_done is None:
                self._nodes_done = now - self._since

    def finished(self) -> None:
        """The audit is done: all of it."""
        self._over = True

    @property
    def over(self) -> bool:
        """Whether the audit is done."""
        return self._over

    @property
    def place(self) -> tuple[int, int]:
        """Which stage this is, of how many."""
        stages = self._stages()
        return (stages.index(self.stage) + 1 if self.stage in stages else len(stages)), len(stages)

    def elapsed(self, now: float) -> float:
        """Seconds since the first stage began."""
        return 0.0 if self._began is None else now - self._began

    def left(self, now: float) -> float | None:
        """Seconds until the end, at least so many where it is `open`; None as long as nothing was measured that would tell."""
        found = self._left(now, least=self._unplanned)
        expected = self._expected(now) if self.stage == "plan" and not self._over else None
        return found if expected is None or now - self._since >= SEARCH * expected["plan"] else None

    def open(self, now: float) -> bool:
        """Whether what is left is a lower bound: plans may have to be searched for, or the stage takes longer than its like."""
        return not self._over and (self._unplanned or self.late(now))

    @property
    def _unplanned(self) -> bool:
        """Whether this comes before `plan`."""
        told = self._stages()
        return self.stage in told and told.index(self.stage) < told.index("plan")

    def _left(self, now: float, least: bool) -> float | None:
        expected = self._expected(now, least)
        if self._over:
            return 0.0
        if expected is None:
            return None
        if least:
            return max(expected[self.stage] - (now - self._since), 0.0)
        spent = now - self._since
        rest = max(expected[self.stage] - spent, expected[self.stage] / 3 + spent / 8)
        return rest + sum(seconds for stage, seconds in expected.items() if stage != self.stage)

    def late(self, now: float) -> bool:
        """Whether the stage takes longer than its like."""
        expected = None if self._over else self._expected(now)
        return expected is not None and now - self._since > 1.2 * expected[self.stage] + 2

    def share(self, now: float) -> float:
        """Of the whole, 0 to 1 and never less than it was; 1 is for `finished` to say."""
        left = self._left(now, least=False)
        if self._over:
            return 1.0
        if left is not None:
            spent = self.elapsed(now)
            self._shown = max(self._shown, min(spent / (spent + left), ALMOST))
        return self._shown

    def _stages(self) -> tuple[str, ...]:
        told: tuple[str, ...] = TRAINED if self.training else AUDIT
        if SCORED[0] == self.stage or SCORED[0] in self._took:
            before, after = told.index("plan") + 1, told[told.index("plan") + 1 :]
            told = (SCORED[0], *told[:before], SCORED[1], *after)
        whole = "load" in self._took or self.stage == "load"
        return (*BEFORE, *told, *AFTER) if whole else told

    def _expected(self, now: float, least: bool = False) -> dict[str, float] | None:
        """Seconds of the stage at work and of all that follow; least: those that they take in any case."""
        measure = self._measure(now, 0.0 if least else AFTER_NODES)
        if measure is None:
            return None
        measured = self._took.get("capture", 0.0) + measure
        if least:  # nobody knows if plans have to be searched for, nor what was measured before
            return {self.stage: measure if self.stage == "measure" else 0.0}
        guessed = {stage: ratio * measured for stage, ratio in FROM_MEASURE.items()}
        baseline = self._took.get("baseline", guessed["baseline"])
        guessed |= {"measure": measure, "plan": max(FROM_BASELINE * baseline, LEAST_PLAN * measured)}
        guessed["baseline"] += BUILT_AGAIN * self._took.get("load", 0.0)
        guessed[SCORED[1]] = FROM_SCORE * self._took.get(SCORED[0], 0.0)
        stages = self._stages()
        at = stages.index(self.stage) if self.stage in stages else len(stages)
        following = {stage: guessed[stage] for stage in stages[at:]}
        return {self.stage: guessed.get(self.stage, 0.1 * measured), **following}

    def _measure(self, now: float, after_nodes: float) -> float | None:
        """What the stage `measure` takes, or took."""
        if "measure" in self._took:
            return self._took["measure"]
        done, total = self._nodes
        if not total or done < max(1, KNOWN * total):
            return None
        nodes = self._nodes_done if self._nodes_done is not None else (now - self._since) * total / done
        return nodes * (1 + after_nodes)


def duration(seconds: float) -> str:
    """`8 s`, `1:05 min`, `1:02 h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60}:{whole % 60:02} min"
    return f"{whole // 3600}:{whole % 3600 // 60:02} h"
