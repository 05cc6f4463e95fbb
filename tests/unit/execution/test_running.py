"""What is cast at one operation: the scope, the author's region, what was written in place, and literals, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from auditor.execution.policy import AS_WRITTEN, Casts, Policy, Setting, plain
from auditor.records import AutocastRegion, Literals, Node
from tests.subjects import capture_of, only

CAPTURE = capture_of(nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2))
HALF = Literals({1: torch.float16})
WRITTEN = {"fp16": HALF, "bf16": HALF}
LINEAR = replace(only(CAPTURE, "linear"), literals=WRITTEN, autocast_literals=WRITTEN)


def under(strategy: str, format: str) -> Policy:
    return Policy(CAPTURE, strategy, plain(format), format)


def test_nothing_is_cast_in_fp32() -> None:
    assert Policy.wide(CAPTURE).casts(LINEAR) == Casts("none", "fp32", AS_WRITTEN)


@pytest.mark.parametrize(
    ("op", "autocast"),
    [("aten.linear.default", "lower"), ("aten.exp.default", "fp32"), ("aten.relu.default", "none")],
)
def test_what_autocast_does_is_the_operations(op: str, autocast: str) -> None:
    assert under("autocast", "bf16").casts(replace(LINEAR, op=op)) == Casts(autocast, "bf16", HALF)


def test_a_cast_scope_leaves_arguments_alone_and_python_sees_its_dtype() -> None:
    assert under("cast", "fp16").casts(LINEAR) == Casts("none", "fp16", HALF)


def test_autocast_leaves_alone_what_is_written_in_place() -> None:
    assert under("autocast", "fp16").casts(replace(LINEAR, in_place=True)).autocast == "none"


def test_the_authors_region_wins_over_a_scope_that_encloses_it() -> None:
    off, on = (AutocastRegion(enabled, "bfloat16", 1) for enabled in (False, True))

    def inside(region: AutocastRegion) -> Node:
        return replace(LINEAR, region=region)

    assert under("autocast", "fp16").casts(inside(off)).autocast == "none"
    assert under("autocast", "fp16").casts(inside(on)) == Casts("lower", "bf16", HALF)
    assert Setting("fp16", True, wins=True).in_region(off) == Setting("fp16", True, wins=True)
