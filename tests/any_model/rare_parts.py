"""Parts that few models have: rare operations, modules that hold odd things, and values that are passed around oddly."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.any_model.parts import Holding, Make, Part, kept, linear

RARE: dict[str, Make] = {}
ODD: dict[str, Make] = {}


class Pair(NamedTuple):
    """What a module hands to the next one."""

    value: Tensor
    scale: float


class Marked(Tensor):
    """A subclass of tensors that does nothing."""


@kept(RARE)
def decomposed(k: int) -> Part:
    def square(h: Tensor) -> Tensor:
        return h.T @ h / 8 + torch.eye(8)

    return [
        lambda h: h @ torch.linalg.svd(square(h)).U,
        lambda h: h * torch.linalg.eigh(square(h)).eigenvalues,
        lambda h: h * torch.linalg.slogdet(square(h)).logabsdet,
        lambda h: h @ torch.linalg.pinv(square(h)),
        lambda h: h @ torch.linalg.matrix_exp(square(h) / 4),
        lambda h: torch.linalg.solve_triangular(square(h), h.T, upper=False).T / 8,
        lambda h: h * torch.linalg.det(square(h)).tanh(),
        lambda h: h @ torch.linalg.lu_factor(square(h)).LU,
    ][k]


@kept(RARE)
def special(k: int) -> Part:
    return [
        lambda h: torch.lgamma(h.abs() + 1).tanh(),
        lambda h: torch.digamma(h.abs() + 1).tanh(),
        lambda h: torch.special.i0e(h) * h,
        lambda h: torch.xlogy(h.abs(), h.abs()).tanh(),
        lambda h: torch.frexp(h).mantissa,
        lambda h: torch.erfinv(h.tanh() * 0.9),
        lambda h: torch.logcumsumexp(h, -1) - h,
        lambda h: torch.special.bessel_j0(h) + h,
    ][k]


@kept(RARE)
def picked(k: int) -> Part:
    return [
        lambda h: h.kthvalue(3, -1, keepdim=True).values + h,
        lambda h: h.cummax(-1).values,
        lambda h: h.clone().index_put_((torch.tensor([0, 0]),), torch.ones(2, 8), accumulate=True),
        lambda h: h.masked_scatter(h > 0, h.flip(0)),
        lambda h: torch.take_along_dim(h, h.argsort(-1), -1),
        lambda h: h + torch.searchsorted(torch.linspace(-1, 1, 8), h.contiguous()).float() / 8,
        lambda h: h.renorm(2, 0, 1.0),
        lambda h: h + torch.unique_consecutive(h.round()).float().mean(),
    ][k]


@kept(RARE)
def signals(k: int) -> Part:
    def sampled(h: Tensor) -> Tensor:
        image, grid = (
            h.reshape(-1, 1, 2, 4),
            F.affine_grid(torch.eye(2, 3)[None].expand(len(h), 2, 3), [len(h), 1, 2, 4]),
        )
        return F.grid_sample(image, grid, align_corners=False).reshape(-1, 8)

    return [
        lambda h: torch.istft(torch.stft(h, 4, return_complex=True, window=torch.ones(4)), 4, window=torch.ones(4)),
        sampled,
        lambda h: F.fold(F.unfold(h.view(-1, 1, 2, 4), 3, padding=1), (2, 4), 3, padding=1).reshape(-1, 8) / 9,
        lambda h: F.interpolate(h[:, None], size=8, mode="linear")[:, 0],
        lambda h: F.local_response_norm(h.view(-1, 2, 2, 2), 2).reshape(-1, 8),
        lambda h: F.lp_pool1d(h[:, None], 2, 2).repeat(1, 1, 2)[:, 0],
        lambda h: torch.tensordot(h, torch.eye(8), 1) + torch.kron(torch.ones(1, 2), h[:, :4]),
        lambda h: (
            h - F.cross_entropy(h, h.argmax(-1)) + F.kl_div(h.log_softmax(-1), h.softmax(-1), reduction="batchmean")
        ),
    ][k]


@kept(RARE)
def differentials(k: int) -> Part:
    def run(m: Any, h: Tensor) -> Tensor:
        if k % 4 == 0:
            return torch.func.jvp(m.layer, (h,), (torch.ones_like(h),))[1]
        if k % 4 == 1:
            return torch.func.jacrev(lambda x: m.layer(x).tanh().sum(0))(h).sum((0, 1))
        if k % 4 == 2:
            return torch.vmap(lambda row: row + torch.randn_like(row), randomness="different")(m.layer(h))
        return checkpoint(m.layer, h, use_reentrant=True)

    return Holding(run, layer=linear())


@kept(ODD)
def dtypes_of_their_own(k: int) -> Part:
    return [
        Holding(lambda m, h: m.layer(h.half()).float(), layer=linear().half()),
        Holding(lambda m, h: m.layer(h.bfloat16()).to(h.dtype), layer=linear().bfloat16()),
        Holding(lambda m, h: m.layer(h.double()).to(h.dtype), layer=linear().double()),
        Holding(
            lambda m, h: torch.view_as_real(torch.view_as_complex(h.reshape(-1, 4, 2).float()) * m.w).reshape(-1, 8),
            w=nn.Parameter(torch.randn(4, dtype=torch.complex64)),
        ),
    ][k % 4]


@kept(ODD)
def held_oddly(k: int) -> Part:
    layer = linear()
    outside = torch.linspace(0.5, 1, 8)

    def listed(m: Any, h: Tensor) -> Tensor:
        return m.others[0](h) * m.others[1]

    def missing(m: Any, h: Tensor) -> Tensor:
        return h * m.scale if m.scale is not None else m.layer(h)

    unset = Holding(missing, layer=layer)
    unset.register_buffer("scale", None)
    frozen = linear().requires_grad_(False)
    return [
        Holding(listed, others=[layer, outside]),
        functools.partial(F.linear, weight=layer.weight.detach(), bias=None),
        lambda h: h * outside,
        unset,
        Holding(lambda m, h: m.parts["a"] * h, parts=nn.ParameterDict({"a": nn.Parameter(torch.ones(8) / 2)})),
        Holding(lambda m, h: m.frozen(h), frozen=frozen),
        Holding(lambda m, h: F.linear(h, m.layer.weight.T, m.layer.bias) @ m.layer.weight, layer=layer),
        Holding(lambda m, h: F.embedding(h.argmax(-1), m.layer.weight) + m.layer(h), layer=layer),
    ][k]


@kept(ODD)
def handed_oddly(k: int) -> Part:
    layer = linear()
    return [
        Holding(lambda m, h: (lambda pair: pair.value * pair.scale)(Pair(m.layer(h), 0.5)), layer=layer),
        Holding(lambda m, h: m.layer(h.as_subclass(Marked)).as_subclass(Tensor), layer=layer),
        Holding(lambda m, h: m.layer(input=h), layer=layer),
        Holding(lambda m, h: torch.stack(list(map(m.layer, h))), layer=layer),
        Holding(lambda m, h: m.layer(torch.from_numpy(h.detach().numpy().copy())), layer=layer),
        Holding(lambda m, h: m.layer(torch.tensor(h.detach().tolist())), layer=layer),
        Holding(lambda m, h: m.layer(h[:0]).sum() + h, layer=layer),
        Holding(lambda m, h: h if m.layer is None else h.view_as(h), layer=layer),
    ][k]
