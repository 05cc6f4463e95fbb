"""The verbs beside `audit`, `fleet` and `rehearse`: they print or convert rules, errors, plans and past audits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from .. import folder
from ..asked import LEVELS, rules_of
from ..document.places import portable_path
from ..errors import AuditorError, suggest
from ..progress.shown import Display
from ..settings import Location, Option
from ..snippets import TOOLS
from .program import PROGRAM, Verb, behind_the_result, say, watch

if TYPE_CHECKING:
    from ..document.compare import Comparison
    from ..records import Finding, Subject

PATCHED = "patched_model.py"

PlanFile = Annotated[Location, Option(shown="PLAN"), Field(description="a plan.json, or the directory of an audit")]
Target = Annotated[str, Option(shown="TARGET"), Field(description="the file or module that holds the model")]
PlanName = Annotated[str | None, Option(shown="NAME")]
Level = Annotated[str, Option(choices=lambda: LEVELS)]


class Explain(Verb):
    """Explain a rule (what it looks for, why that matters, what to do) or an error."""

    takes = ("code", "rules")
    code: Annotated[str, Option(shown="CODE")]
    """a rule's code, such as SFT001, or the name of an error, such as bad-plan"""

    def run(self) -> int:
        """Print the explanation of one rule or error. Raises: AuditorError(slug="no-rule")."""
        from ..resources import errors
        from ..rulebook.explain import explain

        if (slug := self.code.lower()) in errors():
            say(f"{slug}\n\n{errors()[slug]}\n")
            return 0
        rules = {rule.code: rule for rule in rules_of(self.rules)}
        if self.code.upper() not in rules:
            hint = suggest(slug, [*rules, *errors()], f"`{PROGRAM} rules` lists the rules")
            raise AuditorError(f"no rule or error is called {self.code}: {hint}", slug="no-rule")
        say(explain(rules[self.code.upper()]))
        return 0


class Rules(Verb):
    """List all rules, one per line, or as one Markdown document."""

    takes = ("format", "rules")
    format: Annotated[str, Option(choices=lambda: ("text", "json", "md"))] = "text"
    """format of the output"""

    def run(self) -> int:
        from ..rulebook.explain import as_data, reference

        rules = rules_of(self.rules)
        if self.format == "md":
            say(reference(rules))
        elif self.format == "json":
            say(json.dumps([as_data(rule) for rule in rules], indent=2) + "\n")
        else:
            say("".join(f"{rule.code:<8} {rule.severity:<8} {rule.family:<12} {rule.name}\n" for rule in rules))
        return 0


class Apply(Verb):
    """Write patched_model.py for TARGET from the plan.json of an earlier audit."""

    takes = ("plan_file", "target", "plan", "inputs", "weights", "out", "timeout", "seed")
    plan_file: PlanFile
    target: Target
    plan: PlanName = None
    """name of the plan; by default the recommended one"""

    def run(self) -> int:
        return watch(self, self._write, Display())

    def _write(self, progress: Display) -> int:
        from ..document.live import check_artefact, patched_source, read_plans
        from ..loading import load
        from ..plan.recommend import kept_apart

        progress("apply", self.target, 0, 0)
        audit, plans, chosen = read_plans(self.plan_file, self.plan)
        if self.out:
            folder.check_directory(self.out)
        with behind_the_result(self.debug):
            subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
            directory = self.out or default_directory(subject)
            folder.check_directory(directory)
            text = patched_source(subject, audit, plans, chosen, directory)
            check_artefact(subject, plans, chosen, self.seed)
        (file,) = folder.write(directory, {PATCHED: text})
        kept = kept_apart(plans[chosen]) or "no module"
        say(f"Plan     {chosen}, {kept} in FP32; not verified on this model: audit it for that\nPatched  {file}\n")
        return 0


