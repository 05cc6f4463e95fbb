"""Contributions: exact where the model is linear, close to brute force elsewhere, re-run where no derivative helps."""

import math
import statistics
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.measure.measure import Measurement
from auditor.records import Contribution
from tests.support.brute_force import spearman, true_isolated
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.small_models import Deep, convnet
from tests.support.subjects import FORMATS, effects_of, measurement_of, nodes_by_op, normal, only, seeded


def contribution(measured: Measurement, packet: str, fmt: str = "fp16") -> Contribution:
    return effects_of(measured)[only(measured.capture, packet).name][fmt]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(
    ("function", "batch"),
    [
        (lambda x: ((x * 3.0) / 7.0 + 1.1) * -0.3, 1),
        (lambda x: ((x * 3.0) / 7.0 + 1.1) * -0.3, 64),
        (lambda x: (x * 2.1).detach() * 3.3, 5),  # the gradient ends there, the error does not
        (lambda x: (y := x * 1.1, y.float() * 5.1 + y * 7.3)[1], 5),  # the cast hands on what it is given
    ],
)
def test_first_order_is_exact_where_all_is_linear(fmt: str, function: Any, batch: int) -> None:
    """One number per sample: the first-order answer is the answer."""
    measured = measurement_of(Function(function), normal(batch, 1) / 7)
    found = effects_of(measured)
    for name in measured.capture.nodes:
        # errors are carried as bfloat16, so a relative 2^-8 is as exact as it gets
        assert found[name][fmt].isolated == pytest.approx(true_isolated(measured, name, fmt), rel=2**-7), name


def test_a_value_that_depends_on_no_float_input_is_exact_over_several_passes() -> None:
    """Positions: a leaf of the autograd graph in every pass, whose gradients must not be added up."""
    positions = torch.arange(256) * 37
    measured = measurement_of(Function(lambda x, ids: (x + ids.float() + 0.5) * 8.0), torch.zeros(256), positions)
    rounded = positions.bfloat16().double() - positions
    expected = float(rounded.norm() / (positions + 0.5).double().norm())
    assert contribution(measured, "to", "bf16").isolated == pytest.approx(expected, rel=1e-5)


def test_the_three_kinds_of_error_by_hand() -> None:
    # y = x * 3 with x = 1 + 2^-11: rounding x (a tie, to 1) costs 2^-11 of 1 + 2^-11.
    x = torch.tensor([[1 + 2.0**-11]])
    measured = measurement_of(Function(lambda x: (x * 3.0) * 1.0), x)
    first, second = nodes_by_op(measured.capture, "mul")
    found = effects_of(measured)
    lost = 2.0**-11 / (1 + 2.0**-11)
    (placeholder,) = measured.capture.placeholders
    assert found[placeholder.name]["fp16"].cast == pytest.approx(lost, rel=2**-7)
    assert found[first.name]["fp16"].isolated == pytest.approx(lost, rel=2**-7)
    # 3 * fl(x) = 3 is exact, so the operation itself adds nothing
    assert found[first.name]["fp16"].own == 0.0
    # its exact result 3 + 3 * 2^-11 lies between 3 and 3 + 2^-9 (spacing 2^-9) and rounds up: 2^-9 - 3 * 2^-11 = 2^-11
    assert found[first.name]["fp16"].cast == pytest.approx(2.0**-11 / (3 + 3 * 2.0**-11), rel=2**-7)
    assert found[second.name]["fp16"].isolated == pytest.approx(2.0**-11 / (3 + 3 * 2.0**-11), rel=2**-7)


def test_what_no_output_reads_contributes_nothing() -> None:
    measured = measurement_of(Function(lambda x: (x.exp() * 0.0 + x, x.argmax(-1))), normal(4, 3))
    assert contribution(measured, "exp").isolated == 0.0


def attention() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        q, k, v = m.qkv(m.norm(x)).chunk(3, dim=-1)
        weights = (q @ k.transpose(-1, -2) / 4).softmax(-1)
        return m.norm(x + m.out(weights @ v))

    return Model(forward, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), norm=nn.LayerNorm(16))


MODELS = {
    "deep": (lambda: Deep(5, 16), (16, 16)),
    "convnet": (convnet, (16, 3, 8, 8)),
    "attention": (attention, (16, 6, 16)),
}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_against_brute_force(name: str, fmt: str) -> None:
    make, shape = MODELS[name]
    measured = measurement_of(seeded(make), normal(*shape))
    found = effects_of(measured)
    first_order = {node: c[fmt].isolated for node, c in found.items() if node in measured.capture.nodes}
    truth = {node: true_isolated(measured, node, fmt) for node in first_order}
    kept = [node for node, value in truth.items() if value > 0 and found[node][fmt].decided_by == "first-order"]
    ratios = [first_order[node] / truth[node] for node in kept]
    rho = spearman([first_order[node] for node in kept], [truth[node] for node in kept])
    low, median, high = min(ratios), statistics.median(ratios), max(ratios)
    print(
        f"\n{name} {fmt}: {len(kept)} nodes, Spearman {rho:.3f}, predicted / true {low:.2f} .. {median:.2f} .. {high:.2f}"
    )
    assert len(kept) >= 10
    assert rho > 0.9
    assert 0.8 < median < 1.25
    assert low > 0.4
    assert high < 2.5


