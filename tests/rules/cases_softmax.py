"""Softmax: native, by hand with and without the shift, over long axes; exponentials that leave FP16."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rules.case import Case, on, raised, ramp


def unshifted(x: Tensor) -> Tensor:
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)


def unshifted_guarded(x: Tensor) -> Tensor:
    e = torch.exp(x * 0.5)
    return e / (e.sum(-1, keepdim=True) + 1e-6)


def shifted(x: Tensor) -> Tensor:
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def shifted_by_max_values(x: Tensor) -> Tensor:
    e = (x - x.max(dim=-1, keepdim=True).values).exp()
    return e / e.sum(-1, keepdim=True).clamp_min(1e-6)


def log_softmax(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()


def log_softmax_from_the_logits(x: Tensor) -> Tensor:
    top = x.max(-1, keepdim=True)[0]
    return x - (torch.log((x - top).exp().sum(-1, keepdim=True)) + top)


def gate(x: Tensor) -> Tensor:
    return torch.exp(x) / (1 + torch.exp(-x))  # exponentials and a quotient, but no sum over an axis


HAND = ("SFT002", "SFT003")

CASES = (
    Case("softmax", *on(lambda x: x.softmax(-1), ramp(2, 8)), {"SFT001": {"softmax"}}, (*HAND, "SFT005", "SFT006")),
    Case(
        "log softmax", *on(lambda x: x.log_softmax(-1), ramp(2, 8)), {"SFT001": {"log_softmax"}}, ("SFT005", "SFT007")
    ),
    Case("softmax in float32", *on(lambda x: torch.softmax(x, -1, dtype=torch.float32), ramp(2, 8)), {}, ("SFT001",)),
    Case("softmax of a float32 copy", *on(lambda x: x.float().softmax(-1), ramp(2, 32768)), {}, ("SFT001", "SFT006")),
    Case("unshifted", *on(unshifted, ramp(2, 8)), {"SFT002": {"exp"}}, ("SFT003", "SFT004")),
    # exp(20) = 4.9e8; halved, exp(10) = 22026 fits
    Case("unshifted, large", *on(unshifted, ramp(2, 8, scale=20)), {"SFT002": {"exp"}}, ("SFT004", "ACT001")),
    Case("unshifted, guarded", *on(unshifted_guarded, ramp(2, 8, scale=20)), {"SFT002": {"exp"}}, ("SFT003", "SFT004")),
    Case("shifted", *on(shifted, ramp(2, 8, scale=20)), {"SFT003": {"exp"}}, ("SFT002", "SFT004")),
    Case("shifted by max", *on(shifted_by_max_values, ramp(2, 8)), {"SFT003": {"exp"}}, ("SFT002",)),
    Case("unshifted, upcast", *on(raised(unshifted), ramp(2, 8, scale=20)), {}, (*HAND, "SFT004")),
    Case("shifted, upcast", *on(raised(shifted), ramp(2, 8)), {}, HAND),
    Case("log softmax by hand", *on(log_softmax, ramp(2, 8)), {"SFT007": {"sum_1"}}, (*HAND, "RED005")),
    Case("log softmax by hand, from the logits", *on(log_softmax_from_the_logits, ramp(2, 8)), {"SFT007": {"sum_1"}}),
    Case("log softmax by hand, upcast", *on(raised(log_softmax), ramp(2, 8)), {}, ("SFT007",)),
    Case("a gate", *on(gate, ramp(2, 8)), {}, HAND),
    # expm1(12) = 162754
    Case("expm1", *on(torch.expm1, ramp(2, 8, scale=12)), {"SFT004": {"expm1"}}),
    Case("log of softmax", *on(lambda x: x.softmax(-1).log(), ramp(2, 8)), {"SFT005": {"log"}}),
    Case("log of sigmoid", *on(lambda x: torch.log(x.sigmoid()[:, :4]), ramp(2, 8)), {"SFT005": {"log"}}),
    Case("log of something else", *on(lambda x: torch.log(x.softmax(-1) + 1), ramp(2, 8)), {}, ("SFT005",)),
    Case("long axis", *on(lambda x: x.softmax(-1), ramp(1, 16385)), {"SFT006": {"softmax"}}),
    Case("long first axis", *on(lambda x: x.softmax(0), ramp(20000, 2)), {"SFT006": {"softmax"}}),
    Case("longest safe axis", *on(lambda x: x.softmax(-1), ramp(2, 16384)), {"SFT001": {"softmax"}}, ("SFT006",)),
)
