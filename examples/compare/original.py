"""A small vision transformer, as its authors wrote it, with random weights."""

import torch
from torch import Tensor, nn

WIDTH, HEADS = 32, 4


class Block(nn.Module):
    """[n, t, WIDTH] -> [n, t, WIDTH]: self-attention and an MLP, each after a norm and beside a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        attended, _ = self.attention(y, y, y, need_weights=False)
        x = x + attended
        return x + self.mlp(self.norm2(x))


class Classifier(nn.Module):
    """Images [n, 3, 16, 16] -> logits [n, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, kernel_size=4, stride=4)
        self.positions = nn.Parameter(0.02 * torch.randn(16, WIDTH))
        self.blocks = nn.Sequential(Block(), Block())
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        x = self.blocks(x + self.positions)
        return self.head(self.norm(x).mean(1))


def get_model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier().eval()


def get_inputs() -> Tensor:
    return torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
