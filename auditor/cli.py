"""The command line: reads options, calls the stages, prints what they return."""

from __future__ import annotations

import argparse
import math
import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from . import config
from .commands import answer, completion, diff, publish, verbs
from .commands.progress import reporter
from .commands.verbs import PROGRAM
from .errors import AuditorError, LoadError
from .snippets import verb
from .tables import table

if TYPE_CHECKING:
    from .readback import Record
    from .records import Finding, Subject
    from .result import Audit

LEVELS = ("info", "warning", "error")
EPILOG = """\
TARGET is path/to/model.py[:symbol] or package.module[:symbol]; a symbol may take arguments: model.py:Net(width=8).
or timm:NAME, or hf:NAME_OR_PATH, where those packages are installed.
other verbs: explain CODE | rules | apply PLAN TARGET | snippet PLAN | diff A B | completion SHELL (each with --help)
exit code: 0 clean, 1 findings at or above --fail-on, 2 error
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 clean, 1 findings, 2 error, 130 interrupted."""
    words = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (words[0], words[1:]) if words and words[0] in VERBS else ("audit", words)
    debug = "--debug" in words
    try:
        make_parser, run = VERBS[verb]
        parser = make_parser()
        args = parser.parse_args((_configured(parser) if verb == "audit" else []) + rest)
        args.command = f"{PROGRAM} {shlex.join(words)}"
        return int(run(args))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except AuditorError as error:
        return _failed(str(error), f"docs/errors.md#{error.slug} explains this", debug)
    except Exception as error:  # whatever else breaks is ours to fix, and the user still gets one clear line
        text = str(error).strip().split("\n")[0]
        return _failed(f"internal error, {type(error).__name__}: {text}", "please report it with --debug", debug)


