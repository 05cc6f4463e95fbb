"""A GRU with a way back of its own: what torch computes, forwards bit for bit, and the derivatives that torch takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.measure import recurrent
from auditor.measure.attribute import attribute
from auditor.measure.measure import measure
from auditor.measure.recurrent import gru, with_quick_backward
from tests.subjects import capture_of, normal, seeded

_aten = torch.ops.aten

HOW = [
    {"num_layers": layers, "bidirectional": both, "bias": bias, "batch_first": first}
    for layers, both, bias, first in [
        (1, False, True, False),
        (2, True, True, False),
        (3, True, False, True),
        (2, False, False, False),
        (1, True, True, True),
    ]
]


def arguments(steps: int = 7, **how: Any) -> tuple[Any, ...]:
    """Of `aten.gru.input`, all of which need gradients."""
    layer = seeded(lambda: nn.GRU(5, 6, **how))
    x = normal(3, steps, 5) if how["batch_first"] else normal(steps, 3, 5)
    state = normal(how["num_layers"] * (1 + how["bidirectional"]), 3, 6, seed=1)
    weights = [p.detach().clone().requires_grad_() for p in layer._flat_weights]
    fixed = how["bias"], how["num_layers"], 0.0, False, how["bidirectional"], how["batch_first"]
    return (x.requires_grad_(), state.requires_grad_(), weights, *fixed)


def gradients(found: tuple[Tensor, Tensor], given: tuple[Any, ...], which: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    picked = found if which == 2 else found[which : which + 1]
    total = sum((x * torch.randn(x.shape, generator=generator)).sum() for x in picked)
    assert isinstance(total, Tensor)
    inputs = (given[0], given[1], *given[2])
    return list(torch.autograd.grad(total, inputs, retain_graph=True, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("which", [0, 1, 2], ids=["output", "state", "both"])
@pytest.mark.parametrize("how", HOW, ids=str)
def test_it_is_what_torch_computes_forwards_and_backwards(how: dict[str, Any], which: int) -> None:
    given = arguments(**how)
    ours, theirs = gru(*given), _aten.gru.input(*given)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    for _ in range(2):  # passes share what they read
        for a, b in zip(gradients(ours, given, which), gradients(theirs, given, which), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_single_step() -> None:
    given = arguments(1, **HOW[1])
    ours, theirs = gru(*given), _aten.gru.input(*given)
    for a, b in zip(gradients(ours, given, 2), gradients(theirs, given, 2), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_where_it_stands_for_torch() -> None:
    given = tuple(x.detach() if isinstance(x, Tensor) else x for x in arguments(**HOW[0]))
    assert with_quick_backward(_aten.gru.input, given, {}) is gru
    dropping = (*given[:5], 0.5, True, *given[7:])
    in_double = (given[0].double(), given[1].double(), [w.double() for w in given[2]], *given[3:])
    for other in (dropping, in_double):
        assert with_quick_backward(_aten.gru.input, other, {}) is None
    assert with_quick_backward(_aten.lstm.input, given, {}) is None


def test_the_reference_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = seeded(lambda: nn.GRU(5, 6, 2, bidirectional=True)), normal(9, 2, 5)
    captured = capture_of(model, x)

    def effects() -> list[float]:
        found = attribute(measure(captured, model, ((x,), {}), ("fp16",)))
        return [contribution.isolated for one in found.values() for contribution in one.values()]

    ours = effects()
    monkeypatch.setattr(recurrent, "with_quick_backward", lambda *_: None)
    theirs = effects()
    assert ours == pytest.approx(theirs, rel=1e-4)
    assert ours != theirs and max(ours) > 0
