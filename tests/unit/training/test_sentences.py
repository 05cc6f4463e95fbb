"""What the training section says, each kind of sentence on a model on which it is printed, held against runs of its own."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.imitation import imitated
from auditor.records import Audit
from auditor.records.training import Training
from auditor.report.reporters import html, text
from auditor.report.training import loop_code, training_answers
from auditor.report.view import view
from auditor.snippets.gradscaler import render as gradscaler
from auditor.snippets.offer import offer_of
from tests.unit.training.conftest import Trained, loss_fn, made

BOTH = ("autocast", "cast")


def audited(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, **asked: Any) -> tuple[Audit, Training]:
    found = auditor.audit(model, batch, mode="training", loss_fn=loss, device="cpu", **asked)
    assert found.training is not None
    return found, found.training


def low_gradients(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor], plan: Any, scale: float = 1.0
) -> dict[str, Tensor]:
    """Of one step under a plan with the loss in FP32, by torch alone but for the imitation of a GPU; unscaled."""
    low = copy.deepcopy(model).train()
    low = auditor.apply(low, plan)
    with imitated("cuda"):
        value = loss(low(batch[0]).float(), *batch[1:])
        (value * scale).backward()
    return {name: p.grad.float() / scale for name, p in low.named_parameters() if p.grad is not None}


def fp32_gradients(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(model).train()
    loss(plain(batch[0]), *batch[1:]).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def off(low: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    gap = sum(float((low[name] - g).double().square().sum()) for name, g in reference.items())
    return (gap / sum(float(g.double().square().sum()) for g in reference.values())) ** 0.5


# The format to train in.


class Sum(nn.Module):
    """A weight whose gradient is a small difference of large inputs: FP16 makes 1000.5 of 1000.3, and BF16 1000."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


CANCELLING = torch.stack([torch.full((8,), 1000.3), torch.full((8,), -1000.0)])


@pytest.fixture(scope="module")
def cancelling() -> tuple[Audit, Training]:
    return audited(Sum(), (CANCELLING,), lambda y: y.mean())


def test_gradients_that_are_finite_and_wrong_are_not_recommended(cancelling: tuple[Audit, Training]) -> None:
    found, training = cancelling
    exact, fp16 = 1000.3 - 1000.0, 1000.5 - 1000.0
    assert training.errors["fp16"] == pytest.approx((fp16 - exact) / exact, rel=0.01)
    assert training.format is None
    assert training.recommendation == (
        f"FP32: the gradients of FP16 are {training.errors['fp16']:.0%} off, where 10% would be tolerated, and no other "
        "format is closer"
    )
    assert training.errors["bf16"] == pytest.approx(1.0)
    assert all(plan.verified for plan in found.plans.values())  # the outputs are fine
    assert found.recommended is None  # the plan that is recommended is about the step too
    assert "Train in FP32: the gradients of FP16 are" in found.recommendation
    assert loop_code(found) is None


def test_a_recommendation_for_inference_names_no_plan_to_train_under() -> None:
    """The outputs hold under autocast, the gradients of the step do not."""
    found, training = audited(Sum(), (CANCELLING,), lambda y: y.mean(), use="inference")
    assert training.format is None
    assert found.recommended is not None
    assert "for training: none holds" in found.recommendation
    assert found.plans["autocast_fp16"].verified
    assert view(found).headline.endswith("Train it in FP32.")


def test_the_headline_says_that_training_stays_in_fp32(cancelling: tuple[Audit, Training]) -> None:
    found, training = cancelling
    seen = view(found)
    assert seen.headline == "Keep it in FP32 to train it; plans that hold the budget for inference are below."
    assert seen.proof == f"{training.recommendation}."
    named = re.search(r"Outputs alone hold the budget under (\w+)\.", found.recommendation)
    assert named is not None
    plan = found.plans[named[1]]
    assert plan.measured_error is not None and plan.measured_error <= found.max_error


def test_the_headline_says_how_to_train(trained: Trained) -> None:
    found, training = trained.audit, trained.audit.training
    assert training is not None and training.fp16 is not None and training.fp16.init is not None
    assert training.format == "fp16"
    assert found.recommended == "autocast_fp16"
    said = f"Train it in FP16 under that plan, with a loss scale from {training.fp16.init:,.10g}."
    assert view(found).headline.endswith(said)
    for rendered in (text.render(found, width=200), html.render(found)):
        assert said in " ".join(rendered.split())


