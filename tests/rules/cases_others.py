"""Attention, constants and losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.case import Case, on, raised, ramp
from tests.support.capturing import Function

QUERY = ramp(1, 4, 8)
MASK = torch.tensor([[True, False, False, False]])


def scaled_after(q: Tensor) -> Tensor:
    return torch.softmax(q @ q.transpose(-1, -2) / 8.0, -1) @ q


def scaled_after_masked(q: Tensor) -> Tensor:
    scores = torch.einsum("bid,bjd->bij", q, q) * 0.125
    return torch.softmax(scores.masked_fill(MASK, float("-inf")), -1) @ q


def scaled_before(q: Tensor) -> Tensor:
    return torch.softmax((q * 0.125) @ q.transpose(-1, -2), -1) @ q


def scaled_before_masked(q: Tensor) -> Tensor:
    scores = (q * 0.125) @ q.transpose(-1, -2)
    return torch.softmax(scores.masked_fill(MASK, float("-inf")), -1) @ q


def fused(q: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, q, q)


def additive_mask(x: Tensor, m: Tensor) -> Tensor:
    return x + (1.0 - m.to(x.dtype)) * -1e9


def dtype_mask(x: Tensor) -> Tensor:
    return x.masked_fill(MASK, torch.finfo(x.dtype).min)


def dtype_mask_multiplied(x: Tensor, m: Tensor) -> Tensor:
    return x.maximum((1.0 - m.to(x.dtype)) * torch.finfo(x.dtype).min)


def normalised(x: Tensor) -> Tensor:
    return F.normalize(x, dim=-1)  # clamps the norm to 1e-12


def guarded(eps: float) -> Function:
    return Function(lambda x: x / (x.abs() + eps))


def clamped(top: float) -> Function:
    return Function(lambda x: torch.log1p(-x.clamp(max=top)))


def entropy(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y)


def entropy_sum(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy(x.sigmoid(), y, reduction="sum")


def entropy_with_logits(x: Tensor, y: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(x, y)


def entropy_protected(x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return F.binary_cross_entropy(x.float().sigmoid(), y.float())


def triplets(x: Tensor, y: Tensor) -> Tensor:
    return F.triplet_margin_loss(x, y, x.flip(0))


def connectionist(x: Tensor) -> Tensor:
    return F.ctc_loss(x.log_softmax(-1), LABELS, LENGTHS, SHORT)


def connectionist_by_hand(x: Tensor) -> Tensor:
    return F.ctc_loss(x - x.logsumexp(-1, keepdim=True), LABELS, LENGTHS, SHORT)


def classes(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(x, y)


def difference(x: Tensor, y: Tensor) -> Tensor:
    return (x - y).abs().mean()


TARGET = torch.ones(2, 8)
LABELS, LENGTHS, SHORT = torch.tensor([[1, 2], [3, 4]]), torch.tensor([6, 6]), torch.tensor([2, 2])
IDS = torch.tensor([1, 2])

CASES = (
    Case(
        "scaled after", *on(scaled_after, QUERY), {"ATT001": {"matmul"}, "ATT004": {"matmul_1"}}, ("ATT002", "ATT003")
    ),
    Case("scaled after, masked", *on(scaled_after_masked, QUERY), {"ATT001": {"einsum"}}, ("ATT002", "CON001")),
    # q.q sums eight squares of up to 300: 8 * 90000 > 65504
    Case("scaled after, large", *on(scaled_after, QUERY * 300), {"ATT001": {"matmul"}}, ("ATT002", "ACT002")),
    # an eighth of the sum of eight squares: the mean square of 309 to 400, still above 65504
    Case("scaled before, large", *on(scaled_before, QUERY * 400), {"ATT002": {"matmul"}}, ("ATT001", "ACT002")),
    Case("scaled before, masked, large", *on(scaled_before_masked, QUERY * 400), {"ATT002": {"matmul"}}, ("ATT001",)),
    Case("scaled before", *on(scaled_before, QUERY), {"ATT004": {"matmul_1"}}, ("ATT001", "ATT002", "ATT003")),
    Case("scaled after, upcast", *on(raised(scaled_after), QUERY * 300), {}, ("ATT001", "ATT002")),
    Case("fused", *on(fused, QUERY), {"ATT003": {"scaled_dot_product_attention"}}, ("ATT001", "ATT004")),
    Case("fused, other input", *on(fused, QUERY * 300), {"ATT003": {"scaled_dot_product_attention"}}),
    Case("fused, upcast", *on(raised(fused), QUERY), {}, ("ATT003",)),
    Case("softmax alone", *on(lambda x: x.softmax(-1), QUERY), {}, ("ATT004",)),
    Case("masked fill", *on(lambda x: x.masked_fill(MASK, -1000000000.0), ramp(2, 4)), {"CON001": {"masked_fill"}}),
    Case("additive mask", *on(additive_mask, ramp(2, 4), MASK), {"CON005": {"mul"}}, ("CON001", "ACT002")),
    # torch takes the literal of a product in FP32: 1e-3 * 1e6 is 1000 in half precision too
    Case(
        "small times a large literal",
        *on(lambda x: x * 1000000.0, ramp(2, 4) * 0.001),
        {},
        ("CON001", "CON005", "ACT002"),
    ),
    Case("divided by a large literal", *on(lambda x: x / 1000000.0, ramp(2, 4)), {}, ("CON001", "CON005")),
    Case(
        "a large literal added",
        *on(lambda x: (100000.0 + x).log(), ramp(2, 4)),
        {"CON005": {"add"}},
        ("CON001", "ACT002"),
    ),
    Case("where", *on(lambda x: torch.where(MASK, x, -1000000000.0), ramp(2, 4)), {"CON001": {"where"}}, ("CON005",)),
    Case("mask by dtype, multiplied", *on(dtype_mask_multiplied, ramp(2, 4), MASK), {}, ("ACT002", "CON001", "CON005")),
    Case("mask by dtype", *on(dtype_mask, ramp(2, 4)), {}, ("CON001",)),
    Case("mask that fits", *on(lambda x: x.masked_fill(MASK, -65504.0), ramp(2, 4)), {}, ("CON001",)),
    Case("eps of normalize", *on(normalised, ramp(2, 4)), {"CON002": {"clamp_min"}}),
    Case("eps 1e-8", lambda: guarded(1e-08), (ramp(2, 4),), {"CON002": {"add"}}),
    Case("eps 1e-6", lambda: guarded(1e-06), (ramp(2, 4),), {}, ("CON002",)),
    Case("eps in float32", *on(raised(guarded(1e-12)), ramp(2, 4)), {}, ("CON002",)),
    # FP16 has 1 - 2**-11 = 0.99951 below 1, BF16 1 - 2**-8 = 0.9961
    Case("1 - 1e-6", lambda: clamped(1 - 1e-06), (ramp(2, 4),), {"CON003": {"clamp"}}, ("CON004",)),
    Case("1 - 1e-4", lambda: clamped(1 - 0.0001), (ramp(2, 4),), {"CON003": {"clamp"}}, ("CON004",)),
    Case("0.999", lambda: clamped(0.999), (ramp(2, 4),), {"CON004": {"clamp"}}, ("CON003",)),
    Case("factor 0.9985", *on(lambda x: x * 0.9985, ramp(2, 4)), {"CON004": {"mul"}}, ("CON003",)),
    Case("0.99", lambda: clamped(0.99), (ramp(2, 4),), {}, ("CON003", "CON004")),
    Case("1 - 1e-6 in float32", *on(raised(clamped(1 - 1e-6)), ramp(2, 4)), {}, ("CON003", "CON004")),
    Case("binary cross entropy", *on(entropy, ramp(2, 8), TARGET), {"LOS001": {"binary_cross_entropy"}}, ("LOS002",)),
    Case("binary cross entropy out of reach of autocast", *on(entropy_protected, ramp(2, 8), TARGET), {}, ("LOS001",)),
    Case("triplets", *on(triplets, ramp(2, 8), TARGET), {"LOS002": {"triplet_margin_loss"}}),
    Case("connectionist", *on(connectionist, ramp(6, 2, 5)), {"LOS003": {"ctc_loss"}}, ("LOS002",)),
    Case("connectionist by hand", *on(connectionist_by_hand, ramp(6, 2, 5)), {"LOS003": {"ctc_loss"}}, ("LOS002",)),
    Case("connectionist, upcast", *on(raised(connectionist), ramp(6, 2, 5)), {}, ("LOS003", "LOS002")),
    Case("its sum", *on(entropy_sum, ramp(2, 8), TARGET), {"LOS001": {"binary_cross_entropy"}}),
    Case(
        "with logits",
        *on(entropy_with_logits, ramp(2, 8), TARGET),
        {"LOS002": {"binary_cross_entropy_with_logits"}},
        ("LOS001",),
    ),
    Case("cross entropy", *on(classes, ramp(2, 8), IDS), {"LOS002": {"cross_entropy_loss"}}, ("LOS001",)),
    Case("cross entropy, upcast", *on(raised(classes), ramp(2, 8), IDS), {}, ("LOS002",)),
    Case("a mean difference", *on(difference, ramp(2, 8), TARGET), {}, ("LOS001", "LOS002", "LOS003")),
)
