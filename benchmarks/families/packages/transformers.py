"""Transformers and their relatives, and diffusion."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .. import Built
from .subjects import SUBJECTS, Build, integers, normal, subject, uniform


def _xt(**k) -> Build:
    def build() -> Built:
        from x_transformers import Decoder, TransformerWrapper

        return (
            TransformerWrapper(
                num_tokens=64, max_seq_len=32, attn_layers=Decoder(dim=32, depth=2, heads=2, attn_dim_head=16, **k)
            ),
            (integers(64, 1, 16),),
            {},
        )

    return build


for name, k in {
    "plain": {},
    "rotary": {"rotary_pos_emb": True},
    "alibi": {"alibi_pos_bias": True},
    "rms swiglu": {"use_rmsnorm": True, "ff_swish": True, "ff_glu": True},
    "qk norm": {"attn_qk_norm": True},
    "flash": {"attn_flash": True},
    "talking heads": {"attn_pre_talking_heads": True},
    "macaron": {"macaron": True},
    "sandwich": {"sandwich_norm": True},
    "rel pos": {"rel_pos_bias": True},
    "sparse topk": {"attn_sparse_topk": 4},
}.items():
    SUBJECTS[f"x-transformers/{name}"] = _xt(**k)


@subject("x-transformers/encoder-decoder")
def _() -> Built:
    from x_transformers import XTransformer

    return (
        XTransformer(
            dim=32,
            enc_num_tokens=32,
            enc_depth=1,
            enc_heads=2,
            enc_max_seq_len=16,
            dec_num_tokens=32,
            dec_depth=1,
            dec_heads=2,
            dec_max_seq_len=16,
        ),
        (integers(32, 1, 12), integers(32, 1, 12)),
        {},
    )


@subject("perceiver-pytorch/Perceiver")
def _() -> Built:
    from perceiver_pytorch import Perceiver

    return (
        Perceiver(
            num_freq_bands=2,
            depth=1,
            max_freq=4.0,
            input_channels=3,
            num_latents=8,
            latent_dim=32,
            cross_dim_head=16,
            latent_dim_head=16,
            latent_heads=2,
            num_classes=5,
        ),
        (normal(1, 8, 8, 3),),
        {},
    )


@subject("perceiver-pytorch/PerceiverIO")
def _() -> Built:
    from perceiver_pytorch import PerceiverIO

    return (
        PerceiverIO(
            dim=16,
            queries_dim=16,
            logits_dim=8,
            depth=1,
            num_latents=8,
            latent_dim=32,
            cross_dim_head=16,
            latent_dim_head=16,
            latent_heads=2,
        ),
        (normal(1, 20, 16),),
        {"queries": normal(5, 16)},
    )


@subject("performer-pytorch/PerformerLM")
def _() -> Built:
    from performer_pytorch import PerformerLM

    return (
        PerformerLM(num_tokens=64, max_seq_len=32, dim=32, depth=1, heads=2, dim_head=16, causal=False),
        (integers(64, 1, 32),),
        {},
    )


@subject("linformer/LinformerLM")
def _() -> Built:
    from linformer import LinformerLM

    return LinformerLM(num_tokens=64, dim=32, seq_len=32, depth=1, heads=2, k=8), (integers(64, 1, 32),), {}


@subject("reformer-pytorch/ReformerLM")
def _() -> Built:
    from reformer_pytorch import ReformerLM

    return (
        ReformerLM(num_tokens=64, dim=32, depth=1, max_seq_len=64, heads=2, bucket_size=8, n_hashes=2, causal=True),
        (integers(64, 1, 64),),
        {},
    )


@subject("routing-transformer/RoutingTransformerLM")
def _() -> Built:
    from routing_transformer import RoutingTransformerLM

    return (
        RoutingTransformerLM(
            num_tokens=64, dim=32, heads=2, depth=1, max_seq_len=64, window_size=16, n_local_attn_heads=1
        ),
        (integers(64, 1, 64),),
        {},
    )


@subject("mlp-mixer-pytorch/MLPMixer")
def _() -> Built:
    from mlp_mixer_pytorch import MLPMixer

    return (
        MLPMixer(image_size=32, channels=3, patch_size=8, dim=32, depth=2, num_classes=5),
        (normal(1, 3, 32, 32),),
        {},
    )


@subject("g-mlp-pytorch/gMLP")
def _() -> Built:
    from g_mlp_pytorch import gMLP

    return gMLP(num_tokens=64, dim=32, depth=2, seq_len=16), (integers(64, 1, 16),), {}


@subject("soft-moe-pytorch/SoftMoE")
def _() -> Built:
    from soft_moe_pytorch import SoftMoE

    return SoftMoE(dim=32, seq_len=16, num_experts=4), (normal(1, 16, 32),), {}


@subject("st-moe-pytorch/MoE")
def _() -> Built:
    from st_moe_pytorch import MoE

    return (
        MoE(
            dim=32,
            num_experts=4,
            gating_top_n=2,
            threshold_train=0.2,
            threshold_eval=0.2,
            capacity_factor_train=1.25,
            capacity_factor_eval=2.0,
        ),
        (normal(2, 16, 32),),
        {},
    )


@subject("titans-pytorch/MemoryAsContext")
def _() -> Built:
    from titans_pytorch import MemoryAsContextTransformer

    return (
        MemoryAsContextTransformer(
            num_tokens=64,
            dim=32,
            depth=2,
            segment_len=8,
            num_persist_mem_tokens=2,
            num_longterm_mem_tokens=4,
            heads=2,
            dim_head=16,
        ),
        (integers(64, 1, 16),),
        {},
    )


@subject("local-attention/LocalTransformer")
def _() -> Built:
    from local_attention import LocalTransformer

    return (
        LocalTransformer(
            num_tokens=64, dim=32, depth=1, max_seq_len=64, causal=True, local_attn_window_size=16, heads=2, dim_head=16
        ),
        (integers(64, 1, 32),),
        {},
    )


@subject("linear-attention-transformer/LM")
def _() -> Built:
    from linear_attention_transformer import LinearAttentionTransformerLM

    return (
        LinearAttentionTransformerLM(num_tokens=64, dim=32, heads=2, depth=1, max_seq_len=32, causal=True),
        (integers(64, 1, 32),),
        {},
    )


@subject("axial-attention/AxialAttention")
def _() -> Built:
    from axial_attention import AxialAttention

    return AxialAttention(dim=16, dim_index=1, heads=2, num_dimensions=2), (normal(1, 16, 8, 8),), {}


@subject("product-key-memory/PKM")
def _() -> Built:
    from product_key_memory import PKM

    return PKM(dim=32, heads=2, num_keys=16, topk=4, dim_head=16), (normal(1, 12, 32),), {}


@subject("conformer/Conformer")
def _() -> Built:
    from conformer import Conformer

    return (
        Conformer(dim=32, depth=1, dim_head=16, heads=2, ff_mult=2, conv_expansion_factor=2, conv_kernel_size=7),
        (normal(1, 20, 32),),
        {},
    )


@subject("entmax/attention")
def _() -> Built:
    from entmax import entmax15

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.q = nn.Linear(16, 48)

        def forward(self, x):
            q, k, v = self.q(x).chunk(3, -1)
            return entmax15(q @ k.mT / 4, dim=-1) @ v

    return M(), (normal(2, 10, 16),), {}


@subject("entmax/sparsemax head")
def _() -> Built:
    from entmax import sparsemax

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(16, 10)

        def forward(self, x):
            return sparsemax(self.a(x), dim=-1)

    return M(), (normal(4, 16),), {}


@subject("denoising-diffusion-pytorch/Unet")
def _() -> Built:
    from denoising_diffusion_pytorch import Unet

    return Unet(dim=16, dim_mults=(1, 2), flash_attn=False), (normal(1, 3, 16, 16), torch.tensor([5])), {}


@subject("denoising-diffusion-pytorch/loss")
def _() -> Built:
    from denoising_diffusion_pytorch import GaussianDiffusion, Unet

    return GaussianDiffusion(Unet(dim=16, dim_mults=(1, 2)), image_size=16, timesteps=20), (uniform(2, 3, 16, 16),), {}


@subject("denoising-diffusion-pytorch/Unet1D")
def _() -> Built:
    from denoising_diffusion_pytorch import Unet1D

    return Unet1D(dim=16, dim_mults=(1, 2), channels=3), (normal(1, 3, 32), torch.tensor([5])), {}


@subject("rotary-embedding-torch/attention")
def _() -> Built:
    from rotary_embedding_torch import RotaryEmbedding

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.rot = RotaryEmbedding(dim=8)
            self.q = nn.Linear(16, 48)
            self.o = nn.Linear(16, 16)

        def forward(self, x):
            q, k, v = (t.view(2, 10, 2, 8).transpose(1, 2) for t in self.q(x).chunk(3, -1))
            q, k = self.rot.rotate_queries_or_keys(q), self.rot.rotate_queries_or_keys(k)
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 10, 16))

    return M(), (normal(2, 10, 16),), {}
