"""GRU layers with a way back of few operations a step: torch keeps nine for each, both ways and all layers one after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..formats.entries import is_plain
from ..trees import tensors_in

_GRU = torch.ops.aten.gru.input


class _Layers(NamedTuple):
    """How the weights of a GRU lie: those of a layer, and of a direction in it, one after the other."""

    biased: bool
    layers: int
    ways: int
    batch_first: bool

    def weights(self, layer: int, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Of one layer."""
        size = self.ways * (4 if self.biased else 2)
        return given[layer * size : (layer + 1) * size]


def with_quick_backward(target: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any] | None:
    """What computes this call of an operation, if it is a GRU in FP32 on a CPU that drops nothing between its layers."""
    if target is not _GRU or kwargs or len(args) != 9 or (args[5] and args[6]):
        return None
    fits = all(type(x) is Tensor and is_plain(x) and x.dtype is torch.float32 for x in tensors_in(args))
    return gru if fits and args[0].device.type == "cpu" and args[0].numel() else None


def gru(
    x: Tensor,
    state: Tensor,
    weights: list[Tensor],
    biased: bool,
    layers: int,
    _: float,
    __: bool,
    both: bool,
    first: bool,
) -> tuple[Tensor, Tensor]:
    """`aten.gru.input` with its derivative, without dropout. Shapes: [t, b, i], [layers, b, h] -> [t, b, h], [layers, b, h]."""
    how = _Layers(biased, layers, 2 if both else 1, first)
    found: tuple[Tensor, Tensor] = _Gru.apply(how, x, state, *weights)  # type: ignore[no-untyped-call]
    return found


class _Gru(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, how: _Layers, x: Tensor, state: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, state, *weights)
        ctx.how, ctx.read = how, None
        found: tuple[Tensor, Tensor] = _GRU(
            x, state, list(weights), how.biased, how.layers, 0.0, False, how.ways == 2, how.batch_first
        )
        return found

    @staticmethod
    def backward(ctx: Any, by_output: Tensor, by_state: Tensor) -> tuple[Tensor | None, ...]:
        x, state, *weights = ctx.saved_tensors
        how: _Layers = ctx.how
        if how.batch_first:
            x, by_output = x.transpose(0, 1), by_output.transpose(0, 1)
        states, lasts = torch.split(state, how.ways), torch.split(by_state, how.ways)
        if ctx.read is None:
            ctx.read = _read(how, x, states, tuple(weights))
        by_weights: list[Tensor] = []
        firsts: list[Tensor] = []
        for layer in reversed(range(how.layers)):
            by_output, before, own = _back(ctx.read[layer], by_output, lasts[layer])
            by_weights[:0], firsts[:0] = own, [before]
        by_x = by_output.transpose(0, 1) if how.batch_first else by_output
        return None, by_x, torch.cat(firsts), *by_weights


class _Read(NamedTuple):
    """What the way back through a layer reads, the second direction turned round. Shapes: [t, ways, b, ...], weights [ways, ...].

    of_input, of_state: what the derivative by a state is multiplied with to be that by the gates, [.., 3, h]; update: how
    much of a state goes on.
    """

    x: Tensor
    before: Tensor
    of_input: Tensor
    of_state: Tensor
    update: Tensor
    weight_input: Tensor
    weight_state: Tensor
    biased: bool


def _read(how: _Layers, x: Tensor, states: tuple[Tensor, ...], weights: tuple[Tensor, ...]) -> list[_Read]:
    found = []
    for layer in range(how.layers):
        own = how.weights(layer, weights)
        output, _ = _GRU(x, states[layer], list(own), how.biased, 1, 0.0, False, how.ways == 2, False)
        found.append(_gates(how, x, states[layer], output, own))
        x = output
    return found


def _gates(how: _Layers, x: Tensor, state: Tensor, output: Tensor, weights: tuple[Tensor, ...]) -> _Read:
    """All steps at once: every state is known."""
    by_way = [weights[i :: len(weights) // how.ways] for i in range(len(weights) // how.ways)]
    of_input, of_state, *biases = (torch.stack(each) for each in by_way)
    added = [bias[:, None] for bias in biases] or [torch.zeros(1), torch.zeros(1)]
    x = _turned(torch.stack([x] * how.ways, 1))
    states = _turned(output.view(*output.shape[:2], how.ways, -1).transpose(1, 2))
    before = torch.cat((state[None], states[:-1]))
    first = _by_gate(_times(x, of_input.mT) + added[0])
    second = _by_gate(_times(before, of_state.mT) + added[1])
    reset, update = (
        torch.sigmoid(first[..., 0, :] + second[..., 0, :]),
        torch.sigmoid(first[..., 1, :] + second[..., 1, :]),
    )
    fresh = torch.tanh(first[..., 2, :] + reset * second[..., 2, :])
    by_fresh = (1 - update) * (1 - fresh * fresh)
    by_reset = by_fresh * second[..., 2, :] * reset * (1 - reset)
    by_update = (before - fresh) * update * (1 - update)
    return _Read(
        x,
        before,
        torch.stack((by_reset, by_update, by_fresh), -2),
        torch.stack((by_reset, by_update, by_fresh * reset), -2),
        update,
        of_input,
        of_state,
        bool(biases),
    )


def _back(read: _Read, by_output: Tensor, last: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Derivatives by a layer's input, by its first states, and by its weights."""
    ways, size = read.update.shape[1], read.update.shape[-1]
    by_output = _turned(by_output.reshape(*by_output.shape[:2], ways, size).transpose(1, 2))
    gone, found = last, []
    steps = zip(by_output.unbind(), read.of_state.unbind(), read.update.unbind(), strict=True)
    for given, factors, update in reversed(list(steps)):
        by_state = given + gone
        found.append(by_state)
        by_gates = (by_state[:, :, None] * factors).flatten(-2)
        gone = torch.baddbmm(by_state * update, by_gates, read.weight_state)
    by_states = torch.stack(found[::-1])[..., None, :]
    first, second = ((by_states * factors).flatten(-2) for factors in (read.of_input, read.of_state))
    by_x = _turned(_times(first, read.weight_input)).sum(1)
    by_weights = []
    for way in range(ways):
        ours, theirs = first[:, way].flatten(0, 1), second[:, way].flatten(0, 1)
        by_weights += [ours.T @ read.x[:, way].flatten(0, 1), theirs.T @ read.before[:, way].flatten(0, 1)]
        by_weights += [ours.sum(0), theirs.sum(0)] if read.biased else []
    return by_x, gone, by_weights


def _times(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each direction. Shapes: [t, ways, b, n], [ways, n, m] -> [t, ways, b, m]."""
    rows = x.transpose(0, 1).flatten(1, 2) @ weight
    return rows.view(len(rows), *x.shape[::2][:2], -1).transpose(0, 1)


def _by_gate(x: Tensor) -> Tensor:
    """Shape [.., 3 h] -> [.., 3, h]."""
    return x.reshape(*x.shape[:-1], 3, -1)


def _turned(x: Tensor) -> Tensor:
    """Steps of a second direction in the order that it takes them, or back again. Shape [t, ways, ...]."""
    return torch.stack((x[:, 0], x[:, 1].flip(0)), 1) if x.shape[1] == 2 else x
