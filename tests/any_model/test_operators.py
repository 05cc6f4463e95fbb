"""Operations that are rarely used: each ends in an audit, in FP32 with a reason where it runs no other way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import LAST_BIT, held
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded


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
    "determinants": lambda h: (torch.linalg.slogdet(definite(h)), torch.linalg.matrix_exp(definite(h) / 9)),
    "special": lambda h: torch.special.i0e(h) + torch.special.ndtri(h.sigmoid()) + torch.special.entr(h.exp()),
    "bessel": lambda h: torch.special.bessel_j0(h) + torch.special.airy_ai(h) + torch.special.zeta(h.exp() + 2, 2.0),
    "sorted": lambda h: (h.gather(1, h.argsort(1)), h.median(1), h.kthvalue(2), torch.msort(h)),
    "segments": lambda h: torch.segment_reduce(h, "mean", lengths=torch.tensor([1, 3])),
    "searched": lambda h: (h, torch.bucketize(h, torch.linspace(-1, 1, 5)), torch.searchsorted(h.sort(1).values, h)),
    "running": lambda h: (h.cummax(1), h.logcumsumexp(1), h.cumprod(1), h.diff()),
    "einsum": lambda h: torch.einsum("ab,bc,cd,ad->a", h, h.T, h, h),
    "distances": lambda h: (torch.cdist(h, h + 1, p=1), F.pdist(h), F.cosine_similarity(h, h + 1)),
    "losses": lambda h: (
        F.huber_loss(h, h.flip(0)),
        F.gaussian_nll_loss(h, h.flip(0), h.exp()),
        F.hinge_embedding_loss,
    ),
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


@pytest.mark.parametrize("name", OPERATIONS)
def test_operations(name: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        return Model(lambda m, x: OPERATIONS[name](m.first(x)), first=linear(8, 8)).eval(), ((normal(4, 8),), {})

    # LAPACK's bits go by where in memory the matrices begin. Of sums of 4 terms and a condition number of 2.1, which is
    # `definite`'s here, either of two solutions is known to 8 half units: a 400th of what FP16 errs by, both together.
    held(build, in_fp32=16 * LAST_BIT if name == "least squares" else LAST_BIT)


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str) -> None:
    def build() -> tuple[nn.Module, Any]:
        weight = nn.Parameter(normal(4, 3, 3, 3) / 5)
        model = Model(lambda m, x: IMAGES[name](F.conv2d(x, m.weight)), weight=weight).eval()
        return model, ((normal(1, 3, 8, 8),), {})

    held(build)


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str) -> None:
    held(lambda: (seeded(LAYERS[name]), ((normal(2, 6, 8),), {})))
