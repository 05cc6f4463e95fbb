"""What the rules alone would keep in FP32: what they declare decides, not what the measurement made of it."""

from __future__ import annotations

import random

import pytest

from auditor.plan.choices import ruled
from auditor.records import Finding
from tests.problems import captured, drawn, owners_of


def finding(declared: str, severity: str, agrees: bool | None, formats: tuple[str, ...] = ("fp16",)) -> Finding:
    node = next(node for node in captured("chain").nodes.values() if node.owner == "2")
    return Finding(
        rule="ABC001",
        name="name",
        node=node.name,
        owner=node.owner,
        op=node.op,
        source=None,
        severity=severity,
        confidence="high",
        formats=formats,
        message="message",
        why="why",
        advice="advice",
        agrees=agrees,
        declared=declared,
    )


@pytest.mark.parametrize(
    ("found", "kept"),
    [
        (finding("error", "error", True), True),
        (finding("warning", "warning", None), True),
        (finding("warning", "info", False), True),  # the measurement has no say here
        (finding("error", "info", False), True),
        (finding("info", "info", False), False),
        (finding("info", "info", True), False),
        (finding("info", "info", None), False),
        (finding("error", "error", True, ("bf16",)), False),
    ],
)
def test_the_rules_alone_keep_what_they_declare(found: Finding, kept: bool) -> None:
    problem = drawn("chain", "autocast", random.Random(0))
    labels = ruled(problem, [found]).precision
    assert {owner for owner in owners_of(problem.capture) if labels[owner] == "fp32"} == ({"2"} if kept else set())
