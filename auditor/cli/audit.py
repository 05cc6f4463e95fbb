"""The verb `audit`, which needs no name: loads the model, runs the stages, writes the files, prints what was asked for."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterable
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from .. import config
from ..errors import AuditorError, LoadError
from ..progress.shown import reporter
from ..report.words import printable
from . import answer, guard, publish, streams, verbs

if TYPE_CHECKING:
    from ..options import Options
    from ..records import Finding, Progress, Subject
    from ..records.audit import Audit

LEVELS = ("info", "warning", "error")


def audit(args: argparse.Namespace) -> int:
    """Audit a model. Raises: AuditorError."""
    with ExitStack() as held:
        return _audited(args, _begun(args, held), held)


@dataclass(frozen=True)
class _Begun:
    """What is there before any of the user's code has run. at: when that was."""

    at: float
    progress: Progress
    known: Audit | None
    options: Options


def _begun(args: argparse.Namespace, held: ExitStack) -> _Begun:
    """Read what was asked for and import what it takes.

    No function that waits for this one may hold the model: errors that libraries keep of imports that failed hold all of
    these, and would keep the model from being deleted.
    """
    shown = held.enter_context(reporter(args.quiet or args.dry_run, guard.drawn))
    for around in (redirect_stdout(sys.stderr), warnings.catch_warnings()):
        held.enter_context(around)
    if not args.debug:
        warnings.simplefilter("ignore")
    progress, began = _told(shown), time.perf_counter()
    progress("load", args.target, 0, 0)
    known = _baseline(args.baseline)
    if args.out:
        publish.check(args.out, args.model_explorer)
    options = _options(args, progress)
    _set_aside(args, options, held)
    return _Begun(began, progress, known, options)


def _audited(args: argparse.Namespace, begun: _Begun, held: ExitStack) -> int:
    """Load the model, audit it, write the files, and once nothing else is held say what was asked for."""
    progress, known = begun.progress, begun.known
    subject, directory = _loaded(args)
    options = _with_score(args, begun.options)
    if args.dry_run:
        held.close()
        return _dry_run(options, subject, directory)
    loaded = time.perf_counter() - begun.at
    found = _timed(_run(subject, options), loaded)
    if args.onnx:
        progress("onnx", "write, check, run", 0, 0)
        found = _with_onnx(found, args.onnx)
    progress("write", str(directory), 0, 0)
    files = publish.write(found, directory, answer.extra(found, args.model_explorer))
    held.close()
    fresh = _fresh(found, known)
    if args.format == "github":
        streams.say(answer.rendered(replace(found, findings=fresh), args.format))
        answer.append_summary(found)
    else:
        streams.say(answer.rendered(found, args.format))
    if args.explain_layer is not None:
        streams.say(answer.about(found, args.explain_layer))
    if args.format == "text":
        streams.say(answer.listing(files) + "\n")
        if known is not None:
            streams.say(f"Baseline {len(found.findings) - len(fresh)} findings known, {len(fresh)} new\n")
    if args.format == "text":
        streams.say(answer.following(found, directory))
    if args.open:
        answer.show(directory / "report.html")
    return _exit_code((finding.severity for finding in fresh), args.fail_on, found)


def _with_onnx(audit: Audit, ends: str) -> Audit:
    """The audit with ONNX models, where it has programs to make them of; why it has none is among its warnings."""
    from ..graphs.onnxfile import with_onnx

    return with_onnx(audit, ends) if audit.programs else audit


def _told(shown: Progress) -> Progress:
    """Progress that is also heard by whoever watches this process."""

    def progress(stage: str, detail: str, done: int, total: int) -> None:
        guard.at(stage)
        shown(stage, detail, done, total)

    return progress


def _baseline(file: Path | None) -> Audit | None:
    """Read before the audit begins, so that a wrong path costs no time."""
    if file is None:
        return None
    from ..document.read import load

    return load(file)


def _fresh(audit: Audit, known: Audit | None) -> tuple[Finding, ...]:
    """The findings that the baseline does not hold; all of them where there is none."""
    if known is None:
        return audit.findings
    from ..document.compare import fresh

    return fresh(known, audit)


def _dry_run(options: Options, subject: Subject, directory: Path) -> int:
    from .dryrun import described

    streams.say(described(subject, directory, options))
    return 0


