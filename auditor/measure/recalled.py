"""What an earlier audit measured and attributed on one batch, in the place of doing it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from ..records import Batch, Capture, Contribution, Dtypes, Magnitudes, NodeError
from .measure import Facts, Measurement, measure

Contributions = dict[str, dict[str, Contribution]]


@dataclass(frozen=True)
class Attributed:
    """What is kept of attributing. views: see estimates.lone_views."""

    contributions: Contributions
    views: dict[str, str]

    def fits(self, capture: Capture, formats: tuple[str, ...]) -> bool:
        """Whether it speaks of every value of the graph in every format."""
        values = [n.name for n in capture.graph_module.graph.nodes if n.op != "output"]
        return list(self.contributions) == values and all(tuple(c) == formats for c in self.contributions.values())


@dataclass(frozen=True)
class Recalled:
    """As much of a Measurement as confirming asks for; the values come back, without the formats, once a run needs them."""

    capture: Capture
    formats: tuple[str, ...]
    model: torch.nn.Module
    batch: Batch
    facts: Facts = field(repr=False)
    attributed: Attributed = field(repr=False)

    @property
    def errors(self) -> Mapping[str, Mapping[str, NodeError]]:
        """What each format did to every node."""
        return self.facts.errors

    @property
    def ranges(self) -> Mapping[str, Magnitudes]:
        """Magnitudes of every node and placeholder."""
        return self.facts.ranges

    @property
    def pure(self) -> frozenset[str]:
        """Formats in which the whole model ran low."""
        return frozenset(self.facts.low)

    @property
    def low(self) -> Mapping[str, Mapping[str, Dtypes]]:
        """Of these, the dtypes."""
        return self.facts.low

    @cached_property
    def again(self) -> Measurement:
        """The reference run once more, with no format beside it."""
        return measure(self.capture, self.model, self.batch, (), back=self.facts.back)
