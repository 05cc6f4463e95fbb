"""Mode training on the corpus: the culprit is unsafe where only the gradient fails, and nothing of its twin is."""

from __future__ import annotations

import pytest

import auditor
from auditor.result import Audit
from tests.corpus.case import Build, Case
from tests.corpus.catalogue import CASES
from tests.corpus.test_verdicts import is_culprit

TRAINING = tuple(case for case in CASES if case.mode == "train")


def audited(build: Build, case: Case, mode: str) -> Audit:
    model, inputs = build()
    return auditor.audit(model, inputs, mode=mode, formats=case.formats, device="cpu", strategies=("cast",))


def unsafe(audit: Audit, fmt: str) -> list:
    return [report for report in audit.nodes if report.verdicts[fmt].verdict == "unsafe"]


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_the_culprit_is_unsafe_backwards(case: Case) -> None:
    found = audited(case.build, case, "training")
    for fmt in case.formats:
        broken = unsafe(found, fmt)
        assert broken
        assert all(is_culprit(case, report.node) for report in broken)
        assert any("backward pass" in report.verdicts[fmt].reason for report in broken)
    assert any(advice.code == "backward-fails" for advice in found.training.advice)


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_nothing_of_the_twin_is(case: Case) -> None:
    found = audited(case.twin, case, "training")
    assert [unsafe(found, fmt) for fmt in case.formats] == [[] for _ in case.formats]


@pytest.mark.parametrize("case", TRAINING, ids=lambda case: case.name)
def test_inference_does_not_see_it(case: Case) -> None:
    """The forward pass is fine: without the training stage these verdicts would be missed."""
    reasons = [
        report.verdicts[fmt].reason
        for fmt in case.formats
        for report in unsafe(audited(case.build, case, "inference"), fmt)
    ]
    assert not any("backward pass" in reason for reason in reasons)
