"""Published results of matrix products and convolutions, of gradients, and of accumulation at one place."""

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulation.published_elementwise import volume_and_grid
from tests.emulation.published_row import (
    FP16,
    FP32,
    INF,
    NAN,
    PublishedResult,
    Setup,
    count_beyond,
    drawn,
    drawn_normal,
    gradients,
    leaf,
    old_cpu_randn,
)


def small_products(setup: Setup) -> float:
    """Share of the entries that differ from numpy's float16 products, summed over fifty products."""
    generator = torch.Generator().manual_seed(0)
    different = 0.0
    for _ in range(50):
        a = torch.rand((3, 4), generator=generator).to(FP16)
        b = torch.rand((4, 5), generator=generator).to(FP16)
        product = (setup.tensor(a) @ setup.tensor(b)).cpu().numpy()
        different += float((product != a.numpy() @ b.numpy()).mean())
    return different


def linear_of_slice(setup: Setup) -> bool:
    """Whether a slice gives another result than the whole in one of twenty draws; the GPU's own draws are not known."""
    generator = torch.Generator().manual_seed(42)
    inputs = setup.tensor(torch.randn(20, 2, 16, 4, generator=generator))
    weight = setup.tensor(torch.rand(4, 4, generator=generator) - 0.5)
    bias = setup.tensor(torch.rand(4, generator=generator) - 0.5)
    differs = False
    for x in inputs:
        whole = F.linear(x, weight, bias)[:, 2:]
        sliced = F.linear(x[:, 2:], weight, bias)
        differs = differs or not torch.equal(whole, sliced)
    return differs


def linear_with_identity(setup: Setup) -> int:
    x = setup.tensor(drawn(100, 100))
    identity = setup.tensor(torch.eye(100))
    return count_beyond(F.linear(x, identity.t(), setup.zeros(100, 100)), x)


def baddbmm_with_identity(setup: Setup) -> int:
    x = setup.tensor(drawn(100, 100))
    identity = setup.tensor(torch.eye(100))
    bias = setup.zeros(100, 100)
    batch = [y.expand(2, 100, 100) for y in (bias, x, identity)]
    return count_beyond(torch.baddbmm(*batch, beta=1.0, alpha=1.0)[0], x)


def transformer_layer(setup: Setup) -> int:
    """Entries beyond the test's tolerance."""
    layer = torch.nn.TransformerEncoderLayer(4, 2, 16, 0.0, batch_first=True, device=setup.device, dtype=setup.dtype)
    layer.eval()
    for parameter in layer.parameters():
        numbers = torch.arange(0, parameter.numel()).float()
        parameter.data.copy_(torch.cos(numbers).view(parameter.shape))
    y = layer(setup.tensor([[[20.0, 30.0, 40.0, 50.0]]]))
    expected = torch.tensor([[[2.258703, 0.127985, -0.697881, 0.170862]]])
    return count_beyond(y, expected, atol=1e-3, rtol=1e-2)


def transposed_convolution_with_inf(setup: Setup) -> Tensor:
    x = setup.tensor(old_cpu_randn((1, 1, 4, 4), 0, FP16))
    weight = setup.tensor(torch.full((1, 1, 3, 3), INF))
    return F.conv_transpose2d(x, weight)


def bicubic_gradient(setup: Setup, size: int) -> Tensor:
    x = leaf(setup.tensor(drawn_normal(2, 2, 1, 1)))
    y = F.interpolate(x, size=(size, size), mode="bicubic", align_corners=True)
    return torch.autograd.grad([y], [x], [torch.ones_like(y)])[0]


def hardswish_gradient(setup: Setup, at: float) -> Tensor:
    return gradients(lambda x: F.hardswish(x).sum(), setup.tensor(torch.full((1, 9, 9, 1), at)))


