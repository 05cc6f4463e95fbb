"""Shows where errors originate: operations that first return Inf or NaN or add most error, and flipped decisions."""

from __future__ import annotations

import math

from ..artefact.strategies import plan_title, strategy_of
from ..criteria.criterion import counts_flips
from ..records import NodeReport, NonFinite
from ..records.audit import Audit
from ..records.decisions import Decisions
from ..records.measure import MEASURED, Contribution, FlaggedRegion, ProductError
from ..records.plan import INPUT
from .blocks import Block, Grid, Prose
from .words import count, fold, label, op, or_blank, percent, ratio, scope, where

SHOWN = 8
EXPOSED = {(): "Without a plan, the operation runs in FP32.", ("cast",): "Under autocast, the operation runs in FP32."}
"""{strategies that run an operation in low precision: a remark}."""
VALUES = {"nan": "NaN", "discrete": "A changed discrete result"}
DECISIONS = ("Operation", "Format", "Decisions", "Flips in 1,000", "Own", "Predicted", "Error of only these")
ABOUT_DECISIONS = (
    "The whole model ran in low precision twice on the first batch of each path: once normally, and once with the decisions of the FP32 run, "
    "which leaves only the error from rounding. The squares of independent errors add up. Flipped decisions therefore cause the share "
    "1 - (error with the FP32 run's decisions / error)² of the squared error."
)
DECISIONS_CAPTION = "Operations with discrete results, called decisions. Flips in 1,000: decisions that differ from FP32. Own: flips that remain if all other decisions are taken from the FP32 run. Predicted: first-order prediction of Own. Error of only these: error of the outputs if all other decisions are taken from the FP32 run"


def origins(audit: Audit) -> list[Block]:
    """For each format: where Inf or NaN first appears, and which operations and regions add most error."""
    return [block for fmt in audit.formats if audit.nodes for block in _origins(audit, fmt)]


def _origins(audit: Audit, fmt: str) -> list[Block]:
    """Blocks on one format: the operations with the first Inf or NaN, then the tables of errors by operation."""
    runs = nonfinite_runs(audit, fmt)
    first = {at.node: at for at in runs.values() if at is not None}
    beginnings = list[NodeReport]()
    for report in audit.nodes:
        error = report.errors.get(fmt)
        if error is not None and (error.originates_here or report.node.name in first):
            beginnings.append(report)
    kinds = fold(beginnings, lambda r: r.node.owner, lambda r: (r.node.op, r.errors[fmt].cause, r.exposed.get(fmt)))
    sentences = [_birth(audit, same, fmt, first.get(same[0].node.name)) for same in kinds[:SHOWN]]
    if not kinds and runs:
        sentences = [
            f"In {label(fmt)} no single operation produces Inf or NaN, but the whole model in low precision does."
        ]
    elif not kinds:
        sentences = [f"In {label(fmt)} no value that is finite in FP32 becomes Inf or NaN."]
    if len(kinds) > SHOWN:
        sentences.append(f"{count(len(kinds) - SHOWN, 'more origin')} in the layer table.")
    return [
        Prose(label(fmt), tuple(sentences), listed=True),
        Prose("", (_linearity(audit, fmt),)),
        _sources(audit, fmt),
        _products(audit, fmt),
        _regions(audit, fmt),
    ]


def _products(audit: Audit, fmt: str) -> Grid:
    """Table of products with the largest local error, and the parts of this error by cause."""
    products = list[tuple[NodeReport, ProductError]]()
    for report in audit.nodes:
        error = report.errors.get(fmt)
        if error is not None and error.product is not None:
            products.append((report, error.product))
    products.sort(key=lambda pair: -pair[1].whole)
    rows = []
    for report, product in products[:SHOWN]:
        parts = (product.whole, product.inputs, product.accumulation, product.output)
        rows.append((where(report.node), *map(ratio, parts)))
    caption = f"Matrix products and convolutions with the largest local error in {label(fmt)}. Inputs: the part of this error from rounding the inputs. Accumulation: the part from adding the products. Output: the part from rounding the result"
    return Grid(("Product", "Error", "Inputs", "Accumulation", "Output"), tuple(rows), caption=caption)


def _birth(audit: Audit, same: list[NodeReport], fmt: str, first: NonFinite | None) -> str:
    """A text on an operation where Inf, NaN or an exception first appears: place, number of blocks, and cause."""
    report = same[0]
    error = report.errors[fmt]
    value = first.value if first else "Inf or NaN"
    breaks_alone = bool(error.unsupported or error.disagreement or error.overflow or error.nan)
    if breaks_alone:
        value = error.cause or "Inf or NaN"
    name = VALUES.get(value, value.capitalize() if value.islower() else value)
    place = where(report.node)
    if len(same) > 1:
        place += f" and at {count(len(same) - 1, 'similar operation')}"
    sentences = [f"{name} first appears at {place}."]
    if error.unsupported:
        sentences = [f"{place} raises an error on {label(fmt)} inputs: {error.unsupported}."]
    if not breaks_alone and first:
        sentences.append(cause(audit, first, fmt))
    elif not breaks_alone:
        sentences.append("With only this operation in low precision, all values stay finite.")
    sentences.append(EXPOSED.get(report.exposed.get(fmt, ("",)), ""))
    return " ".join(filter(None, sentences))


