"""FP32 against itself: how far outputs and operations are apart, and which operations are not deterministic."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.isolation.answer import answer
from auditor.loading import from_object
from auditor.measure.noise import noise_of, without_noise
from auditor.measure.rerun import PLAIN
from auditor.records import Answer, Contribution, Noise
from auditor.tape import capture
from auditor.tape import recorded as capture_recorded
from tests.subjects import seeded, subject_of

X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
LOUD = 0.01


@pytest.fixture(scope="module", autouse=True)
def _loud() -> Iterator[None]:
    """An operation that is off by a hundredth, another way every time, and that no seed and no state tells how."""
    library = torch.library.Library("loud", "DEF")
    library.define("pool(Tensor x) -> Tensor")
    torch.dice = random.Random(5)  # type: ignore[attr-defined]  # what lies on torch is not put back

    def pool(x: Tensor) -> Tensor:
        drawn = torch.Generator().manual_seed(torch.dice.randrange(1 << 30))  # type: ignore[attr-defined]
        return x * (1 + LOUD * torch.randn(x.shape, generator=drawn).to(x.dtype))

    library.impl("pool", pool, "CPU")
    library.impl("pool", torch.library.fallthrough_kernel, "Autograd")
    yield
    del torch.dice  # type: ignore[attr-defined]


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).relu()
        return {"loud": self.b(torch.ops.loud.pool(h)), "quiet": h.mean(-1)}


class Draws(nn.Module):
    """Random numbers are those of the seed in every run: they make no noise."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.a(x), 0.5, training=True) + torch.rand(8)


def heard(model: nn.Module, **how: Any) -> Noise:
    subject = subject_of(model.eval(), X)
    captured = capture(subject, ("fp16",))
    found = noise_of(captured, subject, PLAIN, 0, **how)
    assert list(found.known) == [id(subject.batches[0])]
    return found.found


@pytest.mark.parametrize("model", [Draws, lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))])
def test_what_computes_the_same_makes_no_noise(model: Any) -> None:
    assert heard(seeded(model), native=True) == Noise(runs=4)


def test_noise_is_found_where_it_begins_and_where_it_goes() -> None:
    found = heard(seeded(Noisy))
    assert found.runs == 4
    assert 0.2 * LOUD < found.error < 5 * LOUD
    assert found.floor == 3 * found.error and found.joint == found.error
    assert set(found.outputs) == {"loud"} and 0.2 * LOUD < found.outputs["loud"] < 5 * LOUD
    assert found.operations == ("pool",)
    assert set(found.nodes) == {"pool", "linear_1"}
    assert found.nodes["pool"] == pytest.approx(LOUD * 2**0.5, rel=0.15)  # of two runs, each off by LOUD


