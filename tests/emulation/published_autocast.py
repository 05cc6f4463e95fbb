"""Published dtypes of results, mostly under autocast."""

import importlib.util
import sys
import unittest
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.emulation.published_row import BF16, FP16, FP32, RAISES, PublishedResult, Setup

SKIPPED = {"equal", "einsum", "_convolution", "cudnn_convolution", "cudnn_convolution_transpose"}
"""Operations of torch's lists that the rows leave out: their results are no tensors, or a CPU has no such function."""


def autocast_dtype(call: Callable[[Setup], Tensor]) -> Callable[[Setup], torch.dtype]:
    """The dtype of a call's result in an autocast region of the row's format."""

    def run(setup: Setup) -> torch.dtype:
        with setup.autocast():
            return call(setup).dtype

    return run


def matmul_plus_bias(setup: Setup) -> Tensor:
    product = setup.ones(2, 3, dtype=FP32) @ setup.ones(3, 4, dtype=FP32)
    return product + setup.ones(4, dtype=FP32)


def linear(setup: Setup) -> Tensor:
    return F.linear(setup.ones(2, 3, dtype=FP32), setup.ones(4, 3, dtype=FP32), setup.ones(4, dtype=FP32))


def lstm(setup: Setup) -> Tensor:
    output, _ = torch.nn.LSTM(4, 4).to(setup.device)(setup.ones(2, 1, 4, dtype=FP32))
    return output


def attention(setup: Setup) -> Tensor:
    query = setup.ones(1, 1, 3, 4, dtype=FP32)
    return F.scaled_dot_product_attention(query, query, query)


def layer_norm(setup: Setup) -> Tensor:
    return F.layer_norm(setup.ones(2, 4), (4,), setup.ones(4, dtype=FP32), setup.zeros(4, dtype=FP32))


def add_zero_dimensional(setup: Setup) -> torch.dtype:
    return (setup.tensor(5.5) + setup.tensor(100000.0, FP32)).dtype


def binary_cross_entropy(setup: Setup) -> Tensor:
    x = setup.tensor(torch.full((8, 8), 0.5), FP32)
    return torch._C._nn.binary_cross_entropy(x, x)


def list_of_torch(name: str, device: str) -> list[tuple[Any, ...]]:
    """A list of torch's own autocast tests; the package that it imports for its base class has no part in it."""
    if "expecttest" not in sys.modules and importlib.util.find_spec("expecttest") is None:
        stub: Any = ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.autocast_test_lists import AutocastTestLists

    # That import freezes the flags of torch.backends for all tests that follow in this process.
    torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True

    return list(getattr(AutocastTestLists(device), name))


def autocast_list(name: str, dtype: torch.dtype = FP32, module: object = torch) -> Callable[[Setup], int]:
    """How many functions of a list return another dtype than torch's test asserts. dtype: where the list names none."""

    def run(setup: Setup) -> int:
        different = 0
        for operation, arguments, *more in list_of_torch(name, setup.device):
            if operation in SKIPPED:
                continue
            expected = next((x for x in more if isinstance(x, torch.dtype)), dtype)
            options = next((x for x in more if isinstance(x, dict)), {})
            functions = [getattr(owner, operation, None) for owner in (module, Tensor)]
            for function in filter(None, functions):
                different += _result_dtype(setup, function, arguments, options) is not expected
        return different

    return run


def _result_dtype(
    setup: Setup, function: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
) -> torch.dtype | None:
    """The dtype of the first result under autocast; None if the call raises."""
    try:
        with setup.autocast():
            result = function(*arguments, **options)
    except RuntimeError:
        return None
    first = result[0] if isinstance(result, tuple | list) else result
    dtype: torch.dtype = first.dtype
    return dtype


