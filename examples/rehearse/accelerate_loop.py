"""A loop of accelerate, one update of which is the step.

python -m auditor rehearse examples/rehearse/accelerate_loop.py --steps 40
"""

import torch
from accelerate import Accelerator
from torch import nn

torch.manual_seed(0)
accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2, cpu=True)
net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=3e-3))

points = torch.randn(16, 32, 16, generator=torch.Generator().manual_seed(1))
pairs = [(x, x[:, :4].argmax(1)) for x in points]
batches = list(zip(pairs[::2], pairs[1::2], strict=True))  # two micro-batches for each step


def step(*micro_batches: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    for inputs, labels in micro_batches:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return loss.detach()
