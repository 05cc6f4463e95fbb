"""All verbs and their arguments. Importing this file does not import torch."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import DirectoryPath, Field, TypeAdapter

from .. import fleet, snippets
from ..asked import LEVELS, OPTIONS
from ..command.output import say
from ..command.verb import PROGRAM, TextOrJson, Verb, WithTarget, severe
from ..document import compare, read
from ..errors import AuditorError, suggest
from ..progress.shown import Display
from ..records import folder
from ..report import blocks
from ..report import diff as diff_page
from ..report.words import count, printable
from ..resources import errors
from ..rulebook import explain
from ..settings import A_DIRECTORY, Flag, Location, Option, Seconds

INDEX = "index.html"

PlanFile = Annotated[Location, Option(shown="PLAN"), Field(description="a plan.json, or the directory of an audit")]
PlanName = Annotated[str | None, Option(shown="NAME")]
Count = Annotated[int, Field(ge=0, lt=10_000)]


class Audit(WithTarget):
    """Report which layers of a PyTorch model can run in FP16 or BF16, which must stay FP32, and why. The word `audit`
    may be left out: `python -m auditor TARGET`."""

    takes = ("target", *(name for name, option in OPTIONS.items() if option.flag))
    examples = (
        ("model.py", "FP16 and BF16, for inference, with inputs that model.py names"),
        ("model.py:Net --weights net.safetensors --inputs data.pt", "trained weights and real inputs"),
        (
            "train.py --mode training --loss train.py:loss_fn",
            "also a training step: its loss scale, and the loop to copy",
        ),
        (
            "hf:path/to/llama --formats int8 --generate 64",
            "INT8 layers of a language model, and the tokens that it chooses",
        ),
        ("model.py --formats bf16 --criterion 'logits: kl <= 0.01'", "BF16 only, with a limit for one output"),
    )

    def run(self, progress: Display) -> int:
        from .audit import audit

        return audit(self, progress)


class Explain(Verb):
    """Explain a rule (what it detects, the risk and the remedy) or an error."""

    takes = ("code", "rules")
    examples = (
        ("explain NRM001", "what a rule detects, the risk and the remedy"),
        ("explain missing-target", "the cause of an error, and what to do"),
    )
    code: Annotated[str, Option(shown="CODE")]
    """the code of a rule, such as SFT001, or the name of an error, such as bad-plan"""

    def run(self, progress: Display) -> None:
        """Print the explanation of one rule or error. Raises: AuditorError(slug="no-rule")."""
        slug, code, rules = self.code.lower(), self.code.upper(), {rule.code: rule for rule in self.rulebook}
        if slug in errors():
            say(f"{slug}\n\n{errors()[slug]}\n")
        elif code in rules:
            say(explain.explain(rules[code]))
        else:
            hint = suggest(slug, [*rules, *errors()], f"`{PROGRAM} rules` lists the rules")
            raise AuditorError(f"no rule or error is called {self.code}: {hint}", slug="no-rule")


class Rules(Verb):
    """List all rules: one per line, or as JSON."""

    takes = ("format", "rules")
    examples = (
        ("rules", "one line for each rule"),
        ("rules --rules our_rules", "also the rules of a directory of your own"),
    )
    format: TextOrJson = "text"

    def run(self, progress: Display) -> None:
        if self.format == "json":
            say(json.dumps([explain.as_data(rule) for rule in self.rulebook], indent=2) + "\n")
        else:
            rows = (f"{rule.code:<8} {rule.severity:<8} {rule.family:<12} {rule.name}\n" for rule in self.rulebook)
            say("".join(rows))


class Apply(WithTarget):
    """Write patched_model.py for TARGET from the plan.json of an earlier audit."""

    takes = ("plan_file", "target", "plan", "inputs", "weights", "out", "timeout", "seed")
    examples = (
        ("apply audits/model model.py:Net", "the recommended plan"),
        ("apply audits/model model.py:Net --plan autocast_bf16", "another plan"),
    )
    stage = "apply"
    plan_file: PlanFile
    plan: PlanName = None
    """name of the plan; by default the recommended plan"""

    def run(self, progress: Display) -> None:
        """Write patched_model.py and the files that it needs."""
        from ..artefact.libraries import files_of, quantized_plan
        from ..document import live
        from ..loading import load
        from ..plan.recommend import kept_apart

        audit, plans, chosen = live.read_plans(self.plan_file, self.plan)
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        directory = self.out or read.default_directory(subject)
        text = live.patched_source(subject, audit, plans, chosen, directory)
        live.check_artefact(subject, audit, plans, chosen, self.seed)
        quantized = {} if chosen in plans else files_of(audit, quantized_plan(audit, chosen))
        file, *_ = folder.write(directory, {"patched_model.py": text, **quantized})
        kept = f"{kept_apart(plans[chosen]) or 'no module'} in FP32" if chosen in plans else "quantized by torchao"
        note = "not verified on this model: to verify the plan, audit the model"
        say(f"Plan     {chosen}, {kept}; {note}\nPatched  {file}\n")


class Snippet(Verb):
    """Print a plan as Python code for another tool, such as FSDP2 or Lightning."""

    takes = ("plan_file", "tool", "plan")
    examples = (
        ("snippet audits/model", "the recommended plan for every tool"),
        ("snippet audits/model --for fsdp2", "for one tool"),
    )
    plan_file: PlanFile
    tool: Annotated[str | None, Option(flag="--for", choices=lambda: snippets.KNOWN)] = None
    """the tool that the code is for; by default all tools for this kind of plan"""
    plan: PlanName = None
    """name of the plan; by default the recommended plan if the tool can use it, else a verified plan for the tool"""

    def run(self, progress: Display) -> None:
        if self.tool:
            say(snippets.snippet(self.plan_file, self.tool, self.plan))
        else:
            say("\n\n".join(snippets.snippets(self.plan_file, self.plan).values()))


class ExplainLayer(Verb):
    """Show the precision of a module or operation under each plan, with the reason if it stays in FP32."""

    takes = ("plan_file", "name")
    examples = (
        ("explain-layer audits/model blocks.0.norm", "a module"),
        ("explain-layer audits/model softmax_1", "an operation"),
    )
    plan_file: PlanFile
    name: Annotated[str, Option(shown="NAME")]
    """path of a module, such as blocks.0.norm, or name of an operation"""

    def run(self, progress: Display) -> None:
        """Print a module's or operation's precision under each plan. Raises: PlanError; AuditorError(slug="no-such-layer")."""
        from ..report.kept import explain_layer  # imports torch

        say(explain_layer(read.load(self.plan_file), self.name))


class Diff(Verb):
    """Compare the findings, verdicts and plans of two audits."""

    takes = ("before", "after", "html", "format", "fail_on")
    examples = (
        ("diff audits/before audits/after --html diff.html", "as text, and as a page"),
        ("diff audits/before audits/after --fail-on error", "exit with code 1 if there is a new error"),
    )
    before: Annotated[PlanFile, Option(shown="A")]
    after: Annotated[Location, Option(shown="B")]
    """the later audit: its plan.json or directory"""
    html: Annotated[Path | None, Option("the path of a file", "FILE", path="path")] = None
    """also write the comparison to this HTML file"""
    format: TextOrJson = "text"
    fail_on: Annotated[str, Option(choices=lambda: LEVELS)] = "never"
    """exit with code 1 if a new finding has this severity or a higher one"""

    def run(self, progress: Display) -> int:
        """Print the differences. Raises: PlanError for an unreadable file, AuditorError(slug="bad-output")."""
        changes = compare.compare(read.load(self.before), read.load(self.after))
        files = str(self.before), str(self.after)
        if self.html:
            folder.write(self.html.parent, {self.html.name: diff_page.render(changes, files)})
        if self.format == "json":
            audits = zip(files, (changes.before, changes.after), strict=True)
            sides = [{"file": file, "name": one.subject.name, "recommended": one.recommended} for file, one in audits]
            data = TypeAdapter(compare.Comparison).dump_python(changes, mode="json", exclude={"before", "after"})
            data = {"before": sides[0], "after": sides[1], **data, "kept": changes.unchanged_findings}
            say(json.dumps(data, indent=1) + "\n")
        else:
            say(blocks.to_terminal(diff_page.overview(changes, files)))
            say(f"Report   {self.html}\n" if self.html else "")
        return severe(changes.new, self.fail_on)


class Fleet(Verb):
    """Audit many models, each in its own process; DIR/index.html summarizes all audits."""

    takes = ("targets", "out", "jobs", "timeout", "retries", "force", "baseline", "address", "quiet")
    examples = (
        ("fleet models.toml --out audits/all", "all models of models.toml"),
        (
            "fleet models.toml --out audits/new --baseline audits/all",
            "compare with an earlier run; exit with code 1 after a regression",
        ),
    )
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
    baseline: Annotated[DirectoryPath | None, A_DIRECTORY, Option("the --out directory of an earlier run")] = None
    """directory of an earlier fleet run: list regressions since that run, and exit with code 1 if there are any"""
    address: Annotated[str | None, Option(shown="ADDRESS")] = None
    """address of a Ray cluster on which to run the audits; `auto`: the cluster of this machine"""

    def run(self, progress: Display) -> int:
        processors = os.cpu_count() or 1
        jobs = self.jobs or max(processors // 2, 1)
        how: dict[str, Any] = {"limit": self.timeout, "retries": self.retries, "threads": max(processors // jobs, 1)}
        wanted = [replace(one, directory=self.out / one.name, **how) for one in fleet.read(self.targets)]
        outcomes = {} if self.force else fleet.earlier_outcomes(self.out, wanted)
        tell = str if self.quiet else partial(print, file=sys.stderr, flush=True)

        def write() -> list[fleet.Row]:
            rows = [row for one in wanted for row in fleet.rows_of(one, outcomes.get(one.name), self.baseline)]
            folder.write(self.out, {INDEX: fleet.render(rows, self.baseline)})
            return rows

        def note(task: fleet.FleetTarget, outcome: fleet.Outcome) -> None:
            outcomes[task.name] = outcome
            fleet.keep(self.out, outcomes)
            how = f"failed: {outcome.said}" if outcome.said else "audited"
            tell(f"  {len(outcomes)} of {len(wanted)}, {task.name}, {outcome.seconds:.0f} s, {how}")

        write()
        tell(f"fleet: {count(len(wanted), 'model')}, {len(outcomes)} audited before")
        try:
            fleet.run_all([one for one in wanted if one.name not in outcomes], jobs, self.address, note)
        finally:
            rows = write()
        lines = [f"{row.target.name}: {row.state}, {printable('; '.join(row.said))}\n" for row in rows if row.said]
        say(f"{fleet.headline(rows)}\n{''.join(lines)}Fleet    {self.out / INDEX}\n")
        return int(any(row.said or (row.findings or {}).get("error") for row in rows))
