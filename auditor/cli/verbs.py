"""The verbs beside `audit`: explain a rule, list the rules, apply a plan that was made earlier."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from contextlib import redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from ..errors import AuditorError
from . import publish

if TYPE_CHECKING:
    from ..rulebook import Rule

PROGRAM = "python -m auditor"


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and where the options are listed, instead of listing them."""

    def error(self, message: str) -> NoReturn:
        text = " ".join(message.encode("utf-8", "backslashreplace").decode("utf-8").split())
        self.exit(2, f"error: {text}\nhint: `{self.prog} --help` lists the options\n")


def parser(verb: str, description: str, epilog: str | None = None) -> argparse.ArgumentParser:
    """A parser with what every verb shares."""
    made = Parser(
        prog=PROGRAM if verb == "audit" else f"{PROGRAM} {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--debug", action="store_true", help="show tracebacks and warnings")
    return made


def seed(text: str) -> int:
    """What every random generator takes: 0 to 2**32 - 1."""
    if not text.isascii() or not text.isdecimal() or int(text[:12]) >= 2**32 or len(text) > 12:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no whole number from 0 to {2**32 - 1}")
    return int(text)


def rulebook(directory: Path | None) -> tuple[Rule, ...]:
    """The rules that ship, and the user's own beside them."""
    from ..resources import resource_dir
    from ..rulebook import load_rules

    return load_rules([resource_dir("rules"), *([directory] if directory else [])])


def explain_parser() -> argparse.ArgumentParser:
    made = parser("explain", "What a rule looks for, why that hurts, and what to do.")
    made.add_argument("code", metavar="CODE", help="a rule's code, such as SFT001")
    made.add_argument("--rules", metavar="DIR", type=Path, help="a directory of your own rules")
    return made


def explain(args: argparse.Namespace) -> int:
    """Print one rule in words. Raises: AuditorError(slug="no-rule")."""
    from ..rulebook import explain as in_words

    found = {rule.code: rule for rule in rulebook(args.rules)}
    if args.code.upper() not in found:
        raise AuditorError(f"no rule is called {args.code}: `{PROGRAM} rules` lists them", slug="no-rule")
    print(in_words(found[args.code.upper()]), end="")
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
        from ..rulebook import reference

        print(reference(found), end="")
        return 0
    if args.format == "json":
        from ..rulebook import as_data

        print(json.dumps([as_data(rule) for rule in found], indent=2))
    else:
        print("\n".join(f"{rule.code:<8} {rule.severity:<8} {rule.family:<12} {rule.name}" for rule in found))
    return 0


def apply_parser() -> argparse.ArgumentParser:
    made = parser("apply", "Write patched_model.py for TARGET, following a plan.json that an earlier audit wrote.")
    add = made.add_argument
    add("plan_file", metavar="PLAN", type=Path, help="a plan.json")
    add("target", metavar="TARGET", help="the file or module that holds the model, as for an audit")
    add("--plan", metavar="NAME", help="which of its plans, default: the recommended one")
    add("--inputs", metavar="I", help="as for an audit; the model is run once to see that it works")
    add("--weights", metavar="F", help="checkpoint, as for an audit")
    add("--out", metavar="DIR", type=Path, help="where the file goes, default audits/<name>")
    add("--seed", metavar="N", type=seed, default=0, help="default: %(default)s")
    return made


def apply(args: argparse.Namespace) -> int:
    """Write the patched model of a plan made earlier. Raises: PlanError where the plan does not fit the model."""
    from ..document.stored import patched_source, read_plans
    from ..load import load

    document, plans, chosen = read_plans(args.plan_file, args.plan)
    if args.out:
        publish.check_directory(args.out)
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not args.debug:
            warnings.simplefilter("ignore")
        subject = load(args.target, inputs=args.inputs, weights=args.weights, seed=args.seed)
        directory = args.out or publish.default_directory(subject.name)
        publish.check_directory(directory)
        text = patched_source(subject, document, plans, chosen, directory)
    file = publish.write_text(text, directory / "patched_model.py")
    islands = sum(choice.precision == "fp32" for choice in plans[chosen].scopes.values())
    print(
        f"Plan     {chosen}, {islands} scope{'s' * (islands != 1)} in FP32, not verified on this model: audit it for that"
    )
    print(f"Patched  {file}")
    return 0
