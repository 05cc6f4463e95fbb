"""One small model, audited once in mode training; the tests read what came out."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.records.audit import Audit


class Net(nn.Module):
    """Tokens in, logits out: an embedding, a block with a norm and dropout, and a frozen head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(16, 12, bias=False)
        self.head.weight.requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))
        return self.head(x)


def loss_fn(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def made(seed: int = 0) -> tuple[Net, Tensor, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Net(), torch.randint(0, 12, (8, 6)), torch.randint(0, 12, (8, 6))


@dataclass(frozen=True)
class Trained:
    """A training audit, the model it was given, and a copy made before."""

    audit: Audit
    model: nn.Module
    before: nn.Module
    batch: tuple[Tensor, Tensor]


@pytest.fixture(scope="session")
def trained() -> Trained:
    model, tokens, targets = made()
    model.dropout.eval()
    before = copy.deepcopy(model)
    audit = auditor.audit(
        model, [(tokens, targets), (tokens.flip(0), targets)], mode="training", loss_fn=loss_fn, device="cpu"
    )
    return Trained(audit, model, before, (tokens, targets))