class Snippet(Verb):
    """Print a plan as Python code for another tool, such as FSDP2 or Lightning."""

    takes = ("plan_file", "tool", "plan")
    plan_file: PlanFile
    tool: Annotated[str | None, Option(flag="--for", choices=lambda: TOOLS)] = None
    """the tool; by default all of them"""
    plan: PlanName = None
    """name of the plan; by default the recommended one, or the closest that this tool can use"""

    def run(self) -> int:
        from ..snippets import snippet, snippets

        one = [snippet(self.plan_file, self.tool, self.plan)] if self.tool else None
        say("\n\n".join(one or snippets(self.plan_file, self.plan).values()))
        return 0


class ExplainLayer(Verb):
    """Show the precision of a module or operation under each plan, and why it is not lower."""

    takes = ("plan_file", "name")
    plan_file: PlanFile
    name: Annotated[str, Option(shown="NAME")]
    """a module path such as blocks.0.norm, or an operation's name"""

    def run(self) -> int:
        """Print the precision of one layer and the reason. Raises: PlanError; AuditorError(slug="no-such-layer")."""
        from ..document.read import load
        from ..report.kept import explain_layer

        say(explain_layer(load(self.plan_file), self.name))
        return 0


class Diff(Verb):
    """Compare two audits: findings, verdicts, plans."""

    takes = ("before", "after", "html", "format", "fail_on")
    before: Annotated[PlanFile, Option(shown="A")]
    after: Annotated[Location, Option(shown="B")]
    """the later audit, to be compared with the first"""
    html: Annotated[Path | None, Option("the path of a file", "FILE", path="path")] = None
    """also write the comparison as one HTML file"""
    format: Annotated[str, Option(choices=lambda: ("text", "json"))] = "text"
    """format of the output"""
    fail_on: Level = "never"
    """exit with 1 if there is a new finding of this severity or a higher one"""

    def run(self) -> int:
        """Print the differences. Raises: PlanError for an unreadable file, AuditorError(slug="bad-output")."""
        from ..document.compare import compare
        from ..document.read import load

        changes = compare(load(self.before), load(self.after))
        files = str(self.before), str(self.after)
        if self.html:
            from ..report.diff import render

            folder.check_directory(self.html.parent)
            folder.write(self.html.parent, {self.html.name: render(changes, files)})
        if self.format == "json":
            say(json.dumps(_as_data(changes, files), indent=1) + "\n")
        else:
            from ..report.blocks import looks, to_terminal
            from ..report.diff import overview

            say(to_terminal(overview(changes, files), looks()))
            say(f"Report   {self.html}\n" if self.html else "")
        return severe(changes.new, self.fail_on)


def _as_data(changes: Comparison, files: tuple[str, str]) -> dict[str, Any]:
    from pydantic import TypeAdapter

    from ..document.compare import Comparison

    data = TypeAdapter(Comparison).dump_python(changes, mode="json", exclude={"before", "after"})
    before, after = (
        {"file": file, "name": side.subject.name, "recommended": side.recommended}
        for file, side in zip(files, (changes.before, changes.after), strict=True)
    )
    return {"before": before, "after": after, **data, "kept": changes.unchanged_findings}


def severe(findings: Iterable[Finding], level: str) -> int:
    """Exit code 1 if any finding reaches the given severity, else 0."""
    return int(any(LEVELS.index(finding.severity) <= LEVELS.index(level) for finding in findings) and level != "never")


def default_directory(subject: Subject) -> Path:
    """The output directory for a model, unless the user names one.

    If it already contains the audit of a model from another file, the file's parent folders become part of the name.
    """
    name, file = subject.name, subject.origin.path if subject.origin else None
    folders = list(Path(file).parts[-2:0:-1]) if file else []
    while True:
        safe = "".join(c if c.isalnum() or c in "._-" else "_" for c in name).lstrip(".")
        directory = Path("audits") / (safe or "model")
        if not file or not folders or _audited_file(directory / "plan.json") in (None, portable_path(file)):
            return directory
        name = f"{folders.pop(0)}-{name}"


def _audited_file(plan: Path) -> str | None:
    """The source file of the model in a plan.json, where it is recorded."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return str(json.loads(plan.read_text(encoding="utf-8"))["subject"]["file"] or "") or None
    return None
