"""A patched model emulated on the CPU: CUDA's autocast lists, each operation in the dtype of its region."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from auditor.verify import Answers, Runs, run_patched
from tests.support.subjects import normal, seeded


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).softmax(-1))


def plan(precision: str, **others: str) -> dict[str, Any]:
    scopes = {"": {"precision": precision}, **{path: {"precision": kept} for path, kept in others.items()}}
    return {"strategy": "autocast", "format": precision, "scopes": scopes}


def linear(x: Tensor, layer: nn.Linear, dtype: torch.dtype) -> Tensor:
    """As a tensor core does it: rounded operands, FP32 sums, one rounding."""
    return (x.to(dtype).float() @ layer.weight.to(dtype).float().t() + layer.bias.to(dtype).float()).to(dtype)


class Shown(Net):
    """It gives what lies between its layers too."""

    def forward(self, x: Tensor) -> Any:
        between = self.first(x).softmax(-1)
        return between, self.second(between)


def test_cudas_lists_and_not_the_cpus() -> None:
    # Inputs and weights of few bits: FP32 holds every sum of the products exactly, whichever kernel adds first.
    model, x = seeded(Shown), (normal(3, 4) * 4).round() / 4
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_((weight * 16).round() / 16)
        expected = linear(x, model.first, torch.float16).float().softmax(-1)
        ((between, actual),) = run_patched(apply_plan(model, plan("fp16")), [((x,), {})], "cpu")
        assert torch.equal(actual, linear(expected, model.second, torch.float16))
    assert (between.dtype, actual.dtype) == (torch.float32, torch.float16)  # CUDA raises softmax, the CPU does not
    assert torch.equal(between, expected)


class Branching(nn.Module):
    """The sign of a value decides which layer runs."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if float(x.sum()) > 0 else self.down(x)


def test_every_batch_takes_its_own_path() -> None:
    model, x = seeded(Branching), normal(3, 4).abs()
    patched = apply_plan(model, plan("bf16"))
    (up,), (down,) = run_patched(patched, [((x,), {}), ((-x[:2],), {})], "cpu")
    with torch.no_grad():
        assert torch.equal(up, linear(x, model.up, torch.bfloat16))
        assert torch.equal(down, linear(-x[:2], model.down, torch.bfloat16))


class Moody(nn.Module):
    """Another model, or none, with gradients enabled."""

    def __init__(self, raises: bool) -> None:
        super().__init__()
        self.lin, self.raises = nn.Linear(4, 4), raises

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and self.raises:
            raise KeyError("gradients")
        return self.lin(x) * (3.0 if torch.is_grad_enabled() else 1.0)


def answers_of(model: nn.Module, batches: Any, gradients: bool = True) -> Answers | str:
    return Runs(lambda plan: nullcontext(model), batches, gradients=gradients).answers("plan")


def test_the_first_batch_is_run_with_gradients_too() -> None:
    model = seeded(lambda: Moody(raises=False))
    found = answers_of(model, [((normal(3, 4),), {}), ((normal(2, 4),), {})])
    assert isinstance(found, Answers)
    assert torch.allclose(found.graded[0], 3 * found.outputs[0][0])
    assert not found.graded[0].requires_grad


def test_what_raises_with_gradients_alone_is_a_failure_that_says_so() -> None:
    model = seeded(lambda: Moody(raises=True))
    batches: Any = [((normal(3, 4),), {})]
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    place = next(number for number, line in enumerate(lines, 1) if "raise KeyError(" in line)
    said = f"with gradients enabled, KeyError: 'gradients' (test_running.py:{place})"
    assert answers_of(model, batches) == said
    assert isinstance(answers_of(model, batches, gradients=False), Answers)
