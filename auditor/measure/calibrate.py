"""Measuring and attributing over all calibration batches, one after the other; memory does not grow with their number."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TypeVar

from ..capture.paths import usable
from ..capture.several import RecordedPaths, join_paths, number_of, unjudged_line
from ..criteria.measure import for_outputs
from ..errors import MeasureError, let_through
from ..numerics.histogram import merge_magnitudes
from ..records import Batch, Capture, Contribution, FlaggedRegion, Linearity, Magnitudes, ModelPath, NodeError, Subject
from ..records.decisions import Decisions
from .attribute import FirstOrder, first_order
from .causes import refine_causes
from .decisions import decisions_of
from .measure import Measurement, measure
from .reference import Back
from .rerun import PLAIN, Yardstick, regions_of
from .settle import settle

T = TypeVar("T")


@dataclass(frozen=True)
class Calibration:
    """What the measurements say of every node. contributions: also of every placeholder; batches: how many were run.

    linearity: by format, where predictions were held against runs. regions: what was run low together, on the first batch of
    each path. decisions: of the same batches, by format those of the largest error. first: of several batches, what the first one alone came to.
    """

    errors: Mapping[str, Mapping[str, NodeError]]
    contributions: Mapping[str, Mapping[str, Contribution]]
    ranges: Mapping[str, Magnitudes]
    batches: int
    linearity: Mapping[str, Linearity] = field(default_factory=dict)
    regions: tuple[FlaggedRegion, ...] = ()
    decisions: tuple[Decisions, ...] = ()
    first: Calibration | None = None


def calibrate(
    capture: Capture,
    subject: Subject,
    formats: tuple[str, ...],
    seed: int,
    yardstick: Yardstick = PLAIN,
    whole: Subject | None = None,
) -> Calibration:
    """The worst error, the mean-square contribution and the widest range of every node over the subject's batches.

    whole: the subject of which these are some of the batches, where there are others.

    The graph is recorded for the shapes of the first batch, and for its values where Python branched on them: batches that
    take another path are measured on a graph of their own, see `calibrate_paths`.
    """

    def one(batch: Batch) -> Calibration:
        number = number_of(whole or subject, batch)
        measured, first = _measure_with_fallback(capture, subject, batch, formats, seed, yardstick)
        contributions, linearity = settle(measured, first, yardstick)
        contributions = {
            name: {fmt: replace(one, batch=number) for fmt, one in formats.items()}
            for name, formats in contributions.items()
        }
        errors = refine_causes(measured.errors, contributions)
        leads = batch is subject.batches[0]
        regions = tuple(regions_of(measured, contributions, yardstick)) if leads else ()
        decisions = decisions_of(measured, yardstick) if leads else ()
        return Calibration(errors, contributions, measured.ranges, 1, linearity, regions, decisions)

    return reduce(_merge_calibrations, map(one, usable(capture, subject)))


def calibrate_paths(
    recordings: RecordedPaths,
    subject: Subject,
    formats: tuple[str, ...],
    seed: int,
    yardstick: Yardstick = PLAIN,
) -> tuple[Capture, Calibration]:
    """The graph of all paths that the batches take, and `calibrate` of each path with its own batches, taken together.

    A later path that cannot be measured is left out, which the graph's warnings say. Raises: MeasureError of the first.
    """

    paths, result, unjudged = list[ModelPath](), list[Calibration](), [*recordings.unjudged]
    for path in recordings.each:
        later = path is not recordings.first
        by = replace(yardstick, distance=for_outputs(yardstick.distance, path.outputs)) if later else yardstick
        try:
            part = calibrate(path.capture, replace(subject, batches=path.batches), formats, seed, by, subject)
        except MeasureError as error:
            if not later:
                raise
            unjudged.append(unjudged_line(number_of(subject, path.batches[0]), error))
            continue
        paths.append(path)
        result.append(part)
    return join_paths(paths, unjudged), reduce(_merge_calibrations, result)


def _measure_with_fallback(
    capture: Capture,
    subject: Subject,
    batch: Batch,
    formats: tuple[str, ...],
    seed: int,
    yardstick: Yardstick,
) -> tuple[Measurement, FirstOrder]:
    """Measured once, and again where the way back through some operation raises: with care, and then without a way back."""

    def tried(back: Back) -> tuple[Measurement, FirstOrder]:
        measured = measure(capture, subject.model, batch, formats, back=back)
        return measured, first_order(measured, seed, yardstick)

    backs: tuple[Back, ...] = ("trusted", "tried")
    for back in backs:
        try:
            return tried(back)
        except Exception as error:
            let_through(error)
    return tried("none")


def _merge_calibrations(a: Calibration, b: Calibration) -> Calibration:
    """Two batches, or several of each, together; what one of them alone runs as it is there."""

    def averaged(one: Contribution, other: Contribution) -> Contribution:
        return _average(one, other, a.batches, b.batches)

    return Calibration(
        errors=_together(a.errors, b.errors, worse),
        contributions=_together(a.contributions, b.contributions, averaged),
        ranges={
            **a.ranges,
            **b.ranges,
            **{n: merge_magnitudes((a.ranges[n], b.ranges[n])) for n in a.ranges if n in b.ranges},
        },
        batches=a.batches + b.batches,
        linearity=_less_linear(a.linearity, b.linearity),
        regions=(*a.regions, *b.regions),
        decisions=tuple({x.format: x for x in sorted((*a.decisions, *b.decisions), key=lambda x: x.error)}.values()),
        first=a.first or a,
    )


def _together(
    a: Mapping[str, Mapping[str, T]], b: Mapping[str, Mapping[str, T]], merge: Callable[[T, T], T]
) -> dict[str, Mapping[str, T]]:
    both = {n: {f: merge(x, b[n][f]) for f, x in formats.items()} for n, formats in a.items() if n in b}
    return {**a, **b, **both}


def _less_linear(a: Mapping[str, Linearity], b: Mapping[str, Linearity]) -> dict[str, Linearity]:
    """Of each format the batch on which first order fares worse."""

    def doubt(one: Linearity) -> tuple[bool, int, int]:
        return not one.holds, one.left, one.compared

    formats = dict.fromkeys([*a, *b])
    return {fmt: max((found[fmt] for found in (a, b) if fmt in found), key=doubt) for fmt in formats}


def worse(a: NodeError, b: NodeError) -> NodeError:
    """The more telling of two errors, with the larger of each count and share."""
    first, second = (a, b) if _severity(a) >= _severity(b) else (b, a)
    return replace(
        first,
        propagated_error=_larger(a.propagated_error, b.propagated_error),
        overflow=max(a.overflow, b.overflow),
        nan=max(a.nan, b.nan),
        underflow=max(a.underflow, b.underflow),
        subnormal=max(a.subnormal, b.subnormal),
        max_ulp=_larger(a.max_ulp, b.max_ulp),
        cause=first.cause or second.cause,
        born=a.born or b.born,
    )


def _severity(error: NodeError) -> tuple[bool, int, float, float]:
    return (
        error.unsupported is not None,
        error.overflow + error.nan,
        error.disagreement or 0.0,
        error.local_error or 0.0,
    )


def _larger(a: float | None, b: float | None) -> float | None:
    return max((x for x in (a, b) if x is not None), default=None)


def _average(mean: Contribution, new: Contribution, count: int, more: int) -> Contribution:
    """isolated is the worst batch's, since it decides a verdict; own and cast are root mean squares.

    What no run told of one batch is not known of them together. count, more: how many batches the two are of.
    """
    worst = larger_effect(mean, new)
    return replace(worst, own=_rms(mean.own, new.own, count, more), cast=_rms(mean.cast, new.cast, count, more))


def larger_effect(one: Contribution, other: Contribution) -> Contribution:
    """That of the batch on which it moves the outputs more by itself, or which no run told of."""
    return max((one, other), key=lambda effect: (effect.decided_by == "not-run", effect.isolated))


def _rms(mean: float, new: float, count: int, more: int) -> float:
    return math.sqrt((mean**2 * count + new**2 * more) / (count + more))
