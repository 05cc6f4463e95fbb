"""Steps of a GRU or LSTM as CUDA computes them: two products, each rounded, and one kernel that computes the rest in float32.

A CPU rounds after every gate. Source: `GRUCell` and `LSTMCell` of aten/src/ATen/native/RNN.cpp, and the kernels of
aten/src/ATen/native/cuda/RNN.cu, which hold gates in `accscalar_t` and round what they return.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..formats.table import Format
from .casting import in_float32
from .nodes import operation_of

_Step = Callable[[Tensor, Tensor, Any, Tensor | None, Tensor | None], Any]


def is_fused_cell(target: Callable[..., Any]) -> bool:
    """Whether CUDA has one kernel for the gates of this step."""
    return operation_of(target).name in STEPS


def stepped(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """A step of half-precision tensors on a CPU. Shapes: as `aten.gru_cell` and `aten.lstm_cell` take and give them."""
    x, state, of_input, of_state, *biases = args
    given = dict(zip(("b_ih", "b_hh"), biases, strict=False)) | kwargs
    hidden = state if isinstance(state, Tensor) else state[0]
    products = [
        in_float32(torch.ops.aten.linear.default, pair, {}, row) for pair in ((x, of_input), (hidden, of_state))
    ]
    read = state if isinstance(state, Tensor) else state[1]
    biases = [given.get("b_ih"), given.get("b_hh")]
    return in_float32(STEPS[operation_of(target).name], (*products, read, *biases), {}, row)


def _gru(
    from_input: Tensor, from_state: Tensor, state: Tensor, b_input: Tensor | None, b_state: Tensor | None
) -> Tensor:
    reset_i, update_i, fresh_i = _added(from_input, b_input).chunk(3, -1)
    reset_h, update_h, fresh_h = _added(from_state, b_state).chunk(3, -1)
    fresh = (fresh_i + (reset_i + reset_h).sigmoid() * fresh_h).tanh()
    return fresh + (update_i + update_h).sigmoid() * (state - fresh)


def _lstm(
    from_input: Tensor, from_state: Tensor, cell: Tensor, b_input: Tensor | None, b_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    gates = _added(from_input, b_input) + _added(from_state, b_state)
    enter, forget, fresh, leave = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * fresh.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _added(gates: Tensor, bias: Tensor | None) -> Tensor:
    return gates if bias is None else gates + bias


STEPS: dict[str, _Step] = {"gru_cell": _gru, "lstm_cell": _lstm}
"""What follows the products of the input and of the state: (product, product, state, bias, bias) -> (state) or (state, cell)."""