def softmax_gradient(setup: Setup) -> int:
    """Entries of the gradient that differ from FP32's, rounded once."""
    x = setup.tensor(drawn(32, 100))
    low = leaf(x)
    wide = leaf(x.float())
    gradient = setup.tensor(drawn(32, 100, seed=1), FP32)
    F.softmax(low, dim=-1, dtype=FP32).backward(gradient)
    F.softmax(wide, dim=-1).backward(gradient)
    assert low.grad is not None
    assert wide.grad is not None
    return count_beyond(low.grad, wide.grad.to(setup.dtype))


def grid_sample_gradient(setup: Setup) -> Tensor:
    image, grid = volume_and_grid(setup)
    return gradients(lambda x: F.grid_sample(x, grid, padding_mode="zeros", align_corners=False).sum(), image)


def masked_log_gradient(setup: Setup) -> Tensor:
    return gradients(lambda x: (torch.log1p(-x.clamp(max=1.0 - 1e-6)) * 0).sum(), setup.tensor([1.0]))


def index_put(setup: Setup) -> Tensor:
    index = torch.arange(4).view(1, 4, 1, 1).expand(2, 4, 256, 256).to(setup.device)
    values = setup.tensor(old_cpu_randn((2, 4, 256, 256), 42, FP16))
    return torch.ops.aten.index_put(setup.zeros(4), [index], values, accumulate=True)


def scatter_add(setup: Setup) -> Tensor:
    index = setup.zeros(2, 2, dtype=torch.long)
    return setup.ones(2, 2).scatter_(0, index, setup.ones(2, 2), reduce="add")


def coalesced_overflow(setup: Setup) -> Tensor:
    """1 if the values are not finite once duplicates are added."""
    places = torch.tensor([[0, 1, 0], [2, 0, 2]])
    values = torch.tensor([64000.0, 32.0, 64000.0])
    sparse = torch.sparse_coo_tensor(places, values, (2, 3)).to(setup.device, setup.dtype)
    found = setup.zeros(1, dtype=FP32)
    inverse_scale = setup.tensor([0.25], FP32)
    torch._amp_foreach_non_finite_check_and_unscale_([sparse.coalesce().values()], found, inverse_scale)
    return found


PRODUCTS = (
    PublishedResult(
        id="stackoverflow 70650236",
        kind="product",
        format="fp16",
        call="3x4 @ 4x5: entries that differ from numpy's float16",
        run=small_products,
        printed=(0.0,),
        versions="1.7+cu111, RTX 3090",
    ),
    PublishedResult(
        id="pytorch/pytorch#154997 fp16",
        kind="product",
        format="fp16",
        call="linear: whether a sliced input gives another result",
        run=linear_of_slice,
        printed=(1.0,),
        versions="2025",
    ),
    PublishedResult(
        id="pytorch/pytorch#154997 bf16",
        kind="product",
        format="bf16",
        call="linear: whether a sliced input gives another result",
        run=linear_of_slice,
        printed=(1.0,),
        versions="2025",
    ),
    PublishedResult(
        id="test_matmul_cuda.test_cublas_baddbmm_large_input linear fp16",
        kind="product",
        format="fp16",
        call="linear with the identity: entries that change",
        run=linear_with_identity,
        printed=(0.0,),
        versions="only CUDA",
        note="of size 100",
    ),
    PublishedResult(
        id="test_matmul_cuda.test_cublas_baddbmm_large_input baddbmm bf16",
        kind="product",
        format="bf16",
        call="baddbmm with the identity: entries that change",
        run=baddbmm_with_identity,
        printed=(0.0,),
        versions="only CUDA",
        note="of size 100",
    ),
    PublishedResult(
        id="test_nn.test_transformerencoderlayer half",
        kind="product",
        format="fp16",
        call="TransformerEncoderLayer: entries beyond rtol 1e-2",
        run=transformer_layer,
        printed=(0.0,),
        versions="CUDA",
        note="of four numbers in the test, in eval mode",
    ),
    PublishedResult(
        id="pytorch/pytorch#165744",
        kind="NaN and inf",
        format="fp16",
        call="conv_transpose2d with weights of inf",
        run=transposed_convolution_with_inf,
        printed=(NAN,) * 36,
        versions="2025-10",
        note="the kernel multiplies the padding",
    ),
)

