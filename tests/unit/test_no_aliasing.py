"""Nothing the auditor computes writes into what it was given: all that calls operations in place is run on every dtype.

A tensor's `.to(dtype)`, `.float()`, `.contiguous()`, `.detach()` and `.reshape()` may all hand back the caller's memory;
an in-place call behind one of them overwrites it where it has that dtype or layout already.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.loading import placement
from auditor.measure.attribute import estimate
from auditor.measure.measure import measure
from auditor.measure.probes import inner_products
from auditor.measure.probes import signs as drawn_signs
from auditor.numerics.formats import FORMATS
from auditor.offload.files import OffloadMode, is_offloaded
from auditor.training.backward import backward_errors
from auditor.training.objective import in_training, training_subject
from auditor.training.replay import bind_step, run_step
from auditor.training.step import capture_step, step_batches
from tests.support.subjects import capture_of, normal, seeded, subject_of

PACKAGE = Path(auditor.__file__).parent
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LOW = ("fp16", "bf16")


@contextmanager
def unchanged(*tensors: Tensor) -> Iterator[None]:
    """The tensors' values, and whether they want a gradient, are after the body what they were before it."""
    before = [(x.detach().clone(), x.requires_grad) for x in tensors]
    yield
    for x, (value, wanted) in zip(tensors, before, strict=True):
        torch.testing.assert_close(x.detach(), value, rtol=0, atol=0, equal_nan=True)
        assert x.requires_grad is wanted
        assert x.grad is None


class Net(nn.Module):
    """Reads its input, a weight and a buffer, and adds positions, which depend on no floating-point input."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("table", normal(4, seed=2).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.linear(x.float()) * self.table
        return torch.softmax(scaled + torch.arange(4).to(x.dtype), -1) * scaled


def net(dtype: torch.dtype) -> tuple[Net, Tensor, list[Tensor]]:
    """A model, its input, and every tensor that its owner holds."""
    model, x = seeded(lambda: Net(dtype)), normal(3, 6).to(dtype)
    return model, x, [x, *model.parameters(), *model.buffers()]


def awkward(numbers: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Normal deviates with a zero, a subnormal number, and others that are not finite."""
    x = normal(numbers, seed=seed)
    x[:5] = torch.tensor([0.0, 1e-40, torch.inf, torch.nan, -torch.inf])
    return x.to(dtype)


def inner(dtype: torch.dtype) -> None:
    for other in (torch.float32, dtype):
        for error_of in (None, *(FORMATS[name] for name in LOW), FORMATS["fp32"]):
            for gradient, value in (
                (normal(2, 30).to(other), normal(2, 30).to(dtype)),
                (normal(1, 20_000).to(other), normal(1, 20_000).to(dtype)),
                (awkward(60, other), awkward(60, dtype)),
            ):
                with unchanged(gradient, value):
                    inner_products(gradient, value, 1, [error_of])


def signs(dtype: torch.dtype) -> None:
    x = awkward(40, dtype)
    with unchanged(x):
        drawn_signs(x, torch.Generator().manual_seed(0))


def measured(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    with unchanged(*held):
        captured = capture_of(model, x)
        found = measure(captured, model, ((x,), {}), LOW)
        kept = [value for value in found.values.values() if isinstance(value, Tensor)]
        with unchanged(*kept):
            estimate(found, 0)


def trained(dtype: torch.dtype) -> None:
    model, x, held = net(dtype)
    target = normal(3, 4, seed=5).to(dtype)
    subject = training_subject(model, [(x, target)], {}, lambda output, target: (output - target).square().mean())
    with unchanged(target, *held), in_training(model):
        step = run_step(bind_step(capture_step(subject, LOW), subject, step_batches(subject)[0], 0))
        backward_errors(step, LOW)


def moved(dtype: torch.dtype) -> None:
    model, x, tensors = net(dtype)
    model.shift = normal(4).to(dtype)
    with unchanged(*tensors, model.shift):
        placement.move_subject(subject_of(model, x), "meta")
        placement.move_subject(subject_of(model, x.clone().requires_grad_()), "meta")


def spilt(dtype: torch.dtype) -> None:
    for x in (normal(600, 4000).to(dtype), normal(4000, 600).to(dtype).t()):
        with unchanged(x), OffloadMode():
            made = [x * 2, x.t().contiguous(), x.float(), x.contiguous(), x[1:, ::2] + 1]
        assert is_offloaded(made[0]) and is_offloaded(made[-1])


Case = Callable[[torch.dtype], None]

CASES: tuple[Case, ...] = (signs, measured, inner, moved, trained, spilt)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_what_was_given_is_as_it_was(case: Case, dtype: torch.dtype) -> None:
    case(dtype)
