"""Compares plans with the whole model in low precision: verdicts, errors, criteria, scores, times, programs and FP32
islands; and shows code that applies a plan."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Iterator

from ..artefact.strategies import plan_title, strategy_of
from ..criteria.criterion import FLOOR
from ..numerics.devices import CPU
from ..numerics.formats import FORMATS, runs
from ..plan.recommend import flipped_words, kept_apart
from ..records import CriterionValue, Evaluation, Onnx, Plan, Proposal, Score, TimeAndMemory, Times, Today, Verification
from ..records.audit import Audit
from ..records.quantization import MIXED, QuantizedPlan
from ..snippets import TOOLS
from ..snippets import snippets as for_tools
from .blocks import Block, Code, Columns, Fold, Grid, Prose
from .charts import plan_chart
from .kept import islands
from .words import count, in_bytes, label, percent, ratio, sentence, shorten

ISLANDS_SHOWN = 12
SHARES = "A share is the part of its limit that a criterion uses: 0 without a difference from FP32, 1 at the limit. The table has each plan's largest share. Predicted shares of top1, topk and flips, which count changed choices, are averages over possible roundings."
"""Explains a plan's errors if criteria are set."""
NEAR = 2.0
"""Distance from a score's limit, in standard errors, below which other samples may give another result."""
UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))


class PlanView:
    """A plan compared with the whole model in low precision. verdict: verified | not verified | over budget | failed |
    non-finite | not run; detail: the reason."""

    def __init__(self, audit: Audit, plan: Plan) -> None:
        self.plan, self.baseline = plan, audit.baselines.get(plan.name)
        self.title = plan_title(plan)
        self.recommended = plan.name == audit.recommended
        self.verdict, self.detail = _verdict(plan, audit.max_error, "share" if audit.criteria else "error")
        self.islands = islands(plan)
        self.before = _without(self.baseline)
        self.score = score_words(audit.evaluation, plan.score)
        self.criteria = criteria_lines(plan, self.baseline)
        self.program = program_line(plan)
        uses = [in_bytes(use.weights + use.activations) for use in (plan.memory, plan.fp32_memory) if use]
        self.memory = ""
        if len(uses) == 2:
            own, fp32 = uses
            self.memory = f"{own}, as in FP32" if own == fp32 else f"{own} instead of {fp32} in FP32"

    @property
    def idle(self) -> bool:
        """Whether the plan runs nothing in low precision."""
        return not self.plan.has_low and self.plan.program is None

    @property
    def row(self) -> tuple[str, ...]:
        """The plan's row in the table of plans. A plan that runs nothing in low precision has few figures."""
        plan, title = self.plan, ("* " if self.recommended else "") + self.title
        stopped = self.verdict in ("failed", "non-finite", "not run")
        measured = self.verdict if stopped else ratio(plan.measured_error)
        low = percent(plan.low_precision_flops)
        if self.idle:
            return title, self.before, "", self.verdict if stopped else "all FP32", low, ""
        if not stopped and self.verdict != "verified":
            measured += f", {self.verdict}"
        faster = f"{plan.speedup:.2f}x{' measured' if plan.measured_times else ''}"
        return title, self.before, ratio(plan.predicted_error), measured, low, faster


def _verdict(plan: Plan, budget: float, noun: str) -> tuple[str, str]:
    ran = plan.verification
    if ran is None:
        return "not run", plan.note or "the patched model was not run: its error is predicted"
    if ran.failure:
        return "failed" if runs(plan.format) else "not run", ran.failure
    if ran.measured_error is None:
        return "non-finite", "an output contains Inf or NaN where FP32 is finite"
    if broken := [limit_line(one) for one in ran.criteria if not one.holds]:
        return "over budget", "; ".join(broken)
    allowed = max(budget, ran.floor)
    if not ran.measured_error <= allowed:
        return "over budget", f"{noun} {ratio(ran.measured_error)} measured, {budget:g} allowed"
    if ran.with_gradients is not None and not ran.with_gradients <= allowed:
        return "over budget", f"{noun} {ratio(ran.with_gradients)} measured with gradients enabled, {budget:g} allowed"
    where = f" on {inputs_of(ran)}, {'natively' if ran.execution == 'native' else 'with emulated GPU arithmetic'}"
    if ran.ungraded and plan.program is not None:
        where += f"; for inference only: with gradients enabled the program raises {ran.ungraded}"
    elif ran.ungraded:
        where += f"; not run with gradients enabled, since the FP32 model then raises {ran.ungraded}"
    if max(ran.measured_error, ran.with_gradients or 0.0) > budget:
        floor = f"at most {FLOOR:g} times the difference between FP32 runs ({ratio(ran.noise)})"
        where += f"; this is above the budget, but {floor}"
    if plan.is_doubtful:
        where += f"; {ratio(plan.predicted_error)} was predicted, so other inputs may exceed the limit"
    return ("verified" if ran.holds else "not verified"), f"{noun} {ratio(ran.measured_error)} measured{where}"


