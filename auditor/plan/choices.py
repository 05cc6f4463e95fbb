"""Searches a scheme for each group of layers: the fewest bits whose measured error is within a limit."""

from __future__ import annotations

import math
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch

from ..numerics.schemes import SCHEMES
from ..stages import tick

RUNS = 48
"""Maximum number of runs on all calibration inputs from which one plan's layers are chosen."""

SINGLES = 256
"""Maximum number of runs with only one group quantized; the options with the largest predicted effects are run."""

MOVES = 4
"""Number of groups whose scheme is changed at random before the choice is improved, to leave a local optimum."""

CHANGES = 1_000
"""Maximum number of changes that improve one choice: rounding errors in predictions could make changes cycle."""

NEAR = 8
"""Number of measured choices, with errors nearest to the limit, from which the search starts."""

DRAWS = 64
"""Number of random starts in a row without a new choice to run, after which the search ends."""

SHARES = 1.0, 0.0
"""Factors of the inner products between different groups' changes; 0: changes that cancel or add up on the calibration
inputs are not expected to do so on other inputs."""

STRICTEST = 0.7
"""A local search that ends at a refused choice is repeated with a limit between STRICTEST * limit and the limit."""

KEPT = 16.0
"""Bits per weight of a layer that is not quantized."""

FAILED = 1e30
"""Squared effect that stands for a failed run of an option: above any limit, yet finite."""

Choice = tuple[str, ...]
"""A choice: the quantization scheme of each group of layers, or "" for 16 bits."""


def bits_of(scheme: str) -> float:
    """Bits per weight of a quantization scheme, or of 16-bit layers for ""."""
    return SCHEMES[scheme].weight.bits if scheme else KEPT


@dataclass(frozen=True)
class Group:
    """Layers that must have one scheme. squares: {scheme: squared effect on the outputs}."""

    keys: tuple[str, ...]
    elements: int
    squares: Mapping[str, float]


class Run(NamedTuple):
    """Result of a run of a choice of schemes. error: of the outputs, on the worst batch. change: of the outputs,
    [criteria of all batches, entries], see `change_of`."""

    error: float
    change: torch.Tensor


