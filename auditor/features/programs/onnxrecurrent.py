"""Translates a recurrent layer to a single ONNX node. Its sizes are constants, and initial states of zeros are left
out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

with suppress(ImportError):  # onnxfile's `require` reports what is not installed
    from onnxscript import opset18

LAYOUTS = ("Cast", "Concat", "Expand", "Identity", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze")
"""Operators whose results are zero where the entries of their data are."""

STATES = (5, 6)
"""Inputs of LSTM, GRU and RNN that are zero if they are absent: the hidden state, and the LSTM's cell state."""


@dataclass(frozen=True)
class Cell:
    """A kind of recurrent layer. operator: its name in ONNX. gates: torch's gates in the order of ONNX, which has other
    names for them. attributes: further ones of the node; activations of one direction."""

    operator: str
    gates: tuple[int, ...]
    activations: tuple[str, ...] = ()
    linear_before_reset: int | None = None


LSTM = Cell("LSTM", (0, 3, 1, 2))  # torch: input, forget, cell, output; ONNX: input, output, forget, cell
GRU = Cell("GRU", (1, 0, 2), linear_before_reset=1)  # torch: reset, update, new; ONNX: update, reset, hidden
TANH = Cell("RNN", (0,), ("Tanh",))
RELU = Cell("RNN", (0,), ("Relu",))


def translate(
    cell: Cell,
    input: Any,
    hx: Any,
    params: Sequence[Any],
    has_biases: bool,
    num_layers: int,
    dropout: float,
    train: bool,
    bidirectional: bool,
    batch_first: bool,
) -> tuple[Any, ...]:
    """Write a recurrent layer of torch as ONNX nodes: one per layer, and the layout between layers.

    Shapes: input [s, b, i], or [b, s, i] if batch_first; each state [layers * directions, b, h]; weights of one
    direction [gates * h, i] and [gates * h, h], biases [gates * h]. Returns the outputs in the layout of the input, with
    directions * h features, and the last states. Raises: NotImplementedError for projections and dropout, which ONNX lacks.
    """
    operators: Any = opset18
    directions = 2 if bidirectional else 1
    per_direction = 4 if has_biases else 2
    if len(params) != num_layers * directions * per_direction:
        raise NotImplementedError("ONNX has no projections in recurrent layers")
    if train and dropout:
        raise NotImplementedError("ONNX has no dropout in recurrent layers")
    states = list(hx) if isinstance(hx, Sequence) else [hx]
    values = operators.Transpose(input, perm=[1, 0, 2]) if batch_first else input
    last = list[Sequence[Any]]()
    for layer in range(num_layers):
        first = layer * directions
        weights = [params[at * per_direction : (at + 1) * per_direction] for at in range(first, first + directions)]
        initial = [_slice(state, first, first + directions) for state in states]
        made, *after = _layer(cell, values, weights, initial)
        values = operators.Reshape(operators.Transpose(made, perm=[0, 2, 1, 3]), _integers(0, 0, -1))
        last.append(after)
    if batch_first:
        values = operators.Transpose(values, perm=[1, 0, 2])
    finals = [operators.Concat(*each, axis=0) if num_layers > 1 else each[0] for each in zip(*last, strict=True)]
    return values, *finals


def _layer(cell: Cell, values: Any, weights: Sequence[Sequence[Any]], initial: Sequence[Any]) -> Sequence[Any]:
    """One layer in all directions. Shapes: values [s, b, i]; returns [s, directions, b, h], and states [directions, b, h]."""
    hidden = weights[0][1].shape[1]
    directions = len(weights)
    of_input = _stack([_reordered(cell, of_direction[0], hidden) for of_direction in weights])
    of_state = _stack([_reordered(cell, of_direction[1], hidden) for of_direction in weights])
    biases = None
    if len(weights[0]) > 2:
        biases = _stack([_biases(cell, of_direction[2:], hidden) for of_direction in weights])
    attributes: dict[str, Any] = {"hidden_size": hidden}
    attributes["direction"] = "bidirectional" if directions > 1 else "forward"
    if cell.activations:
        attributes["activations"] = [*cell.activations * directions]
    if cell.linear_before_reset is not None:
        attributes["linear_before_reset"] = cell.linear_before_reset
    operator = getattr(opset18, cell.operator)
    results: Sequence[Any] = operator(values, of_input, of_state, biases, None, *initial, **attributes)
    return results


def _reordered(cell: Cell, weight: Any, hidden: int) -> Any:
    """A weight, [gates * h, ...], with its gates in the order of ONNX."""
    if len(cell.gates) == 1:
        return weight
    gates = [_slice(weight, gate * hidden, (gate + 1) * hidden) for gate in cell.gates]
    return opset18.Concat(*gates, axis=0)


def _biases(cell: Cell, biases: Sequence[Any], hidden: int) -> Any:
    """The biases of one direction, of the input and of the state, in one vector [2 * gates * h]."""
    return opset18.Concat(*(_reordered(cell, bias, hidden) for bias in biases), axis=0)


def _stack(each: Sequence[Any]) -> Any:
    """[directions, ...] of a weight per direction."""
    rows = [opset18.Unsqueeze(weight, _integers(0)) for weight in each]
    return opset18.Concat(*rows, axis=0) if len(rows) > 1 else rows[0]


def _slice(value: Any, start: int, end: int) -> Any:
    return opset18.Slice(value, _integers(start), _integers(end), _integers(0))


def _integers(*values: int) -> Any:
    return opset18.Constant(value_ints=list(values))


_aten = torch.ops.aten

TRANSLATIONS: dict[Callable[..., Any], Callable[..., Any]] = {
    _aten.lstm.input: partial(translate, LSTM),
    _aten.gru.input: partial(translate, GRU),
    _aten.rnn_tanh.input: partial(translate, TANH),
    _aten.rnn_relu.input: partial(translate, RELU),
}


def drop_zero_states(graph: Any) -> None:
    """Remove initial states that are zero in every entry: ONNX starts from zeros if a state is absent."""
    for node in graph:
        if node.op_type not in ("LSTM", "GRU", "RNN") or node.domain:
            continue
        for place in STATES:
            if place < len(node.inputs) and _is_zero(node.inputs[place]):
                node.replace_input_with(place, None)


def _is_zero(value: Any) -> bool:
    """Whether all entries of a value are known to be zero, whatever its shape."""
    while value is not None and (made := value.producer()) is not None:
        if made.op_type == "ConstantOfShape" and not made.domain:
            entries = made.attributes.get("value")
            return entries is None or not entries.value.numpy().any()
        is_one = made.op_type != "Concat" or len(made.inputs) == 1
        if made.op_type not in LAYOUTS or made.domain or not is_one:
            return False
        value = made.inputs[0]
    if value is None or value.const_value is None or value.is_graph_input():
        return False
    return not value.const_value.numpy().any()
