"""Equivariant networks, and networks for molecules and crystals."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import integers, normal, subject


@subject("e3nn/gate network")
def _() -> Built:
    from e3nn import o3

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.tp = o3.FullyConnectedTensorProduct("8x0e+4x1o", "1x0e+1x1o", "8x0e+4x1o")
            self.l = o3.Linear("8x0e+4x1o", "4x0e")

        def forward(self, x, pos):
            return self.l(self.tp(x, o3.spherical_harmonics("0e+1o", pos, True)))

    return M(), (normal(10, 20), normal(10, 3)), {}


@subject("e3nn/spherical harmonics")
def _() -> Built:
    from e3nn import o3

    return o3.SphericalHarmonics([0, 1, 2, 3], True), (normal(10, 3),), {}


@subject("egnn-pytorch/EGNN")
def _() -> Built:
    from egnn_pytorch import EGNN

    return EGNN(dim=16, m_dim=8, num_nearest_neighbors=3), (normal(1, 8, 16), normal(1, 8, 3)), {}


@subject("egnn-pytorch/EGNN_Network")
def _() -> Built:
    from egnn_pytorch import EGNN_Network

    return (
        EGNN_Network(num_tokens=10, num_positions=16, dim=16, depth=2, num_nearest_neighbors=3),
        (integers(10, 1, 8), normal(1, 8, 3)),
        {},
    )


@subject("se3-transformer-pytorch/SE3Transformer")
def _() -> Built:
    from se3_transformer_pytorch import SE3Transformer

    return (
        SE3Transformer(dim=8, heads=2, dim_head=4, depth=1, num_degrees=2, num_neighbors=3),
        (normal(1, 6, 8), normal(1, 6, 3), torch.ones(1, 6, dtype=torch.bool)),
        {},
    )


@subject("equiformer-pytorch/Equiformer")
def _() -> Built:
    from equiformer_pytorch import Equiformer

    return (
        Equiformer(
            num_tokens=8,
            dim=(4, 4),
            dim_head=(4, 4),
            heads=(2, 2),
            num_degrees=2,
            depth=1,
            num_neighbors=3,
            reduce_dim_out=False,
        ),
        (integers(8, 1, 6), normal(1, 6, 3), torch.ones(1, 6, dtype=torch.bool)),
        {},
    )
