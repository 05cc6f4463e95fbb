"""Layers of the model next door, written as if everything were FP32."""

import torch
from torch import Tensor, nn


def mean_of_neighbours(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The mean of the rows of `x` that point to each row. x: [n, d]; source, target: [edges]."""
    count = x.new_zeros(x.shape[0]).index_add_(0, target, x.new_ones(target.shape[0]))  # stops at 256 in BF16
    scale = 1 / count.clamp(min=1)
    return torch.zeros(x.shape).index_add_(0, target, x[source] * scale[target][:, None])


class Norm(nn.Module):
    """Root mean square normalization."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        """Rows of x, [n, size], with mean square 1."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain
