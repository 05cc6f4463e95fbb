"""The denoiser once more, in channels-last layout, with linear layers for 1x1 convolutions and norms written out."""

import torch
import torch.nn.functional as F
from torch import nn


def group_norm(x, gain, bias, groups=4, eps=1e-5):
    n, h, w, c = x.shape
    grouped = x.reshape(n, h * w, groups, c // groups)
    mean = grouped.mean((1, 3), keepdim=True)
    var = grouped.var((1, 3), keepdim=True, unbiased=False)
    normed = (grouped - mean) / torch.sqrt(var + eps)
    return normed.reshape(n, h, w, c) * gain + bias


def conv(x, weight, bias, stride=1):
    y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, padding=1)
    return y.permute(0, 2, 3, 1)


class Port(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.names = {name: name.replace(".", "_") for name in state if name != "alphas"}
        for name, own in self.names.items():
            self.register_parameter(own, nn.Parameter(state[name].clone()))
        self.register_buffer("table", state["alphas"].double())
        self.heads = 2

    def p(self, name):
        return getattr(self, name.replace(".", "_"))

    def linear(self, name, x):
        weight = self.p(f"{name}.weight")
        return F.linear(x, weight.flatten(1), self.p(f"{name}.bias"))

    def norm(self, name, x, eps=1e-5):
        return group_norm(x, self.p(f"{name}.weight"), self.p(f"{name}.bias"), eps=eps)

    def conv(self, name, x, stride=1):
        return conv(x, self.p(f"{name}.weight"), self.p(f"{name}.bias"), stride)

    def res(self, name, x, emb):
        h = self.conv(f"{name}.conv1", F.silu(self.norm(f"{name}.norm1", x)))
        film = self.linear(f"{name}.time", F.silu(emb))
        half = film.shape[1] // 2
        gain, offset = film[:, None, None, :half], film[:, None, None, half:]
        h = self.norm(f"{name}.norm2", h)
        h = h + h * gain + offset
        h = self.conv(f"{name}.conv2", F.silu(h))
        if f"{name}.skip.weight" in self.names:
            x = self.linear(f"{name}.skip", x)
        return x + h

    def attend(self, x):
        n, h, w, c = x.shape
        y = self.norm("attention.norm", x, eps=1e-6)
        qkv = self.linear("attention.qkv", y).reshape(n, h * w, self.heads, 3, c // self.heads)
        q, k, v = qkv.permute(3, 0, 2, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        y = y.transpose(1, 2).reshape(n, h, w, c)
        return self.linear("attention.out", y) + x

    def forward(self, x, t, label):
        image = x.permute(0, 2, 3, 1)
        rates = 10000.0 ** (-torch.arange(8) / 8)
        phase = t.unsqueeze(1) * rates
        emb = torch.cat((phase.cos(), phase.sin()), dim=1)
        emb = self.linear("embed.2", F.silu(self.linear("embed.0", emb)))
        emb = emb + F.embedding(label, self.p("label.weight"))
        first = self.res("down1", self.conv("enter", image), emb)
        y = self.conv("shrink", first, stride=2)
        y = self.res("middle2", self.attend(self.res("middle1", y, emb)), emb)
        y = y.repeat_interleave(2, dim=1).repeat_interleave(2, dim=2)
        y = torch.cat((self.conv("grow", y), first), dim=3)
        y = self.res("up1", y, emb)
        noise = self.conv("leave", F.silu(self.norm("norm", y)))
        now, before = self.table[t].float(), self.table[t - 10].float()
        now, before = now[:, None, None, None], before[:, None, None, None]
        sigma = torch.sqrt(1 - now)
        clean = torch.clamp((image - sigma * noise) * now.rsqrt(), min=-3.0, max=3.0)
        result = before.sqrt() * clean + torch.sqrt(1 - before) * noise
        return result.permute(0, 3, 1, 2)


def build(state):
    return Port(state).eval()
