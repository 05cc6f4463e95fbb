"""The verb `ledger`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter

from ...command.output import say
from ...command.verb import TextOrJson, WithTarget, severe
from ...progress.shown import Display
from ...settings import Option


class Ledger(WithTarget):
    """List five dtypes of every weight and operation: in the checkpoint, as loaded, requested by the author's code,
    planned and executed. Report casts that may lose digits unnoticed."""

    takes = ("target", "plan_file", "inputs", "weights", "format", "fail_on", "timeout", "seed")
    examples = (
        ("ledger model.py", "the model as its code loads it"),
        ("ledger model.py --weights net.pt --plan audits/model", "with a checkpoint, under the plan of an audit"),
    )
    stage = "ledger"
    plan_file: Annotated[Path | None, Option("the path of a plan.json", "PLAN", flag="--plan", path="path")] = None
    """the plan.json or directory of an audit of this model; by default the model runs without a plan"""
    format: TextOrJson = "text"

    def run(self, progress: Display) -> int:
        from ...document import live
        from ...loading import load
        from ...report import blocks
        from ...rulebook.findings import silent_findings
        from . import report as ledger
        from .stage import run_ledger

        audit, plan = live.select(self.plan_file, None) if self.plan_file else (None, None)
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        live.check_fit(subject.model, audit)
        capture, rows, casts = run_ledger(subject, plan, self.seed)
        findings = silent_findings(casts, capture, self.rulebook, self.formats)
        progress.close()
        if self.format == "json":
            data = {"flags": subject.flags, "rows": rows, "findings": findings}
            say(TypeAdapter(dict[str, Any]).dump_json(data, indent=1).decode() + "\n")
        else:
            say(blocks.to_terminal(ledger.overview(subject, rows, findings)))
        return severe(findings, self.fail_on)


VERBS = (Ledger,)
