"""A graph network: attention over edges, a normalized convolution, edge features, and pooling by graph."""

import torch
import torch.nn.functional as F
from torch import nn


def degree(index, nodes):
    ones = torch.ones(len(index))
    return torch.zeros(nodes).index_add(0, index, ones)


class Convolution(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False)
        self.bias = nn.Parameter(torch.randn(width) * 0.1)

    def forward(self, x, edges):
        loops = torch.arange(len(x))
        source = torch.cat([edges[0], loops])
        target = torch.cat([edges[1], loops])
        inverse = degree(target, len(x)).pow(-0.5)
        weight = inverse[source] * inverse[target]
        messages = self.linear(x)[source] * weight[:, None]
        return torch.zeros_like(x).index_add(0, target, messages) + self.bias


class EdgeAttention(nn.Module):
    def __init__(self, width, edge, heads=2):
        super().__init__()
        self.heads = heads
        self.linear = nn.Linear(width, width, bias=False)
        self.edge = nn.Linear(edge, width)
        self.score = nn.Parameter(torch.randn(heads, width // heads) * 0.5)
        self.out = nn.Linear(width, width)

    def forward(self, x, edges, features):
        source, target = edges
        h = self.linear(x)
        joined = h[source] + h[target] + self.edge(features)
        joined = F.leaky_relu(joined, 0.2).unflatten(-1, (self.heads, -1))
        logits = (joined * self.score).sum(-1)
        largest = torch.full((len(x), self.heads), -1e9)
        largest = largest.scatter_reduce(0, target[:, None].expand_as(logits), logits, "amax")
        powers = (logits - largest[target]).exp()
        total = torch.zeros(len(x), self.heads).index_add(0, target, powers)
        shares = powers / (total[target] + 1e-16)
        messages = h[source].unflatten(-1, (self.heads, -1)) * shares[..., None]
        gathered = torch.zeros_like(h).index_add(0, target, messages.flatten(1))
        return self.out(gathered)


class Layer(nn.Module):
    def __init__(self, width, edge):
        super().__init__()
        self.attention = EdgeAttention(width, edge)
        self.convolution = Convolution(width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.weight = nn.Parameter(torch.tensor(0.3))

    def forward(self, x, edges, features):
        local = self.convolution(x, edges)
        wide = self.attention(x, edges, features)
        h = F.elu(local + wide)
        x = self.norm(x + h)
        return x + self.weight * self.mlp(x)


class Network(nn.Module):
    def __init__(self, width=16, edge=8):
        super().__init__()
        self.enter = nn.Linear(5, width)
        self.register_buffer("centers", torch.linspace(0.0, 3.0, edge))
        self.layers = nn.ModuleList(Layer(width, edge) for _ in range(2))
        self.head = nn.Sequential(nn.Linear(2 * width, width), nn.Softplus(), nn.Linear(width, 1))

    def forward(self, x, positions, edges, graph):
        distance = (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)
        features = torch.exp(-2.0 * (distance[:, None] - self.centers).square())
        features = features * (0.5 * torch.cos(distance / 4.0 * torch.pi) + 0.5)[:, None]
        h = self.enter(x)
        for layer in self.layers:
            h = layer(h, edges, features)
        graphs = int(graph.max()) + 1
        total = torch.zeros(graphs, h.shape[1]).index_add(0, graph, h)
        mean = total / degree(graph, graphs).clamp(min=1)[:, None]
        largest = torch.full_like(mean, -1e9).scatter_reduce(0, graph[:, None].expand_as(h), h, "amax")
        return self.head(torch.cat([mean, largest], -1))


def build():
    torch.manual_seed(13)
    return Network().eval()


def inputs():
    generator = torch.Generator().manual_seed(8)
    nodes, graph = 14, torch.tensor([0] * 8 + [1] * 6)
    pairs = [(i, j) for i in range(nodes) for j in range(nodes) if i != j and graph[i] == graph[j] and (i + 2 * j) % 3]
    edges = torch.tensor(pairs).T.contiguous()
    return (
        torch.randn(nodes, 5, generator=generator),
        torch.rand(nodes, 3, generator=generator) * 2,
        edges,
        graph,
    )