def _failed(message: str, hint: str, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    print(f"error: {' '.join(message.split())}\nhint: {hint}", file=sys.stderr)
    return 2


def _audit_parser() -> argparse.ArgumentParser:
    parser = verbs.parser(
        "audit",
        "Which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, why, and what it costs.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the file or module that holds the model")
    add("--inputs", metavar="I", help="f.py:func, x.pt, x.safetensors, x.npz, or 'x:float32[1,3,224,224]'")
    add("--weights", metavar="F", help="checkpoint: .safetensors, its .index.json, or a torch file of tensors")
    add("--formats", metavar="LIST", type=_choices("fp16", "bf16"), default="fp16,bf16", help="default: %(default)s")
    add(
        "--strategies",
        metavar="LIST",
        type=_choices("autocast", "cast"),
        default="autocast,cast",
        help="default: %(default)s",
    )
    add("--max-error", metavar="X", type=_budget, default=0.01, help="relative error allowed, default %(default)s")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    add(
        "--target",
        dest="gpu",
        metavar="GPU",
        choices=list(table("devices")),
        default="A100",
        help="times are predicted for it: %(choices)s; default %(default)s",
    )
    add("--mode", choices=("inference", "training"), default="inference", help="default: %(default)s")
    add("--loss", metavar="L", help="with --mode training: f.py:name, or a name in the target's file")
    add("--out", metavar="DIR", type=Path, help="where the files go, default audits/<name>")
    add("--fail-on", choices=("error", "warning", "info", "never"), default="error", help="default: %(default)s")
    add("--format", choices=("text", "json", "sarif", "github", "md"), default="text", help="what stdout gets")
    add(
        "--baseline",
        metavar="PLAN",
        type=Path,
        help="plan.json of an earlier audit: what it found does not fail this one",
    )
    add("--rules", metavar="DIR", type=Path, help="a directory of your own rules, besides those that ship")
    add(
        "--model-explorer",
        action="store_true",
        help="also write the graph and its measures for Google's Model Explorer",
    )
    add("--dry-run", action="store_true", help="say what was found and would be done, then stop")
    add("--seed", metavar="N", type=verbs.seed, default=0, help="default: %(default)s")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def _configured(parser: argparse.ArgumentParser) -> list[str]:
    """`[tool.auditor]` as options that come before the user's own, so that argparse checks them and the user's win."""
    actions = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    options = {action.option_strings[-1].removeprefix("--").replace("-", "_") for action in actions}
    return [f"--{name.replace('_', '-')}={value}" for name, value in config.read(Path.cwd(), options).items()]


def _audit(args: argparse.Namespace) -> int:
    with reporter(args.quiet or args.dry_run) as progress, redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not args.debug:
            warnings.simplefilter("ignore")
        progress("load", args.target, 0, 0)
        known = _baseline(args.baseline)
        subject, directory = _loaded(args)
        if not args.dry_run:
            audit = _run(args, subject, progress)
            progress("write", str(directory), 0, 0)
            files = publish.write(audit, directory, answer.extra(audit, args.model_explorer))
    if args.dry_run:
        return _dry_run(args, subject, directory)
    fresh = _fresh(audit, known)
    if args.format == "github":
        print(answer.rendered(replace(audit, findings=fresh), args.format), end="")
        answer.append_summary(audit)
    else:
        print(answer.rendered(audit, args.format), end="")
    if args.format == "text":
        print(answer.listing(files))
        if known is not None:
            print(f"Baseline {len(audit.findings) - len(fresh)} findings known, {len(fresh)} new")
    return _exit_code((finding.severity for finding in fresh), args.fail_on)


def _baseline(file: Path | None) -> Record | None:
    """Read before the audit begins, so that a wrong path costs no time."""
    if file is None:
        return None
    from .readback import read

    return read(file)


def _fresh(audit: Audit, known: Record | None) -> tuple[Finding, ...]:
    """The findings that the baseline does not hold; all of them where there is none."""
    if known is None:
        return audit.findings
    from .compare import fresh

    return fresh(known.findings, audit.findings)


def _dry_run(args: argparse.Namespace, subject: Subject, directory: Path) -> int:
    import torch

    from .commands.dryrun import described

    cuda = args.device == "cuda" or (args.device == "auto" and torch.cuda.is_available())
    options = {"formats": args.formats, "strategies": args.strategies, "max_error": args.max_error}
    print(described(subject, directory, cuda=cuda, **options), end="")
    return 0


def _loaded(args: argparse.Namespace) -> tuple[Subject, Path]:
    """The model, and where the files go; torch is first imported here."""
    if args.out:
        publish.check_directory(args.out)
    _require_device(args.device)
    subject = _subject(args)
    directory = args.out or publish.default_directory(subject.name)
    publish.check_directory(directory)
    for warning in subject.warnings:
        print(f"warning: {warning}", file=sys.stderr)
    return subject, directory


def _run(args: argparse.Namespace, subject: Subject, progress: Callable[[str, str, int, int], None]) -> Audit:
    from .pipeline import run

    return run(
        subject,
        formats=args.formats,
        max_error=args.max_error,
        device=args.device,
        strategies=args.strategies,
        mode=args.mode,
        rules=verbs.rulebook(args.rules),
        selection=config.selection(Path.cwd()),
        seed=args.seed,
        progress=progress,
        target=args.gpu,
        command=args.command,
    )


def _subject(args: argparse.Namespace) -> Subject:
    from .load import load
    from .training.discovery import load_training

    if args.mode == "training":
        return load_training(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed, loss=args.loss)
    if args.loss:
        raise LoadError("--loss is for training: add --mode training, or leave it out", "bad-option")
    return load(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed)


def _require_device(device: str) -> None:
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise LoadError(
            "--device cuda was asked for, but torch sees no CUDA device: use --device cpu or auto", "no-cuda"
        )


def _exit_code(severities: Iterable[str], fail_on: str) -> int:
    if fail_on == "never":
        return 0
    return int(any(LEVELS.index(severity) >= LEVELS.index(fail_on) for severity in severities))


def _complete(args: argparse.Namespace) -> int:
    print(completion.script(args.shell, {name: make for name, (make, _) in VERBS.items()}), end="")
    return 0


def _choices(*known: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        if not names or set(names) - set(known):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of {', '.join(known)}")
        return names

    return parse


def _budget(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


VERBS: dict[str, tuple[Callable[[], argparse.ArgumentParser], Callable[[argparse.Namespace], int]]] = {
    "audit": (_audit_parser, _audit),
    "explain": (verbs.explain_parser, verbs.explain),
    "rules": (verbs.rules_parser, verbs.rules),
    "apply": (verbs.apply_parser, verbs.apply),
    "snippet": (verb.snippet_parser, verb.snippet),
    "diff": (diff.diff_parser, diff.diff),
    "completion": (completion.completion_parser, _complete),
}
