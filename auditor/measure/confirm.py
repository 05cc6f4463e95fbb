"""Predictions held against runs: those that decide a verdict, and a few that tell whether first order holds here at all."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..formats.metrics import output_error
from ..ops.flops import flops_of
from ..records import Contribution, Linearity
from .estimates import lone_views
from .measure import Measurement
from .rerun import SENSITIVE_SHARE, Limits, Reruns, Yardstick

LIMITS = Limits(most=8)
"""Re-runs of the model's forward, counted in operations, where first order holds."""

MORE = Limits(most=96)
"""The same where it does not."""

SAMPLE = 6
"""Predictions that are run to learn whether first order holds, spread over their sizes."""

OFF = 1.6
"""How many times too large or too small a prediction may be; a few probes of few samples alone are 1.3 times off."""

REFUTED = 0.1
"""Share of the predictions beyond the budget that runs may refute, before those nearest to it are all run."""

_TOLD = 1e-3
"""Share of the budget below which a prediction is of no consequence, and is not held against a run."""

Contributions = dict[str, dict[str, Contribution]]


def confirmed(
    measurement: Measurement, contributions: Contributions, yardstick: Yardstick, tick: Callable[[str], None]
) -> tuple[Contributions, dict[str, Linearity]]:
    """The contributions with predictions beyond the budget run, and how the predictions of each format fared.

    Those come first whose refutation frees the most arithmetic for the least error. Where predictions turn out wrong, more
    are run: all that are beyond the budget, and those below it by no more than predictions were found to be off.
    """
    result = {name: dict(by_format) for name, by_format in contributions.items()}
    checks: dict[str, Linearity] = {}
    if not 0 < yardstick.limit < math.inf:
        return result, checks
    views = lone_views(measurement)
    for fmt in measurement.formats:
        predicted = _predicted(measurement, contributions, fmt)
        confirming = _Confirming(Reruns(measurement, fmt, yardstick), predicted, views, tick)
        relative = yardstick.measured is output_error
        confirming.go(_whole(measurement, contributions, fmt) if relative else None)
        for name, found in confirming.found.items():
            result[name][fmt] = found
        if confirming.check is not None:
            checks[fmt] = confirming.check
    return result, checks


def _predicted(measurement: Measurement, contributions: Contributions, fmt: str) -> dict[str, Contribution]:
    """What rests on first order alone, of operations that run in the format."""
    return {
        name: contributions[name][fmt]
        for name, errors in measurement.errors.items()
        if contributions[name][fmt].decided_by == "first-order" and errors[fmt].unsupported is None
    }


def _whole(measurement: Measurement, contributions: Contributions, fmt: str) -> tuple[float, float] | None:
    """(predicted, run): error of the outputs where everything is low; None where that cannot be compared."""
    if fmt not in measurement.pure:
        return None
    capture = measurement.capture
    entering = [p.name for p in capture.placeholders if p.name in contributions]
    parts = [contributions[name][fmt].own for name in measurement.errors if name in contributions]
    parts += [contributions[name][fmt].cast for name in entering]
    errors = [
        measurement.errors[name][fmt].propagated_error if name in measurement.errors else None
        for name in capture.outputs
    ]
    if not errors or any(error is None for error in errors):
        return None
    norms = [measurement.ranges[name].norm for name in capture.outputs]
    run = math.hypot(*(error * norm for error, norm in zip(errors, norms, strict=True) if error is not None))
    found = math.hypot(*parts), run / (math.hypot(*norms) or math.inf)
    return found if all(map(math.isfinite, found)) and min(found) > 0 else None


