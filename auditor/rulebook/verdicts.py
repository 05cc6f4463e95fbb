"""The verdict of every node in every format, from its errors, contribution, dtypes and backward passes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from types import MappingProxyType
from typing import TypeVar

from ..artefact.strategies import SHIPPED, strategy_of
from ..capture.paths import same_operations
from ..criteria.criterion import FLOOR, counts_flips, strict
from ..execution.resolve import kept_low, reached_by
from ..measure.calibrate import Calibration, larger_effect, worse
from ..measure.rerun import SENSITIVE_SHARE, OutputMetric
from ..numerics.formats import FORMATS, label
from ..numerics.histogram import merge_magnitudes
from ..records import (
    Capture,
    Contribution,
    Dtypes,
    Finding,
    Magnitudes,
    Node,
    NodeError,
    NodeReport,
    Noise,
    NonFinite,
    Verdict,
    Verification,
)
from ..records.plan import INPUT
from ..records.quantization import QuantizedLayer
from ..records.training import BackwardNode
from .values import literal_results

T = TypeVar("T")

GRADES = ("safe", "sensitive", "untested", "unsafe")
"""All verdicts, in order of severity: the worst is last."""

QUIET = Noise()
"""The Noise of a model whose repeated FP32 runs are equal."""

UNKNOWN = NodeError()
"""Stands for the local error of an operation of which only the effect on the outputs is known."""


def verdict_of(
    node: Node,
    error: NodeError | None,
    contribution: Contribution | None,
    span: Magnitudes | None,
    exposed: tuple[str, ...],
    fmt: str,
    max_error: float,
    noise: Noise = QUIET,
    into: float = 0.0,
) -> Verdict:
    """Verdict of one node in one format. unsafe: alone in low precision, the node raises or its effect is over budget.
    into: largest magnitude among the node's inputs, for the text of the reason.

    A measured node that no strategy runs in low precision is safe; a node without a measurement, in FP64 or on nested
    tensors is untested. NaN fails every threshold. Differences within the noise of FP32 are ignored.
    """
    if error is None or contribution is None:
        return Verdict("untested", "the measurement did not reach the operation")
    if node.dtype in ("float64", "complex128"):
        return Verdict("untested", f"the operation computes in {node.dtype}, which the audited formats do not replace")
    if error.cause == "nested":
        return Verdict("untested", "the operation works on nested tensors, whose entries are not compared")
    if not exposed and not node.floating:
        return Verdict("safe", "not a floating-point operation")
    if not exposed:
        return Verdict("safe", "without a plan, no strategy runs the operation on low-precision values")
    if error.unsupported:
        return Verdict("unsafe", error.unsupported, "range" if error.cause == "literal" else None)
    return _weigh(contribution, max_error, noise, error, span, fmt, into)


def _weigh(
    contribution: Contribution,
    max_error: float,
    noise: Noise,
    error: NodeError = UNKNOWN,
    span: Magnitudes | None = None,
    fmt: str = "",
    into: float = 0.0,
) -> Verdict:
    """The verdict for an effect on the outputs. error, span, fmt, into describe the operation, for the text of the reason."""
    if contribution.decided_by == "not-run":
        broken = error.overflow or error.nan
        what = "the result turns non-finite" if broken else "only a run can measure the effect on the outputs"
        return Verdict("untested", f"{what}, and the audit's limited number of runs did not include this operation")
    if SENSITIVE_SHARE * max_error < contribution.isolated <= noise.floor:
        return Verdict("safe", f"{effect_of(contribution)}, {within(noise)}")
    if not contribution.isolated <= max_error:
        return Verdict("unsafe", _unsafe_reason(error, contribution, span, fmt, max_error, into), _limit(error))
    if not contribution.isolated <= SENSITIVE_SHARE * max_error:
        return Verdict("sensitive", _share_of_budget(contribution, max_error), _limit(error))
    return Verdict("safe", _safe_reason(error, contribution))


def within(noise: Noise) -> str:
    """A clause on an effect that does not exceed the differences between FP32 runs."""
    return f"at most {FLOOR:g} times the difference between FP32 runs ({noise.error:.2g})"


def effect_of(contribution: Contribution, beyond: float = -1.0) -> str:
    """A text on an operation's effect on the outputs, which says whether the effect was measured or predicted.

    beyond: a limit that the effect exceeds; enough digits are written to show that.
    """
    if contribution.failure:
        return f"a run with it in low precision raises {contribution.failure}"
    if not math.isfinite(contribution.isolated):
        return "the outputs turn Inf or NaN"
    if contribution.criterion:
        return _share_of_budget(contribution, 1.0)
    written = (f"{contribution.isolated:.{digits}g}" for digits in (2, 3, 4, 6))
    moved = next((text for text in written if float(text) > beyond), f"{contribution.isolated:.9g}")
    changes = "is predicted to change" if contribution.decided_by == "first-order" else "changes"
    return f"it {changes} the outputs by {moved} {_company(contribution)}"


def _share_of_budget(contribution: Contribution, max_error: float) -> str:
    """A text on an operation's effect, as a share of the error budget or of the tightest criterion."""
    is_predicted = contribution.decided_by == "first-order"
    criterion = contribution.criterion
    effect = contribution.isolated
    company = _company(contribution)
    if criterion and strict(criterion):
        verb = "violate" if effect > 1 else "meet"
        does = f"is predicted to {verb}" if is_predicted else f"{verb}s"
        return f"it {does} '{criterion}' {company}"
    uses = "uses"
    if is_predicted:
        uses = "is predicted to use"
    elif counts_flips(criterion):
        uses = "is expected to use"
    if not criterion:
        return f"it {uses} {effect / max_error:.0%} of the error budget {company}"
    return f"it {uses} {_part(effect)} what '{criterion}' allows {company}"


