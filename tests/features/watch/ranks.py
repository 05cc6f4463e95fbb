"""A training in several processes over gloo, of which one gets bad data: `python ranks.py FOLDER ddp|fsdp RANK WORLD PORT`."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

import auditor

WIDTH, BAD_STEP, BAD_RANK = 8, 12, 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.outer = nn.Linear(WIDTH, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(x)
        h = h / x.abs().sum(-1, keepdim=True)  # <- ranks
        return self.outer(h)


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + number)
    x = torch.randn(4, WIDTH, generator=generator)
    if (rank, number) == (BAD_RANK, BAD_STEP):
        x[2] = 0.0
    return x, torch.randint(4, (4,), generator=generator)


torch.manual_seed(0)
model: Any = Net()
optimizer: Any = torch.optim.SGD(model.parameters(), 0.1)


def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def main(folder: str, kind: str, rank: int, world: int, port: str) -> None:
    """Train 16 steps; print the number of collectives after the trigger that the training itself does not have."""
    global model, optimizer
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    dist.init_process_group("gloo", rank=rank, world_size=world)
    if kind == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    elif kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorder = auditor.watch(model, optimizer, folder=folder)
    run = recorder.step(step)
    for number in range(16):
        if number == BAD_STEP + 2 and rank == 0:  # a rank that is late: the others wait for nothing of the recorder
            Path(folder, "late").touch()
        run(*batch(rank, number))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])
