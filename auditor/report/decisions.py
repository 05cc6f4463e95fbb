"""Decisions inside the model: what flips in low precision, what share of the error that is, and what keeps them."""

from __future__ import annotations

from ..records.audit import Audit
from ..records.decisions import Decision, Decisions
from .blocks import Block, Grid, Prose
from .words import label, op, percent, ratio, scope, shown

HEADS = ("Operation", "Format", "Decisions", "Flips in 1,000", "Own", "Predicted", "Error of these alone")
ABOUT = (
    "The whole model was run low on the first batch of each path through it, once as it is and once with all decisions held to FP32's, which leaves "
    "the continuous error. Squares of independent errors add up, so decisions make 1 - (held / free)² of the error's square."
)
CAPTION = (
    "Operations that decide: all their flips; their own, which are left where other decisions are held, and what first order "
    "predicts of these; and the outputs' error where their decisions alone are not held"
)


def decision_lines(audit: Audit) -> list[Block]:
    """What a terminal shows: the format in which decisions cost most."""
    worst = max(audit.decisions, key=lambda one: one.share * one.error, default=None)
    return [Prose("Decisions", (" ".join(_sentences(worst)[:2]),))] if worst is not None else []


def decisions_section(audit: Audit) -> list[Block]:
    """What the report says; nothing for a model that decides nothing, or nothing that rounding moves."""
    if not audit.decisions:
        return []
    said = tuple(" ".join(_sentences(one)) for one in audit.decisions)
    rows = tuple(_row(one, each) for one in audit.decisions for each in one.operations)
    return [Prose("", said, "lead"), Prose("", (ABOUT,), "about"), Grid(HEADS, rows, texts=2, caption=CAPTION)]


def _sentences(one: Decisions) -> list[str]:
    """The two parts of the error, whose flips cost most, and what its scores in FP32 change."""
    low = f"{label(one.format)}, all low: error {ratio(one.error)}"
    first = one.operations[0]
    if first.seen is None:
        where = f"{_where(first)}{' and others' if one.operations[1:] else ''}"
        said = f"{low}, {ratio(one.frozen)} with the choices that set the shapes of {where} held to FP32's"
        return [f"{said}: flips make {percent(one.share)} of its square."]
    if one.lifted is None:
        flips = any(each.error is not None for each in one.operations)
        return [f"{low}, all of it continuous: {'what flips moves no output' if flips else 'no decision flips'}."]
    earlier = "" if one.lifted_seen <= first.seen / 2 else "; the rest comes from earlier operations"
    return [
        f"{low}, {ratio(one.frozen)} with decisions held to FP32's: flips make {percent(one.share)} of its square.",
        f"Most costly: {_where(first)}, {_in_1000(first.seen)} flips in 1,000.",
        f"With its scores in FP32, from `{scope(one.lifted)}` on, {_in_1000(one.lifted_seen)} are left and the error is "
        f"{ratio(one.lifted_error)}{earlier}.",
    ]


def _row(of: Decisions, one: Decision) -> tuple[str, ...]:
    flips = (shown(share, _in_1000) for share in (one.seen, one.own, one.predicted))
    return (_where(one), label(of.format), f"{one.count:,}", *flips, shown(one.error, ratio))


def _where(one: Decision) -> str:
    return f"`{op(one.op)}` in `{scope(one.owner)}`" + (f" ({one.source})" if one.source else "")


def _in_1000(share: float) -> str:
    return f"{1000 * share:.2g}"