def _part(share: float) -> str:
    """Format a share with two digits, as a percentage; a share above 1 is never written as 100 %."""
    if share > 100:
        return f"{share:,.0f} times"
    text = f"{100 * share:.2g}" if share < 0.995 else f"{100 * share:.0f}"
    if share > 1 and float(text) <= 100:
        return "just over 100% of"
    return f"{float(text):g}% of"


def _company(contribution: Contribution) -> str:
    """A clause that says whether the operation ran in low precision alone or together with others."""
    if contribution.decided_by != "group":
        return "if it alone runs in low precision"
    return f"if it and {contribution.together - 1:,} other{'s' * (contribution.together > 2)} run in low precision"


def _unsafe_reason(
    error: NodeError, contribution: Contribution, span: Magnitudes | None, fmt: str, max_error: float, into: float
) -> str:
    effect = effect_of(contribution, max_error)
    if math.isfinite(contribution.isolated) and not contribution.criterion:
        effect = f"{effect}, above the budget of {max_error:.2g}"
    if error.cause == "underflow":
        return f"{_vanishes(error, fmt)} (underflow); {effect}"
    if error.cause in ("overflow", "nan") and into > FORMATS[fmt].largest:
        return f"an input of {into:.4g} overflows (the largest number is {FORMATS[fmt].largest:.6g}); {effect}"
    if error.overflow and span is not None:
        beyond = f"{span.max_abs:.4g} overflows (the largest number is {FORMATS[fmt].largest:.6g})"
        return f"{beyond if span.max_abs > FORMATS[fmt].largest else 'an input or inner value overflows'}; {effect}"
    if error.disagreement:
        return f"{error.disagreement:.2%} of the discrete results flip; {effect}"
    return f"{effect} (cause: {error.cause})" if error.cause else effect


