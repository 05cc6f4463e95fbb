"""A LightningModule whose Trainer asks for FP16, clipping and accumulation.

    python -m auditor rehearse examples/rehearse/lightning_module.py:Classifier --steps 40

The arguments of `Trainer(...)` below are read from this file: the recipe "as written" has an FP16 region and a GradScaler,
clips after `unscale_`, and accumulates two micro-batches.
"""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        points, labels = batch
        loss = nn.functional.cross_entropy(self.layers(points), labels)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)

    def train_dataloader(self) -> DataLoader:
        points = torch.randn(512, 16, generator=torch.Generator().manual_seed(1))
        return DataLoader(TensorDataset(points, points[:, :4].argmax(1)), batch_size=32)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        max_epochs=4, precision="16-mixed", gradient_clip_val=1.0, accumulate_grad_batches=2, logger=False
    )
    trainer.fit(Classifier())
