"""The verb `audit`, which may be omitted: loads the model, audits it, writes the files and prints the result."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ..asked import OPTIONS, Command, with_rules
from ..document.places import default_directory
from ..progress.shown import Display
from ..records import folder
from ..records.audit import FILES
from ..report.words import count, printable
from .program import Verb, say
from .verbs import Target, severe

if TYPE_CHECKING:
    from ..records import Batch, Subject
    from ..records.audit import Audit


class AuditTarget(Verb):
    """Report which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, and why. The word `audit`
    may be left out: `python -m auditor TARGET`."""

    configurable = True
    takes = ("target", *(name for name, option in OPTIONS.items() if option.flag))
    target: Target

    def run_watched(self, progress: Display) -> int:
        """Check the settings, start the verification process, then load and audit the model. The verification process
        imports torch while the user's code loads. The memory limit applies to the audit's process after that start.

        No caller of `_ran` may reference the model. Libraries cache the exceptions of failed imports; their tracebacks
        reference the callers, and would keep the model alive.
        """
        began = time.perf_counter()
        progress("load", self.target, 0, 0)
        from ..document.read import load
        from ..loading.discover import weights_of
        from ..offload import limit_for, resident_limit
        from ..verify.artefact import standby

        known = load(self.baseline) if self.baseline else None  # before anything slow
        settings = with_rules(self).model_copy(update={"progress": progress})
        if self.onnx:
            from ..graphs.onnxfile import require

            require()
        with nullcontext() if self.dry_run else standby():
            limit = self.memory or (None if self.native else limit_for(weights_of(self.target)))
            with resident_limit(limit):
                return _ran(settings, progress, known, began)


def _ran(settings: AuditTarget, progress: Display, known: Audit | None, began: float) -> int:
    """Load the model, audit it, write the files and print the result."""
    from ..flow import run
    from ..loading import cautions, load
    from ..report.model_explorer import files as explorer_files
    from ..training.objective import load_training

    make = partial(load_training, loss=settings.loss) if settings.training else load
    subject = make(settings.target, inputs=settings.inputs, weights=settings.weights, seed=settings.seed)
    directory = settings.out or default_directory(subject)
    for warning in cautions(subject):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if settings.evaluate is not None:  # after the model is loaded: the function may be in the model's file
        from ..score import find_function

        better, most = settings.better, settings.max_drop
        scoring = find_function(settings.evaluate, settings.target, better=better, max_drop=most, seed=settings.seed)
        settings = settings.model_copy(update={"scoring": scoring})
    if settings.dry_run:
        say(describe(subject, directory, settings))
        return 0
    loaded = round(time.perf_counter() - began, 2)
    audit = run(subject, settings)
    seconds = {"load": loaded, **audit.environment.seconds}
    audit = replace(audit, environment=replace(audit.environment, seconds=seconds))
    if settings.onnx and audit.programs:
        from ..graphs.onnxfile import with_onnx

        progress("onnx", "write, check, run", 0, 0)
        audit = with_onnx(audit, settings.onnx)
    progress("write", str(directory), 0, 0)
    files = audit.save(directory)
    if settings.model_explorer:
        files += folder.write(directory / "model_explorer", explorer_files(audit))
    progress.close()
    return _answer(settings, audit, directory, files, known)


def _answer(settings: Command, audit: Audit, directory: Path, files: Sequence[Path], known: Audit | None) -> int:
    """Print the result and return the exit code: 1 for findings at or above the chosen severity, or if the user's score
    rejects every plan."""
    from ..document.compare import fresh
    from ..plan.recommend import outcome
    from ..report.blocks import Prose, to_terminal
    from ..report.kept import explain_layer
    from ..report.reporters import LINES, REPORTERS, text
    from ..report.view import next_step

    new, report = fresh(known, audit) if known else audit.findings, directory / "report.html"
    github = settings.format == "github"
    below = ""
    if settings.format == "text":
        baseline = f"Baseline {len(audit.findings) - len(new)} findings known, {len(new)} new\n" if known else ""
        step = to_terminal([Prose("Next", (next_step(audit, directory),))])
        paths = (file.relative_to(directory) for file in files if file != report)
        names = ", ".join(dict.fromkeys("quantized/" if "quantized" in path.parts else str(path) for path in paths))
        below = f"Report   {report}\nFiles    {directory}/: {names}\n{baseline}{step}"
        say(text(audit, most=LINES - below.count("\n")))
    else:
        say(REPORTERS[settings.format](replace(audit, findings=new) if github else audit))
    if github and (page := os.environ.get("GITHUB_STEP_SUMMARY")):
        with Path(page).open("a", encoding="utf-8") as summary:
            summary.write(REPORTERS["md"](audit))
    if settings.explain_layer is not None:
        say(explain_layer(audit, settings.explain_layer) + "\n")
    say(below)
    if settings.open and not webbrowser.open(report.resolve().as_uri()):
        print(f"warning: no browser could be opened; open {report} yourself", file=sys.stderr)
    if settings.fail_on != "never" and audit.recommended is None and outcome(audit.plans, audit.use) == "loses":
        return 1
    return severe(new, settings.fail_on)


def describe(subject: Subject, directory: Path, options: Command) -> str:
    """For `--dry-run`: lines that name the model, inputs, weights, plans, device and files that an audit would use."""
    numbers = sum(parameter.numel() for parameter in subject.model.parameters())
    made = f", from {subject.origin.symbol}" if subject.origin else ""
    plans = ", ".join(f"{strategy}_{fmt}" for strategy in options.strategies for fmt in options.formats)
    apart = f", except for {'; '.join(map(str, options.limits))}" if options.limits else ""
    rows = {
        "Target": subject.target,
        "Model": f"{type(subject.model).__name__} with {numbers:,} parameters{made}",
        "Inputs": f"{_inputs(subject.batches)}, from {subject.inputs_source}",
        "Held out": _inputs(subject.held_out) or "none: plans are verified on the calibration inputs",
        "Weights": subject.weights_source,
        "Plans": f"{plans}; error budget {options.max_error:g}{apart}",
    }
    if (scoring := options.scoring) is not None:
        judged = "any loss is allowed" if scoring.max_drop is None else f"at most {scoring.max_drop:g} worse than FP32"
        rows["Score"] = f"{scoring.name} on FP32 and every verified plan; {scoring.better} is better; {judged}"
    rows["Device"] = "the GPU runs the formats natively" if options.native else "the CPU emulates a GPU's arithmetic"
    rows["Files"] = f"{directory}/: {', '.join(FILES)}"
    lines = [f"{name:<9}{printable(text)}" for name, text in rows.items()]
    return "\n".join([*lines, "Nothing was measured or written: leave out --dry-run to audit."]) + "\n"


def _inputs(batches: Sequence[Batch]) -> str:
    from ..loading.inputs import shapes_of

    kinds = Counter(", ".join(shapes_of(batch)) for batch in batches)
    return "; ".join(f"{count(number, 'batch', 'batches')} of {kind}" for kind, number in kinds.items())
