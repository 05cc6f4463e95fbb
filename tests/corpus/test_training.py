"""Mode training on the corpus: the culprit is unsafe where only the gradient fails, and nothing of its twin is."""

from __future__ import annotations

import pytest

import auditor
from auditor.records.audit import Audit
from auditor.report.kept import precision_of
from tests.corpus.case import Build, Case
from tests.corpus.catalogue import CASES
from tests.corpus.test_verdicts import is_culprit

TRAINING = tuple(case for case in CASES if case.mode == "train")


def audited(build: Build, case: Case) -> Audit:
    model, inputs = build()
    return auditor.audit(model, inputs, mode="training", formats=case.formats, device="cpu", strategies=("cast",))


def unsafe(audit: Audit, fmt: str) -> list:
    return [report for report in audit.nodes if report.verdicts[fmt].verdict == "unsafe"]


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_the_culprit_is_unsafe_backwards(case: Case) -> None:
    found = audited(case.build, case)
    for fmt in case.formats:
        broken = unsafe(found, fmt)
        assert broken
        assert all(is_culprit(case, report.node) for report in broken)
        assert any("backward pass" in report.verdicts[fmt].reason for report in broken)
        assert precision_of(broken[0].node.owner, found.plans[f"cast_{fmt}"]) == "fp32"
    assert any(advice.code == "backward-fails" for advice in found.training.advice)


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_nothing_of_the_twin_is(case: Case) -> None:
    found = audited(case.twin, case)
    assert [unsafe(found, fmt) for fmt in case.formats] == [[] for _ in case.formats]
