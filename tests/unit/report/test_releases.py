"""A release of torch that was not tested is a line of every report, and no surprise."""

from dataclasses import replace

import pytest
import torch

import auditor
from auditor.report.blocks import to_terminal
from auditor.report.releases import untested_words
from auditor.reporters import overview
from auditor.resources import table
from tests.support.subjects import seeded


def test_a_tested_release_has_no_line() -> None:
    for release in table("tested")["torch"]:
        assert list(untested_words(release)) == []
        assert list(untested_words(f"{release}+cpu")) == []


@pytest.mark.parametrize(
    ("release", "word"),
    [("99.0.0", "newer"), ("2.200.1+cu130", "newer"), ("3.0.0a0+git1", "newer"), ("2.2.9", "older")],
)
def test_another_release_is_named_with_those_that_were_tested(release: str, word: str) -> None:
    (line,) = untested_words(release)
    assert f"torch {release} is {word}" in line
    assert " to ".join(table("tested")["torch"]) in line


def test_the_report_has_the_line() -> None:
    model = seeded(lambda: torch.nn.Linear(4, 4))
    audit = auditor.audit(model, torch.ones(2, 4), formats="bf16", strategies="cast", quick=True)
    later = replace(audit, environment=replace(audit.environment, torch="99.1.0"))
    assert "torch 99.1.0 is newer" in " ".join(to_terminal(overview(later), 100, False).split())
    assert "99.1.0 is newer" not in to_terminal(overview(audit), 100, False)
