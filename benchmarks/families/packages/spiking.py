"""Spiking networks and vector quantisation."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, Build, normal, subject


@subject("snntorch/leaky")
def _() -> Built:
    import snntorch as snn

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 32)
            self.l = snn.Leaky(0.9)
            self.b = nn.Linear(32, 4)
            self.m = snn.Leaky(0.9)

        def forward(self, x):
            m1, m2, out = self.l.init_leaky(), self.m.init_leaky(), []
            for _ in range(5):
                s, m1 = self.l(self.a(x), m1)
                s, m2 = self.m(self.b(s), m2)
                out.append(m2)
            return torch.stack(out)

    return Net(), (normal(4, 16).abs() * 3,), {}


@subject("snntorch/synaptic conv")
def _() -> Built:
    import snntorch as snn

    return (
        nn.Sequential(
            nn.Conv2d(1, 4, 3),
            snn.Leaky(0.5, init_hidden=True),
            nn.Flatten(),
            nn.Linear(4 * 36, 4),
            snn.Leaky(0.5, init_hidden=True, output=True),
        ),
        (normal(2, 1, 8, 8) * 3,),
        {},
    )


@subject("norse/lif")
def _() -> Built:
    import norse.torch as no

    return (
        no.SequentialState(nn.Linear(16, 32), no.LIFCell(), nn.Linear(32, 4), no.LICell()),
        (normal(4, 16).abs() * 10,),
        {},
    )


@subject("norse/lif recurrent")
def _() -> Built:
    import norse.torch as no

    return no.LIFRecurrent(16, 32), (normal(10, 4, 16).abs() * 10,), {}


@subject("spikingjelly/lif")
def _() -> Built:
    from spikingjelly.activation_based import functional, layer, neuron

    net = nn.Sequential(layer.Linear(16, 32), neuron.LIFNode(), layer.Linear(32, 4), neuron.LIFNode())

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            functional.reset_net(self.net)
            return sum(self.net(x) for _ in range(4)) / 4

    return M(), (normal(4, 16) * 4,), {}


@subject("spikingjelly/if multi-step")
def _() -> Built:
    from spikingjelly.activation_based import functional, layer, neuron

    net = nn.Sequential(
        layer.Conv2d(1, 4, 3), layer.BatchNorm2d(4), neuron.IFNode(), layer.Flatten(), layer.Linear(4 * 36, 4)
    )
    functional.set_step_mode(net, "m")
    return net, (normal(4, 2, 1, 8, 8) * 3,), {}


def _vq(kind, x=None, **k) -> Build:
    def build() -> Built:
        import vector_quantize_pytorch as v

        return getattr(v, kind)(**k), (normal(2, 12, 16) if x is None else x(),), {}

    return build


SUBJECTS["vector-quantize-pytorch/VectorQuantize"] = _vq("VectorQuantize", dim=16, codebook_size=32)
SUBJECTS["vector-quantize-pytorch/VectorQuantize cosine"] = _vq(
    "VectorQuantize", dim=16, codebook_size=32, use_cosine_sim=True, codebook_dim=8
)
SUBJECTS["vector-quantize-pytorch/ResidualVQ"] = _vq("ResidualVQ", dim=16, codebook_size=32, num_quantizers=3)
SUBJECTS["vector-quantize-pytorch/FSQ"] = _vq("FSQ", levels=[8, 5, 5], x=lambda: normal(2, 12, 3))
SUBJECTS["vector-quantize-pytorch/LFQ"] = _vq("LFQ", codebook_size=64, dim=16)
SUBJECTS["vector-quantize-pytorch/SimVQ"] = _vq("SimVQ", dim=16, codebook_size=32)
