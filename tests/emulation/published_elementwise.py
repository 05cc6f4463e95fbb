"""Published results of elementwise operations, of NaN and infinity, and of conversions."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulation.published_row import (
    DEFAULT_TOLERANCES,
    FP16,
    FP32,
    FP64,
    INF,
    NAN,
    PublishedResult,
    Setup,
    count_beyond,
    drawn,
    drawn_normal,
    half_of_bits,
)


def add_with_alpha(setup: Setup) -> Tensor:
    return torch.add(setup.tensor([-8.35]), setup.tensor([-2.338]), alpha=-3.125)


def multiply_then_add(setup: Setup) -> Tensor:
    return setup.tensor([-8.35]) + setup.tensor([-2.338]) * -3.125


def addcmul(setup: Setup) -> Tensor:
    return torch.addcmul(setup.tensor([6e4]), setup.tensor([6e4]), setup.tensor([-1.0]), value=2)


def foreach_addcmul(setup: Setup) -> Tensor:
    return torch._foreach_addcmul([setup.tensor([6e4])], [setup.tensor([6e4])], [setup.tensor([-1.0])], value=2)[0]


def add_zero_dimensional(setup: Setup) -> Tensor:
    matrix = setup.tensor([[0.0, 0.0, 0.1], [-0.2, 1.0, -1.0]])
    number = setup.tensor(torch.tensor(-0.1, dtype=FP64), FP64)
    return torch.add(matrix, number)[0, 2]


def floor_division(setup: Setup) -> int:
    x = setup.tensor(drawn_normal(10) * 30)
    y = torch.arange(1, 11, dtype=setup.dtype, device=setup.device)
    expected = torch.floor(x.double() / y.double()).to(setup.dtype)
    return count_beyond(x // y, expected, *DEFAULT_TOLERANCES[FP16])


def buckets(setup: Setup) -> Tensor:
    boundaries = setup.tensor([0.9, 1, 2, 2, 3, 3, 4, 4.1, 9, 9])
    values = setup.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9])
    return torch.searchsorted(boundaries, values, out_int32=True)


def grid_sample(setup: Setup, mode: str, align_corners: bool) -> int:
    """Entries beyond the tolerance that the test allows; it compares with FP64, rounded to the format."""
    image = setup.tensor(drawn_normal(4, 16, 16, 16))
    grid = setup.tensor(drawn(4, 8, 8, 2, seed=1)) * 2.0 - 1.0
    how = {"mode": mode, "padding_mode": "zeros", "align_corners": align_corners}
    expected = F.grid_sample(image.double(), grid.double(), **how).to(setup.dtype)
    return count_beyond(F.grid_sample(image, grid, **how), expected, *DEFAULT_TOLERANCES[setup.dtype])


def volume_and_grid(setup: Setup) -> tuple[Tensor, Tensor]:
    """Numbers from 27 down to 1, and the grid that samples each of them, one with an infinite coordinate."""
    image = setup.tensor(torch.arange(27, 0, -1)).view(1, 1, 3, 3, 3)
    identity = setup.tensor([[[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0]]])
    grid = F.affine_grid(identity, [1, 1, 3, 3, 3], align_corners=False)
    grid[:, 1, 1, 1, 0] = INF
    return image, grid


def grid_sample_at_infinity(setup: Setup) -> Tensor:
    image, grid = volume_and_grid(setup)
    return F.grid_sample(image, grid, padding_mode="zeros", align_corners=False)


def remainders_by_zero(setup: Setup) -> int:
    """How many remainders are not NaN."""
    x = setup.tensor(drawn(10, 10) * 18 - 9)
    zeros = torch.zeros_like(x)
    results = [torch.fmod(x, 0.0), torch.fmod(x, zeros), torch.remainder(x, 0.0), torch.remainder(x, zeros)]
    return sum(int((~y.isnan()).sum()) for y in results)


def log_of_clamped_one(setup: Setup) -> Tensor:
    return torch.log1p(-setup.tensor([1.0]).clamp(max=1.0 - 1e-6))


def assigned(setup: Setup) -> Tensor:
    x = setup.zeros(2)
    x[0] = setup.tensor([100000.0], FP32)[0]
    return x


ELEMENTWISE = (
    PublishedResult(
        id="pytorch/pytorch#140252",
        kind="elementwise",
        format="bf16",
        call="special.logit(0.0835)",
        run=lambda setup: torch.special.logit(setup.tensor([0.0835])),
        printed=(-2.3906,),
        decimals=4,
        versions="2.5",
    ),
    PublishedResult(
        id="pytorch/pytorch#140892",
        kind="elementwise",
        format="bf16",
        call="special.xlogy(-0.6914, 3070)",
        run=lambda setup: torch.special.xlogy(setup.tensor([-0.6914]), setup.tensor([3070.0])),
        printed=(-5.5625,),
        decimals=4,
        versions="2.5.0+cu121, T4",
    ),
    PublishedResult(
        id="pytorch/pytorch#140796",
        kind="elementwise",
        format="bf16",
        call="special.xlog1py(1.9609, 41)",
        run=lambda setup: torch.special.xlog1py(setup.tensor([[1.9609]]), setup.tensor([[41.0]])),
        printed=(7.3438,),
        decimals=4,
        versions="2.5.0+cu121, Colab",
    ),
    PublishedResult(
        id="pytorch/pytorch#137817",
        kind="elementwise",
        format="fp16",
        call="digamma(0.00615)",
        run=lambda setup: torch.digamma(setup.tensor(0.00615)),
        printed=(-163.2,),
        decimals=1,
        versions="2.4.0+cu121",
        note="-163.1875 is a tie within the FP32 errors of digamma",
    ),
    PublishedResult(
        id="microsoft/onnxruntime#15977 alpha",
        kind="elementwise",
        format="fp16",
        call="add(-8.35, -2.338, alpha=-3.125)",
        run=add_with_alpha,
        printed=(-1.0459,),
        decimals=4,
        versions="",
        note="alpha and the product stay in FP32",
    ),
    PublishedResult(
        id="microsoft/onnxruntime#15977 two operations",
        kind="elementwise",
        format="fp16",
        call="-8.35 + -2.338 * -3.125",
        run=multiply_then_add,
        printed=(-1.0469,),
        decimals=4,
        versions="",
        note="two kernels round twice",
    ),
    PublishedResult(
        id="pytorch/pytorch#88965",
        kind="elementwise",
        format="fp16",
        call="3388 / 524288.0",
        run=lambda setup: setup.tensor([3388.0]).div(524288.0),
        printed=(0.0065,),
        decimals=4,
        versions="1.12.1+cu113",
        note="a number stays in FP32",
    ),
    PublishedResult(
        id="pytorch/pytorch#98691 number",
        kind="elementwise",
        format="fp16",
        call="0.01 * 65536",
        run=lambda setup: setup.tensor([0.01]) * 65536,
        printed=(655.5,),
        decimals=4,
        versions="1.13",
        note="the CPU printed inf",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_divmul_scalar div",
        kind="elementwise",
        format="fp16",
        call="100 / 1e5",
        run=lambda setup: setup.tensor(100.0).div(1e5),
        printed=(0.0010004043579101562,),
        versions="CPU and CUDA",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_divmul_scalar mul",
        kind="elementwise",
        format="fp16",
        call="1e-5 * 1e5",
        run=lambda setup: setup.tensor(1e-5).mul(1e5),
        printed=(1.0009765625,),
        versions="CPU and CUDA",
        note="1e5 is beyond the range of FP16",
    ),
    PublishedResult(
        id="pytorch/pytorch#60715 foreach",
        kind="elementwise",
        format="fp16",
        call="_foreach_addcmul(6e4, 6e4, -1, value=2)",
        run=foreach_addcmul,
        printed=(-60000.0,),
        versions="1.9.0",
    ),
    PublishedResult(
        id="pytorch/pytorch#60715 addcmul",
        kind="elementwise",
        format="fp16",
        call="addcmul(6e4, 6e4, -1, value=2)",
        run=addcmul,
        printed=(-60000.0,),
        versions="2021-06",
        note="changed to agree with _foreach_addcmul",
    ),
    PublishedResult(
        id="pytorch/pytorch#185605",
        kind="elementwise",
        format="bf16",
        call="add(0.1, zero-dimensional FP64 tensor of -0.1)",
        run=add_zero_dimensional,
        printed=(0.0,),
        versions="nightly of 2026-05",
        note="a zero-dimensional tensor on the GPU is rounded to BF16 first",
    ),
    PublishedResult(
        id="pytorch/pytorch#185470",
        kind="elementwise",
        format="bf16",
        call="threshold(0.1001, 0.1, 0.0)",
        run=lambda setup: F.threshold(setup.tensor([0.10009765625]), 0.1, 0.0),
        printed=(0.0,),
        versions="nightly of 2026-05",
        note="the threshold is rounded to BF16",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_floor_divide_tensor half",
        kind="elementwise",
        format="fp16",
        call="x // y: entries beyond the tolerance of FP64",
        run=floor_division,
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_reductions.test_bucketization fp16",
        kind="elementwise",
        format="fp16",
        call="searchsorted of 1 to 9",
        run=buckets,
        printed=(1.0, 2.0, 4.0, 6.0, 8.0, 8.0, 8.0, 8.0, 8.0),
        versions="any device",
    ),
    PublishedResult(
        id="test_nn.test_grid_sample_large half",
        kind="elementwise",
        format="fp16",
        call="grid_sample of 27 voxels, one infinite coordinate",
        run=grid_sample_at_infinity,
        printed=(*range(27, 14, -1), 0, *range(13, 0, -1)),
        decimals=2,
        versions="only CUDA",
        note="within 0.005; an infinite coordinate gives 0 (pytorch#24823)",
    ),
    PublishedResult(
        id="test_nn.test_grid_sample_half_precision bilinear",
        kind="elementwise",
        format="fp16",
        call="bilinear grid_sample: entries beyond rtol 1e-3 of FP64",
        run=lambda setup: grid_sample(setup, "bilinear", align_corners=False),
        printed=(0.0,),
        versions="only CUDA",
        note="with a smaller batch",
    ),
    PublishedResult(
        id="test_nn.test_grid_sample_half_precision bicubic",
        kind="elementwise",
        format="fp16",
        call="bicubic grid_sample: entries beyond rtol 1e-3 of FP64",
        run=lambda setup: grid_sample(setup, "bicubic", align_corners=True),
        printed=(0.0,),
        versions="only CUDA",
        note="with a smaller batch",
    ),
    PublishedResult(
        id="test_nn.test_grid_sample_bfloat16_precision",
        kind="elementwise",
        format="bf16",
        call="bilinear grid_sample: entries beyond rtol 1.6e-2 of FP64",
        run=lambda setup: grid_sample(setup, "bilinear", align_corners=True),
        printed=(0.0,),
        versions="only CUDA",
        note="with a smaller batch",
    ),
)

NOT_FINITE = (
    PublishedResult(
        id="pytorch/pytorch#158419",
        kind="NaN and inf",
        format="fp16",
        call="copysign(1, [NaN, -NaN, NaN])",
        run=lambda setup: torch.copysign(setup.ones(3), setup.tensor(half_of_bits([0x7E00, 0xFE00, 0x7E00]))),
        printed=(1.0, 1.0, 1.0),
        versions="2.7.0+cu126",
        note="NaN has no sign",
    ),
    PublishedResult(
        id="pytorch/pytorch#181804",
        kind="NaN and inf",
        format="fp16",
        call="copysign(1, [NaN, -NaN, 1])",
        run=lambda setup: torch.copysign(setup.ones(3), setup.tensor(half_of_bits([0x7E00, 0xFE00, 0x3C00]))),
        printed=(1.0, 1.0, 1.0),
        versions="2.11+cu128",
    ),
    PublishedResult(
        id="pytorch/pytorch#181806",
        kind="NaN and inf",
        format="fp16",
        call="signbit(-NaN)",
        run=lambda setup: torch.signbit(setup.tensor(half_of_bits([0xFE00, 0xFE00, 0xFE00]))),
        printed=(0.0, 0.0, 0.0),
        versions="2.11+cu128",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_fmod_remainder_by_zero_float",
        kind="NaN and inf",
        format="fp16",
        call="fmod and remainder by 0: entries that are not NaN",
        run=remainders_by_zero,
        printed=(0.0,),
        versions="CPU and CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#165537",
        kind="NaN and inf",
        format="fp16",
        call="linspace(0, inf, 3)",
        run=lambda setup: torch.linspace(0.0, INF, 3, dtype=setup.dtype, device=setup.device),
        printed=(NAN, NAN, NAN),
        versions="2.5.1+cu124, CPU and CUDA",
    ),
    PublishedResult(
        id="fastino-ai/GLiNER2#155 forward",
        kind="NaN and inf",
        format="fp16",
        call="log1p(-clamp(1, max=1 - 1e-6))",
        run=log_of_clamped_one,
        printed=(-INF,),
        versions="A100",
        note="1 - 1e-6 rounds to 1, so the clamp has no effect",
    ),
)

CONVERSIONS = (
    PublishedResult(
        id="pytorch/pytorch#140347",
        kind="conversion",
        format="fp32",
        call="NaN to int32",
        run=lambda setup: setup.tensor(NAN).to(torch.int32),
        printed=(0.0,),
        versions="2.4.0+cu121, V100",
    ),
    PublishedResult(
        id="pytorch/pytorch#178817",
        kind="conversion",
        format="fp32",
        call="[1000, -500] to FP8 E4M3",
        run=lambda setup: setup.tensor([1000.0, -500.0]).to(torch.float8_e4m3fn),
        printed=(448.0, -448.0),
        versions="2026-04, CPU and CUDA",
        note="the conversion saturates",
    ),
    PublishedResult(
        id="pytorch/pytorch#6292 assignment",
        kind="conversion",
        format="fp16",
        call="x[0] = FP32 tensor of 100000",
        run=assigned,
        printed=(INF, 0.0),
        versions="2018",
    ),
)

ROWS = ELEMENTWISE + NOT_FINITE + CONVERSIONS
