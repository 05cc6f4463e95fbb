"""Numbers a node meets: literals, guards, weights, and magnitudes measured in FP32."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from auditor.rulebook.values import written
from tests.support.capturing import captured, facts_of
from tests.support.subjects import measurement_of, normal


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


@pytest.mark.parametrize(
    ("literal", "too_large", "one"),
    [
        (65504.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # FP16's largest
        (65519.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # rounds down to it; 65520 does not
        (65520.0, ("fp16", "fp8_e4m3", "fp8_e5m2"), ()),
        (
            3.4e38,
            ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
            (),
        ),  # BF16 ends at 3.3895e38, half a spacing on 3.396e38
        (449.0, ("fp8_e4m3",), ()),  # ends at 448, has no infinity
        (1 - 2**-11, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),  # FP16's and TF32's neighbour of 1
        (1 - 1e-4, (), ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
        (1 + 2**-10, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),
        (0.5, (), ()),
    ],
)
def test_literals_against_the_formats(literal: float, too_large: tuple[str, ...], one: tuple[str, ...]) -> None:
    facts = facts_of(lambda x: x * literal, torch.ones(2)).facts["mul"]
    assert (facts.constants_beyond, facts.constants_as_one) == (too_large, one)


def test_whole_numbers_come_from_integers() -> None:
    def function(x: Tensor, ids: Tensor) -> list[Tensor]:
        return [
            x + ids.to(x.dtype).view(2, 1),
            x * torch.arange(2, dtype=x.dtype),
            x * torch.arange(0, 1, 0.5, dtype=x.dtype),
            x * (ids > 0).to(x.dtype),
            (ids * 2).to(x.dtype) - 1,
        ]

    facts = facts_of(function, torch.ones(2, 2), torch.tensor([1, 2])).facts
    assert [name for name, fact in facts.items() if fact.whole_numbers] == ["to", "arange", "to_2"]
    assert [name for name, fact in facts.items() if fact.reads_whole_numbers] == ["add", "mul", "sub"]
    assert (facts["to"].input_dtype, facts["to"].dtype, facts["arange"].input_dtype) == ("int64", "float32", None)


def test_what_a_sine_is_taken_of_is_a_phase() -> None:
    def function(x: Tensor, f: Tensor) -> list[Tensor]:
        return [torch.cat([x.exp() * f.view(2) + 1, x]).sin().tanh(), (x - f).abs().sin(), x.neg().cos().sin()]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    assert [name for name, fact in facts.items() if fact.in_a_phase] == [
        *("exp", "view", "mul", "add", "cat"),
        *("abs_1", "neg", "cos"),
    ]


def test_bits_that_cancel() -> None:
    facts = facts_of(lambda x, y: (x - y, x + y, x - 1000.0), torch.full((2,), 1024.0), torch.full((2,), 1022.0)).facts
    assert facts["sub"].cancelled_bits == 9  # 1024 / 2
    assert facts["add"].cancelled_bits == pytest.approx(-1, abs=0.01)
    assert facts["sub_1"].cancelled_bits is None


def test_the_smallest_divisor() -> None:
    toy = facts_of(lambda x, y: (x / y.view(2), y.log(), y / 4.0, x * y), torch.ones(2), torch.tensor([0.0, 1e-9]))
    facts = toy.facts
    assert facts["div"].divisor_min_abs == facts["log"].divisor_min_abs == pytest.approx(1e-9)
    assert facts["div_1"].divisor_min_abs is facts["mul"].divisor_min_abs is None


def test_a_run_of_additions_is_counted_at_its_end() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x
        for _ in range(3):
            total = 0.5 * total + y.tanh()
        return [(total - x).exp() + y, x + y]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    # a difference is not part of a run, and exp starts afresh
    runs = {name: fact.additions for name, fact in facts.items() if fact.additions}
    assert runs == {"add_2": 3, "add_3": 1, "add_4": 1}


def test_updates_below_half_a_spacing_add_up() -> None:
    def function(x: Tensor) -> Tensor:
        total = x
        for _ in range(4):
            total = total + 0.003 * x
        return total + 0.5

    facts = facts_of(function, torch.tensor([1.0, 0.5])).facts
    # at 1 BF16 numbers are 1/128 apart, FP16 numbers 1/1024: 0.003 is below 1/256, and above 1/2048
    assert facts["add_3"].additions == 4
    assert facts["add_3"].absorbed["bf16"] == pytest.approx(4 * 0.003 * 128)
    assert facts["add_3"].absorbed["fp16"] == 0
    low = torch.tensor([1.0, 0.5]).bfloat16()
    total = low
    for _ in range(4):
        total = total + 0.003 * low
    assert total[0] == 1  # where it is largest, nothing arrived


class Masked(nn.Module):
    """A mask in each of the ways that people write one. The product is 1e4 at least: larger than all else that is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("added", torch.full((4, 4), -5e6).triu(1))
        self.large = nn.Parameter(torch.full((4, 4), 5e3))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        scores = x @ self.large
        filled = scores.masked_fill(~keep, -1e9) / 8
        chosen = torch.where(keep, scores, torch.tensor(-1e8))
        told = (1.0 - keep.float()) * -1e7
        limit = torch.full((4, 4), torch.finfo(x.dtype).min)
        total = (
            filled.softmax(-1) + chosen.softmax(-1) + (scores + told).softmax(-1) + (scores + self.added).softmax(-1)
        )
        return total + (scores + limit.triu(1)).softmax(-1) + scores.clamp(max=2e4)


def test_masks_are_written_and_what_is_computed_is_not() -> None:
    keep = torch.ones(4, 4).tril().bool()
    measured = measurement_of(Masked(), normal(4, 4).abs() + 1, keep)
    found = written(measured.capture, measured.ranges)
    ops = {name: measured.capture.nodes[name].op.split(".")[1] for name in found}
    assert sorted(ops.values()) == sorted(
        ["masked_fill", "div", "where", "mul", "add", "add", "add", "full", "triu"]
    ), ops
    computed = {node.op.split(".")[1] for name, node in measured.capture.nodes.items() if name not in found}
    assert {"matmul", "softmax", "clamp"} <= computed
