"""The questions people ask about mixed precision, answered from this audit or said not to apply."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..formats.table import FORMATS, runs
from ..plan.recommend import best_for, measured_times, speedup
from ..records import NodeReport
from ..records.audit import Audit
from .exponents import narrowest
from .kept import listed
from .nonfinite import nonfinite_runs
from .origins import origins
from .prose import sentence
from .ran import raised_by_autocast
from .training import training_answers
from .view import View, nothing, view
from .words import compact, count, label, magnitude, memory, op, percent, place


@dataclass(frozen=True)
class Answer:
    """One question, its answer in a sentence or two, and the section that shows more. applies: False where it is moot."""

    question: str
    answer: str
    section: str
    applies: bool = True


SMALL_CONSTANTS = ("ACT006", "CON002", "CON003", "CON004", "TRN002")
NAMED = 4
"""Shapes of modules that an answer names."""

LARGE_CONSTANTS = ("CON001",)
"""Codes of the rules about constants that a format rounds away, or cannot hold; codes are never used anew."""


def questions(audit: Audit) -> tuple[Answer, ...]:
    """Every question, in the order people meet them."""
    seen = view(audit)
    return (
        _which(seen),
        _birth(audit),
        _overflow(audit),
        _minimum(audit, seen),
        _accuracy(audit),
        _trained_in_bf16(audit),
        _speed(audit, seen),
        _memory(audit, seen),
        _protected(audit),
        _fired(audit, "Do eps and other small constants vanish?", SMALL_CONSTANTS),
        _fired(audit, "Does a mask constant overflow?", LARGE_CONSTANTS),
        _fired(audit, "Are positions and angles exact enough?", ("POS",)),
        _dtypes(audit),
        Answer(
            "Is the compiled model closer to FP32 than the eager one?",
            "Not covered: the model is run eagerly; compiled kernels may keep intermediate results in FP32.",
            "method",
            applies=False,
        ),
        Answer("How do I keep one module in FP32?", "Each finding carries code that does it.", "findings"),
        *_training(audit),
    )


def _which(seen: View) -> Answer:
    return Answer("FP16 or BF16?", " ".join((seen.headline, *seen.contrast)), "verdict")


def _birth(audit: Audit) -> Answer:
    question = "Which layer makes the NaN or Inf?"
    for fmt in audit.formats:
        found = [birth for birth in origins(audit, fmt).births if birth.cause != "unsupported"]
        if found:
            first = next((birth for birth in found if birth.why), None)
            first = first or next((birth for birth in found if not birth.report.written), found[0])
            node, why = first.report.node, f" {first.why}" if first.why else ""
            where = f"{op(node.op)} in {place(node.owner, node.source)}"
            return Answer(question, f"In {label(fmt)}, {where}.{why}", "origins")
    if broken := nonfinite_runs(audit):
        return Answer(question, " ".join(broken[0].sentences), "origins")
    return Answer(question, "None: no value that is finite in FP32 became Inf or NaN.", "origins", applies=False)


def _overflow(audit: Audit) -> Answer:
    question = "How close is it to overflow?"
    ranged = [r for r in audit.nodes if r.range is not None and not r.written]
    fmt = narrowest(audit.formats)
    if not ranged or fmt is None:
        return Answer(question, "No ranges were recorded.", "layers", applies=False)
    top = max(ranged, key=_max_abs)
    bits = FORMATS[fmt].headroom_bits(_max_abs(top))
    room = f"{bits:.1f} bits below" if bits > 0 else f"{-bits:.1f} bits above"
    where = place(top.node.owner, top.node.source)
    literal = any(r.written for r in audit.nodes)
    return Answer(
        question,
        f"The largest value, {magnitude(_max_abs(top))}, is {room} what {label(fmt)} can hold: {where}."
        + (" Numbers written in the code, as masks are, are left out." if literal else ""),
        "layers",
    )


def _max_abs(report: NodeReport) -> float:
    return report.range.max_abs if report.range else 0.0


def _minimum(audit: Audit, seen: View) -> Answer:
    question = "What is the least that must stay FP32?"
    if seen.chosen is None:
        return Answer(question, _all_of_it(audit), "plans")
    plan = seen.chosen.plan
    least = tuple(path for path in plan.least if path in plan.kept) if plan.least is not None else plan.kept
    spared = [path for path in plan.kept if path not in least]
    parts = [f"{count(len(least), 'module')}, {listed(least, NAMED)}"] if least else []
    parts += [island.name for island in seen.chosen.islands if island.functions]
    answer = f"{seen.chosen.title}: {'; '.join(parts)}." if parts else "Nothing."
    if spared:
        leaves = "also leaves" if parts else "leaves"
        answer += f" The plan {leaves} {listed(spared, NAMED)} in FP32, where lowering gains little or nothing."
    return Answer(question, answer, "plans")


def _all_of_it(audit: Audit) -> str:
    """What there is to say of the least where no plan is recommended."""
    if not any(map(runs, audit.formats)):
        return "All of it: no plan can be run."
    if audit.training is not None and audit.training.format is None and best_for(audit.plans, "inference") is not None:
        return f"To train it, all of it. {sentence(audit.training.recommendation)}"
    why = nothing(audit)
    return f"All of it: {why}." if why.startswith("no plan") else f"Nothing is worth lowering: {why}."


def _accuracy(audit: Audit) -> Answer:
    question = "Nothing is NaN, yet accuracy drops: where?"
    for fmt in sorted(audit.formats, key=lambda fmt: bool(origins(audit, fmt).births)):
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
    broken = [run for run in nonfinite_runs(audit) if run.format == "fp16"]
    literal = [r for r in only if "fp16" in r.errors and r.errors["fp16"].unsupported]
    left = len(only) - len(literal)
    if broken and not left:
        return Answer(question, f"Not as it is. {' '.join(broken[0].sentences)}", "layers")
    if not only:
        return Answer(question, "Yes: no operation is unsafe in FP16 for its range on these inputs.", "layers")
    said = [count(left, "operation is unsafe", "operations are unsafe") + " in FP16 for its range"] if left else []
    said += (
        [count(len(literal), "operation has", "operations have") + " a literal that FP16 cannot hold"]
        if literal
        else []
    )
    return Answer(question, f"Not as it is: {' and '.join(said)}.", "layers")


def _speed(audit: Audit, seen: View) -> Answer:
    question = "Will it be faster?"
    if seen.chosen is None:
        return Answer(question, "There is no plan to time.", "plans", applies=False)
    plan = seen.chosen.plan
    share = percent(plan.low_precision_flops)
    slow = [f for f in audit.findings if f.rule.startswith("HWR")]
    hint = f" {count(len(slow), 'operation has', 'operations have')} a shape or setting that slows it." if slow else ""
    return Answer(
        question,
        f"{'Measured' if measured_times(plan) else 'Predicted'} {speedup(plan):.2f}x, with {share} of the FLOPs in low precision.{hint}",
        "plans",
    )


def _memory(audit: Audit, seen: View) -> Answer:
    plan = seen.chosen.plan if seen.chosen else None
    if plan and plan.memory and plan.fp32_memory:
        return Answer(
            "Will it need less memory?",
            f"Predicted for one forward: {memory(plan.memory)} with the plan, {memory(plan.fp32_memory)} in FP32.",
            "plans",
        )
    full, half = compact(4 * audit.parameters), compact(2 * audit.parameters)
    return Answer(
        "Will it need less memory?",
        f"Not measured. The weights take {full}B in FP32; autocast keeps them so, a cast plan stores close to {half}B.",
        "plans",
    )


def _protected(audit: Audit) -> Answer:
    question = "What does autocast keep in FP32?"
    kept = Counter(op(r.node.op).partition(".")[0] for r in audit.nodes if raised_by_autocast(r.node))
    if not kept:
        return Answer(question, "By itself none of this model's operations, on CUDA.", "layers")
    names = ", ".join(f"{name} ({n:,})" for name, n in kept.most_common(6)) + (" and more" if len(kept) > 6 else "")
    return Answer(
        question,
        f"By itself, on CUDA: {names}. What is on none of its lists computes in what it is handed.",
        "layers",
    )


def _fired(audit: Audit, question: str, codes: tuple[str, ...]) -> Answer:
    """What rules say whose codes are these, or begin so."""
    found = [f for f in audit.findings if f.rule.startswith(codes)]
    if not found:
        return Answer(question, "No rule about them fired.", "findings", applies=False)
    where = place(found[0].owner, found[0].source)
    return Answer(question, f"{count(len(found), 'finding')}, the first in {where}.", "findings")


def _dtypes(audit: Audit) -> Answer:
    """A model that is simply cast or put under autocast may mix dtypes, or meet an operation without a kernel."""
    question = "Does a plain cast or plain autocast even run?"
    failed = {name: base.failure for name, base in audit.baselines.items() if base.failure}
    if not audit.baselines:
        return Answer(question, "Not tried.", "plans", applies=False)
    broken = [sentence for run in nonfinite_runs(audit) for sentence in run.sentences]
    if not failed and broken:
        return Answer(question, f"It runs, but not all outputs are finite. {' '.join(broken[:2])}", "plans")
    if not failed:
        return Answer(question, "Yes, in every format and strategy tried.", "plans")
    name, reason = next(iter(failed.items()))
    return Answer(question, f"Not {', '.join(failed)}. {name}: {reason}", "plans")


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
