"""Operations that refuse a half format, or accept it and answer with garbage."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.case import BOTH, Build, Case, Inside, coarse, normal, of

NO_PADDED_ROW = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]])


def masked(scores: Tensor, mask: Tensor, fill: float) -> Tensor:
    return scores.masked_fill(mask == 0, fill).softmax(-1)


def _core(function: Callable[..., Tensor], *inputs: Tensor) -> Build:
    return lambda: (Inside(core=of(function)), inputs)


def _raised(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The usual remedy: FP32 around the operation, the result cast back."""
    return lambda *inputs: function(*(x.float() for x in inputs)).to(inputs[0].dtype)


def _refused(name: str, citation: str, function: Callable[..., Tensor], operation: str, *inputs: Tensor) -> Case:
    return Case(
        name=name,
        formats=BOTH,
        citation=citation,
        mechanism="there is no half kernel, or it refuses",
        build=_core(function, *inputs),
        twin=_core(_raised(function), *inputs),
        culprits=((operation, "core"),),
        evidence="static",
    )


def _spectrogram(x: Tensor) -> Tensor:
    return torch.stft(x, 80, window=None, return_complex=True).abs()


POSITIVE_DEFINITE = coarse(torch.eye(4) * 4 + normal(4, 4) @ normal(4, 4).t())
WELL_CONDITIONED = torch.eye(4) * 0.5 + 0.125

CASES = (
    Case(
        name="masked_fill_1e9",
        formats=("fp16",),
        citation="NVIDIA/apex#1052, #1105; facebookresearch/fairseq#3575; huggingface/transformers modeling_reformer.py",
        mechanism="the literal does not fit, and torch raises",
        build=lambda: (Inside(attn=of(masked, fill=-1e9)), (normal(3, 4), NO_PADDED_ROW)),
        twin=lambda: (Inside(attn=of(masked, fill=float("-inf"))), (normal(3, 4), NO_PADDED_ROW)),
        culprits=(("masked_fill", "attn"),),
        evidence="static",
    ),
    _refused(
        "linalg_svd",
        "NVIDIA/apex#887; pytorch/pytorch#98308; bytedance/LatentSync#241",
        lambda x: torch.linalg.svd(x)[1],
        "linalg_svd",
        POSITIVE_DEFINITE,
    ),
    _refused("linalg_inv", "pytorch/pytorch#40427, #17413", torch.linalg.inv, "linalg_inv", POSITIVE_DEFINITE),
    _refused(
        "fft_rfft",
        "thuml/Time-Series-Library#761; ChenyangSi/FreeU PR#11; pytorch/pytorch PR#74857, #117844",
        lambda x: torch.fft.rfft(x, dim=-1).abs(),
        "fft_rfft",
        normal(2, 192),  # CUDA has FP16 for powers of two alone, and no BF16
    ),
    _refused("stft_mel", "innnky/so-vits-svc#11", _spectrogram, "stft", normal(2, 512)),
    _refused(
        "cdist_half",
        "pytorch/pytorch#29528, #136748; deepspeedai/DeepSpeed#939; open-mmlab/mmdetection PR#9607",
        torch.cdist,
        "cdist",
        normal(8, 4),
        normal(8, 4, seed=1),
    ),
    replace(
        _refused(
            "antialias_resize",
            "huggingface/transformers modeling_siglip2.py",
            lambda x: F.interpolate(x, size=(5, 5), mode="bilinear", antialias=True),
            "_upsample_bilinear2d_aa",
            normal(1, 2, 8, 8),
        ),
        only_on_cpu=True,
    ),
    Case(
        name="matrix_exp_silent_garbage",
        formats=BOTH,
        citation="seen on torch 2.13, CPU; compare tensorflow/tensorflow#121912, PR#122575",
        mechanism="it accepts a well-conditioned matrix of small norm and returns 1e30, without raising",
        build=_core(torch.matrix_exp, WELL_CONDITIONED),
        twin=_core(_raised(torch.matrix_exp), WELL_CONDITIONED),
        culprits=(("matrix_exp", "core"), ("linalg_matrix_exp", "core")),
        evidence="static",
    ),
)
