"""Where an operation computes low: under autocast, in a cast model, or in both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.rulebook.lowered import WORDS
from tests.capturing import captured, facts_of

BOTH, CAST = WORDS[True, True], WORDS[False, True]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x * 2)
        h = h * h  # low where the layer is
        h = h.pow(2)  # autocast raises it
        h = h + h.sum()
        with torch.autocast("cpu", enabled=False):
            h = h.float() @ h.float().t()
        return h.to(x.dtype).tanh()


def test_a_product_is_low_in_both_and_so_is_what_it_hands_on() -> None:
    facts = captured(Block(), torch.ones(2, 4)).facts
    found = {name: fact.low_where for name, fact in facts.items()}
    assert (found["mul"], found["linear"], found["mul_1"]) == (CAST, BOTH, BOTH)
    assert (found["pow_1"], found["sum_1"], found["add"]) == (CAST, CAST, CAST)
    assert found["matmul"] is None


def test_a_cast_that_follows_another_tensor_is_low_where_that_is() -> None:
    facts = facts_of(lambda x, ids: x.exp() * ids.to(x.dtype), torch.ones(4), torch.arange(4)).facts
    assert facts["to"].low_where == CAST  # x is FP32 under autocast
    assert facts["mul"].low_where == CAST
