"""Operations for which first order has no answer: what they do is run, one by one or many together, or is not known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..formats.entries import entries, extent, is_number
from ..formats.metrics import output_error
from ..formats.table import FORMATS
from ..ops.casting import lowered, raised
from ..ops.nodes import tensors_of
from ..records import Contribution
from .margins import held
from .rerun import SENSITIVE_SHARE, Limits, Reruns, only_non_finite

LIMITS = Limits(most=96)
"""Of the model's forward, counted in operations. What is left then is not known, and nobody calls it safe."""

FEW = 48
"""So many are run one by one; of more, groups are run first, and halved where a group does harm."""

Group = tuple[list[str], float, bool, str]
"""Operations, and what is known of a larger group that they are of: its error, whether it changed a choice, and the criterion
that it took most of."""


@dataclass
class Undecided:
    """Runs what first order does not tell, in one format.

    first: first-order answers, which hold for what stays finite and changes no choice. unseen: nodes for which they say
    nothing. levels: of a model that answers with choices alone, how far nodes move what decides them. found: what is known of nodes so far.
    """

    reruns: Reruns
    first: Mapping[str, Contribution]
    unseen: Collection[str]
    tick: Callable[[str], None]
    levels: Mapping[str, float] = field(default_factory=dict)
    found: dict[str, Contribution] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._traces = {name: traces[self.reruns.format] for name, traces in self.reruns.measurement.traces.items()}

    def decide(self, names: Sequence[str]) -> dict[str, Contribution]:
        """{node: what it does to the outputs}; names: in execution order."""
        for name in reversed(names):  # after the last ones little is left to run
            if self._traces[name].low is not None and self._affordable():
                self.tick(name)
                if self._absorbed(name):
                    first = self.first[name]
                    self.found[name] = first if first.isolated else replace(first, decided_by="re-run")
        left = self._left(names)
        if len(left) > FEW and self.levels:
            self._hold(left)
            self._one_by_one(self._left(left), LIMITS.most)
        elif len(left) > FEW:
            self._one_by_one([name for name in left if self._traces[name].certain], LIMITS.most / 2)
        if len(self._left(left)) <= FEW:
            self._one_by_one(self._left(left), LIMITS.most)
        self._halve(self._left(left))
        return self.found

    def _left(self, names: Sequence[str]) -> list[str]:
        return [name for name in names if name not in self.found]

    def _affordable(self, most: float = math.inf) -> bool:
        return self.reruns.spent < min(most, LIMITS.most)

    def _absorbed(self, name: str) -> bool:
        """Whether it turns entries non-finite, and these alone leave the outputs as they are, bit for bit."""
        reference = self.reruns.measurement.values[name]
        value = only_non_finite(reference, raised(self._traces[name].low))
        return value is not None and self.reruns.error(name, value) == 0

    def _one_by_one(self, names: Sequence[str], most: float) -> None:
        for name in reversed(names):
            if not self._affordable(most):
                break
            self.tick(name)
            self.found[name] = alone(self.reruns, name, once=len(names) > FEW)

    def _hold(self, names: Sequence[str]) -> None:
        """Those whose errors move the outputs by little even where they are several times as large."""
        levels = {name: self.levels[name] for name in names if name in self.levels and not self._traces[name].certain}
        yardstick = self.reruns.yardstick
        plain = yardstick.distance is output_error  # of a share of changed choices others may make anything
        found = held(self.reruns, levels, SENSITIVE_SHARE * yardstick.limit if plain else 0.0)
        for name in found.names:
            share = found.share(levels[name])
            self.found[name] = Contribution(found.error, share, share, "margin")

    def _halve(self, names: Sequence[str]) -> None:
        """All low at once; where that does harm, each half, down to single ones."""
        groups: deque[Group] = deque([(list(names), math.inf, True, "")] if names else [])
        while groups:
            group, error, flipped, criterion = groups.popleft()
            if not self._affordable():
                self.found |= {name: self._bounded(name, error, len(names), flipped, criterion) for name in group}
                continue
            self.tick(group[0])
            if len(group) == 1:
                self.found[group[0]] = alone(self.reruns, group[0], once=True)
                continue
            error, flipped = self.reruns.together(group)
            criterion = self.reruns.criterion
            if error <= SENSITIVE_SHARE * self.reruns.yardstick.limit:
                self.found |= {name: self._bounded(name, error, len(group), flipped, criterion) for name in group}
            elif math.isfinite(error) and not flipped and not any(self._is_blind(name) for name in group):
                self.found |= {name: self.first[name] for name in group}  # nothing that first order does not see
            else:
                middle = len(group) // 2
                groups += [(half, error, flipped, criterion) for half in (group[:middle], group[middle:])]

    def _is_blind(self, name: str) -> bool:
        return self._traces[name].certain or name in self.unseen

    def _bounded(self, name: str, error: float, many: int, flipped: bool, criterion: str) -> Contribution:
        """One of so many that together move the outputs by `error`; of independent errors the squares add up."""
        first = self.first[name]
        if not error <= self.reruns.yardstick.limit:
            return replace(first, decided_by="not-run")
        share = error / math.sqrt(many)
        if flipped or not first.own:
            return Contribution(error, share, share, "group", many, criterion)
        return Contribution(error, min(first.own, error), min(first.cast, error), "group", many, criterion)


def alone(reruns: Reruns, name: str, once: bool = False) -> Contribution:
    """The model run with this node low, and with its FP32 result rounded; once: not the latter if the former is nothing."""
    measurement = reruns.measurement
    low, cast = raised(measurement.traces[name][reruns.format].low), None
    isolated = reruns.together([name])[0] if low is None else reruns.error(name, low)
    criterion = reruns.criterion
    if measurement.capture.nodes[name].floating and not (once and isolated == 0):
        rounded = raised(lowered(measurement.values[name], FORMATS[reruns.format]))
        cast = isolated if _equal(low, rounded) else reruns.error(name, rounded)
    return Contribution(isolated, isolated, isolated if cast is None else cast, "re-run", criterion=criterion)


def _equal(a: object, b: object) -> bool:
    ours, theirs = tensors_of(a), tensors_of(b)
    return len(ours) == len(theirs) > 0 and all(
        is_number(x) and extent(x) == extent(y) and bool(entries(x).eq(entries(y)).all())
        for x, y in zip(ours, theirs, strict=True)
    )
