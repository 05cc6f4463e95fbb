"""The tagger once more: its LSTM and GRU as loops over steps, the gates written out."""

import torch
from torch import nn


class Port(nn.Module):
    def __init__(self, state):
        super().__init__()
        for name, value in state.items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))

    def p(self, name):
        return getattr(self, name.replace(".", "_"))

    def lstm(self, x, suffix):
        hidden = self.p(f"encoder.weight_hh{suffix}").shape[1]
        h = x.new_zeros(len(x), hidden)
        c = x.new_zeros(len(x), hidden)
        steps = range(x.shape[1])
        if suffix.endswith("reverse"):
            steps = reversed(steps)
        result = {}
        for t in steps:
            gates = x[:, t] @ self.p(f"encoder.weight_ih{suffix}").T + self.p(f"encoder.bias_ih{suffix}")
            gates = gates + h @ self.p(f"encoder.weight_hh{suffix}").T + self.p(f"encoder.bias_hh{suffix}")
            i, f, g, o = gates.split(hidden, 1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            result[t] = h
        return torch.stack([result[t] for t in sorted(result)], 1), h

    def both(self, x, layer):
        forth, last_forth = self.lstm(x, f"_l{layer}")
        back, last_back = self.lstm(x, f"_l{layer}_reverse")
        return torch.cat((forth, back), 2), torch.cat((last_forth, last_back), 1)

    def gru(self, x, h):
        into = x @ self.p("cell.weight_ih").T + self.p("cell.bias_ih")
        own = h @ self.p("cell.weight_hh").T + self.p("cell.bias_hh")
        r_in, z_in, n_in = into.chunk(3, 1)
        r_own, z_own, n_own = own.chunk(3, 1)
        r = torch.sigmoid(r_in + r_own)
        z = torch.sigmoid(z_in + z_own)
        n = torch.tanh(n_in + r * n_own)
        return n + z * (h - n)

    def linear(self, name, x):
        return x @ self.p(f"{name}.weight").T + self.p(f"{name}.bias")

    def forward(self, tokens):
        blank = tokens.eq(0)
        x = torch.embedding(self.p("embed.weight"), tokens, padding_idx=0)
        keep = torch.sigmoid(self.linear("highway.gate", x) - 1)
        x = torch.lerp(x, self.linear("highway.change", x).clamp(min=0), keep)
        first, _ = self.both(x, 0)
        memory, last = self.both(first, 1)
        memory = memory.masked_fill(blank.unsqueeze(-1), 0.0)
        h = torch.tanh(self.linear("bridge", last))
        fed = self.start.repeat(len(tokens), 1)
        tags = []
        while len(tags) < 4:
            query = h @ self.p("score.weight").T
            energy = torch.einsum("ntd,nd->nt", memory, query)
            energy = energy.masked_fill(blank, -torch.inf)
            attention = torch.softmax(energy, 1)
            context = torch.einsum("nt,ntd->nd", attention, memory)
            h = self.gru(torch.cat((fed, context), 1), h)
            logits = self.linear("out", torch.cat((h, context), 1))
            fed = self.linear("feed", torch.softmax(logits, 1))
            tags.append(logits)
        return torch.stack(tags, dim=1)


def build(state):
    return Port(state).eval()
