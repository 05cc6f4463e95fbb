"""A loop of accelerate with a recorder.

python examples/watch/accelerate_loop.py
python -m auditor replay capsules/step-000025-loss-not-finite
"""

import logging

import torch
from accelerate import Accelerator
from torch import nn

import auditor

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, mixed_precision="bf16")
model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer = accelerator.prepare(model, optimizer)
recorder = auditor.watch(model, optimizer)


@recorder.step
def step(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    rates = model(x).squeeze(-1).float().exp()
    loss = (rates - counts * torch.log(rates)).mean() + torch.lgamma(counts + 1).mean()
    accelerator.backward(loss)
    optimizer.step()
    return loss


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    for number in range(40):
        x = torch.randn(32, 16)
        counts = x[:, 0].abs().floor()
        step(x * 1e4 if number == 25 else x, counts)  # one file in other units
