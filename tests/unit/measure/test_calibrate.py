"""Several batches, one verdict; norms by statistics, and weights that were stored low."""

import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.capture import capture, record_path
from auditor.measure.calibrate import Calibration, calibrate, worse
from auditor.measure.measure import measure
from auditor.measure.noise import FP32Runs, noise_of, without_noise
from auditor.measure.reference import batch_norm
from auditor.measure.rerun import PLAIN
from auditor.records import Contribution, NodeError, Noise, Subject
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.small_models import moody
from tests.support.subjects import FORMATS, effects_of, normal, only, seeded, subject_of


def subject_on(model: nn.Module, *inputs: Tensor) -> Subject:
    """One batch per input."""
    return replace(subject_of(model), batches=tuple(((x,), {}) for x in inputs))


def calibrated(model: nn.Module, *inputs: Tensor) -> tuple[Calibration, str]:
    """The calibration, and the name of the model's one multiplication."""
    subject = subject_on(model, *inputs)
    traced = capture(subject, FORMATS)
    return calibrate(traced, subject, FORMATS, 0), only(traced, "mul").name


SQUARE = Function(lambda x: (x * x).tanh())
SMALL, HUGE = torch.tensor([[0.5]]), torch.tensor([[300.0]])


@pytest.mark.parametrize("inputs", [(SMALL, HUGE), (HUGE, SMALL), (SMALL, HUGE, SMALL)])
def test_an_overflow_in_one_batch_is_an_overflow(inputs: tuple[Tensor, ...]) -> None:
    found, name = calibrated(SQUARE, *inputs)
    error = found.errors[name]["fp16"]
    assert (error.overflow, error.cause, error.originates_here) == (1, "overflow", True)
    assert found.contributions[name]["fp16"].decided_by != "not-run"
    assert found.batches == len(inputs)


def test_ranges_are_joined() -> None:
    found, name = calibrated(SQUARE, SMALL, HUGE)
    span = found.ranges[name]
    assert (span.max_abs, span.min_abs) == (90000.0, 0.25)
    assert span.exponents == {-2: 1, 16: 1}  # 0.25 = 2^-2, 90000 = 1.37 * 2^16


def test_contributions_worst_for_the_verdict_and_mean_square_for_the_sum() -> None:
    model = Function(lambda x: x * 3.0)
    inputs = [torch.tensor([[1 + 2.0**-11]]), torch.tensor([[1.0]]), torch.tensor([[1 + 2.0**-12]])]
    found, name = calibrated(model, *inputs)
    alone = []
    for x in inputs:
        subject = subject_on(model, x)
        alone.append(effects_of(measure(capture(subject, FORMATS), model, subject.batches[0], FORMATS))[name]["fp16"])
    together = found.contributions[name]["fp16"]
    assert together.isolated == max(one.isolated for one in alone)
    for kind in ("own", "cast"):
        squares = [getattr(one, kind) ** 2 for one in alone]
        assert getattr(together, kind) == pytest.approx((sum(squares) / 3) ** 0.5)


# The derivative by running statistics, against autograd through the formula.

EPS = 1e-3
REST = {
    "_native_batch_norm_legit_no_training": (0.1, EPS),
    "_native_batch_norm_legit_functional": (False, 0.1, EPS),
    "batch_norm": (False, 0.1, EPS, False),
    "instance_norm": (False, 0.1, EPS, False),
}
"""{operation: what follows the statistics, where they are the given ones}."""


def formula(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor) -> Tensor:
    shape = (1, -1, *[1] * (x.dim() - 2))
    scaled = (x - mean.view(shape)) / torch.sqrt(variance.view(shape) + EPS)
    scaled = scaled if weight is None else scaled * weight.view(shape)
    return scaled if bias is None else scaled + bias.view(shape)


@pytest.mark.parametrize("shape", [(6, 3), (4, 3, 5), (2, 3, 4, 5)])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("packet", REST)
def test_gradients(shape: tuple[int, ...], affine: bool, packet: str) -> None:
    def leaves() -> list[Tensor | None]:
        tensors = [normal(*shape), normal(3, seed=1), normal(3, seed=2), normal(3, seed=3), normal(3, seed=4).exp()]
        kept = [x if affine or index not in (1, 2) else None for index, x in enumerate(tensors)]
        return [None if x is None else x.double().requires_grad_() for x in kept]

    target = getattr(torch.ops.aten, packet).default
    rest = REST[packet]
    ours, theirs = leaves(), leaves()
    result = batch_norm(target, *ours, *rest)
    result = result[0] if isinstance(result, tuple) else result
    expected = formula(*theirs)
    torch.testing.assert_close(result, expected)
    weights = normal(*shape, seed=5).double()
    result.backward(weights)
    expected.backward(weights)
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            torch.testing.assert_close(mine.grad, other.grad)


