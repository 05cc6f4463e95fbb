"""Several batches, one verdict; norms by statistics, and weights that were stored low."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.capture import capture
from auditor.measure.calibrate import Calibration, calibrate
from auditor.measure.measure import measure
from auditor.measure.reference import batch_norm
from auditor.records import Subject
from tests.support.capturing import Function
from tests.support.subjects import FORMATS, effects_of, normal, only, subject_of


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
    assert (error.overflow, error.cause, error.born) == (1, "overflow", True)
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


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_each_gradient_alone(wanted: int) -> None:
    given = [normal(2, 3, 4, 5), normal(3, seed=1), normal(3, seed=2), normal(3, seed=3), normal(3, seed=4).exp()]
    found = []
    for how in (lambda *read: batch_norm(torch.ops.aten.batch_norm.default, *read, *REST["batch_norm"]), formula):
        read = [x.double().requires_grad_(index == wanted) for index, x in enumerate(given)]
        (how(*read) * normal(2, 3, 4, 5, seed=6)).sum().backward()
        assert [x.grad is not None for x in read] == [index == wanted for index in range(5)]
        found.append(read[wanted].grad)
    torch.testing.assert_close(*found)


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
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
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


@pytest.mark.parametrize(("dtype", "fmt"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_table_stored_in_the_format_adds_no_error_in_it(dtype: torch.dtype, fmt: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 4)).to(dtype)
    found = auditor.audit(model, torch.arange(6)[None], formats=("fp16", "bf16"))
    table = next(node for node in found.nodes if "embedding" in node.node.op)
    other = next(name for name in ("fp16", "bf16") if name != fmt)
    exact = table.contributions[fmt]
    assert (exact.isolated, exact.own, exact.cast) == (0, 0, 0)
    assert (table.contributions[other].isolated > 0) == (other == "bf16")  # whose bits are fewer than FP16's
