"""FP32 against itself: how far outputs and operations are apart, and which operations are not deterministic."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.capture import capture
from auditor.measure.noise import FP32Runs, noise_of, without_noise
from auditor.measure.rerun import PLAIN
from auditor.records import Contribution, Noise
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.subjects import seeded, subject_of

X = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
LOUD = 0.01


@pytest.fixture(scope="module", autouse=True)
def _loud() -> Iterator[None]:
    """An operation that is off by a hundredth, another way every time, and that no seed and no state tells how."""
    library = torch.library.Library("loud", "DEF")
    library.define("pool(Tensor x) -> Tensor")
    torch.dice = random.Random(5)  # what lies on torch is not put back

    def pool(x: Tensor) -> Tensor:
        drawn = torch.Generator().manual_seed(torch.dice.randrange(1 << 30))
        return x * (1 + LOUD * torch.randn(x.shape, generator=drawn).to(x.dtype))

    library.impl("pool", pool, "CPU")
    library.impl("pool", torch.library.fallthrough_kernel, "Autograd")
    yield
    del torch.dice


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(32, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = self.a(x).relu()
        return {"loud": self.b(torch.ops.loud.pool(h)), "quiet": h.mean(-1)}


def draws() -> nn.Module:
    """Random numbers are those of the seed in every run: they make no noise."""
    return Model(lambda m, x: nn.functional.dropout(m.a(x), 0.5, training=True) + torch.rand(8), a=nn.Linear(32, 8))


def all_heard(model: nn.Module, **how: Any) -> FP32Runs:
    subject = subject_of(model.eval(), X)
    captured = capture(subject, ("fp16",))
    found = noise_of(captured, subject, PLAIN, 0, **how)
    assert list(found.known) == [id(subject.batches[0])]
    return found


def heard(model: nn.Module, **how: Any) -> Noise:
    return all_heard(model, **how).found


@pytest.mark.parametrize("model", [draws, lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))])
def test_what_computes_the_same_makes_no_noise(model: Any) -> None:
    assert heard(seeded(model), native=True) == Noise(runs=3)


class Moody(nn.Module):
    """Another model, or none, with gradients enabled."""

    def __init__(self, refuses: bool) -> None:
        super().__init__()
        self.a, self.refuses = nn.Linear(32, 8), refuses

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.refuses:
            raise KeyError("gradients")
        return self.a(x) * (3.0 if torch.is_grad_enabled() else 1.0)


def test_plans_are_run_with_gradients_where_that_is_another_model() -> None:
    found = all_heard(seeded(lambda: Moody(False)))
    (first,) = found.known.values()
    assert isinstance(found.graded, list) and torch.allclose(found.graded[0], 3 * first[0])
    assert found.found == Noise(runs=3)  # another mode is no noise
    assert all_heard(seeded(lambda: Moody(True))).graded == "KeyError: 'gradients'"
    alike = all_heard(seeded(draws))
    assert (alike.graded, alike.found) == (None, Noise(runs=2))
    assert isinstance(all_heard(seeded(draws), native=True).graded, list)


def test_noise_is_found_where_it_begins_and_where_it_goes() -> None:
    found = heard(seeded(Noisy))
    assert found.runs == 3
    assert 0.2 * LOUD < found.error < 5 * LOUD
    assert found.floor == 3 * found.error and found.joint == found.error
    assert set(found.outputs) == {"loud"} and 0.2 * LOUD < found.outputs["loud"] < 5 * LOUD
    assert found.operations == ("pool",)
    assert set(found.nodes) == {"pool", "linear_1"}
    assert found.nodes["pool"] == pytest.approx(LOUD * 2**0.5, rel=0.15)  # of two runs, each off by LOUD


def drifts() -> nn.Module:
    """It counts where nobody puts anything back."""
    return Model(lambda m, x: m.a(x) * (1 + torch.dice.random()), a=nn.Linear(32, 8))


def test_state_that_drifts_is_no_noise_that_errors_may_hide_in() -> None:
    found = heard(seeded(drifts))
    assert found.error > 0.01 and not found.operations and found.floor == 0


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
    audit = auditor.audit(seeded(lambda: quietly()).eval(), (X,), max_error=1e-3, device="cpu", formats=("fp16",))
    noise = audit.noise
    assert noise is not None and noise.operations == ("pool",)
    over = [r for r in audit.nodes if r.contributions["fp16"].isolated > audit.max_error]
    assert over and audit.max_error == 1e-3
    for report in over:  # without the noise each of these would break the budget
        verdict = report.verdicts["fp16"]
        assert verdict.verdict == "safe"
        assert f"at most 3 times the difference between FP32 runs ({noise.error:.2g})" in verdict.reason
    assert not [finding for finding in audit.findings if finding.severity != "info"]
    for plan in audit.plans.values():
        ran = plan.verification
        assert plan.is_verified == (plan.measured_error <= 3 * noise.error)
        assert (ran.noise, ran.floor) == (noise.error, noise.floor)
    assert audit.recommended is not None
    assert f"within the {noise.floor:.2g} by which FP32 runs differ" in audit.recommendation
    (said,) = (warning for warning in audit.warnings if "is not reproducible" in warning)
    assert f"differ by {noise.error:.2g}" in said and "loud.pool in mix" in said and f"({noise.floor:.2g})" in said


def quietly() -> nn.Module:
    return Model(
        lambda m, x: m.b(m.mix(m.a(x).relu())),
        a=nn.Linear(32, 64),
        mix=Function(lambda x: torch.ops.loud.pool(x)),
        b=nn.Linear(64, 8),
    )
