"""A tagger: two bidirectional LSTM layers, a GRU decoder with attention, and a coupled gate written by hand."""

import torch
import torch.nn.functional as F
from torch import nn


class Highway(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate = nn.Linear(width, width)
        self.change = nn.Linear(width, width)

    def forward(self, x):
        keep = torch.sigmoid(self.gate(x) - 1.0)
        return keep * torch.relu(self.change(x)) + (1 - keep) * x


class Tagger(nn.Module):
    def __init__(self, tokens=40, width=24, hidden=16, tags=7, steps=4):
        super().__init__()
        self.steps = steps
        self.embed = nn.Embedding(tokens, width, padding_idx=0)
        self.highway = Highway(width)
        self.encoder = nn.LSTM(width, hidden, num_layers=2, bidirectional=True, batch_first=True)
        self.bridge = nn.Linear(2 * hidden, hidden)
        self.start = nn.Parameter(torch.randn(width))
        self.cell = nn.GRUCell(width + 2 * hidden, hidden)
        self.score = nn.Linear(hidden, 2 * hidden, bias=False)
        self.out = nn.Linear(3 * hidden, tags)
        self.feed = nn.Linear(tags, width)

    def attend(self, state, memory, mask):
        scores = (memory @ self.score(state)[..., None])[..., 0]
        scores = scores.masked_fill(mask, -1e9)
        weights = F.softmax(scores, dim=1)
        return (weights[:, None] @ memory)[:, 0]

    def forward(self, tokens):
        mask = tokens == 0
        x = self.highway(self.embed(tokens))
        memory, (last, _) = self.encoder(x)
        memory = memory * (~mask)[..., None]
        state = torch.tanh(self.bridge(torch.cat([last[-2], last[-1]], -1)))
        fed = self.start.expand(len(tokens), -1)
        tags = []
        for _ in range(self.steps):
            context = self.attend(state, memory, mask)
            state = self.cell(torch.cat([fed, context], -1), state)
            logits = self.out(torch.cat([state, context], -1))
            probabilities = logits.softmax(-1)
            fed = self.feed(probabilities)
            tags.append(logits)
        return torch.stack(tags, 1)


def build():
    torch.manual_seed(9)
    return Tagger().eval()


def inputs():
    tokens = torch.randint(1, 40, (3, 9), generator=torch.Generator().manual_seed(4))
    tokens[1, 6:] = 0
    return (tokens,)
