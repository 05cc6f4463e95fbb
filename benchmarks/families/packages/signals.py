"""Audio, speech, brain signals, policies, losses."""

from __future__ import annotations

import torch
from torch import nn

from .. import Built
from .subjects import SUBJECTS, Build, integers, normal, subject


@subject("silero-vad/vad (trained, ScriptModule)")
def _() -> Built:
    from silero_vad import load_silero_vad

    return load_silero_vad(), (normal(1, 512) * 0.1, 16000), {}


@subject("vocos/Vocos backbone")
def _() -> Built:
    from vocos.models import VocosBackbone

    return VocosBackbone(16, 32, 64, 2), (normal(1, 16, 20),), {}


@subject("vocos/ISTFT head")
def _() -> Built:
    from vocos.heads import ISTFTHead

    return ISTFTHead(16, 64, 16), (normal(1, 20, 16),), {}


@subject("openai-whisper/Whisper")
def _() -> Built:
    from whisper.model import ModelDimensions, Whisper

    return Whisper(ModelDimensions(8, 16, 32, 2, 1, 64, 12, 32, 2, 1)), (normal(1, 8, 32), integers(64, 1, 10)), {}


@subject("nnAudio/mel spectrogram")
def _() -> Built:
    from nnAudio.features import MelSpectrogram

    return (
        nn.Sequential(MelSpectrogram(sr=8000, n_fft=128, n_mels=16, hop_length=64, verbose=False)),
        (normal(1, 1024),),
        {},
    )


@subject("nnAudio/CQT")
def _() -> Built:
    from nnAudio.features import CQT1992v2

    return CQT1992v2(sr=8000, fmin=100, n_bins=24, hop_length=64, verbose=False), (normal(1, 2048),), {}


@subject("asteroid-filterbanks/encoder decoder")
def _() -> Built:
    from asteroid_filterbanks import make_enc_dec

    e, d = make_enc_dec("free", 16, 16, 8)
    return nn.Sequential(e, nn.ReLU(), d), (normal(1, 1, 200),), {}


def _bd(cls, **k) -> Build:
    def build() -> Built:
        import braindecode.models as b

        return getattr(b, cls)(n_chans=8, n_outputs=3, n_times=256, sfreq=128, **k), (normal(2, 8, 256),), {}

    return build


for cls in "EEGNet ShallowFBCSPNet Deep4Net EEGConformer TIDNet ATCNet EEGInceptionERP AttentionBaseNet EEGNeX SincShallowNet CTNet".split():
    SUBJECTS[f"braindecode/{cls}"] = _bd(cls)


@subject("chgnet/CHGNet (trained)")
def _() -> Built:
    from chgnet.model import CHGNet
    from pymatgen.core import Lattice, Structure

    m = CHGNet.load(use_device="cpu", verbose=False)
    s = Structure(Lattice.cubic(4.2), ["Na", "Cl"], [[0, 0, 0], [0.5, 0.5, 0.5]])
    g = m.graph_converter(s)
    return m, ([g],), {"task": "e"}


@subject("rwkv/none")
def _() -> Built:
    raise NotImplementedError


del SUBJECTS["rwkv/none"]


@subject("stable-baselines3/actor-critic policy")
def _() -> Built:
    import gymnasium as gym
    from stable_baselines3.common.policies import ActorCriticPolicy

    m = ActorCriticPolicy(gym.spaces.Box(-1, 1, (6,)), gym.spaces.Discrete(3), lambda _: 1e-3)
    return m, (normal(4, 6),), {"deterministic": True}


@subject("sentence-transformers/pooling head")
def _() -> Built:
    from sentence_transformers.models import Dense, Pooling

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.p = Pooling(16, "mean")
            self.d = Dense(16, 8)

        def forward(self, x, m):
            return self.d(self.p({"token_embeddings": x, "attention_mask": m}))

    return M(), (normal(2, 5, 16), torch.ones(2, 5, dtype=torch.long)), {}


@subject("lightly/NT-Xent")
def _() -> Built:
    from lightly.loss import NTXentLoss

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
            self.l = NTXentLoss()

        def forward(self, a, b):
            return self.l(self.n(a), self.n(b))

    return M(), (normal(6, 16), normal(6, 16)), {}


@subject("pytorch-metric-learning/triplet")
def _() -> Built:
    from pytorch_metric_learning.losses import TripletMarginLoss

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.Linear(16, 8)
            self.l = TripletMarginLoss()

        def forward(self, x, y):
            return self.l(self.n(x), y)

    return M(), (normal(8, 16), torch.arange(8) % 3), {}


@subject("neuralforecast/NBEATS block")
def _() -> Built:
    from neuralforecast.models.nbeats import IdentityBasis, NBEATSBlock

    basis = IdentityBasis(backcast_size=16, forecast_size=4)
    block = NBEATSBlock(16, n_theta=20, mlp_units=[[32, 32]], basis=basis, dropout_prob=0.0, activation="ReLU")
    return block, (normal(2, 16),), {}


@subject("hyper-connections/HyperConnections")
def _() -> Built:
    from hyper_connections import HyperConnections

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            init, self.expand, self.reduce = HyperConnections.get_init_and_expand_reduce_stream_functions(4)
            self.b = init(dim=16, branch=nn.Linear(16, 16))

        def forward(self, x):
            return self.reduce(self.b(self.expand(x)))

    return M(), (normal(2, 5, 16),), {}
