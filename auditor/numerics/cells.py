"""Emulates CUDA's GRUs, LSTMs and plain RNNs: each step rounds two products, and does the rest in one float32 kernel.

A CPU rounds after every gate, or as oneDNN does, which depends on the processor. Source: `GRUCell` and `LSTMCell` of
aten/src/ATen/native/RNN.cpp, and the kernels of aten/src/ATen/native/cuda/RNN.cu, which keep gates in `accscalar_t` and
round their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from .casting import round_to, round_tree, widen
from .formats import Format
from .nodes import arguments_of, operation_of

_States = tuple[Tensor, ...]
_FUSED = ("gru_cell", "lstm_cell")


def is_fused_cell(target: Callable[..., Any]) -> bool:
    """Whether CUDA computes the gates of this recurrent step in one kernel."""
    return operation_of(target).name in _FUSED


def run_cell(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Run one step of a GRU or LSTM on half-precision tensors on a CPU, with the arguments of its ATen operation."""
    given = widen(arguments_of(target, args, kwargs))
    states = _several(given["hx"])
    from_input = _product(given["input"], given["w_ih"].mT, given.get("b_ih"), row)
    from_state = _product(states[0], given["w_hh"].mT, given.get("b_hh"), row)
    result = round_tree(STEPS[operation_of(target).name.removesuffix("_cell")](from_input, from_state, states), row)
    return result if len(result) > 1 else result[0]


def run_layer(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Run a recurrent layer on half-precision tensors on a CPU, step by step. Shapes: like `aten.gru.input`,
    `aten.gru.data` and similar operations."""
    given = widen(arguments_of(target, args, kwargs))
    rows, sizes = _rows(given)
    ways, params = 1 + given["bidirectional"], given["params"]
    each = len(params) // (given["num_layers"] * ways)
    step, back, lasts = STEPS[operation_of(target).name], _backwards(sizes), []
    for layer in range(given["num_layers"]):
        if layer and given["train"]:  # drawn in the format: random numbers depend on the dtype
            rows = widen(torch.dropout(round_tree(rows, row), given["dropout"], True))
        these = slice(layer * ways, (layer + 1) * ways)
        of_ways = [params[i * each : (i + 1) * each] for i in range(these.start, these.stop)]
        weights = [torch.stack(one) for one in zip(*of_ways, strict=True)]
        both = torch.stack([rows, rows[back]][:ways])
        outputs, last = _run_ways(
            step, both, sizes, tuple(x[these] for x in _several(given["hx"])), weights, given, row
        )
        rows = torch.cat([outputs[0], *(x[back] for x in outputs[1:])], -1)
        lasts.append(last)
    if "input" in given:
        rows = rows.view(len(sizes), sizes[0], rows.shape[-1])
        rows = rows.transpose(0, 1) if given["batch_first"] else rows
    return round_tree((rows, *(torch.cat(states) for states in zip(*lasts, strict=True))), row)


def _run_ways(
    step: _Step,
    rows: Tensor,
    sizes: Sequence[int],
    states: _States,
    weights: list[Tensor],
    given: dict[str, Any],
    row: Format,
) -> tuple[Tensor, _States]:
    """Outputs of all steps, and final states of a layer. rows: [directions, rows of all steps, features]; sizes: number
    of rows in each step; states: [directions, batch, features]."""
    of_input, of_state, *others = (x.mT.contiguous() if x.dim() == 3 else x.unsqueeze(1) for x in weights)
    biases: Sequence[Tensor | None] = others[:2] if given["has_biases"] else (None, None)
    outputs = []
    for from_input in torch.split(_product(rows, of_input, biases[0], row), list(sizes), 1):
        size = from_input.shape[1]
        ended = size < states[0].shape[1]
        now = tuple(x[:, :size] for x in states) if ended else states
        from_state = _product(now[0], of_state, biases[1], row)
        result = tuple(round_to(x, row.name) for x in step(from_input, from_state, now))
        for weight in others[2:] if given["has_biases"] else others:
            result = (_product(result[0], weight, None, row), *result[1:])
        outputs.append(result[0])
        if ended:  # sequences that have ended keep their last state
            result = tuple(torch.cat((x, y[:, size:]), 1) for x, y in zip(result, states, strict=True))
        states = result
    return torch.cat(outputs, 1), states


def _backwards(sizes: Sequence[int]) -> Tensor:
    """Permutation of the rows that reverses the steps of every sequence. sizes: number of rows in each step."""
    starts, length = [0, *accumulate(sizes)], [sum(size > i for size in sizes) for i in range(sizes[0])]
    return torch.tensor([starts[length[i] - 1 - t] + i for t, size in enumerate(sizes) for i in range(size)])


def _rows(given: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """A layer's input as (the concatenated rows of all steps, the number of rows in each step)."""
    if "data" in given:
        return given["data"], given["batch_sizes"].tolist()
    x = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
    return x.flatten(0, 1), [x.shape[1]] * x.shape[0]


def _several(states: Tensor | Sequence[Tensor]) -> _States:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, row: Format) -> Tensor:
    """The rounded product of rows and a transposed weight, with the bias added afterwards in float32."""
    result = round_to(x @ weight, row.name)
    return result if bias is None else result + bias


_Step = Callable[[Tensor, Tensor, _States], _States]


def _gru(from_input: Tensor, from_state: Tensor, states: _States) -> _States:
    state = states[0]
    sizes = [2 * state.shape[-1], state.shape[-1]]
    gates_i, fresh_i = from_input.split_with_sizes(sizes, -1)
    gates_h, fresh_h = from_state.split_with_sizes(sizes, -1)
    reset, update = (gates_i + gates_h).sigmoid().chunk(2, -1)
    return (torch.lerp(torch.addcmul(fresh_i, reset, fresh_h).tanh(), state, update),)


def _lstm(from_input: Tensor, from_state: Tensor, states: _States) -> _States:
    enter, forget, fresh, leave = (from_input + from_state).chunk(4, -1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * fresh.tanh()
    return leave.sigmoid() * cell.tanh(), cell


STEPS: dict[str, _Step] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": lambda from_input, from_state, _: ((from_input + from_state).tanh(),),
    "rnn_relu": lambda from_input, from_state, _: ((from_input + from_state).relu(),),
}
"""{type of layer: one time step after its two matrix products}. A step maps (product with the input, product with the
state, states) to the new states."""
