"""Emulates CUDA's GRUs, LSTMs and plain RNNs: each step rounds two products; the rest is one float32 kernel.

A CPU rounds after every gate, or as oneDNN does, which depends on the processor. Source: `GRUCell` and `LSTMCell` of
aten/src/ATen/native/RNN.cpp, and the kernels of aten/src/ATen/native/cuda/RNN.cu, which keep gates in `accscalar_t` and
round their results.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    from_input = _product(given["input"], given["w_ih"], given.get("b_ih"), row)
    from_state = _product(states[0], given["w_hh"], given.get("b_hh"), row)
    result = round_tree(STEPS[operation_of(target).name.removesuffix("_cell")](from_input, from_state, states), row)
    return result if len(result) > 1 else result[0]


def run_layer(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """Run a recurrent layer on half-precision tensors on a CPU, step by step. Shapes: like `aten.gru.input`,
    `aten.gru.data` and similar operations."""
    given = widen(arguments_of(target, args, kwargs))
    rows, sizes = _rows(given)
    ways, params = 1 + given["bidirectional"], given["params"]
    each = len(params) // (given["num_layers"] * ways)
    lasts = []
    for layer in range(given["num_layers"]):
        if layer and given["train"]:  # in the format: random numbers depend on the dtype
            rows = widen(torch.dropout(round_tree(rows, row), given["dropout"], True))
        outputs = []
        for index in range(layer * ways, (layer + 1) * ways):
            states = tuple(x[index] for x in _several(given["hx"]))
            weights = params[index * each : (index + 1) * each]
            way = _Way(STEPS[operation_of(target).name], weights, given["has_biases"], row)
            output, last = way.run(rows, sizes, states, backwards=index > layer * ways)
            outputs.append(output)
            lasts.append(last)
        rows = torch.cat(outputs, -1)
    if "input" in given:
        rows = rows.view(len(sizes), sizes[0], rows.shape[-1])
        rows = rows.transpose(0, 1) if given["batch_first"] else rows
    return round_tree((rows, *(torch.stack(states) for states in zip(*lasts, strict=True))), row)


class _Way:
    """Runs one direction of one recurrent layer in float32, on values rounded to the format."""

    def __init__(self, step: _Step, weights: Sequence[Tensor], biased: bool, row: Format) -> None:
        self._step, self._row = step, row
        self._of_input, self._of_state, *others = weights
        self._biases: Sequence[Tensor | None] = others[:2] if biased else (None, None)
        self._projection = others[2:] if biased else others

    def run(self, rows: Tensor, sizes: Sequence[int], states: _States, backwards: bool) -> tuple[Tensor, _States]:
        """Outputs of all steps and final states. rows: inputs of all steps, concatenated; sizes: number of rows in each
        step."""
        entering = torch.split(_product(rows, self._of_input, self._biases[0], self._row), list(sizes))
        outputs, steps = [], list(zip(entering, sizes, strict=True))
        for from_input, size in reversed(steps) if backwards else steps:
            now = tuple(state[:size] for state in states)
            from_state = _product(now[0], self._of_state, self._biases[1], self._row)
            result = tuple(round_to(x, self._row.name) for x in self._step(from_input, from_state, now))
            for weight in self._projection:
                result = (_product(result[0], weight, None, self._row), *result[1:])
            outputs.append(result[0])
            if size < states[0].shape[0]:  # sequences that have ended keep their last state
                result = tuple(torch.cat((x, y[size:])) for x, y in zip(result, states, strict=True))
            states = result
        return torch.cat(outputs[::-1] if backwards else outputs), states


def _rows(given: dict[str, Any]) -> tuple[Tensor, list[int]]:
    """The input of a layer: the rows of all steps, concatenated, and the number of rows per step."""
    if "data" in given:
        return given["data"], given["batch_sizes"].tolist()
    x = given["input"].transpose(0, 1) if given["batch_first"] else given["input"]
    return x.flatten(0, 1), [x.shape[1]] * x.shape[0]


def _several(states: Tensor | Sequence[Tensor]) -> _States:
    return (states,) if isinstance(states, Tensor) else tuple(states)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, row: Format) -> Tensor:
    """The rounded product, with the bias added afterwards in float32."""
    result = round_to(torch.nn.functional.linear(x, weight), row.name)
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
