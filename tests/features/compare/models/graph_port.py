"""The graph network once more, with dense adjacency matrices instead of lists of edges."""

import torch
import torch.nn.functional as F
from torch import nn


class Port(nn.Module):
    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))

    def p(self, name):
        return getattr(self, name.replace(".", "_"))

    def linear(self, name, x):
        return F.linear(x, self.p(f"{name}.weight"), self.p(f"{name}.bias"))

    def convolve(self, name, x, adjacency):
        looped = adjacency + torch.eye(len(x))
        root = looped.sum(1).rsqrt()
        propagate = root[:, None] * looped * root[None]
        return propagate @ (x @ self.p(f"{name}.linear.weight").T) + self.p(f"{name}.bias")

    def attend(self, name, x, adjacency, features):
        n = len(x)
        h = x @ self.p(f"{name}.linear.weight").T
        joined = h[:, None] + h[None] + self.linear(f"{name}.edge", features)
        joined = F.leaky_relu(joined, negative_slope=0.2).reshape(n, n, 2, -1)
        logits = torch.einsum("ijhc,hc->ijh", joined, self.p(f"{name}.score"))
        logits = logits.masked_fill(adjacency[..., None] == 0, -torch.inf)
        shares = torch.softmax(logits, dim=1)
        gathered = torch.einsum("ijh,jhc->ihc", shares, h.reshape(n, 2, -1))
        return self.linear(f"{name}.out", gathered.reshape(n, -1))

    def forward(self, x, positions, edges, graph):
        n = len(x)
        adjacency = torch.zeros(n, n).index_put((edges[1], edges[0]), torch.tensor(1.0))
        apart = positions[:, None] - positions[None]
        distance = apart.square().sum(-1).clamp(min=1e-30).sqrt()
        offsets = distance.unsqueeze(-1) - self.centers
        features = torch.exp(offsets.pow(2) * -2)
        cutoff = (torch.cos(distance * torch.pi / 4) + 1) / 2
        features = features * cutoff.unsqueeze(-1)
        h = self.linear("enter", x)
        for index in range(2):
            name = f"layers.{index}"
            local = self.convolve(f"{name}.convolution", h, adjacency)
            wide = self.attend(f"{name}.attention", h, adjacency, features)
            mixed = h + F.elu(wide + local)
            h = F.layer_norm(mixed, (16,), self.p(f"{name}.norm.weight"), self.p(f"{name}.norm.bias"))
            inner = F.gelu(self.linear(f"{name}.mlp.0", h))
            h = torch.addcmul(h, self.p(f"{name}.weight"), self.linear(f"{name}.mlp.2", inner))
        member = F.one_hot(graph).to(h.dtype)
        mean = member.T @ h / member.sum(0).unsqueeze(1)
        spread = h[:, None].masked_fill(member[..., None] == 0, -torch.inf)
        pooled = torch.cat((mean, spread.amax(0)), dim=1)
        hidden = F.softplus(self.linear("head.0", pooled))
        return self.linear("head.2", hidden)


def build(state):
    return Port(state).eval()