@dataclass
class _Confirming:
    """One format. roots: {view: what alone it views}: all views of one value err alike, and one run tells of them.

    ratios: predicted by run, where both are of some size; astray: how many had none.
    """

    reruns: Reruns
    predicted: Mapping[str, Contribution]
    roots: Mapping[str, str]
    tick: Callable[[str], None]
    found: dict[str, Contribution] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    astray: int = 0
    check: Linearity | None = None
    _known: dict[str, float] = field(default_factory=dict)
    _taken: dict[str, str] = field(default_factory=dict)

    def go(self, whole: tuple[float, float] | None) -> None:
        limit = self.reruns.yardstick.limit
        claims = [name for name in self._in_order() if self.predicted[name].isolated > limit]
        near = [name for name, one in self.predicted.items() if one.isolated > SENSITIVE_SHARE * limit]
        if not near or (not claims and whole is not None and _near(*whole)):
            return
        self._run(self._sample(), LIMITS.most)
        self._run(claims, LIMITS.most)
        if not self._holds():
            self._run(self._nearest(claims), MORE.most)
            self._run(self._doubtful(), MORE.most)
        elif self._refuted(claims) > REFUTED * len(self._settled(claims)):
            self._run(self._nearest(claims), MORE.most)
        self._run(self._views(), math.inf)
        self.check = self._checked(claims, whole)

    def _in_order(self) -> list[str]:
        """By the arithmetic of their modules, for each unit of error."""
        nodes = self.reruns.measurement.capture.nodes
        flops = {
            n.name: flops_of(n) for n in self.reruns.measurement.capture.graph_module.graph.nodes if n.name in nodes
        }
        owners: dict[str, int] = {}
        for name, count in flops.items():
            owners[nodes[name].owner] = owners.get(nodes[name].owner, 0) + count

        def weight(name: str) -> float:
            return (1 + owners[nodes[name].owner] + flops[name]) / (self.predicted[name].isolated or math.inf)

        return sorted(self.predicted, key=weight, reverse=True)

    def _sample(self) -> list[str]:
        """Spread over the sizes of those predictions that are of some consequence."""
        limit = self.reruns.yardstick.limit
        told = [name for name, one in self.predicted.items() if _TOLD * limit < one.isolated < math.inf]
        ranked = sorted(told, key=lambda name: -self.predicted[name].isolated)
        step = max(len(ranked) // SAMPLE, 1)
        return ranked[::step][:SAMPLE]

    def _nearest(self, names: Iterable[str]) -> list[str]:
        return sorted(names, key=lambda name: self.predicted[name].isolated)

    def _settled(self, claims: Iterable[str]) -> list[str]:
        return [name for name in claims if name in self.found]

    def _refuted(self, claims: Iterable[str]) -> int:
        limit = self.reruns.yardstick.limit
        return sum(self.found[name].isolated <= limit for name in self._settled(claims))

    def _doubtful(self) -> list[str]:
        """Below the budget, by no more than predictions were found to be too small; the nearest first."""
        limit = self.reruns.yardstick.limit
        short = max([1.0, *(1 / ratio for ratio in self.ratios)])
        below = {name: one.isolated for name, one in self.predicted.items() if limit / short < one.isolated <= limit}
        return self._nearest(below)[::-1]

    def _run(self, names: Iterable[str], most: float) -> None:
        for name in names:
            if name in self.found or name not in self.predicted:
                continue
            key = f"views of {self.roots[name]}" if name in self.roots else name
            if key not in self._known:
                if self.reruns.spent >= most:
                    continue
                self.tick(name)
                self._known[key] = self.reruns.together([name])[0]
                self._taken[key] = self.reruns.criterion
                self._compare(self.predicted[name].isolated, self._known[key])
            self._settle(name, self._known[key], self._taken[key])

    def _compare(self, predicted: float, run: float) -> None:
        if math.isfinite(run) and run > 0 and predicted > 0:
            self.ratios.append(predicted / run)
        elif run or predicted > _TOLD * self.reruns.yardstick.limit:
            self.astray += 1

    def _settle(self, name: str, run: float, criterion: str) -> None:
        said = self.predicted[name]
        share = run / said.isolated if said.isolated and math.isfinite(run) else 1.0
        self.found[name] = replace(
            said,
            isolated=run,
            own=said.own * share,
            cast=said.cast * share,
            decided_by="re-run",
            criterion=criterion,
        )

    def _views(self) -> list[str]:
        """Views of a value one of which was run."""
        return [name for name, root in self.roots.items() if f"views of {root}" in self._known]

    def _holds(self) -> bool:
        """Whether nearly all predictions are as large as what a run says."""
        near = sum(_near(ratio, 1.0) for ratio in self.ratios)
        return near >= 0.9 * (len(self.ratios) + self.astray)

    def _checked(self, claims: list[str], whole: tuple[float, float] | None) -> Linearity | None:
        if not self.ratios and not self.astray:
            return None
        run, refuted = self._settled(claims), self._refuted(claims)
        return Linearity(
            format=self.reruns.format,
            compared=len(self.ratios) + self.astray,
            least=min(self.ratios, default=0.0),
            median=statistics.median(self.ratios or [0.0]),
            most=max(self.ratios, default=0.0),
            holds=self._holds(),
            whole_predicted=whole[0] if whole else None,
            whole_run=whole[1] if whole else None,
            confirmed=len(run) - refuted,
            refuted=refuted,
            left=len(claims) - len(run),
        )


def _near(predicted: float, run: float) -> bool:
    return run / OFF <= predicted <= run * OFF
