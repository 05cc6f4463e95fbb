"""What an earlier audit measured stands in for measuring again: the same numbers, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from auditor.loading import from_object, in_eval
from auditor.measure.attribute import attribute
from auditor.measure.estimates import lone_views
from auditor.measure.measure import Facts, Measurement, measure
from auditor.measure.recalled import Attributed, Recalled
from auditor.tape import capture
from tests.unit.cache.test_kept import Attending, Choosing

FORMATS = ("fp16", "bf16", "fp8_e4m3")


class Overflowing(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.exp() * 9e4).log().reshape(-1).cumsum(0).to(torch.int32) + (x * x).sum().long()


@pytest.fixture(scope="module", params=[Attending, Choosing, Overflowing, lambda: nn.Conv1d(3, 4, 3)])
def measured(request: pytest.FixtureRequest) -> tuple[Measurement, Recalled]:
    model, x = request.param(), torch.randn(3, 8, generator=torch.Generator().manual_seed(2))
    subject = from_object(model, x)
    with in_eval(model):
        captured = capture(subject, FORMATS)
        found = measure(captured, model, subject.batches[0], FORMATS)
    facts = Facts(
        {n: dict(e) for n, e in found.errors.items()},
        dict(found.ranges),
        {name: dict(low) for name, low in found.low.items()},
    )
    attributed = Attributed(attribute(found), lone_views(found))
    assert facts.fits(captured, FORMATS)
    assert attributed.fits(captured, FORMATS)
    assert not facts.fits(captured, FORMATS[:1])
    assert not replace(facts, errors={}).fits(captured, FORMATS)
    again = measure(captured, model, subject.batches[0], FORMATS)
    return again, Recalled(captured, FORMATS, model, subject.batches[0], facts, attributed)


def test_values_come_back_without_the_formats(measured: tuple[Measurement, Recalled]) -> None:
    whole, recalled = measured
    assert list(recalled.again.values) == list(whole.values)
    for name, value in whole.values.items():
        torch.testing.assert_close(recalled.again.values[name], value, rtol=0, atol=0, equal_nan=True)
    assert (dict(recalled.errors), recalled.ranges, recalled.low) == (dict(whole.errors), whole.ranges, whole.low)


def test_with_what_is_known_attributing_finds_the_same(measured: tuple[Measurement, Recalled]) -> None:
    _, recalled = measured
    light = measure(recalled.capture, recalled.model, recalled.batch, FORMATS, known=recalled.facts)
    assert light.errors == recalled.errors
    assert light.low == recalled.low
    assert dict(light.ranges) == recalled.ranges
    assert attribute(light) == recalled.attributed.contributions
