"""What the training section says of how to train, each kind of sentence on a model on which it is printed."""

import math
import re
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from auditor.execution.policy import plain
from auditor.features.training import measure
from auditor.features.training.measure import low_by_module, low_names, module_gradients
from auditor.features.training.recommend import (
    format_to_train_in,
    loss_scale,
    lost_by_adam,
    lost_by_sgd,
    ratios_of,
    scaler_code,
)
from auditor.features.training.report import loop_code
from auditor.numerics.histogram import magnitudes_of
from auditor.records import Audit, Capture
from auditor.records.training import LossScale, ParameterGradients, Training
from auditor.report.view import ReportView
from auditor.reporters import html, text
from tests.features.training.conftest import Trained, audited, fp32_gradients, loss_fn, low_gradients, off
from tests.support.replaying import Model
from tests.support.subjects import FORMATS, capture_of


def one_layer() -> nn.Module:
    """A weight whose gradient is a small difference of large inputs: FP16 makes 1000.5 of 1000.3, and BF16 1000."""
    return Model(lambda m, x: m.layer(x), layer=nn.Linear(8, 8, bias=False))


CANCELLING = torch.stack([torch.full((8,), 1000.3), torch.full((8,), -1000.0)])


@pytest.fixture(scope="module")
def cancelling() -> tuple[Audit, Training]:
    return audited(one_layer(), (CANCELLING,), lambda y: y.mean())


def test_gradients_that_are_finite_and_wrong_are_not_recommended(cancelling: tuple[Audit, Training]) -> None:
    found, training = cancelling
    exact, fp16 = 1000.3 - 1000.0, 1000.5 - 1000.0
    assert training.errors["fp16"] == pytest.approx((fp16 - exact) / exact, rel=0.01)
    assert training.format is None
    assert training.recommendation == (
        "low precision is not recommended for training: FP16 gradients differ from FP32's by "
        f"{training.errors['fp16']:.0%}, above the tolerated {training.tolerated:.0%}, "
        "and no other format is more accurate"
    )
    assert training.errors["bf16"] == pytest.approx(1.0)
    assert all(plan.is_verified for plan in found.plans.values())  # the outputs are fine
    assert found.recommended is None  # the plan that is recommended is about the step too
    assert "Low precision is not recommended for training: FP16 gradients differ" in found.recommendation
    assert loop_code(found) is None


def test_a_recommendation_for_inference_names_no_plan_to_train_under() -> None:
    """The outputs hold under autocast, the gradients of the step do not."""
    found, training = audited(one_layer(), (CANCELLING,), lambda y: y.mean(), use="inference")
    assert training.format is None
    assert found.recommended is not None
    assert "for training: " not in found.recommendation
    assert found.plans["autocast_fp16"].is_verified
    assert "Low precision is not recommended for training: " in ReportView(found).headline


@pytest.mark.slow
def test_a_step_that_trains_is_under_autocast_where_no_plan_for_it_was_asked_for() -> None:
    found, training = audited(
        nn.Linear(4, 2), (torch.randn(3, 4),), lambda y: y.square().mean(), strategies="graph", formats="fp16"
    )
    assert found.plans["graph_fp16"].is_verified
    assert found.recommended is None
    assert training.format is not None
    assert ReportView(found).headline.startswith("No plan for training was requested: ")
    assert "Train in FP16 under autocast, with" in ReportView(found).headline
    assert "For inference: FP16 as a graph" in found.recommendation


def test_the_headline_says_that_training_stays_in_fp32(cancelling: tuple[Audit, Training]) -> None:
    found, training = cancelling
    seen = ReportView(found)
    assert seen.headline == f"L{training.recommendation[1:]}."
    assert seen.proof == "Plans for inference, which are within the error budget, are below."
    named = re.search(r"For inference, (\w+) meets the error budget\.", found.recommendation)
    plan = found.plans[named[1]]
    assert plan.measured_error is not None and plan.measured_error <= found.max_error


def test_the_headline_says_how_to_train(trained: Trained) -> None:
    found, training = trained.audit, trained.audit.training
    assert training.format == "fp16"
    assert found.recommended == "autocast_fp16"
    said = f"Train in FP16 under that plan, with an initial loss scale of {training.fp16.init:,.10g}."
    assert ReportView(found).headline.endswith(said)
    for rendered in (text(found, width=200), html(found)):
        assert said in " ".join(rendered.split())


