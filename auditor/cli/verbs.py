"""The verbs beside `audit`: explain a rule, list the rules, apply a plan that was made earlier."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from .. import __version__, folder
from ..errors import AuditorError
from ..options import SEEDS, is_seed
from . import guard, publish, streams

if TYPE_CHECKING:
    from ..rulebook.rule import Rule

PROGRAM = "python -m auditor"
PATCHED = "patched_model.py"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed, instead of listing them."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.encode("utf-8", "backslashreplace").decode("utf-8").split()) + self._meant(message)
        self.exit(2, f"error: {text}\nhint: `{self.prog} --help` lists the options\n")

    def _meant(self, message: str) -> str:
        """What an option that there is not was meant to be."""
        words = message.removeprefix("unrecognized arguments: ").split()
        if words == message.split():
            return ""
        known = [option for action in self._actions for option in action.option_strings if option.startswith("--")]
        close = {
            word: found[0]
            for word in words
            if word.startswith("-") and (found := difflib.get_close_matches(word.partition("=")[0], known, n=1))
        }
        return f": did you mean {' and '.join(dict.fromkeys(close.values()))}?" if close else ""

    def _print_message(self, message: str, file: Any = None) -> None:
        """Help is an answer."""
        if file is sys.stdout:
            streams.say(message)
        else:
            super()._print_message(message, file)


def parser(verb: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser with what every verb shares."""
    made = Parser(
        prog=PROGRAM if verb == "audit" else f"{PROGRAM} {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument(
        "--version", action="version", version=f"auditor {__version__}", help="say which version this is, then stop"
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    return made


def seed(text: str) -> int:
    """What every random generator takes: 0 to 2**32 - 1."""
    if not text.isascii() or not text.isdecimal() or len(text) > 12 or not is_seed(int(text)):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no whole number from 0 to {SEEDS - 1}")
    return int(text)


def seconds(text: str) -> float:
    """A positive number."""
    try:
        value = float(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is not a number") from error
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no number of seconds")
    return value


def add_timeout(made: argparse.ArgumentParser) -> None:
    """The option of verbs that run the user's code."""
    made.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=seconds,
        help="give up where nothing has got on for so long; default: never",
    )


def rulebook(directory: Path | None) -> tuple[Rule, ...]:
    """The rules that ship, and the user's own beside them."""
    from ..resources import resource_dir
    from ..rulebook.load import load_rules

    return load_rules([resource_dir("rules"), *([directory] if directory else [])])


def explain_parser() -> argparse.ArgumentParser:
    made = parser("explain", "What a rule looks for, why that hurts, and what to do; or what an error is about.")
    made.add_argument(
        "code", metavar="CODE", help="a rule's code, such as SFT001, or the name of an error, such as bad-plan"
    )
    made.add_argument("--rules", metavar="DIR", type=Path, help="a directory of your own rules")
    return made


def explain(args: argparse.Namespace) -> int:
    """Print one rule, or one error, in words. Raises: AuditorError(slug="no-rule")."""
    from ..resources import errors
    from ..rulebook.explain import explain as in_words

    if (slug := args.code.lower()) in errors():
        streams.say(f"{slug}\n\n{errors()[slug]}\n")
        return 0
    found = {rule.code: rule for rule in rulebook(args.rules)}
    if args.code.upper() not in found:
        close = difflib.get_close_matches(args.code.lower(), [*map(str.lower, found), *errors()], n=1)
        named = next((code for code in found if [code.lower()] == close), *close) if close else ""
        hint = f"did you mean {named}?" if named else f"`{PROGRAM} rules` lists the rules"
        raise AuditorError(f"no rule and no error is called {args.code}: {hint}", slug="no-rule")
    streams.say(in_words(found[args.code.upper()]))
    return 0


def rules_parser() -> argparse.ArgumentParser:
    made = parser("rules", "Every rule, one per line, or as one Markdown document.")
    made.add_argument("--format", choices=("text", "json", "md"), default="text", help="default: %(default)s")
    made.add_argument("--rules", metavar="DIR", type=Path, help="a directory of your own rules")
    return made


def rules(args: argparse.Namespace) -> int:
    """Print the table of rules, or everything about them."""
    found = rulebook(args.rules)
    if args.format == "md":
        from ..rulebook.explain import reference

        streams.say(reference(found))
        return 0
    if args.format == "json":
        from ..rulebook.explain import as_data

        streams.say(json.dumps([as_data(rule) for rule in found], indent=2) + "\n")
    else:
        streams.say("".join(f"{rule.code:<8} {rule.severity:<8} {rule.family:<12} {rule.name}\n" for rule in found))
    return 0


def apply_parser() -> argparse.ArgumentParser:
    made = parser("apply", "Write patched_model.py for TARGET, following a plan.json that an earlier audit wrote.")
    add = made.add_argument
    add("plan_file", metavar="PLAN", type=Path, help="a plan.json, or the directory of an audit")
    add("target", metavar="TARGET", help="the file or module that holds the model, as for an audit")
    add("--plan", metavar="NAME", help="which of its plans, default: the recommended one")
    add("--inputs", metavar="I", help="as for an audit; the model is run once to see that it works")
    add("--weights", metavar="F", help="checkpoint, as for an audit")
    add("--out", metavar="DIR", type=Path, help="where the file goes, default audits/<name>")
    add_timeout(made)
    add("--seed", metavar="N", type=seed, default=0, help="default: %(default)s")
    return made


def apply(args: argparse.Namespace) -> int:
    """Write the patched model of a plan made earlier. Raises: PlanError where the plan does not fit the model, and
    LoadError where a fresh process cannot build it."""
    from ..document.live import check_artefact, patched_source, read_plans
    from ..loading import load
    from ..report.words import count

    audit, plans, chosen = read_plans(args.plan_file, args.plan)
    if args.out:
        folder.check_directory(args.out, (PATCHED,))
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not args.debug:
            warnings.simplefilter("ignore")
        subject = load(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed)
        directory = args.out or publish.default_directory(subject.name, subject.origin.path if subject.origin else None)
        folder.check_directory(directory, (PATCHED,))
        guard.writes_into(directory)
        guard.at("apply")
        text = patched_source(subject, audit, plans, chosen, directory)
        check_artefact(subject, plans, chosen, args.seed)
    (file,) = folder.write(directory, {PATCHED: text})
    islands = sum(choice.precision == "fp32" for choice in plans[chosen].scopes.values())
    functions = len(plans[chosen].exceptions)
    kept = [count(islands, "scope")] if islands or not functions else []
    kept += [count(functions, "function")] if functions else []
    streams.say(
        f"Plan     {chosen}, {' and '.join(kept)} in FP32, not verified on this model: audit it for that\n"
        f"Patched  {file}\n"
    )
    return 0
