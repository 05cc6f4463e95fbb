"""Facts of toy models, each number worked out beside it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.facts import FACTS, gather
from auditor.facts.dimensions import _REDUCTIONS, _register
from auditor.records import Verdict
from tests.capturing import Captured, Function, captured


def facts_of(function: object, *inputs: Tensor) -> Captured:
    return captured(Function(function), *inputs)  # type: ignore[arg-type]


def test_the_table_describes_every_fact() -> None:
    assert {"op", "reduction_length", "gemm_k", "eps", "headroom_bits_fp16"} <= FACTS.keys()
    assert all(fact.meaning and fact.type in {"text", "flag", "number", "texts", "numbers"} for fact in FACTS.values())
    assert FACTS["gemm_k"].unit == "elements"


@pytest.mark.parametrize(
    ("function", "shape", "node", "expected"),
    [
        (lambda x: x.sum(), (3, 4), "sum_1", 12),
        (lambda x: x.mean((0, 2)), (3, 4, 5), "mean", 15),  # 3 * 5
        (lambda x: x.softmax(-2), (3, 4, 5), "softmax", 4),
        (lambda x: x.var(1), (3, 4), "var", 4),
        (lambda x: x.cumsum(1), (3, 7), "cumsum", 7),
        (lambda x: x.logsumexp((0, 1)), (3, 7), "logsumexp", 21),
        (lambda x: torch.linalg.vector_norm(x), (3, 7), "linalg_vector_norm", 21),
        (lambda x: F.layer_norm(x, (4, 5)), (3, 4, 5), "layer_norm", 20),
        (lambda x: F.group_norm(x, 2), (3, 4, 5), "group_norm", 10),  # 4 channels in 2 groups, 5 positions each
        (lambda x: F.instance_norm(x), (3, 4, 5), "instance_norm", 5),
        (lambda x: F.adaptive_avg_pool2d(x, 1), (1, 2, 6, 7), "adaptive_avg_pool2d", 42),
        (lambda x: F.scaled_dot_product_attention(x, x, x), (1, 1, 9, 4), "scaled_dot_product_attention", 9),
        (lambda x: F.mse_loss(x, x, reduction="none"), (3, 4), "mse_loss", 1),
        (lambda x: x.exp(), (3, 4), "exp", None),
    ],
)
def test_reduction_length(function: object, shape: tuple[int, ...], node: str, expected: int | None) -> None:
    assert facts_of(function, torch.ones(shape)).facts[node].reduction_length == expected


@pytest.mark.parametrize(
    ("function", "shapes", "node", "expected"),
    [
        (lambda a, b: a @ b, [(2, 3), (3, 5)], "matmul", (2, 5, 3)),
        (lambda a, b: a @ b, [(7, 2, 3), (3, 5)], "matmul", (14, 5, 3)),  # one product over 7 * 2 rows
        (lambda a, b: a @ b, [(7, 2, 3), (7, 3, 5)], "matmul", (2, 5, 3)),  # seven products
        (lambda a, b: torch.bmm(a, b), [(7, 2, 3), (7, 3, 5)], "bmm", (2, 5, 3)),
        (lambda a, b: a @ b, [(4,), (4,)], "matmul", (1, 1, 4)),
        (lambda a, b: torch.einsum("bid,bjd->bij", a, b), [(7, 2, 3), (7, 5, 3)], "einsum", (2, 5, 3)),
        (lambda a, b: F.conv2d(a, b, stride=2), [(2, 6, 9, 9), (8, 6, 3, 3)], "conv2d", (32, 8, 54)),  # 2*4*4, 6*3*3
        (lambda a, b: F.conv2d(a, b, groups=3), [(1, 6, 4, 4), (9, 2, 1, 1)], "conv2d", (16, 3, 2)),
        (lambda a, b: F.conv1d(a, b), [(6, 5), (9, 6, 2)], "conv1d", (4, 9, 12)),  # no batch
        (lambda a, b: F.conv_transpose1d(a, b), [(2, 6, 5), (6, 4, 3)], "conv_transpose1d", (10, 12, 6)),
        (lambda a, b: F.linear(a, b), [(2, 7, 3), (5, 3)], "linear", (14, 5, 3)),
    ],
)
def test_gemm_size(function: object, shapes: list[tuple[int, ...]], node: str, expected: tuple[int, int, int]) -> None:
    facts = facts_of(function, *(torch.ones(shape) for shape in shapes)).facts[node]
    assert (facts.gemm_m, facts.gemm_n, facts.gemm_k) == expected


@pytest.mark.parametrize(
    ("function", "shapes", "node", "expected"),
    [
        (lambda a, b: F.linear(a, b), [(2, 24), (40, 24)], "linear", 8),  # 24 = 8 * 3, 40 = 8 * 5
        (lambda a, b: F.linear(a, b), [(2, 128), (10, 128)], "linear", 2),
        (lambda a, b: F.linear(a, b), [(2, 128), (256, 128)], "linear", 64),  # more is not told apart
        (lambda a, b: F.conv2d(a, b), [(1, 8, 9, 9), (16, 8, 3, 3)], "conv2d", 8),  # channels, not 8 * 3 * 3
        (lambda a, b: F.conv2d(a, b), [(1, 3, 9, 9), (16, 3, 3, 3)], "conv2d", 1),
    ],
)
def test_gemm_alignment(function: object, shapes: list[tuple[int, ...]], node: str, expected: int) -> None:
    assert facts_of(function, *(torch.ones(shape) for shape in shapes)).facts[node].gemm_alignment == expected


def test_rows_and_what_padding_costs() -> None:
    facts = facts_of(lambda a, b: F.linear(a, b), torch.ones(2, 13, 20), torch.ones(10, 20)).facts["linear"]
    assert facts.gemm_m_alignment == 2  # 26 rows
    assert facts.gemm_padding == pytest.approx(24 * 16 / (20 * 10) - 1)
    convolved = facts_of(lambda a, b: F.conv2d(a, b), torch.ones(1, 3, 6, 6), torch.ones(16, 3, 3, 3)).facts["conv2d"]
    assert convolved.gemm_m_alignment == 16  # 4 * 4 positions
    assert convolved.gemm_padding == pytest.approx(8 / 3 - 1)
    assert facts_of(torch.exp, torch.ones(2)).facts["exp"].gemm_padding is None


def test_the_short_name_of_an_operation() -> None:
    facts = facts_of(lambda x: torch.linalg.vector_norm(x).view(1), torch.ones(2)).facts
    assert [fact.operation for fact in facts.values()] == ["linalg_vector_norm", "view"]


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


def test_readers_of_a_shared_weight() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    facts = captured(model, torch.ones(1, 4)).facts
    assert [fact.weight_uses for fact in facts.values()] == [2, 1, 2]


def test_verdicts_of_a_measurement_become_facts() -> None:
    toy = facts_of(lambda x: x.exp().sin(), torch.ones(2))
    assert (toy.facts["exp"].verdict_fp16, toy.facts["exp"].reason_bf16) == (None, None)
    verdicts = {"exp": {"fp16": Verdict("unsafe", "overflow"), "bf16": Verdict("safe", "fine")}}
    facts = gather(toy.capture, Function(torch.exp), toy.ranges, verdicts)
    assert (facts["exp"].verdict_fp16, facts["exp"].reason_fp16) == ("unsafe", "overflow")
    assert (facts["exp"].verdict_bf16, facts["exp"].reason_bf16) == ("safe", "fine")
    assert facts["sin"].verdict_fp16 is None


def test_what_a_formula_does_not_cover_is_unknown() -> None:
    facts = facts_of(lambda x: torch.einsum("...i,...i->...", x, x), torch.ones(2, 3)).facts
    assert {fact.gemm_k for fact in facts.values()} == {None}


def test_a_second_formula_for_an_op_is_refused() -> None:
    with pytest.raises(ValueError, match=r"aten\.mean"):
        _register(_REDUCTIONS, "mean")(lambda args, node: 1)


def test_sequence_length_counts_steps_or_calls() -> None:
    batch_first = captured(nn.GRU(3, 4, batch_first=True), torch.ones(2, 9, 3)).facts["gru"]
    time_first = captured(nn.LSTM(3, 4), torch.ones(2, 9, 3)).facts["lstm"]
    unbatched = captured(nn.RNN(3, 4, batch_first=True), torch.ones(6, 3)).facts["rnn_tanh"]
    assert (batch_first.sequence_length, time_first.sequence_length, unbatched.sequence_length) == (9, 2, 6)


def test_constants_are_literals_not_axes_or_exponents_of_ten() -> None:
    facts = facts_of(lambda x: (x.clamp(-3, 0.25) + 1e-6).masked_fill(x > 1, -1e9).sum(-1), torch.ones(2, 2)).facts
    assert facts["clamp"].constants == (-3.0, 0.25)
    assert (facts["clamp"].constant_max_abs, facts["clamp"].constant_min_abs) == (3.0, 0.25)
    assert facts["clamp"].constant_gap_to_one == 0.75
    assert facts["masked_fill"].constants == (-1e9,)
    assert facts["sum_1"].constants == ()
    assert (facts["add"].eps, facts["clamp"].eps) == (1e-6, None)


@pytest.mark.parametrize(
    ("literal", "beyond", "lost", "as_one"),
    [
        (65504.0, ("fp8_e4m3", "fp8_e5m2"), (), ()),  # FP16's largest
        (65519.0, ("fp8_e4m3", "fp8_e5m2"), (), ()),  # rounds down to it; 65520 does not
        (65520.0, ("fp16", "fp8_e4m3", "fp8_e5m2"), (), ()),
        (
            3.4e38,
            ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"),
            (),
            (),
        ),  # BF16 ends at 3.3895e38, half a spacing on 3.396e38
        (449.0, ("fp8_e4m3",), (), ()),  # ends at 448, has no infinity
        (1e-6, (), ("fp8_e4m3", "fp8_e5m2"), ()),  # half of 2**-9 and of 2**-16 are 9.8e-4 and 7.6e-6
        (2.9e-8, (), ("fp16", "fp8_e4m3", "fp8_e5m2"), ()),  # half of 2**-24 is 2.98e-8
        (1 - 2**-11, (), (), ("bf16", "fp8_e4m3", "fp8_e5m2")),  # FP16's and TF32's neighbour of 1
        (1 - 1e-4, (), (), ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
        (1 + 2**-10, (), (), ("bf16", "fp8_e4m3", "fp8_e5m2")),
        (0.5, (), (), ()),
    ],
)
def test_literals_against_the_formats(
    literal: float, beyond: tuple[str, ...], lost: tuple[str, ...], as_one: tuple[str, ...]
) -> None:
    facts = facts_of(lambda x: x * literal, torch.ones(2)).facts["mul"]
    assert (facts.constants_beyond, facts.constants_lost, facts.constants_as_one) == (beyond, lost, as_one)


def test_what_autocast_does_to_an_operation() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        bilinear = F.bilinear(x, y, torch.ones(1, 2, 2))
        return [x @ y, x.softmax(-1), x.exp(), x.relu(), bilinear, F.binary_cross_entropy(x, y), x.sum()]

    facts = facts_of(function, torch.ones(2, 2), torch.ones(2, 2)).facts
    assert {fact.operation: fact.autocast for fact in facts.values() if fact.operation != "ones"} == {
        "matmul": "lower",
        "softmax": "fp32_unless_dtype",
        "exp": "fp32",
        "relu": "none",
        "bilinear": "promote",
        "binary_cross_entropy": "banned",
        "sum": "fp32_unless_dtype",
    }
    assert captured(nn.LSTM(2, 2), torch.ones(2, 1, 2)).facts["lstm"].autocast == "lower"


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
    assert (linear.weight_max_abs, linear.weight_min_abs, linear.buffer_max_abs) == (8.0, 0.5, None)
    assert linear.input_max_abs == 2.0
    assert (linear.output_max_abs, linear.output_min_abs) == (8.0, 7.0)  # 4 * 2 and 0.5 * 2 - 8
    assert linear.headroom_bits_fp16 == pytest.approx(math.log2(65504 / 8))
    assert linear.headroom_bits_bf16 == pytest.approx(math.log2(torch.finfo(torch.bfloat16).max / 8))
    assert (norm.buffer_max_abs, norm.buffer_min_abs) == (100.0, 0.25)  # the mean is zero
    assert norm.input_max_abs == 8.0


def test_without_ranges_the_measured_facts_are_unknown() -> None:
    model = nn.Linear(2, 2)
    toy = captured(model, torch.ones(1, 2))
    facts = gather(toy.capture, model, {})["linear"]
    assert (facts.input_max_abs, facts.output_max_abs, facts.headroom_bits_fp16) == (None, None, None)
    assert facts.weight_max_abs is not None


class Residual(nn.Module):
    """Two branches behind a weight-normalised stem; the scale is a parameter but no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.direction, self.size = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 1))
        self.scale = nn.Parameter(torch.ones(4))
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.size * self.direction / self.direction.norm(dim=1, keepdim=True)
        x = F.linear(x * self.scale, weight)
        return (self.left(x) + self.right(x)).view(-1).to(x.dtype)


def test_first_and_last_layers_by_graph_position() -> None:
    facts = captured(Residual(), torch.ones(2, 4)).facts
    assert [name for name, fact in facts.items() if fact.is_first_layer] == ["linear"]
    assert [name for name, fact in facts.items() if fact.is_last_layer] == ["linear_1", "linear_2"]
    weights = {name for name, fact in facts.items() if fact.from_weights}
    assert {facts[name].op for name in weights} >= {"aten.mul.Tensor", "aten.div.Tensor"}
    assert not weights & {"linear", "linear_1", "linear_2"}
    outputs = {facts[name].op for name, fact in facts.items() if fact.is_output}
    assert outputs == {"aten.add.Tensor", "aten.view.default", "aten.to.dtype"}


def test_neighbours_look_through_reshapes_and_casts() -> None:
    facts = facts_of(lambda x: x.softmax(-1).view(-1).float().view(2, 2) @ x.exp(), torch.ones(2, 2)).facts
    assert facts["softmax"].consumers == ("aten.matmul.default",)
    assert facts["matmul"].producers == ("aten.exp.default", "aten.softmax.int")


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
