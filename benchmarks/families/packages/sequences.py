"""State spaces, linear-time attention and tagging of sequences."""

from __future__ import annotations

from torch import nn

from .. import Built
from .subjects import integers, normal, subject


@subject("pytorch-crf/tagger")
def _() -> Built:
    from torchcrf import CRF

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.l = nn.LSTM(8, 8, batch_first=True)
            self.o = nn.Linear(8, 5)
            self.crf = CRF(5, batch_first=True)

        def forward(self, x, tags):
            return self.crf(self.o(self.l(x)[0]), tags)

    return M(), (normal(2, 7, 8), integers(5, 2, 7)), {}


@subject("mambapy/Mamba")
def _() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=2)), (normal(1, 16, 16),), {}


@subject("mambapy/Mamba sequential")
def _() -> Built:
    from mambapy.mamba import Mamba, MambaConfig

    return Mamba(MambaConfig(d_model=16, n_layers=1, pscan=False)), (normal(1, 16, 16),), {}


@subject("s5-pytorch/S5")
def _() -> Built:
    from s5 import S5

    return S5(16, 16), (normal(1, 20, 16),), {}


@subject("lambda-networks/LambdaLayer")
def _() -> Built:
    from lambda_networks import LambdaLayer

    return LambdaLayer(dim=16, dim_out=16, r=5, dim_k=8, heads=2, dim_u=1), (normal(1, 16, 8, 8),), {}


@subject("bottleneck-transformer-pytorch/BottleStack")
def _() -> Built:
    from bottleneck_transformer_pytorch import BottleStack

    return (
        BottleStack(
            dim=16, fmap_size=8, dim_out=32, num_layers=1, heads=2, dim_head=8, rel_pos_emb=True, downsample=False
        ),
        (normal(1, 16, 8, 8),),
        {},
    )


@subject("memory-efficient-attention-pytorch/Attention")
def _() -> Built:
    from memory_efficient_attention_pytorch import Attention

    return (
        Attention(dim=16, dim_head=8, heads=2, memory_efficient=True, q_bucket_size=8, k_bucket_size=8),
        (normal(1, 32, 16),),
        {},
    )


@subject("recurrent-memory-transformer-pytorch/RMT")
def _() -> Built:
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer

    return (
        RecurrentMemoryTransformer(
            num_tokens=64, num_memory_tokens=4, dim=32, depth=1, heads=2, dim_head=16, seq_len=16, causal=True
        ),
        (integers(64, 1, 16),),
        {},
    )
