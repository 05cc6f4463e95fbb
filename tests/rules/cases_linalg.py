"""Linear algebra, Fourier transforms and distances that have no half kernels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.rules.case import Case, on, raised, ramp
from tests.support.capturing import Function

IMAGE = ramp(1, 1, 8, 8)
SQUARE = torch.eye(3) * 4 + ramp(3, 3)


def svd(x: Tensor) -> Tensor:
    return torch.linalg.svd(x)[1]


def inverse_and_determinant(x: Tensor) -> Tensor:
    return torch.inverse(x) * torch.linalg.det(x)


def cheap(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=-1) + torch.linalg.multi_dot([x, x, x]).sum(-1) + x.diagonal().sum(-1)


def spectrum(x: Tensor) -> Tensor:
    return torch.fft.rfft(x).abs()


def spectrogram(x: Tensor) -> Tensor:
    return torch.stft(x, 4, window=torch.ones(4), return_complex=True).abs()


def frequencies(x: Tensor) -> Tensor:
    return x * torch.fft.fftshift(torch.fft.fftfreq(8))


def resized(mode: str) -> Function:
    return Function(lambda x: F.interpolate(x, size=(3, 3), mode=mode, antialias=True))


def distances_by_hand(x: Tensor) -> Tensor:
    return (x[:, None] - x[None]).abs().sum(-1)


CASES = (
    Case("svd", *on(svd, SQUARE), {"LIN001": {"linalg_svd"}}, ("LIN002", "LIN003", "LIN004")),
    Case("inverse and determinant", *on(inverse_and_determinant, SQUARE), {"LIN001": {"inverse", "linalg_det"}}),
    Case("cholesky", *on(torch.linalg.cholesky, SQUARE @ SQUARE.T), {"LIN001": {"linalg_cholesky"}}),
    Case("svd, upcast", *on(raised(svd), SQUARE), {}, ("LIN001",)),
    Case("norms and products", *on(cheap, SQUARE), {}, ("LIN001", "LIN003", "LIN004")),
    Case("rfft", *on(spectrum, ramp(2, 8)), {"LIN002": {"fft_rfft"}}, ("LIN001",)),
    Case("stft", *on(spectrogram, ramp(2, 16)), {"LIN002": {"stft"}}),
    Case("rfft, upcast", *on(raised(spectrum), ramp(2, 8)), {}, ("LIN002",)),
    Case("frequencies", *on(frequencies, ramp(2, 8)), {}, ("LIN002",)),
    Case("cdist", *on(torch.cdist, ramp(2, 8), ramp(3, 8)), {"LIN003": {"cdist"}}),
    Case("pdist", *on(torch.pdist, ramp(3, 8)), {"LIN003": {"pdist"}}),
    Case("cdist, upcast", *on(lambda x: torch.cdist(x.float(), x.float()), ramp(3, 8)), {}, ("LIN003",)),
    Case("resized", lambda: resized("bilinear"), (IMAGE,), {"LIN005": {"_upsample_bilinear2d_aa"}}),
    Case("resized, bicubic", lambda: resized("bicubic"), (IMAGE,), {"LIN005": {"_upsample_bicubic2d_aa"}}),
    Case("resized, upcast", *on(raised(resized("bilinear")), IMAGE), {}, ("LIN005",)),
    Case("enlarged", *on(lambda x: F.interpolate(x, scale_factor=2.0), IMAGE), {}, ("LIN005",)),
    Case("distances by hand", *on(distances_by_hand, ramp(3, 8)), {}, ("LIN003",)),
    Case("matrix exponential", *on(torch.matrix_exp, SQUARE), {"LIN004": {"matrix_exp"}}, ("LIN001",)),
    Case(
        "of a difference", *on(lambda x: torch.linalg.matrix_exp(x - x.mT), SQUARE), {"LIN004": {"linalg_matrix_exp"}}
    ),
    Case("matrix exponential, upcast", *on(lambda x: torch.matrix_exp(x.float()), SQUARE), {}, ("LIN004",)),
)
