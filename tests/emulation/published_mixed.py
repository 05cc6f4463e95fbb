"""Published results of calls with several dtypes, and calls that CUDA refuses although a CPU may run them, or the reverse."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.emulation.published_row import BF16, FP16, FP32, FP64, RAISES, RUNS, PublishedResult, Setup, leaf


def output_dtype(module: nn.Module, x: Tensor) -> torch.dtype:
    """The dtype of the output; also runs the backward pass if x has a gradient."""
    y: Tensor = module(x)
    if y.requires_grad:
        y.sum().backward()
    return y.dtype


def small_integers(setup: Setup, *shape: int) -> Tensor:
    """Integers from 1 to 9 that collect a gradient."""
    count = torch.Size(shape).numel()
    return leaf(setup.tensor(torch.arange(count).view(shape).remainder(9).add(1)))


def image(setup: Setup) -> Tensor:
    return setup.tensor(torch.arange(4000).view(1, 10, 20, 20).remainder(7))


def batch_norm_with_backward(setup: Setup) -> torch.dtype:
    return output_dtype(nn.BatchNorm2d(3).to(setup.device), small_integers(setup, 2, 3, 2, 2))


def instance_norm_with_statistics(setup: Setup) -> torch.dtype:
    module = nn.InstanceNorm1d(3, affine=True, track_running_stats=True).to(setup.device)
    assert module.running_mean is not None
    assert module.running_var is not None
    module.running_mean = module.running_mean.to(setup.dtype)
    module.running_var = module.running_var.to(setup.dtype)
    return output_dtype(module, small_integers(setup, 2, 3, 4))


def group_norm(setup: Setup) -> Tensor:
    result: Tensor = nn.GroupNorm(10, 10).to(setup.device)(image(setup))
    return result


def layer_norm(setup: Setup) -> Tensor:
    result: Tensor = nn.LayerNorm(4).to(setup.device)(setup.ones(2, 4))
    return result


def backward_of_mixed_arithmetic(setup: Setup) -> None:
    pairs = ((FP16, FP32), (FP32, FP16), (FP16, FP64), (FP16, torch.int32), (FP16, torch.int64))
    for function in (torch.add, torch.sub, torch.rsub, torch.mul, torch.div):
        for dtype, other_dtype in pairs:
            x = leaf(setup.ones(10, dtype=dtype))
            function(x, setup.ones(10, dtype=other_dtype)).sum().backward()


def copysign_gradients(setup: Setup) -> Tensor:
    magnitude = leaf(setup.tensor([-1.0, 0.0, 1.0], FP16))
    sign = leaf(setup.tensor([-0.0, -0.0, -0.0], BF16))
    torch.copysign(magnitude, sign).sum().backward()
    assert magnitude.grad is not None
    assert sign.grad is not None
    return torch.cat([magnitude.grad.float(), sign.grad.float()])


def unscaled_gradients(setup: Setup) -> Tensor:
    scaled = [setup.tensor(torch.full((20, 20), 4.0), dtype) for dtype in (FP32, FP16)]
    inverse_scale = setup.tensor([0.25], FP32)
    torch._amp_foreach_non_finite_check_and_unscale_(scaled, setup.zeros(1, dtype=FP32), inverse_scale)
    return torch.stack([x[0, 0].float() for x in scaled])


def index_put(destination: torch.dtype, source: torch.dtype) -> Callable[[Setup], Tensor]:
    def run(setup: Setup) -> Tensor:
        index = torch.tensor([1], device=setup.device)
        return setup.zeros(4, dtype=destination).index_put_((index,), setup.ones(1, dtype=source))

    return run


def masked_scatter(setup: Setup) -> Tensor:
    mask = torch.tensor([True, False, True, False], device=setup.device)
    return setup.zeros(4).masked_scatter_(mask, setup.ones(4, dtype=FP32))


def attention_with_mask(setup: Setup) -> Tensor:
    query = setup.ones(1, 1, 3, 4)
    return F.scaled_dot_product_attention(query, query, query, setup.zeros(3, 3, dtype=BF16))


def grid_sample(setup: Setup) -> Tensor:
    return F.grid_sample(setup.ones(1, 1, 3, 3), setup.zeros(1, 2, 2, 2, dtype=FP32), align_corners=False)


def identity(setup: Setup) -> Tensor:
    return setup.tensor(torch.eye(2))


def upper_triangle(setup: Setup) -> Tensor:
    return setup.tensor([[0.0, 1.0], [2.0, 3.0]]).triu()


MIXED = (
    PublishedResult(
        id="krishansubudhi/gendered-pronoun-resolution",
        kind="mixed dtypes",
        format="fp16",
        call="zero-dimensional: FP32 1.0 + FP16 0.0001",
        run=lambda setup: torch.add(setup.tensor(1.0, FP32), setup.tensor(0.0001)),
        printed=(1.0001,),
        decimals=4,
        versions="CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#98691 one-dimensional",
        kind="mixed dtypes",
        format="fp16",
        call="0.01 * FP32 tensor of one entry, 65536",
        run=lambda setup: setup.tensor([0.01]) * setup.tensor([65536.0], FP32),
        printed=(655.5,),
        decimals=4,
        versions="1.13",
        note="a tensor of one entry promotes",
    ),
    PublishedResult(
        id="test_type_promotion.test_mixed_type_backward",
        kind="mixed dtypes",
        format="fp16",
        call="backward of arithmetic of FP16 with FP32, FP64 and integers",
        run=backward_of_mixed_arithmetic,
        printed=RUNS,
        versions="CUDA",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_copysign_subgradient half bf16",
        kind="mixed dtypes",
        format="fp16",
        call="gradients of copysign(FP16, BF16)",
        run=copysign_gradients,
        printed=(1.0, 0.0, -1.0, 0.0, 0.0, 0.0),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_torch.test_grad_scaling_unscale mismatched",
        kind="mixed dtypes",
        format="fp16",
        call="unscale of FP32 and FP16 gradients in one list",
        run=unscaled_gradients,
        printed=(1.0, 1.0),
        versions="CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#17216 batch_norm",
        kind="mixed dtypes",
        format="fp16",
        call="BatchNorm2d in FP32 of FP16: dtype",
        run=lambda setup: output_dtype(nn.BatchNorm2d(10).to(setup.device), image(setup)),
        printed=FP16,
        versions="1.0.1",
    ),
    PublishedResult(
        id="test_nn.test_batchnorm_cudnn_half",
        kind="mixed dtypes",
        format="fp16",
        call="BatchNorm2d in FP32 of FP16, with backward: dtype",
        run=batch_norm_with_backward,
        printed=FP16,
        versions="CUDA",
    ),
    PublishedResult(
        id="test_nn.test_InstanceNorm_cuda_mixed_running_stats_dtype",
        kind="mixed dtypes",
        format="fp16",
        call="InstanceNorm1d in FP32 with FP16 statistics of FP16: dtype",
        run=instance_norm_with_statistics,
        printed=FP16,
        versions="CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#17216 group_norm",
        kind="mixed dtypes",
        format="fp16",
        call="GroupNorm in FP32 of FP16",
        run=group_norm,
        printed=RAISES,
        versions="1.0.1, thread open",
        note="group_norm_kernel.cu reads weights in the dtype of the input",
    ),
    PublishedResult(
        id="pytorch/pytorch#38487",
        kind="mixed dtypes",
        format="fp16",
        call="LayerNorm in FP32 of FP16",
        run=layer_norm,
        printed=RAISES,
        versions="2020",
        note="also NVIDIA/apex#1635 (2023); layer_norm_kernel.cu reads weights in the dtype of the input",
    ),
    PublishedResult(
        id="Yu-Fangxu/COLD-Attack#20",
        kind="mixed dtypes",
        format="fp16",
        call="conv2d of FP16 with FP32 weights",
        run=lambda setup: F.conv2d(setup.ones(1, 1, 4, 4), setup.ones(1, 1, 2, 2, dtype=FP32)),
        printed=RAISES,
        versions="2025",
    ),
    PublishedResult(
        id="potamides/AutomaTikZ#8",
        kind="mixed dtypes",
        format="fp16",
        call="linear of FP32 with FP16 weights",
        run=lambda setup: F.linear(setup.ones(2, 3, dtype=FP32), setup.ones(4, 3)),
        printed=RAISES,
        versions="2023, A100",
    ),
    PublishedResult(
        id="pytorch/rl#1703",
        kind="mixed dtypes",
        format="fp16",
        call="masked_scatter_ of FP32 into FP16",
        run=masked_scatter,
        printed=RAISES,
        versions="2023",
    ),
    PublishedResult(
        id="hiyouga/LlamaFactory#3807",
        kind="mixed dtypes",
        format="fp16",
        call="index_put_ of FP32 into FP16",
        run=index_put(FP16, FP32),
        printed=RAISES,
        versions="2024",
    ),
    PublishedResult(
        id="hiyouga/LlamaFactory#5943",
        kind="mixed dtypes",
        format="bf16",
        call="index_put_ of BF16 into FP32",
        run=index_put(FP32, BF16),
        printed=RAISES,
        versions="2.5.1+cu124, A100",
    ),
    PublishedResult(
        id="pytorch/pytorch#42218",
        kind="mixed dtypes",
        format="fp16",
        call="grid_sample of FP16 at FP32 coordinates",
        run=grid_sample,
        printed=RAISES,
        versions="1.6.0, TITAN Xp",
        note="later autocast promotes, and the function itself still refuses (pytorch#94733, 2023)",
    ),
    PublishedResult(
        id="Comfy-Org/ComfyUI#8118",
        kind="mixed dtypes",
        format="fp16",
        call="scaled_dot_product_attention of FP16 with a BF16 mask",
        run=attention_with_mask,
        printed=RAISES,
        versions="2025",
        note="a mask may be bool, FP32, or of the query's dtype",
    ),
)

NUMBERS_OUT_OF_RANGE = (
    PublishedResult(
        id="pytorch/pytorch#153186",
        kind="error",
        format="fp16",
        call="softshrink with lambda 65507",
        run=lambda setup: F.softshrink(setup.zeros(3), 65507.0),
        printed=RAISES,
        versions="2025-05",
    ),
    PublishedResult(
        id="test_nn.test_softshrink_lambda_dtype_range bf16",
        kind="error",
        format="bf16",
        call="softshrink with lambda 1e39",
        run=lambda setup: F.softshrink(setup.zeros(3), 1e39),
        printed=RAISES,
        versions="CPU and CUDA",
    ),
)

KERNELS = (
    PublishedResult(
        id="pytorch/pytorch#101932",
        kind="kernels",
        format="bf16",
        call="triu of [[0, 1], [2, 3]]",
        run=upper_triangle,
        printed=(0.0, 1.0, 0.0, 3.0),
        versions="2.1",
        note="2.0 raised",
    ),
    PublishedResult(
        id="pytorch/pytorch#171948",
        kind="kernels",
        format="fp16",
        call="LocalResponseNorm",
        run=lambda setup: nn.LocalResponseNorm(2)(setup.ones(1, 4, 3)),
        printed=RUNS,
        versions="2026-01",
        note="raised on the CPU",
    ),
    PublishedResult(
        id="pytorch/pytorch#89366",
        kind="kernels",
        format="fp16",
        call="tanh",
        run=lambda setup: torch.tanh(setup.zeros(2)),
        printed=RUNS,
        versions="1.12",
    ),
    PublishedResult(
        id="test_binary_ufuncs.test_complex_scalar_pow_tensor half",
        kind="kernels",
        format="fp16",
        call="pow(1.5 + 1j, ones)",
        run=lambda setup: torch.pow(1.5 + 1.0j, setup.ones(3)),
        printed=RUNS,
        versions="CUDA",
        note="raises on the CPU, by the same test",
    ),
    PublishedResult(
        id="test_torch.test_multinomial_deterministic half",
        kind="kernels",
        format="fp16",
        call="multinomial",
        run=lambda setup: torch.multinomial(setup.ones(4, 8), 1, True),
        printed=RUNS,
        versions="only CUDA",
    ),
    PublishedResult(
        id="pytorch/pytorch#83321",
        kind="kernels",
        format="bf16",
        call="avg_pool3d",
        run=lambda setup: F.avg_pool3d(setup.ones(1, 1, 4, 4, 4), (3, 2, 2), stride=1),
        printed=RUNS,
        versions="1.8.1",
        note="raised on the CPU",
    ),
    PublishedResult(
        id="kornia/kornia#649 inverse",
        kind="kernels",
        format="fp16",
        call="inverse",
        run=lambda setup: torch.inverse(identity(setup)),
        printed=RAISES,
        versions="1.6.0, RTX 2080 Ti",
    ),
    PublishedResult(
        id="kornia/kornia#649 svd",
        kind="kernels",
        format="fp16",
        call="svd",
        run=lambda setup: torch.svd(identity(setup)),
        printed=RAISES,
        versions="1.6.0, RTX 2080 Ti",
        note="also NVIDIA/apex#887",
    ),
    PublishedResult(
        id="ldeecke/gmm-torch#27",
        kind="kernels",
        format="fp16",
        call="linalg.cholesky",
        run=lambda setup: torch.linalg.cholesky(identity(setup)),
        printed=RAISES,
        versions="2022, Colab",
    ),
    PublishedResult(
        id="pytorch/pytorch#42838",
        kind="kernels",
        format="fp16",
        call="triangular_solve",
        run=lambda setup: torch.triangular_solve(setup.ones(2, 1), identity(setup)),
        printed=RAISES,
        versions="2020, thread open",
    ),
    PublishedResult(
        id="pytorch/pytorch#9315",
        kind="kernels",
        format="fp16",
        call="linalg.qr",
        run=lambda setup: torch.linalg.qr(identity(setup)),
        printed=RAISES,
        versions="2018",
    ),
    PublishedResult(
        id="test_linalg.test_slogdet_errors_and_warnings",
        kind="kernels",
        format="bf16",
        call="linalg.slogdet",
        run=lambda setup: torch.linalg.slogdet(identity(setup)),
        printed=RAISES,
        versions="any device",
    ),
    PublishedResult(
        id="cai4cai/torchsparsegradutils#53",
        kind="kernels",
        format="fp16",
        call="sparse.mm",
        run=lambda setup: torch.sparse.mm(identity(setup).to_sparse(), identity(setup)),
        printed=RAISES,
        versions="2024",
        note="the CPU has this kernel",
    ),
)

ROWS = MIXED + NUMBERS_OUT_OF_RANGE + KERNELS
