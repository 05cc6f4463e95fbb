"""Recurrent layers in FP16: products that sum in float32 and are rounded, and gates that round whatever they compute.

So do torch's own kernels for a CPU, up to the order of a sum, but their half products take most of the time; on some
processors an LSTM without gradients is oneDNN's, which rounds elsewhere. bfloat16 is left to them: those products are quick.
Source: `GRUCell`, `LSTMCell`, `SimpleCell` and `FullLayer` of aten/src/ATen/native/RNN.cpp.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.table import Format
from ..trees import over_tensors, tensors_in
from .casting import raised
from .nodes import operation_of, overload_of
from .products import Taken, computed, is_differentiated, is_forward_mode, is_known, is_shared
from .remembered import remembered

_States = tuple[Tensor, ...]
_Step = Callable[[Tensor, Tensor, _States], _States]


class _Layers(NamedTuple):
    """What a recurrent layer is called with; weights by layer and direction, each of [w_ih, w_hh, b_ih, b_hh] or the first two."""

    x: Tensor
    states: _States
    weights: list[list[Tensor]]
    ways: int
    batch_first: bool


def layer(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    """`target(*args, **kwargs)`, a recurrent layer of half-precision tensors on a CPU; taken from an earlier run that
    read the same."""

    def compute() -> Any:
        return _computed(target, args, kwargs, row)

    if kwargs or not is_shared() or _drops(target, args):
        return compute()
    tensors = tuple(tensors_in(args))

    def taken(known: Any) -> Any:
        return Taken.apply(lambda: known, *tensors) if is_differentiated(tensors) else known  # type: ignore[no-untyped-call]

    return remembered(compute, taken, target, over_tensors(lambda x: "", args), *tensors)


def _drops(target: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Whether it draws what it drops between its layers."""
    given = dict(zip((argument.name for argument in overload_of(target)._schema.arguments), args, strict=False))
    return bool(given.get("train")) and bool(given.get("dropout"))


def _computed(target: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], row: Format) -> Any:
    name = operation_of(target).name
    given = None if kwargs or _IN.torch or _drops(target, args) else _layers(target, args)
    if given is None or row.dtype is not torch.float16:
        return target(*args, **kwargs)
    if is_differentiated(tuple(tensors_in(args))):
        output, *states = _Differentiable.apply(target, args[3:], row, *tensors_in(args))  # type: ignore[no-untyped-call]
    else:
        output, *states = _forward(STEPS[name], given, row)
    return (output.transpose(0, 1) if given.batch_first else output, *states)


def _layers(target: Callable[..., Any], args: tuple[Any, ...]) -> _Layers | None:
    """The arguments of `aten.gru.input` and its like, if they fit each other; None for packed sequences and projections."""
    if overload_of(target)._overloadname != "input" or len(args) != 9 or is_forward_mode():
        return None
    x, states, flat, biased, layers, _, _, both, batch_first = args
    states = (states,) if isinstance(states, Tensor) else tuple(states)
    ways, each = 2 if both else 1, 4 if biased else 2
    weights = [list(flat[i : i + each]) for i in range(0, len(flat), each)]
    tensors = [x, *states, *flat]
    if len(weights) != ways * layers or not all(is_known(one) and one.dtype is x.dtype for one in tensors):
        return None
    given = _Layers(x, states, weights, ways, bool(batch_first))
    return given if x.numel() and _fit(given, operation_of(target).name) else None


def _fit(given: _Layers, name: str) -> bool:
    gates, size, entering = _GATES[name], given.states[0].shape[-1], given.x.shape[-1]
    count = len(given.weights)
    if given.x.dim() != 3 or any(
        state.shape != (count, given.x.shape[0 if given.batch_first else 1], size) for state in given.states
    ):
        return False
    for index, weights in enumerate(given.weights):
        wide = entering if index < given.ways else given.ways * size
        shapes = [(gates * size, wide), (gates * size, size), (gates * size,), (gates * size,)]
        if any(weight.shape != shape for weight, shape in zip(weights, shapes, strict=False)):
            return False
    return len(given.states) == (2 if name == "lstm" else 1)


def _forward(step: _Step, given: _Layers, row: Format) -> _States:
    """Output and last states. Shapes: [t, b, ways h], [layers ways, b, h]."""
    output, lasts = given.x.transpose(0, 1) if given.batch_first else given.x, []
    for start in range(0, len(given.weights), given.ways):
        own = slice(start, start + given.ways)
        states = tuple(state[own] for state in given.states)
        output, last = _one_layer(step, output, states, given.weights[own], row)
        lasts.append(last)
    return (output, *(torch.cat(each) for each in zip(*lasts, strict=True)))


