"""The verdict, counts and plans of an Audit in words, shared by all reporters; the method, warnings, next steps, and dry
runs."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ..artefact.strategies import plan_title
from ..criteria.criterion import FLOOR
from ..loading.inputs import shapes_of
from ..measure.causes import storage_notes
from ..numerics.devices import NATIVE_CPU
from ..numerics.formats import FORMATS, runs
from ..plan.recommend import blocking_limits, flipped_words, kept_apart, outcome
from ..records import Batch, InputRange, NodeReport, Plan, Subject, Verification
from ..records.audit import FILES, Audit
from ..records.decisions import Decision
from .blocks import Block, Code, Grid, Prose
from .findings import causes, outputs_beyond, repair_words
from .margins import range_note
from .origins import at, nonfinite_runs
from .plans import PlanView, advice, criterion_commands, gpu_only_words, inputs_of, limit_line, proposal_words
from .releases import untested_words
from .training import training_headline, training_words
from .words import VERDICTS, compact, count, label, magnitude, op, printable, ratio, scope, sentence, shorten, terms

if TYPE_CHECKING:  # else a saved audit would import the search for plans when it is shown
    from ..plan.context import PlanningContext
    from ..settings import Settings

NAMED, WARNED = 12, 4
"""Maximum numbers of non-deterministic operations that the method and a warning name."""
STEADY = 0.1
"""Share of the error budget up to which differences between FP32 runs need no warning."""
LITTLE = 1.1
"""Speed-up below which a plan is no answer without the repair that would gain more."""
INPUT_HEADS = ("Input", "Dtype", "Shape", "Smallest", "Largest", "Beyond FP16", "Inf or NaN")
INPUTS = "Calibration inputs. Smallest, Largest: finite values over all batches. Beyond FP16: number of floating-point values whose magnitude exceeds 65504"
FEW = 1000
"""Number of decisions (such as choices of topk) on a batch below which other inputs may well have flips."""


@dataclass(frozen=True)
class Tally:
    """The number of operations with each verdict in one format. limit: causes of sensitive and unsafe verdicts, such as
    `overflow and precision`; sentence: counts and causes in words."""

    label: str
    counts: dict[str, int]
    limit: str
    sentence: str


def _tally(audit: Audit, fmt: str) -> Tally:
    """The verdicts of one format, counted and in words."""
    runs = nonfinite_runs(audit, fmt)
    vanished = {first.node for first in runs.values() if first is not None and first.cause == "underflow"}
    judged = [node for node in audit.nodes if fmt in node.verdicts]
    kinds = Counter(node.verdicts[fmt].verdict for node in judged)
    limits = {_limit(node, fmt, vanished) for node in judged if node.verdicts[fmt].verdict in ("sensitive", "unsafe")}
    limit = _causes_in_words(fmt, limits)

    unsafe = kinds["unsafe"]
    sensitive = kinds["sensitive"]
    untested = kinds["untested"]
    tested = len(judged) - untested
    left = ""
    if untested:
        left = f"; {untested:,} {'was' if untested == 1 else 'were'} not tested"
    if not tested:
        sentence = f"{label(fmt)} was not tested on any operation."
    elif not unsafe and not sensitive:
        what = " tested" if untested else ""
        all_tested = f"none of the {count(tested, 'operation')}{what} is unsafe or sensitive"
        if tested == 1:
            all_tested = f"the only operation{what} is neither unsafe nor sensitive"
        alone = " when tested alone" if runs else ""  # the whole model in low precision becomes non-finite
        sentence = f"{label(fmt)}: {all_tested}{alone}{left}."
    else:
        # Autocast runs some operations in FP32: these are unsafe only with cast weights.
        cast = sum(node.verdicts[fmt].verdict == "unsafe" and node.exposed.get(fmt) == ("cast",) for node in judged)
        where = ""
        if cast:
            number = "" if cast == unsafe else f"{cast:,} "
            where = f" ({number}only with cast weights)"
        cause = f"; causes: {limit}" if limit else ""
        counts = f"{unsafe:,} unsafe{where} and {sensitive:,} sensitive of {count(len(judged), 'operation')}"
        sentence = f"{label(fmt)}: {counts}{cause}{left}."
    return Tally(label(fmt), {name: kinds[name] for name in VERDICTS}, limit, sentence)


def _causes_in_words(fmt: str, causes: Container[str | None]) -> str:
    """The causes of sensitive and unsafe verdicts, such as `overflow and rounding`; "" without any."""
    has_range_of_fp32 = FORMATS[fmt].smallest_normal <= torch.finfo(torch.float32).tiny
    words = {
        "overflow": "overflow",
        "underflow": "underflow" if has_range_of_fp32 else "underflow (BF16 has FP32's range)",
        "precision": "rounding",
        "literal": f"constants that {label(fmt)} cannot represent",
        "kernel": "missing kernels",
        "other": "operations that raise errors",
    }
    named = [text for key, text in words.items() if key in causes]
    if len(named) < 2:
        return "".join(named)
    return f"{', '.join(named[:-1])} and {named[-1]}"


class ReportView:
    """The statements about an audit as a whole that reporters share. broken: sentences on outputs that become Inf or
    NaN."""

    def __init__(self, audit: Audit) -> None:
        self.plans = tuple(PlanView(audit, plan) for plan in audit.plans.values())
        self.chosen = next((p for p in self.plans if p.recommended), None)
        self.headline, self.proof = _verdict(audit, self.chosen)
        self.tallies = [_tally(audit, fmt) for fmt in audit.formats]
        formats = dict.fromkeys(plan.format for plan in audit.plans.values())
        self.broken = tuple(said for fmt in formats for said in nonfinite_runs(audit, fmt))
        self.limits = tuple(_limits(audit, self.tallies))


def _verdict(audit: Audit, chosen: PlanView | None) -> tuple[str, str]:
    """Two texts: the verdict (what to run, and how to train if that was requested), and the evidence."""
    if chosen is None:
        return _verdict_without_plan(audit)
    plan = chosen.plan
    ran = plan.verification
    kept = kept_apart(plan)
    apart = "; nothing has to stay in FP32"
    if kept:
        apart = f", keeping {kept} in FP32"
    elif plan.strategy == "autocast":
        apart += " except what autocast itself runs in FP32"
    sentences = (
        f"Run the model in {chosen.title}{apart}.",
        _repair_first(audit),
        _outputs_beyond(audit, ran),
        training_headline(audit) or "",
    )
    headline = " ".join(filter(None, sentences))
    if plan.measured_error is None:
        predicted = f"Predicted error {ratio(plan.predicted_error)}, budget {audit.max_error:g}; {chosen.detail}."
        return headline, predicted
    proof = f"{_proof(audit, plan)}{_scatter(plan)}{_doubt(plan)}"
    if chosen.before == "non-finite":  # `nonfinite_runs` speaks of non-finite outputs
        return headline, proof
    if not chosen.islands and chosen.before == ratio(plan.measured_error):
        return headline, proof
    before = f"the error is {chosen.before}"
    if chosen.before == "fails to run":
        before = "the model fails to run"
    elif audit.criteria:
        before = _flips_beyond(chosen.baseline) or f"the largest share of a limit is {chosen.before}"
    return headline, f"{proof} Without the plan, in {chosen.title}, {before}."


def _flips_beyond(run: Verification | None) -> str:
    """The entries that change beyond their limits in a run, with the options that allow this; "" if the run violates
    other limits, too, or none."""
    violated = [one for one in run.criteria if not one.holds] if run is not None else []
    if not violated or not all(map(flipped_words, violated)):
        return ""
    return blocking_limits(violated)


def _verdict_without_plan(audit: Audit) -> tuple[str, str]:
    """The two texts of `_verdict` for an audit that recommends FP32."""
    training = audit.training
    has_other_plans = any(plan.is_verified and plan.has_low for plan in audit.plans.values())
    if training and not training.format and has_other_plans:
        return training_words(training), "Plans for inference, which are within the error budget, are below."
    result = outcome(audit.plans, audit.use)
    repair = "" if result == "loses" else _repair_first(audit)
    proof = ""
    if result == "loses":
        proof = advice(audit)
    elif result == "out of reach" and any(map(runs, audit.formats)):
        looser = "Loosen a criterion" if audit.criteria else "Raise the budget with --max-error"
        proof = f"{looser}, or start with the findings below."
    trained = training_headline(audit) or ""
    return " ".join(filter(None, (audit.recommendation, repair, trained))), proof


def _proof(audit: Audit, plan: Plan) -> str:
    """A sentence on the run of a plan: its error, how FP32 itself varies, and whether few decisions were made."""
    ran = plan.verification
    who = "The patched model" if plan.program is None else f"The saved program, {plan.program.file},"
    inputs = f" on {inputs_of(ran)}" if ran else ""
    error = f"error {ratio(plan.measured_error)} against FP32, budget {audit.max_error:g}"
    if ran and ran.criteria:
        nearest = max(ran.criteria, key=lambda one: one.share or 0)
        error = f"every criterion holds. Nearest to its limit: {limit_line(nearest)}"
    remark = ""
    if ran and ran.floor:
        remark = f"; FP32 runs differ by {ratio(ran.noise)}"
    few = _few_decisions(audit, plan.format)
    if few is not None and ran and ran.inputs == "audited":
        remark += (
            f". But the first batch has only {count(few.count, 'decision')} of {at(few.op, few.owner, few.source)}. One "
            "flipped decision exceeds the limit, and other inputs may flip one: verify on more inputs"
        )
    return f"{who} was run{inputs}: {error}{remark}.{_few_tokens(audit, plan)}"


def _few_tokens(audit: Audit, plan: Plan) -> str:
    """A sentence, after a space, on a limit of flipped tokens that too few tokens were generated to check; "" otherwise."""
    compared, ran = plan.generated, plan.verification
    if audit.generation is None or compared is None or compared.flips_high is None or ran is None:
        return ""
    limits = [1000 * (1 - one.limit) for one in ran.criteria if one.kind == "top1"]
    if not limits or compared.flips_high <= min(limits):
        return ""
    return (
        f" But of {count(audit.generation.tokens, 'generated token')}, the 95 % interval of flips reaches "
        f"{compared.flips_high:.3g} per 1,000, above the limit of {min(limits):.3g}: give more prompts, or generate more tokens."
    )


def _few_decisions(audit: Audit, fmt: str) -> Decision | None:
    """An operation with so few decisions that a single flip would exceed the error budget; None without one."""
    for decisions in audit.decisions:
        if decisions.format != fmt:
            continue
        first = decisions.operations[0]
        limit = decisions.frozen**2 + audit.max_error**2
        if first.count < FEW and (first.error or 0.0) ** 2 > limit:
            return first
    return None


def _scatter(plan: Plan) -> str:
    """A sentence, after a space, on the error of outputs of a few numbers; "" for others, and where one run has a larger one."""
    ran = plan.verification
    if ran is None or ran.scattered is None or ran.scattered <= (ran.measured_error or 0.0):
        return ""
    return (
        " The outputs are a few numbers, whose error in one run may be small by chance: the root mean square at eight "
        f"sets of slightly changed weights is {ratio(ran.scattered)}."
    )


def _doubt(plan: Plan) -> str:
    """A sentence, after a space, on a predicted error that contradicts the measured one; "" without doubt."""
    if not plan.is_doubtful or plan.verification is None:
        return ""
    batches = count(plan.verification.batches, "batch", "batches")
    too_few = "is too few" if plan.verification.batches == 1 else "are too few"
    return (
        f" But {ratio(plan.predicted_error)} was predicted, which is above the budget, and {batches} {too_few} to rule out "
        "chance: verify on more inputs."
    )


def _repair_first(audit: Audit) -> str:
    """A sentence on the repair that gains most, if the recommended plan gains little or there is none."""
    plan = audit.plans.get(audit.recommended or "")
    if not audit.repairs or (plan is not None and plan.speedup >= LITTLE):
        return ""
    best = audit.repairs[0]
    listed = " and ".join(shorten(best.causes, 2))
    little = f"This gains only {plan.speedup:.2f}x: " if plan is not None else ""
    return f"{little}{'repair' if little else 'Repair'} {listed} first; then {repair_words(audit, best)}."


def _outputs_beyond(audit: Audit, run: Verification | None) -> str:
    """A sentence on outputs whose own relative L2 error exceeds the budget that all outputs together are within.

    Outputs that a criterion covers are excluded; the result is "" without such outputs.
    """
    beyond = outputs_beyond(audit, run)
    if not beyond:
        return ""
    offers = {offer.output: offer.criterion for offer in audit.proposals if not offer.holds}
    worst = next(iter(beyond))
    more = f" {count(len(beyond) - 1, 'other output')} likewise;" if len(beyond) > 1 else ""
    return (
        f"But output `{worst}` on its own has error {ratio(beyond[worst])}, above the budget of {audit.max_error:g};{more} "
        f"an audit with --criterion '{offers[worst]}' holds it to the budget, and names the lines to repair."
    )


def _inputs_beyond_fp16(audit: Audit) -> Iterator[str]:
    """A sentence on inputs that FP16 cannot represent; the recommended plan was run with them."""
    large = [f"`{one.name}`" for one in audit.input_ranges if one.beyond_fp16]
    if not large:
        return
    named = ", ".join(shorten(large, NAMED, "measurements.json"))
    fact = f"Some values of {named} are beyond the range of FP16 (65504), and become Inf where they are cast to it"
    if audit.plan is not None and audit.plan.measured_error is not None:
        yield f"{fact}. The recommended plan was run with such values; code of your own may still cast them."
    else:
        yield f"{fact}: scale the inputs in FP32, or use BF16, which keeps 8 significant bits."


def _limits(audit: Audit, tallies: Iterable[Tally]) -> Iterator[str]:
    subject = audit.subject
    if subject.random_weights:
        yield "The weights are random: value ranges, and verdicts based on them, may differ for a trained model."
    if subject.synthetic_inputs:
        yield "The inputs were generated: pass real inputs with --inputs before you rely on value ranges."
    if "fp16" in audit.formats:
        yield from _inputs_beyond_fp16(audit)
    if audit.environment.execution != "native":
        yield "The audit ran without a GPU: formats were emulated on a CPU, and speed-ups are predictions."
    if audit.plan is not None and audit.plan.gpu_only is not None:
        yield gpu_only_words(audit.plan)
    if simulated := " or ".join(label(name) for name in audit.formats if not runs(name)):
        yield f"torch cannot compute in {simulated}: results were rounded to the format, and plans in the format were not run."
    if untested := [f"{count(n, 'operation')} in {t.label}" for t in tallies if (n := t.counts["untested"])]:
        yield f"Not tested: {', '.join(untested)}; the layer table gives the reasons."
    yield from untested_words(audit.environment.torch)
    yield from map(sentence, audit.warnings)


def _limit(report: NodeReport, fmt: str, vanished: set[str]) -> str | None:
    """The cause of an unsafe or sensitive verdict, as a key of `words` in `_tally`; `other`: an unknown exception."""
    error, verdict = report.errors.get(fmt), report.verdicts[fmt]
    if error is not None and error.unsupported and verdict.verdict == "unsafe":
        by_kernel = re.search(r"\bkernel\b", error.unsupported)
        if error.cause == "literal":
            return "literal"
        return "kernel" if by_kernel else "other"
    if (error is not None and error.cause == "underflow") or report.node.name in vanished:
        return "underflow"
    return "overflow" if verdict.limited_by == "range" else verdict.limited_by


def method(audit: Audit, limits: tuple[str, ...]) -> list[Block]:
    """How the audit was made: inputs, weights, graph, device, its limitations, and suggested criteria."""
    env, subject = audit.environment, audit.subject
    graph = {"run": "one recorded run", "path": "the path that these inputs take"}.get(audit.capture_method, "")
    if any(report.node.batch != 1 for report in audit.nodes):
        graph = "a recorded run of each path that the batches take"
    native = "formats run natively" if env.execution == "native" else "GPU arithmetic emulated on a CPU"
    rows = {
        "Target": subject.target,
        "Inputs": f"{subject.inputs_source}: {', '.join(audit.inputs) or 'none'}",
        "Weights": subject.weights_source,
        "Graph": graph,
        "Size": f"{compact(audit.parameters)} parameters, {count(len(audit.nodes), 'operation')}",
        "Execution": f"{env.device}, {native}",
        "Measure": f"{audit.metric}, budget {audit.max_error:g}",
        **noise(audit),
        "Versions": f"auditor {env.auditor}, torch {env.torch}, seed {env.seed}",
    }
    meanings = terms()
    if audit.cpu is not None:
        meanings.pop("emulate")
    none = "None known: the inputs are real, the weights are not random, the formats ran natively, and every operation was tested."
    return [
        Grid(("What", "How"), tuple(rows.items()), texts=2, caption="Method"),
        Grid(INPUT_HEADS, tuple(map(_input_row, audit.input_ranges)), texts=3, caption=INPUTS),
        Prose("Limits", limits or (none,), listed=True),
        Prose("Criteria that could be set", tuple(map(proposal_words, audit.proposals)), listed=True),
        *criterion_commands(audit),
        Code("Reproduce", audit.command),
        Grid(("Term", "Meaning"), tuple(meanings.items()), texts=2, caption="Terms"),
    ]


def _input_row(one: InputRange) -> tuple[str, ...]:
    """A row of the table of inputs."""
    low, high = ("none" if x is None else magnitude(x) for x in (one.minimum, one.maximum))
    beyond = f"{one.beyond_fp16:,}" if one.dtype.startswith(("float", "bfloat", "complex")) else ""
    return (
        f"`{one.name}`",
        one.dtype,
        " x ".join(map(str, one.shape)) or "scalar",
        low,
        high,
        beyond,
        f"{one.nonfinite:,}",
    )


def noise(audit: Audit) -> dict[str, str]:
    """Texts on the difference between repeated FP32 runs, and the operations that cause it; empty if not measured."""
    measured = audit.noise
    if measured is None or measured.runs < 2:
        return {}
    runs = count(measured.runs, "run")
    if not measured.error and not measured.nodes:
        return {"Noise": f"{runs} in FP32 gave identical outputs"}
    outputs = sorted(measured.outputs.items(), key=lambda pair: -pair[1])[:NAMED]
    each = "; ".join(f"{name} {ratio(apart)}" for name, apart in outputs) if len(outputs) > 1 else ""
    below = f"; errors up to {ratio(measured.floor)} count as noise" if measured.floor else ""
    texts = {"Noise": f"{runs} in FP32 differ by {ratio(measured.error)}{f' ({each})' if each else ''}{below}"}
    if not measured.operations:
        return texts
    places = {report.node.name: at(report.node.op, report.node.owner, report.node.source) for report in audit.nodes}
    apart = {places.get(name, name): measured.nodes.get(name, 0.0) for name in measured.operations}
    listed = [f"{place}, differs by {ratio(error)}" for place, error in apart.items()]
    return {**texts, "Not deterministic": "; ".join(shorten(listed, NAMED, "measurements.json"))}


def warnings_of(planning: PlanningContext) -> Iterator[str]:
    """Warnings about stored weights, noise, held-out inputs, and the verification."""
    subject, noise = planning.subject, planning.noise.measured
    yield from storage_notes(subject, planning.capture, planning.measured.ranges, planning.options.formats)
    if margin := range_note(subject, planning.capture, planning.measured.ranges, planning.options.formats):
        yield margin
    if noise.error > STEADY * planning.output_metric.budget:
        nodes = [planning.capture.nodes[name] for name in noise.operations]
        listed = list(dict.fromkeys(f"{op(node.op)} in {scope(node.owner)}" for node in nodes))
        named = ", ".join(shorten(listed, WARNED, "measurements.json"))
        begins = f"The first operations that gave different results for equal inputs: {named}. "
        keeps = (
            "The model keeps state that the audit cannot restore (in a generator, in C++, in another process), or computes "
            "in a varying order. "
        )
        allowed = f"Errors up to {FLOOR:g} times this difference ({noise.floor:.2g}) are ignored."
        yield (
            "The model is not reproducible: FP32 runs from the same state and random numbers differ by "
            f"{noise.error:.2g}. {begins if nodes else keeps}"
            f"{allowed if noise.floor else 'No plan can have a smaller error.'}"
        )
    if not subject.held_out:
        others = " To use others, return them from get_eval_inputs() in the model's file." if subject.origin else ""
        yield f"No held-out inputs: the plans were verified on the calibration inputs.{others}"
    for reason in planning.process.problems[:1]:
        yield (
            f"The plans were verified in the audit's own process: {reason}. A fresh process imported patched_model.py and built "
            "the model, but did not run its plans."
        )


def dry_run(subject: Subject, options: Settings, directory: Path) -> str:
    """For `--dry-run`: lines that name the model, inputs, weights, plans, device and files that an audit would use."""
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    made = f", from {subject.origin.symbol}" if subject.origin else ""
    plans = [f"{strategy}_{fmt}" for strategy in options.strategies for fmt in options.formats]
    apart = f", except for {'; '.join(map(str, options.criteria))}" if options.criteria else ""
    rows = {
        "Target": subject.target,
        "Model": f"{type(subject.model).__name__} with {numbers:,} parameters{made}",
        "Inputs": f"{_inputs(subject.batches)}, from {subject.inputs_source}",
        "Held out": _inputs(subject.held_out) or "none: plans are verified on the calibration inputs",
        "Weights": subject.weights_source,
        "Plans": f"{', '.join((*plans, *options.schemes))}; error budget {options.max_error:g}{apart}",
    }
    if (scoring := options.scoring) is not None:
        judged = "any loss is allowed" if scoring.max_drop is None else f"at most {scoring.max_drop:g} worse than FP32"
        rows["Score"] = f"{scoring.name} on FP32 and every verified plan; {scoring.better} is better; {judged}"
    rows["Device"] = _device_words(options)
    rows["Files"] = f"{directory}/: {', '.join(FILES)}"
    lines = [f"{name:<9}{printable(text)}" for name, text in rows.items()]
    return "\n".join([*lines, "Nothing was measured or written: leave out --dry-run to audit."]) + "\n"


def _device_words(options: Settings) -> str:
    if options.where == NATIVE_CPU:
        return "this CPU runs the formats with its own kernels"
    return "the GPU runs the formats natively" if options.native else "the CPU emulates a GPU's arithmetic"


def _inputs(batches: Sequence[Batch]) -> str:
    kinds = Counter(", ".join(shapes_of(batch)) for batch in batches)
    return "; ".join(f"{count(number, 'batch', 'batches')} of {kind}" for kind, number in kinds.items())


def next_step(audit: Audit, directory: Path) -> str:
    """What the user can do next. directory: the directory of the audit's files."""
    report = directory / "report.html"
    if audit.subject.random_weights and audit.live and audit.parameters > 0:
        return "audit the model again with trained weights (--weights FILE): these numbers are for random weights."
    if audit.training is not None and audit.training.format is not None:
        return f"train with the loop in {report}, section Training."
    plan = audit.plans.get(audit.recommended or "")
    if plan is not None and plan.program is not None:
        file = str(directory / plan.program.file)
        return f"load the program: torch.export.load({file!r}).module() is called like the model."
    if audit.recommended is not None:
        return f"put {directory} on Python's path; `import patched_model` and `patched_model.build()` give the model under this plan."
    if not any(map(runs, audit.formats)):
        return "audit a format that torch can compute in: --formats fp16,bf16."
    if outcome(audit.plans, audit.use) == "loses":
        return f"{(said := advice(audit))[0].lower()}{said[1:]}"
    for first in causes(audit).wanting[:1]:
        return f"repair {first.worst.rule} at {first.worst.source or op(first.worst.op)}, and audit again; `python -m auditor explain {first.worst.rule}` says how."
    if audit.criteria:
        return f"loosen a criterion: {report} lists the value of each under every plan."
    plain = ((run.measured_error, audit.plans[name]) for name, run in audit.baselines.items() if name in audit.plans)
    reached = [(error, plan) for error, plan in plain if error is not None and math.isfinite(error)]
    if reached:
        error, plan = min(reached, key=lambda pair: pair[0])
        step = 10.0 ** (math.floor(math.log10(error)) - 1) if error > 0 else 1e-6
        budget = f"{math.ceil(error / step * 1.02) * step:.2g}"  # rounded up to two digits
        return f"raise the budget with --max-error {budget}: {plan_title(plan)}, without a plan, has an error of {ratio(error)}."
    return f"read in {report} why each plan failed."
