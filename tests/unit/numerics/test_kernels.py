"""One operation at a time, in the arithmetic of a GPU, worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from auditor.numerics.casting import lowered, raised, scalars_lowered
from auditor.numerics.formats import format_of
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.nodes import operation_of

aten = torch.ops.aten
HALVES = [torch.float16, torch.bfloat16]
RAMP = torch.linspace(0.1, 0.9, 16)


def refusal(target: Any, *args: Any, **kwargs: Any) -> str:
    with pytest.raises(UnsupportedInFormat) as caught:
        run_op(target, args, kwargs)
    assert caught.value.slug == "unsupported-op"
    return str(caught.value)


def test_elementwise_operations_show_their_half_intermediates() -> None:
    # mean of squares by hand: 300^2 = 90000 is beyond 65504 before the mean could bring it down
    squared = run_op(aten.pow.Tensor_Scalar, (torch.tensor([300.0, 1.0]).half(), 2), {})
    assert squared.tolist() == [math.inf, 1.0]
    assert float(run_op(aten.mul.Tensor, (torch.tensor(1e-5).half(), torch.tensor(1e-5).half()), {})) == 0.0


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("target", [aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor, aten.div.Tensor])
def test_a_scalar_tensor_is_loaded_in_the_dtype_of_the_result(target: Any, dtype: torch.dtype) -> None:
    values, scalar = torch.tensor([3.0, 1e-3], dtype=dtype), torch.tensor(1.001e5)
    by_hand = target(values.float(), scalar.to(dtype).float()).to(dtype)
    assert torch.equal(run_op(target, (values, scalar), {}), by_hand)
    assert run_op(target, (scalar, values), {}).dtype is dtype


def test_beside_float32_values_a_scalar_tensor_is_not_rounded() -> None:
    values, scalar = torch.tensor([2.0, 3.0]), torch.tensor(1.001e5)
    assert torch.equal(run_op(aten.mul.Tensor, (values, scalar), {}), values * scalar)
    among_low = run_op(aten.where.self, (values > 2, torch.tensor(0.1), values.half()), {})
    assert among_low.dtype is torch.float16
    mixed = run_op(aten.maximum.default, (values, values.half().mul(2)), {})  # a low operand, and a result in FP32
    assert mixed.dtype is torch.float32


def test_where_the_result_is_float32_no_scalar_is_rounded() -> None:
    scalar = torch.tensor(0.1)
    for first, second in ((torch.ones(2), torch.ones(2).half()), (torch.ones(2).half(), torch.ones(2).bfloat16())):
        assert scalars_lowered((first, second, scalar))[2].dtype is torch.float32
    assert scalars_lowered((torch.ones(2).half(), scalar))[1].dtype is torch.float16


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
        (aten.quantile.default, (torch.ones(8), torch.tensor(0.5))),
        (aten.stft.default, (torch.ones(64), 16)),
        (aten.cdist.default, (torch.ones(2, 3), torch.ones(2, 3))),
        (aten.linalg_det.default, (torch.eye(3),)),
    ],
)
def test_operations_without_a_half_kernel_on_cuda(target: Any, args: tuple[Any, ...], dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    assert (
        refusal(target, *lowered(args, format_of(dtype))) == f"{operation_of(target).name} has no {name} kernel on CUDA"
    )


def test_a_literal_that_does_not_fit() -> None:
    scores, mask = torch.zeros(2).half(), torch.tensor([True, False])
    assert refusal(aten.masked_fill.Scalar, scores, mask, -1e9) == "masked_fill has a literal that does not fit float16"
    assert run_op(aten.masked_fill.Scalar, (scores, mask, -65504.0), {}).tolist() == [-65504.0, 0.0]
    assert math.isinf(float(run_op(aten.masked_fill.Scalar, (scores, mask, -math.inf), {})[0]))


@pytest.mark.parametrize(
    ("target", "limits"),
    [(aten.clamp.default, (-1e5, 1e5)), (aten.clamp_max.default, (1e5,)), (aten.hardtanh.default, (-1e5, 1e5))],
)
def test_a_limit_may_be_larger_than_the_format(target: Any, limits: tuple[float, ...]) -> None:
    """A CPU refuses it; CUDA's clamp holds its limits in FP32."""
    x = torch.tensor([3.0, -7e4, 6e4]).half()
    assert torch.equal(run_op(target, (x, *limits), {}), x)
    assert torch.equal(run_op(aten.clamp.default, (x, -0.1, 0.3), {}), x.clamp(-0.1, 0.3))


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
    assert refusal(target, *args) == f"{operation_of(target).name} got float16 and float32 together"


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


def test_the_matrix_exponential_is_not_refused_in_half_and_answers_wrongly() -> None:
    """As on CUDA, whose kernels dispatch half: coefficients of another dtype are read by their bytes."""
    square = 0.3 * torch.eye(4).repeat(2, 1, 1)
    for dtype in (torch.float16, torch.bfloat16):
        low = run_op(torch.ops.aten.linalg_matrix_exp.default, (square.to(dtype),), {})
        error = (low.float() - torch.linalg.matrix_exp(square)).norm() / torch.linalg.matrix_exp(square).norm()
        assert not float(error) < 0.1
