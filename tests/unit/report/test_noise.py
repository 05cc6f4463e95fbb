"""FP32's noise in words: how much, at which outputs, and from which operations."""

from __future__ import annotations

from dataclasses import replace

from auditor.records import Noise
from auditor.report.noise import SHOWN, noise_lines
from auditor.report.reporters.html import render
from tests.unit.report.factory import make_audit


def test_nothing_is_said_of_what_is_not_known() -> None:
    assert noise_lines(make_audit()) == ()
    assert noise_lines(replace(make_audit(), noise=Noise())) == ()


def test_runs_that_were_the_same_are_said_to_be() -> None:
    assert noise_lines(replace(make_audit(), noise=Noise(runs=4))) == (
        ("Noise", "4 runs in FP32 gave the same outputs"),
    )


def test_operations_that_are_not_deterministic_are_named_with_their_place() -> None:
    audit = make_audit()
    node = audit.nodes[3].node
    noise = Noise(4, 0.004, 0.004, 0.012, {"a": 0.004, "b": 0.001}, {node.name: 0.02}, (node.name,))
    first, second = noise_lines(replace(audit, noise=noise))
    assert first == (
        "Noise",
        "4 runs in FP32 differ by 0.0040 (a 0.0040; b 0.0010); errors up to 0.012 are not called errors",
    )
    assert second[0] == "Not deterministic" and second[1].endswith("off by 0.020")
    assert node.owner in second[1] and str(node.source) in second[1]
    assert "Not deterministic" in render(replace(audit, noise=noise))


def test_of_many_operations_some_are_named() -> None:
    audit = make_audit()
    names = tuple(dict.fromkeys(report.node.name for report in audit.nodes))
    _, (_, said) = noise_lines(replace(audit, noise=Noise(2, 0.1, 0.1, 0.3, {}, dict.fromkeys(names, 0.1), names)))
    assert said.count("off by") == SHOWN and said.endswith("more, in measurements.json")