@dataclass
class Search:
    """Searches the choice of schemes with the fewest bits whose measured error is within a limit.

    measure: runs a choice on the calibration inputs. known: its results, also of other searches. refused: choices that the
    verification did not accept.
    """

    groups: Sequence[Group]
    schemes: tuple[str, ...]
    measure: Callable[[Choice], Run]
    known: dict[Choice, Run]
    refused: set[Choice] = field(default_factory=set)
    left: int = RUNS
    spent: int = 0

    def bits(self, choice: Choice) -> float:
        """Total bits of the weights of all groups under a choice of schemes."""
        return sum(bits_of(scheme) * group.elements for group, scheme in zip(self.groups, choice, strict=True))

    def predicted(self, choice: Choice, share: float = 1.0) -> float:
        """Predicted error of a choice: that of the sum of the output changes that each quantized group alone causes.
        share: see SHARES."""
        at = self._places(choice)
        return float(self._shared(share)[:, at][:, :, at].sum((1, 2)).amax().clamp(min=0).sqrt())

    def summed(self, choice: Choice) -> float:
        """Sum, over the groups of a choice, of the output error with only this group quantized."""
        return float(self._products.diagonal(dim1=1, dim2=2)[:, self._places(choice)].amax(0).sqrt().sum())

    @cached_property
    def _options(self) -> list[tuple[int, str]]:
        """All options, as (number of the group, scheme), in the order of groups."""
        return [(i, s) for i, group in enumerate(self.groups) for s in ("", *group.squares) if s in ("", *self.schemes)]

    def _places(self, choice: Choice) -> list[int]:
        return [self._options.index(one) for one in enumerate(choice)]

    @cached_property
    def _changes(self) -> torch.Tensor:
        """[criteria of all batches, options, entries]: the change by each option, from a run of the group alone; 0 without
        a run, or if the run failed."""
        quantized = [(i, s) for i, s in self._options if s]
        for one in sorted(quantized, key=lambda one: -self.groups[one[0]].squares[one[1]])[:SINGLES]:
            self._run(self._alone(*one))
        none = self.known[self._alone(0, "")]
        runs = [self.known.get(self._alone(*one), none) for one in self._options]
        return torch.stack([(run if run.error < math.inf else none).change for run in runs], 1).double()

    @cached_property
    def _products(self) -> torch.Tensor:
        """[criteria of all batches, options, options]: inner products of changes. An option without a
        run has only its squared effect, as if independent of all others."""
        result = self._changes @ self._changes.mT
        for place, (i, scheme) in enumerate(self._options):
            run = self.known.get(self._alone(i, scheme))
            if run is None or not run.error < math.inf:
                result[:, place, place] = self.groups[i].squares[scheme] if run is None else FAILED
        return result

    def _shared(self, share: float) -> torch.Tensor:
        """`_products`, with those of different options times `share`."""
        return share * self._products + (1 - share) * torch.diag_embed(self._products.diagonal(dim1=1, dim2=2))

    def _alone(self, group: int, scheme: str) -> Choice:
        return tuple(scheme if i == group else "" for i in range(len(self.groups)))

    def best(self, limit: float) -> Choice:
        """Run more choices; return the choice with the fewest bits among those with a measured error within the limit.

        Each run tries the choice that would be best if changes of the outputs added up. The search starts at the best
        choice measured so far, then at other measured choices, with some options changed at random.
        """
        draw, idle = random.Random(0), 0
        while self.left > 0 and idle < DRAWS and limit > 0:
            base = self._within(limit)
            near = sorted(self._allowed(sys.float_info.max), key=lambda one: abs(self.known[one].error - limit))
            start = draw.choice([base, *near[:NEAR]]) if idle else base
            moves = [draw.randrange(len(self._options)) for _ in range(MOVES * bool(idle))]
            choice = self._improve(start, limit, moves, SHARES[idle % 2])
            if choice in self.refused:
                choice = self._improve(start, limit * draw.uniform(STRICTEST, 1.0), moves, SHARES[idle % 2])
            if choice in self.known or self.bits(choice) >= self.bits(base):
                idle += 1
            else:
                self.left, idle = self.left - 1, 0
                self._run(choice)
        return self._within(limit)

    def safest(self, limit: float, other: Choice) -> Choice:
        """The choice within the limit, with fewer bits than `other` and the least error if output changes neither cancel
        nor add up; else `other`. On other inputs, this error is nearer than the measured one."""
        fewer = [choice for choice in self._allowed(limit) if self.bits(choice) < self.bits(other)]
        return min(fewer, key=lambda choice: self.predicted(choice, 0.0), default=other)

    def allows(self, choice: Choice) -> bool:
        """Whether a choice has no other scheme."""
        return {"", *self.schemes}.issuperset(choice)

    def _within(self, limit: float) -> Choice:
        return min(self._allowed(limit), key=lambda choice: (self.bits(choice), self.known[choice].error))

    def _allowed(self, limit: float) -> list[Choice]:
        choices = (choice for choice, run in self.known.items() if run.error <= limit and choice not in self.refused)
        return [choice for choice in choices if self.allows(choice)]

    def _improve(self, start: Choice, limit: float, moves: Sequence[int], share: float) -> Choice:
        """Apply `moves` to a choice, then change one or two groups at a time: first until the predicted error is within
        the limit, then to save bits.

        The prediction is the error of the measured change under `start` plus the changes by groups that differ from
        `start`, with inner products of different changes times `share`. Each step changes the one or two groups that save
        most bits per added squared error. Returns `start` if no predicted error is within the limit.
        """
        groups = torch.tensor([i for i, _ in self._options])
        bits = torch.tensor([bits_of(scheme) * self.groups[i].elements for i, scheme in self._options]).double()
        at, known = torch.tensor(self._places(start)), self.known[start].change.double()
        products, diagonal = self._shared(share), self._products.diagonal(dim1=1, dim2=2)
        beyond = known - self._changes[:, at].sum(1)  # the change that the single changes do not explain
        added = share * (self._changes @ beyond[..., None])[..., 0]
        rest = known.square().sum(1) - (products[:, at][:, :, at].sum((1, 2)) + 2 * added[:, at].sum(1))
        for _ in range(CHANGES):
            at[groups[moves]] = torch.tensor(moves, dtype=torch.long)
            now, inner = at[groups], products[:, :, at].sum(2) + added
            before = (inner + added)[:, at].sum(1) + rest
            own = diagonal + diagonal[:, now] - 2 * products[:, range(len(now)), now] + 2 * (inner - inner[:, now])
            both = products - products[:, now] - products[:, :, now] + products[:, now][:, :, now]
            after = (before[:, None, None] + own[:, :, None] + own[:, None] + 2 * both).amax(0)
            saved = (bits[now] - bits)[:, None] + (bits[now] - bits)
            apart = (groups[:, None] != groups) | (now == torch.arange(len(now)))
            more = after - before.amax()
            if before.amax() > limit**2:
                value, useful = -more / (1 - saved.clamp(max=0)), more < 0
            else:
                value, useful = saved / more.clamp(min=1e-6 * limit**2), (after <= limit**2) & (saved > 0)
            value = value.where(apart & useful, 0.0)
            if not value.amax() > 0:
                found = tuple(self._options[place][1] for place in at.tolist())
                return found if before.amax() <= limit**2 else start
            moves = [one for one in divmod(int(value.argmax()), len(now)) if one != now[one]]
        return start

    def _run(self, choice: Choice) -> None:
        if choice not in self.known:
            self.spent += 1
            tick(f"{self.bits(choice) / sum(group.elements for group in self.groups):.3g} bits")
            self.known[choice] = self.measure(choice)