def _sources(audit: Audit, fmt: str) -> Grid:
    """Table of operations that add the most rounding error: their own effects, and shares of these effects' squares."""
    effects = list[tuple[NodeReport, Contribution]]()
    for report in audit.nodes:
        is_low = report.node.floating and report.exposed.get(fmt, True)
        effect = report.contributions.get(fmt)
        if is_low and effect is not None and 0 < effect.own < math.inf:
            effects.append((report, effect))
    total = sum(effect.own**2 for _, effect in effects)
    rows = []
    for report, effect in sorted(effects, key=lambda pair: -pair[1].own)[:SHOWN]:
        predicted = "" if effect.decided_by == "re-run" else ", predicted"
        rows.append((where(report.node), f"{ratio(effect.own)}{predicted}", percent(effect.own**2 / total)))
    unit = "used part of a limit" if audit.criteria else "change of the output"
    caption = (
        f"Operations that add the most rounding error in {label(fmt)}. Own rounding: {unit} if only this operation "
        "rounds, on FP32 inputs. Share: the square of Own rounding, divided by the sum of these squares over all operations"
    )
    return Grid(("Operation", "Own rounding", "Share"), tuple(rows), caption=caption)


def _regions(audit: Audit, fmt: str) -> Grid:
    """Table of regions of several operations: first regions that raise or become non-finite, then by falling error."""

    def size(region: FlaggedRegion) -> float:
        if region.error is None or math.isnan(region.error):
            return math.inf
        return region.error

    regions = [region for region in audit.regions if region.format == fmt and len(region.nodes) > 1]
    regions.sort(key=size, reverse=True)
    rows = []
    for region in regions[:SHOWN]:
        moves = f"does not run: {region.failure}" if region.failure else ratio(region.error)
        rows.append((f"`{scope(region.scope)}`", str(len(region.nodes)), moves, ratio(region.explained)))
    unit = "share of a limit used" if audit.criteria else "change of the output"
    caption = (
        f"Groups of neighboring operations. Moves output: {unit} with only the group in {label(fmt)}. Single errors: the "
        "value to expect if the effects of the single operations are independent (root of the sum of their squares); a "
        "larger Moves output means that they add up"
    )
    return Grid(("Module", "Operations", "Moves output", "Single errors"), tuple(rows), caption=caption)


def _linearity(audit: Audit, fmt: str) -> str:
    """Sentences on the accuracy of first-order predictions, and on the runs that checked them."""
    words = []
    for one in (one for one in audit.linearity if one.format == fmt):
        left = "was" if one.left == 1 else "were"
        words.append(
            f"The effect of {count(one.compared, 'operation')} was both estimated to first order and measured. Where neither value is "
            f"zero or infinite, the estimate is {one.least:.2g} to {one.most:.2g} times the measurement, with a median of {one.median:.2g}."
        )
        if not one.holds:
            words.append("Over 10% of all pairs differ by more than a factor of 1.6, so more effects were measured.")
        if beyond := one.confirmed + one.refuted:
            words.append(
                f"Of {count(beyond, 'measured effect')} estimated above the error budget, {one.confirmed:,} "
                f"{'is' if one.confirmed == 1 else 'are'} above it."
            )
        if one.left:
            words.append(f"{count(one.left, 'further effect')} estimated above the budget {left} not measured.")
    return " ".join(words)


def cause(audit: Audit, first: NonFinite, fmt: str) -> str:
    """A sentence that names the cause of Inf or NaN in a format, and the rules that report it."""
    rules = _rules_about(audit, first, fmt)
    fired = f"; see {', '.join(rules)}" if rules else ""
    if first.begins == first.node:
        return f"The cause is {first.cause} in the same operation{fired}."
    if first.begins_op == INPUT:
        return f"The cause is {first.cause} of the input `{first.begins}`{fired}."
    place = at(first.begins_op, first.begins_owner, first.begins_source)
    return f"The cause is {first.cause} at {place}{fired}."


