"""What a model stores in FP16 and BF16, found and raised in place."""

from __future__ import annotations

import torch
from torch import nn

from auditor.state.half import raise_in_place, stored_low
from tests.subjects import normal


class Holds(nn.Module):
    """A weight used twice, buffers of several dtypes, and tensors that it did not register."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3).bfloat16(), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(2).half())
        self.register_buffer("coded", torch.ones(2).to(torch.float8_e4m3fn))
        self.register_buffer("wide", torch.ones(2).double())
        self.register_buffer("none", None)
        self.tables = {"cos": [torch.ones(2).half(), torch.ones(2)]}


def test_low_tensors_are_found_once() -> None:
    model = Holds()
    found = stored_low(model)
    assert [id(x) for x in found] == [id(x) for x in (model.first.weight, model.first.bias, model.scale)]
    further = stored_low(model, attributes=True)
    assert [id(x) for x in further[3:]] == [id(model.tables["cos"][0])]


def test_raised_tensors_are_the_same_objects_with_the_same_values() -> None:
    model = Holds()
    before = [(x, x.detach().clone()) for x in stored_low(model)]
    raise_in_place([x for x, _ in before])
    assert stored_low(model) == []
    assert model.second.weight is model.first.weight is before[0][0]
    for x, value in before:
        assert x.dtype is torch.float32
        assert torch.equal(x, value.float())
    assert model.wide.dtype is torch.float64


def test_what_shared_a_storage_shares_one_again() -> None:
    flat = normal(12).bfloat16()
    expected = flat.float()
    head, tail, turned = flat[:6], flat[6:], flat.reshape(3, 4).t()
    raise_in_place([head, tail, turned, flat])
    assert torch.equal(torch.cat((head, tail)), expected)
    assert torch.equal(turned, expected.reshape(3, 4).t())
    head[1] = 7
    assert turned[1, 0] == flat[1] == 7


def test_two_dtypes_on_one_storage_are_raised_apart() -> None:
    bits = torch.tensor([1.0, 2.0]).half()
    other = bits.view(torch.bfloat16)
    expected = other.float()
    raise_in_place([bits, other])
    assert torch.equal(bits, torch.tensor([1.0, 2.0]))
    assert torch.equal(other, expected)