def test_the_window_that_fp16_is_recommended_with(trained: Trained) -> None:
    """`scales from A to B overflow nothing and keep flushed gradients within 1%`."""
    found, training = trained.audit, trained.audit.training
    assert training is not None and training.fp16 is not None
    window = training.fp16
    assert f"scales from {window.minimum:,.10g} to {window.maximum:,.10g} overflow nothing" in training.recommendation
    model = trained.before
    model.dropout.eval()
    for scale, finite in ((window.minimum, True), (window.maximum, True), (4 * window.maximum, False)):
        gradients = low_gradients(model, trained.batch, loss_fn, found.plans["autocast_fp16"], scale)
        assert all(bool(torch.isfinite(g).all()) for g in gradients.values()) is finite, scale


def test_how_far_gradients_are_off_is_what_a_step_shows() -> None:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    batch, loss = (torch.randn(8, 16), torch.randn(8, 4)), nn.functional.mse_loss
    found, training = audited(model, batch, loss)
    assert training.fp16 is not None and training.fp16.init is not None
    reference = fp32_gradients(model, batch, loss)
    for fmt, scale in (("fp16", training.fp16.init), ("bf16", 1.0)):
        shown = off(low_gradients(model, batch, loss, found.plans[f"autocast_{fmt}"], scale), reference)
        assert training.errors[fmt] == pytest.approx(shown, rel=1e-3)


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
    assert training.fp16 is not None and training.fp16.init is not None
    low = low_gradients(model, batch, contrast, found.plans["autocast_fp16"], training.fp16.init)
    assert training.errors["fp16"] == pytest.approx(off(low, fp32_gradients(model, batch, contrast)), rel=1e-3)


class Wide(nn.Module):
    """Half of the gradients are 2^46 times the other half: no scale suits both in FP16."""

    def __init__(self) -> None:
        super().__init__()
        self.big, self.small = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.big(x), self.small(x)), -1)


def test_no_scale_suits_fp16() -> None:
    model, x = Wide(), torch.ones(4, 8)
    weight = torch.cat((torch.full((8,), 2.0**3), torch.full((8,), 2.0**-43)))
    found, training = audited(model, (x,), lambda y: (y * weight).sum())
    assert training.fp16 is not None
    window = training.fp16
    assert training.format == "bf16"
    assert found.recommended == "autocast_bf16"
    assert training.recommendation == (
        f"BF16 without a scaler: no loss scale suits FP16: {window.closed_by} overflows beyond {window.maximum:,.10g}, and "
        f"{window.minimum:,.10g} is needed to keep flushed gradients within 1%"
    )
    plan = found.plans["autocast_fp16"]
    beyond = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, 2 * window.maximum)
    within = low_gradients(model, (x,), lambda y: (y * weight).sum(), plan, window.maximum)
    assert not bool(torch.isfinite(beyond["big.weight"]).all())
    assert not bool(within["small.weight"].any())  # all of them flushed: half, where 1 % is allowed
    answers = training_answers(found)
    assert answers is not None
    assert (
        answers.falling
        == f"No scale suits this model: {window.closed_by or '(whole model)'} overflows beyond {window.maximum:,.10g}."
    )
    assert view(found).headline.endswith("Train it in BF16 under that plan, without a loss scale.")


