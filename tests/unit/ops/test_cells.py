"""Steps of recurrent layers in half, against float32 modules whose products are exact."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from auditor.ops.kernels import UnsupportedInFormat, run_op

aten = torch.ops.aten


def whole_numbers(*shape: int) -> Tensor:
    """Products of these are exact in half."""
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)).float() / 2


def filled(cell: nn.RNNCellBase) -> nn.RNNCellBase:
    with torch.no_grad():
        for weight in cell.parameters():
            weight.copy_(whole_numbers(*weight.shape))
    return cell


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTMCell])
def test_a_step_rounds_its_products_and_its_results(kind: type[nn.RNNCellBase], bias: bool, dtype: torch.dtype) -> None:
    cell = filled(kind(5, 7, bias=bias))  # type: ignore[call-arg]
    x, state = whole_numbers(4, 5), whole_numbers(4, 7)
    given = (state, state) if kind is nn.LSTMCell else state
    op = aten.lstm_cell.default if kind is nn.LSTMCell else aten.gru_cell.default
    weights = [weight.detach().to(dtype) for weight in cell.parameters()]
    low = [state.to(dtype)] * 2 if kind is nn.LSTMCell else state.to(dtype)
    with torch.no_grad():
        found, wide = run_op(op, (x.to(dtype), low, *weights), {}), cell(x, given)
    results = zip(found, wide, strict=True) if kind is nn.LSTMCell else [(found, wide)]
    for ours, exact in results:
        assert ours.dtype is dtype
        # up to the last place of the format: sums in float32 differ in theirs
        assert torch.allclose(ours.float(), exact.to(dtype).float(), rtol=torch.finfo(dtype).eps, atol=1e-6)
        assert (ours == exact.to(dtype)).float().mean() > 0.9


def test_products_are_rounded_before_the_gates() -> None:
    x, state = torch.full((1, 1), 1.0).half(), torch.zeros(1, 1).half()
    to_gates, bias = torch.tensor([[0.0], [-20.0], [2048.0]]).half(), torch.tensor([0.0, 0.0, -2048.0]).half()
    x = torch.full((1, 1), 1 + 2**-10).half()  # 2050 is what half holds, and 2050 - 2048 = 2
    found = run_op(
        aten.gru_cell.default, (x, state, to_gates, torch.zeros(3, 1).half(), bias, torch.zeros(3).half()), {}
    )
    assert torch.equal(found, torch.tensor([[2.0]]).tanh().half())


def test_two_dtypes_are_refused() -> None:
    cell = nn.GRUCell(3, 3)
    with pytest.raises(UnsupportedInFormat, match="got float16 and float32 together"):
        run_op(aten.gru_cell.default, (torch.ones(1, 3).half(), torch.ones(1, 3), *cell.parameters()), {})


def test_gradients_are_those_of_the_step() -> None:
    cell, x, state = filled(nn.GRUCell(3, 4)), whole_numbers(2, 3), whole_numbers(2, 4)
    cell(x, state).sum().backward()
    weights = [weight.detach().half().requires_grad_() for weight in cell.parameters()]
    run_op(aten.gru_cell.default, (x.half(), state.half(), *weights), {}).sum().backward()
    for low, wide in zip(weights, cell.parameters(), strict=True):
        assert low.grad is not None and wide.grad is not None
        assert torch.allclose(low.grad.float(), wide.grad, rtol=1e-2, atol=5e-3)
