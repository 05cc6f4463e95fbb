"""Calls that mix dtypes: under emulation each is refused, or has the result dtype, as on CUDA.

Every row is a fact about CUDA with its source. Files are below aten/src/ATen/native of PyTorch's repository.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import auditor

pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf"),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),
    pytest.mark.filterwarnings("ignore:Using a target size"),
    pytest.mark.filterwarnings("ignore:index_reduce"),
    pytest.mark.filterwarnings("ignore:The reduce argument of torch.scatter"),
]

aten = torch.ops.aten
FP16, BF16, FP32, FP64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
REFUSED = "refused"

Sure = Literal["read", "shared", "known"]
"""read: in CUDA's source; shared: a check or composition that CPU and CUDA have in common, run; known: not read."""


@dataclass(frozen=True)
class Argument:
    """A tensor of a row: ones if floating-point or boolean, zeros if integer, so that every entry is a valid index."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    transposed: bool = False

    def build(self) -> Tensor:
        is_integer = not self.dtype.is_floating_point and not self.dtype.is_complex and self.dtype is not torch.bool
        make = torch.zeros if is_integer else torch.ones
        x = make(self.shape, dtype=self.dtype)
        return x.transpose(-1, -2).contiguous().transpose(-1, -2) if self.transposed else x

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name}{list(self.shape)}"


def fp16(*shape: int) -> Argument:
    return Argument(FP16, shape)


def bf16(*shape: int) -> Argument:
    return Argument(BF16, shape)


def fp32(*shape: int) -> Argument:
    return Argument(FP32, shape)


def fp64(*shape: int) -> Argument:
    return Argument(FP64, shape)


def int64(*shape: int) -> Argument:
    return Argument(torch.int64, shape)


def int32(*shape: int) -> Argument:
    return Argument(torch.int32, shape)


def boolean(*shape: int) -> Argument:
    return Argument(torch.bool, shape)


def complex64(*shape: int) -> Argument:
    return Argument(torch.complex64, shape)


@dataclass(frozen=True)
class Row:
    """One call. result: the dtype of the first result, or of the first argument if the call only writes to it.

    only_fp16: whether the fact does not hold with BF16 in place of FP16.
    """

    call: Callable[..., Any]
    arguments: tuple[Any, ...]
    result: torch.dtype | Literal["refused"]
    source: str
    sure: Sure
    options: dict[str, Any] = field(default_factory=dict)
    only_fp16: bool = False

    def __str__(self) -> str:
        name = getattr(self.call, "__name__", str(self.call))
        options = [f"{key}={_text(value)}" for key, value in self.options.items()]
        return f"{name}({', '.join([*map(_text, self.arguments), *options])})"


def _text(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_text, value))}]"
    return str(value)


def named(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
    """A function under the name that the test's id shows."""
    call.__name__ = name  # type: ignore[attr-defined]
    return call


