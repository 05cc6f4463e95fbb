"""Small models, each with one habit that makes tracing, measuring or patching hard; used by test_models_that_resist."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from tests.support.replaying import Model

Call = tuple[tuple[Any, ...], dict[str, Any]]


def overwrites(m: Any, x: Tensor) -> Tensor:
    """Branches on values, so it is recorded as it runs, and writes into its input and a buffer on the way."""
    x.add_(0.5)
    m.seen.add_(x.abs().mean(0))
    if x.sum().item() > 0:
        x[:, :8] = 0.25
    return m.first(x) / m.seen


def ties(m: Any, ids: Tensor) -> Tensor:
    """Calls one block twice; its output layer has the weight of the embedding."""
    x = m.tokens(ids)
    return m.head(m.again(x + m.block(x)))


def tied() -> nn.Module:
    tokens, head = nn.Embedding(20, 16), nn.Linear(16, 20, bias=False)
    head.weight = tokens.weight
    block = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU())
    return Model(ties, tokens=tokens, block=block, again=block, head=head)


def attends(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """By torch's own attention and encoder, which take a fused path in eval mode."""
    attended, weights = m.attention(x, x, x)
    return m.encoder(attended), weights


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
    return Model(attends, attention=nn.MultiheadAttention(16, 2, batch_first=True), encoder=encoder)


def packs(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    packed, _ = m.gru(pack_padded_sequence(x, lengths, batch_first=True))
    return m.head(pad_packed_sequence(packed, batch_first=True)[0])


def protects(m: Any, x: Tensor) -> Tensor:
    hidden = m.first(x)
    with torch.no_grad():
        size = hidden.square().mean(-1, keepdim=True).sqrt()
    with torch.autocast(x.device.type, enabled=False):
        share = torch.softmax(m.router(hidden.float()) / 0.1, dim=-1)
    return share / size.clamp_min(0.1)


def weighs(m: Any, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Autograd has no derivative by the weights of the classes."""
    scores = m.classes(x)
    return scores, nn.functional.cross_entropy(scores, labels, weight=m.weights)


def collects(m: Any, x: Tensor, target: Tensor) -> Tensor:
    """Under autocast the messages are low and the sums are not, and adding by index takes one dtype only."""
    sums = torch.zeros(64, 512).index_add(0, target, m.message(x))
    return m.update(torch.tanh(sums))


def collects_in_place(m: Any, x: Tensor, target: Tensor) -> Tensor:
    """Operations in place are others to autocast: writing by index refuses two dtypes, an exponential stays low."""
    messages = m.message(x).mul_(0.5)
    messages.clamp_(-1, 1).exp_()
    sums = torch.zeros(64, 512)
    sums.index_put_((target,), messages, accumulate=True)
    return m.update(torch.tanh(sums))


def convolutional() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(8, 4))


def remembering() -> nn.Module:
    """An instance norm by running statistics."""
    norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, 8, 3), norm, nn.ReLU(), nn.Conv2d(8, 4, 3))


def collecting(function: Callable[..., Tensor]) -> tuple[nn.Module, Call]:
    model = Model(function, message=nn.Linear(512, 512), update=nn.Linear(512, 512))
    return model, ((torch.randn(512, 512), torch.randint(64, (512,))), {})


def packing() -> nn.Module:
    return Model(packs, gru=nn.GRU(8, 12, bidirectional=True, batch_first=True), head=nn.Linear(24, 4))


def weighing() -> nn.Module:
    return Model(weighs, classes=nn.Linear(16, 5), weights=torch.rand(5) + 0.5)


MODELS: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "overwrites": lambda: (
        Model(overwrites, first=nn.Linear(16, 16), seen=torch.ones(16)),
        ((torch.randn(4, 16),), {}),
    ),
    "ties": lambda: (tied(), ((torch.randint(1, 20, (2, 6)),), {})),
    "transformer": lambda: (transformer(), ((torch.randn(2, 5, 16),), {})),
    "packed": lambda: (packing(), ((torch.randn(2, 7, 8), torch.tensor([7, 4])), {})),
    "protects itself": lambda: (
        Model(protects, first=nn.Linear(16, 16), router=nn.Linear(16, 4)),
        ((torch.randn(4, 16),), {}),
    ),
    "batch norm": lambda: (convolutional(), ((torch.randn(4, 3, 8, 8),), {})),
    "weighs classes": lambda: (weighing(), ((torch.randn(6, 16), torch.randint(4, (6,))), {})),
    "instance norm": lambda: (remembering(), ((torch.randn(3, 3, 12, 12),), {})),
    "collects": lambda: collecting(collects),
    "collects in place": lambda: collecting(collects_in_place),
}
