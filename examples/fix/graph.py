"""A graph network whose source keeps it from running in low precision: `python -m auditor fix examples/fix/graph.py`.

Sums over neighbours are written into an FP32 tensor, which fails beside low-precision values. Three hubs have a thousand neighbours,
which BF16 cannot count.
"""

import torch
from layers import Norm, mean_of_neighbours
from torch import Tensor, nn


class Graph(nn.Module):
    """Two rounds of messages between nodes, then a class for each node."""

    def __init__(self, size: int = 128) -> None:
        super().__init__()
        self.inner, self.outer, self.head = nn.Linear(32, size), nn.Linear(size, size), nn.Linear(size, 8)
        self.norm = Norm(size)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        """Logits [n, 8] of nodes x, [n, 32], with edges from `source` to `target`."""
        h = self.norm(torch.relu(self.inner(x)))
        h = h + mean_of_neighbours(h, source, target)
        h = torch.relu(self.outer(h))
        return self.head(h)


def get_model() -> Graph:
    """The network with random weights."""
    torch.manual_seed(0)
    return Graph().eval()


def graph(seed: int, nodes: int = 400, edges: int = 6000) -> tuple[Tensor, Tensor, Tensor]:
    """Nodes and edges; half of the edges point to three hubs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(nodes, 32, generator=generator)
    source = torch.randint(nodes, (edges,), generator=generator)
    everywhere = torch.randint(nodes, (edges,), generator=generator)
    hubs = torch.randint(3, (edges,), generator=generator)
    return x, source, torch.where(torch.rand(edges, generator=generator) < 0.5, hubs, everywhere)


def get_inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """One graph to audit with."""
    return [graph(1)]


def get_eval_inputs() -> list[tuple[Tensor, Tensor, Tensor]]:
    """Another, to verify with."""
    return [graph(2)]
