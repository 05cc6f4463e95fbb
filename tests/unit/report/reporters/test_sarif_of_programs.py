"""What SARIF says of operations under a plan that is a program is true of the program."""

from __future__ import annotations

import json

import pytest
import torch

import auditor
from auditor.report.findings import causes
from auditor.report.reporters import sarif
from tests.unit.graphs.models import flat


@pytest.mark.slow
def test_what_becomes_of_operations() -> None:
    torch.manual_seed(0)
    audit = auditor.audit(flat(), torch.randn(4, 16), strategies="graph", formats="fp16", device="cpu")
    plan = audit.plans[audit.recommended or ""]
    assert plan.program is not None
    high = {each.node for each in plan.program.kept}
    found = causes(audit).all
    (run,) = json.loads(sarif(audit))["runs"]
    assert len(run["results"]) == len(found)
    seen = set()
    for cause, result in zip(found, run["results"], strict=True):
        nodes, said = {each.node for each in cause.members}, result["message"]["text"]
        (bearing,) = [part for part in said.split(". ") if "the recommended plan, " in part]
        assert bearing.startswith(f"{plan.format.upper()} as a graph, the recommended plan, ")
        assert result["occurrenceCount"] == len(cause.members)
        if "keeps " in bearing:
            assert f"{len(nodes)} operations in FP32" in bearing
            assert nodes <= high
            seen.add("kept")
        else:
            assert "runs the operation in low precision and holds the budget" in bearing
            assert not nodes & high
            seen.add("low")
    assert seen == {"kept", "low"}
    assert plan.verified