def _options(args: argparse.Namespace, progress: Progress) -> Options:
    """What was asked for, checked before the model is loaded; torch is first imported here."""
    from ..criteria import criteria_of
    from ..options import Options

    if args.evaluate is None and (args.max_drop is not None or args.better is not None):
        raise AuditorError("--max-drop and --better are about a score: add --evaluate, or leave them out", "bad-option")
    return Options(
        rules=tuple(verbs.rulebook(args.rules)),
        command=args.command,
        formats=args.formats,
        strategies=_strategies(args),
        max_error=args.max_error,
        criteria=criteria_of(args.criterion),
        device=args.device,
        gpu=args.gpu,
        mode=args.mode,
        objective=args.objective,
        wanted_for=args.use,
        seed=args.seed,
        timeout=args.timeout,
        quick=args.quick,
        measure_time=args.measure_time,
        memory=args.memory,
        selection=config.selection(Path.cwd()),
        progress=progress,
    )


def _set_aside(args: argparse.Namespace, options: Options, held: ExitStack) -> None:
    """Start the process that verifies, which imports what it needs while the user's code is loaded. From here on this
    process holds what it may."""
    from ..offload import limited

    if not args.dry_run:
        from ..verify.lifetime import standby

        held.enter_context(standby())
    held.enter_context(limited(options.most_resident or _automatic(args, options)))


def _automatic(args: argparse.Namespace, options: Options) -> int | None:
    """The limit of a model that would not fit into what the machine has free, where its size is known before it is made."""
    if options.native:
        return None
    from ..loading.hubs import weights_of
    from ..loading.target import parse
    from ..offload import fitting

    with suppress(LoadError):  # whoever loads it says why
        return fitting(weights_of(parse(args.target)))
    return None


def _strategies(args: argparse.Namespace) -> tuple[str, ...]:
    """Those asked for; ONNX models are made of programs.

    Raises: AuditorError(slug="bad-option" or "missing-onnx") before any work, where there would be no ONNX model.
    """
    if not args.onnx:
        return tuple(args.strategies)
    from ..artefact.strategies import GRAPHS
    from ..graphs.onnxfile import require

    if args.quick and args.strategies[0] not in GRAPHS:
        raise AuditorError(
            f"--onnx writes plans of strategy {GRAPHS[0]}, and --quick plans {args.strategies[0]} alone: leave --quick out, "
            f"or add --strategies {GRAPHS[0]}",
            slug="bad-option",
        )
    require()
    return tuple(dict.fromkeys((*args.strategies, *GRAPHS)))


def _loaded(args: argparse.Namespace) -> tuple[Subject, Path]:
    """The model, and where the files go."""
    from ..loading import cautions

    subject = _subject(args)
    directory = args.out or publish.default_directory(subject.name, subject.origin.path if subject.origin else None)
    publish.check(directory, args.model_explorer)
    guard.writes_into(directory)
    for warning in cautions(subject):
        print(f"warning: {printable(warning)}", file=sys.stderr)
    return subject, directory


def _run(subject: Subject, options: Options) -> Audit:
    from ..flow import run

    return run(subject, options)


def _timed(audit: Audit, loaded: float) -> Audit:
    """The audit with the stage that came before it."""
    seconds = {"load": round(loaded, 2), **audit.seconds}
    return replace(audit, environment=replace(audit.environment, seconds=seconds))


def _subject(args: argparse.Namespace) -> Subject:
    from ..loading import load
    from ..training.discovery import load_training

    if args.mode == "training":
        return load_training(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed, loss=args.loss)
    if args.loss:
        raise LoadError("--loss is for training: add --mode training, or leave it out", "bad-option")
    return load(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed)


def _with_score(args: argparse.Namespace, options: Options) -> Options:
    """The options with the user's own function, which is looked for once the model is there: it may be beside it."""
    if args.evaluate is None:
        return options
    from ..score import named

    scoring = named(args.evaluate, args.target, better=args.better, max_drop=args.max_drop, seed=args.seed)
    return replace(options, scoring=scoring)


def _exit_code(severities: Iterable[str], fail_on: str, audit: Audit) -> int:
    """1 for findings at or above the level, and where the user's own score leaves no plan to recommend."""
    from ..plan.recommend import outcome

    if fail_on == "never":
        return 0
    if audit.recommended is None and outcome(audit.plans, audit.use) == "loses":
        return 1
    return int(any(LEVELS.index(severity) >= LEVELS.index(fail_on) for severity in severities))
