"""One small model, audited once in mode training; the tests read what came out."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.emulation.emulate import emulate
from auditor.records.audit import Audit
from auditor.records.training import Training


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
    batches = [(tokens, targets), (tokens.flip(0), targets)]
    audit = auditor.audit(model, batches, mode="training", loss_fn=loss_fn, device="cpu")
    return Trained(audit, model, before, (tokens, targets))


# Steps of training by torch alone, which what an audit says is held against.


def audited(model: nn.Module, batch: Any, loss: Callable[..., Any] | None, **asked: Any) -> tuple[Audit, Training]:
    found = auditor.audit(model, batch, mode="training", loss_fn=loss, device="cpu", **asked)
    return found, found.training


def low_gradients(
    model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor], plan: Any, scale: float = 1.0
) -> dict[str, Tensor]:
    """Of one step under a plan with the loss in FP32, by torch alone but for the emulation of a GPU; unscaled."""
    low = copy.deepcopy(model).train()
    low = auditor.apply(low, plan)
    with emulate("cuda"):
        value = loss(low(batch[0]).float(), *batch[1:])
        (value * scale).backward()
    return {name: p.grad.float() / scale for name, p in low.named_parameters() if p.grad is not None}


def fp32_gradients(model: nn.Module, batch: tuple[Tensor, ...], loss: Callable[..., Tensor]) -> dict[str, Tensor]:
    plain = copy.deepcopy(model).train()
    loss(plain(batch[0]), *batch[1:]).backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}


def off(low: dict[str, Tensor], reference: dict[str, Tensor]) -> float:
    gap = sum(float((low[name] - g).double().square().sum()) for name, g in reference.items())
    return (gap / sum(float(g.double().square().sum()) for g in reference.values())) ** 0.5