def gradient_of(call: Callable[..., Any], dtype: torch.dtype | None = None) -> Callable[..., Tensor]:
    """A function that returns the gradient of `call` for its first argument. dtype: of the gradient it starts with."""

    def run(x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        x.requires_grad_()
        result = call(x, *arguments, **options)
        result.backward(torch.ones_like(result, dtype=dtype))
        assert x.grad is not None
        return x.grad

    return named(f"gradient of {call.__name__}", run)


def in_autocast(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that calls `call` in an FP16 region of CUDA's autocast."""

    def run(*arguments: Any, **options: Any) -> Any:
        with torch.autocast("cuda", dtype=FP16):
            return call(*arguments, **options)

    return named(f"autocast {call.__name__}", run)


def attend(like: Tensor, x: Tensor, key: Tensor, mask: Tensor | None, need_weights: bool) -> Tensor:
    """`nn.MultiheadAttention`, whose weights have the dtype of `like`."""
    layer = nn.MultiheadAttention(4, 2, batch_first=True, dtype=like.dtype)
    result: Tensor = layer(x, key, key, attn_mask=mask, need_weights=need_weights)[0]
    return result


def lstm(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Tensor:
    return torch.lstm(x, (h, c), weights, True, 1, 0.0, False, False, False)[0]


def gru(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
    return torch.gru(x, h, weights, True, 1, 0.0, False, False, False)[0]


def rnn_tanh(x: Tensor, h: Tensor, *weights: Tensor) -> Tensor:
    return torch.rnn_tanh(x, h, weights, True, 1, 0.0, False, False, False)[0]


def lstm_cell(x: Tensor, h: Tensor, c: Tensor, *weights: Tensor) -> Tensor:
    return torch.lstm_cell(x, (h, c), *weights)[0]


def weights(make: Callable[..., Argument], gates: int) -> tuple[Argument, ...]:
    """Weights and biases of a recurrent layer or cell of 2 units with 3 inputs."""
    return make(2 * gates, 3), make(2 * gates, 2), make(2 * gates), make(2 * gates)


OF_STRUCTURED = "C++ meta function"
ITERATOR = "TensorIterator.cpp"
BLAS = "cuda/Blas.cpp"
CONVOLUTION = "Convolution.cpp"

PRODUCTS = [
    Row(torch.mm, (fp16(2, 3), fp32(3, 4)), REFUSED, BLAS, "read"),
    Row(torch.mm, (fp32(2, 3), fp16(3, 4)), REFUSED, BLAS, "read"),
    Row(torch.mm, (fp16(2, 3), bf16(3, 4)), REFUSED, BLAS, "read"),
    Row(torch.mm, (fp16(2, 3), fp16(3, 4)), REFUSED, OF_STRUCTURED, "shared", {"out": fp32(2, 4)}),
    Row(torch.mm, (fp16(2, 3), fp16(3, 4)), FP32, BLAS, "read", {"out_dtype": FP32}),
    Row(torch.bmm, (fp16(1, 2, 3), fp16(1, 3, 4)), FP32, BLAS, "read", {"out_dtype": FP32}),
    Row(torch.addmm, (fp32(4), fp16(2, 3), fp16(3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.addmm, (fp32(2, 4), fp16(2, 3), fp16(3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.addmm, (fp16(4), fp16(2, 3), fp32(3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.addmm, (fp16(4), fp32(2, 3), fp16(3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.addmm_, (fp32(2, 4), fp16(2, 3), fp16(3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.bmm, (fp16(1, 2, 3), fp32(1, 3, 4)), REFUSED, BLAS, "read"),
    Row(torch.baddbmm, (fp32(1, 2, 4), fp16(1, 2, 3), fp16(1, 3, 4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.baddbmm, (fp16(1, 2, 4), fp16(1, 2, 3), fp32(1, 3, 4)), REFUSED, BLAS, "read"),
    Row(torch.addbmm, (fp32(2, 4), fp16(1, 2, 3), fp16(1, 3, 4)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.addbmm, (fp16(2, 4), fp16(1, 2, 3), fp32(1, 3, 4)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.mv, (fp16(2, 3), fp32(3)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.addmv, (fp32(2), fp16(2, 3), fp16(3)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.dot, (fp16(3), fp32(3)), REFUSED, BLAS, "read"),
    Row(torch.vdot, (fp16(3), fp32(3)), REFUSED, BLAS, "read"),
    Row(torch.matmul, (fp16(3), fp32(3)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.matmul, (fp16(2, 3), fp32(3)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.matmul, (fp16(3), fp32(3, 4)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.matmul, (fp16(2, 2, 3), fp32(3, 4)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.matmul, (fp16(2, 2, 3), fp32(2, 3, 4)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.einsum, ("ij,jk->ik", fp16(2, 3), fp32(3, 4)), REFUSED, "Linear.cpp", "shared"),
    Row(torch.einsum, ("i,i->i", fp16(3), fp32(3)), FP32, "Linear.cpp", "shared"),
    Row(torch.einsum, ("i,j->ij", fp16(3), fp32(4)), FP32, "Linear.cpp", "shared"),
    Row(torch.inner, (fp16(3), fp32(3)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.inner, (fp16(3), fp32()), FP16, "LinearAlgebra.cpp", "shared"),
    Row(torch.inner, (fp16(), fp32(3)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(torch.outer, (fp16(3), fp32(4)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(torch.ger, (fp16(3), fp32(4)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(torch.kron, (fp16(2, 2), fp32(2, 2)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(torch.tensordot, (fp16(2, 3), fp32(3, 4)), REFUSED, "Linear.cpp", "shared", {"dims": 1}),
    Row(torch.linalg.vecdot, (fp16(3), fp32(3)), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.linalg.multi_dot, ([fp16(2, 3), fp32(3, 4)],), REFUSED, "LinearAlgebra.cpp", "shared"),
    Row(torch.addr, (fp32(3, 4), fp16(3), fp16(4)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(torch.addr, (fp16(3, 4), fp16(3), fp32(4)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(F.linear, (fp16(2, 3), fp32(4, 3)), REFUSED, BLAS, "read"),
    Row(F.linear, (fp16(2, 3), fp16(4, 3), fp32(4)), REFUSED, "Linear.cpp", "shared"),
    Row(F.linear, (fp16(3), fp16(4, 3), fp32(4)), REFUSED, "Linear.cpp", "shared"),
    Row(F.linear, (fp16(2, 2, 3), fp16(4, 3), fp32(4)), REFUSED, "Linear.cpp", "shared"),
    Row(F.linear, (Argument(FP16, (2, 5, 3), True), fp16(4, 3), fp32(4)), FP16, "Linear.cpp", "read"),
    Row(F.linear, (fp16(2, 3), fp32(4, 3), fp32(4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(F.linear, (fp32(2, 3), fp16(4, 3), fp16(4)), REFUSED, OF_STRUCTURED, "shared"),
    Row(F.bilinear, (fp16(2, 3), fp16(2, 4), fp32(5, 3, 4)), REFUSED, "Linear.cpp", "shared"),
    Row(F.bilinear, (fp16(2, 3), fp16(2, 4), fp16(5, 3, 4), fp32(5)), REFUSED, "Linear.cpp", "shared"),
    Row(torch.cdist, (fp16(2, 3), fp16(2, 3)), REFUSED, "cuda/DistanceKernel.cu", "read"),
    Row(torch.cdist, (fp16(2, 3), fp32(2, 3)), REFUSED, "cuda/DistanceKernel.cu", "read"),
    Row(torch.cdist, (fp32(2, 3), fp16(2, 3)), REFUSED, "cuda/DistanceKernel.cu", "read"),
    Row(torch.cdist, (fp16(26, 3), fp32(26, 3)), REFUSED, "Distance.cpp", "shared"),
]

CONVOLUTIONS = [
    Row(F.conv1d, (fp16(1, 2, 5), fp32(2, 2, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv2d, (fp16(1, 2, 5, 5), fp32(2, 2, 3, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv3d, (fp16(1, 2, 5, 5, 5), fp32(2, 2, 3, 3, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv2d, (fp32(1, 2, 5, 5), fp16(2, 2, 3, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv1d, (fp16(1, 2, 5), fp16(2, 2, 3), fp32(2)), REFUSED, CONVOLUTION, "shared"),
    Row(F.conv2d, (fp16(1, 2, 5, 5), fp16(2, 2, 3, 3), fp32(2)), REFUSED, CONVOLUTION, "shared"),
    Row(F.conv2d, (fp16(1, 2, 5, 5), fp32(2, 2, 3, 3), fp32(2)), REFUSED, CONVOLUTION, "shared"),
    Row(F.conv2d, (fp16(1, 2, 5, 5), fp16(2, 2, 3, 3), fp32(2)), REFUSED, CONVOLUTION, "read", {"padding": "same"}),
    Row(F.conv2d, (fp32(1, 2, 5, 5), fp32(2, 2, 3, 3), fp16(2)), REFUSED, CONVOLUTION, "read", {"padding": "same"}),
    Row(F.conv2d, (fp16(1, 2, 5, 5), fp32(2, 1, 3, 3)), REFUSED, CONVOLUTION, "read", {"groups": 2}),
    Row(F.conv_transpose1d, (fp16(1, 2, 5), fp32(2, 2, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv_transpose2d, (fp16(1, 2, 5, 5), fp32(2, 2, 3, 3)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv_transpose2d, (fp16(1, 2, 5, 5), fp16(2, 2, 3, 3), fp32(2)), REFUSED, CONVOLUTION, "read"),
    Row(F.conv_transpose2d, (fp32(1, 2, 5, 5), fp32(2, 2, 3, 3), fp16(2)), REFUSED, CONVOLUTION, "read"),
]

GRID = "cuda/GridSampler.cu, issue 94733"
ALIGNED = {"align_corners": True}
NOT_ALIGNED = {"align_corners": False}

GRIDS = [
    Row(F.grid_sample, (fp16(1, 2, 4, 4), fp32(1, 3, 3, 2)), REFUSED, GRID, "read", NOT_ALIGNED),
    Row(F.grid_sample, (fp32(1, 2, 4, 4), fp16(1, 3, 3, 2)), REFUSED, GRID, "read", NOT_ALIGNED),
    Row(F.grid_sample, (fp16(1, 2, 4, 4), fp32(1, 3, 3, 2)), REFUSED, "cudnn/GridSampler.cpp", "read", ALIGNED),
    Row(F.grid_sample, (fp16(1, 2, 4, 4, 4), fp32(1, 3, 3, 3, 3)), REFUSED, GRID, "read", NOT_ALIGNED),
    Row(F.grid_sample, (fp32(1, 2, 4, 4, 4), fp16(1, 3, 3, 3, 3)), REFUSED, GRID, "read", NOT_ALIGNED),
]

LOSS = "Loss.cpp"

LOSSES = [
    Row(F.mse_loss, (fp16(2, 2), fp32(2, 2)), FP32, OF_STRUCTURED, "shared"),
    Row(F.l1_loss, (fp16(2, 2), fp32(2, 2)), FP32, LOSS, "shared"),
    Row(F.smooth_l1_loss, (fp16(2, 2), fp32(2, 2)), FP32, OF_STRUCTURED, "shared"),
    Row(F.huber_loss, (fp16(2, 2), fp32(2, 2)), FP16, LOSS, "shared"),
    Row(F.huber_loss, (fp32(2, 2), fp16(2, 2)), FP32, LOSS, "shared"),
    Row(gradient_of(F.huber_loss), (fp16(2, 2), fp32(2, 2)), REFUSED, LOSS, "shared"),
    Row(F.binary_cross_entropy, (fp16(2, 2), fp32(2, 2)), REFUSED, "cuda/Loss.cu", "read"),
    Row(F.binary_cross_entropy, (fp32(2, 2), fp16(2, 2)), REFUSED, "cuda/Loss.cu", "read"),
    Row(F.binary_cross_entropy, (fp16(2, 2), fp16(2, 2), fp32(2, 2)), FP16, "cuda/Loss.cu", "read"),
    Row(F.binary_cross_entropy_with_logits, (fp16(2, 2), fp32(2, 2)), FP32, LOSS, "shared"),
    Row(F.binary_cross_entropy_with_logits, (fp32(2, 2), fp16(2, 2)), FP16, LOSS, "shared"),
    Row(F.binary_cross_entropy_with_logits, (fp16(2, 2), fp16(2, 2), fp32(2, 2)), FP16, LOSS, "shared"),
    Row(F.binary_cross_entropy_with_logits, (fp16(2, 2), fp16(2, 2)), FP16, LOSS, "shared", {"pos_weight": fp32(2)}),
    Row(F.cross_entropy, (fp16(2, 3), int64(2), fp32(3)), REFUSED, "cuda/Loss.cu", "read"),
    Row(F.cross_entropy, (fp32(2, 3), int64(2), fp16(3)), REFUSED, "cuda/Loss.cu", "read"),
    Row(
        F.cross_entropy,
        (fp16(2, 3), int64(2), fp32(3)),
        REFUSED,
        "cuda/Loss.cu",
        "read",
        {"label_smoothing": 0.1},
    ),
    Row(F.nll_loss, (fp16(2, 3), int64(2), fp32(3)), REFUSED, "cuda/Loss.cu", "read", {"reduction": "none"}),
    Row(F.nll_loss, (fp16(3), int64(), fp32(3)), REFUSED, "cuda/Loss.cu", "read"),
    Row(F.nll_loss, (fp16(2, 3, 4, 4), int64(2, 4, 4), fp32(3)), REFUSED, "cuda/NLLLoss2d.cu", "read"),
    Row(F.cross_entropy, (fp16(2, 3), fp32(2, 3)), FP32, LOSS, "shared"),
    Row(F.cross_entropy, (fp32(2, 3), fp16(2, 3)), FP32, LOSS, "shared"),
    Row(F.cross_entropy, (fp32(2, 3), fp16(2, 3), fp32(3)), FP32, LOSS, "shared", {"label_smoothing": 0.1}),
    Row(F.kl_div, (fp16(2, 2), fp32(2, 2)), FP32, LOSS, "shared", {"reduction": "sum"}),
    Row(F.poisson_nll_loss, (fp16(2, 2), fp32(2, 2)), FP32, LOSS, "shared"),
    Row(F.gaussian_nll_loss, (fp16(2, 2), fp32(2, 2), fp16(2, 2)), FP32, "torch/nn/functional.py", "shared"),
    Row(F.gaussian_nll_loss, (fp16(2, 2), fp16(2, 2), fp32(2, 2)), FP32, "torch/nn/functional.py", "shared"),
    Row(F.cosine_embedding_loss, (fp16(2, 2), fp32(2, 2), fp16(2)), FP32, LOSS, "shared"),
    Row(F.cosine_embedding_loss, (fp16(2, 2), fp16(2, 2), fp32(2)), FP16, LOSS, "shared"),
    Row(F.triplet_margin_loss, (fp16(2, 2), fp32(2, 2), fp16(2, 2)), FP32, LOSS, "shared"),
    Row(F.margin_ranking_loss, (fp16(2), fp32(2), fp16(2)), FP32, LOSS, "shared"),
    Row(F.hinge_embedding_loss, (fp16(2), fp32(2)), FP16, LOSS, "shared"),
    Row(F.soft_margin_loss, (fp16(2), fp32(2)), FP16, LOSS, "shared"),
    Row(F.soft_margin_loss, (fp32(2), fp16(2)), FP32, LOSS, "shared"),
    Row(F.multilabel_soft_margin_loss, (fp16(2, 2), fp32(2, 2)), FP32, "torch/nn/functional.py", "shared"),
    Row(F.multilabel_soft_margin_loss, (fp16(2, 2), fp16(2, 2), fp32(2)), FP32, "torch/nn/functional.py", "shared"),
    Row(F.multi_margin_loss, (fp16(2, 2), int64(2)), REFUSED, "cuda/MultiMarginLoss.cu", "read", {"weight": fp32(2)}),
]

INDEXING = "TensorAdvancedIndexing.cpp"

INDICES = [
    Row(Tensor.index_put, (fp16(4), (int64(2),), fp32(2)), REFUSED, INDEXING, "read"),
    Row(Tensor.index_put, (fp32(4), (int64(2),), fp16(2)), REFUSED, INDEXING, "read"),
    Row(Tensor.index_put, (fp16(4), (int64(2),), fp32()), REFUSED, INDEXING, "read"),
    Row(Tensor.index_put, (fp16(4), (int64(2),), fp32(2), True), REFUSED, "cuda/Indexing.cu", "read"),
    Row(Tensor.__setitem__, (fp16(4), int64(2), fp32(2)), REFUSED, INDEXING, "read"),
    Row(Tensor.__setitem__, (fp16(4), boolean(4), fp32()), REFUSED, INDEXING, "read"),
    Row(Tensor.__setitem__, (fp16(4), boolean(4), fp32(1)), REFUSED, INDEXING, "read"),
    Row(Tensor.__setitem__, (fp16(4), int64(2), 1.5), FP16, INDEXING, "shared"),
    Row(Tensor.__setitem__, (fp16(4), slice(1, 3), fp32(2)), FP16, INDEXING, "shared"),
    Row(Tensor.copy_, (fp16(4), fp32(4)), FP16, "Copy.cpp", "shared"),
    Row(Tensor.copy_, (int64(4), fp16(4)), torch.int64, "Copy.cpp", "shared"),
    Row(Tensor.index_add, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_add, (fp32(4), 0, int64(2), fp16(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_add_, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_copy, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_reduce, (fp16(4), 0, int64(2), fp32(2), "mean"), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_fill, (fp16(4), 0, int64(2), fp32()), FP16, INDEXING, "shared"),
    Row(Tensor.scatter, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter_, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared", {"reduce": "add"}),
    Row(Tensor.scatter, (fp16(4), 0, int64(2), 1.5), FP16, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter_add, (fp16(4), 0, int64(2), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter_add_, (fp32(4), 0, int64(2), fp16(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter_reduce, (fp16(4), 0, int64(2), fp32(2), "sum"), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.scatter_reduce, (fp32(4), 0, int64(2), fp16(2), "amax"), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.masked_scatter, (fp16(4), boolean(4), fp32(4)), REFUSED, "cuda/IndexKernel.cpp", "read"),
    Row(Tensor.masked_fill, (fp16(4), boolean(4), fp32()), FP16, "cuda/Indexing.cu", "read"),
    Row(Tensor.masked_fill, (fp16(4), boolean(4), fp64()), FP16, "cuda/Indexing.cu", "read"),
    Row(Tensor.masked_fill_, (fp16(4), boolean(4), fp32()), FP16, "cuda/Indexing.cu", "read"),
    Row(Tensor.put, (fp16(4), int64(2), fp32(2)), REFUSED, INDEXING, "read"),
    Row(Tensor.put_, (fp16(4), int64(2), fp32(2), True), REFUSED, INDEXING, "read"),
    Row(torch.gather, (fp16(4), 0, int64(2)), REFUSED, OF_STRUCTURED, "shared", {"out": fp32(2)}),
    Row(torch.index_select, (fp16(4), 0, int32(2)), FP16, "cuda/Indexing.cu", "read"),
    Row(torch.index_select, (fp16(4), 0, int64(2)), REFUSED, "cuda/Indexing.cu", "read", {"out": fp32(2)}),
    Row(torch.select_scatter, (fp16(2, 3), fp32(3), 0, 0), FP16, "TensorShape.cpp", "shared"),
    Row(torch.slice_scatter, (fp16(4), fp32(2)), FP16, "TensorShape.cpp", "shared", {"end": 2}),
    Row(torch.diagonal_scatter, (fp16(3, 3), fp32(3)), FP16, "TensorShape.cpp", "shared"),
    Row(Tensor.fill_, (fp16(4), fp32()), FP16, "Fill.cpp", "shared"),
    Row(F.embedding, (int64(2), fp16(4, 3)), FP16, "Embedding.cpp", "shared"),
    Row(F.embedding, (int32(2), fp16(4, 3)), FP16, "Embedding.cpp", "shared"),
    Row(
        F.embedding_bag,
        (int64(1, 2), fp16(4, 3)),
        REFUSED,
        "cuda/EmbeddingBag.cu",
        "read",
        {"mode": "sum", "per_sample_weights": fp32(1, 2)},
    ),
]

JOINS = [
    Row(torch.cat, ([fp16(3), fp32(3)],), FP32, OF_STRUCTURED, "shared"),
    Row(torch.cat, ([fp16(3), bf16(3)],), FP32, OF_STRUCTURED, "shared"),
    Row(torch.cat, ([fp16(3), int64(3)],), FP16, OF_STRUCTURED, "shared"),
    Row(torch.stack, ([fp16(3), fp32(3)],), FP32, "TensorShape.cpp", "shared"),
    Row(torch.hstack, ([fp16(3), fp32(3)],), FP32, "TensorShape.cpp", "shared"),
    Row(torch.vstack, ([fp16(3), fp32(3)],), FP32, "TensorShape.cpp", "shared"),
    Row(torch.block_diag, (fp16(2, 2), fp32(2, 2)), FP32, "TensorShape.cpp", "shared"),
    Row(torch.cat, ([fp32(3), fp32(3)],), FP16, OF_STRUCTURED, "shared", {"out": fp16(6)}),
    Row(torch.stack, ([fp16(3), fp32(3)],), FP16, "TensorShape.cpp", "shared", {"out": fp16(2, 3)}),
    Row(torch.meshgrid, (fp16(2), fp32(2)), REFUSED, "TensorShape.cpp", "shared", {"indexing": "ij"}),
    Row(torch.cartesian_prod, (fp16(2), fp32(2)), REFUSED, "TensorShape.cpp", "shared"),
    Row(torch.where, (boolean(3), fp16(3), fp32(3)), FP32, "TensorCompare.cpp", "shared"),
    Row(torch.where, (boolean(3), fp16(3), fp32()), FP16, "TensorCompare.cpp", "shared"),
    Row(torch.where, (boolean(3), fp16(3), fp64()), FP16, "TensorCompare.cpp", "shared"),
    Row(torch.where, (boolean(3), fp16(3), 0.5), FP16, "TensorCompare.cpp", "shared"),
    Row(torch.where, (boolean(3), int64(3), fp16(3)), FP16, "TensorCompare.cpp", "shared"),
    Row(torch.where, (boolean(3), fp16(3), fp32(3)), REFUSED, "TensorCompare.cpp", "shared", {"out": fp16(3)}),
    Row(torch.searchsorted, (fp16(3), fp32(2)), torch.int64, "BucketizationUtils.h", "read"),
    Row(torch.bucketize, (fp32(2), fp16(3)), torch.int64, "BucketizationUtils.h", "read"),
    Row(torch.isin, (fp16(3), fp32(2)), torch.bool, OF_STRUCTURED, "shared"),
]

ATTENTION_FILE = "transformers/attention.cpp"
HALF_HEADS = (fp16(1, 2, 3, 4), fp16(1, 2, 3, 4), fp16(1, 2, 3, 4))
attention = F.scaled_dot_product_attention

ATTENTION = [
    Row(attention, (fp16(1, 2, 3, 4), fp32(1, 2, 3, 4), fp16(1, 2, 3, 4)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (fp16(1, 2, 3, 4), fp16(1, 2, 3, 4), fp32(1, 2, 3, 4)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (fp32(1, 2, 3, 4), fp16(1, 2, 3, 4), fp16(1, 2, 3, 4)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (*HALF_HEADS, bf16(3, 3)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (*HALF_HEADS, fp64(3, 3)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (*[fp32(1, 2, 3, 4)] * 3, fp16(3, 3)), REFUSED, ATTENTION_FILE, "shared"),
    Row(attention, (*HALF_HEADS, boolean(3, 3)), FP16, ATTENTION_FILE, "shared"),
    Row(attention, (*HALF_HEADS, fp16(3, 3)), FP16, ATTENTION_FILE, "shared"),
    Row(attention, (*[fp64(1, 2, 3, 4)] * 3, fp32(3, 3)), FP64, ATTENTION_FILE, "shared"),
    Row(
        aten._scaled_dot_product_attention_math,
        (fp16(1, 2, 3, 4), fp32(1, 2, 3, 4), fp16(1, 2, 3, 4)),
        FP16,
        ATTENTION_FILE,
        "shared",
    ),
    Row(attend, (fp16(), fp32(1, 3, 4), fp32(1, 3, 4), None, False), REFUSED, OF_STRUCTURED, "shared"),
    Row(attend, (fp16(), fp16(1, 3, 4), fp32(1, 3, 4), None, False), REFUSED, OF_STRUCTURED, "shared"),
    Row(attend, (fp16(), fp16(1, 3, 4), fp16(1, 3, 4), fp32(3, 3), True), REFUSED, OF_STRUCTURED, "shared"),
    Row(attend, (fp16(), fp16(1, 3, 4), fp16(1, 3, 4), bf16(3, 3), True), REFUSED, OF_STRUCTURED, "shared"),
    Row(attend, (fp16(), fp16(1, 3, 4), fp16(1, 3, 4), boolean(3, 3), True), FP16, ATTENTION_FILE, "shared"),
]

NORM = "cuda/layer_norm_kernel.cu"
GROUP_NORM = "cuda/group_norm_kernel.cu"
CUDNN_NORM = "cudnn/BatchNorm.cpp"
NATIVE_NORM = "cuda/Normalization.cu"
TRAIN = {"training": True}


def batch_norm(
    x: Tensor,
    running: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
) -> Tensor:
    """`F.batch_norm` with a running mean and a running variance of one dtype."""
    variance = None if running is None else running.clone()
    return F.batch_norm(x, running, variance, weight, bias, training)


NORMS = [
    Row(F.layer_norm, (fp16(2, 3), (3,), fp32(3), fp32(3)), REFUSED, NORM + ", issue 135969", "read"),
    Row(F.layer_norm, (fp16(2, 3), (3,), fp32(3)), REFUSED, NORM, "read"),
    Row(F.layer_norm, (fp16(2, 3), (3,), fp16(3), fp32(3)), REFUSED, NORM, "read"),
    Row(F.layer_norm, (fp32(2, 3), (3,), fp16(3), fp16(3)), REFUSED, NORM, "read"),
    Row(F.group_norm, (fp16(2, 4, 3), 2, fp32(4), fp32(4)), REFUSED, GROUP_NORM, "read"),
    Row(F.group_norm, (fp32(2, 4, 3), 2, fp16(4), fp16(4)), REFUSED, "group_norm.cpp", "shared"),
    Row(F.rms_norm, (fp16(2, 3), (3,), fp32(3)), FP16, "layer_norm.cpp", "read"),
    Row(F.rms_norm, (fp32(2, 3), (3,), fp16(3)), FP32, "layer_norm.cpp", "read"),
    Row(aten._fused_rms_norm, (fp16(2, 3), (3,), fp32(3), 1e-5), REFUSED, NORM, "read"),
    Row(batch_norm, (fp16(2, 3, 4, 4), fp32(3), fp32(3), fp32(3)), FP16, CUDNN_NORM, "read", TRAIN),
    Row(batch_norm, (fp16(2, 3, 4, 4), fp32(3), fp32(3), fp32(3)), FP16, CUDNN_NORM, "read"),
    Row(batch_norm, (bf16(2, 3, 4, 4), bf16(3), fp32(3), fp32(3)), BF16, NATIVE_NORM, "read"),
    Row(batch_norm, (fp32(2, 3, 4, 4), fp32(3), fp16(3), fp16(3)), REFUSED, CUDNN_NORM, "read"),
    Row(batch_norm, (fp16(2, 3), fp32(3), fp32(3), fp32(3)), FP16, NATIVE_NORM, "read", TRAIN),
    Row(batch_norm, (fp16(2, 3), fp16(3), fp32(3), fp32(3)), FP16, NATIVE_NORM, "read"),
    Row(batch_norm, (fp16(2, 3, 4), fp16(3), fp16(3), fp16(3)), FP16, NATIVE_NORM, "read"),
    Row(batch_norm, (fp16(2, 3, 4), fp32(3), fp16(3), fp16(3)), FP16, NATIVE_NORM, "read"),
    Row(batch_norm, (fp16(2, 3, 4), fp32(3), fp16(3), fp16(3)), FP16, NATIVE_NORM, "read", TRAIN),
    Row(gradient_of(batch_norm), (fp16(2, 3, 4), fp32(3), fp16(3), fp16(3)), REFUSED, NATIVE_NORM, "read", TRAIN),
    Row(gradient_of(batch_norm), (fp16(2, 3, 4, 4), fp32(3), fp32(3), fp32(3)), FP16, CUDNN_NORM, "read", TRAIN),
    Row(batch_norm, (fp16(2, 3, 4), fp16(3), fp16(3), fp32(3)), REFUSED, "cuda/Normalization.cuh", "read"),
    Row(batch_norm, (fp16(2, 3, 4), fp16(3), bf16(3), bf16(3)), REFUSED, "cuda/Normalization.cuh", "read"),
    Row(batch_norm, (fp32(2, 3), fp32(3), fp16(3), fp16(3)), REFUSED, "cuda/Normalization.cuh", "read"),
    Row(batch_norm, (fp32(2, 3, 4), fp32(3), bf16(3), bf16(3)), REFUSED, "cuda/Normalization.cuh", "read"),
    Row(batch_norm, (fp16(2, 3, 4), fp32(3)), FP16, NATIVE_NORM, "read"),
    Row(batch_norm, (fp32(2, 3, 4), fp16(3)), FP32, NATIVE_NORM, "read"),
    Row(gradient_of(batch_norm), (fp32(2, 3, 4), fp16(3)), REFUSED, NATIVE_NORM, "read"),
    Row(
        F.instance_norm,
        (fp16(2, 3, 4), None, None, fp32(3), fp32(3)),
        FP16,
        NATIVE_NORM,
        "read",
    ),
    Row(F.instance_norm, (fp16(2, 3, 4), fp32(3), fp32(3)), FP16, NATIVE_NORM, "read"),
    Row(torch._weight_norm, (fp16(3, 2), fp32(3, 1)), REFUSED, "cuda/WeightNorm.cu", "read"),
]

LAYER = "cudnn/RNN.cpp"
CELL = "RNN.cpp"

RECURRENT = [
    Row(lstm, (fp16(4, 1, 3), fp32(1, 1, 2), fp32(1, 1, 2), *weights(fp16, 4)), REFUSED, LAYER, "read"),
    Row(lstm, (fp16(4, 1, 3), fp16(1, 1, 2), fp32(1, 1, 2), *weights(fp16, 4)), REFUSED, LAYER, "read"),
    Row(lstm, (fp16(4, 1, 3), fp16(1, 1, 2), fp16(1, 1, 2), *weights(fp32, 4)), REFUSED, LAYER, "read"),
    Row(lstm, (fp32(4, 1, 3), fp32(1, 1, 2), fp32(1, 1, 2), *weights(fp16, 4)), REFUSED, LAYER, "read"),
    Row(gru, (fp16(4, 1, 3), fp32(1, 1, 2), *weights(fp16, 3)), REFUSED, LAYER, "read"),
    Row(gru, (fp16(4, 1, 3), fp16(1, 1, 2), *weights(fp32, 3)), REFUSED, LAYER, "read"),
    Row(rnn_tanh, (fp16(4, 1, 3), fp32(1, 1, 2), *weights(fp16, 1)), REFUSED, LAYER, "read"),
    Row(lstm_cell, (fp32(1, 3), fp16(1, 2), fp16(1, 2), *weights(fp16, 4)), REFUSED, CELL, "read"),
    Row(lstm_cell, (fp16(1, 3), fp32(1, 2), fp16(1, 2), *weights(fp16, 4)), REFUSED, CELL, "read"),
    Row(lstm_cell, (fp16(1, 3), fp16(1, 2), fp32(1, 2), *weights(fp16, 4)), REFUSED, "cuda/RNN.cu", "read"),
    Row(torch.gru_cell, (fp32(1, 3), fp16(1, 2), *weights(fp16, 3)), REFUSED, CELL, "read"),
    Row(torch.gru_cell, (fp16(1, 3), fp32(1, 2), *weights(fp16, 3)), REFUSED, CELL, "read"),
    Row(torch.rnn_tanh_cell, (fp32(1, 3), fp16(1, 2), *weights(fp16, 1)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.rnn_tanh_cell, (fp16(1, 3), fp32(1, 2), *weights(fp16, 1)), REFUSED, OF_STRUCTURED, "shared"),
]

PROMOTING = (
    torch.add,
    torch.sub,
    torch.mul,
    torch.div,
    torch.maximum,
    torch.minimum,
    torch.fmax,
    torch.fmin,
    torch.pow,
    torch.atan2,
    torch.copysign,
    torch.fmod,
    torch.remainder,
    torch.hypot,
    torch.logaddexp,
    torch.logaddexp2,
    torch.xlogy,
    torch.special.xlog1py,
    torch.ldexp,
    torch.floor_divide,
)
NO_HALF_KERNEL = (torch.special.zeta, torch.igamma)
COMPARING = (torch.eq, torch.ne, torch.lt, torch.le, torch.gt, torch.ge, torch.logical_and)
IN_PLACE = (
    Tensor.add_,
    Tensor.mul_,
    Tensor.div_,
    Tensor.pow_,
    Tensor.atan2_,
    Tensor.copysign_,
    Tensor.fmod_,
    Tensor.remainder_,
    Tensor.hypot_,
    Tensor.xlogy_,
)


def elementwise_rows() -> Iterator[Row]:
    """Operations of two tensors: all promote by the same rule."""
    for call in (*PROMOTING, *NO_HALF_KERNEL):
        yield Row(call, (fp16(3), fp32(3)), FP32, ITERATOR, "shared")
    for call in PROMOTING:
        yield Row(call, (fp16(3), bf16(3)), FP32, ITERATOR, "shared")
        yield Row(call, (fp16(3), fp32()), FP16, ITERATOR, "shared")
        yield Row(call, (fp16(), fp32()), FP32, ITERATOR, "shared")
    for call in COMPARING:
        yield Row(call, (fp16(3), fp32(3)), torch.bool, ITERATOR, "shared")
    for call in IN_PLACE:
        yield Row(call, (fp16(3), fp32(3)), FP16, ITERATOR, "shared")
        yield Row(call, (fp32(3), fp16(3)), FP32, ITERATOR, "shared")
        yield Row(call, (bf16(3), fp16(3)), BF16, ITERATOR, "shared")


ELEMENTWISE = [
    *elementwise_rows(),
    Row(torch.mul, (fp16(3), fp64()), FP16, ITERATOR, "shared"),
    Row(torch.mul, (int64(3), fp16()), FP16, ITERATOR, "shared"),
    Row(torch.mul, (int64(3), fp32()), FP32, ITERATOR, "shared"),
    Row(torch.mul, (fp16(3), int64(3)), FP16, ITERATOR, "shared"),
    Row(torch.mul, (boolean(3), fp16(3)), FP16, ITERATOR, "shared"),
    Row(torch.mul, (fp16(3), 2.5), FP16, ITERATOR, "shared"),
    Row(torch.mul, (fp16(3), complex64(3)), torch.complex64, ITERATOR, "shared"),
    Row(torch.mul, (fp16(3), 2j), torch.complex32, ITERATOR, "shared", only_fp16=True),
    Row(torch.float_power, (fp16(3), fp32(3)), FP64, ITERATOR, "shared"),
    Row(torch.add, (fp16(3), fp16(3)), FP32, ITERATOR, "shared", {"out": fp32(3)}),
    Row(torch.add, (fp32(3), fp32(3)), FP16, ITERATOR, "shared", {"out": fp16(3)}),
    Row(torch.add, (fp16(3), fp32(3)), FP16, ITERATOR, "shared", {"out": fp16(3)}),
    Row(torch.add, (fp16(3), fp16(3)), BF16, ITERATOR, "shared", {"out": bf16(3)}),
    Row(torch.add, (int64(3), int64(3)), FP16, ITERATOR, "shared", {"out": fp16(3)}),
    Row(torch.eq, (fp16(3), fp16(3)), FP16, ITERATOR, "shared", {"out": fp16(3)}),
    Row(torch.exp, (fp32(3),), FP16, ITERATOR, "shared", {"out": fp16(3)}),
    Row(torch.sum, (fp32(3, 3), 1), FP16, OF_STRUCTURED, "shared", {"out": fp16(3)}),
    Row(torch.sum, (fp16(3, 3), 1), BF16, OF_STRUCTURED, "shared", {"out": bf16(3)}),
    Row(torch.mean, (fp16(3, 3), 1), FP32, OF_STRUCTURED, "shared", {"out": fp32(3)}),
    Row(torch.cumsum, (fp32(3), 0), FP16, OF_STRUCTURED, "shared", {"out": fp16(3)}),
    Row(torch.cumsum, (fp16(3), 0), FP32, OF_STRUCTURED, "shared", {"dtype": FP32}),
    Row(torch.softmax, (fp16(3), 0), FP32, OF_STRUCTURED, "shared", {"dtype": FP32}),
    Row(torch.sum, (fp16(3),), FP32, OF_STRUCTURED, "shared", {"dtype": FP32}),
    Row(torch.amax, (fp32(3, 3), 1), REFUSED, OF_STRUCTURED, "shared", {"out": fp16(3)}),
    Row(torch.max, (fp32(3, 3), 1), REFUSED, OF_STRUCTURED, "shared", {"out": (fp16(3), int64(3))}),
    Row(torch.sort, (fp32(3),), REFUSED, OF_STRUCTURED, "shared", {"out": (fp16(3), int64(3))}),
    Row(torch.topk, (fp32(3), 2), REFUSED, OF_STRUCTURED, "shared", {"out": (fp16(2), int64(2))}),
    Row(torch.softmax, (fp32(3), 0), REFUSED, OF_STRUCTURED, "shared", {"out": fp16(3)}),
    Row(torch.linalg.vector_norm, (fp16(3),), REFUSED, OF_STRUCTURED, "shared", {"out": fp32()}),
    Row(torch.tril, (fp32(3, 3),), REFUSED, OF_STRUCTURED, "shared", {"out": fp16(3, 3)}),
    Row(torch.addcmul, (fp16(3), fp16(3), fp32(3)), FP32, OF_STRUCTURED, "shared"),
    Row(torch.addcmul, (fp32(3), fp16(3), fp16(3)), FP32, OF_STRUCTURED, "shared"),
    Row(torch.addcmul, (fp16(3), fp32(), fp16(3)), FP16, OF_STRUCTURED, "shared"),
    Row(torch.addcdiv, (fp16(3), fp16(3), fp32(3)), FP32, OF_STRUCTURED, "shared"),
    Row(torch.addcdiv, (fp16(3), fp16(3), fp32()), FP16, OF_STRUCTURED, "shared"),
    Row(Tensor.addcmul_, (fp16(3), fp32(3), fp32(3)), FP16, OF_STRUCTURED, "shared"),
    Row(Tensor.addcdiv_, (fp16(3), fp32(3), fp32(3)), FP16, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp32(3), 0.5), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp32(), 0.5), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp16(3), fp32(3)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp16(3), fp32(1)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp16(3), fp32()), FP16, OF_STRUCTURED, "shared"),
    Row(torch.lerp, (fp16(3), fp16(3), fp64()), FP16, OF_STRUCTURED, "shared"),
    Row(Tensor.lerp_, (fp16(3), fp32(3), 0.5), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.clamp, (fp16(3),), FP32, OF_STRUCTURED, "shared", {"min": fp32(3)}),
    Row(torch.clamp, (fp16(3),), FP16, OF_STRUCTURED, "shared", {"min": fp32(), "max": fp32()}),
    Row(torch.clamp_min, (fp16(3), fp32(3)), FP32, OF_STRUCTURED, "shared"),
    Row(torch.clamp_max, (fp16(3), fp32()), FP16, OF_STRUCTURED, "shared"),
    Row(Tensor.clamp_, (fp16(3),), FP16, OF_STRUCTURED, "shared", {"min": fp32(3)}),
    Row(F.prelu, (fp16(2, 3), fp32(3)), REFUSED, "Activation.cpp", "shared"),
    Row(F.prelu, (fp32(2, 3), fp16(1)), REFUSED, "Activation.cpp", "shared"),
    Row(torch.isclose, (fp16(3), fp32(3)), REFUSED, "TensorCompare.cpp", "shared"),
    Row(torch.allclose, (fp16(3), fp32(3)), REFUSED, "TensorCompare.cpp", "shared"),
    Row(torch.isclose, (bf16(3), fp16(3)), REFUSED, "TensorCompare.cpp", "shared"),
    Row(torch.heaviside, (fp16(3), fp32(3)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.heaviside, (fp16(3), fp32()), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.complex, (fp16(3), fp32(3)), REFUSED, "TensorFactories.cpp", "shared"),
    Row(torch.cross, (fp16(3), fp32(3)), REFUSED, "cuda/CrossKernel.cu", "read", {"dim": 0}),
    Row(torch.linalg.cross, (fp32(2, 3), fp16(2, 3)), REFUSED, "cuda/CrossKernel.cu", "read"),
    Row(torch._foreach_add, ([fp16(3)], [fp32(3)]), FP32, "ForeachUtils.h", "read"),
    Row(torch._foreach_mul, ([fp32(3)], [fp16(3)]), FP32, "ForeachUtils.h", "read"),
    Row(torch._foreach_lerp_, ([fp16(3)], [fp32(3)], 0.5), REFUSED, OF_STRUCTURED, "shared"),
    Row(
        torch._amp_foreach_non_finite_check_and_unscale_,
        ([fp16(3)], fp32(1), fp32(1)),
        FP16,
        "cuda/AmpKernels.cu",
        "known",
    ),
    Row(
        torch._amp_foreach_non_finite_check_and_unscale_,
        ([fp16(3)], fp32(1), fp16(1)),
        REFUSED,
        "cuda/AmpKernels.cu",
        "known",
    ),
]

OTHERS = [
    Row(torch.dist, (fp16(3), fp32(3)), FP32, "LinearAlgebra.cpp", "shared"),
    Row(F.pairwise_distance, (fp16(2, 3), fp32(2, 3)), FP32, "Distance.cpp", "shared"),
    Row(F.cosine_similarity, (fp16(2, 3), fp32(2, 3)), FP32, "Distance.cpp", "shared"),
    Row(F.cosine_similarity, (fp16(2, 3), bf16(2, 3)), FP32, "Distance.cpp", "shared"),
    Row(torch.trapezoid, (fp16(3), fp32(3)), FP32, "Integration.cpp", "shared"),
    Row(torch.quantile, (fp16(3), 0.5), REFUSED, "Sorting.cpp", "shared"),
    Row(torch.nanquantile, (fp16(3), 0.5), REFUSED, "Sorting.cpp", "shared"),
    Row(torch.bincount, (int64(3), fp16(3)), FP64, "cuda/SummaryOps.cu", "read"),
    Row(torch.normal, (fp16(3), fp32(3)), FP16, "Distributions.cpp", "shared"),
    Row(torch.normal, (fp32(3), fp16(3)), FP32, "Distributions.cpp", "shared"),
    Row(Tensor.bernoulli_, (fp16(3), fp32(3)), FP16, "cuda/DistributionTemplates.h", "read"),
    Row(
        torch.stft,
        (fp16(16), 4),
        torch.complex64,
        "SpectralOps.cpp",
        "shared",
        {"window": fp32(4), "return_complex": True},
    ),
    Row(
        torch.stft,
        (fp32(16), 4),
        torch.complex64,
        "SpectralOps.cpp",
        "shared",
        {"window": fp16(4), "return_complex": True},
    ),
    Row(torch.istft, (complex64(3, 5), 4), FP32, "SpectralOps.cpp", "shared", {"window": fp16(4)}),
    Row(torch.cov, (fp16(2, 3),), FP32, "Correlation.cpp", "shared", {"aweights": fp32(3)}),
]

WRONG_KINDS = [
    Row(torch.mm, (fp16(2, 3), int64(3, 4)), REFUSED, BLAS, "read"),
    Row(F.binary_cross_entropy, (fp16(2, 2), int64(2, 2)), REFUSED, "cuda/Loss.cu", "read"),
    Row(F.binary_cross_entropy_with_logits, (fp16(2, 2), int64(2, 2)), REFUSED, LOSS, "shared"),
    Row(F.nll_loss, (fp16(2, 3), int32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(F.nll_loss, (fp16(2, 3), fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(F.nll_loss, (fp16(2, 3, 4, 4), int32(2, 4, 4)), REFUSED, "cuda/NLLLoss2d.cu", "read"),
    Row(F.multilabel_margin_loss, (fp16(2, 2), fp32(2, 2)), REFUSED, "cuda/MultiLabelMarginCriterion.cu", "read"),
    Row(F.ctc_loss, (fp16(5, 1, 3), int64(1, 2), int64(1), int64(1)), REFUSED, "cuda/LossCTC.cu", "known"),
    Row(Tensor.index_copy, (fp16(4), 0, int32(2), fp16(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(Tensor.index_fill, (fp16(4), 0, int32(2), 1.0), REFUSED, INDEXING, "shared"),
    Row(Tensor.masked_fill, (fp16(4), fp32(4), 1.0), REFUSED, "cuda/Indexing.cu", "read"),
    Row(Tensor.masked_fill, (fp16(4), boolean(4), fp16(1)), REFUSED, "cuda/Indexing.cu", "shared"),
    Row(torch.take, (fp16(4), int32(2)), REFUSED, INDEXING, "shared"),
    Row(torch.gather, (fp16(4), 0, fp32(2)), REFUSED, OF_STRUCTURED, "shared"),
    Row(torch.index_select, (fp16(4), 0, fp32(2)), REFUSED, "cuda/Indexing.cu", "read"),
    Row(F.embedding, (fp32(2), fp16(4, 3)), REFUSED, "Embedding.cpp", "shared"),
    Row(torch.cat, ([fp16(3), fp16(3)],), REFUSED, OF_STRUCTURED, "shared", {"out": int64(6)}),
    Row(torch.where, (fp16(3), fp16(3), fp16(3)), REFUSED, "TensorCompare.cpp", "shared"),
    Row(attention, (*HALF_HEADS, int64(3, 3)), REFUSED, ATTENTION_FILE, "shared"),
    Row(Tensor.float_power_, (fp16(3), fp32(3)), REFUSED, ITERATOR, "shared"),
    Row(Tensor.add_, (int64(3), fp16(3)), REFUSED, ITERATOR, "shared"),
    Row(Tensor.mul_, (int64(3), fp16()), REFUSED, ITERATOR, "shared"),
    Row(Tensor.add_, (boolean(3), fp16(3)), REFUSED, ITERATOR, "shared"),
    Row(Tensor.add_, (fp16(3), complex64(3)), REFUSED, ITERATOR, "shared"),
    Row(torch.add, (fp16(3), fp16(3)), REFUSED, ITERATOR, "shared", {"out": int64(3)}),
    Row(Tensor.clamp_, (int64(3),), REFUSED, OF_STRUCTURED, "shared", {"min": fp16(3)}),
    Row(Tensor.bernoulli_, (fp16(3), int64(3)), REFUSED, "cuda/DistributionTemplates.h", "read"),
]
"""Refused for an argument of the wrong kind, such as a floating-point index, or a result that cannot be stored."""

AUTOCAST = "autocast_mode.h"

IN_AUTOCAST = [
    Row(in_autocast(F.grid_sample), (fp16(1, 2, 4, 4), fp32(1, 3, 3, 2)), FP32, AUTOCAST, "read", NOT_ALIGNED),
    Row(in_autocast(torch.scatter_add), (fp16(4), 0, int64(2), fp32(2)), FP32, AUTOCAST, "read"),
    Row(in_autocast(torch.index_put), (fp16(4), (int64(2),), fp32(2)), FP32, AUTOCAST, "read"),
    Row(in_autocast(torch.dot), (fp16(3), fp32(3)), FP32, AUTOCAST, "read"),
    Row(in_autocast(torch.tensordot), (fp16(2, 3), fp32(3, 4)), FP32, AUTOCAST, "read", {"dims": 1}),
    Row(in_autocast(torch.cross), (fp16(3), fp32(3)), FP32, AUTOCAST, "read", {"dim": 0}),
    Row(in_autocast(F.layer_norm), (fp16(2, 3), (3,), fp32(3)), FP32, AUTOCAST, "read"),
    Row(in_autocast(F.linear), (fp16(2, 3), fp32(4, 3), fp32(4)), FP16, AUTOCAST, "read", only_fp16=True),
    Row(in_autocast(F.conv2d), (fp32(1, 2, 5, 5), fp16(2, 2, 3, 3)), FP16, AUTOCAST, "read", only_fp16=True),
    Row(in_autocast(F.prelu), (fp16(2, 3), fp32(3)), FP16, AUTOCAST, "read", only_fp16=True),
]

WINDOW = ([2, 2], [2, 2], [0, 0])
CONVOLVED = (None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])

BACKWARD = [
    Row(gradient_of(torch.mul), (fp16(3), fp32(3)), FP16, "torch/csrc/autograd/engine.cpp", "read"),
    Row(gradient_of(F.mse_loss), (fp16(3), fp32(3)), FP16, "torch/csrc/autograd/engine.cpp", "read"),
    Row(gradient_of(torch.exp, FP32), (fp16(3),), FP16, "torch/csrc/autograd/engine.cpp", "read"),
    Row(gradient_of(torch.tanh, FP16), (fp32(3),), FP32, "torch/csrc/autograd/engine.cpp", "read"),
    Row(gradient_of(torch.rsub), (fp16(3), fp32(3)), FP16, "torch/csrc/autograd/engine.cpp", "read"),
    Row(aten.sigmoid_backward, (fp32(3), fp16(3)), FP32, OF_STRUCTURED, "shared"),
    Row(aten.tanh_backward, (fp32(3), fp16(3)), FP32, OF_STRUCTURED, "shared"),
    Row(aten.gelu_backward, (fp32(3), fp16(3)), FP32, OF_STRUCTURED, "shared"),
    Row(aten.threshold_backward, (fp32(3), fp16(3), 0.0), FP32, OF_STRUCTURED, "shared"),
    Row(aten.mse_loss_backward, (fp32(3), fp16(3), fp16(3), 0), FP32, ITERATOR, "shared"),
    Row(aten.native_dropout_backward, (fp32(3), boolean(3), 2.0), FP32, "Dropout.cpp", "shared"),
    Row(aten._softmax_backward_data, (fp32(3), fp32(3), 0, FP16), FP16, "cuda/SoftMax.cu", "read", only_fp16=True),
    Row(aten._softmax_backward_data, (fp32(3), fp16(3), 0, FP16), REFUSED, "cuda/SoftMax.cu", "read"),
    Row(
        aten.nll_loss_backward,
        (fp32(), fp16(2, 3), int64(2), None, 1, -100, fp16()),
        REFUSED,
        "cuda/Loss.cu",
        "read",
    ),
    Row(
        aten.native_layer_norm_backward,
        (fp32(2, 3), fp16(2, 3), [3], fp32(2, 1), fp32(2, 1), None, None, [True, False, False]),
        REFUSED,
        NORM,
        "read",
    ),
    Row(
        aten.grid_sampler_2d_backward,
        (fp32(1, 2, 3, 3), fp16(1, 2, 4, 4), fp16(1, 3, 3, 2), 0, 0, False, [True, True]),
        REFUSED,
        "cuda/GridSampler.cu",
        "read",
    ),
    Row(
        aten.convolution_backward,
        (fp32(1, 2, 3, 3), fp16(1, 2, 5, 5), fp16(2, 2, 3, 3), *CONVOLVED),
        REFUSED,
        "cudnn/ConvShared.cpp",
        "read",
    ),
    Row(
        aten.max_pool2d_with_indices_backward,
        (fp32(1, 2, 2, 2), fp16(1, 2, 4, 4), *WINDOW, [1, 1], False, int64(1, 2, 2, 2)),
        REFUSED,
        OF_STRUCTURED,
        "shared",
    ),
    Row(
        aten.avg_pool2d_backward,
        (fp32(1, 2, 2, 2), fp16(1, 2, 4, 4), *WINDOW, False, True, None),
        REFUSED,
        OF_STRUCTURED,
        "shared",
    ),
]

ROWS = [
    *PRODUCTS,
    *CONVOLUTIONS,
    *GRIDS,
    *LOSSES,
    *INDICES,
    *JOINS,
    *ATTENTION,
    *NORMS,
    *RECURRENT,
    *ELEMENTWISE,
    *OTHERS,
    *WRONG_KINDS,
    *IN_AUTOCAST,
    *BACKWARD,
]


def is_argument(value: Any) -> bool:
    return isinstance(value, Argument)


def in_bf16(row: Row) -> Row | None:
    """The same fact with BF16 in place of FP16; None if it does not hold, or mentions BF16 or no FP16."""
    arguments, structure = pytree.tree_flatten((row.arguments, row.options), is_leaf=is_argument)
    dtypes = {x.dtype for x in arguments if is_argument(x)}
    if row.only_fp16 or FP16 not in dtypes or BF16 in dtypes or row in IN_AUTOCAST:
        return None

    def other(value: Any) -> Any:
        if is_argument(value) and value.dtype is FP16:
            return replace(value, dtype=BF16)
        return BF16 if value is FP16 else value

    moved, options = pytree.tree_unflatten([other(x) for x in arguments], structure)
    return replace(row, arguments=moved, options=options, result=other(row.result))


def outcome(row: Row) -> torch.dtype | str:
    """What the emulation does with a row's call: "refused", or the dtype of its first result."""

    def build(value: Any) -> Any:
        return value.build() if is_argument(value) else value

    arguments, options = pytree.tree_map(build, (row.arguments, row.options), is_leaf=is_argument)
    with auditor.emulate("cuda"):
        try:
            result = row.call(*arguments, **options)
        except RuntimeError:
            return REFUSED
    written = arguments if result is None else result
    first = next(x for x in pytree.tree_leaves(written) if isinstance(x, Tensor))
    return first.dtype


BOTH_FORMATS = [*ROWS, *filter(None, map(in_bf16, ROWS))]


@pytest.mark.parametrize("row", BOTH_FORMATS, ids=str)
def test_mixed_dtypes_are_refused_or_promoted_as_on_cuda(row: Row) -> None:
    assert outcome(row) == row.result, f"CUDA: {row.source} ({row.sure})"


@pytest.mark.parametrize("row", [row for row in ROWS if row.result == REFUSED and row not in WRONG_KINDS], ids=str)
def test_what_is_refused_runs_in_one_dtype(row: Row) -> None:
    """The mixture is the reason: with one floating-point dtype, torch on a CPU runs the call."""

    def build(value: Any) -> Any:
        if isinstance(value, torch.dtype):
            return FP32
        if not is_argument(value):
            return value
        return (replace(value, dtype=FP32) if value.dtype.is_floating_point else value).build()

    arguments, options = pytree.tree_map(build, (row.arguments, row.options), is_leaf=is_argument)
    with torch.random.fork_rng(devices=[]):
        row.call(*arguments, **options)


def test_every_leaf_has_a_gradient_of_its_own_dtype() -> None:
    """torch/csrc/autograd/engine.cpp casts gradients, so mixed operands are no reason to refuse a backward."""
    x = torch.ones(3, dtype=FP16, requires_grad=True)
    y = torch.ones(3, requires_grad=True)
    combine: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
        torch.add,
        F.mse_loss,
        partial(torch.where, torch.tensor([True, False, True])),
        lambda a, b: torch.cat([a, b]),
    )
    for call in combine:
        x.grad = y.grad = None
        with auditor.emulate("cuda"):
            call(x, y).sum().backward()
        assert x.grad is not None and x.grad.dtype is FP16
        assert y.grad is not None and y.grad.dtype is FP32
