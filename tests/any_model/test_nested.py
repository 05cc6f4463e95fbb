"""Ragged batches: nested tensors of both layouts, padding masks, and packed sequences."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.any_model.holding import held, model_of
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested")

LAYOUTS = [torch.jagged, torch.strided]


def ragged(layout: torch.layout) -> Tensor:
    return torch.nested.nested_tensor([normal(n, 8, seed=n) for n in (3, 5, 2)], layout=layout)


ON_NESTED: dict[str, Callable[..., Any]] = {
    "padded": lambda m, x: torch.nested.to_padded_tensor(m.second(F.relu(m.first(x))), 0.0),
    "in and out": lambda m, x: m.second(F.relu(m.first(x))),
    "parts": lambda m, x: [part.mean(0) for part in m.first(x).unbind()],
    "softmax": lambda m, x: (m.first(x) * 2 + x).softmax(-1),
}


@pytest.mark.parametrize(("name", "layout"), thinned(zip(ON_NESTED, LAYOUTS * 2, strict=True), 2))
def test_nested_inputs(name: str, layout: torch.layout) -> None:
    held(lambda: (model_of(ON_NESTED[name]), ((ragged(layout),), {})), formats="fp16")


def test_nested_buffers() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.first(x) + torch.nested.to_padded_tensor(m.held, 0.0).sum((0, 1))

    held(lambda: (model_of(run, held=ragged(torch.strided)), ((normal(4, 8),), {})), formats="fp16")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.layers(x, src_key_padding_mask=hidden)


class WithGradients(Encoder):
    @torch.enable_grad()
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return super().forward(x, hidden)


@pytest.mark.parametrize("kind", thinned([Encoder, WithGradients]))
def test_encoders_with_a_padding_mask(kind: type[nn.Module]) -> None:
    hidden = torch.arange(6) >= torch.tensor([[6], [4]])
    held(lambda: (seeded(kind), ((normal(2, 6, 8), hidden.clone()), {})), formats="fp16")


def attended(m: Any, x: Tensor) -> Tensor:
    ragged = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 4]), min_seqlen=1, max_seqlen=3)
    q = m.first(ragged).unflatten(-1, [2, 4]).transpose(1, 2)
    return F.scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(-2).values()


def packed(m: Any, x: Tensor, lengths: Tensor) -> Tensor:
    given = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
    return nn.utils.rnn.pad_packed_sequence(m.gru(given)[0], batch_first=True)[0]


def test_attention_over_a_jagged_layout_and_packed_sequences() -> None:
    held(lambda: (model_of(attended), ((normal(4, 8),), {})), formats="fp16")
    gru = seeded(lambda: nn.GRU(8, 4, bidirectional=True, batch_first=True))
    batch = (normal(2, 5, 8), torch.tensor([3, 5]))
    held(lambda: (model_of(packed, gru=copy.deepcopy(gru)), (batch, {})), formats="fp16")
