"""Facts of toy models, each number worked out beside it."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.capture.concrete import trace_concrete
from auditor.facts import FACTS, gather
from auditor.facts.dimensions import _REDUCTIONS, _register
from auditor.facts.graph import packet
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


def test_literals_that_follow_the_dtype_are_left_out() -> None:
    facts = facts_of(lambda x: x.masked_fill(x > 0, torch.finfo(x.dtype).min), torch.ones(2, 2)).facts
    assert facts["masked_fill"].constants == ()


def test_ranges_of_activations_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[4.0, 0.0], [0.5, -8.0]]))
    model[1].running_var.fill_(100.0)
    facts = captured(model, torch.tensor([[2.0, 1.0]])).facts
    linear, norm = facts["linear"], facts["_native_batch_norm_legit_no_training"]
    assert (linear.weight_max_abs, linear.weight_min_abs, linear.buffer_max_abs) == (8.0, 0.5, None)
    assert linear.input_max_abs == 2.0
    assert (linear.output_max_abs, linear.output_min_abs) == (8.0, 7.0)  # 4 * 2 and 0.5 * 2 - 8
    assert linear.headroom_bits_fp16 == pytest.approx(math.log2(65504 / 8))
    assert linear.headroom_bits_bf16 == pytest.approx(math.log2(torch.finfo(torch.bfloat16).max / 8))
    assert norm.buffer_max_abs == 100.0
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


def test_upcast_is_seen_on_the_concrete_path_too() -> None:
    model = Upcast().eval()
    capture = trace_concrete(model, ((torch.ones(2, 4),), {}))
    raised = {name for name, fact in gather(capture, model, {}).items() if fact.upcast}
    assert {packet(capture.nodes[name].op) for name in raised} == {"aten.sin", "aten.softmax", "aten.linear"}


class Norm(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return (h * h.pow(2).mean(-1, keepdim=True).rsqrt()).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() + self.norm(x) + x.cos()


def test_a_residual_branch_is_not_raised_by_the_norm_beside_it() -> None:
    # tracing records x.cos() as a reader of the norm's x.float(): a cast that changes nothing returns its own input
    toy = captured(Block(), torch.ones(2, 4))
    assert upcasts(toy) == {"pow_1", "mean", "rsqrt", "mul"}


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            x = self.head(x.float())
            return x.tanh()


def test_autocast_off_keeps_products_high() -> None:
    toy = captured(Region(), torch.ones(2, 4))
    assert toy.facts["linear"].autocast_off
    assert upcasts(toy) == {"linear", "tanh"}