def shared(m: Any, x: Tensor) -> Tensor:
    """Three products read one value, which is also added; one weight serves two of them."""
    y = x.tanh()
    z = m.first(y) * m.second(y) + F.linear(y, m.first.weight)
    return z + y


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_product_answers_for_the_rounding_of_what_it_reads_itself(fmt: str) -> None:
    model = seeded(lambda: Model(shared, first=nn.Linear(24, 24), second=nn.Linear(24, 24)))
    measured = measurement_of(model, normal(64, 24))
    products = [node.name for node in nodes_by_op(measured.capture, "linear")]
    assert len(products) == 3
    (weight,) = (p.name for p in measured.capture.placeholders if p.fqn == "first.weight")
    assert all(measured.readings[name]["tanh"] for name in products)
    assert [measured.readings[name].get(weight, False) for name in products] == [True, False, True]
    found = effects_of(measured)
    for name in products:
        assert measured.traces[name][fmt].isolated == "inputs"
        assert found[name][fmt].isolated == pytest.approx(true_isolated(measured, name, fmt), rel=0.15)
        assert 0 < found[name][fmt].own < found[name][fmt].isolated


def test_two_views_of_one_value_err_together() -> None:
    assert measurement_of(Function(lambda x: x @ x.t()), normal(4, 8)).readings == {}


def test_an_infinity_that_reaches_the_output_is_not() -> None:
    measured = measurement_of(Function(lambda x: (x * x) * 1e-3), torch.tensor([[300.0]]))
    first = nodes_by_op(measured.capture, "mul")[0].name
    found = effects_of(measured)[first]
    assert (found["fp16"].decided_by, found["fp16"].isolated) == ("re-run", math.inf)
    assert found["bf16"].decided_by == "first-order"
    assert found["bf16"].isolated == pytest.approx(112 / 90000, rel=2**-7)


def test_a_silent_all_zero_rms_norm_is_not_harmless() -> None:
    rms_norm = Function(lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))
    measured = measurement_of(rms_norm, torch.tensor([[300.0, -400.0]]))
    power = contribution(measured, "pow")
    assert power.decided_by == "re-run"
    assert power.isolated == 1.0  # every output is zero: finite, and all of the answer is gone


def test_the_same_seed_gives_the_same_numbers_and_leaves_the_generator_alone() -> None:
    measured = [measurement_of(seeded(attention), normal(2, 6, 16)) for _ in range(2)]
    state = torch.get_rng_state()
    assert effects_of(measured[0], seed=3) == effects_of(measured[1], seed=3)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    "guarded",
    [
        lambda x, y: y / (x + 1e-8),
        lambda x, y: y * (x + 1e-8).reciprocal(),
        lambda x, y: y * (x + 1e-8).clamp_max(10.0).rsqrt(),
        lambda x, y: y * (x + 1e-8) ** -1,
        lambda x, y: y * (x + 1e-8).log(),
    ],
)
def test_a_guard_that_vanishes_is_run_again(guarded: Any) -> None:
    # Where x and y are 0 the quotient is 0 and so is its derivative by the guard; in FP16 it is 0 / 0.
    x, y = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([[0.0, 3.0, 4.0]])
    measured = measurement_of(Function(guarded), x, y)
    found = effects_of(measured)[only(measured.capture, "add").name]
    assert (found["fp16"].decided_by, found["fp16"].isolated) == ("re-run", math.inf)
    assert math.isfinite(found["bf16"].isolated)  # BF16 holds 1e-8


def test_an_operation_that_rounds_on_the_way_answers_for_more_than_one_rounding() -> None:
    # x = 1 + 10 u with u = 2^-7, a value of BF16; x ** 3 = 1 + 32.405 u, but BF16 rounds twice on the way:
    # x * x = 1 + 20.78 u -> 1 + 21 u, and times x = 1 + 32.64 u -> 1 + 33 u. Rounding once would give 1 + 32 u.
    measured = measurement_of(Function(lambda x: x**3), torch.tensor([[1 + 10 / 128]]))
    name = only(measured.capture, "pow").name
    ((_, own), _) = measured.alone["bf16"].errors(measured.nodes[name], measured.traces[name]["bf16"], 0)
    exact = (1 + 10 / 128) ** 3
    assert float(own) == pytest.approx(1 + 33 / 128 - exact, rel=2**-8)
    found = effects_of(measured)[name]["bf16"]
    assert found.own == pytest.approx((1 + 33 / 128 - exact) / exact, rel=2**-7)
    assert found.own == found.isolated  # nothing is lost on the way in


def test_a_node_run_again_is_asked_apart_what_rounding_its_result_alone_does() -> None:
    # Rounding x makes both entries 1 (2^-11 is half of the spacing, a tie): the second no longer wins.
    # Rounding 3 x, where the spacing is 2^-9, takes 3 + 0.75 * 2^-9 to 3 + 2^-9: it still does.
    x = torch.tensor([[1.0, 1 + 2.0**-11]])
    measured = measurement_of(Function(lambda x: (x * 3.0).argmax(-1)), x)
    found = contribution(measured, "mul")
    assert (found.decided_by, found.isolated, found.own, found.cast) == ("re-run", 1.0, 1.0, 0.0)


def test_an_output_is_rounded_for_its_readers_and_not_for_the_caller() -> None:
    # y = 3 x = 3 + 3 * 2^-11 and z = 2 y are returned, |(y, z)| = sqrt(5) y. Rounding y moves it by 2^-11: for its
    # reader z moves by twice that, while y itself is returned as it is. Of z, which nobody reads, nothing is rounded.
    measured = measurement_of(Function(lambda x: (y := x * 3.0, y * 2.0)), torch.tensor([[1 + 2.0**-11]]))
    first, second = nodes_by_op(measured.capture, "mul")
    found = effects_of(measured)
    moved = 2 * 2.0**-11 / (math.sqrt(5) * (3 + 3 * 2.0**-11))
    assert found[first.name]["fp16"].cast == pytest.approx(moved, rel=2**-7)
    assert found[second.name]["fp16"].cast == 0.0