def about_plan(plan: Plan) -> list[Block]:
    """One plan on its own: verdict, error, gain, what it keeps in FP32, and how to use it."""
    verdict, detail = _verdict(plan, _allowed(plan), "error")
    gain = []
    if plan.has_low and not math.isnan(plan.low_precision_flops):
        gain.append(f"{percent(plan.low_precision_flops)} of the FLOPs in {label(plan.format)}")
    if plan.has_low and not math.isnan(plan.speedup):
        made = "measured" if plan.measured_times else "predicted" + f" for one {plan.target}" * bool(plan.target)
        gain.append(f"{plan.speedup:.2f}x as fast as FP32, {made}")
    use = f"auditor.apply(model, plan)  # or: patched_model.build(plan={plan.name!r})"
    if plan.program is not None:
        use = f"torch.export.load({plan.program.file!r}).module()"
    page: list[Block] = [
        Prose(f"Plan {plan.name}: {plan_title(plan)}, {verdict}", (sentence(detail),), "title"),
        Prose("Gain", (sentence(", ".join(gain)),) if gain else ()),
        Prose("Device", (gpu_only_words(plan),)),
        Prose("In FP32", shorten(islands(plan), ISLANDS_SHOWN), listed=True),
        Code("Use it", use),
    ]
    return [block for block in page if block]


def _allowed(plan: Plan) -> float:
    """The largest error that was allowed in the plan's run; infinite if unknown."""
    ran = plan.verification
    return math.inf if ran is None or ran.allowed is None else ran.allowed


def gpu_only_words(plan: Plan) -> str:
    """A sentence which says that the plan needs a GPU, and how to try it on a CPU; "" if the audit's CPU can run the
    plan."""
    if plan.gpu_only is None:
        return ""
    where = f"The plan {plan.name} is for a GPU: on the CPU of this audit its model fails: {plan.gpu_only}"
    return f'{where}. On a CPU, run the model inside `with auditor.emulate("cuda"):`.'


def inputs_of(ran: Verification) -> str:
    """The inputs that a plan ran on, in words."""
    return "the calibration inputs" if ran.inputs == "audited" else f"{ran.inputs} inputs"


def _without(baseline: Verification | Today | None) -> str:
    if baseline is None:
        return "not measured"
    if baseline.failure:
        return "fails to run"
    return "non-finite" if baseline.measured_error is None else ratio(baseline.measured_error)


def plans_section(audit: Audit, plans: tuple[PlanView, ...]) -> list[Block]:
    """The section on plans: each plan compared with the whole model in low precision."""
    if not plans:
        return [Prose("", ("No plan was made for this audit.",), "empty")]
    about = (
        "A plan may keep modules, functions or outputs in FP32. "
        'The values for "no plan" are of the same format and strategy without these exceptions.'
    )
    texts = (Prose("", (text,), "about") for text in (about, score_headline(audit)))
    shown: list[Block] = [*texts, *plan_table(audit, plans)]
    if (chart := plan_chart(audit)) is not None:
        shown = [Columns(tuple(shown), (chart,))]
    return [
        *shown,
        Prose("Times", times(audit), listed=True),
        Fold(
            "Each plan: what it keeps in FP32 and why",
            (Prose("", (_compiled_words(plans),), "muted"), *_plan_folds(audit, plans)),
        ),
    ]


