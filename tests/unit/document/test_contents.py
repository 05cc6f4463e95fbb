"""What stands in plan.json for records that it does not hold as they are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.document.contents import AuditedModel, Histogram, Range, shared_modules, tied_parameters
from auditor.formats.histogram import magnitudes_of
from auditor.records import Magnitudes
from tests.unit.report.factory import make_audit


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
