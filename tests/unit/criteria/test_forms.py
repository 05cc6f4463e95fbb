"""Quadratic forms of the kinds, against the kinds themselves on small errors."""

from __future__ import annotations

import math

import pytest
import torch

from auditor.criteria import criteria_of
from auditor.criteria.forms import FORMS, form_of
from auditor.criteria.values import value
from tests.support.subjects import normal

CASES = {
    "rel_l2 <= 0.1": normal(6, 5),
    "kl <= 0.1": 3 * normal(6, 5),
    "kl(dim=0) <= 0.2": 2 * normal(6, 5),
    "kl <= 0.3": torch.log_softmax(normal(6, 5), -1),
    "cosine >= 0.9": normal(6, 5),
    "cosine(dim=0) >= 0.8": normal(6, 5),
    "psnr >= 30": normal(6, 5),
    "psnr(2) >= 20": normal(6, 5),
}


@pytest.mark.parametrize("text", CASES)
def test_the_mean_square_over_all_signs_is_the_square_of_the_share(text: str) -> None:
    # E <A e, d>^2 over random signs e is |A' d|^2: row by row of the identity in place of random signs, exactly
    (one,) = criteria_of(f"output: {text}")
    reference = CASES[text].double()
    error = 1e-4 * normal(6, 5, seed=1).double()
    form = form_of(one, reference)
    assert form is not None
    basis = torch.eye(reference.numel(), dtype=torch.float64).reshape(-1, *reference.shape)
    square = sum(float((form(unit) * error).sum()) ** 2 for unit in basis)
    assert math.sqrt(square) == pytest.approx(one.share(value(one, reference, reference + error)), rel=1e-3)


def test_kinds_without_a_form_and_limits_that_allow_nothing_have_none() -> None:
    assert set(FORMS) == {text.partition(" ")[0].partition("(")[0] for text in CASES}
    for text in ("max_abs <= 1", "top1 >= 0.5", "kl <= 0", "cosine >= 1"):
        (one,) = criteria_of(f"output: {text}")
        assert form_of(one, normal(3, 4)) is None
