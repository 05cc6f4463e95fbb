"""Compares outputs with a reference: the value of every criterion, and its share of the limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..errors import suggest
from ..isolation.outputs import NamedTensors
from ..numerics.metrics import output_error
from ..records import CriterionValue, Distance
from .criterion import Criterion, bad_criterion, name_of
from .margins import margins_of
from .values import unfit, value

OTHERS = "the other outputs"
"""The name for all outputs without a criterion, which are judged together."""

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class CriterionResult:
    """One criterion and its value. share: used part of the limit; value: None if the model did not return the
    output."""

    criterion: Criterion
    value: float | None
    share: float

    @property
    def holds(self) -> bool:
        """Whether the limit holds; also true if the model did not return the output."""
        return self.value is None or self.criterion.holds(self.value)


@dataclass(frozen=True)
class Criteria:
    """A distance between outputs: the largest share that a criterion uses of its limit; `max_error` limits outputs
    without a criterion.

    names: the outputs' names, if a reference has none. joint: the error measure of all outputs without a criterion.
    """

    each: tuple[Criterion, ...]
    max_error: float
    names: tuple[str, ...] = ()
    joint: Distance = output_error

    @property
    def rest_criterion(self) -> Criterion:
        """The error budget `max_error` of outputs without a criterion, as a Criterion."""
        if self.joint is output_error:
            return Criterion(OTHERS, "rel_l2", self.max_error)
        return Criterion(OTHERS, name_of(self.joint), self.max_error, function=self.joint)

    def all(self, names: Sequence[str] | None = None) -> tuple[Criterion, ...]:
        """The criteria, and the error budget if some outputs in `names` have no criterion."""
        rest = self.rest_criterion
        has_rest = self.output_indices(rest, self.names if names is None else names)
        return (*self.each, rest) if has_rest else self.each

    def __call__(self, reference: Tensors, candidate: Tensors) -> float:
        """The largest share that any criterion uses of its limit; above 1, a limit is exceeded."""
        return max((result.share for result in self.evaluate(reference, candidate)), default=0.0)

    def evaluate(self, reference: Tensors, candidate: Tensors, expected: bool = False) -> list[CriterionResult]:
        """The value of every criterion, and of the error budget if some outputs have no criterion.

        expected: whether the share of decisions is computed from the changes of their margins, not from the flips that
        occurred. Raises: MeasureError(slug="shape-mismatch").
        """
        if len(reference) != len(candidate):
            output_error(reference, candidate)  # raises the error
        criteria = self.all(names_of(reference, self.names))
        return [self._one(criterion, reference, candidate, expected) for criterion in criteria]

    def values(
        self,
        runs: Sequence[tuple[Tensors, Tensors]],
        others: Iterable[tuple[Tensors, Tensors]] = (),
        predicted: float = math.nan,
    ) -> tuple[CriterionValue, ...]:
        """Each criterion's worst value over `runs`; the criterion holds if its limit is met in `runs` and in `others`.

        A criterion that has no value in `runs` does not hold. predicted: the first-order estimate of the share of the
        limit, from which the expected flips of decisions are computed.
        """
        results = defaultdict[Criterion, list[CriterionResult]](list)
        for run in runs:
            for result in self.evaluate(*run):
                results[result.criterion].append(result)
        missed_in_others = set[Criterion]()
        for run in others:
            missed_in_others.update(result.criterion for result in self.evaluate(*run) if not result.holds)
        references = [reference for reference, _ in runs]
        values = list[CriterionValue]()
        for criterion in dict.fromkeys((*self.each, *results)):
            absent = CriterionResult(criterion, None, 0.0)
            worst = max(results[criterion], key=lambda result: (result.value is not None, result.share), default=absent)
            outputs = [self._outputs_of(criterion, reference) for reference in references]
            has_number = worst.value is not None and not math.isnan(worst.value)
            has_share = bool(runs) and math.isfinite(worst.share)
            value = CriterionValue(
                output=criterion.output,
                kind=criterion.measure_text,
                sign=criterion.how.sign,
                limit=criterion.limit,
                value=worst.value if has_number else None,
                share=worst.share if has_share else None,
                holds=worst.value is not None and worst.holds and criterion not in missed_in_others,
                entries=_entries_of(criterion, outputs),
                predicted=_expected_value(criterion, outputs, predicted),
            )
            values.append(value)
        return tuple(values)

    def _outputs_of(self, criterion: Criterion, reference: Tensors) -> list[torch.Tensor]:
        """The outputs that a criterion covers."""
        indices = self.output_indices(criterion, names_of(reference, self.names))
        return [reference[index] for index in indices]

    def output_indices(self, criterion: Criterion, names: Sequence[str]) -> tuple[int, ...]:
        """Indices of the outputs that a criterion covers; for `rest_criterion`, outputs that no criterion covers."""
        if criterion.output == OTHERS:
            return tuple(i for i, name in enumerate(names) if not any(one.covers(name) for one in self.each))
        return tuple(i for i, name in enumerate(names) if criterion.covers(name))

    def _one(self, criterion: Criterion, reference: Tensors, candidate: Tensors, expected: bool) -> CriterionResult:
        """Compute the value of one criterion. Raises: MeasureError(slug="shape-mismatch")."""
        indices = self.output_indices(criterion, names_of(reference, self.names))
        ours = [reference[index] for index in indices]
        theirs = [candidate[index] for index in indices]
        if criterion.output == OTHERS:
            error = self.joint(ours, theirs)
            return CriterionResult(criterion, error, criterion.share(error))
        values = [value(criterion, x, y) for x, y in zip(ours, theirs, strict=True)]
        if not values:
            return CriterionResult(criterion, None, 0.0)

        def share_of(number: float) -> float:
            return math.inf if math.isnan(number) else criterion.share(number)

        worst = max(values, key=share_of)
        if expected and len(indices) == 1 and not math.isnan(worst):
            margins = margins_of(criterion, ours[0])
            if margins is not None:
                return CriterionResult(criterion, worst, margins.share(ours[0], theirs[0]))
        return CriterionResult(criterion, worst, criterion.share(worst))


def _expected_value(criterion: Criterion, runs: Sequence[Tensors], predicted: float) -> float | None:
    """The value that a criterion on decisions is expected to have, from the expected flips in the worst run; None for
    other criteria, and without an estimate.

    runs: the outputs that the criterion covers, of each run. predicted: the share of the limit, to first order.
    """
    decisions = [margins_of(criterion, one[0]) for one in runs if len(one) == 1]
    flips = [one.flips(predicted * one.allowed_change) for one in decisions if one is not None]
    if not flips or not math.isfinite(predicted):
        return None
    return max(flips) if criterion.how.sign == "<=" else 1 - max(flips)


def _entries_of(criterion: Criterion, runs: Sequence[Tensors]) -> int | None:
    """Number of entries of the one output of a `flips` criterion; None for other measures, and if runs differ in it.

    runs: the outputs that the criterion covers, of each run.
    """
    if criterion.kind != "flips" or criterion.function is not None:
        return None
    sizes = {one[0].numel() if len(one) == 1 else None for one in runs}
    return sizes.pop() if len(sizes) == 1 else None


def words_of(distance: Distance) -> str:
    """An error measure in words, for the report."""
    if isinstance(distance, Criteria):
        return "largest value of a criterion, as a share of its limit"
    return "relative L2 of the outputs" if distance is output_error else name_of(distance)


def names_of(reference: Tensors, otherwise: tuple[str, ...] = ()) -> tuple[str, ...]:
    """The names of the outputs, or `otherwise` if the outputs have no names."""
    return reference.names if isinstance(reference, NamedTensors) else otherwise


def criteria_for(
    criteria: Sequence[Criterion], max_error: float, reference: NamedTensors, joint: Distance | None = None
) -> Criteria:
    """Check criteria against the first batch's outputs, return all as one distance. joint: the user's measure, if any.

    If higher values of a function are better, its value for equal outputs becomes the criterion's best value.

    Raises: AuditorError(slug="bad-criterion") for a criterion that matches no output, or not its type.
    """
    checked: list[Criterion] = []
    for criterion in criteria:
        indices = [index for index, name in enumerate(reference.names) if criterion.covers(name)]
        if not indices:
            raise bad_criterion(_no_output(criterion, reference.names))
        for index in indices:
            reason = unfit(criterion, reference.names[index], reference[index])
            if reason is not None:
                raise bad_criterion(f"'{criterion}': {reason}")
        if criterion.best is not None:
            best = min(value(criterion, reference[index], reference[index]) for index in indices)
            criterion = replace(criterion, best=best)
        checked.append(criterion)
    return Criteria(tuple(checked), max_error, reference.names, joint or output_error)


def _no_output(criterion: Criterion, names: Sequence[str]) -> str:
    """The message for a criterion that names no output of the model."""
    listed = ", ".join(dict.fromkeys(names[:20])) or "no tensor"
    if len(names) > 20:
        listed += f", and {len(names) - 20} more"
    close = suggest(criterion.output, names)
    hint = f": {close}" if close else "."
    return f"the model has no output {criterion.output!r}, which '{criterion}' names{hint} It returns {listed}"
