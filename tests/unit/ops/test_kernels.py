"""One operation at a time, in the arithmetic of a GPU, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.formats import FORMATS
from auditor.formats.table import format_of
from auditor.ops import kernels
from auditor.ops.kernels import (
    UnsupportedInFormat,
    in_float32,
    is_product,
    is_tensor_core,
    lowered,
    packet_name,
    raised,
    run_op,
)
from tests.subjects import normal

aten = torch.ops.aten
HALVES = [torch.float16, torch.bfloat16]
RAMP = torch.linspace(0.1, 0.9, 16)


def refusal(target: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UnsupportedInFormat) as caught:
        run_op(target, args, kwargs)
    assert caught.value.slug == "unsupported-op"
    return str(caught.value)


def long_sum(dtype: torch.dtype, large: float, small: int) -> Tensor:
    """(large, 1, 1, ..., 1) with `small` ones: in `dtype`, large + 1 == large."""
    return torch.cat([torch.tensor([large]), torch.ones(small)]).to(dtype)


@pytest.mark.parametrize(
    ("target", "shape"),
    [
        (aten.matmul.default, lambda x: (x[None], torch.ones_like(x)[:, None])),
        (aten.mm.default, lambda x: (x[None], torch.ones_like(x)[:, None])),
        (aten.linear.default, lambda x: (x[None], torch.ones_like(x)[None])),
        (aten.dot.default, lambda x: (x, torch.ones_like(x))),
        (aten.einsum.default, lambda x: ("i,i->", [x, torch.ones_like(x)])),
        (aten.conv1d.default, lambda x: (x[None, None], torch.ones_like(x)[None, None])),
    ],
)
def test_products_accumulate_in_float32(target: Any, shape: Any) -> None:
    # fp16 spaces by 2 from 2048 on: 2048 + 1 = 2048 (tie to even), a hundred times over. In FP32: 2048 + 100 = 2148.
    fp16 = run_op(target, shape(long_sum(torch.float16, 2048, 100)), {})
    assert (float(fp16), fp16.dtype) == (2148.0, torch.float16)
    # bf16 spaces by 2 from 256 on: 256 + 1 = 256; in FP32: 256 + 100 = 356
    bf16 = run_op(target, shape(long_sum(torch.bfloat16, 256, 100)), {})
    assert (float(bf16), bf16.dtype) == (356.0, torch.bfloat16)


def test_a_product_rounds_its_result_once() -> None:
    # 1 * 1 + 2^-6 * 2^-6 = 1 + 2^-12, below half of fp16's spacing 2^-10: rounds to 1, and to 1 + 2^-10 thrice over
    small = torch.tensor([1.0, 2**-6], dtype=torch.float16)
    assert float(run_op(aten.dot.default, (small, small), {})) == 1.0
    thrice = torch.tensor([1.0, 2**-6, 2**-6, 2**-6], dtype=torch.float16)
    assert float(run_op(aten.dot.default, (thrice, thrice), {})) == 1 + 2**-10  # 1 + 3 * 2^-12 is above the tie


def test_a_product_overflows_only_in_its_result() -> None:
    # 300 * 300 - 300 * 300: 90000 does not fit fp16, the accumulator holds it
    a, b = torch.tensor([300.0, 300.0]).half(), torch.tensor([300.0, -300.0]).half()
    assert float(run_op(aten.dot.default, (a, b), {})) == 0.0
    assert float(run_op(aten.dot.default, (a, a), {})) == math.inf  # 180000


def test_elementwise_operations_show_their_half_intermediates() -> None:
    # mean of squares by hand: 300^2 = 90000 is beyond 65504 before the mean could bring it down
    squared = run_op(aten.pow.Tensor_Scalar, (torch.tensor([300.0, 1.0]).half(), 2), {})
    assert squared.tolist() == [math.inf, 1.0]
    assert float(run_op(aten.mul.Tensor, (torch.tensor(1e-5).half(), torch.tensor(1e-5).half()), {})) == 0.0


def test_float32_runs_as_it_is() -> None:
    x = torch.tensor([[2.0, 0.0], [0.0, 2.0]])
    assert torch.equal(run_op(aten.linalg_cholesky.default, (x,), {}), x.sqrt())
    assert run_op(aten.add.Tensor, (x, x), {}).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linalg_cholesky.default, (torch.eye(3),)),
        (aten.linalg_inv.default, (torch.eye(3),)),
        (aten.linalg_svd.default, (torch.eye(3),)),
        (aten.linalg_solve.default, (torch.eye(3), torch.ones(3, 1))),
        (aten.fft_rfft.default, (torch.ones(8),)),
        (aten.stft.default, (torch.ones(64), 16)),
        (aten.cdist.default, (torch.ones(2, 3), torch.ones(2, 3))),
        (aten.linalg_det.default, (torch.eye(3),)),
    ],
)
def test_operations_without_a_half_kernel_on_cuda(target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert refusal(target, *lowered(args, format_of(dtype))) == f"{packet_name(target)} has no {name} kernel on CUDA"


def test_a_literal_that_does_not_fit() -> None:
    scores, mask = torch.zeros(2).half(), torch.tensor([True, False])
    assert refusal(aten.masked_fill.Scalar, scores, mask, -1e9) == "masked_fill has a literal that does not fit float16"
    assert run_op(aten.masked_fill.Scalar, (scores, mask, -65504.0), {}).tolist() == [-65504.0, 0.0]
    assert math.isinf(float(run_op(aten.masked_fill.Scalar, (scores, mask, -math.inf), {})[0]))


def test_bf16_holds_the_literal_that_fp16_refuses() -> None:
    filled = run_op(aten.masked_fill.Scalar, (torch.zeros(1).bfloat16(), torch.tensor([True]), -1e9), {})
    assert float(filled) == -998244352.0  # 1e9 = 1.8626 * 2^29, and the nearest 7-bit fraction is 1 + 110 / 128


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linear.default, (torch.ones(1, 2).half(), torch.ones(3, 2))),
        (aten.linear.default, (torch.ones(1, 2).half(), torch.ones(3, 2).half(), torch.ones(3))),
        (aten.matmul.default, (torch.ones(2, 2), torch.ones(2, 2).half())),
        (aten.conv1d.default, (torch.ones(1, 1, 4).half(), torch.ones(1, 1, 2))),
    ],
)
def test_products_refuse_mixed_dtypes(target: Any, args: tuple[Any, ...]) -> None:
    assert refusal(target, *args) == f"{packet_name(target)} got float16 and float32 together"


def test_elementwise_operations_promote_mixed_dtypes() -> None:
    assert run_op(aten.add.Tensor, (torch.ones(2).half(), torch.ones(2)), {}).dtype is torch.float32
    assert run_op(aten.add.Tensor, (torch.ones(2).half(), torch.ones(2).bfloat16()), {}).dtype is torch.float32


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.grid_sampler.default, (RAMP.reshape(1, 1, 4, 4), RAMP[:8].reshape(1, 2, 2, 2), 0, 0, False)),
        (aten.upsample_bilinear2d.vec, (RAMP.reshape(1, 1, 4, 4), [8, 8], False, None)),
        (aten.im2col.default, (RAMP.reshape(1, 1, 4, 4), [2, 2], [1, 1], [0, 0], [1, 1])),
        (aten.cumprod.default, (RAMP, 0)),
        (aten.trace.default, (RAMP.reshape(4, 4),)),
        (aten.replication_pad2d.default, (RAMP.reshape(1, 1, 4, 4), [1, 1, 1, 1])),
    ],
)
def test_what_only_the_cpu_lacks_runs_all_the_same(target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    low = lowered(args, format_of(dtype))
    result = run_op(target, low, {})
    assert result.dtype is dtype
    assert torch.allclose(result.float(), target(*raised(low)), rtol=2**-6, atol=2**-6)


def test_the_arguments_are_not_written() -> None:
    weight = torch.ones(2, 2).half()
    run_op(aten.linear.default, (torch.ones(1, 2).half(), weight), {})
    assert weight.dtype is torch.float16
    assert torch.equal(weight, torch.ones(2, 2).half())


def test_in_float32_raises_computes_and_rounds() -> None:
    # 2048 + 1 + 1 = 2050 in FP32, a value of fp16; step by step in fp16 it stays 2048
    x = torch.tensor([2048.0, 1.0, 1.0]).half()
    result = in_float32(aten.sum.default, (x,), {}, FORMATS["fp16"])
    assert (float(result), result.dtype) == (2050.0, torch.float16)


def test_raising_and_lowering_leave_other_types_alone() -> None:
    tree = {"half": torch.ones(1).half(), "double": torch.ones(1).double(), "index": [torch.tensor([1])], "literal": 2}
    up, down = raised(tree), lowered({**tree, "full": torch.ones(1)}, FORMATS["bf16"])
    assert (up["half"].dtype, up["double"].dtype, up["index"][0].dtype) == (torch.float32, torch.float64, torch.int64)
    assert (down["half"].dtype, down["full"].dtype, down["double"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
    )
    assert up["literal"] == down["literal"] == 2


def test_names() -> None:
    assert packet_name(aten.softmax.int) == "softmax"
    assert packet_name(aten.add_.Tensor) == "add_"
    assert packet_name(math.sqrt) == "sqrt"
    assert is_tensor_core(aten.scaled_dot_product_attention.default)
    assert not is_tensor_core(aten.softmax.int)
    assert is_product(aten.addmm.default)
    assert not is_product(aten.scaled_dot_product_attention.default)


@pytest.mark.skipif(not kernels._multiplies_bfloat16(), reason="this processor has no bfloat16 products")
@pytest.mark.parametrize(
    ("target", "shapes"),
    [
        (torch.ops.aten.linear.default, ((4, 96, 256), (192, 256), (192,))),
        (torch.ops.aten.matmul.default, ((8, 64, 512), (8, 512, 64))),
        (torch.ops.aten.mm.default, ((128, 2048), (2048, 160))),
        (torch.ops.aten.conv2d.default, ((2, 32, 28, 28), (64, 32, 3, 3))),
        (torch.ops.aten.conv2d.default, ((2, 64, 28, 28), (256, 64, 1, 1))),
    ],
)
def test_the_processors_own_products_are_those_of_float32(target: Any, shapes: Any, monkeypatch: Any) -> None:
    # Only the order of summation may differ, which moves a result across a rounding boundary now and then.
    args = tuple(normal(*shape, seed=index).bfloat16() for index, shape in enumerate(shapes))
    native = run_op(target, args, {})
    monkeypatch.setattr(kernels, "_multiplies_bfloat16", lambda: False)
    imitated = run_op(target, args, {})
    assert native.dtype is imitated.dtype is torch.bfloat16
    gap = (native.float() - imitated.float()).norm() / imitated.float().norm()
    assert gap < 2**-8 / 20
    assert float((native != imitated).double().mean()) < 0.01


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("rest", "groups"), [((), 1), (([2, 2],), 1), (([1, 1], [3, 2]), 1), (([1, 1], [0, 0], [1, 1], 4), 4)]
)
def test_small_filters_on_one_thread_take_another_kernel(rest: Any, groups: int, bias: bool, monkeypatch: Any) -> None:
    if not kernels._has_onednn():
        pytest.skip("torch was built without oneDNN")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    x, weight = normal(2, 32, 30, 20).half(), normal(48, 32 // groups, 1, 1, seed=1).half()
    args = (x, weight, normal(48, seed=2).half() if bias or rest else None, *rest)
    assert kernels.is_slow(x, weight)
    taken = run_op(aten.conv2d.default, args, {})
    monkeypatch.setattr(kernels, "is_slow", lambda *tensors: False)
    other = run_op(aten.conv2d.default, args, {})
    assert taken.dtype is other.dtype is torch.float16
    assert float((taken != other).double().mean()) < 0.01  # the order of summation may move a rounding now and then
    assert torch.allclose(taken.float(), other.float(), rtol=2**-10, atol=2**-14)


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linear.default, (normal(3, 40, 192), normal(160, 192, seed=1), normal(160, seed=2))),
        (aten.linear.default, (normal(120, 192), normal(160, 192, seed=1))),
        (aten.addmm.default, (normal(160, seed=2), normal(120, 192), normal(192, 160, seed=1))),
    ],
)
def test_large_products_take_another_kernel(target: Any, args: tuple[Tensor, ...], monkeypatch: Any) -> None:
    if not kernels._has_onednn():
        pytest.skip("torch was built without oneDNN")
    args = tuple(x.half() for x in args)
    assert kernels._fastest(target, args, {}) is not target
    taken = run_op(target, args, {})
    monkeypatch.setattr(kernels, "_has_onednn", lambda: False)
    assert kernels._fastest(target, args, {}) is target
    other = run_op(target, args, {})
    assert taken.dtype is other.dtype is torch.float16
    assert taken.shape == other.shape
    assert float((taken != other).double().mean()) < 0.01
    assert torch.allclose(taken.float(), other.float(), rtol=2**-10, atol=2**-14)
