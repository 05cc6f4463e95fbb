"""Recurrent layers in FP16 against torch's own kernels, which compute the same: bit for bit where no sum depends on its order."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import auditor
from auditor.ops.kernels import UnsupportedInFormat, run_op
from tests.subjects import normal, seeded
from tests.unit.ops.test_cells import whole_numbers

aten = torch.ops.aten
FP16 = torch.float16
KINDS: dict[str, Callable[..., nn.RNNBase]] = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn_tanh": nn.RNN, "rnn_relu": nn.RNN}
STEPS, BATCH, ENTERING, SIZE = 3, 4, 5, 6


def called(
    name: str, layers: int = 1, ways: int = 1, first: bool = False, biased: bool = True, **other: Any
) -> tuple[Any, ...]:
    """Arguments of the operation, in half: weights are few bits, so that float32 holds every sum exactly."""
    how = {"bidirectional": ways == 2, "batch_first": first, "bias": biased}
    module = KINDS[name](ENTERING, SIZE, layers, **how)
    x = whole_numbers(*(BATCH, STEPS) if first else (STEPS, BATCH), ENTERING)
    state = whole_numbers(layers * ways, BATCH, SIZE).half()
    weights = [whole_numbers(*w.shape).half().requires_grad_() for w in module._flat_weights]
    dropout, train = other.get("dropout", 0.0), other.get("train", False)
    states: Any = [state, state / 2] if name == "lstm" else state
    return x.half().requires_grad_(), states, weights, biased, layers, dropout, train, ways == 2, first


def op_of(name: str) -> Any:
    return getattr(aten, name).input


def gradients(results: Any, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    return torch.autograd.grad([(x.float() * normal(*x.shape)).sum() for x in results], [args[0], *args[2]])


class HalfProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that take most of the time of torch's own kernels."""

    seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += func.overloadpacket in (aten.mm, aten.addmm, aten.bmm) and args[-1].dtype is FP16
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("name", KINDS)
def test_a_layer_is_torchs_to_the_bit_with_gradients_and_without(name: str) -> None:
    for layers, ways, first, biased in product((1, 2), (1, 2), (False, True), (False, True)):
        args = called(name, layers, ways, first, biased)
        expected, found = op_of(name)(*args), run_op(op_of(name), args, {})
        with torch.no_grad():
            plain = run_op(op_of(name), args, {})
        for theirs, ours, bare in zip(expected, found, plain, strict=True):
            assert torch.equal(theirs, ours) and torch.equal(theirs, bare)
            assert theirs.stride() == ours.stride() == bare.stride() and ours.requires_grad and not bare.requires_grad
        for theirs, ours in zip(gradients(expected, args), gradients(found, args), strict=True):
            assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", KINDS)
def test_no_product_is_in_half(name: str) -> None:
    args = called(name, 2, 2)
    with torch.no_grad(), HalfProducts() as ours:
        run_op(op_of(name), args, {})
    with HalfProducts() as theirs:
        op_of(name)(*args)
    assert not ours.seen and theirs.seen > 4 * STEPS


def test_products_round_once_and_every_gate_too() -> None:
    # 1 + 2^-11 + 2^-20 rounds up to 1 + 2^-10, with its bias added before.
    x, state = torch.ones(1, 1, 1).half(), torch.ones(1, 1, 1).half()
    weights = [torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1), torch.tensor([2**-11 + 2**-20])]
    args = (x, state, [w.half() for w in weights], True, 1, 0.0, False, False, False)
    assert run_op(aten.rnn_relu.input, args, {})[0].item() == 1 + 2**-10
    # What comes from the input is another product: 2^-11 of it, added to 1, rounds to the even 1.
    weights = [torch.tensor([[2**-11]]), torch.ones(1, 1), torch.zeros(1), torch.zeros(1)]
    args = (x, state, [w.half() for w in weights], True, 1, 0.0, False, False, False)
    assert run_op(aten.rnn_relu.input, args, {})[0].item() == 1.0


