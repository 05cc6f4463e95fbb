"""The audits, and each reporter's page of them as text."""

import math
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from auditor.records import (
    Audit,
    Evaluation,
    FlaggedRegion,
    Linearity,
    Noise,
    NonFinite,
    Score,
    TimeAndMemory,
    Times,
    Timing,
    Today,
    Verification,
)
from auditor.reporters import github, html, markdown, sarif, text
from tests.unit.report.factory import make_audit

FOLDER = Path(__file__).parent / "files"


def audits() -> dict[str, Audit]:
    """Made by hand, without a run: the same on every machine."""
    return {
        "usual": make_audit(40),
        "hostile": make_audit(4, hostile=True, synthetic=True),
        "empty": make_audit(empty=True),
        "no-plan": beyond_the_budget(make_audit(12, recommended=None)),
        "one-format": make_audit(12, formats=("bf16",), recommended="autocast_bf16"),
        "timed-and-scored": timed_and_scored(),
        "non-finite": non_finite(),
    }


def beyond_the_budget(audit: Audit) -> Audit:
    """No run of the audit is within the error budget."""
    above = Verification(2 * audit.max_error, holds=False)
    plans = {name: replace(plan, verification=above) for name, plan in audit.plans.items()}
    return replace(audit, plans=plans, baselines=dict.fromkeys(audit.baselines, above))


def timed_and_scored() -> Audit:
    """On a GPU with a clock, whose FP32 is TF32 and noisy; of the plans one passes the user's score, one fails and one raises."""
    audit = make_audit(12)
    fast = TimeAndMemory(eager=Times(0.0012, 0.0011, 0.0013, 20, 2.0, 1.8, 2.2), memory=2_000_000, decides=True)
    whole = TimeAndMemory(
        eager=Times(0.0024, 0.0023, 0.0026, 20), memory=4_000_000, missing={"compiled": "no compiler"}
    )
    scores = (
        Score(0.983333, -0.0027778, 0.0027778, True),
        Score(0.95, -0.036111, 0.0099, False),
        Score(None, passed=False, failure="it <b>raised</b>"),
        None,
    )
    plans = {
        name: replace(plan, timed=fast, score=score)
        for (name, plan), score in zip(audit.plans.items(), scores, strict=True)
    }
    node = audit.nodes[3].node.name
    return replace(
        audit,
        plans=plans,
        evaluation=Evaluation("scores.py:accuracy", "higher", 0.01, 0.986111, 360, "exp", 6),
        timing=Timing("NVIDIA H100", 8, 2, whole, replace(whole, missing={})),
        fp32_today=Today(("tf32",), 4.2e-4),
        noise=Noise(4, 0.004, 0.004, 0.012, {"a": 0.004, "b": 0.001}, {node: 0.02}, (node,)),
    )


def non_finite() -> Audit:
    """Runs and a plan that are NaN, for one cause and for another; regions and predictions beside them."""
    audit = make_audit(30)
    where = ("sqrt", "norm", "aten.sqrt.default", "unet.py:28", "NaN")
    first = NonFinite(*where, "cancellation", "sub", "norm", "aten.sub.Tensor", "unet.py:27")
    here = replace(first, cause="overflow", begins=first.node, begins_op=first.op)
    unknown = Verification(None)
    baselines = {
        "autocast_fp16": replace(unknown, nonfinite=first),
        "cast_fp16": replace(unknown, nonfinite=first),
        "autocast_bf16": replace(unknown, nonfinite=here),
        "cast_bf16": unknown,
    }
    ran = Verification(None, False, "audited", "emulated", nonfinite=first)
    plan = replace(audit.plans["cast_fp16"], verification=ran)
    regions = tuple(
        FlaggedRegion(fmt, tuple(f"n{i}" for i in range(size)), scope, error, error, 0.001, failure)
        for fmt, scope, error, size, failure in (
            ("fp16", "small", 0.1, 2, None),
            ("fp16", "alone", 0.9, 1, None),
            ("bf16", "other", 0.9, 2, None),
            ("fp16", "broken", math.nan, 2, "no kernel <here>"),
            ("fp16", "large", 0.5, 2, None),
        )
    )
    linearity = (
        Linearity("fp16", 12, 0.5, 1.25, 9.75, False, None, None, confirmed=3, refuted=1, left=0),
        Linearity("bf16", 1, 1.1, 1.1, 1.1, True, None, None, confirmed=1, refuted=0, left=1),
    )
    plans = {**audit.plans, plan.name: plan}
    return replace(audit, baselines=baselines, plans=plans, regions=regions, linearity=linearity)


def pages(audit: Audit) -> dict[str, str]:
    """{name of the file: what a reader sees}; of SARIF, which repeats itself, what there is of a small audit."""
    small = {"findings.sarif": sarif(audit)} if len(audit.nodes) < 10 else {}
    return small | {
        "terminal.txt": text(audit, width=100, color=False),
        "markdown.txt": markdown(audit),
        "github.txt": github(audit),
        "notebook.txt": audit._repr_html_(),
        "report.txt": visible(html(audit)),
    }


class _Visible(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._hidden += tag in ("script", "style")

    def handle_endtag(self, tag: str) -> None:
        self._hidden -= tag in ("script", "style")

    def handle_data(self, data: str) -> None:
        if not self._hidden and (line := " ".join(data.split())):
            self.lines.append(line)


def visible(document: str) -> str:
    """The texts of an HTML document, a line each, without scripts and style sheets."""
    parser = _Visible()
    parser.feed(document)
    return "\n".join(parser.lines) + "\n"


def write() -> None:
    """All files, in place of those that are there."""
    for name, audit in audits().items():
        for file, page in pages(audit).items():
            target = FOLDER / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(write())