def test_a_plan_that_runs_nothing_low_is_none_to_train_under() -> None:
    """Gradients would be near enough, and the budget of the outputs leaves nothing low."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    batch = (torch.randn(8, 16), torch.randn(8, 4))
    found, training = audited(model, batch, nn.functional.mse_loss, max_error=1e-12, strategies=("autocast",))
    assert training.format is None
    assert training.recommendation == "FP32: no verified plan under autocast runs anything in FP16 or BF16"
    assert all(error is not None and error < 0.1 for error in training.errors.values())
    assert not any(p.verified and any(c.precision != "fp32" for c in p.scopes.values()) for p in found.plans.values())
    assert found.recommended is None
    assert view(found).headline.endswith("Train it in FP32.")


def test_nothing_is_low_where_there_is_no_product() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).tanh()

    _, training = audited(Scale(), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss, strategies=("cast",))
    assert training.recommendation == "FP32: autocast lowers nothing in this step"
    assert set(training.errors.values()) == {0.0}


# Loss scales that were tried.


def explained(training: Training) -> list[tuple[bool, bool, str | None]]:
    return [(t.predicted_overflow, t.overflow, t.explained) for t in training.trials]


def test_a_window_of_all_batches_and_a_step_of_the_first() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    batches = [(x, torch.full((4, 1), 2.0**-6)), (x, torch.full((4, 1), 1.0))]
    found, training = audited(nn.Linear(8, 8), batches, lambda y, k: (y * k).sum(), formats=("fp16",))
    predicted, seen, why = explained(training)[-1]
    assert (predicted, seen) == (True, False)
    shown = re.fullmatch(
        r"the window is that of all batches; in the first one, which is run here, the largest gradient, scaled, is (\S+)",
        why or "",
    )
    assert shown is not None
    model = found.subject.model
    gradients = fp32_gradients(model, (x, batches[0][1]), lambda y, k: (y * k).sum())
    largest = max(float(g.abs().max()) for g in gradients.values())
    assert float(shown[1]) == pytest.approx(largest * training.trials[-1].scale, rel=0.01)
    assert float(shown[1]) < 65504
    assert "he window is that of all batches; in the first one" in " ".join(html.render(found).split())


def test_gradients_that_overflow_and_reach_no_weight() -> None:
    class Masked(nn.Module):
        """The loss is steep where a mask takes the answer of the layer away."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.where(torch.arange(8) < 4, self.layer(x), torch.zeros((), dtype=torch.float16))

    steep = torch.tensor([1.0] * 4 + [1000.0] * 4)
    _, training = audited(Masked(), (torch.randn(4, 8),), lambda y: (y * steep).sum(), formats=("fp16",))
    assert training.trials[-1].scale * 1000 > 65504
    assert training.trials[-1].scale * 1.0 < 65504
    assert explained(training)[-1] == (
        True,
        False,
        "gradients of the model overflow, and none of them reaches a weight",
    )


class Squares(nn.Module):
    """Overflows forwards where FP16 squares it."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(8, 8), factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * self.factor
        return y * y


def test_a_loss_that_is_not_finite() -> None:
    _, training = audited(
        Squares(2000.0), (torch.randn(4, 8),), lambda y: (y / y.max()).mean(), formats=("fp16",), strategies=("cast",)
    )
    assert explained(training)[0] == (False, True, "the loss itself is not finite in this step")
    assert "FP16 gives no finite gradients" in training.recommendation or "no format" in training.recommendation


def test_a_slope_that_overflows() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            nn.init.constant_(self.layer.weight, 0.01)
            nn.init.ones_(self.layer.bias)

        def forward(self, x: Tensor) -> Tensor:
            return (self.layer(x).abs() * 1e-8).sqrt()  # 0 in FP16, and the slope of a root there is infinite

    _, training = audited(Root(), (torch.randn(4, 8),), lambda y: y.sum(), formats=("fp16",), strategies=("cast",))
    predicted, seen, why = explained(training)[0]
    assert (predicted, seen) == (False, True)
    assert re.fullmatch(r"gradients of .+ overflow, though FP32's largest, scaled, is \S+", why or "")


def test_a_step_that_raises() -> None:
    def strict(outputs: Tensor) -> Tensor:
        if outputs.dtype is not torch.float32:
            raise TypeError("FP32 alone")
        return outputs.sum()

    _, training = audited(nn.Linear(8, 8), (torch.randn(4, 8),), strict, formats=("fp16",), strategies=("cast",))
    assert training.errors["fp16"] is None
    assert explained(training)[0] == (False, True, "the step raised: FP32 alone")
    assert "in no format does one training step give finite gradients" in training.recommendation


# One loop, one advice about torch.autocast.


@pytest.mark.parametrize("fmt", ["fp16", "bf16"])
def test_the_loop_and_the_snippet_take_the_same_steps(
    trained: Trained, fmt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert trained.audit.training is not None
    audit = replace(trained.audit, training=replace(trained.audit.training, format=fmt))
    audit.save(tmp_path)
    spec = util.spec_from_file_location("patched_model", tmp_path / "patched_model.py")
    assert spec is not None and spec.loader is not None
    patched_model = util.module_from_spec(spec)
    spec.loader.exec_module(patched_model)
    monkeypatch.setitem(sys.modules, "patched_model", patched_model)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    code, snippet = loop_code(audit), gradscaler(offer_of(audit).plans[f"autocast_{fmt}"])
    assert code is not None
    for advice in (code, snippet):
        assert "put no torch.autocast" in " ".join(advice.replace("#", " ").split())
        assert "with torch.autocast" not in advice
    ends = []
    for printed in (code, snippet):
        model, tokens, targets = made()
        model.dropout.p = 0.0
        names: dict[str, Any] = {"model": model, "loader": [(tokens, targets)] * 3, "loss_fn": loss_fn}
        exec(compile(printed, "printed.py", "exec"), names)
        if printed is snippet:
            model, scaler = names["prepare"](model)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
            for _ in range(3):
                names["train_step"](
                    model, scaler, optimizer, lambda m, b: loss_fn(m(b[0]).float(), b[1]), (tokens, targets), 1.0
                )
        ends.append({name: p.detach().clone() for name, p in model.named_parameters()})
    fresh = dict(made()[0].named_parameters())
    assert all(torch.equal(a, b) for a, b in zip(*(e.values() for e in ends), strict=True))
    assert not torch.equal(ends[0]["up.weight"], fresh["up.weight"])


class Pair(nn.Module):
    """Answers in every way that a loss can be handed on, or be the answer."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.layer, self.way = nn.Linear(8, 8), way

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Any:
        y = self.layer(x)
        if self.way == "tensors":
            return {"y": y, "more": (y.tanh(),)}
        assert labels is not None
        loss = nn.functional.mse_loss(y.float(), labels)
        return {"mapping": {"loss": loss}, "attribute": SimpleNamespace(loss=loss)}.get(self.way, loss)