DTYPES = (
    PublishedResult(
        id="rusty1s/pytorch_scatter#238 exp",
        kind="dtype",
        format="fp16",
        call="exp of FP16 under autocast",
        run=autocast_dtype(lambda setup: setup.ones(2).exp()),
        printed=FP32,
        versions="1.9",
    ),
    PublishedResult(
        id="rusty1s/pytorch_scatter#238 exp_",
        kind="dtype",
        format="fp16",
        call="exp_ of FP16 under autocast",
        run=autocast_dtype(lambda setup: setup.ones(2).exp_()),
        printed=FP16,
        versions="1.9",
    ),
    PublishedResult(
        id="Lightning-AI/pytorch-lightning#3171 autocast",
        kind="dtype",
        format="fp16",
        call="log_softmax of FP16 under autocast",
        run=autocast_dtype(lambda setup: setup.ones(5).log_softmax(0)),
        printed=FP32,
        versions="1.6",
    ),
    PublishedResult(
        id="Lightning-AI/pytorch-lightning#3171 plain",
        kind="dtype",
        format="fp16",
        call="log_softmax of FP16",
        run=lambda setup: setup.ones(5).log_softmax(0).dtype,
        printed=FP16,
        versions="1.6",
    ),
    PublishedResult(
        id="pytorch/pytorch#52501",
        kind="dtype",
        format="fp16",
        call="sum of FP16 over a dimension under autocast",
        run=autocast_dtype(lambda setup: setup.ones(3, 4, 5).sum(dim=-2)),
        printed=FP32,
        versions="1.7.1",
        note="FP16 for a CPU tensor",
    ),
    PublishedResult(
        id="pytorch/pytorch#112329",
        kind="dtype",
        format="bf16",
        call="sum of BF16 under autocast",
        run=autocast_dtype(lambda setup: setup.ones(4, 2, 23).sum()),
        printed=FP32,
        versions="2023-10",
    ),
    PublishedResult(
        id="intel/intel-extension-for-pytorch#731",
        kind="dtype",
        format="fp16",
        call="layer_norm of FP16 with FP32 weights under autocast",
        run=autocast_dtype(layer_norm),
        printed=FP32,
        versions="2024-11",
    ),
    PublishedResult(
        id="pytorch/pytorch#103167",
        kind="dtype",
        format="fp16",
        call="scaled_dot_product_attention of FP32 under autocast",
        run=autocast_dtype(attention),
        printed=FP16,
        versions="",
    ),
    PublishedResult(
        id="rwth-i6/returnn#1529",
        kind="dtype",
        format="bf16",
        call="LSTM under autocast to BF16",
        run=autocast_dtype(lstm),
        printed=FP16,
        versions="",
        note="cuDNN's recurrent networks run in FP16; the thread was not read again",
    ),
    PublishedResult(
        id="rwth-i6/returnn#1828 linear",
        kind="dtype",
        format="bf16",
        call="linear of FP32 under autocast",
        run=autocast_dtype(linear),
        printed=BF16,
        versions="",
    ),
    PublishedResult(
        id="rwth-i6/returnn#1828 matmul",
        kind="dtype",
        format="bf16",
        call="matmul plus bias of FP32 under autocast",
        run=autocast_dtype(matmul_plus_bias),
        printed=FP32,
        versions="",
    ),
    PublishedResult(
        id="test_type_promotion.test_half 100000",
        kind="dtype",
        format="fp16",
        call="zero-dimensional FP16 tensor + 100000",
        run=lambda setup: (setup.tensor(5.5) + 100000).dtype,
        printed=FP16,
        versions="CUDA",
        note="a number beyond the range does not raise",
    ),
    PublishedResult(
        id="test_type_promotion.test_half zero-dimensional",
        kind="dtype",
        format="fp16",
        call="zero-dimensional FP16 tensor + zero-dimensional FP32 tensor",
        run=add_zero_dimensional,
        printed=FP32,
        versions="CUDA",
        note="two zero-dimensional tensors promote",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_torch_fp16",
        kind="dtype",
        format="fp16",
        call="operations under autocast, list torch_fp16: calls whose dtype is not FP16",
        run=autocast_list("torch_fp16", FP16),
        printed=(0.0,),
        versions="CUDA",
        note="without cuDNN's own operations, einsum and _convolution",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_torch_fp32",
        kind="dtype",
        format="fp16",
        call="operations under autocast, list torch_fp32: calls whose dtype is not FP32",
        run=autocast_list("torch_fp32", FP32),
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_nn_fp32",
        kind="dtype",
        format="fp16",
        call="operations under autocast, list nn_fp32: calls whose dtype is not FP32",
        run=autocast_list("nn_fp32", FP32, torch._C._nn),
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_torch_need_autocast_promote",
        kind="mixed dtypes",
        format="fp16",
        call="operations under autocast, list torch_need_autocast_promote: calls whose dtype is not FP32",
        run=autocast_list("torch_need_autocast_promote"),
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_torch_expect_builtin_promote",
        kind="mixed dtypes",
        format="fp16",
        call="operations under autocast, list torch_expect_builtin_promote: calls whose dtype is not the list's",
        run=autocast_list("torch_expect_builtin_promote"),
        printed=(0.0,),
        versions="CUDA",
    ),
    PublishedResult(
        id="test_cuda.test_autocast_banned",
        kind="error",
        format="fp16",
        call="binary_cross_entropy under autocast",
        run=autocast_dtype(binary_cross_entropy),
        printed=RAISES,
        versions="CUDA",
    ),
)

ROWS = DTYPES
