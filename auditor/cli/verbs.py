"""The verbs beside `audit` and `fleet`: what rules, errors, plans and audits that there are have to say."""

from __future__ import annotations

import argparse
import difflib
import json
import sys
import warnings
from collections.abc import Iterable
from contextlib import redirect_stdout
from typing import TYPE_CHECKING, Any

from .. import folder
from ..asked import LEVELS, Command, asked, rules_of
from ..errors import AuditorError
from ..progress.shown import Shown
from . import publish
from .program import PROGRAM, say, watched

if TYPE_CHECKING:
    from ..document.compare import Comparison
    from ..processes import Told
    from ..records import Finding

PATCHED = "patched_model.py"


def explain(args: argparse.Namespace) -> int:
    """Print one rule, or one error, in words. Raises: AuditorError(slug="no-rule")."""
    from ..resources import errors
    from ..rulebook.explain import explain as in_words

    if (slug := args.code.lower()) in errors():
        say(f"{slug}\n\n{errors()[slug]}\n")
        return 0
    found = {rule.code: rule for rule in rules_of(asked(vars(args), configurable=False).rules)}
    if args.code.upper() not in found:
        close = difflib.get_close_matches(args.code.lower(), [*map(str.lower, found), *errors()], n=1)
        named = next((code for code in found if [code.lower()] == close), *close) if close else ""
        hint = f"did you mean {named}?" if named else f"`{PROGRAM} rules` lists the rules"
        raise AuditorError(f"no rule and no error is called {args.code}: {hint}", slug="no-rule")
    say(in_words(found[args.code.upper()]))
    return 0


def rules(args: argparse.Namespace) -> int:
    """Print the table of rules, or everything about them."""
    from ..rulebook.explain import as_data, reference

    found = rules_of(asked(vars(args), configurable=False).rules)
    if args.format == "md":
        say(reference(found))
    elif args.format == "json":
        say(json.dumps([as_data(rule) for rule in found], indent=2) + "\n")
    else:
        say("".join(f"{rule.code:<8} {rule.severity:<8} {rule.family:<12} {rule.name}\n" for rule in found))
    return 0


def apply(args: argparse.Namespace) -> int:
    """Write the patched model of a plan made earlier. Raises: PlanError where the plan does not fit the model, and
    LoadError where a fresh process cannot build it."""
    settings = asked(vars(args), configurable=False)
    return watched(
        lambda progress: _applied(args, settings, progress), Shown(), settings.timeout, settings.debug, args.alone
    )


def _applied(args: argparse.Namespace, settings: Command, progress: Told | Shown) -> int:
    from ..document.live import check_artefact, patched_source, read_plans
    from ..loading import load
    from ..report.words import count

    progress("apply", args.target, 0, 0)
    audit, plans, chosen = read_plans(args.plan_file, args.plan)
    if settings.out:
        folder.check_directory(settings.out, (PATCHED,))
    with redirect_stdout(sys.stderr), warnings.catch_warnings():
        if not settings.debug:
            warnings.simplefilter("ignore")
        subject = load(args.target, inputs=settings.inputs, weights=settings.weights, seed=settings.seed)
        directory = settings.out or publish.default_directory(subject)
        folder.check_directory(directory, (PATCHED,))
        text = patched_source(subject, audit, plans, chosen, directory)
        check_artefact(subject, plans, chosen, settings.seed)
    (file,) = folder.write(directory, {PATCHED: text})
    islands = sum(choice.precision == "fp32" for choice in plans[chosen].scopes.values())
    functions = len(plans[chosen].exceptions)
    kept = [count(islands, "scope")] if islands or not functions else []
    kept += [count(functions, "function")] if functions else []
    say(
        f"Plan     {chosen}, {' and '.join(kept)} in FP32, not verified on this model: audit it for that\n"
        f"Patched  {file}\n"
    )
    return 0


def snippet(args: argparse.Namespace) -> int:
    """Print a plan as code for other tools. Raises: PlanError."""
    from ..snippets import snippet as written
    from ..snippets import snippets

    texts = (
        [written(args.plan_file, args.tool, args.plan)] if args.tool else snippets(args.plan_file, args.plan).values()
    )
    say("\n\n".join(texts))
    return 0


def explain_layer(args: argparse.Namespace) -> int:
    """Print why a module or operation does not run low. Raises: PlanError; AuditorError(slug="no-such-layer")."""
    from ..document.read import load
    from ..report.kept import explain_layer as in_words

    say(in_words(load(args.plan_file), args.name))
    return 0


def severe(findings: Iterable[Finding], level: str) -> int:
    """The exit code: 1 where a finding is as severe as that, or more."""
    return int(any(LEVELS.index(finding.severity) <= LEVELS.index(level) for finding in findings) and level != "never")


def diff(args: argparse.Namespace) -> int:
    """Print what changed. Raises: PlanError where either file cannot be read, AuditorError(slug="bad-output")."""
    from ..document.compare import compare
    from ..document.read import load

    found = compare(load(args.before), load(args.after))
    files = str(args.before), str(args.after)
    if args.html:
        from ..report.diff import render

        folder.check_directory(args.html.parent, (args.html.name,))
        folder.write(args.html.parent, {args.html.name: render(found, files)})
    if args.format == "json":
        say(json.dumps(_as_data(found, files), indent=1) + "\n")
    else:
        from ..report.blocks import looks, to_terminal
        from ..report.diff import overview

        say(to_terminal(overview(found, files), looks()))
        say(f"Report   {args.html}\n" if args.html else "")
    return severe(found.new, args.fail_on)


def _as_data(found: Comparison, files: tuple[str, str]) -> dict[str, Any]:
    from pydantic import TypeAdapter

    from ..document.compare import Comparison

    data = TypeAdapter(Comparison).dump_python(found, mode="json", exclude={"before", "after"})
    before, after = (
        {"file": file, "name": side.subject.name, "recommended": side.recommended}
        for file, side in zip(files, (found.before, found.after), strict=True)
    )
    return {"before": before, "after": after, **data, "kept": found.kept}
