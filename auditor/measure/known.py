"""What is known of a batch from an earlier audit, found by all that it depends on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from typing import Any

import torch

from ..cache.kept import Kept, Runs
from ..criteria.measure import Criteria
from ..formats.metrics import output_error
from ..records import Batch, Capture, Contribution, Distance
from .estimates import lone_views
from .measure import Facts, Measurement
from .recalled import Attributed, Recalled
from .reference import Back
from .rerun import Yardstick

Contributions = dict[str, dict[str, Contribution]]


@dataclass(frozen=True)
class Heard(Yardstick):
    """A yardstick that notes what was asked of it: what was not cannot have made a difference."""

    asked: set[str] = field(default_factory=set, compare=False)

    @property
    def limit(self) -> float:
        """The budget as a relative L2 error."""
        self.asked.add("limit")
        return super().limit

    def __call__(self, reference: Sequence[torch.Tensor], candidate: Sequence[torch.Tensor]) -> float:
        """See Yardstick."""
        self.asked.add("distance")
        return super().__call__(reference, candidate)


def measure_of(distance: Distance) -> list[Any] | None:
    """What tells one measure of errors from others; None for a user's own function, which may answer otherwise tomorrow."""
    if distance is output_error:
        return ["relative"]
    if not isinstance(distance, Criteria) or distance.joint is not output_error:
        return None
    if any(criterion.function is not None for criterion in distance.all):
        return None
    return ["criteria", [str(criterion) for criterion in distance.all], [c.limit for c in distance.all], distance.names]


@dataclass(frozen=True)
class Known:
    """One batch in some formats under a yardstick."""

    kept: Kept
    capture: Capture
    model: torch.nn.Module
    batch: Batch
    formats: tuple[str, ...]
    seed: int
    yardstick: Yardstick

    @cached_property
    def _batch(self) -> str | None:
        return self.kept.batch(self.capture, self.model, self.batch)

    @cached_property
    def _drawn(self) -> str:
        return self.kept.generators()

    @property
    def _distance(self) -> list[Any] | None:
        measure = measure_of(self.yardstick.distance)
        return None if measure is None else [*measure, self.yardstick.unit]

    @cached_property
    def runs(self) -> Runs:
        """Single runs on the batch, in all formats."""
        return self.kept.runs("reruns", self._batch, self._distance)

    def _keys(self) -> dict[str, str]:
        """By what attributing asks of the yardstick: nothing, how far outputs are apart, or the budget too."""
        shared = self._batch, list(self.formats), self.seed, self._drawn
        if isinstance(self.yardstick.distance, Criteria):
            return {"limit": self.kept.key("attributed", *shared, self._distance, self.yardstick.budget)}
        return {
            "": self.kept.key("attributed", *shared, "any"),
            "distance": self.kept.key("attributed", *shared, self._distance),
            "limit": self.kept.key("attributed", *shared, self._distance, self.yardstick.budget),
        }

    @cached_property
    def facts(self) -> Facts | None:
        """What each format does to every node, where an earlier audit found it."""
        found: Facts | None = self.kept.get(self._facts_key, Facts)
        if found is None or not found.fits(self.capture, self.formats):
            return None
        self.kept.took("operations", len(found.errors))
        return found

    @cached_property
    def _facts_key(self) -> str:
        return self.kept.key("measured", self._batch, list(self.formats), self.seed, self._drawn)

    def recalled(self, tick: Callable[[str], None]) -> Recalled | None:
        """All that an earlier audit found; None where some of it has to be found again."""
        for key in self._keys().values():
            found: Attributed | None = self.kept.get(key, Attributed)
            if found is not None and found.fits(self.capture, self.formats) and self.facts is not None:
                self.kept.took("effects", len(self.facts.errors))
                for _ in self.facts.errors:
                    tick("from the cache")
                return Recalled(self.capture, self.formats, self.model, self.batch, self.facts, found)
        return None

    def listening(self) -> Heard:
        """The yardstick, for attributing; what it is asked is noted."""
        return Heard(*(getattr(self.yardstick, item.name) for item in fields(Yardstick)))

    def keep(self, measured: Measurement, contributions: Contributions, heard: Heard, back: Back) -> None:
        """Keep what was found; not where random numbers were drawn."""
        keys = self._keys()
        if not self._facts_key or self.kept.generators() != self._drawn:
            return
        if self.facts is None or self.facts.back != back:
            errors = {name: dict(by_format) for name, by_format in measured.errors.items()}
            low = {name: dict(dtypes) for name, dtypes in measured.low.items()}
            facts = Facts(errors, dict(measured.ranges), low, back)
            self.kept.put(self._facts_key, facts, Facts)
        asked = next((what for what in ("limit", "distance") if what in heard.asked), "")
        self.kept.put(keys.get(asked) or keys["limit"], Attributed(contributions, lone_views(measured)), Attributed)