def plan_table(audit: Audit, plans: tuple[PlanView, ...]) -> Iterator[Block]:
    """A table of all plans, a line on the recommended plan, and lines on programs; empty without plans."""
    rows = [p.row for p in plans]
    if (today := audit.fp32_today) is not None and plans:
        rows.append((today_title(audit), "", "", _without(today), "", ""))
    errors = (f"{'Share' if audit.criteria else 'Error'}, {of}" for of in ("no plan", "predicted", "measured"))
    heads = ("Plan", *errors, "FLOPs low", "Speed-up")
    yield Grid(heads, tuple(rows), next((i for i, p in enumerate(plans) if p.recommended), None))
    yield Prose("", (SHARES * bool(audit.criteria),), "muted")
    if (chosen := next((p for p in plans if p.recommended), None)) is not None:
        plan = chosen.plan
        made = "measured" if plan.measured_times else "predicted" + f" for one {plan.target}" * bool(plan.target)
        words = f"* recommended. FLOPs low: share of FLOPs in low precision. Speed-ups are {made}."
        memory = f" Predicted memory: {chosen.memory}." * bool(chosen.memory)
        yield Prose("", (words + memory,), "muted")
    yield Prose("Fails", failures(audit), listed=len(failures(audit)) > 1)
    yield Prose("Program", tuple(p.program for p in plans if p.program))


def _compiled_words(plans: Iterable[PlanView]) -> str:
    """Whether any plan ran under torch.compile, which rounds less; its errors are those of eager runs in any case."""
    compiled = any(each.plan.timed is not None and each.plan.timed.compiled is not None for each in plans)
    if compiled:
        return "Errors were measured in eager mode; under torch.compile, plans ran for their times alone."
    return "Errors are those of eager runs, not of torch.compile."


def failures(audit: Audit) -> tuple[str, ...]:
    """Lines on runs without a plan that failed: formats and strategies, and the message with operation and source line.
    Messages that differ only in the name of the dtype share a line."""
    dtypes = "|".join(filter(None, (FORMATS[fmt].storage for fmt in audit.formats)))
    alike = dict[str, dict[str, str]]()  # {message without dtypes: {name of a run: its message}}
    for name, ran in audit.baselines.items():
        if ran.failure:
            alike.setdefault(re.sub(rf"\b({dtypes})\b", "", ran.failure), {})[name] = ran.failure
    return tuple(
        f"{_runs_in_words(messages)}, without a plan: {next(iter(messages.values()))}" for messages in alike.values()
    )


def _runs_in_words(names: Iterable[str]) -> str:
    """Formats and strategies of runs: `FP16 and BF16 under autocast and with cast weights`."""
    formats = dict[str, list[str]]()
    for strategy, _, fmt in (name.partition("_") for name in names):
        formats.setdefault(strategy_of(strategy).title, []).append(label(fmt))
    titles = dict[str, list[str]]()
    for title, several in formats.items():
        titles.setdefault(" and ".join(several), []).append(title)
    return ", and ".join(f"{several} {' and '.join(each)}" for several, each in titles.items())


def _plan_folds(audit: Audit, plans: tuple[PlanView, ...]) -> Iterator[Fold]:
    """Each plan with its FP32 islands, reasons, and the figures that the tables of plans and times omit."""
    for p in plans:
        facts = [("Criterion", line) for line in p.criteria]
        if p.idle and p.plan.reach is not None:
            facts.insert(0, (f"Smallest reachable {'share' if audit.criteria else 'error'}", ratio(p.plan.reach)))
        if p.score:
            facts.append(("Your score", p.score))
        if p.memory:
            facts.append(("Predicted memory", p.memory))
        kept = f", keeps {kept_apart(p.plan)} in FP32" if p.islands else ""
        failed = f"Without the plan, the model fails: {why}" if (why := p.baseline and p.baseline.failure) else ""
        texts = dict.fromkeys((p.detail, gpu_only_words(p.plan), p.plan.note, failed))
        notes = tuple(sentence(text) for text in texts if text)
        what = "operation" if p.plan.program is not None else "module"
        rest = f"Every {'other ' if p.islands else ''}{what} is set to {label(p.plan.format)}.{_exceptions(p.plan)}"
        yield Fold(
            f"{p.title}: {p.verdict}{kept}",
            (
                Grid(("Figure", "Value"), tuple(facts), texts=2),
                Prose("", notes, "muted"),
                Prose("Kept in FP32", shorten(p.islands, ISLANDS_SHOWN), listed=True),
                Prose("", (f"No {what} runs in low precision." if p.idle else rest,), "muted"),
            ),
        )


