"""Published results of reductions, scans and normalizations."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulation.published_row import (
    BF16,
    DEFAULT_TOLERANCES,
    FP16,
    FP32,
    NAN,
    PublishedResult,
    Setup,
    count_beyond,
    drawn,
    old_cpu_randn,
)

_SEVENTY_TWO = """
    66 63 21 84 86 90 86 21 81 68 22 39 43 38 24 63 96 98 33 85 90 87 52 99 56 21 95 59 85 51 16 37 74 55 95 97
    45 82 71 33 88 90 91 68 31 22 53 30 68 22 73 82 36 56 96 20 71 66 82 17 97 35 20 43 31 81 87 90 60 49 96 91
"""


NEAR_ONE = old_cpu_randn((1000,), 0, BF16).abs() * 0.01 + 0.99
"""Input of pytorch#180155, which a CPU computed."""


def sum_of_seventy_two(setup: Setup) -> Tensor:
    numbers = [float(word) for word in _SEVENTY_TWO.split()]
    return setup.tensor(numbers).view(9, 8).sum()


def count_error(setup: Setup, reduce: Callable[[Tensor], Tensor], *shape: int) -> Tensor:
    """Largest error of counts of a few ones among zeros."""
    bits = torch.zeros(shape).bernoulli_(0.0005, generator=torch.Generator().manual_seed(0))
    counts = reduce(setup.tensor(bits)).cpu().double()
    return (counts - reduce(bits.double())).abs().max()


def log_softmax_of_equal_rows(setup: Setup) -> Tensor:
    uniform = np.random.default_rng(432).uniform(-20260.0, -19740.0, size=(18, 1, 2, 2, 21, 2))
    x = torch.tensor(uniform, dtype=FP16)
    return F.log_softmax(setup.tensor(x), 2)[0, 0, 0, 0, 5, 0]


def log_softmax_of_shifted(setup: Setup) -> int:
    generator = torch.Generator().manual_seed(0)
    small = setup.tensor(torch.randint(100, (4, 1536), generator=generator))
    return count_beyond(F.log_softmax(small, -1), F.log_softmax(small + 1.5e3, -1), *DEFAULT_TOLERANCES[FP16])


def softmax_to_fp32(setup: Setup) -> int:
    x = setup.tensor(drawn(32, 100))
    return count_beyond(F.softmax(x, dim=-1, dtype=FP32), F.softmax(x.float(), dim=-1))


def cross_entropy(setup: Setup) -> Tensor:
    logits = setup.ones(1, 2, 50000)
    target = setup.zeros(1, 2, dtype=torch.long)
    return F.cross_entropy(logits.permute(0, 2, 1), target, reduction="none")


def cumsum_error(setup: Setup) -> Tensor:
    x = setup.tensor(old_cpu_randn((500_000,), 0, FP16))
    error = torch.cumsum(x, 0).double() - torch.cumsum(x.double(), 0)
    return error.abs().max()


def cumprod_error(setup: Setup) -> Tensor:
    x = setup.tensor(NEAR_ONE)
    error = torch.cumprod(x, 0).double() - torch.cumprod(x.double(), 0)
    return error.float().norm()


def cumprod_equals_that_of_a_cpu(setup: Setup) -> bool:
    y = torch.cumprod(setup.tensor(torch.full((3, 4, 5), 6.5)), 1).double()
    third = bool((y[:, 2] == 274.5).all())
    fourth = bool((y[:, 3] == 1785.0).all())
    return third and fourth


def layer_norm_difference(setup: Setup) -> float:
    """Share of the entries that differ from FP32, rounded once."""
    x = drawn(1, 5, 128).to(FP16) * 0.1
    low = torch.layer_norm(setup.tensor(x), (128,), setup.ones(128), setup.zeros(128), 1e-5)
    expected = torch.layer_norm(x.float(), (128,), torch.ones(128), torch.zeros(128), 1e-5).to(FP16)
    return float((low.cpu() != expected).double().mean())