def _vanishes(error: NodeError, fmt: str) -> str:
    """A clause on the values that underflow in the format."""
    if error.overflow or error.nan:
        return f"an input that is not zero in FP32 is zero in {label(fmt)}"
    if error.underflow:
        return f"{error.underflow:.0%} of the non-zero results are zero in {label(fmt)}"
    return f"{label(fmt)} keeps fewer bits of numbers below {FORMATS[fmt].smallest_normal:.2g}"


def _safe_reason(error: NodeError, contribution: Contribution) -> str:
    if error.overflow or error.nan:
        return f"the result turns Inf or NaN, but the outputs of a run are finite; {effect_of(contribution)}"
    if error.underflow > 0.5:
        return f"{error.underflow:.0%} of the results underflow; {effect_of(contribution)}"
    return effect_of(contribution)


def _limit(error: NodeError) -> str | None:
    if error.cause in ("overflow", "nan", "underflow"):
        return "range"
    return "precision" if error.cause in ("rounding", "cancellation", "discrete") else None


@dataclass(frozen=True)
class Judgement:
    """Verdicts of all nodes and layers. verdicts: {node: {format: Verdict}}; exposed: {node: {format: strategies that
    would run it in low precision}}; layers: see `judge_layers`."""

    verdicts: Mapping[str, Mapping[str, Verdict]]
    exposed: Mapping[str, Mapping[str, tuple[str, ...]]]
    layers: tuple[QuantizedLayer, ...] = ()

    def with_unsafe(self, found: Mapping[tuple[str, str], Verdict]) -> Judgement:
        """This Judgement with the verdicts `found` for nodes that are not unsafe yet; self if all are unsafe."""
        changed = {name: dict(by_format) for name, by_format in self.verdicts.items()}
        for (name, fmt), verdict in found.items():
            if changed[name][fmt].verdict != "unsafe":
                changed[name][fmt] = verdict
        return self if changed == self.verdicts else replace(self, verdicts=changed)


def judge(
    capture: Capture,
    measured: Calibration,
    formats: Sequence[str],
    max_error: float,
    noise: Noise = QUIET,
    *,
    all_low: Mapping[str, Verification] = MappingProxyType({}),
    backward: Mapping[tuple[str, str], Verdict] = MappingProxyType({}),
) -> Judgement:
    """The verdict of every node in every format.

    all_low: {strategy_format: the run with everything in low precision}, whose Inf and NaN are evidence. backward: see
    `unsafe_backward`.
    """
    judged = _judge_alone(capture, measured, formats, max_error, noise)
    return with_backward(judged.with_unsafe(unsafe_together(all_low)), backward)


def unsafe_together(all_low: Mapping[str, Verification]) -> dict[tuple[str, str], Verdict]:
    """{(node, format): the verdict} of operations that make a run with everything in low precision Inf or NaN.

    The operation at which that begins is unsafe, not a later one that receives its result. If an input of the model
    overflows, the operation that reads it is.
    """
    result = dict[tuple[str, str], Verdict]()
    for name, run in all_low.items():
        strategy, _, fmt = name.partition("_")
        first = run.nonfinite
        if first is None:
            continue
        node = first.node if first.begins_op == INPUT else first.begins
        limit = "range" if first.cause in ("overflow", "underflow") else "precision"
        verdict = Verdict("unsafe", _together_reason(first, strategy, fmt), limit, first.batch)
        result.setdefault((node, fmt), verdict)
    return result


def _together_reason(first: NonFinite, strategy: str, fmt: str) -> str:
    how = f"with everything in {label(fmt)} {strategy_of(strategy).title}"
    batch = f" (batch {first.batch})" if first.batch > 1 else ""
    if first.begins == first.node:
        return f"{how}, its result contains {first.value}, although it stays finite alone; the cause is {first.cause}{batch}"
    if first.begins_op == INPUT:
        return (
            f"{how}, its result contains {first.value}; the cause is {first.cause} of the input {first.begins}{batch}"
        )
    reader = f"{first.op.removeprefix('aten.').partition('.')[0]} ({first.source or first.owner or 'the model itself'})"
    return f"{how}, {first.cause} in its result makes the result of {reader} {first.value}{batch}"


