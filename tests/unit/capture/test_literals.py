"""Literals that Python derived from a dtype, in the dtype of the run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture import literals
from auditor.capture.literals import translate
from auditor.numerics.formats import Format
from auditor.records import Capture, Literals
from tests.support.capturing import Function
from tests.support.subjects import capture_of, nodes_by_op, only

X = torch.tensor([[1.0, -1.0]])


def arguments(found: Capture, fmt: str) -> dict[str, Any]:
    """{node: {argument: literal}} of those that change with the format."""
    return {name: node.literals[fmt].arguments for name, node in found.nodes.items() if fmt in node.literals}


def masked(x: Tensor) -> Tensor:
    return x.masked_fill(x > 0, torch.finfo(x.dtype).min).softmax(-1)


def test_the_smallest_number_of_the_dtype() -> None:
    found = capture_of(Function(masked), X)
    name = only(found, "masked_fill").name
    assert arguments(found, "fp16") == {name: {2: -65504.0}}
    assert arguments(found, "bf16") == {name: {2: torch.finfo(torch.bfloat16).min}}


def test_epsilon_and_tiny() -> None:
    found = capture_of(
        Function(lambda x: x / (x.abs() + torch.finfo(x.dtype).eps).clamp(min=torch.finfo(x.dtype).tiny)), X
    )
    assert arguments(found, "fp16") == {
        only(found, "add").name: {1: 2.0**-10},
        only(found, "clamp").name: {1: 2.0**-14},
    }


def test_a_cast_back_to_the_dtype_of_the_input() -> None:
    found = capture_of(Function(lambda x: x.float().exp().to(x.dtype)), X)
    up, down = nodes_by_op(found, "to")
    assert arguments(found, "fp16") == {down.name: {1: torch.float16}}
    assert arguments(found, "bf16") == {down.name: {1: torch.bfloat16}}
    assert not up.literals


EPS = {torch.float32: 1e-8, torch.float16: 1e-4, torch.bfloat16: 1e-3}


@pytest.mark.parametrize(
    ("chosen", "fp16", "bf16"),
    [
        (lambda x: x.abs() + EPS[x.dtype], 1e-4, 1e-3),
        (lambda x: x.abs() + (1e-4 if x.dtype == torch.float16 else 1e-8), 1e-4, None),
        (lambda x: x.abs() + (1e-8 if x.itemsize > 2 else 1e-4), 1e-4, 1e-4),
        (lambda x: x - 1e9 if x.dtype != torch.float16 else x - 1e4, 1e4, None),
        (lambda x: x.abs() + (1e-3 if x.dtype != torch.float16 else 1e-2), 1e-2, None),
        (lambda x: x.clamp(max=88.0 if x.dtype != torch.float16 else 11.0).exp(), 11.0, None),
    ],
    ids=["table", "comparison", "size", "large", "less small", "limit of exp"],
)
def test_numbers_that_python_chooses_by_the_dtype(
    chosen: Callable[[Tensor], Tensor], fp16: float, bf16: float | None
) -> None:
    found = capture_of(Function(chosen), X)
    assert found.compared
    for name, number in (("fp16", fp16), ("bf16", bf16)):
        assert [list(each.values()) for each in arguments(found, name).values()] == ([[number]] if number else [])


def test_ordinary_numbers_are_not_looked_up(monkeypatch: Any) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(literals, "record", refused)
    asked = Function(lambda x: torch.pow(x * 0.044715, 3) / 8.0 if x.dtype.is_floating_point else x)
    assert not capture_of(asked, X).compared


E6M9 = Format.ieee("e6m9", 6, 9)
LARGEST = (2 - 2.0**-9) * 2.0**31


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (65504.0, LARGEST),
        (-65504.0, -LARGEST),
        (2.0**-14, 2.0**-30),  # the smallest normal numbers: 1 less the bias, 15 and 31
        (2.0**-10, 2.0**-9),  # epsilon
        (1e-3, 1e-2),  # decimal digits: 10 and 9 bits are 3.01 and 2.7 of them
        (1 - 2.0**-10, 1 - 2.0**-9),
    ],
)
def test_limits_of_fp16_become_those_of_the_format(ours: float, theirs: float) -> None:
    assert translate(Literals({1: ours}), E6M9).arguments == {1: theirs}


def test_other_values_stay_as_the_fp32_model_has_them() -> None:
    assert translate(Literals({"value": 0.125}), E6M9).arguments == {}


def test_its_dtype_becomes_the_format() -> None:
    found = translate(Literals({"dtype": torch.float16}, torch.float16), E6M9)
    assert (found.arguments, found.result) == ({"dtype": E6M9}, E6M9)
    assert translate(Literals({}, torch.float32), E6M9).result is torch.float32
