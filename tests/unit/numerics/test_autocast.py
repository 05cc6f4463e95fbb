"""What autocast makes of an operation's arguments, by dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.numerics.autocast import autocast_arguments
from auditor.numerics.casting import carried_in, in_format
from auditor.numerics.formats import FORMATS
from auditor.numerics.kernels import UnsupportedInFormat

HALF, FLOAT = torch.ones(2).half(), torch.ones(2)


def dtypes(tree: Any) -> list[torch.dtype]:
    return [x.dtype for x in tree if isinstance(x, Tensor)]


@pytest.mark.parametrize(
    ("op", "args", "expected"),
    [
        ("aten.linear.default", (FLOAT, HALF), [torch.float16, torch.float16]),
        ("aten.exp.default", (HALF,), [torch.float32]),
        ("aten.softmax.int", (HALF, 0), [torch.float32]),
        ("aten.softmax.int", (HALF, 0, torch.float16), [torch.float16]),  # the author asked for a dtype
        ("aten.addcmul.default", (HALF, FLOAT, HALF), [torch.float32] * 3),
        ("aten.addcmul.default", (HALF, HALF, HALF), [torch.float16] * 3),
        ("aten.relu.default", (HALF,), [torch.float16]),
        ("aten.linear.default", (torch.ones(2).double(), torch.ones(2).double()), [torch.float64] * 2),
    ],
)
def test_what_autocast_hands_over(op: str, args: tuple[Any, ...], expected: list[torch.dtype]) -> None:
    found, _ = autocast_arguments(op, args, {}, FORMATS["fp16"])
    assert dtypes(found) == expected


def test_keywords_are_cast_too() -> None:
    _, kwargs = autocast_arguments("aten.linear.default", (), {"input": FLOAT, "bias": None}, FORMATS["bf16"])
    assert kwargs["input"].dtype is torch.bfloat16
    _, kept = autocast_arguments("aten.sum.default", (), {"self": HALF, "dtype": torch.float16}, FORMATS["fp16"])
    assert kept["self"].dtype is torch.float16


def test_what_autocast_refuses() -> None:
    with pytest.raises(UnsupportedInFormat, match="binary_cross_entropy"):
        autocast_arguments("aten.binary_cross_entropy.default", (HALF, HALF), {}, FORMATS["fp16"])


def test_a_recurrent_layer_is_lowered_to_fp16_where_autocast_takes_the_format() -> None:
    args, _ = autocast_arguments("aten.lstm.input", (FLOAT,), {}, FORMATS["bf16"])
    assert dtypes(args) == [torch.float16]
    args, _ = autocast_arguments("aten.lstm.input", (FLOAT,), {}, FORMATS["fp8_e4m3"])  # none of autocast's: as asked
    assert carried_in(args[0]) is FORMATS["fp8_e4m3"]


def test_a_format_that_torch_lacks_is_asked_for_as_a_dtype_is() -> None:
    carried, row = in_format(FLOAT, FORMATS["fp8_e4m3"]), FORMATS["fp8_e4m3"]
    args, _ = autocast_arguments("aten.softmax.int", (carried, 0, row), {}, row)
    assert carried_in(args[0]) is row
    args, _ = autocast_arguments("aten.softmax.int", (carried, 0), {}, row)
    assert carried_in(args[0]) is None  # raised to FP32 where no dtype is given
