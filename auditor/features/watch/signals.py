"""Signals of training steps, and the triggers: what in the signals of a step is worth a capsule. Does not import torch."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

HISTORY = 64
"""Number of signals that a capsule contains."""
WINDOW, LEAST = 100, 30
"""A spike is judged against the last WINDOW finite values, if there are at least LEAST."""
SPIKE, TIMES = 8.0, 5.0
"""A spike exceeds the median by SPIKE times the median absolute deviation, and is TIMES the median."""
NARROW = 0.05
"""Smallest median absolute deviation that is assumed, relative to the median."""
SETTLED = 20
"""Number of updates at a loss scale after which this scale counts as one that works."""
IN_A_ROW = 4
"""Number of skipped steps in a row that is worth a capsule, once training has begun."""
COLLAPSE = 256.0
"""Factor by which the loss scale may fall below the last scale that worked."""
LOST = 0.5
"""Share of lost updates, or of gradients that underflow to zero, that is worth a capsule."""
SAMPLES = 2
"""Number of samples in a row with lost updates that is worth a capsule: the first steps of a warm-up may lose theirs."""
STEADY, CONSTANT, TINY = 16, 1e-3, 0.01
"""Gradients were clipped while scaled, if their norms are equal within CONSTANT in STEADY updates, and below TINY."""


@dataclass(frozen=True)
class Trigger:
    """A reason for a capsule. kind: such as "loss-not-finite"; text: the values that were seen."""

    kind: str
    text: str


@dataclass(frozen=True)
class Signal:
    """What was seen of one update; None: unknown. loss: sum over the backward passes. norm: of the gradients without the
    loss scale. scale: the loss scale, None without one. skipped: whether a GradScaler skipped the update. lost, flushed:
    shares of lost updates and of gradients that underflowed, of the last sample."""

    step: int
    optimizer: int
    loss: float | None
    norm: float | None
    scale: float | None
    rate: float | None
    skipped: bool = False
    lost: float | None = None
    flushed: float | None = None

    def named(self) -> dict[str, float]:
        """The known ones by name, for a logger."""
        known = {
            "loss": self.loss,
            "grad_norm": self.norm,
            "scale": self.scale,
            "lr": self.rate,
            "skipped": float(self.skipped),
            "updates_lost": self.lost,
            "gradients_flushed": self.flushed,
        }
        return {f"auditor/{name}": x for name, x in known.items() if x is not None}


@dataclass
class Judge:
    """Judges the signals of one optimizer, one by one."""

    history: deque[Signal] = field(default_factory=lambda: deque(maxlen=STEADY))
    _losses: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))  # finite ones
    _norms: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _at_scale: int = 0  # number of updates in a row at the present loss scale
    _good_scale: float | None = None
    _skips: int = 0
    _largest_rate: float = 0.0
    _lost_samples: int = 0  # in a row

    def judge(self, signal: Signal) -> list[Trigger]:
        """The reasons for a capsule of this step, the most important first."""
        triggers = [
            *self._not_finite(signal),
            *self._of_scale(signal),
            *self._spikes(signal),
            *self._lost(signal),
            *self._clipped(signal),
        ]
        self.history.append(signal)
        for value, past in ((signal.loss, self._losses), (signal.norm, self._norms)):
            if value is not None and math.isfinite(value):
                past.append(value)
        return triggers

    def _not_finite(self, signal: Signal) -> Iterator[Trigger]:
        if signal.rate is not None and not math.isfinite(signal.rate):
            yield Trigger("rate-not-finite", f"the learning rate is {signal.rate}")
        if signal.loss is not None and not math.isfinite(signal.loss):
            yield Trigger("loss-not-finite", f"the loss is {signal.loss}")
        elif not signal.skipped and signal.norm is not None and not math.isfinite(signal.norm):
            yield Trigger("gradients-not-finite", f"the norm of the gradients is {signal.norm}")

    def _of_scale(self, signal: Signal) -> Iterator[Trigger]:
        """Skips that GradScaler's search for a scale does not explain, and a scale that collapses.

        At the beginning, and after the scale has grown, a GradScaler skips steps until it has found its scale.
        """
        if signal.scale is None:
            return
        before = self.history[-1].scale if self.history else None
        if not signal.skipped:
            self._skips = 0
            self._at_scale = self._at_scale + 1 if signal.scale == before else 1
            if self._at_scale >= SETTLED:
                self._good_scale = signal.scale
            return
        self._skips += 1
        self._at_scale = 0
        good = self._good_scale
        if good is not None and signal.scale <= good / COLLAPSE:
            yield Trigger("scale-collapsed", f"the loss scale fell from {good:g} to {signal.scale:g}")
        elif signal.scale <= 1:
            yield Trigger("scale-collapsed", f"the loss scale is {signal.scale:g}")
        elif good is not None and self._skips >= IN_A_ROW:
            yield Trigger("skips-in-a-row", f"{self._skips} steps in a row are skipped")
        elif good is not None and signal.scale <= good and self._skips == 1:
            yield Trigger("skipped", f"a step is skipped at the loss scale {signal.scale:g}, which worked before")

    def _spikes(self, signal: Signal) -> Iterator[Trigger]:
        if signal.skipped:
            return
        for kind, name, value, past in (
            ("loss-spike", "the loss", signal.loss, self._losses),
            ("gradient-spike", "the norm of the gradients", signal.norm, self._norms),
        ):
            if _is_spike(value, past):
                yield Trigger(kind, f"{name} is {value:.4g}, its median {statistics.median(past):.4g}")

    def _lost(self, signal: Signal) -> Iterator[Trigger]:
        rate = signal.rate
        if rate is not None and math.isfinite(rate):
            self._largest_rate = max(self._largest_rate, rate)
        if signal.flushed is not None and signal.flushed > LOST:
            yield Trigger("gradients-flushed", f"{signal.flushed:.0%} of the sampled gradients are zero")
        if signal.lost is None:
            return
        is_lost = signal.lost > LOST and self._rate_counts(rate)
        self._lost_samples = self._lost_samples + 1 if is_lost else 0
        if self._lost_samples >= SAMPLES:
            yield Trigger("updates-lost", f"{signal.lost:.0%} of the sampled updates change no weight")

    def _rate_counts(self, rate: float | None) -> bool:
        """Whether the learning rate is not at the end of its schedule, where updates may be lost."""
        return rate is None or rate > 1e-3 * self._largest_rate

    def _clipped(self, signal: Signal) -> Iterator[Trigger]:
        """Gradients that were clipped before they were divided by the loss scale have the norm `limit / scale`."""
        scale = signal.scale
        if scale is None or scale <= 1:
            return
        recent = [*self.history, signal][-STEADY:]
        if len(recent) < STEADY or any(one.skipped for one in recent):
            return
        norms = [one.norm for one in recent if one.norm is not None]
        if len(norms) < STEADY:
            return
        is_steady = max(norms) - min(norms) <= CONSTANT * max(norms)
        if is_steady and 0 < max(norms) < TINY:
            limit = norms[-1] * scale
            text = f"the norm of the gradients is always {norms[-1]:.3g}, which is {limit:.3g} at the loss scale"
            yield Trigger("clipped-while-scaled", text)


def _is_spike(value: float | None, past: Sequence[float]) -> bool:
    """Whether a finite value is far above the median of the past ones, which are finite."""
    if value is None or not math.isfinite(value) or len(past) < LEAST or value <= max(past):
        return False
    middle = statistics.median(past)
    width = statistics.median(abs(x - middle) for x in past)
    usual = max(width, NARROW * abs(middle))
    return value > middle + SPIKE * usual and value > TIMES * abs(middle)
