"""Models that compute with complex numbers: spectra, rotations, states, and their conjugate views."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from tests.any_model.holding import held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal


def complexes(*shape: int, seed: int = 0) -> Tensor:
    return torch.complex(normal(*shape, seed=seed), normal(*shape, seed=seed + 100))


def spectral(m: Any, x: Tensor) -> Tensor:
    """A Fourier neural operator's layer: the low modes times complex weights, written into zeros."""
    modes = torch.fft.rfft(m.first(x))
    out = torch.zeros_like(modes)
    out[:, :3] = torch.einsum("bi,io->bo", modes[:, :3], m.weight)
    return m.second(torch.fft.irfft(out, n=8))


def diagonal_state_space(m: Any, x: Tensor) -> Tensor:
    """S4D: a kernel from complex poles, applied as a product of spectra."""
    poles = m.poles * 0.1
    kernel = torch.einsum("n,nl->l", m.weight[0] / m.poles, torch.exp(poles[:, None] * torch.arange(8))).real
    y = torch.fft.irfft(torch.fft.rfft(m.first(x), n=16) * torch.fft.rfft(kernel, n=16), n=16)
    return m.second(y[:, :8])


def complex_state(m: Any, x: Tensor) -> Tensor:
    state, found = torch.zeros(3, dtype=torch.complex64), []
    for row in m.first(x):
        state = torch.exp(m.poles) * state + row[:3].to(torch.complex64) @ m.weight
        found.append(state.real)
    return torch.stack(found)


def rotary(m: Any, x: Tensor) -> Tensor:
    """As in Meta's Llama: queries and keys are turned as complex numbers, in FP32."""

    def turned(y: Tensor) -> Tensor:
        pairs = torch.view_as_complex(y.float().reshape(4, 4, 2))
        return torch.view_as_real(pairs * m.angles).flatten(1).type_as(y)

    q, k, v = turned(m.first(x))[None], turned(m.second(x))[None], m.third(x)[None]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)[0]


def rotary_in_its_own_dtype(m: Any, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(m.first(x).reshape(4, 4, 2))
    return m.second(torch.view_as_real(pairs * m.angles).flatten(1))


def written_into(m: Any, x: Tensor) -> Tensor:
    z = torch.fft.fft(m.first(x))
    z.real.mul_(2)
    z.conj().mul_(0.5)
    torch.view_as_real(z)[..., 1].add_(m.second(x))
    return z.abs()


def spectrum(m: Any, x: Tensor) -> Tensor:
    return torch.fft.fft(m.first(x))


def mel(m: Any, x: Tensor) -> Tensor:
    found = torch.stft(x.reshape(1, -1), 16, 4, window=m.window, return_complex=True)
    return m.first(found.abs().square()[0].T[:, :8].add(1e-6).log())


MODELS: dict[str, Callable[..., Any]] = {
    "spectral convolution": spectral,
    "state space": diagonal_state_space,
    "complex state": complex_state,
    "rotary": rotary,
    "rotary in its own dtype": rotary_in_its_own_dtype,
    "writes into parts": written_into,
    "mel front end": mel,
    "stft and back": lambda m, x: torch.istft(
        torch.stft(m.first(x).reshape(1, -1), 16, 4, window=m.window, return_complex=True), 16, 4, window=m.window
    ),
    "complex output": spectrum,
    "conjugate output": lambda m, x: spectrum(m, x).conj(),
    "negative output": lambda m, x: spectrum(m, x).conj().imag,
    "negative view into a layer": lambda m, x: m.second(spectrum(m, x).conj().imag),
    "adjoint": lambda m, x: (spectrum(m, x) @ spectrum(m, x).mH).abs(),
    "conjugate buffer": lambda m, x: m.second((m.first(x) * m.turn).real),
    "polar and angle": lambda m, x: torch.polar(m.first(x).exp(), spectrum(m, x).angle()).real,
    "complex linear": lambda m, x: torch.einsum("bi,oi->bo", x.to(torch.complex64), m.square),
    "stacked and padded": lambda m, x: F.pad(torch.stack([spectrum(m, x), spectrum(m, x).conj()]), (1, 1)),
    "half complex": lambda m, x: m.first(x) * m.turn.to(torch.complex32).to(torch.complex64).real,
    "equal": lambda m, x: m.second(spectrum(m, x).real if torch.equal(m.turn, m.turn.clone()) else x),
}


def model_of(name: str) -> nn.Module:
    return Model(
        MODELS[name],
        first=linear(8, 8),
        second=linear(8, 8, seed=1),
        third=linear(8, 8, seed=2),
        weight=nn.Parameter(complexes(3, 3)),
        square=nn.Parameter(complexes(8, 8)),
        poles=nn.Parameter(complexes(3, seed=1) - 2),
        angles=torch.polar(torch.ones(4, 4), torch.outer(torch.arange(4.0), torch.arange(1.0, 5.0))),
        turn=complexes(8).conj(),
        window=torch.hann_window(16),
    ).eval()


@pytest.mark.parametrize("name", MODELS)
def test_it_ends_in_an_audit_and_verified_plans_hold(name: str) -> None:
    held(lambda: (model_of(name), ((normal(4, 8),), {})))


def test_errors_of_complex_outputs_are_attributed() -> None:
    """In BF16 the layer is all that errs (there is no such transform), so what it alone does is what the plan does."""
    audit = auditor.audit(model_of("complex output"), (normal(4, 8),), device="cpu")
    (layer,) = (report for report in audit.nodes if "linear" in report.node.op)
    plan = audit.plans["autocast_bf16"]
    assert plan.measured_error is not None
    assert layer.contributions["bf16"].isolated == pytest.approx(plan.measured_error, rel=0.3)
