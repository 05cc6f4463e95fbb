"""Published results at the end of FP16's range: overflow that happens, and overflow that does not."""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulation.published_row import (
    FP16,
    FP32,
    FP64,
    INF,
    NAN,
    PublishedResult,
    Setup,
    count_not_finite,
    drawn,
)


def add_and_subtract_with_alpha(setup: Setup) -> int:
    x = setup.tensor([60000.0])
    total = torch.add(x, setup.tensor([-60000.0]), alpha=2)
    difference = torch.sub(x, setup.tensor([60000.0]), alpha=2)
    return count_not_finite(total, difference)


def add_and_subtract_number(setup: Setup) -> int:
    x = setup.tensor([60000.0])
    return count_not_finite(torch.add(x, -70000.0, alpha=1), torch.sub(x, 70000.0, alpha=1))


def similarity_with_large_eps(setup: Setup) -> bool:
    """Whether an entry is neither NaN nor inf."""
    x = setup.tensor(torch.tensor(-1.6437e10, dtype=FP64), FP64)
    y = setup.tensor(torch.full((3, 8, 2, 6), NAN))
    similarity = F.cosine_similarity(x, y, dim=0, eps=9.74982e23)
    is_nan = bool(similarity.isnan().all())
    is_inf = bool(similarity.isinf().all())
    return not (is_nan or is_inf)


def average_pool(setup: Setup) -> int:
    drawn_numbers = torch.randint(-256, 256, (2, 32, 256, 256), generator=torch.Generator().manual_seed(0))
    return count_not_finite(F.adaptive_avg_pool2d(setup.tensor(drawn_numbers), (2, 2)))


def nll_loss_of_images(setup: Setup) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    target = torch.randint(0, 10, (32, 256, 256), generator=generator).to(setup.device)
    return F.nll_loss(setup.tensor(drawn(32, 11, 256, 256)), target)


def transposed_convolution(setup: Setup) -> Tensor:
    """Two entries that leave FP16's range."""
    rng = np.random.default_rng(2186)
    x = torch.tensor(rng.uniform(-3.998, 5.0, (6, 7, 15, 23)), dtype=FP16)
    weight = torch.tensor(rng.uniform(-9990.0, -9990.0, (7, 3, 15, 18)), dtype=FP16)
    y = F.conv_transpose2d(setup.tensor(x), setup.tensor(weight), padding=2)
    return torch.stack([y[0, 0, 0, 0], y[5, 2, 24, 0]])


ROWS = (
    PublishedResult(
        id="pytorch/pytorch#153187",
        kind="overflow",
        format="fp16",
        call="clamp_min([[1, NaN], [-1, 0]], 4.35e26)",
        run=lambda setup: torch.clamp_min(setup.tensor([[1.0, NAN], [-1.0, 0.0]]), 4.35294e26),
        printed=(INF, NAN, INF, INF),
        versions="2025-05",
        note="a number beyond the range becomes inf",
    ),
    PublishedResult(
        id="pytorch/pytorch#98691 zero-dimensional",
        kind="overflow",
        format="fp16",
        call="0.01 * zero-dimensional FP32 tensor of 65536",
        run=lambda setup: setup.tensor([0.01]) * setup.tensor(65536.0, FP32),
        printed=(INF,),
        versions="1.13",
        note="a zero-dimensional tensor on the GPU becomes inf in FP16",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_addsub_half_tensor alpha",
        kind="overflow",
        format="fp16",
        call="60000 - 2 * 60000: results that are not finite",
        run=add_and_subtract_with_alpha,
        printed=(0.0,),
        versions="only CUDA",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_addsub_half_tensor number",
        kind="overflow",
        format="fp16",
        call="60000 - 70000: results that are not finite",
        run=add_and_subtract_number,
        printed=(0.0,),
        versions="only CUDA",
        note="70000 is beyond the range of FP16",
    ),
    PublishedResult(
        id="test_nn.test_cosine_similarity_mixed_precision",
        kind="overflow",
        format="fp16",
        call="cosine_similarity, eps=9.7e23: whether neither NaN nor inf",
        run=similarity_with_large_eps,
        printed=(0.0,),
        versions="CPU and CUDA",
        note="an eps beyond the range does not raise",
    ),
    PublishedResult(
        id="pytorch/pytorch#44350 mean",
        kind="overflow",
        format="fp16",
        call="mean of three times 40000",
        run=lambda setup: setup.tensor([40000.0, 40000.0, 40000.0]).mean(),
        printed=(40000.0,),
        versions="1.7",
        note="the sum is in FP32",
    ),
    PublishedResult(
        id="pytorch/pytorch#44350 var",
        kind="overflow",
        format="fp16",
        call="var of three times 40000",
        run=lambda setup: setup.tensor([40000.0, 40000.0, 40000.0]).var(),
        printed=(0.0,),
        versions="1.7",
    ),
    PublishedResult(
        id="pytorch/pytorch#6292 sum",
        kind="overflow",
        format="fp16",
        call="sum of twice 33000",
        run=lambda setup: setup.tensor([33000.0, 33000.0]).sum(0),
        printed=(INF,),
        versions="2018",
        note="the result overflows, not the sum",
    ),
    PublishedResult(
        id="pytorch/pytorch#2391",
        kind="overflow",
        format="fp16",
        call="sum of four times 32000 and four times -32000",
        run=lambda setup: setup.tensor([32000.0] * 4 + [-32000.0] * 4).sum(),
        printed=(0.0,),
        versions="2017",
        note="partial sums do not overflow",
    ),
    PublishedResult(
        id="test_pooling.test_adaptive_avg_pooling_overflow",
        kind="overflow",
        format="fp16",
        call="adaptive_avg_pool2d of 256 x 256: results that are not finite",
        run=average_pool,
        printed=(0.0,),
        versions="CUDA",
        note="with a smaller batch",
    ),
    PublishedResult(
        id="pytorch/pytorch#29429",
        kind="overflow",
        format="fp16",
        call="nll_loss of 2,097,152 pixels",
        run=nll_loss_of_images,
        printed=(NAN,),
        versions="1.3.1, thread open",
        note="NLLLoss2d.cu (03318898) adds sums and weights of its blocks atomically in FP16, and divides in FP16",
    ),
    PublishedResult(
        id="pytorch/pytorch#153700",
        kind="overflow",
        format="fp16",
        call="conv_transpose2d with weights of -9990, two entries",
        run=transposed_convolution,
        printed=(-INF, -INF),
        versions="2025-05",
        note="beyond the range is inf, never NaN",
    ),
)
