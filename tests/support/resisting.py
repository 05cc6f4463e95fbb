"""Small models, each with one habit that makes tracing, measuring or patching hard; used by test_models_that_resist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Call = tuple[tuple[Any, ...], dict[str, Any]]
MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {}


def resisting(*inputs: Callable[[], Any], **named: Callable[[], Any]) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model class under its own name, with what makes its positional and keyword arguments."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        def build() -> tuple[nn.Module, Call]:
            model = kind()
            return model, (tuple(make() for make in inputs), {key: make() for key, make in named.items()})

        MODELS[kind.__name__] = build
        return kind

    return register


def floats(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def integers(limit: int, *shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(1, limit, shape)


@resisting(floats(4, 16))
class BranchesOnValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.positive = nn.Linear(16, 8)
        self.negative = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.sum().item() > 0:
            return self.positive(hidden)
        return self.negative(hidden)


@resisting(floats(4, 16))
class OverwritesOnItsPath(nn.Module):
    """Branches on values, so it is recorded as it runs, and writes into its input and a buffer on the way."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.register_buffer("seen", torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x.add_(0.5)
        self.seen.add_(x.abs().mean(0))
        if x.sum().item() > 0:
            x[:, :8] = 0.25
        return self.first(x) / self.seen


@resisting(integers(20, 2, 6))
class TiesAndRepeats(nn.Module):
    """One block called twice, and an output layer whose weight is that of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(20, 16)
        self.block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
        self.again = self.block
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        return self.head(self.again(x + self.block(x)))


@resisting(floats(2, 5, 16))
class TorchTransformer(nn.Module):
    """torch's own attention and encoder, which take a fused path in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        attended, weights = self.attention(x, x, x)
        return self.encoder(attended), weights


@resisting(floats(2, 7, 8), lambda: torch.tensor([7, 4]))
class PackedGru(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(8, 12, bidirectional=True, batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed, _ = self.gru(pack_padded_sequence(x, lengths, batch_first=True))
        hidden, _ = pad_packed_sequence(packed, batch_first=True)
        return self.head(hidden)


@resisting(floats(64, 16))
class ReturnsOnlyClasses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).argmax(-1)


@resisting(floats(2, 6, 16))
class HiddenBuffers(nn.Module):
    """Buffers that the state_dict does not hold, one of them made anew in every forward."""

    positions: Tensor
    last: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.linspace(0, 1, 6 * 16).view(6, 16), persistent=False)
        self.register_buffer("last", torch.zeros(16), persistent=False)
        self.mix = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.mix(x + self.positions)
        self.last = mixed.mean((0, 1))
        return mixed - self.last


@resisting(floats(4, 16))
class ProtectsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.router = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            size = hidden.square().mean(-1, keepdim=True).sqrt()
        with torch.autocast(x.device.type, enabled=False):
            share = torch.softmax(self.router(hidden.float()) / 0.1, dim=-1)
        return share / size.clamp_min(0.1)


@resisting(floats(4, 3, 8, 8))
class NormalisesBatches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.drop(self.norm(self.stem(x))).mean((2, 3)))


@resisting(floats(6, 16), integers(4, 6))
class WeighsClasses(nn.Module):
    """Autograd has no derivative by the weights of the classes."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Linear(16, 5)
        self.register_buffer("weights", torch.rand(5) + 0.5)

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.classes(x)
        return scores, nn.functional.cross_entropy(scores, labels, weight=self.weights)


@resisting(floats(4, 16))
class Quantises(nn.Module):
    """Autograd has no derivative of a floor division."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.tanh(self.first(x)) // 0.25
        return self.second(steps * 0.25)


@resisting(floats(3, 3, 12, 12))
class RemembersInstances(nn.Module):
    """An instance norm by running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        self.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


@resisting(floats(512, 512), integers(64, 512))
class CollectsByIndex(nn.Module):
    """Under autocast the messages are low and the sums are not, and adding by index takes one dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        sums = torch.zeros(64, 512).index_add(0, target, self.message(x))
        return self.update(torch.tanh(sums))


@resisting(floats(512, 512), integers(64, 512))
class CollectsInPlace(CollectsByIndex):
    """Operations in place are others to autocast: writing by index refuses two dtypes, an exponential stays low."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        messages = self.message(x).mul_(0.5)
        messages.clamp_(-1, 1).exp_()
        sums = torch.zeros(64, 512)
        sums.index_put_((target,), messages, accumulate=True)
        return self.update(torch.tanh(sums))