@pytest.mark.parametrize("packet", ["_native_batch_norm_legit_functional", "batch_norm"])
def test_a_norm_by_its_batch_leaves_running_statistics_alone(packet: str) -> None:
    x, mean, variance = (tensor.requires_grad_() for tensor in (normal(6, 3) + 5, torch.zeros(3), torch.ones(3)))
    target, rest = getattr(torch.ops.aten, packet).default, REST[packet]
    result = batch_norm(target, x, None, None, mean, variance, True, *rest[1:])
    result = result[0] if isinstance(result, tuple) else result
    assert float(result.detach().mean()) == pytest.approx(0, abs=1e-6)
    result.square().sum().backward()
    assert x.grad is not None
    assert (mean.tolist(), variance.tolist(), mean.grad) == ([0.0] * 3, [1.0] * 3, None)


# What is said of weights that were stored low: every number in it is counted here by another way.

X = torch.ones(2, 8)


def said(model: nn.Module, x: torch.Tensor = X) -> list[str]:
    found = auditor.audit(model, x, formats=("fp16", "bf16"))
    return [words for words in found.warnings if words.startswith("The model stores")]


def linear(*values: float) -> nn.Linear:
    """64 weights and 8 biases, the first weights as given."""
    model = seeded(lambda: nn.Linear(8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.sign() * parameter.abs().clamp(min=0.01))
        model.weight.view(-1)[: len(values)] = torch.tensor(values)
    return model


def test_nothing_is_said_of_a_model_in_fp32() -> None:
    assert said(linear()) == []


def test_bf16_within_the_range_of_fp16() -> None:
    model = linear().bfloat16()
    assert said(model) == [
        "The model stores its weights in BF16, and FP16 represents all of these weights exactly.",
        "The model stores all weights in BF16, so rounding these weights adds no error in BF16.",
    ]
    for parameter in model.parameters():
        assert torch.equal(parameter.half().float(), parameter.float())


def test_bf16_beyond_the_range_of_fp16() -> None:
    model = linear(1e5, -2e5, 1e-6, 1e-9, 0.0, 2.0**-14).bfloat16()
    (first, _) = said(model, X * 1e-6)
    values = torch.cat([p.detach().float().reshape(-1) for p in model.parameters()]).abs()
    large, small = int((values >= 65536).sum()), int(((values < 2.0**-14) & (values > 0)).sum())
    assert (large, small) == (2, 2)
    assert first == (
        "The model stores weights in BF16, which has a wider range than FP16. Of 72 weights, 2 are 65,536 or more and become "
        "infinite in FP16; 2 are below 6.1e-05, where FP16 has fewer bits or only zero."
    )


def margins(model: nn.Module, formats: Any = ("fp16", "bf16")) -> list[str]:
    """What an audit says of activations beside FP16's range."""
    found = auditor.audit(model, torch.ones(2, 8), formats=formats, quick=True)
    return [text for text in found.warnings if text.startswith("The model was stored in")]


class Masked(nn.Sequential):
    """A large number of the code's own, which is no activation."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y.masked_fill(y > 1e30, -1e9).clamp(min=-100.0)


def test_a_model_stored_in_bf16_is_told_its_distance_from_the_end_of_fp16() -> None:
    def scaled(largest: float, kind: type[nn.Sequential] = nn.Sequential) -> nn.Module:
        model = kind(nn.Linear(8, 1, bias=False))
        model[0].weight.data = torch.full((1, 8), largest / 8)
        return model.bfloat16()

    (near,) = margins(scaled(16384.0))
    assert near.startswith(
        "The model was stored in BF16, and FP16 ends at 65,504. The largest activation on these inputs, in 0"
    )
    assert near.endswith("is 1.64e+04, 4 times below that. Larger inputs may exceed FP16, but not BF16.")
    (beyond,) = margins(scaled(131072.0))
    assert beyond.endswith("is 1.31e+05, which overflows in FP16.")
    (masked,) = margins(scaled(64.0, Masked))
    assert "is 64, 1.02e+03 times below that" in masked
    assert margins(scaled(16384.0), "bf16") == []
    assert margins(scaled(16384.0).float()) == []
    assert margins(scaled(16384.0).half()) == []


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_table_stored_in_the_format_adds_no_error_in_it(dtype: torch.dtype, fmt: str) -> None:
    model = seeded(lambda: nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4))).to(dtype)
    found = auditor.audit(model, torch.arange(6)[None], formats=("fp16", "bf16"))
    table = next(node for node in found.nodes if "embedding" in node.node.op)
    other = next(name for name in ("fp16", "bf16") if name != fmt)
    exact = table.contributions[fmt]
    assert (exact.isolated, exact.own, exact.cast) == (0, 0, 0)
    assert (table.contributions[other].isolated > 0) == (other == "bf16")  # whose bits are fewer than FP16's


# FP32 against itself: how far outputs and operations are apart, and which operations are not deterministic.


INPUT = torch.linspace(-1, 1, 16 * 32).reshape(16, 32)
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


def noisy(m: Any, x: Tensor) -> dict[str, Tensor]:
    h = m.a(x).relu()
    return {"loud": m.b(torch.ops.loud.pool(h)), "quiet": h.mean(-1)}


def draws() -> nn.Module:
    """Random numbers are those of the seed in every run: they make no noise."""
    return Model(lambda m, x: nn.functional.dropout(m.a(x), 0.5, training=True) + torch.rand(8), a=nn.Linear(32, 8))


def all_heard(model: nn.Module, **how: Any) -> FP32Runs:
    subject = subject_of(model.eval(), INPUT)
    found = noise_of(record_path(subject, ("fp16",)), subject, PLAIN, 0, **how)
    assert list(found.outputs) == [id(subject.batches[0])]
    return found


def heard(model: nn.Module, **how: Any) -> Noise:
    return all_heard(model, **how).measured


@pytest.mark.parametrize("model", [draws, lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4))])
def test_what_computes_the_same_makes_no_noise(model: Any) -> None:
    assert heard(seeded(model), native=True) == Noise(runs=3)


def test_plans_are_run_with_gradients_where_that_is_another_model() -> None:
    found = all_heard(moody(nn.Linear(32, 8), False))
    (first,) = found.outputs.values()
    assert isinstance(found.graded, list) and torch.allclose(found.graded[0], 3 * first[0])
    assert found.measured == Noise(runs=3)  # another mode is no noise
    assert all_heard(moody(nn.Linear(32, 8), True)).graded == "KeyError: 'gradients'"
    alike = all_heard(seeded(draws))
    assert (alike.graded, alike.measured) == (None, Noise(runs=2))
    assert isinstance(all_heard(seeded(draws), native=True).graded, list)


def test_a_recording_that_gradients_and_an_earlier_call_leave_equal_is_not_run_again() -> None:
    model, subject = (made := seeded(draws)).eval(), subject_of(made, INPUT)
    path = record_path(subject, ("fp16",))
    model.forward = None  # any further run would raise
    found = noise_of(path, subject, PLAIN, 0)
    assert found.measured == Noise(runs=2) and found.outputs[id(subject.batches[0])] is path.repeated is not None
    assert record_path(subject_of(moody(nn.Linear(32, 8), False).eval(), INPUT)).repeated is None


def test_noise_is_found_where_it_begins_and_where_it_goes() -> None:
    found = heard(seeded(lambda: Model(noisy, a=nn.Linear(32, 64), b=nn.Linear(64, 8))))
    assert found.runs == 3
    assert 0.2 * LOUD < found.error < 5 * LOUD
    assert found.floor == 3 * found.error and found.joint == found.error
    assert set(found.outputs) == {"loud"} and 0.2 * LOUD < found.outputs["loud"] < 5 * LOUD
    assert found.operations == ("pool",)
    assert set(found.nodes) == {"pool", "linear_1"}
    assert found.nodes["pool"] == pytest.approx(LOUD * 2**0.5, rel=0.15)  # of two runs, each off by LOUD


def test_state_that_drifts_is_no_noise_that_errors_may_hide_in() -> None:
    """It counts where nobody puts anything back."""
    found = heard(seeded(lambda: Model(lambda m, x: m.a(x) * (1 + torch.dice.random()), a=nn.Linear(32, 8))))
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
    audit = auditor.audit(seeded(lambda: quietly()).eval(), (INPUT,), max_error=1e-3, device="cpu", formats=("fp16",))
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
    parts = {"a": nn.Linear(32, 64), "mix": Function(lambda x: torch.ops.loud.pool(x)), "b": nn.Linear(64, 8)}
    return Model(lambda m, x: m.b(m.mix(m.a(x).relu())), **parts)


def test_of_two_batches_the_larger_share_of_changed_results_counts() -> None:
    broken = NodeError(overflow=1, disagreement=0.1)
    assert worse(broken, NodeError(disagreement=0.5)) == replace(broken, disagreement=0.5)