def program_line(plan: Plan) -> str:
    """A plan's program: file, operations in low precision, casts, and accepted batch sizes; "" for other plans."""
    program = plan.program
    if program is None:
        return ""
    low = f"{program.low:,} of {count(program.operations, 'operation')} in {label(plan.format)}, {count(program.casts, 'cast')}"
    batch = "for any batch size" if program.fixed is None else f"only for the audited batch size, since {program.fixed}"
    return f"{program.file}: {low}, {batch}{_onnx(plan, program.onnx) if program.onnx else ''}"


def _onnx(plan: Plan, onnx: Onnx) -> str:
    """A plan's ONNX file and errors: predicted, of the program, and in onnxruntime with and without GPU rounding."""
    if not onnx.file:
        return f". {sentence(onnx.failure or '')}"
    low = label(plan.format)
    ends = "FP32" if onnx.ends == "fp32" else low
    words = f". {onnx.file} has {onnx.high:,} of {count(onnx.nodes, 'node')} in FP32; its inputs and outputs are {ends}"
    if onnx.error is None:
        words += f". No error of the file itself was measured: {onnx.failure}"
    if onnx.note:
        words += f". {sentence(onnx.note)}"
    has_joint_error = plan.verification is not None and plan.verification.joint is not None
    errors = {
        "predicted": None if has_joint_error else plan.predicted_error,
        f"of {plan.program.file if plan.program else ''}": onnx.program_error,
        f"in {onnx.runtime}, which uses FP32 for operations without a {low} kernel": onnx.error,
        f"in onnxruntime with every {low} value rounded as on a GPU": onnx.rounded_error,
    }
    measured = [f"{ratio(error)} {where}" for where, error in errors.items() if error is not None]
    if measured:
        words += f". Relative L2 error: {'; '.join(measured)}"
    return words


def criteria_lines(plan: Plan, baseline: Verification | None) -> tuple[str, ...]:
    """A line for each criterion of a plan: exceeded limits first, then by the used share of the limit."""
    ran = plan.verification
    values = ran.criteria if ran is not None and not ran.failure else ()
    nearest = max(values, key=lambda one: one.share or 0.0) if len(values) > 1 else None
    without_plan = dict[tuple[str, str], CriterionValue]()
    if baseline and not baseline.failure:
        without_plan = {(one.output, one.kind): one for one in baseline.criteria}
    lines = []
    for one in sorted(values, key=lambda one: (one.holds, -(one.share or 0.0))):
        line = limit_line(one)
        if one is nearest and one.share and one.holds:
            line = f"Nearest to its limit: {line}"
        was = without_plan.get((one.output, one.kind), one)
        if was.value != one.value:
            line += f"; without the plan it is {shown_value(was)}"
        lines.append(line)
    return tuple(lines)


def limit_line(one: CriterionValue) -> str:
    """A criterion's value and limit: `top1 of logits is 1, at least 0.99 is required`."""
    needs = f"at most {one.limit:.12g} is allowed" if one.sign == "<=" else f"at least {one.limit:.12g} is required"
    value = shown_value(one)
    flipped = flipped_words(one)
    if flipped:
        value += f" ({flipped})"
    if one.predicted is not None:
        value += f" ({one.predicted:.3g} predicted)"
    line = f"{one.kind} of {one.output} is {value}, {needs}"
    return line if one.holds else f"{line}: limit exceeded"


def shown_value(one: CriterionValue) -> str:
    """A criterion's value, with enough digits to show whether it is above, at or below the limit, 0 and 1."""
    if one.value is None:
        return "not finite" if one.share is None else "missing (no such output)"
    for digits in range(3, 17):
        text = f"{one.value:.{digits}g}"
        near = float(text)
        same = [(near < mark, near > mark) == (one.value < mark, one.value > mark) for mark in (one.limit, 0.0, 1.0)]
        if all(same):
            return text
    return repr(one.value)


def proposal_words(offer: Proposal) -> str:
    """A default or suggested criterion in words, with the option that sets the limit."""
    if offer.holds:
        measure, _, limit = offer.criterion.partition(" <= ")
        if measure.endswith(": rel_l2"):
            default = f"By default {offer.output} may have a relative error of {limit}, since {offer.because}."
            return f"{default} To allow another one: --criterion '{measure} <= X'"
        allowing = f"{measure} <= X"
        allowed = "no entry" if float(limit) == 0 else f"at most a share of {limit} of the entries"
        default = f"By default {allowed} of {offer.output} may differ from FP32, since {offer.because}."
        return f"{default} To allow a share X of the entries to differ: --criterion '{allowing}'"
    return f"Output {offer.output!r}: {offer.because}. To set a limit: --criterion '{offer.criterion}'"


