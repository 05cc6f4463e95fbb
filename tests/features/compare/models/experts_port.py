"""The model of experts once more: stacked experts, SDPA, complex rotary positions, dense routing by a mask."""

import torch
import torch.nn.functional as F
from torch import nn


class Layer(nn.Module):
    def __init__(self, own):
        super().__init__()
        for name, value in own.items():
            self.register_parameter(name, nn.Parameter(value))


def norm(x, gain, eps=1e-6):
    return F.rms_norm(x, (x.shape[-1],), eps=eps) * gain


def turn(x, phase):
    half = x.shape[-1] // 2
    number = torch.complex(x[..., :half], x[..., half:]) * phase
    return torch.cat((number.real, number.imag), dim=-1)


class Port(nn.Module):
    def __init__(self, state):
        super().__init__()
        self.table = nn.Parameter(state["embed.weight"].clone())
        self.gain = nn.Parameter(state["norm.weight"].clone())
        self.layers = nn.ModuleList()
        for index in range(2):
            part = {key.removeprefix(f"blocks.{index}."): x for key, x in state.items() if f"blocks.{index}." in key}
            experts = range(6)
            own = {
                "norm1": part["norm1.weight"],
                "norm2": part["norm2.weight"],
                "qkv": torch.cat([part[f"attention.{name}.weight"] for name in "qkv"]),
                "o": part["attention.o.weight"],
                "router": part["mixture.router.weight"].T.contiguous(),
                "up": torch.stack(
                    [
                        torch.cat([part[f"mixture.experts.{e}.w1.weight"], part[f"mixture.experts.{e}.w3.weight"]])
                        for e in experts
                    ]
                ),
                "down": torch.stack([part[f"mixture.experts.{e}.w2.weight"] for e in experts]),
                "shared_up": torch.cat([part["mixture.shared.w1.weight"], part["mixture.shared.w3.weight"]]),
                "shared_down": part["mixture.shared.w2.weight"],
                "gate": part["mixture.shared_gate.weight"],
                "gate_bias": part["mixture.shared_gate.bias"],
            }
            self.layers.append(Layer({key: value.clone() for key, value in own.items()}))

    def attend(self, layer, x, phase):
        n, t, d = x.shape
        q, k, v = (x @ layer.qkv.T).split([32, 16, 16], dim=-1)
        q = q.reshape(n, t, 4, 8).permute(0, 2, 1, 3)
        k = k.reshape(n, t, 2, 8).permute(0, 2, 1, 3)
        v = v.reshape(n, t, 2, 8).permute(0, 2, 1, 3)
        q, k = turn(q, phase), turn(k, phase)
        k = k[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        v = v[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2)
        logits = torch.einsum("nhtd,nhsd->nhts", q, k) * 8**-0.5
        logits = torch.tanh(logits * (1 / 30)) * 30
        late = torch.arange(t)[None] > torch.arange(t)[:, None]
        y = torch.softmax(logits.masked_fill(late, -1e30), -1) @ v
        return y.permute(0, 2, 1, 3).reshape(n, t, d) @ layer.o.T

    def mix(self, layer, x):
        logits = x @ layer.router
        best = torch.topk(logits, 2, dim=-1).indices
        keep = F.one_hot(best, 6).sum(-2).bool()
        share = torch.softmax(logits.masked_fill(~keep, -torch.inf), dim=-1)
        gate, up = torch.einsum("ntd,efd->ntef", x, layer.up).chunk(2, dim=-1)
        each = torch.einsum("ntef,edf->nted", F.silu(gate) * up, layer.down)
        routed = (each * share[..., None]).sum(2)
        gate, up = (x @ layer.shared_up.T).chunk(2, dim=-1)
        shared = (F.silu(gate) * up) @ layer.shared_down.T
        return routed + torch.sigmoid(x @ layer.gate.T + layer.gate_bias) * shared

    def forward(self, tokens):
        x = F.embedding(tokens, self.table) * 32**0.5
        rates = torch.exp(torch.arange(4) * (-torch.log(torch.tensor(10000.0)) / 4))
        phase = torch.polar(torch.tensor(1.0), torch.outer(torch.arange(tokens.shape[1]), rates))
        for layer in self.layers:
            x = x + self.attend(layer, norm(x, layer.norm1), phase)
            x = x + self.mix(layer, norm(x, layer.norm2))
        return norm(x, self.gain) @ self.table.T


def build(state):
    return Port(state).eval()
