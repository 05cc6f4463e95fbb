"""The verdict, the tallies and the plans of an Audit as plain data, worded once for every reporter."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch

from ..artefact.strategies import known
from ..errors import AuditorError
from ..numerics.formats import FORMATS, runs
from ..plan.clauses import GAINS
from ..plan.recommend import best_for, gains, kept_apart, outcome
from ..records import NodeReport
from ..records.audit import Audit
from .criteria import SHARES, advice, no_plan, proposal_words, score_headline
from .origins import nonfinite_runs
from .plans import PlanView, plan_view, times
from .training import training_headline
from .words import VERDICTS, count, label, ratio, sentence


@dataclass(frozen=True)
class Tally:
    """How many operations of each verdict one format has.

    limit: what limits those that are not safe, `overflow and precision`. cast_only: unsafe ones that only cast weights run
    low, since autocast keeps them in FP32. together: whether a run of the whole model turns non-finite.
    """

    label: str
    counts: dict[str, int]
    total: int
    limit: str
    cast_only: int
    together: bool

    @property
    def sentence(self) -> str:
        """All of it."""
        unsafe, sensitive, untested = (self.counts[name] for name in ("unsafe", "sensitive", "untested"))
        left = f"; {untested:,} {'was' if untested == 1 else 'were'} not tested" if untested else ""
        if untested == self.total:
            return f"{self.label} was not tested on any operation."
        if not unsafe and not sensitive:
            tested = f"{count(self.total - untested, 'operation')}{' tested' if untested else ''}"
            alone = " alone" if self.together else ""
            return f"{self.label}: none of the {tested} is unsafe or sensitive{alone}{left}."
        some = "" if self.cast_only == unsafe else f"{self.cast_only:,} "
        where = f" ({some}only with cast weights)" if self.cast_only else ""
        cause = f", limited by {self.limit}" if self.limit else ""
        total = count(self.total, "operation")
        return f"{self.label}: {unsafe:,} unsafe{where} and {sensitive:,} sensitive of {total}{cause}{left}."


@dataclass(frozen=True)
class View:
    """What every reporter opens with. broken: what turns Inf or NaN, and why."""

    headline: str
    proof: str
    contrast: tuple[str, ...]
    broken: tuple[str, ...]
    tallies: tuple[Tally, ...]
    plans: tuple[PlanView, ...]
    chosen: PlanView | None
    limits: tuple[str, ...]
    score: str
    criteria: str
    proposals: tuple[str, ...]
    times: tuple[str, ...]


def view(audit: Audit) -> View:
    """Everything the reporters say about an audit as a whole.

    Raises: AuditorError(slug="bad-format" or "bad-strategy") where one that it is of is no longer registered.
    """
    _check_registered("format", audit.formats, FORMATS)
    _check_registered("strategy", (plan.strategy for plan in audit.plans.values()), known())
    tallies = tuple(tally_of(audit, fmt) for fmt in audit.formats)
    plans = tuple(plan_view(audit, plan) for plan in audit.plans.values())
    chosen = next((p for p in plans if p.recommended), None)
    return View(
        _headlines(audit, chosen),
        _proof(audit, chosen),
        tuple(tally.sentence for tally in tallies),
        tuple(" ".join(run.sentences) for run in nonfinite_runs(audit)),
        tallies,
        plans,
        chosen,
        _limits(audit, tallies),
        score_headline(audit),
        SHARES if audit.criteria else "",
        tuple(map(proposal_words, audit.proposals)),
        times(audit),
    )


def _check_registered(what: str, used: Iterable[str], known: Collection[str]) -> None:
    gone = next((name for name in used if name not in known), None)
    if gone is not None:
        raise AuditorError(
            f"the {what} {gone!r} of this audit is no longer registered: register it again to show or save the audit",
            slug=f"bad-{what}",
        )


def _headlines(audit: Audit, chosen: PlanView | None) -> str:
    """What to run, and how to train where that was asked."""
    if _for_inference_alone(audit, chosen):
        return "Keep it in FP32 to train it; plans that hold the budget for inference are below."
    return " ".join(filter(None, (_headline(audit, chosen), training_headline(audit))))


def _for_inference_alone(audit: Audit, chosen: PlanView | None) -> bool:
    """Whether plans run something low within the budget, and the step that was audited does not train under any."""
    if chosen is not None or audit.training is None or audit.training.format is not None:
        return False
    return any(
        plan.verified and any(choice.precision != "fp32" for choice in plan.scopes.values())
        for plan in audit.plans.values()
    )


def _headline(audit: Audit, chosen: PlanView | None) -> str:
    if chosen is None and audit.plans and not any(map(runs, audit.formats)):
        return f"Keep it in FP32: torch has no arithmetic in {' or '.join(map(label, audit.formats))}."
    if chosen is None and outcome(audit.plans, audit.use) == "not asked for":
        return f"No plan for {audit.use} was asked for."
    if chosen is None:
        return f"Keep it in FP32: {nothing(audit)}."
    kept = kept_apart(chosen.plan)
    if not kept:
        return f"Run it in {chosen.title}; nothing has to stay in FP32."
    return f"Run it in {chosen.title}, keeping {kept} in FP32."


def nothing(audit: Audit) -> str:
    """Why no plan is recommended."""
    found = outcome(audit.plans, audit.use)
    if found == "not asked for":
        return f"no plan for {audit.use} was asked for"
    if found == "loses":
        return f"no plan that holds the error budget of {audit.max_error:g} keeps the score"
    if found == "lowers nothing":
        return "nothing in it runs low under any plan that holds"
    met = "every criterion" if audit.criteria else f"the error budget of {audit.max_error:g}"
    if found == "saves nothing":
        return f"what holds {met} in low precision saves no {GAINS[next(iter(audit.plans.values())).objective]}"
    if best_for(audit.plans, audit.use) is None and any(map(gains, audit.plans.values())):
        return f"no plan for {audit.use} met {met}"
    return f"no plan met {met}"


def _proof(audit: Audit, chosen: PlanView | None) -> str:
    if chosen is None and audit.plans and not any(map(runs, audit.formats)):
        return (
            "Its plans are simulated, their errors predictions: audit a format that torch computes in for one to run."
        )
    if chosen is None and audit.training is not None and _for_inference_alone(audit, chosen):
        return f"{audit.training.recommendation}."
    if chosen is None and outcome(audit.plans, audit.use) == "loses":
        return advice(audit)
    if chosen is None and not nothing(audit).startswith("no plan met"):
        return audit.recommendation
    if chosen is None:
        return no_plan(audit)
    plan, budget = chosen.plan, f"{audit.max_error:g}"
    if plan.measured_error is None:
        return f"Predicted error {ratio(plan.predicted_error)} against a budget of {budget}; {chosen.detail}."
    inputs = f" on {plan.verification.inputs} inputs" if plan.verification else ""
    what = "the largest share of what a criterion allows is" if audit.criteria else "error"
    measured = plan.verification
    itself = f"; runs in FP32 differ by {ratio(measured.noise)}" if measured and measured.floor else ""
    ran = "The patched model" if plan.program is None else f"The saved program, {plan.program.file},"
    run = f"{ran} was run{inputs}: {what} {ratio(plan.measured_error)}, budget {budget}{itself}."
    return run if chosen.same else f"{run} Without the plan: {chosen.before}."


def _limits(audit: Audit, tallies: Iterable[Tally]) -> tuple[str, ...]:
    subject = audit.subject
    limits: list[str] = []
    if subject.random_weights:
        limits.append(
            "The weights are random: value ranges, and so the verdicts on range, say little about a trained model."
        )
    if subject.synthetic_inputs:
        limits.append("The inputs were made up: give real ones with --inputs before relying on ranges.")
    if audit.environment.execution != "native":
        limits.append("No GPU ran this: formats were imitated on a CPU, and the speed-ups are predictions.")
    simulated = [label(name) for name in audit.formats if not runs(name)]
    if simulated:
        limits.append(
            f"torch has no arithmetic in {' or '.join(simulated)}: operations were rounded to it, and its plans not run."
        )
    untested = [(t.label, t.counts["untested"]) for t in tallies if t.counts["untested"]]
    if untested:
        listed = ", ".join(f"{count(n, 'operation')} in {name}" for name, n in untested)
        limits.append(f"Not tested: {listed}; the layer table says why.")
    return (*limits, *map(sentence, audit.warnings))


def tally_of(audit: Audit, fmt: str) -> Tally:
    """Of the operations in one format."""
    runs = [run for run in nonfinite_runs(audit) if run.format == fmt]
    vanished = {run.first.node for run in runs if run.first is not None and run.first.cause == "underflow"}
    judged = [node for node in audit.nodes if fmt in node.verdicts]
    counts = Counter(node.verdicts[fmt].verdict for node in judged)
    limits = Counter(
        _limit(node, fmt, vanished) for node in judged if node.verdicts[fmt].verdict in ("sensitive", "unsafe")
    )
    wider = FORMATS[fmt].smallest_normal > torch.finfo(torch.float32).tiny
    words = {
        "overflow": "overflow",
        "underflow": "underflow (BF16 has FP32's range)" if wider else "underflow",
        "precision": "precision",
        "literal": f"literals that {label(fmt)} cannot hold",
        "kernel": "missing kernels",
        "other": "operations that raise",
    }
    kinds = [text for key, text in words.items() if limits[key]]
    return Tally(
        label(fmt),
        {name: counts[name] for name in VERDICTS},
        len(judged),
        " and ".join(filter(None, (", ".join(kinds[:-1]), *kinds[-1:]))),
        sum(node.verdicts[fmt].verdict == "unsafe" and node.exposed.get(fmt) == ("cast",) for node in judged),
        bool(runs),
    )


def _limit(report: NodeReport, fmt: str, vanished: set[str]) -> str:
    """What limits an operation that is not safe: `other` is what raises for no reason that is known."""
    error, verdict = report.errors.get(fmt), report.verdicts[fmt]
    if error is not None and error.unsupported and verdict.verdict == "unsafe":
        by_kernel = re.search(r"\bkernel\b", error.unsupported)
        return "literal" if verdict.limited_by == "range" else "kernel" if by_kernel else "other"
    if (error is not None and error.cause == "underflow") or report.node.name in vanished:
        return "underflow"
    return {"range": "overflow"}.get(verdict.limited_by or "", verdict.limited_by or "")
