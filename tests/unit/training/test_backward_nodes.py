"""All that is known of the operations of a training step, put together on steps of one weight."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from auditor.training.backward import backward_nodes
from tests.stepping import Scaled, stepped

U = 2.0**-7


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
    assert product.contributions["bf16"].isolated == pytest.approx(off, rel=2**-7)
    assert product.contributions["bf16"].decided_by == "first-order"


def test_what_breaks_in_a_low_step_alone_reaches_what_it_reaches_there() -> None:
    # Alone, the root of 1e-8 is rounded to that of 0, whose derivative is infinite; times x, which is 0, it is NaN.
    step = stepped(Scaled(1.0, Tensor.sqrt), torch.tensor([1e-8]), torch.tensor([1.0]))
    (root,) = (node for node in backward_nodes(step, ("fp16",))[0] if node.name == "sqrt")
    assert (root.errors["fp16"].overflow, root.reaches["fp16"]) == (1, "w")


def test_where_gradients_are_not_the_models_nothing_is_attributed() -> None:
    step = stepped(Scaled(), torch.tensor([1 + U]), torch.tensor([1.5]))
    step.faithful = False
    found, why = backward_nodes(step, ("bf16",))
    assert why is not None
    assert "other gradients than the model" in why
    assert found[0].contributions == {}
    assert found[0].errors["bf16"].local_error is not None
