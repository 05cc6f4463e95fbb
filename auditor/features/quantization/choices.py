"""Searches a scheme for each group of layers: the fewest bits whose measured error is within a limit."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import ne
from typing import NamedTuple, TypeGuard

import torch

from ...measure.layers import ChoiceRun
from ...numerics.schemes import SCHEMES
from ...records import Score
from ...stages import tick

MAX_RUNS = 96
"""Maximum number of model runs, each on all calibration inputs, in the search for one plan."""

SINGLES = 256
"""Maximum number of runs with only one group quantized; the options with the largest predicted effects are run."""

NEGLIGIBLE = 0.1
"""Share of the limit up to which the root sum of squares of predicted errors counts as negligible: these options are not
run."""

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


def _is_finite(run: ChoiceRun | None) -> TypeGuard[ChoiceRun]:
    return run is not None and run.error < math.inf


@dataclass(frozen=True)
class Group:
    """Layers with one scheme. keys: names; elements: number of weights; squares: {scheme: squared output error}; unknown:
    schemes whose error is neither predicted nor measured."""

    keys: tuple[str, ...]
    elements: int
    squares: Mapping[str, float]
    unknown: frozenset[str] = frozenset()


class Verified(NamedTuple):
    """A verified choice of schemes. by: `torchao` or `emulation`, which computed the quantized layers; measured,
    held_out: errors on the calibration and on the held-out inputs; error: the larger one, above the limit if the score
    refuses the choice. score: None if an error exceeds the limit, or if plans are not scored."""

    by: str
    measured: float
    held_out: float
    error: float
    score: Score | None = None


class ErrorModel(NamedTuple):
    """Predicts the squared errors of choices from the measured output change of one choice, the start.

    An option p is one scheme of one group; d[p] is the change of the outputs by this option alone. Each group has one
    chosen option. The outputs change by r plus the sum of d[p] over the chosen options p, where r is the part of the
    start's measured change that its own d[p] do not explain. So the squared error is a quadratic function,

        sum of products[p, q] over chosen p and q + 2 * sum of linear[p] over chosen p + constant,

    which equals the measured one at the start. products: d[p] . d[q], [criteria, options, options], or [1, options,
    options] for all criteria. linear: d[p] . r, [criteria, options]. constant: [criteria]. A choice is given as `chosen`,
    [groups]: the index of each group's option.
    """

    products: torch.Tensor
    linear: torch.Tensor
    constant: torch.Tensor

    def inner_products(self, chosen: torch.Tensor) -> torch.Tensor:
        """[criteria, options]: inner product of each option's change with the change of the outputs under a choice."""
        return self.products[:, :, chosen].sum(2) + self.linear

    def squares(self, chosen: torch.Tensor) -> torch.Tensor:
        """[criteria]: squared error of a choice."""
        inner = self.inner_products(chosen)
        return (inner + self.linear)[:, chosen].sum(1) + self.constant

    def squares_after_swaps(self, chosen: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
        """[options, options]: largest squared error of any criterion after options p and q have replaced the chosen
        options of their groups; meaningless for two options of one group. present: [options], the index of the option
        that is chosen in each option's group.

        With the difference e[p] = d[p] - d[present[p]] and the change c of the outputs under the choice, the squared
        error is |c + e[p] + e[q]|^2 = |c|^2 + (|e[p]|^2 + 2 c . e[p]) + (|e[q]|^2 + 2 c . e[q]) + 2 e[p] . e[q].
        """
        products = self.products
        inner = self.inner_products(chosen)
        before = self.squares(chosen)
        # |e[p]|^2 + 2 c . e[p], [criteria, options]
        lengths = products.diagonal(dim1=1, dim2=2)
        with_present = products[:, range(len(present)), present]
        single = lengths + lengths[:, present] - 2 * with_present + 2 * (inner - inner[:, present])
        # e[p] . e[q], [criteria, options, options]
        joint = products - products[:, present] - products[:, :, present] + products[:, present][:, :, present]
        after = before[:, None, None] + single[:, :, None] + single[:, None] + 2 * joint
        return after.amax(0)


@dataclass
class Search:
    """Searches the choice of schemes with the fewest bits whose errors are within a limit. measure: runs a choice on the
    calibration inputs; known, verified: results of runs and of verifications, shared by all searches; seconds: predicted
    time of a choice, which decides between equal bits; left: number of runs still allowed. limit: the limit of `best`, if it
    is known before."""

    groups: Sequence[Group]
    schemes: tuple[str, ...]
    measure: Callable[[Choice], ChoiceRun]
    known: dict[Choice, ChoiceRun]
    verified: Mapping[Choice, Verified]
    seconds: Callable[[Choice], float] = lambda _: 0.0
    left: int = MAX_RUNS
    spent: int = 0
    limit: float = 0.0

    def __post_init__(self) -> None:
        """Run options one by one, with all other groups in 16 bits; an option is (index of a group, scheme)."""
        self._draw = random.Random(0)
        allowed = ("", *self.schemes)
        self._options = [(i, s) for i, group in enumerate(self.groups) for s in ("", *group.squares) if s in allowed]
        # of each option, [options]: its group, and the bits of the group's weights
        self._group_of = torch.tensor([i for i, _ in self._options])
        sizes = [bits_of(scheme) * self.groups[i].elements for i, scheme in self._options]
        self._option_bits = torch.tensor(sizes).double()
        squares = [self.groups[i].squares.get(scheme, 0.0) for i, scheme in self._options]
        self._run_singles(squares)
        runs = [self.known.get(self._alone(*option)) for option in self._options]
        self._set_effects(squares, runs)

    def _run_singles(self, squares: Sequence[float]) -> None:
        """Run the options with the largest predicted squared errors, each with all other groups in 16 bits; without those
        whose predicted errors are negligible, all together."""
        largest_first = sorted(zip(squares, self._options, strict=True), key=lambda pair: -pair[0])
        negligible = self._negligible(largest_first)
        for _, option in largest_first[:SINGLES]:
            if option not in negligible:
                self._run(self._alone(*option))

    def _negligible(self, largest_first: Sequence[tuple[float, tuple[int, str]]]) -> set[tuple[int, str]]:
        """The options whose predicted squared errors add up to less than the square of NEGLIGIBLE times the limit. largest_first:
        (squared error, option) of all options."""
        result = set[tuple[int, str]]()
        total = 0.0
        for square, option in reversed(largest_first):
            total += square
            if total >= (NEGLIGIBLE * self.limit) ** 2:
                break
            group, scheme = option
            if scheme not in self.groups[group].unknown:
                result.add(option)
        return result

    def _set_effects(self, squares: Sequence[float], runs: Sequence[ChoiceRun | None]) -> None:
        """Set the output changes of all options, their inner products, and their squares. squares, runs: of each option,
        its predicted squared error and its run, or None.

        Without a run, or if it failed, the change is unknown: 0 in `_changes`, and in `_products` as if independent of
        all other changes, with a square that is predicted, or FAILED.
        """
        unquantized = self.known[self._alone(0, "")]
        finite = [run if _is_finite(run) else None for run in runs]
        # [criteria of all batches, options, entries]
        self._changes = torch.stack([(run or unquantized).change for run in finite], 1).double()
        # [criteria of all batches, options, options]
        self._products = self._changes @ self._changes.mT
        self._squares = torch.tensor(squares).double()
        for place, run in enumerate(runs):
            if _is_finite(run):
                continue
            if run is not None:
                self._squares[place] = FAILED
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
        accepted = self.smallest_accepted(limit)
        finite = [choice for choice, run in self.known.items() if self._allows(choice) and run.error < math.inf]
        expected = {choice: self.expected_error(choice) for choice in finite}
        idle = 0  # number of draws in a row without a new choice to run
        while self.left > 0 and idle < DRAWS and limit > 0:
            base = min((choice for choice, error in expected.items() if error <= limit), key=self.bits)
            choice = self._draw_choice(base, expected, limit, idle)
            idle += 1
            if choice not in self.known and self.bits(choice) < self.bits(base):
                self._run(choice)
                expected[choice] = self.expected_error(choice)
                self.left -= 1
                idle = 0
        return self._next_to_verify(accepted, expected, limit)

    def _draw_choice(self, base: Choice, expected: Mapping[Choice, float], limit: float, idle: int) -> Choice:
        """A choice predicted to have few bits and an error near the limit: `base` improved in both ways of predicting,
        and if both were run before, an improved random choice. expected: {measured choice: its expected error}."""
        start = base
        aim = 1.0
        fixed = list[int]()
        if idle > 1:
            nearest_to_limit = sorted(expected, key=lambda choice: abs(expected[choice] - limit))
            start = self._draw.choice([base, *nearest_to_limit[:NEAR]])
            fixed = [self._draw.randrange(len(self._options)) for _ in range(FIXED)]
            aim = self._draw.uniform(1 / FAR, FAR)
        # `limit` is for expected errors, but `_improve` predicts measured ones
        scale = self.known[start].error / expected[start] if expected[start] else 1.0
        scale *= aim
        return self._improve(start, scale * limit, joint=idle % 2 == 0, fixed=fixed)

    def _next_to_verify(self, accepted: Choice, expected: Mapping[Choice, float], limit: float) -> Choice:
        """The best unverified choice with fewer bits than `accepted`, see `best`; or `accepted`. expected: {measured
        choice: its expected error}."""

        def may_follow(choice: Choice) -> bool:
            within = self.known[choice].error <= limit
            return within and choice not in self.verified and self.bits(choice) < self.bits(accepted)

        def rank(choice: Choice) -> tuple[float, float, float]:
            return max(limit, expected[choice]), self.bits(choice), expected[choice]

        return min(filter(may_follow, expected), key=rank, default=accepted)

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
        verified = [other for other in self.verified if any(other) and self._allows(other)]
        unquantized = self._alone(0, "")
        nearest = min(verified, key=lambda other: sum(map(ne, other, choice)), default=unquantized)
        measured = self.known[choice].error
        own_square = self._sum_of_squares(choice)
        nearest_square = self._sum_of_squares(nearest)
        if not nearest_square:  # no verified choice has a known effect
            return max(measured, 0.0)
        scaled = math.sqrt(own_square / nearest_square) * self.verified[nearest].error
        return max(measured, scaled)

    def _sum_of_squares(self, choice: Choice) -> float:
        return float(self._squares[self._places(choice)].sum())

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
        model = self._error_model(choice, joint)
        chosen = torch.tensor(self._places(choice))  # [groups]: index of each group's option
        locked = self._group_of[fixed]
        chosen[locked] = torch.tensor(fixed, dtype=torch.long)
        free = ~torch.isin(self._group_of, locked)  # [options]
        for _ in range(CHANGES):
            square = model.squares(chosen).amax()
            options = self._best_swap(model, chosen, free, limit)
            if not options:
                break
            chosen[self._group_of[options]] = torch.tensor(options, dtype=torch.long)
        if not square <= limit**2:
            return choice
        return tuple(self._options[place][1] for place in chosen.tolist())

    def _error_model(self, start: Choice, joint: bool) -> ErrorModel:
        """The squared errors of choices near `start`, whose effects may cancel if `joint`; else their squares add up."""
        chosen = self._places(start)
        measured = self.known[start].change.double()  # [criteria, entries]
        unexplained = measured - self._changes[:, chosen].sum(1)
        if joint:
            products = self._products
            linear = (self._changes @ unexplained[..., None])[..., 0]
        else:
            products = torch.diag_embed(self._squares)[None]
            linear = torch.zeros(self._changes.shape[:2], dtype=torch.double)
        explained = products[:, chosen][:, :, chosen].sum((1, 2))
        constant = measured.square().sum(1) - explained - 2 * linear[:, chosen].sum(1)
        return ErrorModel(products, linear, constant)

    def _best_swap(self, model: ErrorModel, chosen: torch.Tensor, free: torch.Tensor, limit: float) -> list[int]:
        """The one or two options that should replace the chosen options of their groups; [] if none improves the choice.

        Above the limit, the best pair reduces the squared error most, per bit added; within it, the best pair saves most
        bits per squared error added. free: [options], whether the option's group may change.
        """
        before = model.squares(chosen).amax()
        present = chosen[self._group_of]  # [options]: the option that is chosen in the option's group
        # of each pair of options, [options, options]:
        after = model.squares_after_swaps(chosen, present)
        added = after - before
        saved = self._bits_saved(present)
        if before > limit**2:
            value = -added / (1 - saved.clamp(max=0))
            useful = added < 0
        else:
            value = saved / added.clamp(min=1e-6 * limit**2)
            useful = (after <= limit**2) & (saved > 0)
        value = value.where(self._swappable(present, free) & useful, 0.0)
        if not value.amax() > 0:
            return []
        pair = divmod(int(value.argmax()), len(present))
        return [option for option in pair if option != present[option]]

    def _bits_saved(self, present: torch.Tensor) -> torch.Tensor:
        """[options, options]: bits saved by a pair of options in place of the present options of their groups."""
        saved = self._option_bits[present] - self._option_bits
        return saved[:, None] + saved

    def _swappable(self, present: torch.Tensor, free: torch.Tensor) -> torch.Tensor:
        """[options, options]: whether a pair of options may be chosen together. A pair with an option that is chosen
        already (the second one, if both are of one group) changes one group only. free: as in `_best_swap`."""
        stays = present == torch.arange(len(present))
        other_groups = self._group_of[:, None] != self._group_of
        allowed = free | stays
        return (other_groups | stays) & allowed & allowed[:, None]

    def _run(self, choice: Choice) -> None:
        if choice not in self.known:
            self.spent += 1
            tick(f"{self.bits(choice) / sum(group.elements for group in self.groups):.3g} bits")
            self.known[choice] = self.measure(choice)
