"""What is cast at one operation: the scope, the author's region, what was written in place, and literals, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from auditor.execution.running import AS_WRITTEN, FULL, Casts, Running, Setting, straight
from auditor.records import AutocastRegion, Literals, Node

LINEAR = Node("n", "aten.linear.default", "", "", None, None, None, (), (1,), "float32", True)
HALF = Literals({1: torch.float16})


def under(precision: str, autocast: bool, wins: bool = False) -> Running:
    return Running(lambda name: Setting(precision, autocast, wins), literals={"n": HALF})


def test_nothing_is_cast_in_fp32() -> None:
    assert FULL.casts(LINEAR) == Casts("none", "fp32", AS_WRITTEN)
    assert straight("a", "b") == ()


@pytest.mark.parametrize(
    ("op", "autocast", "precision"),
    [
        ("aten.linear.default", "lower", "bf16"),
        ("aten.exp.default", "fp32", "bf16"),
        ("aten.relu.default", "none", "bf16"),
        ("aten.lstm.input", "lower", "fp16"),  # cuDNN's recurrent layers know FP16 alone
    ],
)
def test_what_autocast_does_is_the_operations(op: str, autocast: str, precision: str) -> None:
    found = under("bf16", True).casts(replace(LINEAR, op=op))
    assert (found.autocast, found.precision, found.literals) == (autocast, precision, HALF)


def test_a_cast_scope_leaves_arguments_alone_and_python_sees_its_dtype() -> None:
    assert under("fp16", False).casts(LINEAR) == Casts("none", "fp16", HALF)


def test_autocast_leaves_alone_what_is_written_in_place() -> None:
    assert under("fp16", True).casts(replace(LINEAR, in_place=True)).autocast == "none"


def test_the_authors_region_wins_over_a_scope_that_encloses_it() -> None:
    off, on = (replace(LINEAR, region=AutocastRegion(enabled, "bfloat16", 1)) for enabled in (False, True))
    assert under("fp16", True).casts(off).autocast == "none"
    assert under("fp16", True).casts(on) == Casts("lower", "bf16", HALF)
    assert under("fp16", True, wins=True).casts(off) == Casts("lower", "fp16", HALF)
