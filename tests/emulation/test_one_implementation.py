"""One implementation: `auditor.emulate`, a replay, a verified plan and a rehearsal give the same bits for the same program."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.capture import capture
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, plain
from auditor.numerics.kernels import CUDA_ARITHMETIC
from tests.support.replaying import Model
from tests.support.small_models import MODELS
from tests.support.subjects import DTYPES, FORMATS, normal, seeded, subject_of
from tests.support.two_ways import difference, emulated_answer, everything, replayed_answer


def warps(m: Any, x: Tensor) -> Tensor:
    """Convolutions, resizing, grid sampling, norms, attention and sums by index."""
    h = nn.functional.interpolate(m.first(x), scale_factor=2.0, mode="bilinear")
    flow = torch.tanh(m.flow(h)).movedim(1, -1)
    h = m.norm(nn.functional.grid_sample(h, flow, align_corners=False))
    tokens = h.flatten(2).transpose(1, 2)
    h = nn.functional.scaled_dot_product_attention(tokens, tokens, tokens)
    summed = torch.zeros_like(h[:, :4]).index_add(1, torch.arange(h.shape[1]) % 4, h)
    return m.last(nn.functional.gelu(summed)).softmax(-1)


def warp() -> nn.Module:
    layers = {"first": nn.Conv2d(3, 8, 3, padding=1), "flow": nn.Conv2d(8, 2, 3, padding=1)}
    return Model(warps, **layers, norm=nn.GroupNorm(2, 8), last=nn.Linear(8, 5)).eval()


X = normal(2, 3, 6, 6)
SUBJECTS = {**MODELS, "warp": (warp, (X,))}


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_patched_model_and_its_replay_are_equal(name: str, strategy: str, fmt: str) -> None:
    kind, inputs = SUBJECTS[name]
    model, batch = seeded(kind).eval(), (inputs, {})
    captured = capture(subject_of(model, *inputs), FORMATS)
    labels = everything(captured, fmt)
    run = emulated_answer(model, captured, batch, strategy, fmt, labels)
    replay = replayed_answer(model, captured, batch, strategy, fmt, labels)
    assert difference(run, replay) == 0


@pytest.mark.parametrize("fmt", FORMATS)
def test_gradients_of_a_run_and_of_its_replay_are_equal(fmt: str) -> None:
    model, dtype = seeded(warp).to(DTYPES[fmt]), DTYPES[fmt]
    with auditor.emulate("cuda"):
        loss = model(X.to(dtype)).float().square().sum()
        expected = torch.autograd.grad(loss, [*model.parameters()])
    wide = seeded(warp)
    captured = capture(subject_of(wide, X), FORMATS)
    flat = captured.bind(wide, ((X,), {}))
    by_name = dict(wide.named_parameters())
    policy = Policy(captured, "cast", plain(fmt), fmt)
    replayed = Executor(captured.graph_module, policy).run(*flat)
    with CUDA_ARITHMETIC:
        found = torch.autograd.grad(replayed[0].float().square().sum(), [*by_name.values()])
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours.to(dtype), theirs)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_verified_plan_states_the_error_of_a_run_by_hand(fmt: str) -> None:
    model, dtype = seeded(warp), DTYPES[fmt]
    reference = model(X).detach().double()
    audit = auditor.audit(model, (X,), formats=fmt, strategies="cast", max_error=1.0)
    plan = audit.plans[f"cast_{fmt}"]
    assert plan.low_precision_flops == 1
    with auditor.emulate("cuda"), torch.no_grad():
        low = seeded(warp).to(dtype)(X.to(dtype)).double()
    assert plan.measured_error == pytest.approx(float((low - reference).norm() / reference.norm()), rel=1e-6)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_rehearsal_takes_the_steps_of_a_loop_by_hand(fmt: str) -> None:
    batches = [normal(2, 3, 6, 6, seed=seed) for seed in range(3)]

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    model = seeded(warp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rehearsed = auditor.rehearse(lambda x: step(model, optimizer, x), batches, 3, remedies=False)
    by_hand = seeded(warp)
    others = torch.optim.SGD(by_hand.parameters(), lr=0.1)
    losses = []
    with auditor.emulate("cuda"):
        scaler = torch.amp.GradScaler("cuda", enabled=fmt == "fp16")
        for x in batches:
            others.zero_grad()
            with torch.autocast("cuda", dtype=DTYPES[fmt]):
                loss = by_hand(x).square().sum()
            scaler.scale(loss).backward()
            scaler.step(others)
            scaler.update()
            losses.append(float(loss))
    assert rehearsed.runs[f"{fmt}_autocast"].losses == pytest.approx(losses, rel=1e-6)