def _one_layer(
    step: _Step, x: Tensor, states: _States, weights: list[list[Tensor]], row: Format
) -> tuple[Tensor, _States]:
    """Both directions at once, the second turned round. Shapes: [t, b, i], [ways, b, h] -> [t, b, ways h], [ways, b, h]."""
    linear = torch.ops.aten.linear.default
    entering = [computed(linear, (x, of_input, *biases[:1]), {}, row) for of_input, _, *biases in weights]
    of_state = raised(torch.stack([own[1] for own in weights])).mT
    biases = [raised(own[3])[None] for own in weights if len(own) == 4]
    added = torch.stack(biases) if biases else None
    outputs = []
    for entered in torch.stack(_turned(entering), 1).unbind():
        wide = states[0].float()
        product = torch.bmm(wide, of_state) if added is None else torch.baddbmm(added, wide, of_state)
        states = step(entered, product.to(x.dtype), states)
        outputs.append(states[0])
    return torch.cat(_turned(list(torch.stack(outputs, 1))), -1), states


def _turned(ways: list[Tensor]) -> list[Tensor]:
    """Steps of a second direction in the order that it takes them, or back again. Shape [t, ..]."""
    return [ways[0], *(way.flip(0) for way in ways[1:])]


def _gru(entered: Tensor, product: Tensor, states: _States) -> _States:
    (state,) = states
    reset_i, update_i, fresh_i = entered.chunk(3, -1)
    reset_h, update_h, fresh_h = product.chunk(3, -1)
    fresh = (fresh_i + fresh_h * (reset_h + reset_i).sigmoid()).tanh()
    return ((state - fresh) * (update_h + update_i).sigmoid() + fresh,)


def _lstm(entered: Tensor, product: Tensor, states: _States) -> _States:
    enter, forget, fresh, leave = (product + entered).chunk(4, -1)
    cell = forget.sigmoid() * states[1] + enter.sigmoid() * fresh.tanh()
    return leave.sigmoid() * cell.tanh(), cell


def _tanh(entered: Tensor, product: Tensor, _: _States) -> _States:
    return ((product + entered).tanh(),)


def _relu(entered: Tensor, product: Tensor, _: _States) -> _States:
    return ((product + entered).relu(),)


STEPS: dict[str, _Step] = {"gru": _gru, "lstm": _lstm, "rnn_tanh": _tanh, "rnn_relu": _relu}
"""What follows the products of input and state: (product, product, states) -> states. Shapes: [ways, b, gates h], [ways, b, h]."""

_GATES = {"gru": 3, "lstm": 4, "rnn_tanh": 1, "rnn_relu": 1}


class _In(threading.local):
    torch = False


_IN = _In()


@contextmanager
def _by_torch() -> Iterator[None]:
    """In the body, in this thread, recurrent layers are torch's own."""
    before, _IN.torch = _IN.torch, True
    try:
        yield
    finally:
        _IN.torch = before


class _Differentiable(torch.autograd.Function):
    """A recurrent layer, its output by steps, with the derivative of torch's own, which is computed for that."""

    @staticmethod
    def forward(ctx: Any, target: Callable[..., Any], how: tuple[Any, ...], row: Format, *tensors: Tensor) -> _States:
        ctx.save_for_backward(*tensors)
        ctx.target, ctx.how = target, how
        given = _layers(target, _arguments(target, tensors, how))
        assert given is not None
        return _forward(STEPS[operation_of(target).name], given, row)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        wanted = ctx.needs_input_grad[3:]
        with torch.enable_grad(), _by_torch():
            # Hooks of what was given are to see what comes of all this, not what it is made of.
            tensors = [x.view_as(x) for x in ctx.saved_tensors]
            args = _arguments(ctx.target, tensors, ctx.how)
            output, *states = ctx.target(*args)
            results = (output.transpose(0, 1) if args[-1] else output, *states)
        asked = [x for x, one in zip(tensors, wanted, strict=True) if one]
        again = torch.is_grad_enabled()
        found = iter(torch.autograd.grad(results, asked, gradients, create_graph=again, allow_unused=True))
        return None, None, None, *(next(found) if one else None for one in wanted)


def _arguments(target: Callable[..., Any], tensors: Sequence[Tensor], how: tuple[Any, ...]) -> tuple[Any, ...]:
    """Those of the operation, from its tensors and what comes after them."""
    if operation_of(target).name == "lstm":
        return tensors[0], list(tensors[1:3]), list(tensors[3:]), *how
    return tensors[0], tensors[1], list(tensors[2:]), *how
