"""What a pattern matcher would flag and a measurement must not."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.case import BOTH, Inside, Trap, coarse, linear, normal, of, uniform
from tests.corpus.unsupported import NO_PADDED_ROW, masked
from tests.support.replaying import Model
from tests.support.subjects import seeded


def gelu_by_hand(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x * x * x)))


def _softmax_by_hand(x: Tensor) -> Tensor:
    return torch.exp(x) / torch.exp(x).sum()


TRAPS = (
    Trap(
        "gelu_tanh_cubic_inf",
        ("fp16",),
        "the cube of 40 is infinite, and the tanh of infinity is 1, as it should be",
        lambda: (of(gelu_by_hand), (normal(64, scale=40),)),
    ),
    Trap(
        "neg_inf_mask_softmax",
        BOTH,
        "the -inf is meant, and the softmax maps it to zero",
        lambda: (Inside(attn=of(masked, fill=float("-inf"))), (normal(3, 4), NO_PADDED_ROW)),
    ),
    Trap(
        "native_rmsnorm_300",
        BOTH,
        "F.rms_norm computes its statistics in FP32",
        lambda: (nn.Sequential(nn.RMSNorm(64, eps=1e-6), linear(64, 8)), (normal(8, 64, scale=300),)),
    ),
    Trap(
        "native_softmax_large_logits_gap",
        BOTH,
        "the softmax subtracts the maximum",
        lambda: (nn.Softmax(-1), (coarse(torch.tensor([[30000.0, 10.0, -30000.0], [8.0, 0.0, -500.0]])),)),
    ),
    Trap(
        "lstm_short",
        BOTH,
        "an error of 4e-4, reported as pytorch/pytorch#175845, is what FP16 has",
        lambda: (seeded(lambda: Model(lambda m, x: m.rnn(x)[0], rnn=nn.LSTM(16, 16))), (normal(16, 2, 16),)),
    ),
    Trap(
        "exp_underflow_to_zero",
        BOTH,
        "exp(-50) is zero to within 1e-8 of what it is added to",
        lambda: (of(_softmax_by_hand), (torch.cat([torch.zeros(1), coarse(-uniform(15, low=20, high=60))]),)),
    ),
    Trap(
        "bce_with_logits",
        BOTH,
        "the loss from logits is the stable form",
        lambda: (
            of(F.binary_cross_entropy_with_logits),
            (torch.tensor([12.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, 1.0])),
        ),
    ),
)
