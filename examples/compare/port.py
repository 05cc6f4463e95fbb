"""A port of original.py with other names, a fused product, its own attention and norm, and one mistake."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = 4


class Norm(nn.Module):
    """A layer norm over the last dimension, written out."""

    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.gain, self.shift = nn.Parameter(weight), nn.Parameter(bias)

    def forward(self, x: Tensor) -> Tensor:
        centered = x - x.mean(-1, keepdim=True)
        variance = centered.square().mean(-1, keepdim=True)
        normed = centered * torch.rsqrt(variance + 1e-5)
        return normed * self.gain + self.shift


class Layer(nn.Module):
    """[n, t, d] -> [n, t, d]; p: the tensors of a Block of the original, by name."""

    def __init__(self, p: dict[str, Tensor]) -> None:
        super().__init__()
        self.before, self.after = Norm(p["norm1.weight"], p["norm1.bias"]), Norm(p["norm2.weight"], p["norm2.bias"])
        names = ("attention.in_proj_", "attention.out_proj.", "mlp.0.", "mlp.2.")
        self.weights = nn.ParameterList(p[f"{name}weight"] for name in names)
        self.biases = nn.ParameterList(p[f"{name}bias"] for name in names)

    def product(self, index: int, x: Tensor) -> Tensor:
        return x @ self.weights[index].T + self.biases[index]

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.product(0, self.before(x)).unflatten(-1, (3, HEADS, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.product(1, attended)
        return x + self.product(3, F.gelu(self.product(2, self.after(x))))


class Port(nn.Module):
    """Images [n, 3, 16, 16] -> logits [n, 10]; state: of the original."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        super().__init__()
        self.embedding = nn.Linear(48, 32)
        self.embedding.weight.data = state["patches.weight"].flatten(1)
        self.embedding.bias.data = state["patches.bias"]
        self.places = nn.Parameter(state["positions"])
        parts = ("blocks.0.", "blocks.1.")
        own = [{key.removeprefix(part): x for key, x in state.items() if key.startswith(part)} for part in parts]
        self.layers = nn.ModuleList(map(Layer, own))
        self.norm = Norm(state["norm.weight"], state["norm.bias"])
        self.head = nn.Linear(32, 10)
        self.head.weight.data, self.head.bias.data = state["head.weight"], state["head.bias"]

    def forward(self, images: Tensor) -> Tensor:
        x = F.unfold(images, kernel_size=4, stride=4).transpose(1, 2)
        x = self.embedding(x) + self.places
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(dim=1))


def get_model() -> nn.Module:
    sys.path.insert(0, str(Path(__file__).parent))
    import original

    state = {name: x.clone() for name, x in original.get_model().state_dict().items()}
    return Port(state).eval()


def get_inputs() -> Tensor:
    return torch.rand(8, 3, 16, 16, generator=torch.Generator().manual_seed(1))
