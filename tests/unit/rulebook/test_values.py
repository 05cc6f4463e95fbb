"""Numbers a node meets: literals, guards, weights, and magnitudes measured in FP32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from auditor.numerics.formats import FORMATS
from auditor.rulebook.values import spacing
from tests.capturing import captured, facts_of


def test_readers_of_a_shared_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    facts = captured(model, torch.ones(1, 4)).facts
    assert [fact.weight_uses for fact in facts.values()] == [2, 1, 2]


def test_constants_are_literals_not_axes_or_exponents_of_ten() -> None:
    facts = facts_of(lambda x: (x.clamp(-3, 0.25) + 1e-6).masked_fill(x > 1, -1e9).sum(-1), torch.ones(2, 2)).facts
    assert facts["clamp"].constants == (-3.0, 0.25)
    assert (facts["clamp"].constant_max_abs, facts["clamp"].constant_min_abs) == (3.0, 0.25)
    assert facts["clamp"].constant_gap_to_one == 0.75
    assert facts["clamp"].constant_largest == -3.0
    assert facts["masked_fill"].constants == (-1e9,)
    assert facts["sum_1"].constants == ()
    assert (facts["add"].eps, facts["clamp"].eps) == (1e-6, None)


def test_literals_that_follow_the_dtype_are_left_out() -> None:
    facts = facts_of(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min), torch.ones(2, 2)).facts
    assert facts["masked_fill"].constants == ()


def test_a_literal_that_torch_casts_is_no_square() -> None:
    """Under vmap a number is handed on as a tensor, in a cast of its own."""

    def scaled(x: torch.Tensor) -> torch.Tensor:
        return torch.vmap(lambda index: x * (index * 0.5))(torch.arange(2))

    found = facts_of(scaled, torch.ones(2, 2))
    assert any(not node.all_input_nodes for node in found.capture.graph_module.graph.nodes if "to." in str(node.target))
    assert not any(fact.squares for fact in found.facts.values())


def test_ranges_of_activations_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[4.0, 0.0], [0.5, -8.0]]))
    model[1].running_var.copy_(torch.tensor([100.0, 0.25]))
    facts = captured(model, torch.tensor([[2.0, 1.0]])).facts
    linear, norm = facts["linear"], facts["batch_norm"]
    assert (linear.weight_max_abs, linear.buffer_max_abs) == (8.0, None)
    assert linear.input_max_abs == 2.0
    assert linear.output_max_abs == 8.0
    assert linear.headroom_bits["fp16"] == pytest.approx(math.log2(65504 / 8))
    assert linear.headroom_bits["bf16"] == pytest.approx(math.log2(torch.finfo(torch.bfloat16).max / 8))
    assert norm.buffer_max_abs == 100.0
    assert norm.input_max_abs == 8.0


def test_shapes_of_arithmetic() -> None:
    facts = facts_of(
        lambda x: (
            *(x**2, x * x, x**3, x[:, :1] * x[:, 1:]),
            *(x - x.mean(), x - x.exp().mean(), x - x.max(-1, keepdim=True)[0]),
        ),
        torch.ones(2, 2),
    ).facts
    assert [name for name, fact in facts.items() if fact.squares] == ["pow_1", "mul"]
    assert [name for name, fact in facts.items() if fact.centres] == ["sub"]
    assert [name for name, fact in facts.items() if fact.shifts_by_max] == ["sub_2"]


def test_the_spacing_of_numbers_is_that_of_their_binade() -> None:
    bf16, fp16 = FORMATS["bf16"], FORMATS["fp16"]
    assert (spacing(905.0, bf16), spacing(905.0, fp16)) == (4.0, 0.5)
    assert spacing(512.0, bf16) == 4.0  # from 512 up
    assert spacing(1e-7, fp16) == 2.0**-24  # subnormal
    assert spacing(0.0, bf16) is spacing(None, bf16) is None
    above = torch.nextafter(torch.tensor(3.0).bfloat16(), torch.tensor(4.0).bfloat16())
    assert float(above) - 3 == spacing(3.0, bf16)
