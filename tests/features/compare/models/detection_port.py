"""The detector once more: batch norms folded to a scale and a shift, other names, other forms of the same steps."""

import torch
import torch.nn.functional as F
from torch import nn


class Unit(nn.Module):
    def __init__(self, width_in, width, stride=1):
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(width, width_in, 3, 3))
        self.stride = stride
        for name in ("mean", "var", "gain", "offset"):
            self.register_buffer(name, torch.empty(width))

    def forward(self, x):
        y = F.conv2d(x, self.kernel, None, self.stride, 1)
        centered = y - self.mean[:, None, None]
        spread = (self.var + 1e-3).sqrt()
        normed = centered / spread[:, None, None]
        affine = normed * self.gain[:, None, None] + self.offset[:, None, None]
        return affine * torch.sigmoid(affine)

    def take(self, state, name):
        self.kernel.data = state[f"{name}.conv.weight"].clone()
        self.mean, self.var = state[f"{name}.norm.running_mean"], state[f"{name}.norm.running_var"]
        self.gain, self.offset = state[f"{name}.norm.weight"].clone(), state[f"{name}.norm.bias"].clone()


class Port(nn.Module):
    def __init__(self, width=16, classes=5):
        super().__init__()
        self.units = nn.ModuleDict(
            {
                "a0": Unit(3, width, 2),
                "b0": Unit(width, width, 2),
                "b1": Unit(width, width),
                "b2": Unit(width, width),
                "c0": Unit(width, width, 2),
                "c1": Unit(width, width),
                "c2": Unit(width, width),
                "t0": Unit(width, width),
            }
        )
        self.side3, self.side4 = nn.Conv2d(width, width, 1), nn.Conv2d(width, width, 1)
        self.reduce = nn.Conv2d(4 * width, width, 1)
        self.head = nn.Conv2d(width, classes + 4, 3, padding=1)
        self.factors = nn.Parameter(torch.empty(2))
        self.classes = classes

    def run(self, name, x):
        return self.units[name](x)

    def stage(self, letter, x):
        x = self.run(letter + "0", x)
        return self.run(letter + "2", self.run(letter + "1", x)) + x

    def pyramid_pool(self, x):
        small = F.max_pool2d(x, 5, stride=1, padding=2)
        medium = F.max_pool2d(x, 9, stride=1, padding=4)
        large = F.max_pool2d(x, 13, stride=1, padding=6)
        return self.reduce(torch.cat((x, small, medium, large), dim=1))

    def forward(self, images):
        x = images.sub(0.45).div(0.225)
        low = self.stage("b", self.run("a0", x))
        high = self.side4(self.pyramid_pool(self.stage("c", low)))
        size = low.shape[-2:]
        grown = F.interpolate(high, size=size, mode="bilinear", align_corners=False)
        fused = grown + self.side3(low)
        found, certain = [], []
        for level, factor, stride in zip((fused, high), self.factors.unbind(), (4.0, 8.0), strict=True):
            raw = self.head(self.run("t0", level))
            n, _, h, w = raw.shape
            raw = raw.view(n, -1, h * w).transpose(1, 2)
            shift, extent = (raw[..., self.classes :] * factor).split(2, dim=-1)
            xs = torch.arange(w).repeat(h) * stride + stride / 2
            ys = torch.arange(h).repeat_interleave(w) * stride + stride / 2
            middle = torch.stack((xs, ys), dim=1) + shift * stride
            half = 2.0 * torch.exp(extent.clamp(max=4.0))
            found.append(torch.cat((middle - half, middle + half), dim=2))
            certain.append(torch.sigmoid(raw[..., : self.classes]))
        found, certain = torch.cat(found, 1), torch.cat(certain, 1)
        value, order = torch.sort(certain.max(dim=2).values, dim=1, descending=True)
        chosen = order[:, :10]
        rows = torch.arange(len(chosen))[:, None]
        return {"boxes": found[rows, chosen], "scores": value[:, :10]}

    def take(self, state):
        names = {"a0": "stem", "t0": "tower"}
        for letter, stage in (("b", "stage3"), ("c", "stage4")):
            names |= {letter + "0": f"{stage}.0", letter + "1": f"{stage}.1.first", letter + "2": f"{stage}.1.second"}
        for short, name in names.items():
            self.units[short].take(state, name)
        pairs = ((self.side3, "lateral3"), (self.side4, "lateral4"), (self.reduce, "pool"))
        for layer, name in pairs:
            layer.load_state_dict({key: state[f"{name}.{key}"] for key in ("weight", "bias")})
        both = {key: torch.cat([state[f"scores.{key}"], state[f"deltas.{key}"]]) for key in ("weight", "bias")}
        self.head.load_state_dict(both)
        self.factors.data = state["scale"].clone()


def build(state):
    model = Port()
    model.take(state)
    return model.eval()
