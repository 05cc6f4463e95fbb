"""The backward pass of one operation alone in a format, on steps small enough for every number to be worked out."""

import pytest
import torch
from torch import Tensor, nn

from auditor.features.training import backward
from auditor.features.training.backward import BackwardTest, backward_errors, backward_nodes
from auditor.records import NodeError
from tests.support.stepping import Scaled, stepped

U = 2.0**-7
"""Spacing of BF16 above 1."""


def backwards(model: Scaled, x: list[float], targets: list[float], packet: str, fmt: str) -> BackwardTest:
    step = stepped(model, torch.tensor(x), torch.tensor(targets), (fmt,))
    return backward_errors(step, (fmt,))[packet][fmt]


@pytest.mark.parametrize("size", [1.0, 2.0**-100, 2.0**60])
def test_a_product_hands_back_one_rounding_at_whatever_size(size: float) -> None:
    # w gets 1.5 (1 + U) = 1.5 + 1.5 U, a tie, which BF16 takes to 1.5 + 2 U
    found = backwards(Scaled(), [1 + U], [1.5 * size], "mul", "bf16")
    assert found.error.local_error == pytest.approx(0.5 * U / (1.5 + 1.5 * U), rel=1e-6)
    assert (found.error.overflow, found.error.nan, found.error.unsupported) == (0, 0, None)
    assert {key: float(gap) for key, gap in found.gaps.items()} == {("p_model_w", 0): 0.5 * U * size}  # x wants none
    assert found.weight == 0.0  # forwards, 1 + U is a value of BF16


def test_an_exact_way_back() -> None:
    assert backwards(Scaled(), [2.0], [0.5], "mul", "bf16").error == NodeError(local_error=0.0)


@pytest.mark.parametrize(("fmt", "overflow", "reaches"), [("fp16", 1, {"fp16": "w"}), ("bf16", 0, {})])
def test_a_gradient_that_overflows_names_the_weight_reached(fmt: str, overflow: int, reaches: dict[str, str]) -> None:
    # d exp(y) = exp(y), and exp(12) = 162755 is beyond FP16
    step = stepped(Scaled(12.0, Tensor.exp), torch.tensor([1.0]), torch.tensor([1.0]))
    (found,) = (node for node in backward_nodes(step, (fmt,))[0] if node.name == "exp")
    assert (found.errors[fmt].overflow, found.errors[fmt].nan, found.reaches) == (overflow, 0, reaches)


POSITIONS = 70_000
"""More than FP16's largest number, 65,504: a sum of as many gradients near 1 overflows."""


def test_a_sum_over_many_positions_is_tested_at_a_smaller_scale() -> None:
    # w gets 70,000 gradients of 1/70,000: their sum fits at a loss scale of 1, but overflows at 2 ** 17
    x, targets = torch.ones(POSITIONS), torch.full((POSITIONS,), 1 / POSITIONS)
    found = backward_errors(stepped(Scaled(), x, targets, ("fp16",)), ("fp16",))["mul"]["fp16"]
    assert not found.is_broken
    assert 1 <= found.scale < 2**16


class Apart(nn.Module):
    """A weight summed over all positions, and a weight per position, whose gradients are tiny."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(1))
        self.each = nn.Parameter(torch.ones(POSITIONS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x * self.shared, self.each.sin()))


def test_a_sum_that_overflows_at_every_scale_that_other_gradients_need_is_found() -> None:
    # `shared` gets 70,000 and overflows at any scale of 1 or more; without a scale, 2e-9 for each of `each` is zero
    targets = torch.cat((torch.ones(POSITIONS), torch.full((POSITIONS,), 2e-9)))
    step = stepped(Apart(), torch.ones(POSITIONS), targets, ("fp16",))
    assert backward_errors(step, ("fp16",))["mul"]["fp16"].is_broken
    (product,) = (node for node in backward_nodes(step, ("fp16",))[0] if node.name == "mul")
    assert product.reaches == {"fp16": "shared"}


def test_infinite_and_undefined_gradients_are_told_apart() -> None:
    # sqrt(x^2) at 1e-5: x^2 is 1e-10, zero in FP16, where the root's derivative is infinite, and zero times that is NaN
    found = backwards(Scaled(1e-5, lambda y: y.square().sqrt()), [1.0], [1.0], "sqrt", "fp16")
    assert (found.error.overflow, found.error.nan) == (1, 0)


def test_what_has_no_kernel_says_so() -> None:
    model = Scaled(1.0, lambda y: torch.linalg.cholesky(y * torch.eye(2)))
    found = backwards(model, [4.0], [1.0], "linalg_cholesky", "fp16")
    assert "kernel on CUDA" in found.error.unsupported
    assert (found.error.local_error, found.gaps) == (None, {})


def test_errors_and_what_they_move() -> None:
    # y = w x and y^2 with x = 1 + U: w gets 2 (1 + U)^2, which BF16 rounds to 2 (1 + 2 U), off by 2 U^2
    step = stepped(Scaled(1.0, Tensor.square), torch.tensor([1 + U]), torch.tensor([1.0]))
    found, why = backward_nodes(step, ("fp16", "bf16"))
    assert why is None
    product = found[0]
    assert (product.op, product.owner, set(product.errors)) == ("aten.mul.Tensor", "", {"fp16", "bf16"})
    off = (U / (1 + U)) ** 2
    assert product.errors["bf16"].local_error == pytest.approx(off, rel=1e-3)
    # forwards 1 + U is exact, and there is no other gradient
    assert product.contributions["bf16"].backward == pytest.approx(off, rel=2**-7)
    assert product.contributions["bf16"].both == pytest.approx(off, rel=2**-7)


def test_what_breaks_in_a_low_step_alone_reaches_what_it_reaches_there() -> None:
    # Alone, the root of 1e-8 is rounded to that of 0, whose derivative is infinite; times x, which is 0, it is NaN.
    step = stepped(Scaled(1.0, Tensor.sqrt), torch.tensor([1e-8]), torch.tensor([1.0]))
    (root,) = (node for node in backward_nodes(step, ("fp16",))[0] if node.name == "sqrt")
    assert (root.errors["fp16"].overflow, root.reaches["fp16"]) == (1, "w")


def test_where_gradients_are_not_the_models_nothing_is_attributed() -> None:
    step = stepped(Scaled(), torch.tensor([1 + U]), torch.tensor([1.5]))
    step.faithful = False
    found, why = backward_nodes(step, ("bf16",))
    assert "do not have the model's gradients" in why
    assert found[0].contributions == {}
    assert found[0].errors["bf16"].local_error is not None


def test_the_heaviest_operations_are_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Squares move the loss by twice what the product does, 2 U^2 to U^2: its own error is that of x, which it reads.
    step = stepped(Scaled(1.0, Tensor.square), torch.tensor([1 + U / 2]), torch.tensor([1.0]))
    tested = backward_errors(step, ("bf16",))
    heaviest = max(tested, key=lambda name: tested[name]["bf16"].weight)
    monkeypatch.setattr(backward, "MAX_RERUNS", 1)
    found, _ = backward_nodes(step, ("bf16",))
    assert [node.name for node in found if node.contributions] == [heaviest]
    monkeypatch.setattr(backward, "MAX_RERUNS", 64)
    monkeypatch.setattr(backward, "FEWEST", 2)
    monkeypatch.setattr(backward, "ELEMENTS", 1)
    assert sum(bool(node.contributions) for node in backward_nodes(step, ("bf16",))[0]) == 2