def test_the_window_that_fp16_is_recommended_with(trained: Trained) -> None:
    """`at loss scales from A to B no gradient overflows, and at most 1% of the gradient values become zero`."""
    found, training = trained.audit, trained.audit.training
    window = training.fp16
    assert (
        f"at loss scales from {window.minimum:,.10g} to {window.maximum:,.10g} no gradient overflows"
        in training.recommendation
    )
    model = trained.before
    model.dropout.eval()
    for scale, finite in ((window.minimum, True), (window.maximum, True), (4 * window.maximum, False)):
        gradients = low_gradients(model, trained.batch, loss_fn, found.plans["autocast_fp16"], scale)
        assert all(bool(torch.isfinite(g).all()) for g in gradients.values()) is finite, scale


def test_the_loss_is_outside_of_a_plans_regions_as_in_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product in the loss, which a region of autocast would run in FP16, where it overflows."""
    monkeypatch.setattr(measure, "_loss_overflows", lambda *_: iter(()))  # which runs the loss inside the region
    seen = set()

    def contrast(outputs: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return torch.logsumexp(outputs @ outputs.T, -1).mean()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
    with torch.no_grad():
        model[2].weight.mul_(300.0)
    batch = (torch.randn(8, 16),)
    answer = model(batch[0]).detach()
    assert float((answer @ answer.T).max()) > 65504
    found, training = audited(model, batch, contrast, formats=("fp16",), strategies=("autocast",))
    assert seen == {torch.float32}
    assert training.format == "fp16"
    low = low_gradients(model, batch, contrast, found.plans["autocast_fp16"], training.fp16.init)
    assert training.errors["fp16"] == pytest.approx(off(low, fp32_gradients(model, batch, contrast)), rel=1e-3)


def wide() -> nn.Module:
    """Half of the gradients are 2^46 times the other half: no scale suits both in FP16."""
    layers = {name: nn.Linear(8, 8, bias=False) for name in ("big", "small")}
    return Model(lambda m, x: torch.cat((m.big(x), m.small(x)), -1), **layers)


def test_no_scale_suits_fp16() -> None:
    model, x = wide(), torch.ones(4, 8)
    weight = torch.cat((torch.full((8,), 2.0**3), torch.full((8,), 2.0**-43)))
    found, training = audited(model, (x,), lambda y: (y * weight).sum())
    window = training.fp16
    assert training.format == "bf16"
    assert found.recommended == "autocast_bf16"
    assert training.recommendation == (
        f"BF16 without a scaler: no loss scale suits FP16, since gradients of {window.closed_by} overflow above "
        f"{window.maximum:,.10g}, and over 1% of the gradient values become zero below {window.minimum:,.10g}"
    )
    plan = found.plans["autocast_fp16"]
    beyond = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, 2 * window.maximum)
    within = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, window.maximum)
    assert not bool(torch.isfinite(beyond["big.weight"]).all())
    assert not bool(within["small.weight"].any())  # all of them flushed: half, where 1 % is allowed
    assert ReportView(found).headline.endswith("Train in BF16 under that plan, without a loss scale.")


def test_a_step_that_raises_gives_no_gradients() -> None:
    def strict(outputs: Tensor) -> Tensor:
        if outputs.dtype is not torch.float32:
            raise TypeError("FP32 alone")
        return outputs.sum()

    _, training = audited(nn.Linear(8, 8), (torch.randn(4, 8),), strict, formats=("fp16",), strategies=("cast",))
    assert training.errors["fp16"] is None
    assert "no format gives finite gradients in a training step" in training.recommendation


# The window of loss scales, low gradients by module, parts of a batch, and which format to train in: all worked out by
# hand.


def powers(*exponents: int, each: int = 100) -> torch.Tensor:
    """1.5 times powers of two, so that nothing lies on an edge."""
    return torch.cat([torch.full((each,), 1.5 * 2.0**e) for e in exponents])


def test_an_open_window() -> None:
    # the smallest FP16 subnormal is 2^-24 and half of it survives: 1.5 * 2^-30 needs 2^5; 1.5 * 2^3 allows 2^12
    window = loss_scale({"a": magnitudes_of(powers(3)), "b": magnitudes_of(powers(-30))})
    assert (window.minimum, window.maximum, window.init) == (2.0**5, 2.0**12, 2.0**8)
    assert window.flushed_unscaled == 0.5
    assert (window.closed_by, window.largest, window.starved) == (None, "a", None)


def test_an_empty_window_names_the_module_that_closes_it() -> None:
    window = loss_scale({"a": magnitudes_of(powers(3)), "b": magnitudes_of(powers(-40))})
    assert window.init is None
    assert (window.closed_by, window.starved) == ("a", "b")
    assert window.minimum > window.maximum


def test_a_share_may_be_flushed() -> None:
    few = torch.cat((powers(0, each=1000), powers(-60, each=9)))
    window = loss_scale({"a": magnitudes_of(few)})
    assert window.minimum == 1.0
    many = loss_scale({"a": magnitudes_of(torch.cat((powers(0, each=1000), powers(-60, each=11))))})
    assert many.minimum == 2.0**35


def test_gradients_beyond_fp16_ask_for_a_scale_below_one() -> None:
    window = loss_scale({"a": magnitudes_of(powers(20))})
    assert window.maximum == 2.0**-5  # 1.5 * 2^15 is the largest of these that is below 65504
    assert window.minimum <= window.maximum
    assert window.init is not None


def test_no_low_gradient_no_window() -> None:
    assert loss_scale({}) is None
    assert loss_scale({"a": magnitudes_of(torch.zeros(4))}) is None


def test_the_scaler_is_code_that_runs() -> None:
    scaler = eval(scaler_code(2.0**20), {"GradScaler": lambda **options: torch.amp.GradScaler("cpu", **options)})
    assert scaler.get_scale() == 2.0**20
    assert scaler.get_growth_interval() == 2000


def parameter(ratios: Mapping[int, int], weight: torch.Tensor) -> ParameterGradients:
    return ParameterGradients("w", "", magnitudes_of(weight), magnitudes_of(torch.ones(1)), ratios, True)


def test_gradients_against_half_a_spacing() -> None:
    # BF16 spaces by 2^-7 in [1, 2): half of it is 2^-8. By 2^-8 in [0.5, 1): half of it is 2^-9.
    weight = torch.tensor([1.0, -1.5, 0.75, 1.0])
    gradient = torch.tensor([3 * 2.0**-8, 1.5 * 2.0**-10, -1.5 * 2.0**-9, 0.0])
    # 3 = 1.5 * 2^1; 1.5 * 2^-2; 1.5 * 2^0; and a weight that does not move
    assert ratios_of(weight, gradient) == {1: 1, -2: 1, 0: 1}


def test_next_to_zero_there_is_room_for_any_update() -> None:
    (ratio,) = ratios_of(torch.zeros(3), torch.tensor([1e-30, 0.0, 1e-30]))
    assert ratio > 150
    assert ratios_of(torch.ones(1), torch.tensor([float("inf")])) == {}


def test_the_share_that_sgd_loses() -> None:
    found = [parameter({0: 4, 2: 2, 5: 2}, torch.ones(1))]
    # an update of 2^-2 |g| is lost below half a spacing, where the ratio is below 2: the 4 of 8 in the bin of 0
    assert lost_by_sgd(found, 2.0**-2) == 4 / 8
    # at 2^-2.5 the edge falls in the middle of the bin of 2, on the logarithmic scale: half of its 2
    assert lost_by_sgd(found, 2.0**-2.5) == pytest.approx(5 / 8)
    assert lost_by_sgd(found, 1.0) == 0.0
    assert lost_by_sgd([], 1.0) == 0.0


def test_the_share_that_adam_loses() -> None:
    # Every weight moves by 2^-10. Half a spacing is 2^-8 |w| rounded down to a power of two: 2^-10 at 2^-2, where the
    # update holds, 2^-9 at 2^-1 and 2^-8 at 1, where it does not. A weight of zero can move.
    weight = torch.tensor([0.25, 0.25, 0.25, 0.5, 1.0, 0.0, 0.0, 0.0])
    assert lost_by_adam([parameter({}, weight)], 2.0**-10) == 2 / 8
    assert lost_by_adam([parameter({}, weight)], 2.0**-11) == 5 / 8
    assert lost_by_adam([], 1.0) == 0.0


# Which gradients are low under autocast, on a model of three operations.


def net() -> nn.Module:
    parts = {"layer": nn.Linear(2, 2, bias=False), "scale": nn.Parameter(torch.ones(2))}
    return Model(lambda m, x: m.layer(x).softmax(-1) * m.scale, **parts)


@pytest.fixture(scope="module")
def captured() -> Capture:
    return capture_of(net(), torch.ones(3, 2))


@pytest.fixture(scope="module")
def low(captured: Capture) -> frozenset[str]:
    return low_names(captured, "fp16", plain("fp16"))


def name_of(captured: Capture, fqn: str) -> str:
    (name,) = (place.name for place in captured.placeholders if place.fqn == fqn)
    return name


def test_results_and_what_is_lowered_for_a_reader(captured: Capture, low: frozenset[str]) -> None:
    # The layer's weight and its input are lowered for it; the softmax and the product with FP32 run wide.
    (x,) = (place.name for place in captured.placeholders if place.kind == "input")
    assert low == {"linear", name_of(captured, "layer.weight"), x}


def test_gradients_by_module(captured: Capture, low: frozenset[str]) -> None:
    weight, scale = name_of(captured, "layer.weight"), name_of(captured, "scale")
    spreads = {
        "linear": magnitudes_of(torch.tensor([4.0, 1.0])),
        "softmax": magnitudes_of(torch.tensor([16.0])),
        weight: magnitudes_of(torch.tensor([2.0, 2.0**-30])),
        scale: magnitudes_of(torch.tensor([32.0])),
    }
    found = low_by_module(captured, spreads, low)
    assert list(found) == ["layer"]
    # 2^-30 beside 2 is beyond the 24 bits of FP32's significand
    assert found["layer"].exponents == {0: 1, 1: 1, 2: 1}
    rows = {row.module: row for row in module_gradients(captured, spreads, low)}
    assert list(rows) == ["layer", ""]
    assert (rows["layer"].activations.max_abs, rows["layer"].low.max_abs) == (4.0, 4.0)
    assert (rows[""].activations.max_abs, rows[""].low) == (16.0, None)


# Which format to train in, on errors and windows that are written down.


def window(*exponents: int) -> LossScale:
    return loss_scale({"a": magnitudes_of(torch.tensor([1.5 * 2.0**e for e in exponents]))})


OPEN, CLOSED = window(0, -10), window(3, -40)


@pytest.mark.parametrize(
    ("errors", "scale", "preferred", "format", "reason"),
    [
        ({"fp16": 4e-4, "bf16": 3e-3}, OPEN, "fp16", "fp16", "FP16 with GradScaler"),
        ({"fp16": 4e-4, "bf16": 3e-3}, OPEN, "bf16", "bf16", "the recommended plan runs in BF16"),
        # gradients that are finite and wrong
        ({"fp16": 0.64, "bf16": 3e-3}, OPEN, None, "bf16", "FP16 gradients differ from FP32's by 64%"),
        ({"fp16": 0.64, "bf16": 0.3}, OPEN, None, None, "training: BF16 gradients differ from FP32's by 30%"),
        ({"fp16": 0.64}, OPEN, None, None, "training: FP16 gradients differ from FP32's by 64%"),
        ({"fp16": 0.64}, OPEN, "fp16", None, "by 64%"),
        ({"fp16": 2e-3, "bf16": 0.3}, OPEN, "bf16", "fp16", "BF16 gradients differ from FP32's by 30%"),
        # FP16 is usually the closer one; where it is not, something is lost
        (
            {"fp16": 0.05, "bf16": 0.01},
            OPEN,
            "fp16",
            "bf16",
            "differ from FP32's by 0.01, and FP16 gradients by 0.05",
        ),
        # not finite, or not run
        ({"fp16": math.inf, "bf16": 3e-3}, OPEN, None, "bf16", "no finite gradients"),
        ({"fp16": None, "bf16": math.nan}, OPEN, None, None, "no format gives finite gradients"),
        ({"fp16": math.inf, "bf16": None}, OPEN, None, None, "no format gives finite gradients"),
        ({"fp16": 4e-4, "bf16": 3e-3}, CLOSED, "fp16", "bf16", "no loss scale suits FP16"),
        ({"fp16": 4e-4}, CLOSED, "fp16", None, "no loss scale suits FP16"),
        ({"fp16": 0.0, "bf16": 0.0}, None, None, None, "autocast runs nothing in low precision"),
    ],
)
def test_the_format_and_why(
    errors: dict[str, float | None], scale: LossScale | None, preferred: str | None, format: str | None, reason: str
) -> None:
    found, why = format_to_train_in(tuple(errors) or FORMATS, scale, errors, preferred)
    assert found == format
    assert reason in why
