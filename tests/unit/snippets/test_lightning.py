"""The snippet for Lightning, run by a real Trainer: it trains under an autocast plan and predicts under a cast one."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from auditor.artefact.applying import apply_plan
from auditor.snippets import snippet
from tests.support.patching import Net, plan, scope
from tests.support.snippets import document, pasted
from tests.support.subjects import normal, seeded

SCOPES = {"": scope("bf16"), "norm": scope("fp32"), "head.2": scope("fp32")}


@pytest.fixture
def lightning() -> Iterator[Any]:
    """Imported by the process that runs these tests, and no other: it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield pytest.importorskip("lightning")


def task(lightning: Any) -> Any:
    """A LightningModule around the audited model; notes dtypes and gradients as they pass."""

    class Task(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = seeded(Net)
            self.seen: dict[str, Any] = {}

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            self.net.norm.register_forward_hook(lambda m, args, out: self.seen.update(norm=out.dtype))
            self.net.first.register_forward_hook(lambda m, args, out: self.seen.update(first=out.dtype))
            return nn.functional.mse_loss(self.net(batch), torch.ones(len(batch), 3))

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            self.seen.update(grads={p.grad.dtype for p in self.parameters() if p.grad is not None})

        def predict_step(self, batch: Tensor, index: int) -> Tensor:
            return self.net(batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Task()


def trainer(lightning: Any, plugin: Any) -> Any:
    return lightning.Trainer(
        plugins=[plugin],
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def plugin_of(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    scopes = SCOPES
    if name.endswith("fp16"):
        scopes = {
            path: {**entry, "precision": entry["precision"].replace("bf", "fp")} for path, entry in SCOPES.items()
        }
    text = snippet(document({name: scopes}, name), "lightning")
    return pasted(text, monkeypatch, seeded(Net), {name: scopes})["PlanPrecision"]


@pytest.mark.parametrize(("name", "low"), [("autocast_bf16", torch.bfloat16), ("autocast_fp16", torch.float16)])
def test_it_trains_under_an_autocast_plan(
    name: str, low: torch.dtype, lightning: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = task(lightning)
    plugin = plugin_of(name, monkeypatch)("net", device="cpu")
    assert (plugin.scaler is not None) == (low is torch.float16)
    trainer(lightning, plugin).fit(module, DataLoader(normal(4, 4), batch_size=4))
    assert module.seen == {"first": low, "norm": torch.float32, "grads": {torch.float32}}
    before = seeded(Net)
    assert not torch.equal(module.net.first.weight, before.first.weight)
    assert type(module.net) is Net


def test_it_predicts_under_a_cast_plan(lightning: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x, plugin = task(lightning), normal(4, 4), plugin_of("cast_bf16", monkeypatch)("net")
    (answer,) = trainer(lightning, plugin).predict(module, DataLoader(x, batch_size=4))
    with torch.no_grad():
        assert torch.equal(answer, apply_plan(seeded(Net), plan("cast", SCOPES))(x))
    assert module.net.first.weight.dtype is torch.bfloat16