class Drifts(nn.Module):
    """It counts where nobody puts anything back."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) * (1 + torch.dice.random())  # type: ignore[attr-defined]


def test_state_that_drifts_is_no_noise_that_errors_may_hide_in() -> None:
    found = heard(seeded(Drifts))
    assert found.error > 0.01 and not found.operations and found.floor == 0


def test_a_model_that_costs_much_is_run_once_more_alone() -> None:
    assert heard(seeded(Noisy), dear=True).runs == 2


class Counted(nn.Module):
    """Calls are counted where nobody puts the count back. apart: how far off it is with gradients enabled."""

    def __init__(self, apart: float = 0.0) -> None:
        super().__init__()
        self.a, self.apart = nn.Linear(32, 8), apart

    def forward(self, x: Tensor) -> Tensor:
        torch.calls += 1  # type: ignore[attr-defined]
        return self.a(x) + (self.apart if torch.is_grad_enabled() else 0.0)


@pytest.mark.parametrize(
    ("apart", "known", "gradients", "recorded", "calls"),
    [
        (0.0, True, True, True, 0),
        (0.0, True, False, True, 1),
        (0.0, True, False, False, 1),
        (0.0, False, False, True, 1),
        (0.0, False, False, False, 2),
        (0.5, True, True, True, 2),
        (0.5, True, False, True, 1),
        (0.5, True, False, False, 2),
        (0.5, False, False, True, 2),
        (0.5, False, False, False, 3),
    ],
)
def test_runs_made_for_another_reason_serve_where_they_answer_the_same(
    apart: float, known: bool, gradients: bool, recorded: bool, calls: int
) -> None:
    torch.calls = 0  # type: ignore[attr-defined]
    subject = subject_of(seeded(lambda: Counted(apart)), X)
    recording, (batch,) = capture_recorded(subject, ("fp16",)), subject.batches
    plain = answer(subject.model, batch)
    subject.answers.clear()
    if known:
        subject.answers[id(batch)] = Answer(answer(subject.model, batch, gradients=gradients), gradients)
    torch.calls = 0  # type: ignore[attr-defined]
    ran = recording.answer if recorded else None
    found = noise_of(recording.capture, subject, PLAIN, 0, dear=True, recorded=ran)
    assert torch.calls == calls  # type: ignore[attr-defined]
    assert found.found == Noise(runs=2) and not subject.answers
    assert torch.equal(found.known[id(batch)][0], plain[0])
    assert found.graded is not None and not isinstance(found.graded, str)
    assert float((found.graded[0] - plain[0]).mean()) == pytest.approx(apart)
    del torch.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("gradients", [False, True])
def test_an_earlier_answer_that_is_another_does_not_serve(gradients: bool) -> None:
    subject = subject_of(seeded(lambda: nn.Linear(32, 8)), X)
    captured, (batch,) = capture(subject, ("fp16",)), subject.batches
    other = answer(subject.model, batch).each(lambda x: x + 1e-6)
    subject.answers[id(batch)] = subject.answers[0] = Answer(other, gradients)
    found = noise_of(captured, subject, PLAIN, 0, dear=True, recorded=answer(subject.model, batch))
    assert not subject.answers and found.found == Noise(runs=2)
    assert torch.equal(found.known[id(batch)][0], answer(subject.model, batch)[0])


def test_what_a_run_does_not_tell_from_noise_is_not_counted_once_an_operation() -> None:
    given = {
        "a": {"fp16": Contribution(0.02, 0.01, 0.01, "re-run")},
        "b": {"fp16": Contribution(0.04, 0.01, 0.01, "group")},
        "c": {"fp16": Contribution(0.02, 0.01, 0.01, "first-order")},
    }
    found = without_noise(given, Noise(error=0.01, floor=0.03))
    assert found["a"]["fp16"].isolated == found["a"]["fp16"].own == found["a"]["fp16"].cast == 0
    assert found["b"] == given["b"] and found["c"] == given["c"]
    assert without_noise(given, Noise()) == given


def test_what_is_within_the_noise_is_no_error_and_said_to_be() -> None:
    audit = auditor.audit(seeded(lambda: Quietly()).eval(), (X,), max_error=1e-3, device="cpu", formats=("fp16",))
    noise = audit.noise
    assert noise is not None and noise.operations == ("pool",)
    over = [r for r in audit.nodes if r.contributions["fp16"].isolated > audit.max_error]
    assert over and audit.max_error == 1e-3
    for report in over:  # without the noise each of these would break the budget
        verdict = report.verdicts["fp16"]
        assert verdict.verdict == "safe"
        assert f"no more than 3 times what runs in FP32 differ by ({noise.error:.2g})" in verdict.reason
    assert not [finding for finding in audit.findings if finding.severity != "info"]
    for plan in audit.plans.values():
        ran = plan.verification
        assert ran is not None and plan.measured_error is not None
        assert plan.verified == (plan.measured_error <= 3 * noise.error)
        assert (ran.noise, ran.floor) == (noise.error, noise.floor)
    assert audit.recommended is not None
    assert f"no more than 3 times what runs in FP32 differ by ({noise.error:.2g})" in audit.recommendation
    (said,) = (warning for warning in audit.warnings if "differs from itself" in warning)
    assert f"off by {noise.error:.2g}" in said and "loud.pool in mix" in said and f"({noise.floor:.2g})" in said


class Mix(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.loud.pool(x)


class Quietly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.mix, self.b = nn.Linear(32, 64), Mix(), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.mix(self.a(x).relu()))


@pytest.mark.parametrize(("apart", "calls"), [(0.0, 2), (0.5, 4)])
def test_two_of_four_runs_may_have_been_made_for_another_reason(apart: float, calls: int) -> None:
    torch.calls = 0  # type: ignore[attr-defined]
    subject = from_object(seeded(lambda: Counted(apart)).eval(), X)
    recording, (batch,) = capture_recorded(subject, ("fp16",)), subject.batches
    torch.calls = 0  # type: ignore[attr-defined]
    found = noise_of(recording.capture, subject, PLAIN, 0, recorded=recording.answer)
    assert torch.calls == calls  # type: ignore[attr-defined]
    assert found.found == Noise(runs=4)
    assert (found.graded is found.known[id(batch)]) is (apart == 0)
    del torch.calls  # type: ignore[attr-defined]
