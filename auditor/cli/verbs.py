"""All verbs except `audit`: they explain rules, errors and layers, list dtypes, apply and convert plans, compare
audits, audit many models, or rehearse training."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field, TypeAdapter

from ..artefact.libraries import LIBRARIES
from ..asked import LEVELS, rules_of, with_rules
from ..document.places import default_directory
from ..errors import AuditorError, suggest
from ..progress.shown import Display
from ..records import folder
from ..report.words import count, printable
from ..settings import Directory, Flag, Location, Option, Seconds, bad
from ..snippets import TOOLS
from .program import PROGRAM, Verb, say

if TYPE_CHECKING:
    from ..fleet.index import Row
    from ..fleet.running import Outcome
    from ..fleet.targets import FleetTarget
    from ..records import Finding

PATCHED, INDEX = "patched_model.py", "index.html"
BATCHES = ("batches", "get_batches", "train_loader", "loader")

PlanFile = Annotated[Location, Option(shown="PLAN"), Field(description="a plan.json, or the directory of an audit")]
Target = Annotated[str, Option(shown="TARGET"), Field(description="the model's file or module, such as model.py:Net")]
PlanName = Annotated[str | None, Option(shown="NAME")]
Count = Annotated[int, Field(ge=0, lt=10_000)]
TextOrJson = Annotated[str, Option(choices=lambda: ("text", "json")), Field(description="format of the output")]
Level = Annotated[str, Option(choices=lambda: LEVELS)]


class Explain(Verb):
    """Explain a rule (what it detects, the risk and the remedy) or an error."""

    takes = ("code", "rules")
    code: Annotated[str, Option(shown="CODE")]
    """the code of a rule, such as SFT001, or the name of an error, such as bad-plan"""

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
    """List all rules: one per line, as JSON, or as one Markdown document."""

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
    """name of the plan; by default the recommended plan"""
    quiet: bool = True

    def run_watched(self, progress: Display) -> int:
        from ..artefact.libraries import files_of, quantized_plan
        from ..document.live import check_artefact, patched_source, read_plans
        from ..loading import load
        from ..plan.recommend import kept_apart

        progress("apply", self.target, 0, 0)
        audit, plans, chosen = read_plans(self.plan_file, self.plan)
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        directory = self.out or default_directory(subject)
        text = patched_source(subject, audit, plans, chosen, directory)
        check_artefact(subject, audit, plans, chosen, self.seed)
        quantized = {} if chosen in plans else files_of(audit, quantized_plan(audit, chosen))
        file, *_ = folder.write(directory, {PATCHED: text, **quantized})
        kept = f"{kept_apart(plans[chosen]) or 'no module'} in FP32" if chosen in plans else "quantized by torchao"
        note = "not verified on this model: to verify the plan, audit the model"
        say(f"Plan     {chosen}, {kept}; {note}\nPatched  {file}\n")
        return 0


class Snippet(Verb):
    """Print a plan as Python code for another tool, such as FSDP2 or Lightning."""

    takes = ("plan_file", "tool", "plan")
    plan_file: PlanFile
    tool: Annotated[str | None, Option(flag="--for", choices=lambda: (*TOOLS, *LIBRARIES))] = None
    """the tool that the code is for; by default all tools for this kind of plan"""
    plan: PlanName = None
    """name of the plan; by default the recommended plan if the tool can use it, else a verified plan for the tool"""

    def run(self) -> int:
        from ..snippets import snippet, snippets

        one = [snippet(self.plan_file, self.tool, self.plan)] if self.tool else None
        say("\n\n".join(one or snippets(self.plan_file, self.plan).values()))
        return 0


class Ledger(Verb):
    """List five dtypes of every weight and operation: in the checkpoint, as loaded, requested by the author's code,
    planned and executed. Report casts that may lose digits unnoticed."""

    takes = ("target", "plan_file", "inputs", "weights", "format", "fail_on", "timeout", "seed")
    target: Target
    plan_file: Annotated[Path | None, Option("the path of a plan.json", "PLAN", flag="--plan", path="path")] = None
    """the plan.json or directory of an audit of this model; by default the model runs without a plan"""
    format: TextOrJson = "text"
    quiet: bool = True

    def run_watched(self, progress: Display) -> int:
        progress("ledger", self.target, 0, 0)
        from ..document.live import check_fit, select
        from ..flow import ledger
        from ..loading import load
        from ..report.blocks import to_terminal
        from ..report.ledger import overview

        audit, plan = select(self.plan_file, None) if self.plan_file else (None, None)
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        check_fit(subject.model, audit)
        rows, findings = ledger(subject, with_rules(self), plan)
        progress.close()
        if self.format == "json":
            data = {"flags": subject.flags, "rows": rows, "findings": findings}
            say(TypeAdapter(dict[str, Any]).dump_json(data, indent=1).decode() + "\n")
        else:
            say(to_terminal(overview(subject.name, rows, findings, subject.flags)))
        return severe(findings, self.fail_on)


class ExplainLayer(Verb):
    """Show the precision of a module or operation under each plan, with the reason if it stays in FP32."""

    takes = ("plan_file", "name")
    plan_file: PlanFile
    name: Annotated[str, Option(shown="NAME")]
    """path of a module, such as blocks.0.norm, or name of an operation"""

    def run(self) -> int:
        """Print a module's or operation's precision under each plan. Raises: PlanError; AuditorError(slug="no-such-layer")."""
        from ..document.read import load
        from ..report.kept import explain_layer

        say(explain_layer(load(self.plan_file), self.name))
        return 0


class Diff(Verb):
    """Compare the findings, verdicts and plans of two audits."""

    takes = ("before", "after", "html", "format", "fail_on")
    before: Annotated[PlanFile, Option(shown="A")]
    after: Annotated[Location, Option(shown="B")]
    """the later audit: its plan.json or directory"""
    html: Annotated[Path | None, Option("the path of a file", "FILE", path="path")] = None
    """also write the comparison to this HTML file"""
    format: TextOrJson = "text"
    fail_on: Level = "never"
    """exit with code 1 if a new finding has this severity or a higher one"""

    def run(self) -> int:
        """Print the differences. Raises: PlanError for an unreadable file, AuditorError(slug="bad-output")."""
        from ..document.compare import Comparison, compare
        from ..document.read import load

        changes = compare(load(self.before), load(self.after))
        files = str(self.before), str(self.after)
        if self.html:
            from ..report.diff import render

            folder.check_directory(self.html.parent)
            folder.write(self.html.parent, {self.html.name: render(changes, files)})
        if self.format == "json":
            audits = zip(files, (changes.before, changes.after), strict=True)
            sides = [{"file": file, "name": one.subject.name, "recommended": one.recommended} for file, one in audits]
            data = TypeAdapter(Comparison).dump_python(changes, mode="json", exclude={"before", "after"})
            data = {"before": sides[0], "after": sides[1], **data, "kept": changes.unchanged_findings}
            say(json.dumps(data, indent=1) + "\n")
        else:
            from ..report.blocks import to_terminal
            from ..report.diff import overview

            say(to_terminal(overview(changes, files)))
            say(f"Report   {self.html}\n" if self.html else "")
        return severe(changes.new, self.fail_on)


class Fleet(Verb):
    """Audit many models, each in its own process; DIR/index.html summarizes all audits."""

    takes = ("targets", "out", "jobs", "timeout", "retries", "force", "baseline", "address", "quiet")
    targets: Annotated[Location, Option(shown="TARGETS")]
    """a TOML file with a [[target]] table per model; the keys of a table are name, target and options of an audit"""
    out: Annotated[Location, Option(flag="--out")]
    """output directory DIR, with a folder for each audit and the summary page"""
    jobs: Annotated[Count | None, Option("a whole number", "N")] = None
    """number of audits to run in parallel; by default half the number of processors"""
    timeout: Seconds = None
    """time limit of one audit in seconds (default: none)"""
    retries: Annotated[Count, Option("a whole number", "N")] = 1
    """number of retries if an audit's process crashes or is killed, for example for lack of memory"""
    force: Flag = False
    """repeat all audits, even finished ones whose target and options have not changed since the last run"""
    baseline: Directory = None
    """directory of an earlier fleet run: list regressions since that run, and exit with code 1 if there are any"""
    address: Annotated[str | None, Option(shown="ADDRESS")] = None
    """address of a Ray cluster on which to run the audits; `auto`: the cluster of this machine"""

    def run(self) -> int:
        from ..fleet import index, running, targets

        wanted = targets.read(self.targets)
        if self.baseline is not None and not self.baseline.is_dir():
            raise bad(f"{self.baseline} is not a directory: give the --out directory of an earlier fleet run")
        folder.check_directory(self.out)
        outcomes = {} if self.force else running.earlier_outcomes(self.out, wanted)
        jobs = self.jobs or max(running.PROCESSORS // 2, 1)
        threads = max(running.PROCESSORS // jobs, 1)
        how: dict[str, Any] = {"limit": self.timeout, "retries": self.retries, "threads": threads}
        waiting = (one for one in wanted if one.name not in outcomes)
        tasks = [replace(one, directory=self.out / one.name, **how) for one in waiting]

        tell = partial(print, file=io.StringIO() if self.quiet else sys.stderr, flush=True)

        def write() -> list[Row]:
            rows = index.rows_of(wanted, outcomes, self.out, self.baseline)
            folder.write(self.out, {INDEX: index.render(rows, self.baseline)})
            return rows

        def note(task: FleetTarget, outcome: Outcome) -> None:
            outcomes[task.name] = outcome
            running.keep(self.out, outcomes)
            how = "audited" if outcome.has_audit else f"failed: {outcome.said}"
            tell(f"  {len(outcomes)} of {len(wanted)}, {task.name}, {outcome.seconds:.0f} s, {how}")

        tell(f"fleet: {count(len(wanted), 'model')}, {len(outcomes)} audited before")
        write()
        try:
            if self.address is None:
                running.run_all(tasks, jobs, note)
            else:
                running.run_on_cluster(tasks, self.address, note)
        finally:
            rows = write()
        reasons = [(row, row.said or "; ".join(row.worse)) for row in rows]
        lines = [f"{row.name}: {row.state}, {printable(why)}\n" for row, why in reasons if why]
        say(f"{index.headline(rows)}\n{''.join(lines)}Fleet    {self.out / INDEX}\n")
        return int(any(row.state in ("failed", "worse") or (row.findings or {}).get("error") for row in rows))


class Rehearse(Verb):
    """Run a training step a few hundred times in several recipes (FP32, autocast, BF16 weights); recommend one."""

    takes = ("target", "steps", "batches", "plan_file", "remedies", "out", "timeout", "seed", "quiet")
    stages: ClassVar = ("load", "rehearse")
    target: Annotated[str, Option(shown="FILE.py:STEP")]
    """a function that runs one training step on a batch"""
    steps: Annotated[int, Field(ge=1, lt=1_000_000), Option("a whole number from 1 to 999999", "N")] = 200
    """number of training steps in each recipe"""
    batches: Annotated[str | None, Option(shown="NAME", path="place")] = None
    """the batches for the training step: `f.py:name`, or a name in FILE.py; by default `batches`, `get_batches()`,
    `train_loader` or `loader` in FILE.py"""
    plan_file: Annotated[Path | None, Option("the path of a plan.json", "PLAN", flag="--plan", path="path")] = None
    """the plan.json or directory of an audit. An autocast plan of the audit is rehearsed too: the recommended plan if it
    uses autocast, else the BF16 plan, else the FP16 plan"""
    remedies: Flag = True
    """if a recipe has a problem, also run variants of the recipe, each with a fix"""

    def run_watched(self, progress: Display) -> int:
        progress("load", self.target, 0, 0)
        from ..document.read import load
        from ..loading.target import named_in, parse, user_code
        from ..rehearsal.rehearse import rehearse
        from ..report.blocks import to_terminal
        from ..report.rehearsal import overview

        target = parse(self.target)
        plan = load(self.plan_file) if self.plan_file else None
        directory = self.out or Path("audits") / f"{target.name}-rehearsal"
        folder.check_directory(directory)
        with user_code(target, self.seed):
            advice = "name the function that runs one training step, as in train.py:step"
            step, batches = named_in(target, advice, "missing-target", self.seed), self._batches(target)
            how: dict[str, Any] = {"remedies": self.remedies, "progress": progress, "target": self.target}
            result = rehearse(step, batches, self.steps, plan=plan, seed=self.seed, **how)
        files = result.save(directory)
        progress.close()
        say(to_terminal(overview(result)) + f"Report   {files[-1]}\nFiles    {files[0]}\n")
        return 0

    def _batches(self, target: Any) -> Any:
        """The batches for the step, from `--batches` or a conventional name in the file; None if both are missing."""
        from ..loading.target import call, import_target, named_in, parse

        module = import_target(target)
        name = self.batches or next((name for name in BATCHES if hasattr(module, name)), None)
        if name is None:
            return None
        where = parse(name) if ":" in name else replace(target, symbol=name)
        value = named_in(where, "give --batches file.py:name", "missing-inputs", self.seed)
        made = call(value, f"{name}()", "bad-inputs") if callable(value) else value
        return value if isinstance(made, Iterator) else made  # a function is called again for the next pass


def severe(findings: Iterable[Finding], level: str) -> int:
    """Exit code 1 if any finding reaches the given severity, else 0."""
    return int(any(LEVELS.index(finding.severity) <= LEVELS.index(level) for finding in findings) and level != "never")
