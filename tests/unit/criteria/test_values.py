"""What each kind makes of two tensors, by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from auditor.criteria import Criterion, criteria_of
from auditor.criteria.values import unfit, value
from auditor.errors import AuditorError

INF = math.inf


def of(text: str, reference: list | Tensor, candidate: list | Tensor) -> float:
    (one,) = criteria_of(f"output: {text}")
    kind = torch.float64 if torch.as_tensor(reference).is_floating_point() else None
    return value(one, torch.as_tensor(reference, dtype=kind), torch.as_tensor(candidate, dtype=kind))


def log(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize(
    ("text", "reference", "candidate", "found"),
    [
        ("rel_l2 <= 1", [3.0, 4.0], [3.0, 4.5], 0.1),
        ("max_abs <= 1", [3.0, 4.0], [3.25, 3.5], 0.5),
        ("mean_abs <= 1", [3.0, 4.0], [3.25, 3.5], 0.375),
        ("rel_max <= 1", [3.0, -4.0], [3.25, -3.5], 0.125),
        ("rel_max <= 1", [0.0, 0.0], [0.0, 0.0], 0.0),
        # row 1: 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75); row 2: nothing
        ("kl <= 1", [log(0.5, 0.5), [1.0, 1.0]], [log(0.25, 0.75), [7.0, 7.0]], 0.25 * math.log(4 / 3)),
        ("kl(dim=0) <= 1", [[0.0, 1.0], [0.0, 1.0]], [log(0.25, 0.75)] * 2, 0.0),
        ("kl <= 1", [[0.0, -INF]], [[5.0, -INF]], 0.0),
        ("nats <= 1", [log(0.5, 0.5)], [log(0.25, 0.75)], math.log(2)),
        ("nats <= 1", [[3.0, 3.0]], [[9.0, 9.0]], 0.0),
        ("top1 >= 1", [[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [2.0, 1.0]], 0.5),
        ("top1 >= 1", [[2.0, 2.0]], [[1.0, 2.0]], 1.0),  # either of two largest
        ("top1(dim=0) >= 1", [[1.0, 2.0], [2.0, 1.0]], [[1.0, 2.0], [0.0, 1.0]], 0.5),
        ("topk(2) >= 1", [[3.0, 2.0, 1.0]], [[3.0, 1.0, 2.0]], 0.5),
        ("flips <= 1", [True, False, True, True], [True, True, True, True], 0.25),
        ("flips <= 1", [1, 2], [1, 3], 0.5),
        ("flips <= 1", [0.0, -1.0, 2.0, 1.0], [0.1, -2.0, -1.0, 1.0], 0.5),
        ("flips <= 1", [0.0, -INF], [-INF, -INF], math.nan),
        ("flips(0.5) <= 1", [0.4, 0.6], [0.6, 0.7], 0.5),
        ("cosine >= 1", [[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 1.0]], (1 + math.sqrt(0.5)) / 2),
        ("cosine >= 1", [[0.0, 0.0]], [[0.0, 0.0]], 1.0),
        ("cosine >= 1", [[1.0, 0.0]], [[0.0, 0.0]], 0.0),
        ("psnr >= 1", [0.0, 2.0], [0.2, 2.0], 10 * math.log10(4 / 0.02)),
        ("psnr(1) >= 1", [0.0, 2.0], [0.2, 2.0], 10 * math.log10(1 / 0.02)),
        ("psnr >= 1", [0.0, 2.0], [0.0, 2.0], INF),
        ("iou >= 1", [[0.0, 0, 2, 2], [0, 0, 1, 1]], [[0.0, 0, 2, 1], [0, 0, 1, 1]], 0.5),
        ("iou(mean) >= 1", [[0.0, 0, 2, 2], [0, 0, 1, 1]], [[0.0, 0, 2, 1], [0, 0, 1, 1]], 0.75),
        ("iou(cxcywh) >= 1", [[1.0, 1, 2, 2]], [[1.0, 0.5, 2, 1]], 0.5),
        ("iou(xywh) >= 1", [[0.0, 0, 2, 2]], [[0.0, 0, 2, 1]], 0.5),
        ("iou >= 1", [[1.0, 1, 1, 1]], [[1.0, 1, 1, 1]], 1.0),  # a box without a size, where it was
        ("iou >= 1", [[1.0, 1, 1, 1]], [[2.0, 2, 2, 2]], 0.0),
        ("max_abs <= 1", [1.0, INF], [1.5, INF], 0.5),
        ("max_abs <= 1", [1.0, INF], [1.5, 3.0], math.nan),
        ("max_abs <= 1", [1.0, 2.0], [1.5, math.nan], math.nan),
        ("kl <= 1", [[1.0, 2.0]], [[1.0, -INF]], math.nan),
    ],
)
def test_by_hand(text: str, reference: list, candidate: list, found: float) -> None:
    assert of(text, reference, candidate) == pytest.approx(found, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize(
    "text", ["kl <= 1", "max_abs <= 1", "top1 >= 1", "iou >= 1", "psnr >= 30", "cosine >= 1", "flips <= 0"]
)
def test_nothing_differs_where_there_is_nothing(text: str) -> None:
    (one,) = criteria_of(f"output: {text}")
    nothing = torch.zeros(0, 4)
    assert one.share(value(one, nothing, nothing)) == 0
    assert unfit(one, "output", nothing) is None


def test_kl_keeps_its_digits_where_distributions_are_near() -> None:
    # 1/2 d' F d with F = diag(p) - p p': p = (1/2, 1/2), d = (e, -e) gives e^2 / 2
    small = 1e-8
    assert of("kl <= 1", torch.zeros(1, 2).double(), torch.tensor([[small, -small]]).double()) == pytest.approx(
        small**2 / 2, rel=1e-6
    )


def test_a_function_is_called_with_the_two_tensors() -> None:
    one = Criterion("output", "far", 1.0, function=lambda r, c: (r - c).abs().sum())
    assert value(one, torch.ones(2), torch.zeros(2)) == 2.0
    broken = Criterion("output", "far", 1.0, function=lambda r, c: r.no_such_thing)
    with pytest.raises(AuditorError, match="far, the criterion of output, raised AttributeError: "):
        value(broken, torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("text", "reference", "why"),
    [
        (
            "iou >= 0.5",
            torch.ones(2, 3),
            "iou is for boxes, four numbers in the last dimension, and it is float32[2, 3]",
        ),
        ("kl <= 0.5", torch.ones(2, 3).long(), "kl is for outputs of floating-point numbers, and it is int64[2, 3]"),
        ("top1 >= 0.5", torch.tensor(1.0), "top1 goes over dimension -1, and it is float32[]"),
        ("kl(dim=2) <= 0.5", torch.ones(2, 3), "kl(dim=2) goes over dimension 2, and it is float32[2, 3]"),
        ("kl <= 0.5", torch.ones(2, 1), "compares the entries of dimension -1, and it, float32[2, 1], has one there"),
        ("topk(5) >= 0.5", torch.ones(2, 3), "topk(5) wants more entries than dimension -1 of it has"),
        ("cosine >= 0.5", torch.ones(2, dtype=torch.complex64), "cosine is for real numbers, and it is complex64[2]"),
        ("kl <= 0.5", torch.nested.nested_tensor([torch.ones(2)]), "kl is for tensors of one shape, and it is nested"),
        ("kl <= 0.5", torch.tensor([[INF, 1.0]]), "whose FP32 values are not finite where it counts"),
    ],
)
def test_what_does_not_fit_says_why(text: str, reference: Tensor, why: str) -> None:
    (one,) = criteria_of(f"it: {text}")
    assert why in (unfit(one, "it", reference) or "")
