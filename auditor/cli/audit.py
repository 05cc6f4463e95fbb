"""The verb `audit`. Importing this file imports torch."""

from __future__ import annotations

import os
import sys
import time
import webbrowser
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

from .. import flow, offload, reporters, results
from ..command.output import say
from ..command.verb import WithTarget, severe
from ..document import compare, read
from ..features import part
from ..loading import cautions, load
from ..loading.doors import weights_of
from ..numerics.devices import is_gpu
from ..plan.recommend import outcome
from ..progress.shown import Display
from ..records import Audit, folder
from ..report import kept, model_explorer, view
from ..report.words import printable
from ..score import find_function
from ..verify import artefact
from .pipeline import audit_pipeline


def audit(settings: WithTarget, progress: Display) -> int:
    """Check the settings, start the verification process, then load and audit the model, or every component of a
    pipeline. The verification process imports torch while the user's code loads. The memory limit applies to the
    audit's process after that start.

    No caller of `_ran` may reference the model. Libraries cache the exceptions of failed imports; their tracebacks
    reference the callers, and would keep the model alive.
    """
    settings.rulebook  # noqa: B018 - rejects invalid rules
    code = audit_pipeline(settings, lambda part: _audit_one(part, progress))
    return _audit_one(settings, progress) if code is None else code


def _audit_one(settings: WithTarget, progress: Display) -> int:
    known = read.load(settings.baseline) if settings.baseline else None  # before anything slow
    settings = settings.model_copy(update={"progress": progress})
    if settings.onnx:
        part("onnxfile").require()
    with nullcontext() if settings.dry_run else artefact.standby():
        limit = settings.memory or (None if is_gpu(settings.where) else offload.limit_for(weights_of(settings.target)))
        with offload.resident_limit(limit):
            return _ran(settings, progress, known)


def _ran(settings: WithTarget, progress: Display, known: Audit | None) -> int:
    """Load the model, audit it, write the files and print the result."""
    make = load
    if settings.training:
        make = partial(part("objective").load_training, loss=settings.loss)
    subject = make(settings.target, inputs=settings.inputs, weights=settings.weights, seed=settings.seed)
    directory = settings.out or read.default_directory(subject, writes=not settings.dry_run)
    for warning in cautions(subject):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    if settings.evaluate is not None:  # after the model is loaded: the function may be in the model's file
        better, most = settings.better, settings.max_drop
        scoring = find_function(settings.evaluate, settings.target, better=better, max_drop=most, seed=settings.seed)
        settings = settings.model_copy(update={"scoring": scoring})
    if settings.dry_run:
        say(view.dry_run(subject, settings, directory))
        return 0
    seconds = {"load": round(time.monotonic() - progress.began, 2)}
    audit = flow.run(subject, settings)
    audit = replace(audit, environment=replace(audit.environment, seconds={**seconds, **audit.environment.seconds}))
    if settings.onnx and audit.programs:
        progress("onnx", "write, check, run", 0, 0)
        audit = part("onnxfile").with_onnx(audit, settings.onnx)
    progress("write", str(directory), 0, 0)
    files = results.Audit.of(audit).save(directory)
    if settings.model_explorer:
        files += folder.write(directory / "model_explorer", model_explorer.files(audit))
    progress.close()
    return _answer(settings, audit, directory, files, known)


def _answer(settings: WithTarget, audit: Audit, directory: Path, files: Sequence[Path], known: Audit | None) -> int:
    """Print the result and return the exit code: 1 for findings at or above the chosen severity, or if the user's score
    rejects every plan."""
    new = compare.fresh(known, audit) if known else audit.findings
    report = directory / "report.html"
    below = ""
    if settings.format == "text":
        below = reporters.below(audit, directory, files, len(new) if known else None)
        say(reporters.text(audit, most=reporters.LINES - below.count("\n")))
    elif settings.format == "github":
        say(reporters.REPORTERS["github"](replace(audit, findings=new)))
        page = os.environ.get("GITHUB_STEP_SUMMARY")
        if page:
            with Path(page).open("a", encoding="utf-8") as summary:
                summary.write(reporters.REPORTERS["md"](audit))
    else:
        say(reporters.REPORTERS[settings.format](audit))
    if settings.explain_layer is not None:
        say(kept.explain_layer(audit, settings.explain_layer) + "\n")
    say(below)
    if settings.open and not webbrowser.open(report.resolve().as_uri()):
        print(f"warning: no browser could be opened; open {report} yourself", file=sys.stderr)
    if settings.fail_on != "never" and audit.recommended is None and outcome(audit.plans, audit.use) == "loses":
        return 1
    return severe(new, settings.fail_on)
