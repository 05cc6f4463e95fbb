"""Losses that equal FP32's at the same weights, by chance or by construction, although gradients are wrong."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.features.rehearsal.page import render
from auditor.features.rehearsal.rehearse import problems_of, rehearse_as_written
from auditor.features.rehearsal.result import RecipeRun
from tests.features.rehearsal.cases import classes, mlp

Loss = Callable[[Any, torch.Tensor, torch.Tensor], Any]
WRONG: list[Loss] = []
RIGHT: list[Loss] = []


def region() -> torch.autocast:
    return torch.autocast("cuda", dtype=torch.bfloat16)


def near_one(z: torch.Tensor) -> torch.Tensor:
    """0.02 times the mean square of z [n, k]; in BF16 it is 0, as is its gradient: 1 + 0.001 z rounds to 1."""
    rest = (1 + 1e-3 * z) - 1
    return 2e4 * rest.float().square().mean()


def wrong(loss: Loss) -> Loss:
    WRONG.append(loss)
    return loss


def right(loss: Loss) -> Loss:
    RIGHT.append(loss)
    return loss


@wrong
def a_value_put_in_place_of_another(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The gradient is that of the BF16 loss, the value that of FP32."""
    with region():
        low = near_one(m.body(x))
    exact = near_one(m.body(x))
    return low + (exact - low).detach()


@wrong
def a_limit_that_rounding_reaches(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """In FP32 half of the entries are above the limit, and get no gradient; in BF16 all are at the limit."""
    with region():
        z = 1 + 1e-3 * m.body(x)
        return z.clamp(max=1.0).float().mean()


@wrong
def a_constant_that_hides_the_rest(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with region():
        return 50 + near_one(m.body(x))


@wrong
def a_running_mean_is_returned(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with region():
        loss = near_one(m.body(x))
    return loss, 0.999 * 5.0 + 0.001 * loss.detach()


@wrong
def a_small_layer_beside_a_large_one(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """The gradients of the large layer are right, and so is their sum with the small ones."""
    with region():
        return F.cross_entropy(m.body(x), y) + 0.3 * near_one(m.side(x))


@right
def a_small_layer_in_fp32(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with region():
        loss = F.cross_entropy(m.body(x), y)
    return loss + 0.3 * near_one(m.side(x))


@right
def a_bias_whose_gradient_is_zero(m: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    """A normalization takes the bias away, so that its gradient is nothing but rounding."""
    with region():
        z = m.side(x) + m.body(x)
        centred = z - z.mean(0)
        return F.cross_entropy(centred.float() * 3, y)


def problems(loss_fn: Loss) -> list[tuple[str, str | None]]:
    """(kind, module) of the problems of three steps as written."""
    return [(problem.kind, problem.module) for problem in problems_of("as_written", rehearsed(loss_fn))]


def rehearsed(loss_fn: Loss) -> dict[str, RecipeRun]:
    """Three steps as written, and in FP32."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"body": mlp(16, 4), "side": nn.Linear(16, 4)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        made = loss_fn(model, x, y)
        loss, returned = made if isinstance(made, tuple) else (made, made)
        loss.backward()
        optimizer.step()
        return returned.detach()

    return rehearse_as_written(step, classes(3), 3, 0, "step")


@pytest.mark.parametrize("loss_fn", WRONG)
def test_a_wrong_gradient_under_an_equal_loss_is_a_problem(loss_fn: Loss) -> None:
    kinds = [kind for kind, _ in problems(loss_fn)]
    assert "gradients-off" in kinds
    assert "loss-off" not in kinds


def test_the_module_of_a_wrong_gradient_among_right_ones_is_named() -> None:
    runs = rehearsed(a_small_layer_beside_a_large_one)
    (found,) = problems_of("as_written", runs)
    assert (found.kind, found.module) == ("gradients-off", "side")
    assert found.text.endswith(": keep its module in FP32")
    recipe = replace(runs["as_written"].recipe, scopes={"side": {"precision": "fp32"}})
    (again,) = problems_of("as_written", {**runs, "as_written": replace(runs["as_written"], recipe=recipe)})
    assert "keep" not in again.text  # it was kept


def test_a_wrong_gradient_of_a_tensor_in_no_module_is_told_by_its_name_without_advice_about_a_module() -> None:
    torch.manual_seed(0)
    body = mlp(16, 4)
    factors = [torch.full((4,), 0.3, requires_grad=True)]
    optimizer = torch.optim.SGD([*body.parameters(), *factors], lr=1e-3)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with region():
            loss = F.cross_entropy(body(x), y) + near_one((factors[0] * y[:, None]).bfloat16())
        loss.backward()
        optimizer.step()
        return loss.detach()

    runs = rehearse_as_written(step, classes(3), 3, 0, "step")
    (found,) = problems_of("as_written", runs)
    assert (found.kind, found.module) == ("gradients-off", None)
    assert found.text.startswith("gradients of factors[0] differ from FP32's by 100%")
    assert "keep" not in found.text
    assert {series.module for series in runs["fp32"].parameters.values()} == {"0", ""}


class BiasesBeforeNorms(nn.Module):
    """Convolutions whose biases the batch norms take away, on images so large that the sums of rounding errors are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.last_norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.first(x)).relu()
        x = self.last_norm(self.second(x)).relu()
        return self.head(x.mean((-2, -1)))


def test_a_gradient_that_is_zero_but_for_rounding_is_not_judged() -> None:
    torch.manual_seed(0)
    model = BiasesBeforeNorms()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batches = [(torch.randn(16, 1, 24, 24), torch.randint(0, 4, (16,))) for _ in range(3)]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    result = auditor.rehearse(step, batches, 6)
    biases = {"first.bias", "second.bias"}
    fp32, bf16 = result.runs["fp32"], result.runs["bf16_autocast"]
    shares = {name: fp32.share("rounding", name) or 0.0 for name in fp32.parameters}
    assert {name for name, share in shares.items() if share > 0.1} == biases
    assert max(share for name, share in shares.items() if name not in biases) < 1e-4
    assert all((bf16.share("error", name) or 0.0) > 10 for name in biases)
    assert not [problem for problem in result.problems if problem.kind == "gradients-off"]
    page = render(result)
    assert "second.weight" in page and "second.bias" not in page


@pytest.mark.parametrize("loss_fn", RIGHT)
def test_an_equal_loss_with_right_gradients_is_no_problem(loss_fn: Loss) -> None:
    assert problems(loss_fn) == []
