"""Which values the author raised: told from what a cast does in a low model, along every kind of path."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from auditor.rulebook.gather import WORDS
from tests.support.capturing import Captured, captured, facts_of


class Upcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x.exp().float()
        h = h.sin()
        h = h.to(x.dtype)
        h = h.cos()
        h = torch.softmax(h, -1, dtype=torch.float32)
        h = self.head(h.float())
        return h.tanh()


def upcasts(toy: Captured) -> set[str]:
    return {name for name, fact in toy.facts.items() if fact.upcast}


def test_upcast_ends_at_the_cast_back_and_at_products_that_autocast_lowers() -> None:
    toy = captured(Upcast(), torch.ones(2, 4))
    assert upcasts(toy) == {"sin", "softmax", "linear"}
    assert [name for name, fact in toy.facts.items() if fact.casts_up_input] == ["sin", "linear"]


def two_on_a_line(x: Tensor) -> Tensor:
    return (x.float().exp().to(x.dtype) + x).cos()


def in_another_file(x: Tensor) -> Tensor:
    high, low = torch.float32, x.dtype  # the lines that cast name no dtype
    y = x.to(high)
    y = y.sin()
    return y.to(low).tanh()


def test_casts_are_told_apart_by_what_they_do_in_a_low_model_not_by_how_they_are_written() -> None:
    assert upcasts(facts_of(two_on_a_line, torch.ones(2))) == {"exp"}
    assert upcasts(facts_of(in_another_file, torch.ones(2))) == {"sin"}


def test_a_dtype_argument_raises_unless_it_follows_the_model() -> None:
    toy = facts_of(lambda x: (x.softmax(0, dtype=torch.float32).exp(), x.cumsum(0, dtype=x.dtype).exp()), torch.ones(2))
    assert upcasts(toy) == {"softmax", "exp"}


def test_a_tensor_out_of_nothing_raises_what_it_is_promoted_with() -> None:
    def function(x: Tensor) -> list[Tensor]:
        return [x * torch.arange(2.0), x + torch.ones(2, dtype=x.dtype), x - torch.ones(()), x @ torch.ones(2)]

    toy = facts_of(function, torch.ones(2, 2))
    assert upcasts(toy) == {"arange", "mul", "ones_2"}
    assert {name for name, fact in toy.facts.items() if fact.casts_up} == {"arange", "ones_2"}


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
