"""Measures all calibration batches in turn; memory use does not grow with the number of batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

import torch

from ..capture.paths import usable
from ..capture.several import RecordedPaths, join_paths, number_of, unjudged_line
from ..criteria.measure import Criteria
from ..errors import MeasureError, let_through
from ..numerics.histogram import merge_magnitudes
from ..records import Batch, Capture, Contribution, FlaggedRegion, Linearity, Magnitudes, ModelPath, NodeError, Subject
from ..records.decisions import Decisions
from ..records.quantization import QuantizedLayer
from .attribute import FirstOrder, first_order
from .causes import refine_causes
from .decisions import measure_decisions
from .layers import ChoiceRun, ModelRun, QuantizedModel, measure_layers, spans_of
from .measure import Measurement, measure
from .quantized import QuantizedLayers, require_layers
from .reference import Back
from .rerun import PLAIN, OutputMetric, regions_of
from .uncertain import measure_uncertain

K = TypeVar("K")
T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """Measurements of every node. contributions: of nodes and placeholders. batches: number of measured batches.

    linearity: predictions compared with runs, by format. regions: effects of operations run in low precision together,
    on the first batch of each path. decisions: on these first batches; for each format, the Decisions with the largest
    error. first: results of the first batch, if several batches were measured. quantized: {(layer, scheme): result}.
    under_flags: {product: result of `flag_errors` on the first batch with this product}. choice_runs: {(layer, scheme): the
    run of all batches with only this layer quantized}, if a run measured it on each batch.
    """

    errors: Mapping[str, Mapping[str, NodeError]]
    contributions: Mapping[str, Mapping[str, Contribution]]
    ranges: Mapping[str, Magnitudes]
    batches: int
    linearity: Mapping[str, Linearity] = field(default_factory=dict)
    regions: tuple[FlaggedRegion, ...] = ()
    decisions: tuple[Decisions, ...] = ()
    first: Calibration | None = None
    quantized: Mapping[tuple[str, str], QuantizedLayer] = field(default_factory=dict)
    under_flags: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    choice_runs: Mapping[tuple[str, str], ChoiceRun] = field(default_factory=dict, repr=False)


def calibrate(
    capture: Capture,
    subject: Subject,
    formats: tuple[str, ...],
    seed: int,
    output_metric: OutputMetric = PLAIN,
    whole: Subject | None = None,
    schemes: tuple[str, ...] = (),
) -> Calibration:
    """Measure each node over all batches: worst error, largest isolated effect, RMS contribution, pooled magnitudes.

    whole: the Subject with all batches, if `subject` has only some. The graph is valid for the first batch's shapes,
    and for its values if Python branched on values. `calibrate_paths` measures batches that take other paths.
    """
    batches = usable(capture, subject)
    spans = spans_of(subject.model, schemes, batches, seed)
    quantized_model = QuantizedModel(subject.model, spans)

    def measure_batch(batch: Batch, *backs: Back) -> tuple[Measurement, FirstOrder]:
        """Measure one batch. If a backward pass raises, repeat with the next mode in `backs`."""
        try:
            measured = measure(capture, subject.model, batch, formats, back=backs[0])
            measured.quantized = QuantizedLayers(capture, measured.values, schemes, spans)
            return measured, first_order(measured, seed, output_metric)
        except Exception as error:
            let_through(error)
            if not backs[1:]:
                raise
        return measure_batch(batch, *backs[1:])

    def one(batch: Batch) -> Calibration:
        number = number_of(whole or subject, batch)
        measured, first = measure_batch(batch, "trusted", "tried", "none")
        contributions, linearity = measure_uncertain(measured, first, output_metric)
        contributions = {
            name: {fmt: replace(one, batch=number) for fmt, one in formats.items()}
            for name, formats in contributions.items()
        }
        errors = refine_causes(measured.errors, contributions)
        leads = batch is subject.batches[0]
        regions = tuple(regions_of(measured, contributions, output_metric)) if leads else ()
        decisions = measure_decisions(measured, output_metric) if leads else ()
        model_run = ModelRun(quantized_model, batch, seed)
        choice_runs = dict[tuple[str, str], ChoiceRun]()
        layers = measure_layers(measured, first, output_metric, model_run, choice_runs)
        quantized = {(layer.node, layer.scheme): layer for layer in layers}
        return Calibration(
            errors,
            contributions,
            measured.ranges,
            1,
            linearity,
            regions,
            decisions,
            None,
            quantized,
            measured.under_flags,
            choice_runs,
        )

    return reduce(_merge_calibrations, map(one, batches))


def calibrate_paths(
    recordings: RecordedPaths,
    subject: Subject,
    formats: tuple[str, ...],
    seed: int,
    output_metric: OutputMetric = PLAIN,
    schemes: tuple[str, ...] = (),
) -> tuple[Capture, Calibration]:
    """Return the joined graph of all paths, and the combined results of `calibrate` on each path's batches.

    A later path that cannot be measured is omitted, with a warning. Raises: MeasureError if the first path fails;
    PlanError(slug="no-layer") if a scheme can quantize no layer.
    """
    require_layers([path.capture for path in recordings.each], schemes)
    paths, result, unjudged = list[ModelPath](), list[Calibration](), [*recordings.unjudged]
    for path in recordings.each:
        later, distance = path is not recordings.first, output_metric.distance
        if later and isinstance(distance, Criteria):  # another path may return other outputs
            distance = replace(distance, names=tuple(path.outputs))
        try:
            by = replace(output_metric, distance=distance)
            part = calibrate(path.capture, replace(subject, batches=path.batches), formats, seed, by, subject, schemes)
        except MeasureError as error:
            if not later:
                raise
            unjudged.append(unjudged_line(number_of(subject, path.batches[0]), error))
            continue
        paths.append(path)
        result.append(part)
    return join_paths(paths, unjudged), reduce(_merge_calibrations, result)


def _merge_calibrations(a: Calibration, b: Calibration) -> Calibration:
    """Combine the results of two groups of batches; a node in only one group keeps its results."""

    def average(effect: Contribution, other: Contribution) -> Contribution:
        """The isolated effect is the maximum over batches, since it decides a verdict; own and cast are root mean
        squares. An effect that is unknown for one of the two batches stays unknown."""
        worst = larger_effect(effect, other)
        own = mean_square(effect.own, other.own)
        cast = mean_square(effect.cast, other.cast)
        return replace(worst, own=own, cast=cast)

    def mean_square(value: float, other: float) -> float:
        total = value**2 * a.batches + other**2 * b.batches
        return math.sqrt(total / (a.batches + b.batches))

    return Calibration(
        errors=_merge(a.errors, b.errors, lambda x, y: _merge(x, y, worse)),
        contributions=_merge(a.contributions, b.contributions, lambda x, y: _merge(x, y, average)),
        ranges=_merge(a.ranges, b.ranges, lambda *both: merge_magnitudes(both)),
        batches=a.batches + b.batches,
        linearity=_merge(a.linearity, b.linearity, lambda *both: max(both, key=_doubt)),
        regions=(*a.regions, *b.regions),
        decisions=_worst_by_format((*a.decisions, *b.decisions)),
        first=a.first or a,
        under_flags={**b.under_flags, **a.under_flags},
        quantized=_merge(a.quantized, b.quantized, lambda *both: max(both, key=_harm)),
        choice_runs={
            key: _join_runs(run, b.choice_runs[key]) for key, run in a.choice_runs.items() if key in b.choice_runs
        },
    )


def _join_runs(a: ChoiceRun, b: ChoiceRun) -> ChoiceRun:
    """The run on the batches of two runs; NaN, which fails every limit, counts as the larger error."""
    error = max(a.error, b.error)
    if math.isnan(a.error) or math.isnan(b.error):
        error = math.nan
    return ChoiceRun(error, torch.cat([a.change, b.change]))


def _doubt(linearity: Linearity) -> tuple[bool, int, int]:
    """Sort key of a batch's Linearity: the less accurate the batch's predictions, the larger the key."""
    return not linearity.holds, linearity.left, linearity.compared


def _harm(layer: QuantizedLayer) -> tuple[bool, bool, float]:
    """Sort key of a quantized layer: an effect that was not run, or is NaN, counts as the largest."""
    is_nan = not layer.effect <= math.inf
    return layer.decided_by == "not-run", is_nan, layer.effect


def _worst_by_format(decisions: Iterable[Decisions]) -> tuple[Decisions, ...]:
    """The decisions with the largest error in each format, by error."""
    by_format = dict[str, Decisions]()
    for one in sorted(decisions, key=lambda decision: decision.error):
        by_format[one.format] = one
    return tuple(by_format.values())


def _merge(a: Mapping[K, T], b: Mapping[K, T], merge: Callable[[T, T], T]) -> dict[K, T]:
    """A dict with the entries of two dicts; two entries of one key are merged."""
    return {**a, **b, **{key: merge(value, b[key]) for key, value in a.items() if key in b}}


def worse(a: NodeError, b: NodeError) -> NodeError:
    """The more severe of two NodeErrors, with the larger of both values of every count, share and further error."""

    def severity(error: NodeError) -> tuple[bool, int, float, float]:
        broken = error.overflow + error.nan
        return error.unsupported is not None, broken, error.disagreement or 0.0, error.local_error or 0.0

    first, second = (a, b) if severity(a) >= severity(b) else (b, a)
    return replace(
        first,
        propagated_error=_larger(a.propagated_error, b.propagated_error),
        disagreement=_larger(a.disagreement, b.disagreement),
        overflow=max(a.overflow, b.overflow),
        nan=max(a.nan, b.nan),
        underflow=max(a.underflow, b.underflow),
        subnormal=max(a.subnormal, b.subnormal),
        max_ulp=_larger(a.max_ulp, b.max_ulp),
        cause=first.cause or second.cause,
        originates_here=a.originates_here or b.originates_here,
    )


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def larger_effect(one: Contribution, other: Contribution) -> Contribution:
    """The contribution with the larger isolated effect; an unknown effect counts as the largest."""
    return max((one, other), key=lambda effect: (effect.decided_by == "not-run", effect.isolated))