def rms_norm(setup: Setup) -> int:
    x = setup.tensor(drawn(1, 2, 3))
    weight = setup.tensor(drawn(1, 2, 3, seed=1))
    wide = x.float()
    mean_square = wide.pow(2).mean(dim=(0, 1, 2), keepdim=True)
    expected = (wide * torch.rsqrt(mean_square + 0.5) * weight).to(setup.dtype)
    return count_beyond(F.rms_norm(x, (1, 2, 3), weight, 0.5), expected, *DEFAULT_TOLERANCES[setup.dtype])


def batch_norm(setup: Setup) -> Tensor:
    return F.batch_norm(setup.tensor([[[1.3047, 0.8789]]]), None, None, None, None, True, 0.1, 1e-5)


def instance_norm(setup: Setup) -> Tensor:
    x = setup.tensor([[[[1.2, 2.3], [3.4, 4.5]], [[5.6, 6.7], [7.8, 8.9]]]])
    return torch.nn.InstanceNorm2d(2)(x)


REDUCTIONS = (
    PublishedResult(
        id="pytorch/pytorch#59489 fp16",
        kind="reduction",
        format="fp16",
        call="sum of 72 integers below 100",
        run=sum_of_seventy_two,
        printed=(4448.0,),
        versions="1.9",
    ),
    PublishedResult(
        id="pytorch/pytorch#59489 bf16",
        kind="reduction",
        format="bf16",
        call="sum of 72 integers below 100",
        run=sum_of_seventy_two,
        printed=(4448.0,),
        versions="1.9",
    ),
    PublishedResult(
        id="test_cuda.test_sum_fp16 65504",
        kind="reduction",
        format="fp16",
        call="sum of 65504 ones",
        run=lambda setup: setup.ones(65504).sum(),
        printed=(65504.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_sum_fp16 fp32",
        kind="reduction",
        format="fp16",
        call="sum of 65536 ones, dtype=float32",
        run=lambda setup: setup.ones(65536).sum(dtype=FP32),
        printed=(65536.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_sum_fp16 counts",
        kind="reduction",
        format="fp16",
        call="sum of 1,203,611 zeros and ones: error",
        run=lambda setup: count_error(setup, torch.sum, 1203611),
        printed=(0.0,),
        versions="only CUDA",
        note="exact for any random numbers",
    ),
    PublishedResult(
        id="test_cuda.test_sum_fp16 dimensions",
        kind="reduction",
        format="fp16",
        call="sum of zeros and ones over two dimensions: error",
        run=lambda setup: count_error(setup, lambda x: x.sum((0, 2)), 100, 121, 80),
        printed=(0.0,),
        versions="only CUDA",
        note="exact for any random numbers",
    ),
    PublishedResult(
        id="test_cuda.test_mean_fp16",
        kind="reduction",
        format="fp16",
        call="mean of 65536 ones",
        run=lambda setup: setup.ones(65536).mean(),
        printed=(1.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_mean_fp16 fp32",
        kind="reduction",
        format="fp16",
        call="mean of 65536 ones, dtype=float32",
        run=lambda setup: setup.ones(65536).mean(dtype=FP32),
        printed=(1.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_reductions.test_prod_gpu fp16",
        kind="reduction",
        format="fp16",
        call="prod([2, 3, 6, 9, 8])",
        run=lambda setup: torch.prod(setup.tensor([2, 3, 6, 9, 8]), dtype=FP16),
        printed=(2592.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_reductions.test_prod_gpu fp32 to fp16",
        kind="reduction",
        format="fp16",
        call="prod of the same in FP32, dtype=float16",
        run=lambda setup: torch.prod(setup.tensor([2, 3, 6, 9, 8], FP32), dtype=FP16),
        printed=(2592.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#158310",
        kind="reduction",
        format="fp16",
        call="log_softmax of numbers near -20000, one entry",
        run=log_softmax_of_equal_rows,
        printed=(0.0,),
        versions="2.7.1+cu126",
    ),
    PublishedResult(
        id="test_nn.test_log_softmax_big half long",
        kind="reduction",
        format="fp16",
        call="log_softmax of x and x + 1500: entries that differ",
        run=log_softmax_of_shifted,
        printed=(0.0,),
        versions="CUDA",
        note="within rtol 1e-3, for long rows",
    ),
    PublishedResult(
        id="test_nn.test_softmax half forward",
        kind="reduction",
        format="fp16",
        call="softmax, dtype=float32: entries that differ from FP32",
        run=softmax_to_fp32,
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#111484",
        kind="reduction",
        format="fp16",
        call="cross_entropy of 50000 equal logits",
        run=cross_entropy,
        printed=(10.8203, 10.8203),
        decimals=4,
        versions="CUDA",
        note="with a smaller batch; log 50000 is 10.8198",
    ),
)

SCANS = (
    PublishedResult(
        id="pytorch/pytorch#180150",
        kind="scan",
        format="fp16",
        call="cumsum of 500,000 normal numbers: largest error",
        run=cumsum_error,
        printed=(5.5936,),
        factors=(0.67, 1.5),
        versions="2.9.0",
        note="the order of the sums of several tiles is only nearly known",
    ),
    PublishedResult(
        id="pytorch/pytorch#180155",
        kind="scan",
        format="bf16",
        call="cumprod of 1,000 numbers near 1: norm of the error",
        run=cumprod_error,
        printed=(0.56472,),
        factors=(0.99999, 1.00001),
        versions="2026-04",
    ),
    PublishedResult(
        id="pytorch/pytorch#156018",
        kind="scan",
        format="fp16",
        call="cumprod of 6.5: whether it equals the CPU's 274.5, 1785",
        run=cumprod_equals_that_of_a_cpu,
        printed=(0.0,),
        versions="2025-06",
        note="the source has not kept CUDA's own number",
    ),
    PublishedResult(
        id="pytorch/pytorch#141802",
        kind="scan",
        format="bf16",
        call="logcumsumexp([2.4375, -0.3340, -0.3711])",
        run=lambda setup: setup.tensor([[2.4375, -0.3340, -0.3711]]).logcumsumexp(-1),
        printed=(2.4375, 2.5, 2.5625),
        decimals=4,
        versions="2.5.0+cu121, Colab",
    ),
)

NORMS = (
    PublishedResult(
        id="pytorch/pytorch#140112",
        kind="norm",
        format="bf16",
        call="batch_norm([1.3047, 0.8789])",
        run=batch_norm,
        printed=(1.0, -1.0),
        decimals=4,
        versions="2.5 and nightly of 2.6",
    ),
    PublishedResult(
        id="pytorch/pytorch#159309",
        kind="norm",
        format="fp16",
        call="InstanceNorm2d of eight numbers",
        run=instance_norm,
        printed=(-1.3418, -0.4468, 0.4473, 1.3418, -1.3418, -0.4482, 0.4482, 1.3418),
        decimals=4,
        versions="2.6.0+cu124",
    ),
    PublishedResult(
        id="test_nn.test_layernorm_half_precision",
        kind="norm",
        format="fp16",
        call="layer_norm: share of entries that differ from FP32, rounded once",
        run=layer_norm_difference,
        printed=(0.0,),
        versions="CUDA",
        note="read in its XPU port; pytorch#66707 asks for it",
    ),
    PublishedResult(
        id="test_nn.test_rmsnorm_numeric fp16",
        kind="norm",
        format="fp16",
        call="rms_norm: entries beyond rtol 1e-3 of FP32, rounded once",
        run=rms_norm,
        printed=(0.0,),
        versions="CPU and CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#192017 fp16",
        kind="norm",
        format="fp16",
        call="normalize of zeros",
        run=lambda setup: F.normalize(setup.zeros(2, 4), dim=1),
        printed=(NAN,) * 8,
        versions="CPU and CUDA",
        note="eps 1e-12 rounds to 0",
    ),
    PublishedResult(
        id="pytorch/pytorch#192017 bf16",
        kind="norm",
        format="bf16",
        call="normalize of zeros",
        run=lambda setup: F.normalize(setup.zeros(2, 4), dim=1),
        printed=(0.0,) * 8,
        versions="CPU and CUDA",
    ),
)

ROWS = REDUCTIONS + SCANS + NORMS
