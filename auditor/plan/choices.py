"""Searches a scheme for each group of layers: the fewest bits whose measured error is within a limit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import NamedTuple

import torch

from ..numerics.schemes import SCHEMES
from ..records import Score
from ..stages import tick

RUNS = 96
"""Maximum number of model runs, each on all calibration inputs, in the search for one plan."""

SINGLES = 256
"""Maximum number of runs with only one group quantized; the options with the largest predicted effects are run."""

FIXED = 2
"""Number of groups of layers with a random scheme, fixed while the schemes of the other groups are improved."""

CHANGES = 1_000
"""Maximum number of changes while one choice is improved: inexact predictions could make the changes cycle."""

FAR = 1.05
"""Random draws aim at errors that differ from the limit by up to this factor, since predictions are not exact."""

NEAR = 8
"""Number of measured choices, with errors nearest to the limit, from which the search starts."""

DRAWS = 160
"""Number of random draws in a row without a new choice to run, after which the search ends."""

SWEEPS = 2
"""Number of times that each group may take a more accurate scheme of equal bits."""

KEPT = 16.0
"""Bits per weight of a layer that is not quantized."""

FAILED = 1e30
"""Squared output error assumed for an option whose run failed: above any limit, yet finite."""

Choice = tuple[str, ...]
"""A choice: the quantization scheme of each group of layers, or "" for 16 bits."""


def bits_of(scheme: str) -> float:
    """Bits per weight of a quantization scheme, or of 16-bit layers for ""."""
    return SCHEMES[scheme].weight.bits if scheme else KEPT


@dataclass(frozen=True)
class Group:
    """Layers with one scheme. keys: names; elements: number of weights; squares: {scheme: squared output error}."""

    keys: tuple[str, ...]
    elements: int
    squares: Mapping[str, float]


class Run(NamedTuple):
    """Result of running the model under a choice of schemes. error: largest output error of any batch. change: changes
    of the outputs, [criteria of all batches, entries], see `change_of`."""

    error: float
    change: torch.Tensor


class Verified(NamedTuple):
    """A verified choice of schemes. by: `torchao` or `emulation`, which computed the quantized layers; measured,
    held_out: errors on the calibration and on the held-out inputs; error: the larger one, above the limit if the score
    refuses the choice. score: None if an error exceeds the limit, or if plans are not scored."""

    by: str
    measured: float
    held_out: float
    error: float
    score: Score | None = None


@dataclass
class Search:
    """Searches the choice of schemes with the fewest bits whose errors are within a limit. measure: runs a choice on the
    calibration inputs; known, verified: results of runs and of verifications, shared by all searches; seconds: predicted
    time of a choice, which decides between equal bits; left: number of runs still allowed."""

    groups: Sequence[Group]
    schemes: tuple[str, ...]
    measure: Callable[[Choice], Run]
    known: dict[Choice, Run]
    verified: Mapping[Choice, Verified]
    seconds: Callable[[Choice], float] = lambda _: 0.0
    left: int = RUNS
    spent: int = 0

    def __post_init__(self) -> None:
        """Run options one by one, with all other groups in 16 bits; an option is (index of a group, scheme)."""
        self._draw, allowed = random.Random(0), ("", *self.schemes)
        self._options = [(i, s) for i, group in enumerate(self.groups) for s in ("", *group.squares) if s in allowed]
        squares = [self.groups[i].squares.get(s, 0.0) for i, s in self._options]
        for _, one in sorted(zip(squares, self._options, strict=True), key=lambda pair: -pair[0])[:SINGLES]:
            self._run(self._alone(*one))
        none, runs = self.known[self._alone(0, "")], [self.known.get(self._alone(*one)) for one in self._options]
        known = [run if run is not None and run.error < math.inf else none for run in runs]
        # [criteria of all batches, options, entries]: 0 without a run, or if the run failed
        self._changes = torch.stack([run.change for run in known], 1).double()
        self._products, self._squares = self._changes @ self._changes.mT, torch.tensor(squares).double()
        for place, run in enumerate(runs):
            if run is None or not run.error < math.inf:  # as if independent of all others
                self._squares[place] = self._squares[place] if run is None else FAILED
                self._products[:, place, place] = self._squares[place]

    def bits(self, choice: Choice) -> float:
        """Total bits of the weights of all groups under a choice of schemes."""
        return sum(bits_of(scheme) * group.elements for group, scheme in zip(self.groups, choice, strict=True))

    @property
    def tested(self) -> int:
        """Number of choices of this search's schemes with a quantized group, whose run gave a finite error."""
        runs = ((choice, run) for choice, run in self.known.items() if any(choice) and self._allows(choice))
        return sum(run.error < math.inf for _, run in runs)

    def predicted_error(self, choice: Choice) -> float:
        """Predicted error of a choice, if the output changes that each quantized group causes alone add up."""
        at = self._places(choice)
        return float(self._products[:, at][:, :, at].sum((1, 2)).amax().clamp(min=0).sqrt())

    def sum_of_singles(self, choice: Choice) -> float:
        """Sum, over the groups of a choice, of the output error with only this group quantized."""
        return float(self._products.diagonal(dim1=1, dim2=2)[:, self._places(choice)].amax(0).sqrt().sum())

    def _places(self, choice: Choice) -> list[int]:
        return [self._options.index(one) for one in enumerate(choice)]

    def _alone(self, group: int, scheme: str) -> Choice:
        return tuple(scheme if i == group else "" for i in range(len(self.groups)))

    def best(self, limit: float) -> Choice:
        """Run more choices; return the choice to verify next, which has a measured error within `limit` and fewer bits
        than the accepted choice: the one with the fewest bits if its expected error is within `limit`, else the one with
        the smallest expected error. Returns the accepted choice if no choice has fewer bits.

        Each run tries a choice predicted to have few bits and an error near the limit. The search changes the best
        measured choice; then one drawn from this and those nearest to the limit, with random schemes for some groups.
        """
        idle, accepted = 0, self.smallest_accepted(limit)
        runs = ((choice, run) for choice, run in self.known.items() if self._allows(choice))
        expected = {choice: self.expected_error(choice) for choice, run in runs if run.error < math.inf}
        while self.left > 0 and idle < DRAWS and limit > 0:
            base = min((choice for choice, error in expected.items() if error <= limit), key=self.bits)
            near = sorted(expected, key=lambda choice: abs(expected[choice] - limit))[:NEAR]
            start, joint = self._draw.choice([base, *near]) if idle > 1 else base, idle % 2 == 0
            fixed = [self._draw.randrange(len(self._options)) for _ in range(FIXED * (idle > 1))]
            scale = self.known[start].error / expected[start] if expected[start] else 1.0
            scale *= self._draw.uniform(1 / FAR, FAR) if idle > 1 else 1.0
            choice = self._improve(start, scale * limit, joint, fixed)
            idle += 1
            if choice not in self.known and self.bits(choice) < self.bits(base):
                self._run(choice)
                self.left, idle, expected[choice] = self.left - 1, 0, self.expected_error(choice)
        within = [choice for choice in expected if self.known[choice].error <= limit and choice not in self.verified]
        fewer = [choice for choice in within if self.bits(choice) < self.bits(accepted)]
        rank = {choice: (max(limit, expected[choice]), self.bits(choice), expected[choice]) for choice in fewer}
        return min(rank, key=rank.__getitem__, default=accepted)

    def smallest_accepted(self, limit: float) -> Choice:
        """Of the verified choices with an error within the limit, the one with the fewest bits; of equal bits, the
        fastest one; of equal times, the one with the smallest error."""
        within = (choice for choice, one in self.verified.items() if one.error <= limit and self._allows(choice))
        return min(within, key=lambda choice: (*self._price(choice), self.verified[choice].error))

    def more_accurate(self, choice: Choice) -> Choice:
        """Run the choice with the same bits, no more time, and a smaller predicted error; returns it, or `choice` if no
        other scheme of a group reduces the predicted error. The groups take their best scheme in turn, SWEEPS times."""
        result = choice
        for group in [*range(len(choice))] * SWEEPS:
            result = min([result, *self._equally_cheap(result, group)], key=self.predicted_error)
        self._run(result)
        return result

    def _equally_cheap(self, choice: Choice, group: int) -> Iterator[Choice]:
        """Choices with another scheme of one group, with equal bits and no more time."""
        for i, scheme in self._options:
            if i != group or scheme == choice[group] or not scheme or not choice[group]:
                continue
            other = (*choice[:group], scheme, *choice[group + 1 :])
            if bits_of(scheme) == bits_of(choice[group]) and self.seconds(other) <= self.seconds(choice):
                yield other

    def _price(self, choice: Choice) -> tuple[float, float]:
        return self.bits(choice), self.seconds(choice)

    def expected_error(self, choice: Choice) -> float:
        """Expected error of a choice once verified: its error on the calibration inputs or, if larger, the error of the
        most similar verified choice, times the root of the ratio of both choices' summed squared effects."""
        verified = (one for one in self.verified if any(one) and self._allows(one))
        nearest = min(verified, key=lambda one: sum(map(ne, one, choice)), default=self._alone(0, ""))
        square, other = (float(self._squares[self._places(one)].sum()) for one in (choice, nearest))
        return max(self.known[choice].error, math.sqrt(square / other) * self.verified[nearest].error if other else 0.0)

    def _allows(self, choice: Choice) -> bool:
        """Whether a choice uses only schemes of this search."""
        return {"", *self.schemes}.issuperset(choice)

    def _improve(self, choice: Choice, limit: float, joint: bool, fixed: Sequence[int]) -> Choice:
        """Apply the options `fixed`, then change one or two other groups at a time: first until the predicted error is
        within the limit, then to save bits.

        Predicted: the error of the output change measured under `choice`, plus the effects of the groups changed since.
        joint: whether these effects may cancel, as on the calibration inputs; otherwise their squares add up. Each step
        changes the one or two groups that save most bits per added squared error. Returns `choice` if no predicted
        error is within the limit.
        """
        groups = torch.tensor([i for i, _ in self._options])
        bits = torch.tensor([bits_of(scheme) * self.groups[i].elements for i, scheme in self._options]).double()
        at, known = torch.tensor(self._places(choice)), self.known[choice].change.double()
        products = self._products if joint else torch.diag_embed(self._squares)[None]
        beyond = known - self._changes[:, at].sum(1)  # the change that the single changes do not explain
        added = joint * (self._changes @ beyond[..., None])[..., 0]
        rest = known.square().sum(1) - products[:, at][:, :, at].sum((1, 2)) - 2 * added[:, at].sum(1)
        diagonal, free = products.diagonal(dim1=1, dim2=2), ~torch.isin(groups, groups[fixed])
        at[groups[fixed]] = torch.tensor(fixed, dtype=torch.long)
        for _ in range(CHANGES):
            now, inner = at[groups], products[:, :, at].sum(2) + added
            before = (inner + added)[:, at].sum(1) + rest
            own = diagonal + diagonal[:, now] - 2 * products[:, range(len(now)), now] + 2 * (inner - inner[:, now])
            both = products - products[:, now] - products[:, :, now] + products[:, now][:, :, now]
            after = (before[:, None, None] + own[:, :, None] + own[:, None] + 2 * both).amax(0)
            saved = (bits[now] - bits)[:, None] + (bits[now] - bits)
            stays = now == torch.arange(len(now))
            apart = ((groups[:, None] != groups) | stays) & (free | stays) & (free | stays)[:, None]
            more = after - before.amax()
            if before.amax() > limit**2:
                value, useful = -more / (1 - saved.clamp(max=0)), more < 0
            else:
                value, useful = saved / more.clamp(min=1e-6 * limit**2), (after <= limit**2) & (saved > 0)
            value = value.where(apart & useful, 0.0)
            if not value.amax() > 0:
                break
            moves = [one for one in divmod(int(value.argmax()), len(now)) if one != now[one]]
            at[groups[moves]] = torch.tensor(moves, dtype=torch.long)
        return tuple(self._options[place][1] for place in at.tolist()) if before.amax() <= limit**2 else choice

    def _run(self, choice: Choice) -> None:
        if choice not in self.known:
            self.spent += 1
            tick(f"{self.bits(choice) / sum(group.elements for group in self.groups):.3g} bits")
            self.known[choice] = self.measure(choice)
