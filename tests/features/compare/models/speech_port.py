"""The recognizer once more: its spectrogram by torch.stft, fused projections, SDPA, and norms written out."""

import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = (x - mean).pow(2).mean(-1, keepdim=True)
        scaled = (x - mean) * torch.rsqrt(variance + 1e-5)
        return scaled * self.gain + self.bias


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.width = heads, width
        self.norms = nn.ModuleList(Norm(width) for _ in range(5))
        self.up = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(2))
        self.down = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(2))
        self.qkv, self.o = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.positions = nn.Parameter(torch.zeros(33, heads))
        self.gate, self.mix = nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.taps = nn.Parameter(torch.zeros(width, 1, 7))
        self.taps_bias = nn.Parameter(torch.zeros(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("var", torch.ones(width))
        self.register_buffer("batch_gain", torch.ones(width))
        self.register_buffer("batch_bias", torch.zeros(width))

    def feed(self, index, x):
        h = self.up[index](x)
        return self.down[index](h * h.sigmoid())

    def attend(self, x, keep):
        n, t, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k, v = (one.reshape(n, t, self.heads, -1).permute(0, 2, 1, 3) for one in (q, k, v))
        index = torch.arange(t)
        relative = torch.clamp(index.unsqueeze(0) - index.unsqueeze(1), min=-16, max=16) + 16
        bias = self.positions[relative].permute(2, 0, 1)[None]
        bias = bias.masked_fill(keep.logical_not()[:, None, None, :], -torch.inf)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.o(y.permute(0, 2, 1, 3).reshape(n, t, d))

    def convolve(self, x, keep):
        value, gate = self.gate(x).chunk(2, dim=-1)
        y = value * gate.sigmoid()
        y = y.masked_fill(~keep[..., None], 0.0).mT
        y = F.conv1d(y, self.taps, self.taps_bias, padding=3, groups=self.width)
        y = F.batch_norm(y, self.mean, self.var, self.batch_gain, self.batch_bias, False, 0.0, 1e-5)
        return self.mix(F.silu(y).mT)

    def forward(self, x, keep):
        x = torch.add(x, self.feed(0, self.norms[0](x)), alpha=0.5)
        x = x + self.attend(self.norms[1](x), keep)
        x = x + self.convolve(self.norms[2](x), keep)
        x = torch.add(x, self.feed(1, self.norms[3](x)), alpha=0.5)
        return self.norms[4](x)


class Port(nn.Module):
    def __init__(self, width=32, heads=4, tokens=30):
        super().__init__()
        self.register_buffer("filters", torch.zeros(65, 20))
        self.sub = nn.Conv1d(20, width, 3, 2, 1)
        self.layers = nn.ModuleList(Layer(width, heads) for _ in range(2))
        self.head = nn.Linear(width, tokens)

    def forward(self, audio, lengths):
        before = F.pad(audio, (1, 0))[:, :-1]
        signal = audio - 0.97 * before
        window = torch.hann_window(128)
        spectrum = torch.stft(signal, 128, 64, window=window, center=True, pad_mode="reflect", return_complex=True)
        energy = spectrum.real**2 + spectrum.imag**2
        mel = torch.einsum("nft,fm->nmt", energy, self.filters)
        mel = (mel + 1e-6).log()
        deviation = mel.var(dim=2, keepdim=True).sqrt()
        mel = (mel - mel.mean(dim=2, keepdim=True)) / (deviation + 1e-5)
        x = F.gelu(self.sub(mel)).mT
        count = torch.div(torch.div(lengths, 64, rounding_mode="floor"), 2, rounding_mode="floor") + 1
        keep = torch.arange(x.size(1)).expand(len(x), -1) < count.unsqueeze(1)
        for layer in self.layers:
            x = layer(x, keep)
        scores = self.head(x)
        normalized = scores - torch.logsumexp(scores, dim=-1, keepdim=True)
        return normalized.masked_fill(~keep[..., None], 0.0)

    def take(self, state):
        state = dict(state)
        self.filters.copy_(state["filters"])
        self.sub.load_state_dict({key: state[f"subsample.{key}"] for key in ("weight", "bias")})
        self.head.load_state_dict({key: state[f"head.{key}"] for key in ("weight", "bias")})
        for index, layer in enumerate(self.layers):
            own = {key.split(".", 2)[2]: x for key, x in state.items() if key.startswith(f"blocks.{index}.")}
            names = ("first.norm", "attention.norm", "convolution.norm", "second.norm", "norm")
            for norm, name in zip(layer.norms, names, strict=True):
                norm.gain.data, norm.bias.data = own[f"{name}.weight"].clone(), own[f"{name}.bias"].clone()
            for position, name in enumerate(("first", "second")):
                for linear, part in ((layer.up[position], "inner"), (layer.down[position], "out")):
                    linear.load_state_dict({key: own[f"{name}.{part}.{key}"] for key in ("weight", "bias")})
            parts = [own[f"attention.{name}.weight"] for name in ("query", "key", "value")]
            none = torch.zeros(len(parts[0]))
            layer.qkv.weight.data = torch.cat(parts)
            layer.qkv.bias.data = torch.cat([own["attention.query.bias"], none, own["attention.value.bias"]])
            pairs = ((layer.o, "attention.out"), (layer.gate, "convolution.inner"), (layer.mix, "convolution.out"))
            for linear, name in pairs:
                linear.load_state_dict({key: own[f"{name}.{key}"] for key in ("weight", "bias")})
            layer.positions.data = own["attention.distance.weight"].clone()
            layer.taps.data = own["convolution.depthwise.weight"].clone()
            layer.taps_bias.data = own["convolution.depthwise.bias"].clone()
            layer.mean, layer.var = own["convolution.batch.running_mean"], own["convolution.batch.running_var"]
            layer.batch_gain, layer.batch_bias = own["convolution.batch.weight"], own["convolution.batch.bias"]


def build(state):
    model = Port()
    model.take(state)
    return model.eval()