def test_over_many_steps_the_error_is_that_of_torchs_kernel() -> None:
    """The order of a sum in float32 shows in some last places of FP16, which later steps carry on."""
    gru, x = seeded(lambda: nn.GRU(64, 64, 2, bidirectional=True)), normal(100, 2, 64)
    with torch.no_grad():
        exact = gru(x)[0]
        args = (x.half(), torch.zeros(4, 2, 64).half(), [w.half() for w in gru.parameters()], True, 2, 0.0)
        ours, theirs = (
            (found[0] - exact).norm() / exact.norm()
            for found in (
                run_op(aten.gru.input, (*args, False, True, False), {}),
                aten.gru.input(*args, False, True, False),
            )
        )
    assert 0.95 < ours / theirs < 1.05 and 1e-4 < ours < 2e-3


def test_what_does_not_fit_is_left_to_torch() -> None:
    grown = [torch.zeros(4 * SIZE, 3).half(), torch.zeros(4 * SIZE, 2).half(), torch.zeros(2, SIZE).half()]
    x, states = normal(STEPS, BATCH, 3).half(), [torch.zeros(1, BATCH, 2).half(), torch.zeros(1, BATCH, SIZE).half()]
    projected = (x, states, grown, False, 1, 0.0, False, False, False)
    lengths = torch.tensor([2, 1])
    rows, state, weights, *_ = called("gru")
    packed = (rows[0, :3], lengths, state[:, :2], weights, True, 1, 0.0, False, False)
    for op, args in ((aten.lstm.input, projected), (aten.gru.data, packed)):
        for theirs, ours in zip(op(*args), run_op(op, args, {}), strict=True):
            assert torch.equal(theirs, ours)
    dropping = called("gru", 2, dropout=0.5, train=True)
    torch.manual_seed(0)
    expected = aten.gru.input(*dropping)
    torch.manual_seed(0)
    assert torch.equal(run_op(aten.gru.input, dropping, {})[0], expected[0])
    misfit = (dropping[0], dropping[1][:, :1], *dropping[2:])
    with pytest.raises(UnsupportedInFormat):
        run_op(aten.gru.input, misfit, {})


def test_the_second_derivative_and_that_along_with_the_run_are_torchs() -> None:
    """The second up to the order in which FP16 adds what comes from each graph."""
    args = called("gru", 2)

    def twice(results: Any) -> Tensor:
        (once,) = torch.autograd.grad(results[0].float().pow(2).sum(), args[0], create_graph=True)
        (found,) = torch.autograd.grad(once.float().pow(2).sum(), args[2][0])
        return found

    ours, theirs = twice(run_op(aten.gru.input, args, {})).float(), twice(aten.gru.input(*args)).float()
    assert (ours - theirs).norm() < 5e-3 * theirs.norm()
    with torch.autograd.forward_ad.dual_level():
        dual = (torch.autograd.forward_ad.make_dual(args[0].detach(), torch.ones_like(args[0])), *args[1:])
        tangents = [
            torch.autograd.forward_ad.unpack_dual(found[0]).tangent
            for found in (run_op(aten.gru.input, dual, {}), aten.gru.input(*dual))
        ]
    assert tangents[0] is not None and torch.equal(*tangents)


def test_hooks_see_one_gradient_and_what_is_returned_may_be_written_to() -> None:
    found = []
    for compute in (lambda args: run_op(aten.gru.input, args, {}), lambda args: aten.gru.input(*args)):
        args, seen = called("gru", first=True), list[Tensor]()
        args[0].register_hook(seen.append)
        output = compute(args)[0]
        output.mul_(2)[0].add_(1)
        torch.autograd.backward(output.float().pow(2).sum())
        assert len(seen) == 1 and args[0].grad is not None
        found.append([args[0].grad, *(w.grad for w in args[2])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_step_of_training_in_an_imitated_run(kind: Callable[..., nn.Module]) -> None:
    """Backwards, inside the run, torch's own layer is computed, not this one once more."""
    layer, x = seeded(lambda: kind(8, 8, 2, bidirectional=True, batch_first=True)), normal(2, 5, 8)
    with auditor.imitated():
        with torch.autocast("cuda", dtype=FP16):
            with torch.no_grad():
                plain = layer(x)[0]
            output = layer(x)[0]
        output.float().pow(2).sum().backward()
    assert torch.equal(plain, output)
    low = [w.grad.clone() for w in layer.parameters() if w.grad is not None]
    layer.zero_grad()
    layer(x)[0].pow(2).sum().backward()
    assert len(low) == len(list(layer.parameters()))
    for ours, weight in zip(low, layer.parameters(), strict=True):
        assert weight.grad is not None and 0 < (ours - weight.grad).norm() < 0.02 * weight.grad.norm()
