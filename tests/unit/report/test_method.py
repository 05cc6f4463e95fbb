"""How an audit was made: FP32's noise, at which outputs, and from which operations."""

from __future__ import annotations

from dataclasses import replace

from auditor.records import Noise
from auditor.report.reporters import html as render
from auditor.report.view import NAMED, noise
from tests.unit.report.factory import make_audit


def test_what_is_said_of_noise() -> None:
    audit = make_audit()
    assert noise(audit) == noise(replace(audit, noise=Noise())) == {}
    assert noise(replace(audit, noise=Noise(runs=4))) == {"Noise": "4 runs in FP32 gave the same outputs"}
    node = audit.nodes[3].node
    loud = Noise(4, 0.004, 0.004, 0.012, {"a": 0.004, "b": 0.001}, {node.name: 0.02}, (node.name,))
    first, (title, second) = noise(replace(audit, noise=loud)).items()
    said = "4 runs in FP32 differ by 0.0040 (a 0.0040; b 0.0010); errors up to 0.012 count as noise"
    assert first == ("Noise", said)
    assert title == "Not deterministic" and second.endswith("off by 0.020")
    assert node.owner in second and str(node.source) in second
    assert second in render(replace(audit, noise=loud))
    names = tuple(dict.fromkeys(report.node.name for report in audit.nodes))
    said = noise(replace(audit, noise=Noise(2, 0.1, 0.1, 0.3, {}, dict.fromkeys(names, 0.1), names)))[
        "Not deterministic"
    ]
    assert said.count("off by") == NAMED and said.endswith("more, in measurements.json")