def _judge_alone(
    capture: Capture, measured: Calibration, formats: Sequence[str], max_error: float, noise: Noise
) -> Judgement:
    """The verdict of every node in every format, from the effects of running it alone in low precision."""
    verdicts: dict[str, dict[str, Verdict]] = {name: {} for name in capture.nodes}
    exposed: dict[str, dict[str, tuple[str, ...]]] = {name: {} for name in capture.nodes}

    def of(known: Calibration, name: str, node: Node, used: tuple[str, ...], fmt: str) -> Verdict:
        error = known.errors.get(name, {}).get(fmt)
        contribution = known.contributions.get(name, {}).get(fmt)
        inputs = [known.ranges[source].max_abs for source in node.inputs if source in known.ranges]
        largest_input = max(inputs, default=0.0)
        result = known.ranges.get(name)
        return verdict_of(node, error, contribution, result, used, fmt, max_error, noise, largest_input)

    for fmt in formats:
        reached, own = reached_by(capture, fmt), kept_low(capture, SHIPPED, fmt)
        for name, node in capture.nodes.items():
            strategies = exposed[name][fmt] = reached[name]
            if own.get(name, fmt) != fmt:
                verdicts[name][fmt] = Verdict(
                    "safe", f"the model's code requires {label(own[name])} here under every plan"
                )
                continue
            verdict = of(measured, name, node, strategies, fmt)
            if measured.first is not None:
                known = capture.twins.get(name, name)
                first = of(measured.first, known, node, strategies, fmt)
                alike = known in measured.first.errors and first.verdict == verdict.verdict
                verdict = verdict if alike else _with_batch(verdict, measured.contributions.get(name, {}).get(fmt))
            verdicts[name][fmt] = verdict
    return Judgement(verdicts, exposed)


def judge_layers(
    capture: Capture, measured: Calibration, output_metric: OutputMetric, noise: Noise = QUIET
) -> tuple[QuantizedLayer, ...]:
    """The layers under all schemes, with verdicts by the thresholds of `verdict_of`; per scheme, the worst first.

    Layers that several recorded paths share appear once. Effects in `measured` are relative L2 errors; in the result,
    they are in the output_metric's unit."""
    result = dict[tuple[str, str], QuantizedLayer]()
    for (name, scheme), layer in measured.quantized.items():
        effect, by_weight, by_input, remedied = (
            x * output_metric.unit for x in (layer.effect, layer.weight_effect, layer.activation_effect, layer.remedied)
        )
        contribution = Contribution(effect, by_weight, by_input, layer.decided_by, criterion=layer.criterion)
        known = replace(
            layer,
            node=capture.twins.get(name, name),
            effect=effect,
            weight_effect=by_weight,
            activation_effect=by_input,
            remedied=remedied,
            verdict=_weigh(contribution, output_metric.budget, noise),
        )
        if (key := (scheme, known.node)) not in result or not effect <= result[key].effect:
            result[key] = known
    schemes = list(dict.fromkeys(scheme for scheme, _ in result))
    worst_first = sorted(result.values(), key=lambda one: -one.effect if one.effect <= math.inf else -math.inf)
    return tuple(sorted(worst_first, key=lambda one: schemes.index(one.scheme)))


