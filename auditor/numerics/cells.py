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
    step = STEPS[operation_of(target).name]
    rows, sizes = _rows(given)
    back = _backwards(sizes)
    ways = 1 + given["bidirectional"]
    params = given["params"]
    per_way = len(params) // (given["num_layers"] * ways)
    initial = _several(given["hx"])  # each [layers * directions, batch, features]
    finals = list[_States]()
    for layer in range(given["num_layers"]):
        if layer and given["train"]:  # drawn in the format: random numbers depend on the dtype
            rows = widen(torch.dropout(round_tree(rows, row), given["dropout"], True))
        first = layer * ways
        states = tuple(x[first : first + ways] for x in initial)
        of_ways = [params[way * per_way : (way + 1) * per_way] for way in range(first, first + ways)]
        weights = [torch.stack(alike) for alike in zip(*of_ways, strict=True)]  # each [directions, *]
        directions = torch.stack([rows, rows[back]][:ways])
        outputs, last = _run_ways(step, directions, sizes, states, weights, given, row)
        in_order = [outputs[0], *(output[back] for output in outputs[1:])]
        rows = torch.cat(in_order, -1)
        finals.append(last)
    if "input" in given:
        rows = rows.view(len(sizes), sizes[0], rows.shape[-1])
        if given["batch_first"]:
            rows = rows.transpose(0, 1)
    states = tuple(torch.cat(of_layers) for of_layers in zip(*finals, strict=True))
    return round_tree((rows, *states), row)


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
    of_input, of_state, *others = map(_by_direction, weights)
    input_bias: Tensor | None = None
    state_bias: Tensor | None = None
    projections = others
    if given["has_biases"]:
        input_bias, state_bias, *projections = others
    outputs = list[Tensor]()
    from_inputs = _product(rows, of_input, input_bias, row)
    for from_input in torch.split(from_inputs, list(sizes), 1):
        size = from_input.shape[1]
        has_ended = size < states[0].shape[1]  # whether shorter sequences have ended before this step
        going_on = tuple(state[:, :size] for state in states) if has_ended else states
        from_state = _product(going_on[0], of_state, state_bias, row)
        result = tuple(round_to(state, row.name) for state in step(from_input, from_state, going_on))
        for weight in projections:
            projected = _product(result[0], weight, None, row)
            result = (projected, *result[1:])
        outputs.append(result[0])
        if has_ended:  # sequences that have ended keep their last state
            pairs = zip(result, states, strict=True)
            result = tuple(torch.cat((new, old[:, size:]), 1) for new, old in pairs)
        states = result
    return torch.cat(outputs, 1), states


def _by_direction(weight: Tensor) -> Tensor:
    """A weight [directions, out, in] transposed, or a bias [directions, out] as [directions, 1, out]."""
    if weight.dim() == 3:
        return weight.mT.contiguous()
    return weight.unsqueeze(1)


def _backwards(sizes: Sequence[int]) -> Tensor:
    """Permutation of the rows that reverses the steps of every sequence. sizes: number of rows in each step."""
    starts = [0, *accumulate(sizes)]  # of the steps
    lengths = [sum(size > sequence for size in sizes) for sequence in range(sizes[0])]
    order = list[int]()
    for step, size in enumerate(sizes):
        for sequence in range(size):
            opposite = lengths[sequence] - 1 - step
            order.append(starts[opposite] + sequence)
    return torch.tensor(order)


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
