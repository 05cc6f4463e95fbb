"""Literals of a run in FP16, as a format that torch has no dtype for would have them."""

from __future__ import annotations

import pytest
import torch

from auditor.capture.stand_in import stand_in, translated
from auditor.numerics.formats import FORMATS, Format
from auditor.records import Literals

E6M9 = Format.ieee("e6m9", 6, 9)
LARGEST = (2 - 2.0**-9) * 2.0**31


def test_who_stands_in() -> None:
    assert stand_in(E6M9) is FORMATS["fp16"]
    assert stand_in(FORMATS["bf16"]) is FORMATS["bf16"]


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
    assert translated(Literals({1: ours}), E6M9).arguments == {1: theirs}


def test_other_values_stay_as_the_fp32_model_has_them() -> None:
    assert translated(Literals({"value": 0.125}), E6M9).arguments == {}


def test_its_dtype_becomes_the_format() -> None:
    found = translated(Literals({"dtype": torch.float16}, torch.float16), E6M9)
    assert (found.arguments, found.result) == ({"dtype": E6M9}, E6M9)
    assert translated(Literals({}, torch.float32), E6M9).result is torch.float32


def test_a_format_that_was_run_in_keeps_its_own() -> None:
    own = Literals({1: 65504.0}, torch.float16)
    assert translated(own, FORMATS["fp16"]) is own
