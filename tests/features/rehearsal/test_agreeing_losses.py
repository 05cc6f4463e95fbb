"""Losses that equal FP32's at the same weights, by chance or by construction, although gradients are wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from auditor.features.rehearsal.rehearse import problems_of, rehearse_as_written
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

    runs = rehearse_as_written(step, classes(3), 3, 0, "step")
    return [(problem.kind, problem.module) for problem in problems_of("as_written", runs)]


@pytest.mark.parametrize("loss_fn", WRONG)
def test_a_wrong_gradient_under_an_equal_loss_is_a_problem(loss_fn: Loss) -> None:
    kinds = [kind for kind, _ in problems(loss_fn)]
    assert "gradients-off" in kinds
    assert "loss-off" not in kinds


def test_the_module_of_a_wrong_gradient_among_right_ones_is_named() -> None:
    assert problems(a_small_layer_beside_a_large_one) == [("gradients-off", "side")]


@pytest.mark.parametrize("loss_fn", RIGHT)
def test_an_equal_loss_with_right_gradients_is_no_problem(loss_fn: Loss) -> None:
    assert problems(loss_fn) == []
