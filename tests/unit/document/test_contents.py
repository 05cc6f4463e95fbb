"""What stands in plan.json for records that it does not hold as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.document.contents import (
    AuditedModel,
    Document,
    Histogram,
    Range,
    digest,
    shared_modules,
    steady,
    tied_parameters,
)
from auditor.document.write import written
from auditor.numerics.histogram import magnitudes_of
from auditor.records import Magnitudes
from tests.unit.report.factory import make_audit

# Ten entries: 2^-26, twice 2^-20, 2^3, two zeros, one Inf, three more of 2^0. FP16 keeps 2^-24 and its half rounds to zero:
# 2^-26 is flushed, 2^-20 is subnormal (its smallest normal number is 2^-14).
FOUND = Magnitudes(8.0, 2.0**-26, 2, {-26: 1, -20: 2, 0: 3, 3: 1}, 1, 8.2, {"fp16": 0.25})


def test_parameters_and_modules_under_several_names() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2), "c": nn.Linear(2, 2)})
    assert (tied_parameters(model), shared_modules(model)) == ((), ())
    model["b"].weight = model["a"].weight
    assert tied_parameters(model) == (("a.weight", "b.weight"),)
    model["d"] = model["c"]
    assert shared_modules(model) == (("c", "d"),)
    assert ("c.bias", "d.bias") in tied_parameters(model)


def test_a_range_has_its_zeros_as_a_share() -> None:
    found = Range.of(Magnitudes(8.0, 0.5, 1, {-1: 2, 3: 1}))
    assert (found.max_abs, found.min_abs, found.zeros) == (8.0, 0.5, 0.25)
    assert {int(power): count for power, count in found.exponents.items()} == {-1: 2, 3: 1}


def test_a_histogram_has_its_zeros_as_a_count() -> None:
    found = Histogram.of(magnitudes_of(torch.tensor([0.0, 3.0, -4.0, float("inf")])))
    assert (found.max_abs, found.zeros, found.nonfinite) == (4.0, 1, 1)
    assert found.norm == pytest.approx(5.0)


def test_what_is_said_of_the_model() -> None:
    audit = make_audit()
    found = AuditedModel.of(audit)
    assert (found.name, found.source, found.parameters) == ("TinyGPT", "model.py:get_model", 124_439_808)
    assert (found.inputs, found.capture) == (audit.inputs, "run")


def test_a_histogram_has_what_fp16_does_to_it() -> None:
    found = Histogram.of(FOUND)
    assert (found.zeros, found.nonfinite, found.max_abs, found.norm) == (2, 1, 8.0, 8.2)
    assert (found.fp16_flushed, found.fp16_subnormal) == (pytest.approx(1 / 7), pytest.approx(2 / 7))
    assert (found.fp16_rounding, found.bf16_rounding) == (0.25, None)


def test_the_top_has_the_order_of_the_file() -> None:
    assert list(written(Document.of(make_audit(4)))) == [
        "format_version",
        "subject",
        "formats",
        "environment",
        "budget",
        "recommended",
        "use",
        "recommendation",
        "plans",
        "baselines",
        "nodes",
        "classes",
        "graph_inputs",
        "graph_outputs",
        "weights",
        "regions",
        "linearity",
        "noise",
        "findings",
        "warnings",
        "command",
        "plan_errors",
    ]


def test_what_limits_the_audit_includes_what_the_subject_lacks() -> None:
    warnings = Document.of(make_audit(4, synthetic=True)).warnings
    assert [text.split(":")[0] for text in warnings] == [
        "weights are RANDOM",
        "inputs are made up",
        "Inputs were synthesised.",
    ]


def test_what_stages_took_is_left_out_of_comparisons() -> None:
    slow, quick = ({"environment": {"seed": 0, "seconds": {"plan": spent}}, "plans": {}} for spent in (9.0, 1.0))
    assert digest(slow) == digest(quick) == digest({"environment": {"seed": 0}, "plans": {}})
    assert digest(slow) != digest({**slow, "environment": {"seed": 1, "seconds": {"plan": 9.0}}})
    assert steady(slow) == {"environment": {"seed": 0}, "plans": {}}
    assert (steady([1]), steady({"environment": 3})) == ([1], {"environment": 3})
