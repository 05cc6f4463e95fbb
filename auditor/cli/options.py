"""The options of an audit on the command line, with their defaults from `[tool.auditor]`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from .. import config
from ..artefact.strategies import SHIPPED, known
from ..devices import check_device
from ..errors import AuditorError
from ..numerics.formats import DEFAULT, auditable
from ..options import MODES, OBJECTIVES, check_budget, check_drop, check_names
from ..records.run import DIRECTIONS
from ..report import reporters
from ..resources import table
from ..sizes import size_of
from . import verbs

EPILOG = """\
TARGET is path/to/model.py[:symbol] or package.module[:symbol]; a symbol may take arguments: model.py:Net(width=8).
or timm:NAME, or hf:NAME_OR_PATH, where those packages are installed.
other verbs: explain CODE | explain-layer PLAN NAME | rules | apply PLAN TARGET | snippet PLAN |
  diff A B | fleet TARGETS --out DIR | completion SHELL (each with --help)
exit code: 0 clean, 1 findings at or above --fail-on or no plan within --max-drop, 2 error,
  130 interrupted
"""


def audit_parser() -> argparse.ArgumentParser:
    parser = verbs.parser(
        "audit",
        "Which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, why, and what it costs.",
        epilog=EPILOG,
    )
    add = parser.add_argument
    add("target", metavar="TARGET", help="the file or module that holds the model")
    add("--inputs", metavar="I", help="f.py:func, x.pt, x.safetensors, x.npz, or 'x:float32[1,3,224,224]'")
    add("--weights", metavar="F", help="checkpoint: .safetensors, its .index.json, or a torch file of tensors")
    add(
        "--formats",
        metavar="LIST",
        type=_listed("formats", auditable()),
        default=",".join(DEFAULT),
        help="default: %(default)s",
    )
    add(
        "--strategies",
        metavar="LIST",
        type=_listed("strategies", known()),
        default=",".join(SHIPPED),
        help="default: %(default)s",
    )
    _held(parser)
    _where(parser)
    add("--mode", choices=MODES, default="inference", help="default: %(default)s")
    _wanted(parser)
    _scored(parser)
    add("--loss", metavar="L", help="with --mode training: f.py:name, or a name in the target's file")
    add("--out", metavar="DIR", type=Path, help="where the files go, default audits/<name>")
    add("--fail-on", choices=("error", "warning", "info", "never"), default="error", help="default: %(default)s")
    add("--format", choices=reporters.names(), default="text", help="what stdout gets")
    add(
        "--baseline",
        metavar="PLAN",
        type=Path,
        help="an earlier audit, its plan.json or directory: what it found does not fail this one",
    )
    add("--explain-layer", metavar="NAME", help="also say what each plan runs this module or operation in, and why")
    add("--rules", metavar="DIR", type=Path, help="a directory of your own rules, besides those that ship")
    _further(parser)
    add("--dry-run", action="store_true", help="say what was found and would be done, then stop")
    add("--memory", metavar="SIZE", type=_size, help="what each process may hold, as 4GB: the rest waits in files")
    add("--seed", metavar="N", type=verbs.seed, default=0, help="default: %(default)s")
    verbs.add_timeout(parser)
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return parser


def _further(parser: argparse.ArgumentParser) -> None:
    """What is written beside the files of every audit, and shown."""
    add = parser.add_argument
    add(
        "--model-explorer",
        action="store_true",
        help="also write the graph and its measures for Google's Model Explorer",
    )
    add(
        "--onnx",
        nargs="?",
        const="fp32",
        choices=("fp32", "low"),
        metavar="ENDS",
        help="also plan as a graph, and write that as ONNX models; =low: inputs and outputs in the low format too",
    )
    add("--open", action="store_true", help="show the report in the browser when it is written")


def _where(parser: argparse.ArgumentParser) -> None:
    """What the audit runs on, and what it predicts times for."""
    add = parser.add_argument
    add(
        "--device",
        metavar="DEVICE",
        type=_device,
        default="auto",
        help="auto, cpu, cuda or cuda:N; default: %(default)s",
    )
    add(
        "--gpu",
        metavar="NAME",
        choices=list(table("plan/devices")),
        help="times are predicted for it: %(choices)s; default: the GPU that the audit runs on, else A100",
    )


def _held(parser: argparse.ArgumentParser) -> None:
    """What an error is, and how much of it is allowed."""
    add = parser.add_argument
    add("--max-error", metavar="X", type=_budget, default=0.01, help="relative error allowed, default %(default)s")
    add(
        "--criterion",
        metavar="'OUTPUT: KIND <= X'",
        action="append",
        default=[],
        help="what an output is held to, such as 'logits: kl <= 0.01'; may be given several times",
    )


def _wanted(parser: argparse.ArgumentParser) -> None:
    """What a plan is for, and what it is to save."""
    add = parser.add_argument
    add("--use", choices=MODES, help="what the recommended plan is for; default: the mode")
    add("--objective", choices=OBJECTIVES, default="time", help="what plans save in the budget, default %(default)s")
    add("--quick", action="store_true", help="one format, one strategy (the first of each), and no search for plans")
    add(
        "--measure-time",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="time and memory of FP32 and every plan, default on a GPU; on a CPU the CPU's own",
    )


def _scored(parser: argparse.ArgumentParser) -> None:
    """The user's own score."""
    add = parser.add_argument
    add("--evaluate", metavar="F", help="f.py:func, or a name in the target's file: func(model) -> your own score")
    add("--max-drop", metavar="X", type=_drop, help="how much worse that score may be under a plan")
    add("--better", choices=DIRECTIONS, help="which scores are better; default: what the function says, else higher")


def configured(parser: argparse.ArgumentParser) -> list[str]:
    """`[tool.auditor]` as options that come before the user's own, so that argparse checks them and the user's win."""
    actions = [action for action in parser._actions if action.option_strings and action.nargs != 0]
    options = {action.option_strings[-1].removeprefix("--").replace("-", "_") for action in actions}
    return [f"--{name.replace('_', '-')}={value}" for name, value in config.read(Path.cwd(), options).items()]


def _listed(what: str, known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    """The names in `a,b`, each once."""

    def parse(text: str) -> tuple[str, ...]:
        given = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
        with _said_by_argparse():
            check_names(what, given, known)
        return given

    return parse


def _drop(text: str) -> float:
    return _checked(text, check_drop)


def _size(text: str) -> int:
    with _said_by_argparse():
        return size_of(text)


def _device(text: str) -> str:
    with _said_by_argparse():
        check_device(text)
    return text


def _budget(text: str) -> float:
    return _checked(text, check_budget)


def _checked(text: str, check: Callable[[float], None]) -> float:
    """A number that `check` lets through."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from error
    with _said_by_argparse():
        check(value)
    return value


@contextmanager
def _said_by_argparse() -> Iterator[None]:
    """What `Options` would refuse is refused with the name of the option, before anything is loaded."""
    try:
        yield
    except AuditorError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