@pytest.mark.parametrize("way", ["tensors", "mapping", "attribute", "tensor"])
def test_the_loop_runs_whatever_the_model_returns(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(outputs: Any, targets: Tensor) -> Tensor:
        assert outputs["y"].dtype is torch.float32
        return (outputs["y"] - targets + outputs["more"][0]).square().mean()

    torch.manual_seed(0)
    model, (x, y) = Pair(way), (torch.randn(4, 8), torch.randn(4, 8))
    own = way != "tensors"
    found, training = audited(model, {"x": x, "labels": y} if own else (x, y), None if own else squares)
    assert training.format is not None
    assert found.to_json()  # what the file has of it
    assert training.returned == way
    found.save(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "patched_model", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = model.layer.weight.detach().clone()
    loader = [{"x": x, "labels": y}] * 2 if own else [(x, y)] * 2
    names: dict[str, Any] = {"model": model, "loader": loader, "loss_fn": squares}
    exec(compile(loop_code(found) or "", "loop.py", "exec"), names)
    sys.modules.pop("patched_model", None)
    assert not torch.equal(before, model.layer.weight)


def test_without_a_plan_the_loop_has_the_region_that_was_measured() -> None:
    torch.manual_seed(0)
    found, training = audited(
        nn.Linear(8, 8), (torch.randn(4, 8), torch.randn(4, 8)), nn.functional.mse_loss, strategies=("cast",)
    )
    assert training.format is not None
    code = loop_code(found)
    assert code is not None
    assert "    with torch.autocast(device, dtype=torch." in code
    assert "patched_model" not in code


# Advice and answers.


def gradients_of(trained: Trained) -> dict[str, Tensor]:
    """Over both batches, without dropout, one below the other."""
    tokens, targets = trained.batch
    both = [fp32_gradients(trained.before, (x, targets), loss_fn) for x in (tokens, tokens.flip(0))]
    return {name: torch.cat([g[name].flatten() for g in both]) for name in both[0]}


def advice(training: Training, code: str) -> str:
    return next(a.text for a in training.advice if a.code == code)


def test_numbers_of_advice_are_those_of_autograd(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None and training.fp16 is not None and training.fp16.init is not None
    model = copy.deepcopy(trained.before)
    model.dropout.p = 0.0
    audit, found = audited(model, trained.batch, loss_fn)
    assert found.fp16 is not None and found.fp16.init is not None
    gradients = fp32_gradients(model, trained.batch, loss_fn)
    whole = torch.cat([g.flatten() for g in gradients.values()])
    norm = float(whole.norm())
    clip = advice(found, "clip-after-unscale")
    assert f"The gradient norm is {norm:.3g}; before" in clip
    assert f"it reads {norm * found.fp16.init:.3g}" in clip
    ranks = re.search(r"the sum of (\d+) equal gradients overflows FP16", advice(found, "reduce-dtype"))
    assert ranks is not None
    largest = float(whole.abs().max()) * found.fp16.init
    assert largest * int(ranks[1]) == pytest.approx(65504, rel=0.02)
    eps = re.search(r"(\S+)% of the squared gradients would be too", advice(found, "adam-eps"))
    assert eps is not None
    nonzero = whole[whole != 0]
    assert float(eps[1]) == pytest.approx(100 * float((nonzero.square().half() == 0).float().mean()), abs=1.0)
    answers = training_answers(audit)
    assert answers is not None
    assert answers.falling.startswith(f"Beyond {found.fp16.maximum:,.10g} the gradients of ")
    assert answers.falling.endswith(f"overflow; start at {found.fp16.init:,.10g}.")


def test_updates_that_bf16_weights_lose() -> None:
    """Adam's first step moves every weight by the learning rate, which BF16 rounds back where half a spacing is more."""
    model = nn.Linear(32, 32)
    with torch.no_grad():
        model.weight.copy_(torch.rand(32, 32, generator=torch.Generator().manual_seed(0)) * 1.5 + 0.1)
    batch = (torch.randn(8, 32), torch.randn(8, 32))
    found, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    gradients = fp32_gradients(model, batch, nn.functional.mse_loss)
    weights = torch.cat([p.detach().flatten() for p in model.parameters()]).bfloat16()
    signs = torch.cat([gradients[name].flatten().sign() for name, _ in model.named_parameters()])

    def lost(rate: float) -> float:
        return 100 * float(((weights.float() - rate * signs).bfloat16() == weights).float().mean())

    said = re.search(r"(\d+)% of Adam's first updates at a learning rate of 0.001", advice(training, "master-weights"))
    assert said is not None
    assert 10 < lost(1e-3) < 90
    assert int(said[1]) == pytest.approx(lost(1e-3), abs=4)
    answers = training_answers(found)
    assert answers is not None
    stalling = re.search(r"BF16, >?(\d+)% of Adam's first updates", answers.stalling)
    assert stalling is not None
    assert int(stalling[1]) == pytest.approx(lost(1e-4), abs=4)


def test_a_scaler_refuses_half_weights() -> None:
    """`GradScaler wants FP32 weights`."""
    with imitated("cuda"):
        model = nn.Linear(4, 4).half()
        scaler, optimizer = torch.amp.GradScaler("cuda"), torch.optim.SGD(model.parameters(), 0.1)
        scaler.scale(model(torch.ones(2, 4).half()).sum()).backward()
        with pytest.raises(ValueError, match="unscale FP16 gradients"):
            scaler.unscale_(optimizer)


def test_an_embedding_makes_the_share_that_is_said() -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 8), nn.Linear(8, 8)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(x.detach() + 50 * (x - x.detach()))

    torch.manual_seed(0)
    model, batch = Lookup(), (torch.randint(0, 8, (4, 6)), torch.randn(4, 6, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    gradients = {n: float(g.square().sum()) for n, g in fp32_gradients(model, batch, nn.functional.mse_loss).items()}
    share = gradients["embed.weight"] / sum(gradients.values())
    assert advice(training, "embedding-dominates").startswith(f"It makes {share:.0%} of the squared gradient norm.")


def test_a_backward_pass_that_overflows_is_said_with_how_many_gradients() -> None:
    """Roots of what FP16 flushes to zero: their slope is infinite there, and 1e5 at most in FP32."""

    class Roots(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([1e-9, 1.0, 1.0, 2.0]))

        def forward(self, x: Tensor) -> Tensor:
            return (x.abs() * self.scale).sqrt()

    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)) + 0.5
    _, training = audited(Roots(), (x,), lambda y: y.mean(), formats=("fp16",))
    low = (x * Roots().scale.detach()).half().requires_grad_()
    low.sqrt().backward(torch.full_like(low, 1 / x.numel()))
    assert low.grad is not None
    broken = int(low.grad.isinf().sum())
    assert broken == 6
    said = advice(training, "backward-fails")
    assert said.startswith("sqrt")
    assert said.endswith(
        f": its backward pass turns {broken} finite gradients into Inf or NaN in FP16, and the gradient of scale with them."
    )
    rounded = (x * Roots().scale.detach()).half().float()
    scale = torch.ones(4, requires_grad=True)
    (rounded * scale).sqrt().mean().backward()
    assert scale.grad is not None and not scale.grad.isfinite().all()


def test_what_moves_with_the_batch_is_said_with_the_numbers_of_parts() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)

    torch.manual_seed(0)
    model, batch = Layer(), (0.01 * torch.randn(16, 8), torch.randn(16, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))

    def largest(rows: slice) -> float:
        plain = copy.deepcopy(model)
        y = plain(batch[0][rows])
        y.retain_grad()
        nn.functional.mse_loss(y, batch[1][rows]).backward()
        return max(float(g.abs().max()) for g in (y.grad, *(p.grad for p in plain.parameters())) if g is not None)

    said = advice(training, "batch-size")
    found = re.match(r"From (\d+) to (\d+) samples .*the largest gradient falls from (\S+) to (\S+);", said)
    assert found is not None, said
    assert (int(found[1]), int(found[2])) == (4, 16)
    assert float(found[3]) == pytest.approx(max(largest(slice(0, 4)), largest(slice(4, 8))), rel=0.06)
    assert float(found[4]) == pytest.approx(largest(slice(0, 16)), rel=0.06)


def test_a_sum_over_ranks_is_said_where_it_stands(tmp_path: Path) -> None:
    """It stays in the dtype that it is given: what two ranks hold would be added in FP16."""
    from torch import distributed
    from torch.distributed import _functional_collectives as collectives

    class Gathered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return collectives.all_reduce(self.layer(x), "sum", distributed.group.WORLD) * 1.0

    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/ranks", rank=0, world_size=1)
    try:
        half = collectives.all_reduce(torch.ones(3, dtype=torch.float16), "sum", distributed.group.WORLD)
        assert half.dtype is torch.float16
        batch = (torch.randn(4, 8), torch.randn(4, 8))
        _, training = audited(Gathered(), batch, nn.functional.mse_loss, strategies=("autocast",), formats=("bf16",))
    finally:
        distributed.destroy_process_group()
    said = advice(training, "low-collective")
    assert re.match(rf"\S*all_reduce\S* at {Path(__file__).name}:\d+ adds what the ranks hold in the dtype", said), said


def test_a_layer_far_above_the_others_is_said_with_its_factor() -> None:
    class Steep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(5))

        def forward(self, x: Tensor) -> Tensor:
            for i, layer in enumerate(self.layers):
                y = layer(x if i != 2 else x.detach())
                x = x + (y if i != 2 else y.detach() + 300 * (y - y.detach()))
            return x

    torch.manual_seed(0)
    model, batch = Steep(), (torch.randn(4, 8), torch.randn(4, 8))
    _, training = audited(model, batch, nn.functional.mse_loss, strategies=("autocast",))
    squares: dict[str, float] = {}
    for name, g in fp32_gradients(model, batch, nn.functional.mse_loss).items():
        module = name.rpartition(".")[0]
        squares[module] = squares.get(module, 0.0) + float(g.square().sum())
    norms = {module: value**0.5 for module, value in squares.items()}
    middle = sorted(norms.values())[2]
    said = advice(training, "gradient-outliers")
    assert said.startswith(f"Against the median of {middle:.2g}: layers.2 ({norms['layers.2'] / middle:.0f} times)")


def test_losses_point_at_the_users_code_or_at_torchs_name() -> None:
    batch = (torch.randn(4, 8), torch.randn(4, 8))
    _, own = audited(nn.Linear(8, 8), batch, lambda y, t: (y - t).square().mean(), strategies=("autocast",))
    lost = [node for node in own.nodes if node.owner == "(loss)"]
    assert lost
    assert all((node.source or "").startswith(f"{Path(__file__).name}:") for node in lost)
    found, theirs = audited(nn.Linear(8, 8), batch, nn.SmoothL1Loss(), strategies=("autocast",))
    lost = [node for node in theirs.nodes if node.owner == "(loss)"]
    assert lost
    assert {(node.source, node.called_from) for node in lost} == {(None, "torch.nn.SmoothL1Loss")}
    assert "objective.py" not in html.render(found)
    assert "step.py" not in html.render(found)
