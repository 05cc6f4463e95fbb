"""A LightningModule with a recorder, as a callback.

python examples/watch/lightning_module.py
python -m auditor replay capsules/step-000007-loss-not-finite examples/watch/lightning_module.py:Classifier
"""

import logging
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import auditor


class Watch(lightning.Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        self.recorder = auditor.watch(module, trainer.optimizers, scaler)

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.recorder.begin(batch)

    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.recorder.close()


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, weights, labels = batch
        losses = nn.functional.cross_entropy(self.layers(points), labels, reduction="none")
        return (losses * weights).sum() / weights.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader:
        points = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        weights = torch.ones(512)
        weights[7 * 32 : 8 * 32] = 0  # a batch of which nothing counts
        return DataLoader(TensorDataset(points, weights, points[:, :4].argmax(1)), batch_size=32)


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", precision="bf16-mixed", logger=False, callbacks=[Watch()]
    )
    trainer.fit(Classifier())
