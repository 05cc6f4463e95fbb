"""The questions people ask about mixed precision, answered from this audit or said not to apply."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..numerics.formats import FORMATS
from ..records import NodeReport
from ..result import Audit
from .exponents import narrowest
from .origins import origins
from .training import training_answers
from .view import View, place, view
from .words import compact, count, label, magnitude, op, percent, scope


@dataclass(frozen=True)
class Answer:
    """One question, its answer in a sentence or two, and the section that shows more. applies: False where it is moot."""

    question: str
    answer: str
    section: str
    applies: bool = True


def questions(audit: Audit) -> tuple[Answer, ...]:
    """Every question, in the order people meet them."""
    seen = view(audit)
    return (
        _which(seen),
        _birth(audit),
        _overflow(audit),
        _minimum(seen),
        _accuracy(audit),
        _trained_in_bf16(audit),
        _speed(seen),
        _memory(audit),
        _protected(audit),
        _matching(audit, "Do eps and other small constants vanish?", ("eps", "tiny")),
        _matching(audit, "Does a mask constant overflow?", ("mask", "constant-beyond")),
        Answer("How do I keep one module in FP32?", "Each finding carries code that does it.", "findings"),
        *_training(audit),
    )


def _which(seen: View) -> Answer:
    return Answer("FP16 or BF16?", " ".join((seen.headline, *seen.contrast)), "verdict")


def _birth(audit: Audit) -> Answer:
    question = "Which layer makes the NaN or Inf?"
    for fmt in audit.formats:
        found = origins(audit, fmt).births
        if found:
            node = found[0].report.node
            return Answer(question, f"In {label(fmt)}, {op(node.op)} in {place(node.owner, node.source)}.", "origins")
    return Answer(question, "None: no value that is finite in FP32 became Inf or NaN.", "origins", applies=False)


def _overflow(audit: Audit) -> Answer:
    question = "How close is it to overflow?"
    ranged = [r for r in audit.nodes if r.range is not None]
    fmt = narrowest(audit.formats)
    if not ranged or fmt is None:
        return Answer(question, "No ranges were recorded.", "layers", applies=False)
    top = max(ranged, key=_max_abs)
    bits = FORMATS[fmt].headroom_bits(_max_abs(top))
    room = f"{bits:.1f} bits below" if bits > 0 else f"{-bits:.1f} bits above"
    where = place(top.node.owner, top.node.source)
    return Answer(
        question,
        f"The largest value, {magnitude(_max_abs(top))}, is {room} what {label(fmt)} can hold: {where}.",
        "layers",
    )


def _max_abs(report: NodeReport) -> float:
    return report.range.max_abs if report.range else 0.0


def _minimum(seen: View) -> Answer:
    question = "What is the least that must stay FP32?"
    if seen.chosen is None:
        return Answer(question, "All of it: no plan met the budget.", "plans")
    kept = [i for i in seen.chosen.islands if i.precision == "fp32"]
    names = ", ".join(scope(i.pattern if len(i.paths) > 1 else i.paths[0]) for i in kept[:4]) + (
        " and more" if len(kept) > 4 else ""
    )
    return Answer(question, f"{names}." if kept else "Nothing.", "plans")


def _accuracy(audit: Audit) -> Answer:
    question = "Nothing is NaN, yet accuracy drops: where?"
    for fmt in audit.formats:
        top = origins(audit, fmt).sources[:1]
        if top:
            node = top[0].report.node
            share = percent(top[0].share)
            return Answer(
                question,
                f"In {label(fmt)}, {op(node.op)} in {place(node.owner, node.source)} makes {share} of the error.",
                "origins",
            )
    return Answer(question, "No operation adds measurable error.", "origins", applies=False)


def _trained_in_bf16(audit: Audit) -> Answer:
    question = "Trained in BF16: will it survive FP16?"
    both = [r for r in audit.nodes if "fp16" in r.verdicts and "bf16" in r.verdicts]
    if not both:
        return Answer(question, "FP16 and BF16 were not both tested.", "layers", applies=False)
    only = [r for r in both if r.verdicts["fp16"].verdict == "unsafe" and r.verdicts["fp16"].limited_by == "range"]
    if not only:
        return Answer(question, "Yes: no operation leaves FP16's range on these inputs.", "layers")
    return Answer(
        question, f"Not as it is: {count(len(only), 'operation leaves', 'operations leave')} FP16's range.", "layers"
    )


def _speed(seen: View) -> Answer:
    question = "Will it be faster?"
    if seen.chosen is None:
        return Answer(question, "There is no plan to time.", "plans", applies=False)
    plan = seen.chosen.plan
    share = percent(plan.low_precision_flops)
    return Answer(
        question, f"Predicted {plan.predicted_speedup:.2f}x, with {share} of the FLOPs in low precision.", "plans"
    )


def _memory(audit: Audit) -> Answer:
    full, half = compact(4 * audit.parameters), compact(2 * audit.parameters)
    return Answer(
        "Will it need less memory?",
        f"Not measured. The weights take {full}B in FP32; autocast keeps them so, a cast plan stores close to {half}B.",
        "plans",
    )


def _protected(audit: Audit) -> Answer:
    question = "What does autocast keep in FP32?"
    kept = Counter(
        op(r.node.op).partition(".")[0]
        for r in audit.nodes
        if r.exposed and not any("autocast" in strategies for strategies in r.exposed.values())
    )
    if not kept:
        return Answer(question, "No operation of this model.", "layers")
    names = ", ".join(f"{name} ({n:,})" for name, n in kept.most_common(6))
    return Answer(question, f"By itself, on CUDA: {names}.", "layers")


def _matching(audit: Audit, question: str, words: tuple[str, ...]) -> Answer:
    found = [f for f in audit.findings if any(word in f.name for word in words)]
    if not found:
        return Answer(question, "No such rule fired.", "findings", applies=False)
    return Answer(
        question, f"{count(len(found), 'finding')}, the first in {place(found[0].owner, found[0].source)}.", "findings"
    )


def _training(audit: Audit) -> tuple[Answer, ...]:
    asked = (
        "Why does the loss scale keep falling?",
        "Why does pure BF16 training stall?",
        "Why does unscaling FP16 gradients fail?",
    )
    known = training_answers(audit)
    if known is None:
        moot = "Not covered: this report is about the forward pass. Audit with --mode training."
        return tuple(Answer(question, moot, "method", applies=False) for question in asked)
    answers = (known.falling, known.stalling, known.unscaling)
    return tuple(Answer(question, answer, "training") for question, answer in zip(asked, answers, strict=True))