GRADIENTS = (
    PublishedResult(
        id="pytorch/pytorch#43211",
        kind="gradient",
        format="fp16",
        call="gradient of norm(1e-4, p=3)",
        run=lambda setup: gradients(lambda x: x.norm(3), setup.tensor([1e-4])),
        printed=(NAN,),
        versions="1.6.0, GTX 1050 Ti",
        note="factors of the gradient underflow",
    ),
    PublishedResult(
        id="pytorch/pytorch#104157 128",
        kind="gradient",
        format="fp16",
        call="gradient of bicubic interpolate to 128 x 128",
        run=lambda setup: bicubic_gradient(setup, 128),
        printed=(2048.0,) * 4,
        versions="2.0",
        note="atomic additions in FP16 stop at 2048",
    ),
    PublishedResult(
        id="pytorch/pytorch#104157 32",
        kind="gradient",
        format="fp16",
        call="gradient of bicubic interpolate to 32 x 32",
        run=lambda setup: bicubic_gradient(setup, 32),
        printed=(1024.0,) * 4,
        versions="2.0",
    ),
    PublishedResult(
        id="test_nn.test_hardswish_grad_corner fp16",
        kind="gradient",
        format="fp16",
        call="gradient of hardswish at 3",
        run=lambda setup: hardswish_gradient(setup, 3.0),
        printed=(1.0,) * 81,
        versions="CPU and CUDA",
    ),
    PublishedResult(
        id="test_nn.test_hardswish_grad_corner bf16",
        kind="gradient",
        format="bf16",
        call="gradient of hardswish at -3",
        run=lambda setup: hardswish_gradient(setup, -3.0),
        printed=(0.0,) * 81,
        versions="CPU and CUDA",
    ),
    PublishedResult(
        id="test_nn.test_softmax half backward",
        kind="gradient",
        format="fp16",
        call="gradient of softmax, dtype=float32: entries that differ from FP32's",
        run=softmax_gradient,
        printed=(0.0,),
        versions="CUDA",
        note="FP32's gradient is rounded once",
    ),
    PublishedResult(
        id="test_nn.test_grid_sample_large half backward",
        kind="gradient",
        format="fp16",
        call="gradient of grid_sample of 27 voxels, one infinite coordinate",
        run=grid_sample_gradient,
        printed=(1.0,) * 13 + (0.0,) + (1.0,) * 13,
        decimals=2,
        versions="only CUDA",
        note="within 0.005",
    ),
    PublishedResult(
        id="fastino-ai/GLiNER2#155 backward",
        kind="gradient",
        format="fp16",
        call="gradient of 0 * log1p(-clamp(1, max=1 - 1e-6))",
        run=masked_log_gradient,
        printed=(NAN,),
        versions="A100",
        note="a masked entry's 0 times inf; the pull request's formula, reduced to its factors",
    ),
)

ACCUMULATION = (
    PublishedResult(
        id="pytorch/pytorch#156173",
        kind="accumulation",
        format="fp16",
        call="index_put of 524,288 numbers at 4 places, accumulate=True",
        run=index_put,
        printed=(-323.0, -121.5, -70.1875, -545.5),
        versions="nightly of 2.8, cu126",
        note="accumulates in FP32",
    ),
    PublishedResult(
        id="test_torch.test_scatter_reduce_non_unique_index add",
        kind="accumulation",
        format="fp16",
        call="scatter_ of ones to one row, reduce='add'",
        run=scatter_add,
        printed=(3.0, 3.0, 1.0, 1.0),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_torch.test_grad_scaling_unscale_sparse",
        kind="accumulation",
        format="fp16",
        call="coalesce of 64000 + 64000: whether it overflows",
        run=coalesced_overflow,
        printed=(1.0,),
        versions="CUDA",
    ),
)

ROWS = PRODUCTS + GRADIENTS + ACCUMULATION
