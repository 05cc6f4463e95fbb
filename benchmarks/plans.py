"""Plans of this copy beside those of another one, on trained models and on the corpus of failures: are any worse?"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLUMNS = {"models": "", "audits": "d", "plans": "d", "equal": "d", "better": "d", "worse": "d"}
LEAST = 1e-9
"""Of a share of FLOPs: what is less apart is the same."""


def audited() -> Iterator[Row]:
    """What an audit of every model comes to, by the copy that this process imports."""
    from auditor.flow import run
    from auditor.loading import from_object
    from auditor.options import Options
    from auditor.resources import resource_dir
    from auditor.rulebook import load_rules

    options = Options(rules=tuple(load_rules([resource_dir("rules")])), command="", device="cpu")
    for group, name, (model, args, others) in subjects():
        subject = from_object(model.eval(), args)
        audit = run(replace(subject, held_out=((others, {}),)) if others else subject, options)
        plans = {
            plan.name: {
                "scopes": {path: scope.precision for path, scope in plan.scopes.items()},
                "low": plan.low_precision_flops,
                "measured": plan.measured_error,
                "verified": plan.verified,
            }
            for plan in audit.plans.values()
        }
        yield {"group": group, "model": name, "recommended": audit.recommended, "plans": plans}


def subjects() -> Iterator[tuple[str, str, Any]]:
    """(group, name, (model, arguments, arguments to check on or none)); trained models as far as their packages are there."""
    import benchmarks.subjects  # noqa: F401  lets timm and others see a torchvision without operators
    from benchmarks.trained_models import TRAINED
    from tests.corpus.catalogue import INFERENCE
    from tests.corpus.traps import TRAPS

    for name, build in TRAINED.items():
        try:
            made = build()
        except ImportError as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        yield "trained", name, made
    for case in INFERENCE:
        yield "corpus", case.name, (*case.build(), ())
        yield "corpus", f"{case.name} (twin)", (*case.twin(), ())
    for trap in TRAPS:
        yield "corpus", f"{trap.name} (trap)", (*trap.build(), ())


def recorded(root: Path, packages: str) -> list[Row]:
    """The audits of the copy in `root`, made in a process of its own."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-P", __file__, "--record", file.name, "--packages", packages]
        subprocess.run(command, cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, check=True)
        rows: list[Row] = json.loads(Path(file.name).read_text(encoding="utf-8"))
        return rows


def verdict(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Whether a plan is equal, better or worse: first by whether it holds, then by the share of FLOPs that is low."""
    if before["scopes"] == after["scopes"] and before["verified"] == after["verified"]:
        return "equal"
    gained = (after["verified"] is True) - (before["verified"] is True) or after["low"] - before["low"]
    return "equal" if abs(gained) < LEAST else "better" if gained > 0 else "worse"


def compared(before: list[Row], after: list[Row]) -> tuple[list[Row], list[Row]]:
    """A row for each group of models, and one for each plan that is not equal."""
    others = {(row["group"], row["model"]): row for row in before}
    totals: dict[str, Row] = {}
    apart: list[Row] = []
    for row in after:
        total = totals.setdefault(row["group"], {"models": row["group"], **dict.fromkeys(list(COLUMNS)[1:], 0)})
        other = others[row["group"], row["model"]]
        total["audits"] += 1
        for name, plan in row["plans"].items():
            found = verdict(other["plans"][name], plan)
            total["plans"] += 1
            total[found] += 1
            if found != "equal":
                apart.append({"model": row["model"], "plan": name, "before": other["plans"][name], "after": plan})
    return list(totals.values()), apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", nargs="?", help="root of the other checkout, the one before")
    parser.add_argument("--packages", metavar="DIR", default="", help="where the packages of the trained models are")
    parser.add_argument("--record", metavar="FILE", help="write what the copy that is imported comes to")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.record:
        Path(options.record).write_text(json.dumps(list(audited())), encoding="utf-8")
        return
    if not options.other:
        parser.error("name another checkout to compare with")
    from benchmarks.harness import report

    here = Path(__file__).resolve().parents[1]
    before, after = (recorded(root, options.packages) for root in (Path(options.other).resolve(), here))
    totals, apart = compared(before, after)
    report("plans", totals, COLUMNS, {"apart": apart, "recommended": changed(before, after)})
    for row in apart:
        low = f"{row['before']['low']:.1%} -> {row['after']['low']:.1%}"
        print(
            f"{row['model']}, {row['plan']}: low {low}, verified {row['before']['verified']} -> {row['after']['verified']}"
        )


def changed(before: list[Row], after: list[Row]) -> list[Row]:
    """Models for which another plan is recommended."""
    others = {(row["group"], row["model"]): row["recommended"] for row in before}
    return [
        {"model": row["model"], "before": others[row["group"], row["model"]], "after": row["recommended"]}
        for row in after
        if others[row["group"], row["model"]] != row["recommended"]
    ]


if __name__ == "__main__":
    main()
