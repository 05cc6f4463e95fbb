"""What the training section says of how to train, each kind of sentence on a model on which it is printed."""

import re

import pytest
import torch
from torch import Tensor, nn

from auditor.records import Audit
from auditor.records.training import Training
from auditor.report.reporters import html, text
from auditor.report.training import loop_code
from auditor.report.view import view
from tests.support.replaying import Model
from tests.unit.training.conftest import Trained, loss_fn
from tests.unit.training.own_steps import audited, fp32_gradients, low_gradients, off


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
        f"FP32: the gradients of FP16 have an error of {training.errors['fp16']:.0%}, above the tolerated 10%, "
        "and no other format is more accurate"
    )
    assert training.errors["bf16"] == pytest.approx(1.0)
    assert all(plan.is_verified for plan in found.plans.values())  # the outputs are fine
    assert found.recommended is None  # the plan that is recommended is about the step too
    assert "Train in FP32: the gradients of FP16 have" in found.recommendation
    assert loop_code(found) is None


def test_a_recommendation_for_inference_names_no_plan_to_train_under() -> None:
    """The outputs hold under autocast, the gradients of the step do not."""
    found, training = audited(one_layer(), (CANCELLING,), lambda y: y.mean(), use="inference")
    assert training.format is None
    assert found.recommended is not None
    assert "for training: " not in found.recommendation
    assert found.plans["autocast_fp16"].is_verified
    assert view(found).headline.endswith("Train it in FP32.")


@pytest.mark.slow
def test_a_step_that_trains_is_under_autocast_where_no_plan_for_it_was_asked_for() -> None:
    found, training = audited(
        nn.Linear(4, 2), (torch.randn(3, 4),), lambda y: y.square().mean(), strategies="graph", formats="fp16"
    )
    assert found.plans["graph_fp16"].is_verified
    assert found.recommended is None
    assert training.format is not None
    assert view(found).headline.startswith("No plan for training was requested: ")
    assert "Train it in FP16 under autocast, with" in view(found).headline
    assert "For inference: FP16 as a graph" in found.recommendation


def test_the_headline_says_that_training_stays_in_fp32(cancelling: tuple[Audit, Training]) -> None:
    found, training = cancelling
    seen = view(found)
    assert seen.headline == "Keep it in FP32 to train it; plans within the budget for inference are below."
    assert seen.proof == f"{training.recommendation}."
    named = re.search(r"For inference, (\w+) meets the error budget\.", found.recommendation)
    plan = found.plans[named[1]]
    assert plan.measured_error is not None and plan.measured_error <= found.max_error


def test_the_headline_says_how_to_train(trained: Trained) -> None:
    found, training = trained.audit, trained.audit.training
    assert training.format == "fp16"
    assert found.recommended == "autocast_fp16"
    said = f"Train it in FP16 under that plan, with a loss scale from {training.fp16.init:,.10g}."
    assert view(found).headline.endswith(said)
    for rendered in (text(found, width=200), html(found)):
        assert said in " ".join(rendered.split())


def test_the_window_that_fp16_is_recommended_with(trained: Trained) -> None:
    """`at scales from A to B nothing overflows and at most 1% of the gradients underflow`."""
    found, training = trained.audit, trained.audit.training
    window = training.fp16
    assert (
        f"at scales from {window.minimum:,.10g} to {window.maximum:,.10g} nothing overflows" in training.recommendation
    )
    model = trained.before
    model.dropout.eval()
    for scale, finite in ((window.minimum, True), (window.maximum, True), (4 * window.maximum, False)):
        gradients = low_gradients(model, trained.batch, loss_fn, found.plans["autocast_fp16"], scale)
        assert all(bool(torch.isfinite(g).all()) for g in gradients.values()) is finite, scale


def test_the_loss_is_outside_of_a_plans_regions_as_in_the_loop() -> None:
    """A product in the loss, which a region of autocast would run in FP16, where it overflows."""
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


def test_a_loss_that_is_not_finite() -> None:
    """Overflows forwards where FP16 squares it."""
    squares, x = Model(lambda m, x: (m.layer(x) * 2000.0).square(), layer=nn.Linear(8, 8)), torch.randn(4, 8)
    _, training = audited(squares, (x,), lambda y: (y / y.max()).mean(), formats=("fp16",), strategies=("cast",))
    assert "FP16 gives no finite gradients" in training.recommendation or "no format" in training.recommendation


def wide() -> nn.Module:
    """Half of the gradients are 2^46 times the other half: no scale suits both in FP16."""
    return Model(
        lambda m, x: torch.cat((m.big(x), m.small(x)), -1),
        big=nn.Linear(8, 8, bias=False),
        small=nn.Linear(8, 8, bias=False),
    )


def test_no_scale_suits_fp16() -> None:
    model, x = wide(), torch.ones(4, 8)
    weight = torch.cat((torch.full((8,), 2.0**3), torch.full((8,), 2.0**-43)))
    found, training = audited(model, (x,), lambda y: (y * weight).sum())
    window = training.fp16
    assert training.format == "bf16"
    assert found.recommended == "autocast_bf16"
    assert training.recommendation == (
        f"BF16 without a scaler: no loss scale suits FP16: {window.closed_by} overflows above {window.maximum:,.10g}, but "
        f"at least {window.minimum:,.10g} is needed for at most 1% underflow"
    )
    plan = found.plans["autocast_fp16"]
    beyond = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, 2 * window.maximum)
    within = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, window.maximum)
    assert not bool(torch.isfinite(beyond["big.weight"]).all())
    assert not bool(within["small.weight"].any())  # all of them flushed: half, where 1 % is allowed
    assert view(found).headline.endswith("Train it in BF16 under that plan, without a loss scale.")


def test_a_step_that_raises() -> None:
    def strict(outputs: Tensor) -> Tensor:
        if outputs.dtype is not torch.float32:
            raise TypeError("FP32 alone")
        return outputs.sum()

    _, training = audited(nn.Linear(8, 8), (torch.randn(4, 8),), strict, formats=("fp16",), strategies=("cast",))
    assert training.errors["fp16"] is None
    assert "no format gives finite gradients in a training step" in training.recommendation