def _rules_about(audit: Audit, first: NonFinite, fmt: str) -> list[str]:
    """Codes of the rules with findings at the cause, or at the operation that turns Inf or NaN. Rules that only report
    the measurement are named if no other rule has a finding there; rules about speed or devices explain no value."""
    of_values = [f for f in audit.findings if fmt in f.formats and f.measurable]
    at_cause = [f.rule for f in of_values if f.node == first.begins]
    at_node = [f.rule for f in of_values if f.node == first.node]
    fired = [*at_cause, *at_node]
    if first.begins_op == INPUT and at_cause:
        fired = at_cause
    explaining = [rule for rule in fired if rule not in MEASURED]
    return list(dict.fromkeys(explaining or fired))


def at(name: str, owner: str, source: str | None) -> str:
    """An operation in prose: `sqrt in blocks.0.norm (unet.py:28)`."""
    return f"{op(name).partition('.')[0]} in {scope(owner)}{f' ({source})' if source else ''}"


def nonfinite_runs(audit: Audit, fmt: str) -> dict[str, NonFinite | None]:
    """{sentence: the operation that it names} on runs in one format with Inf or NaN: of the whole model in low precision,
    then of plans. Runs with the same cause share a sentence; None: a replay of the graph is finite."""
    groups: dict[tuple[str, NonFinite | None], list[str]] = {}
    for name, plan in audit.plans.items():
        for run, whose in ((audit.baselines.get(name), ""), (plan.verification, f"The plan {plan_title(plan)}")):
            if plan.format == fmt and run is not None and not run.finite and not run.failure:
                groups.setdefault((whose, run.nonfinite), []).append(strategy_of(plan.strategy).title)
    result = {}
    for (whose, first), titles in sorted(groups.items(), key=lambda group: group[0][0] != ""):
        title = whose or f"{label(fmt)} {' and '.join(titles)}, without a plan"
        words = "the outputs turn Inf or NaN. A replay of the recorded graph stays finite, so the operation responsible is unknown."
        if first is not None:
            batch = "" if first.batch == 1 else f", in batch {first.batch}"
            place = at(first.op, first.owner, first.source)
            words = f"values turn {first.value} at {place}{batch}. {cause(audit, first, fmt)}"
        result[f"{title}: {words}"] = first
    return result


def decision_words(audit: Audit) -> str:
    """Sentences on the format in which flipped decisions add most error; "" without decisions."""
    worst = max(audit.decisions, key=lambda one: one.share * one.error, default=None)
    return " ".join(_sentences(worst, audit)[:2]) if worst is not None else ""


def decisions_section(audit: Audit) -> list[Block]:
    """The report's section on decisions; empty for a model without decisions that rounding can flip."""
    if not audit.decisions:
        return []
    rows = []
    for group in audit.decisions:
        for one in group.operations:
            flips = (or_blank(share, _in_1000) for share in (one.seen, one.own, one.predicted))
            rows.append((where(one), label(group.format), f"{one.count:,}", *flips, or_blank(one.error, ratio)))
    return [
        Prose("", tuple(" ".join(_sentences(one, audit)) for one in audit.decisions), "lead"),
        Prose("", (ABOUT_DECISIONS,), "about"),
        Grid(DECISIONS, tuple(rows), texts=2, caption=DECISIONS_CAPTION),
    ]


def _sentences(one: Decisions, audit: Audit) -> list[str]:
    """Sentences on the parts of the error, and on the operation whose flips add most error, with the error if its
    scores are FP32."""
    expected, times = "expected " * any(map(counts_flips, audit.criteria)), " times its limit" * bool(audit.criteria)
    low = f"With all operations in {label(one.format)}, the {expected}error on the first batch is {ratio(one.error)}{times}"
    differ = f"Decisions that differ from FP32 cause {percent(one.share)} of the squared error."
    first = one.operations[0]
    if first.seen is None:
        others = " and others" if one.operations[1:] else ""
        words = f"with the FP32 run's decisions for the shapes of {where(first)}{others}, the error is {ratio(one.frozen)}{times}"
        return [f"{low}; {words}. {differ}"]
    if one.lifted is None:
        flips = any(each.error is not None for each in one.operations)
        return [
            f"{low}, all from rounding, since {'flipped decisions change no output' if flips else 'no decision flips'}."
        ]
    earlier = "" if one.lifted_seen <= first.seen / 2 else "; the remaining flips come from earlier operations"
    return [
        f"{low}; with the decisions of the FP32 run, the error is {ratio(one.frozen)}{times}. {differ}",
        f"The decisions with the largest effect are at {where(first)}, where {f'{_in_1000(first.seen)} in 1,000 decisions flip' if first.seen else 'only the order of the choices differs'}.",
        f"If the scores that this operation compares are computed in FP32 (in `{scope(one.lifted)}`), {_in_1000(one.lifted_seen)} in 1,000 decisions flip, and the error is "
        f"{ratio(one.lifted_error)}{times}{earlier}.",
    ]


def _in_1000(share: float) -> str:
    return f"{1000 * share:{'.2g' if share < 0.1 else '.0f'}}"