MOST_CRITERIA = 4
"""Maximum number of suggested criteria with a command to copy."""


def criterion_commands(audit: Audit) -> list[Code]:
    """The command of the audit with each suggested criterion, to copy."""
    suggested = [offer for offer in audit.proposals if not offer.holds]
    return [
        Code(f"Audit again with a limit for {offer.output!r}", _with_criterion(audit.command, offer.criterion))
        for offer in suggested[:MOST_CRITERIA]
    ]


def _with_criterion(command: str, criterion: str) -> str:
    """A command line, or a call of `auditor.audit`, with one more criterion."""
    if command.endswith(")"):
        return f"{command[:-1]}, criteria={criterion!r})"
    return f"{command} --criterion {shlex.quote(criterion)}"


def score_headline(audit: Audit) -> str:
    """The user's scoring function and the FP32 model's score; "" without a scoring function."""
    base = audit.evaluation
    if base is None:
        return ""
    of_what = list[str]()
    mean = ""
    if base.samples and base.samples > 1:
        mean = f"the mean of {count(base.samples, 'number')}"
    if base.of_mean:
        of_what.append(f"{base.of_mean} of {mean or 'the number'}")
    elif mean:
        of_what.append(mean)
    of_what.append(f"{count(base.calls, 'call')} of the model")

    allowed = "any score is allowed"
    if base.max_drop is not None:
        worse = f"at most {base.max_drop:g} worse" if base.max_drop else "no worse"
        allowed = f"a plan's score may be {worse} than FP32's"
    sentences = [f"{base.function} gives {base.score:.5g} for the FP32 model ({', '.join(of_what)})."]
    runs = sum(plan.score is not None for plan in audit.plans.values())
    if runs:
        sentences.append(f"The function was also called under {count(runs, 'plan')}.")
    sentences.append(f"{base.better.capitalize()} is better; {allowed}.")
    return " ".join(sentences)


def score_words(base: Evaluation | None, score: Score | None) -> str:
    """The score under a plan, in words; "" without a score."""
    if base is None or score is None:
        return ""
    if score.failure is not None:
        return f"no score: {score.failure}"
    assert score.value is not None and score.difference is not None
    drop = -score.difference if base.better == "higher" else score.difference
    drop += 0.0  # no negative zero
    error = "" if score.standard_error is None else f" (standard error {score.standard_error:.2g})"
    change = f"{abs(drop):.3g} {'worse' if drop > 0 else 'better'}{error}" if drop else f"as in FP32{error}"
    value_in_words = f"{score.value:.5g}, {change}"
    if score.passed is None or base.max_drop is None:
        return value_in_words
    near = score.standard_error is not None and abs(drop - base.max_drop) < NEAR * score.standard_error
    doubt = "; so close to the limit that other samples may give another result" if near else ""
    verdict = "passes" if score.passed else f"fails, since at most {base.max_drop:g} is allowed"
    return f"{value_in_words}; {verdict}{doubt}"


def advice(audit: Audit) -> str:
    """Advice for an audit whose plans are rejected only for their score, or since they cannot generate."""
    scores = [plan.score for plan in audit.plans.values() if plan.score is not None]
    if any(score.passed is False and not score.failure for score in scores):
        return "Allow a larger drop with --max-drop, or ask for smaller errors with --max-error."
    failed = "The function returns no score" if scores else "Generation fails"
    return f"{failed} under these plans; the reasons are listed with the plans."


def _exceptions(plan: Plan) -> str:
    """A sentence on operations of low-precision modules that run in FP32; "" if the plan has no such operations."""
    if not any(reason.operations and not reason.functions and reason.kind != "not-floating" for reason in plan.reasons):
        return ""
    if strategy_of(plan.strategy).regional:
        return " In these modules, autocast runs some operations in FP32 all the same: those on its FP32 list, and those that read FP32 values and are neither matrix products nor convolutions."
    return " In these modules, operations that read FP32 values run in FP32 all the same."


