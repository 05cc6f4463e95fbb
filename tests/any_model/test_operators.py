"""Operations that are rarely used, complex numbers, transforms and derivatives: each ends in an audit that holds."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpoints
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jvp, stack_module_state, vmap
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import auditor
from tests.any_model.holding import LAST_BIT, a_format, held, model_of
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned


def definite(h: Tensor) -> Tensor:
    return h @ h.T + 4 * torch.eye(4)


def in_place(h: Tensor) -> Tensor:
    y = h.clone().mul_(2).relu_().pow_(2).t_().squeeze_()
    y[0].zero_()
    y.T[0].mul_(3)
    return y.masked_fill_(y > 1, 0)


OPERATIONS: dict[str, Callable[[Tensor], Any]] = {
    "factors": lambda h: (torch.linalg.cholesky(definite(h)), torch.linalg.qr(h.T).R, torch.linalg.lu(definite(h))),
    "solved": lambda h: (torch.linalg.solve(definite(h), h), torch.linalg.inv(definite(h)), torch.linalg.pinv(h)),
    "least squares": lambda h: torch.linalg.lstsq(definite(h), h).solution,
    "eigenvectors": lambda h: torch.linalg.eigh(definite(h)).eigenvectors.abs(),
    "sorted": lambda h: (h.gather(1, h.argsort(1)), h.median(1), h.kthvalue(2), torch.msort(h)),
    "segments": lambda h: torch.segment_reduce(h, "mean", lengths=torch.tensor([1, 3])),
    "searched": lambda h: (h, torch.bucketize(h, torch.linspace(-1, 1, 5)), torch.searchsorted(h.sort(1).values, h)),
    # a loop that never ends on zeros
    "lobpcg": lambda h: torch.lobpcg(h.T @ h + torch.eye(8), k=2, niter=200)[0],
    "einsum": lambda h: torch.einsum("ab,bc,cd,ad->a", h, h.T, h, h),
    "ctc": lambda h: F.ctc_loss(
        h[:, None].log_softmax(-1), torch.tensor([[1, 2]]), torch.tensor([4]), torch.tensor([2]), reduction="none"
    ),
    "in place": in_place,
    "vmap": lambda h: torch.vmap(lambda a, b: torch.linalg.norm(a) * b.softmax(0), in_dims=(0, 1))(h, h.T),
    "bits": lambda h: (torch.ldexp(*torch.frexp(h)), h.view(torch.int32) >> 8, torch.nextafter(h, h + 1)),
    "drawn": lambda h: (torch.multinomial(h.softmax(1), 2), torch.poisson(h.exp()), h),
}

IMAGES: dict[str, Callable[[Tensor], Any]] = {
    **{
        mode: lambda x, mode=mode: F.interpolate(x, scale_factor=1.5, mode=mode)
        for mode in ("nearest", "bilinear", "bicubic", "area", "nearest-exact")
    },
    "sampled": lambda x: F.grid_sample(x, torch.linspace(-1, 1, 36).view(1, 3, 6, 2), align_corners=False),
    "folded": lambda x: F.fold(F.unfold(x, 3, padding=1) * 2, (6, 6), 3, padding=1),
    "shuffled": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, 2), 2),
    "pooled": lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2),
    "up and down": lambda x: F.conv_transpose2d(F.lp_pool2d(x, 2, 2), x[0, :, None, :3, :3], stride=2),
}

LAYERS: dict[str, Callable[[], nn.Module]] = {
    # Not with the batch first: its products would then be other ones (`bmm` and `mm`) with gradients and without.
    "projected LSTM": lambda: nn.LSTM(8, 16, 2, proj_size=4, bidirectional=True),
    "GRU both ways": lambda: nn.GRU(8, 8, 2, batch_first=True, bidirectional=True),
    "transposed": lambda: nn.ConvTranspose1d(6, 4, 3, 2, output_padding=1),
    "circular": lambda: nn.Conv1d(6, 6, 3, groups=3, padding="same", padding_mode="circular"),
}


@pytest.mark.parametrize("name", thinned(OPERATIONS))
def test_operations(name: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        return model_of(lambda m, x: OPERATIONS[name](m.first(x))), ((normal(4, 8),), {})

    # LAPACK's bits go by where in memory the matrices begin. Of sums of 4 terms and a condition number of 2.1, which is
    # `definite`'s here, either of two solutions is known to 8 half units: a 400th of what FP16 errs by, both together.
    held(build, in_fp32=16 * LAST_BIT if name == "least squares" else LAST_BIT, formats=a_format(name))


@pytest.mark.parametrize("name", thinned(IMAGES))
def test_images(name: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        weight = nn.Parameter(normal(4, 3, 3, 3) / 5)
        model = Model(lambda m, x: IMAGES[name](F.conv2d(x, m.weight)), weight=weight).eval()
        return model, ((normal(1, 3, 8, 8),), {})

    held(build, formats=a_format(name))


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    held(lambda: (seeded(LAYERS[name]), ((normal(2, 6, 8),), {})), formats=a_format(name))


# Models that compute with complex numbers: spectra, rotations, states, and their conjugate views.


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
    "complex linear": lambda m, x: torch.einsum("bi,oi->bo", x.to(torch.complex64), m.square),
    "half complex": lambda m, x: m.first(x) * m.turn.to(torch.complex32).to(torch.complex64).real,
}


def complex_model(name: str) -> nn.Module:
    return model_of(
        MODELS[name],
        weight=nn.Parameter(complexes(3, 3)),
        square=nn.Parameter(complexes(8, 8)),
        poles=nn.Parameter(complexes(3, seed=1) - 2),
        angles=torch.polar(torch.ones(4, 4), torch.outer(torch.arange(4.0), torch.arange(1.0, 5.0))),
        turn=complexes(8).conj(),
        window=torch.hann_window(16),
    )


@pytest.mark.parametrize("name", thinned(MODELS))
def test_it_ends_in_an_audit_and_verified_plans_hold(name: str) -> None:
    held(lambda: (complex_model(name), ((normal(4, 8),), {})), formats=a_format(name))


def test_errors_of_complex_outputs_are_attributed() -> None:
    """In BF16 the layer is all that errs (there is no such transform), so what it alone does is what the plan does."""
    audit = auditor.audit(complex_model("complex output"), (normal(4, 8),), device="cpu")
    (layer,) = (report for report in audit.nodes if "linear" in report.node.op)
    plan = audit.plans["autocast_bf16"]
    assert layer.contributions["bf16"].isolated == pytest.approx(plan.measured_error, rel=0.3)


# Transforms and derivatives in forward: torch.func, forward mode, forces, checkpoints, functions with a backward of their own.


def energy(m: Any, x: Tensor) -> Tensor:
    return torch.tanh(m.first(x)).sum()


def gradients_by_sample(m: Any, x: Tensor) -> Any:
    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(m.first, weights, (row,)).square().sum()

    return vmap(grad(loss), in_dims=(None, 0))(dict(m.first.named_parameters()), x)


def ensemble(m: Any, x: Tensor) -> Tensor:
    weights, buffers = stack_module_state([m.first, m.second])
    return vmap(lambda w, b: functional_call(m.first, (w, b), (x,)))(weights, buffers)


def dual(m: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        out = m.second(torch.tanh(m.first(forward_ad.make_dual(x, torch.ones_like(x)))))
        return tuple(forward_ad.unpack_dual(out))


def forces(m: Any, x: Tensor) -> Any:
    x = x.detach().requires_grad_()
    value = energy(m, x)
    return value, -torch.autograd.grad(value, x)[0]


def checkpointed(reentrant: bool) -> Callable[[Any, Tensor], Any]:
    return lambda m, x: checkpoints.checkpoint(lambda y: m.second(m.first(y).relu()), x, use_reentrant=reentrant)


class Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(x @ weight)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return slope @ weight.t(), x.t() @ slope


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.relu_()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Tensor:
        return slope


CASES: dict[str, Callable[[Any, Tensor], Any]] = {
    "vmap": lambda m, x: vmap(lambda row: m.second(m.first(row).softmax(-1)))(x),
    "grad": lambda m, x: m.second(grad(lambda y: energy(m, y))(x)),
    "hessian": lambda m, x: vmap(hessian(lambda row: energy(m, row)))(x),
    "jvp": lambda m, x: jvp(lambda y: torch.tanh(m.first(y)), (x,), (torch.ones_like(x),)),
    "gradients by sample": gradients_by_sample,
    "ensemble": ensemble,
    "forward mode": dual,
    "forces": forces,
    "reentrant checkpoint": checkpointed(True),
    "checkpoint": checkpointed(False),
    "function that saves": lambda m, x: m.second(Saving.apply(m.first(x), m.second.weight)),
    "function in place": lambda m, x: m.second(InPlace.apply(m.first(x))),
}


@pytest.mark.parametrize("name", thinned(CASES, 2))
def test_transforms_and_derivatives(name: str) -> None:
    audit = held(lambda: (model_of(CASES[name]), ((normal(4, 8),), {})), formats=("fp16",))
    assert sum((report.flops or 0) > 0 for report in audit.nodes) > 0


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


def attended(m: Any, x: Tensor, **options: Any) -> Tensor:
    return flex_attention(*m.first(x).chunk(3, -1), **options)


ATTENTION: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "block mask": lambda m, x: attended(m, x, block_mask=create_block_mask(causal, None, None, 16, 16, device="cpu")),
    "score_mod": lambda m, x: attended(m, x, score_mod=lambda score, b, h, q, k: score + (q - k) * 0.01),
    "learnt bias": lambda m, x: attended(m, x, score_mod=lambda score, b, h, q, k: score + m.bias[(q - k).abs()]),
}


@pytest.mark.parametrize("name", thinned(ATTENTION))
def test_flex_attention(name: str) -> None:
    def build() -> Any:
        bias = nn.Parameter(normal(16, seed=3) / 8)
        return Model(ATTENTION[name], first=linear(16, 48), bias=bias).eval(), ((normal(1, 2, 16, 16),), {})

    held(build, formats=("bf16",))
