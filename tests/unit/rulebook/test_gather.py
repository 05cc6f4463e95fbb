"""Facts of toy models: names, neighbors, sizes, autocast, upcasts, and what a measurement or a backward pass adds."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.records import Capture, NodeError, Verdict
from auditor.records.training import BackwardNode
from auditor.rulebook.gather import WORDS, gather, positions
from auditor.rulebook.verdicts import Judgement, backward_reasons, unsafe_backward, with_backward
from auditor.training.step import capture_step
from tests.support.capturing import Captured, captured, facts_of
from tests.support.replaying import Model
from tests.support.stepping import Scaled, subject_on
from tests.support.subjects import capture_of


def test_verdicts_of_a_measurement_become_facts() -> None:
    toy = facts_of(lambda x: x.exp().sin(), torch.ones(2))
    assert (toy.facts["exp"].verdict, toy.facts["exp"].reason) == ({}, {})
    verdicts = {"exp": {"fp16": Verdict("unsafe", "overflow"), "bf16": Verdict("safe", "fine")}}
    facts = gather(toy.capture, toy.ranges, verdicts)
    assert (facts["exp"].verdict["fp16"], facts["exp"].reason["fp16"]) == ("unsafe", "overflow")
    assert (facts["exp"].verdict["bf16"], facts["exp"].reason["bf16"]) == ("safe", "fine")
    assert facts["sin"].verdict == {}


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


def test_neighbors_look_through_reshapes_and_casts() -> None:
    facts = facts_of(lambda x: x.softmax(-1).view(-1).float().view(2, 2) @ x.exp(), torch.ones(2, 2)).facts
    assert facts["softmax"].consumers == ("aten.matmul.default",)
    assert facts["matmul"].producers == ("aten.exp.default", "aten.softmax.int")


def residual() -> nn.Module:
    """Two branches behind a weight-normalized stem; the scale is a parameter but no layer."""

    def forward(m: Any, x: Tensor) -> Tensor:
        weight = m.size * m.direction / m.direction.norm(dim=1, keepdim=True)
        x = F.linear(x * m.scale, weight)
        return (m.left(x) + m.right(x)).view(-1).to(x.dtype)

    return Model(
        forward,
        direction=nn.Parameter(torch.ones(4, 4)),
        size=nn.Parameter(torch.ones(4, 1)),
        scale=nn.Parameter(torch.ones(4)),
        left=nn.Linear(4, 4),
        right=nn.Linear(4, 4),
    )


def test_first_and_last_layers_by_graph_position() -> None:
    facts = captured(residual(), torch.ones(2, 4)).facts
    assert [name for name, fact in facts.items() if fact.is_first_layer] == ["linear"]
    assert [name for name, fact in facts.items() if fact.is_last_layer] == ["linear_1", "linear_2"]
    weights = {name for name, fact in facts.items() if fact.from_weights}
    assert {facts[name].op for name in weights} >= {"aten.mul.Tensor", "aten.div.Tensor"}
    assert not weights & {"linear", "linear_1", "linear_2"}


def captured_on_tokens(function: Callable[[Any, Tensor], Tensor]) -> Capture:
    model = Model(function, table=nn.Parameter(torch.ones(5, 4)), layer=nn.Linear(4, 4))
    return capture_of(model, torch.tensor([[1, 2]]))


def test_an_index_into_a_table_is_the_first_layer() -> None:
    """An embedding written as an index, a layer, and a head that is tied to the embedding."""
    traced = captured_on_tokens(lambda m, ids: F.linear(m.layer(m.table[ids]).tanh(), m.table).squeeze(0))
    found = positions(traced)
    assert (found["is_first_layer"], found["is_last_layer"]) == ({"index"}, {"linear_1"})
    assert not found["from_weights"] & traced.nodes.keys()


def test_what_reaches_no_output_is_no_last_layer() -> None:
    def forward(m: Any, ids: Tensor) -> Tensor:
        x = m.layer(m.table[ids])
        m.layer(x.exp())
        return x

    found = positions(captured_on_tokens(forward))
    assert found["is_last_layer"] == {"linear"}


# Which values the author raised: told from what a cast does in a low model, along every kind of path.


def upcast(m: Any, x: Tensor) -> Tensor:
    h = x.exp().float()
    h = h.sin()
    h = h.to(x.dtype)
    h = h.cos()
    h = torch.softmax(h, -1, dtype=torch.float32)
    h = m.head(h.float())
    return h.tanh()


def upcasts(toy: Captured) -> set[str]:
    return {name for name, fact in toy.facts.items() if fact.upcast}


def test_upcast_ends_at_the_cast_back_and_at_products_that_autocast_lowers() -> None:
    toy = captured(Model(upcast, head=nn.Linear(4, 4)), torch.ones(2, 4))
    assert upcasts(toy) == {"sin", "softmax", "linear"}
    assert [name for name, fact in toy.facts.items() if fact.casts_up_input] == ["sin", "linear"]


def in_another_file(x: Tensor) -> Tensor:
    high, low = torch.float32, x.dtype  # the lines that cast name no dtype
    y = x.to(high)
    y = y.sin()
    return y.to(low).tanh()


def test_casts_are_told_apart_by_what_they_do_in_a_low_model_not_by_how_they_are_written() -> None:
    assert upcasts(facts_of(lambda x: (x.float().exp().to(x.dtype) + x).cos(), torch.ones(2))) == {"exp"}
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


def block(m: Any, x: Tensor) -> Tensor:
    h = m.layer(x * 2)
    h = h * h  # low where the layer is
    h = h.pow(2)  # autocast raises it
    h = h + h.sum()
    with torch.autocast("cpu", enabled=False):
        h = h.float() @ h.float().t()
    return h.to(x.dtype).tanh()


def test_a_product_is_low_in_both_and_so_is_what_it_hands_on() -> None:
    facts = captured(Model(block, layer=nn.Linear(4, 4)), torch.ones(2, 4)).facts
    found = {name: fact.low_where for name, fact in facts.items()}
    assert (found["mul"], found["linear"], found["mul_1"]) == (CAST, BOTH, BOTH)
    assert (found["pow_1"], found["sum_1"], found["add"]) == (CAST, CAST, CAST)
    assert found["matmul"] is None


def test_a_cast_that_follows_another_tensor_is_low_where_that_is() -> None:
    facts = facts_of(lambda x, ids: x.exp() * ids.to(x.dtype), torch.ones(4), torch.arange(4)).facts
    assert facts["to"].low_where == CAST  # x is FP32 under autocast
    assert facts["mul"].low_where == CAST


# Lengths of reductions, sizes of products and steps of recurrences, each worked out beside it.


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
        (lambda x: F.triplet_margin_loss(x, x, x), (3, 4), "triplet_margin_loss", 12),
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


def test_rows_and_what_gemm_paddings() -> None:
    facts = facts_of(lambda a, b: F.linear(a, b), torch.ones(2, 13, 20), torch.ones(10, 20)).facts["linear"]
    assert facts.gemm_m_alignment == 2  # 26 rows
    assert facts.gemm_padding == pytest.approx(24 * 16 / (20 * 10) - 1)
    convolved = facts_of(lambda a, b: F.conv2d(a, b), torch.ones(1, 3, 6, 6), torch.ones(16, 3, 3, 3)).facts["conv2d"]
    assert convolved.gemm_m_alignment == 16  # 4 * 4 positions
    assert convolved.gemm_padding == pytest.approx(8 / 3 - 1)
    assert facts_of(torch.exp, torch.ones(2)).facts["exp"].gemm_padding is None


def test_sequence_length_counts_steps_or_calls() -> None:
    batch_first = captured(nn.GRU(3, 4, batch_first=True), torch.ones(2, 9, 3)).facts["gru"]
    time_first = captured(nn.LSTM(3, 4), torch.ones(2, 9, 3)).facts["lstm"]
    unbatched = captured(nn.RNN(3, 4, batch_first=True), torch.ones(6, 3)).facts["rnn_tanh"]
    assert (batch_first.sequence_length, time_first.sequence_length, unbatched.sequence_length) == (9, 2, 6)


# What backward passes make of the verdicts: reasons in words, and which verdicts they change.

BREAKS = NodeError(local_error=float("inf"), overflow=1)


def node(name: str, reaches: Mapping[str, str], **errors: NodeError) -> BackwardNode:
    return BackwardNode(name, "aten.exp.default", "", None, errors, {}, reaches, {})


SAFE, UNSAFE = Verdict("safe", "fine"), Verdict("unsafe", "overflow", "range")


def judged(verdict: Verdict, exposed: tuple[str, ...]) -> Verdict:
    """The verdict of the audited graph's `exp` once its backward pass was found to break."""
    model, x = Scaled(1.0, torch.Tensor.exp), torch.ones(1)
    audited = capture_of(model, x)
    step = capture_step(subject_on(model, x, torch.ones(1)), ())
    each = {"fp16": verdict, "bf16": SAFE}, {"fp16": exposed, "bf16": exposed}
    before = Judgement(*(dict.fromkeys(audited.nodes, one) for one in each), layers=("a layer",))
    (found,) = backward_reasons([node("exp", {"fp16": "w"}, fp16=BREAKS)])
    loss = node("sum_1", {"fp16": "w"}, fp16=BREAKS)  # of the loss: the audited graph has no such operation
    after = with_backward(before, unsafe_backward(audited, backward_reasons([found, loss]), step))
    assert (after.verdicts["exp"]["bf16"], after.layers) == (SAFE, before.layers)
    assert before.verdicts["exp"]["fp16"] == verdict  # the first judgement stays as it was
    return after.verdicts["exp"]["fp16"]


def test_what_breaks_backwards_is_unsafe() -> None:
    found = judged(SAFE, ("autocast",))
    assert (found.verdict, found.limited_by) == ("unsafe", "range")
    assert found.reason.startswith("the backward pass in FP16 turns 1 finite gradient value into")


def test_what_never_runs_low_or_is_unsafe_already_keeps_its_reason() -> None:
    assert judged(SAFE, ()) == SAFE
    assert judged(UNSAFE, ("cast",)) == UNSAFE
