"""First and last layers by graph position, whatever they are called."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.rules.case import Case, ramp


class Tokens(nn.Module):
    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.word = nn.Embedding(vocabulary, 8)
        self.position = nn.Embedding(4, 8)
        self.register_buffer("ids", torch.arange(4))
        self.norm = nn.LayerNorm(8)
        self.body = nn.Linear(8, 8)
        self.head = nn.Linear(8, vocabulary, bias=False)
        self.head.weight = self.word.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.norm(self.word(tokens) + self.position(self.ids))
        return self.head(self.body(x).relu())


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.boxes, self.classes = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        return self.boxes(x).sigmoid(), self.classes(x).view(-1)


class HeadUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.weight = nn.Conv2d(3, 4, 3), nn.Parameter(ramp(4096, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.stem(x).mean((2, 3)).float() @ self.weight.float().t()


class HeadProtected(HeadUpcast):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).mean((2, 3))
        with torch.autocast("cpu", enabled=False):
            return x.float() @ self.weight.float().t()


class RouterUpcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(8, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x.to(torch.float32)).softmax(-1)
        return self.out(weights.to(x.dtype))


class RouterIgnored(RouterUpcast):
    """Its choice is computed, and every token goes the same way all the same."""

    def forward(self, x: Tensor) -> Tensor:
        self.gate(x.to(torch.float32)).topk(2)
        return self.out(x[:, :4])


def normed() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.LayerNorm(8))


ALL = ("BND001", "BND002", "BND003", "BND004", "BND005")
IDS = torch.tensor([[1, 2, 3, 0]])

CASES = (
    Case(
        "tokens, small vocabulary",
        lambda: Tokens(16),
        (IDS,),
        {"BND002": {"linear_1"}, "BND003": {"embedding", "embedding_1"}},
        ("BND001", "BND004"),
    ),
    Case(
        "tokens, wide vocabulary",
        lambda: Tokens(4096),
        (IDS,),
        {"BND002": {"linear_1"}, "BND003": {"embedding", "embedding_1"}, "BND004": {"linear_1"}},
        ("BND001",),
    ),
    Case(
        "norms are no layers",
        normed,
        (ramp(2, 8),),
        {"BND001": {"linear"}, "BND002": {"linear_1"}},
        ("BND003", "BND004"),
    ),
    Case("two heads", TwoHeads, (ramp(2, 8),), {"BND001": {"linear"}, "BND002": {"linear_1", "linear_2"}}),
    Case(
        "head upcast by hand",
        HeadUpcast,
        (ramp(1, 3, 8, 8),),
        {"BND001": {"conv2d"}, "BND005": {"matmul"}},
        ("BND002", "BND003", "BND004"),
    ),
    Case(
        "one wide layer",
        lambda: nn.Linear(8, 5000),
        (ramp(2, 8),),
        {"BND001": {"linear"}, "BND002": {"linear"}, "BND004": {"linear"}},
    ),
    Case("head protected", HeadProtected, (ramp(1, 3, 8, 8),), {}, ("BND002", "BND004", "BND005")),
    Case("router upcast", RouterUpcast, (ramp(2, 8),), {"BND002": {"linear_1"}, "BND005": {"linear"}}),
    Case("router ignored", RouterIgnored, (ramp(2, 8),), {}, ("BND005", "RTE001")),
    Case("no weights", lambda: nn.Softmax(-1), (ramp(2, 8),), {}, ALL),
)
