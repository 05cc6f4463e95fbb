"""Which format to train in, on errors and windows that are written down."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.numerics.histogram import magnitudes_of
from auditor.records.training import LossScale
from auditor.training.recommend import format_to_train_in
from auditor.training.window import loss_scale

BOTH = ("fp16", "bf16")


def window(*exponents: int) -> LossScale:
    found = loss_scale({"a": magnitudes_of(torch.tensor([1.5 * 2.0**e for e in exponents]))})
    assert found is not None
    return found


OPEN, CLOSED = window(0, -10), window(3, -40)


@pytest.mark.parametrize(
    ("errors", "scale", "recommended", "format", "reason"),
    [
        ({"fp16": 4e-4, "bf16": 3e-3}, OPEN, "autocast_fp16", "fp16", "FP16 with GradScaler"),
        ({"fp16": 4e-4, "bf16": 3e-3}, OPEN, "autocast_bf16", "bf16", "the recommended plan runs in it"),
        # gradients that are finite and wrong
        ({"fp16": 0.64, "bf16": 3e-3}, OPEN, None, "bf16", "the gradients of FP16 are 64% off"),
        ({"fp16": 0.64, "bf16": 0.3}, OPEN, None, None, "FP32: the gradients of BF16 are 30% off"),
        ({"fp16": 0.64}, OPEN, None, None, "FP32: the gradients of FP16 are 64% off"),
        ({"fp16": 0.64}, OPEN, "autocast_fp16", None, "64% off"),
        ({"fp16": 2e-3, "bf16": 0.3}, OPEN, "autocast_bf16", "fp16", "the gradients of BF16 are 30% off"),
        # FP16 is usually the closer one; where it is not, something is lost
        ({"fp16": 0.05, "bf16": 0.01}, OPEN, "autocast_fp16", "bf16", "differ from FP32's by 0.01, FP16's by 0.05"),
        # not finite, or not run
        ({"fp16": math.inf, "bf16": 3e-3}, OPEN, None, "bf16", "no finite gradients"),
        ({"fp16": None, "bf16": math.nan}, OPEN, None, None, "in no format"),
        ({"fp16": math.inf, "bf16": None}, OPEN, None, None, "in no format"),
        ({"fp16": 4e-4, "bf16": 3e-3}, CLOSED, "autocast_fp16", "bf16", "no loss scale suits FP16"),
        ({"fp16": 4e-4}, CLOSED, "autocast_fp16", None, "no loss scale suits FP16"),
        ({"fp16": 0.0, "bf16": 0.0}, None, None, None, "autocast lowers nothing"),
    ],
)
def test_the_format_and_why(
    errors: dict[str, float | None], scale: LossScale | None, recommended: str | None, format: str | None, reason: str
) -> None:
    found, why = format_to_train_in(tuple(errors) or BOTH, scale, errors, recommended)
    assert found == format
    assert reason in why
