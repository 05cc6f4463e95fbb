"""Backwards inside an emulated run: what is rounded and what overflows, worked out by hand, and whole training steps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.capture.capture import AGREEMENT
from tests.support.replaying import Model, linear, replayed
from tests.support.subjects import normal, seeded

FP16, BF16, WIDE = torch.float16, torch.bfloat16, torch.float32


def gradient(x: Tensor | nn.Parameter) -> Tensor:
    assert x.grad is not None
    return x.grad


def test_gradients_of_products_sum_in_fp32_and_round_once() -> None:
    # d/dw of sum over 101 rows of x w: 2048 + 1 * 100. fp16 spaces by 2 from 2048 on and would stay there; 2148 is one.
    x = torch.cat([torch.tensor([2048.0]), torch.ones(100)])[:, None]
    weight = torch.ones(1, 1, requires_grad=True)
    with auditor.emulate():
        with torch.autocast("cuda", dtype=FP16):
            result = F.linear(x, weight)
        result.backward(torch.ones_like(result))
    assert gradient(weight).dtype is WIDE
    assert gradient(weight).item() == 2148.0


def conv_net() -> nn.Module:
    layers = {"conv": nn.Conv2d(3, 4, 3), "norm": nn.BatchNorm2d(4), "head": nn.Linear(4 * 36, 5)}
    return Model(lambda m, x: m.head(m.norm(m.conv(x)).relu().flatten(1)), **layers)


def step(model: nn.Module, scale: float = 1.0, dtype: torch.dtype = FP16) -> list[Tensor]:
    """Gradients of one training step, still scaled."""
    model.zero_grad()
    with torch.autocast("cuda", dtype=dtype):
        loss = model(normal(4, 3, 8, 8)).float().pow(2).mean()
    (loss * scale).backward()
    return [gradient(p) for p in model.parameters()]


@pytest.mark.parametrize(("scale", "finite"), [(1.0, True), (2.0**10, True), (2.0**30, False)])
def test_gradients_overflow_at_a_large_scale(scale: float, finite: bool) -> None:
    with auditor.emulate():
        found = step(seeded(conv_net).train(), scale)
        wide = step(seeded(conv_net).train(), scale, BF16)
    assert all(bool(torch.isfinite(g).all()) for g in found) is finite
    assert all(bool(torch.isfinite(g).all()) for g in wide)  # bf16 reaches as far as FP32


def test_what_the_uses_of_a_weight_add_to_its_gradient_is_summed_in_the_format() -> None:
    # Autocast casts a weight once a region, so its uses meet in fp16: 2048 + 1 = 2048, a hundred times over.
    def total(cache: bool) -> float:
        weight, one = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
        with auditor.emulate():
            with torch.autocast("cuda", dtype=FP16, cache_enabled=cache):
                uses = [F.linear(x, weight).float() for x in [*[one] * 100, 2048 * one]]
            torch.cat(uses).sum().backward()  # from the last use to the first
        return gradient(weight).item()

    assert total(cache=True) == 2048.0
    assert total(cache=False) == 2148.0


def test_a_weight_that_is_written_in_a_region_is_read_as_it_was() -> None:
    # as on CUDA, and in torch's own autocast for the CPU
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    for ours in (True, False):
        with auditor.emulate() if ours else torch.enable_grad():
            with torch.autocast("cpu", dtype=BF16):
                before = F.linear(x, weight)
                with torch.no_grad():
                    weight.add_(1)
                assert torch.equal(F.linear(x, weight), before)
            with torch.autocast("cpu", dtype=BF16):
                assert torch.equal(F.linear(x, weight), before + 1)


def trained(scaler: torch.amp.GradScaler, steps: int) -> tuple[nn.Module, list[float]]:
    model = seeded(conv_net).train()
    optimizer, scales = torch.optim.AdamW(model.parameters(), lr=0.01), []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=FP16):
            loss = model(normal(4, 3, 8, 8)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return model, scales


@pytest.mark.parametrize("make", [torch.amp.GradScaler, torch.cuda.amp.GradScaler])
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_loop_with_a_scaler_as_it_is_written_for_cuda(make: type[torch.amp.GradScaler]) -> None:
    with auditor.emulate():
        model, scales = trained(make(init_scale=2.0**24), 20)
    assert scales[0] == 2.0**23  # the first step overflows, is skipped, and halves the scale
    assert scales[-1] == scales[-2] < 2.0**23  # until steps are taken
    assert all(p.dtype is WIDE for p in model.parameters())
    assert not torch.equal(model.head.weight, seeded(conv_net).head.weight)


# Models whose second answer is another one are told from those that only remember what is true for ever.

X = normal(3, 4)


def grows(m: Any, x: Tensor) -> Tensor:
    m.past = x if m.past is None else torch.cat([m.past, x])
    return m.first(m.past)


def carries(m: Any, x: Tensor) -> Tensor:
    m.past = m.first(x) + (0 if m.past is None else m.past)
    return m.past


def attends(m: Any, x: Tensor) -> Tensor:
    """Over the same keys twice it is what it is over them once."""
    m.past = m.first(x) if m.past is None else torch.cat([m.past, m.first(x)])
    return torch.nn.functional.scaled_dot_product_attention(x, m.past, m.past)


def refuses_a_second_call(m: Any, x: Tensor) -> Tensor:
    if m.past is not None:
        raise ValueError("reset me first")
    m.past = x
    return m.first(x)


def counts(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    return m.first(x) / m.seen


def remembers_a_table(m: Any, x: Tensor) -> Tensor:
    if m.past is None:
        m.past = torch.arange(4.0).cos()
    return m.first(x) * m.past


def only_counts(m: Any, x: Tensor) -> Tensor:
    m.seen.add_(1)
    return m.first(x)


def draws(m: Any, x: Tensor) -> Tensor:
    return m.first(x) + torch.randn(4)


def drifts(m: Any, x: Tensor) -> Tensor:
    """Scales by 1 + d in the third call, which is the one compared."""
    m.seen.add_(1)
    return m.first(x) * (1 + m.drift * (m.seen - 1) / 2)


def warnings_of(function: Any, drift: float = 0.0) -> tuple[str, ...]:
    model = Model(function, first=linear(4, 4), seen=torch.zeros(()), past=None, drift=drift)
    found = replayed(model, X.clone()).warnings
    assert model.past is None and model.seen == 0
    return found


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (grows, "calls: a later call on the same inputs returns other shapes"),
        (carries, "calls: a later call on the same inputs differs by"),
        (counts, "differs by 0.67 (relative L2;"),  # the third call: |a / 3 - a| / |a|
        (attends, "differs by"),
        (refuses_a_second_call, "inputs fails (ValueError: reset me first)"),
    ],
)
def test_what_depends_on_the_calls_before_is_said(function: Any, words: str) -> None:
    (warning,) = warnings_of(function)
    assert words in warning


@pytest.mark.parametrize("function", [remembers_a_table, only_counts, draws, lambda m, x: m.first(x.mul_(2))])
def test_what_answers_the_same_is_not(function: Any) -> None:
    assert warnings_of(function) == ()


@pytest.mark.parametrize(("drift", "said"), [(2 * AGREEMENT, True), (AGREEMENT / 4, False)])
def test_rounding_is_no_history(drift: float, said: bool) -> None:
    assert bool(warnings_of(drifts, drift)) is said