def reports_of(
    capture: Capture,
    measured: Calibration,
    judged: Judgement,
    findings: Sequence[Finding],
    flops: Mapping[str, int],
    planned: Mapping[str, Dtypes],
) -> tuple[NodeReport, ...]:
    """A NodeReport for every operation; over several model paths, with the worst values in each format.

    flops, planned: by operation; see NodeReport.
    """
    literal = literal_results(capture, measured.ranges)
    rules: dict[str, list[str]] = defaultdict(list)
    for finding in findings:
        rules[finding.node].append(finding.rule)
    twins_of: dict[str, list[str]] = defaultdict(list)  # {operation: it, and the equal operations of later paths}
    for name in capture.nodes:
        twins_of[capture.twins.get(name, name)].append(name)

    def worse_verdict(one: Verdict, other: Verdict) -> Verdict:
        return max(one, other, key=lambda verdict: GRADES.index(verdict.verdict))

    def all_strategies(one: tuple[str, ...], other: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*one, *other)))

    result = []
    for first, same in twins_of.items():
        node = capture.nodes[first]
        errors = _merge_results(measured.errors, same, worse)
        contributions = _merge_results(measured.contributions, same, larger_effect)
        is_tested = node.floating or any(error.disagreement is not None for error in errors.values())
        if not is_tested:
            errors, contributions = {}, {}
        ranges = [measured.ranges[name] for name in same if name in measured.ranges]
        report = NodeReport(
            node=replace(node, inputs=tuple(capture.twins.get(source, source) for source in node.inputs)),
            findings=tuple(dict.fromkeys(rule for name in same for rule in rules[name])),
            errors=errors,
            contributions=contributions,
            verdicts=_merge_results(judged.verdicts, same, worse_verdict),
            exposed=_merge_results(judged.exposed, same, all_strategies),
            range=reduce(lambda *two: merge_magnitudes(two), ranges) if ranges else None,
            flops=flops[first],
            written=first in literal,
            planned=planned.get(first),
        )
        result.append(report)
    return tuple(result)


def _merge_results(
    found: Mapping[str, Mapping[str, T]], same: Sequence[str], merge: Callable[[T, T], T]
) -> dict[str, T]:
    """Merge the results of equal operations of several paths, by format."""
    first, *others = [found[name] for name in same if name in found] or [{}]
    return {fmt: reduce(merge, [one[fmt] for one in others], of_first) for fmt, of_first in first.items()}


def _with_batch(verdict: Verdict, contribution: Contribution | None) -> Verdict:
    """The verdict, with the batch's number if the batch is not the first and the operation is not safe."""
    if contribution is None or contribution.batch == 1 or verdict.verdict == "safe":
        return verdict
    return replace(verdict, reason=f"{verdict.reason} (batch {contribution.batch})", batch=contribution.batch)


def backward_reasons(nodes: Sequence[BackwardNode]) -> tuple[BackwardNode, ...]:
    """The operations, each with the reasons why its backward pass must not run in a format."""

    def reason(error: NodeError, reaches: str, fmt: str) -> str:
        broken = error.overflow + error.nan
        many = "1 finite gradient value" if broken == 1 else f"{broken:,} finite gradient values"
        into = f"the backward pass in {label(fmt)} turns {many} into Inf or NaN"
        return f"{into}; the gradient of {reaches} then contains Inf or NaN too"

    return tuple(
        replace(node, reasons={fmt: reason(node.errors[fmt], name, fmt) for fmt, name in node.reaches.items()})
        for node in nodes
    )


def with_backward(judged: Judgement, backward: Mapping[tuple[str, str], Verdict]) -> Judgement:
    """Mark operations unsafe whose backward pass fails, if a strategy runs them in low precision.

    backward: {(node, format): the verdict `unsafe`}, see `unsafe_backward`.
    """
    reached = {(name, fmt): verdict for (name, fmt), verdict in backward.items() if judged.exposed[name].get(fmt)}
    return judged.with_unsafe(reached)


def unsafe_backward(captured: Capture, nodes: Sequence[BackwardNode], step: Capture) -> dict[tuple[str, str], Verdict]:
    """{(node of the audited graph, format): the verdict} of operations whose backward pass fails in the training step.

    step: the recorded training step, to whose operations `nodes` refers.
    """
    same = same_operations(step, captured)
    return {
        (same[node.name], fmt): Verdict("unsafe", reason, "range")
        for node in nodes
        if node.name in same
        for fmt, reason in node.reasons.items()
    }
