"""Regions: flagged nodes that read each other, run low together and held against what they explain one by one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.measure.attribute import first_order
from auditor.measure.rerun import MAX_REGIONS, Yardstick, of_verdicts, regions_of
from auditor.records import Capture, FlaggedRegion, Verdict
from tests.support.capturing import Function
from tests.support.subjects import capture_of, measurement_of, nodes_by_op, normal


def regions(model: nn.Module, *args: Tensor, flagged: Callable[[Capture], set[str]], fmt: str) -> Any:
    measured = measurement_of(model, *args)
    chosen = flagged(measured.capture)
    contributions = {
        name: {f: replace(one, isolated=float(f == fmt and name in chosen)) for f, one in by_format.items()}
        for name, by_format in first_order(measured).contributions.items()
    }
    return tuple(regions_of(measured, contributions, Yardstick(0.01)))


def named(*packets: str) -> Callable[[Capture], set[str]]:
    return lambda capture: {node.name for packet in packets for node in nodes_by_op(capture, packet)}


def relative(reference: Tensor, candidate: Tensor) -> float:
    return float((candidate.double() - reference.double()).norm() / reference.double().norm())


@pytest.mark.parametrize(("fmt", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_a_region_is_low_inside_and_fp32_outside(fmt: str, dtype: torch.dtype) -> None:
    x = normal(4, 8)
    model = Function(lambda x: ((x * 3.0).exp() / 7.0).sin())
    (region,) = regions(model, x, flagged=named("mul", "exp"), fmt=fmt)
    inside = (x.to(dtype) * 3.0).exp().float()
    assert (region.format, len(region.nodes), region.failure) == (fmt, 2, None)
    assert region.local_error == pytest.approx(relative((x * 3.0).exp(), inside))
    assert region.error == pytest.approx(relative(model(x), (inside / 7.0).sin()))


def test_errors_that_cancel_show() -> None:
    # Both quotients are rounded alike, so their difference has no error, though each alone moves the result.
    model = Function(lambda x: (x / 3.0 - x / 3.0) + x * 0.25)
    (region,) = regions(model, normal(4, 8), flagged=named("div", "sub"), fmt="bf16")
    assert len(region.nodes) == 3
    assert region.error == 0.0
    assert region.explained > 1e-3


def test_errors_that_reinforce_each_other_show() -> None:
    model = Function(lambda x: x / 3.0 + x / 3.0)
    (region,) = regions(model, normal(64, 64), flagged=named("div", "add"), fmt="fp16")
    # The same error twice is 2 of one, not sqrt 2; the sum's own rounding, exact here, adds nothing.
    assert region.error / region.explained == pytest.approx(math.sqrt(2), rel=0.25)


def test_views_between_flagged_nodes_belong_to_the_region() -> None:
    model = Function(lambda x: (x * 3.0).reshape(8, 4).exp() + 1.0)
    (region,) = regions(model, normal(4, 8), flagged=named("mul", "exp"), fmt="fp16")
    assert len(region.nodes) == 3


def test_a_region_that_turns_non_finite_says_so() -> None:
    model = Function(lambda x: (x * 1e4) / 1e4 + x)
    (region,) = regions(model, normal(4, 8) * 100, flagged=named("mul", "div"), fmt="fp16")
    assert region.local_error == region.error == math.inf


def test_only_the_regions_that_take_most_are_run() -> None:
    def pairs(x: Tensor) -> Tensor:
        return sum(((x * (1.1 + i)).exp() * 2.0**-i) @ torch.eye(8) for i in range(MAX_REGIONS + 2))

    result: tuple[FlaggedRegion, ...] = regions(Function(pairs), normal(4, 8), flagged=named("exp", "mul"), fmt="bf16")
    assert len(result) == MAX_REGIONS
    explained = [region.explained for region in result]
    assert explained == sorted(explained, reverse=True)


def test_only_what_is_judged_to_do_harm_is_told_and_once() -> None:
    model, x = Function(lambda x: (x * 3.0).exp()), normal(4, 8)
    found, captured = regions(model, x, flagged=named("mul", "exp"), fmt="fp16"), capture_of(model, x)

    def told(**harm: Any) -> tuple[FlaggedRegion, ...]:
        verdicts = {name: {"fp16": Verdict(harm.get(name, "safe"), "said so")} for name in captured.nodes}
        return of_verdicts((*found, *found), captured, verdicts)

    assert told(mul="unsafe", exp="sensitive") == found
    assert told(mul="unsafe") == ()