def times(audit: Audit) -> tuple[str, ...]:
    """The timing method, then a line for each way to run the model; empty without measurements."""
    timing = audit.timing
    if timing is None:
        return ()
    where = f"this CPU, on {count(timing.threads, 'thread')}" if timing.device == CPU else timing.device
    batch = "" if timing.batch is None else f", {count(timing.batch, 'entry', 'entries')} in the batch"
    goes = "predicted times, since a CPU's times do not carry over to a GPU"
    if any(plan.timed and plan.timed.decides for plan in audit.plans.values()):
        goes = "the first time in each line"
    rows = [("FP32", timing.fp32), (today_title(audit), timing.fp32_today)]
    rows += [(plan_title(plan), plan.timed) for plan in audit.plans.values()]
    how = f"Time of one forward pass on {where}{batch}: median (quartiles), and the speed-up over FP32. The recommendation is based on {goes}."
    return how, *(f"{title}: {_time_words(timed)}" for title, timed in rows if timed)


def today_title(audit: Audit) -> str:
    """The label for FP32 under the user's flags: `FP32 under your own flags (TF32)`."""
    title = "FP32 under your own flags"
    today = audit.fp32_today
    if today is None or not today.computed_in:
        return title
    formats = ", ".join(name.upper() for name in today.computed_in)
    return f"{title} ({formats})"


def _in_words(taken: Times) -> str:
    """Median, quartiles and speed-up: `1.2 ms (1.1 to 1.4), 1.72x`."""
    size, unit = next(((size, unit) for size, unit in UNITS if taken.median >= size), UNITS[-1])
    low, median, high = (
        f"{t / size:.3g}" if t / size < 999.5 else f"{t / size:.0f}" for t in (taken.low, taken.median, taken.high)
    )
    words = f"{median} {unit} ({low} to {high})"
    if taken.speedup is None or taken.speedup_low is None or taken.speedup_high is None:
        return words
    same = ", not measurably different from FP32" if taken.speedup_low <= 1 <= taken.speedup_high else ""
    return f"{words}, {taken.speedup:.2f}x{same}"


def _time_words(timed: TimeAndMemory) -> str:
    """Times and memory; for each value that was not measured, the reason."""
    ways = (("", timed.eager), ("compiled ", timed.compiled), ("as a CUDA graph ", timed.cuda_graph))
    words = [f"{name}{_in_words(took)}" for name, took in ways if took is not None]
    if timed.memory is not None:
        words.append(f"peak memory {in_bytes(timed.memory)}")
    names = {"eager": "time", "compiled": "compiled time", "cuda_graph": "time as a CUDA graph"}
    return "; ".join([*words, *(f"{names.get(name, name)} not measured: {why}" for name, why in timed.missing.items())])


def more_ways(audit: Audit) -> list[Block]:
    """Code for another plan, and for the recommended plan in other tools."""
    tools = for_tools(audit) if audit.plans else {}
    return [*snippets(audit)[2:], *(Fold(TOOLS[key].title, (Code("", text),)) for key, text in tools.items())]


def snippets(audit: Audit) -> tuple[Code, ...]:
    """Code that applies the recommended plan, or another plan; empty if no plan is recommended."""
    plan = audit.plans.get(audit.recommended or "")
    if plan is None:
        return ()
    about = f"# {plan.name}, the recommended plan\n"
    if plan.program is not None:
        load = f"import torch\n\n{about}program = torch.export.load({plan.program.file!r}).module()\n"
        return (Code("Run the program", load),)
    others = (name for name, other in audit.plans.items() if name != plan.name and other.program is None)
    chosen = f"name = {next(others, plan.name)!r}\nmodel = auditor.apply(model, plan, name)\n"
    return (
        Code("Build the patched model", f"import patched_model\n\n{about}model = patched_model.build()\n"),
        Code("Patch a model you already have", "import patched_model\n\nmodel = patched_model.apply(model)\n"),
        Code("Choose another plan", f'import auditor\n\nplan = auditor.load_plan("plan.json")\n{chosen}'),
    )


def quantized_title(plan: QuantizedPlan) -> str:
    """A plan's display name: `FP8 plan`."""
    return "mixed plan" if plan.name == MIXED else f"{label(plan.name)} plan"


def plans_shown(audit: Audit) -> list[QuantizedPlan]:
    """The plans that no other plan dominates, the best one first."""
    return sorted((plan for plan in audit.quantized_plans if not plan.dominated_by), key=lambda plan: plan.rank)
