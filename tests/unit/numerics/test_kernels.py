"""One operation at a time, in the arithmetic of a GPU, worked out by hand; products, and formats without arithmetic."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.numerics import operations
from auditor.numerics.casting import format_in, in_format, round_tree, scalars_lowered, widen
from auditor.numerics.formats import FORMATS, format_of
from auditor.numerics.kernels import CUDA_ARITHMETIC, UnsupportedInFormat, rounding, run_op
from auditor.numerics.nodes import operation_of
from auditor.numerics.operations import operation
from auditor.numerics.scans import transformed_lengths
from auditor.resources import torch_release
from tests.support.opinfo import HALVES, has_half, infos

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")

aten = torch.ops.aten
LOW_DTYPES = [torch.float16, torch.bfloat16]
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


@pytest.mark.parametrize("dtype", LOW_DTYPES)
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


def test_a_literal_that_does_not_fit() -> None:
    scores, mask = torch.zeros(2).half(), torch.tensor([True, False])
    expected = "masked_fill has the constant -1e+09, outside the range of FP16 (±65504)"
    assert refusal(aten.masked_fill.Scalar, scores, mask, -1e9) == expected
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


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.linear.default, (torch.ones(1, 2).half(), torch.ones(3, 2))),
        (aten.linear.default, (torch.ones(1, 2).half(), torch.ones(3, 2).half(), torch.ones(3))),
        (aten.matmul.default, (torch.ones(2, 2), torch.ones(2, 2).half())),
        (aten.conv1d.default, (torch.ones(1, 1, 4).half(), torch.ones(1, 1, 2))),
        (aten.lerp_.Scalar, (torch.ones(2), torch.ones(2).half(), 0.1)),
    ],
)
def test_mixed_dtypes_are_refused(target: Any, args: tuple[Any, ...]) -> None:
    said = refusal(target, *args).partition(" (")[0]
    assert said == f"{operation_of(target).name} has inputs of different dtypes, float16 and float32"


def test_elementwise_operations_promote_mixed_dtypes() -> None:
    assert run_op(aten.add.Tensor, (torch.ones(2).half(), torch.ones(2)), {}).dtype is torch.float32
    assert run_op(aten.add.Tensor, (torch.ones(2).half(), torch.ones(2).bfloat16()), {}).dtype is torch.float32


@pytest.mark.parametrize("dtype", LOW_DTYPES)
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
    low = round_tree(args, format_of(dtype))
    result = run_op(target, low, {})
    assert result.dtype is dtype
    assert torch.allclose(result.float(), target(*widen(low)), rtol=2**-6, atol=2**-6)


def test_the_matrix_exponential_is_not_refused_in_half_and_answers_wrongly() -> None:
    """As on CUDA, whose kernels dispatch half: coefficients of another dtype are read by their bytes."""
    square = 0.3 * torch.eye(4).repeat(2, 1, 1)
    for dtype in (torch.float16, torch.bfloat16):
        low = run_op(torch.ops.aten.linalg_matrix_exp.default, (square.to(dtype),), {})
        error = (low.float() - torch.linalg.matrix_exp(square)).norm() / torch.linalg.matrix_exp(square).norm()
        assert not float(error) < 0.1


# The table of half kernels against PyTorch's OpInfo, for every operation that both know; and what run_op makes of it.

BY_ARGUMENTS = {"linalg_matrix_power", "matrix_power", "stft"}
"""OpInfo speaks of all calls at once: a negative power is that of an inverse, which has no half kernel; others are products. In
FP16 `stft` fails in cuFFT for lengths that are no powers of two alone (innnky/so-vits-svc#11)."""

NO_TENSORS = {"broadcast_shapes"}


@pytest.mark.parametrize("fmt", HALVES)
def test_the_table_says_of_cuda_what_opinfo_says(fmt: str) -> None:
    known = set(infos()) - BY_ARGUMENTS - NO_TENSORS
    assert len(known) > 500
    refused = {name for name in known if fmt in operation(f"aten.{name}").refused_on_cuda}
    expected = {name for name in known if not has_half(name, fmt)}
    assert sorted(expected - refused) == [], "OpInfo has no half kernel, and cuda_kernels.toml does not list them"
    assert sorted(refused - expected) == [], "cuda_kernels.toml lists them, and OpInfo has half kernels"


def test_a_power_of_a_matrix_is_refused_where_it_is_negative() -> None:
    x = torch.tensor([[2.0, 0.0], [0.0, 4.0]]).half()
    power = torch.ops.aten.linalg_matrix_power.default
    assert run_op(power, (x, 3), {}).tolist() == [[8.0, 0.0], [0.0, 64.0]]
    with pytest.raises(UnsupportedInFormat):
        run_op(power, (x, -1), {})


def test_complex_numbers_are_of_two_float16_and_never_of_bfloat16() -> None:
    op = torch.ops.aten.complex.default
    assert run_op(op, (torch.ones(2).half(), torch.ones(2).half()), {}).dtype is torch.complex32
    with pytest.raises(UnsupportedInFormat, match="complex has no bfloat16 kernel on CUDA"):
        run_op(op, (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()), {})


# Operations in a format without arithmetic: float32 in between, results rounded, promotion as torch has it.

E5M2 = FORMATS["fp8_e5m2"]


def low(*values: float, row: Any = E5M2) -> Tensor:
    return in_format(torch.tensor(values), row)


def test_a_result_is_rounded_once() -> None:
    # 1.25 * 1.5 = 1.875, between 1.75 and 2, a tie that goes to the even 2; 1.25 + 1.25 = 2.5 is a value
    found = rounding(aten.mul.Tensor, (low(1.25), low(1.5)), {})
    assert (found.tolist(), format_in(found)) == ([2.0], E5M2)
    assert rounding(aten.add.Tensor, (low(1.25), low(1.25)), {}).tolist() == [2.5]


def test_a_sum_is_formed_in_float32() -> None:
    # 8 + 8 times 0.25: adding up in two fraction bits would stay at 8
    found = rounding(aten.sum.default, (low(8.0, *[0.25] * 8),), {})
    assert found.item() == 10.0


def test_a_format_in_the_place_of_a_dtype_is_what_comes_out() -> None:
    found = rounding(aten.to.dtype, (torch.tensor([1.3]), E5M2), {})
    assert (found.tolist(), format_in(found)) == ([1.25], E5M2)
    widen = rounding(aten.to.dtype, (low(1.25), torch.float32), {})
    assert format_in(widen) is FORMATS["fp32"]
    summed = rounding(aten.sum.default, (low(1.25, 1.5),), {"dtype": torch.float32})
    assert (summed.item(), format_in(summed)) == (2.75, FORMATS["fp32"])


def test_discrete_results_stay() -> None:
    found = rounding(aten.argmax.default, (low(1.0, 2.0),), {})
    assert (found.item(), found.dtype) == (1, torch.int64)


# Fourier transforms in float16: powers of two, in float32 and rounded, whatever names the lengths.

REAL, PAIRS = torch.arange(8.0).half(), torch.view_as_complex(torch.arange(16.0).half().view(8, 2))
SQUARE = torch.ones(6, 8).half()


@pytest.mark.parametrize(
    ("op", "args", "lengths"),
    [
        (aten.fft_fft.default, (REAL, 5), [5]),
        (aten.stft.center, (REAL.repeat(4), 6, None, None, None, True, "constant", False, None, True), [6]),
        (aten.fft_rfft.default, (REAL,), [8]),
        (aten.fft_irfft.default, (PAIRS,), [14]),
        (aten.fft_hfft.default, (PAIRS, 8), [8]),
        (aten.fft_ihfft.default, (REAL,), [8]),
        (aten.fft_rfft2.default, (SQUARE, [4, 4]), [4, 4]),
        (aten.fft_rfftn.default, (SQUARE, None, [0]), [6]),
        (aten.fft_fftn.default, (SQUARE, [16]), [16]),
        (aten._fft_r2c.default, (SQUARE, [1], 0, True), [8]),
        (aten._fft_c2c.default, (PAIRS, [0], 0, True), [8]),
        (aten._fft_c2r.default, (PAIRS, [0], 0, 14), [14]),
    ],
)
def test_the_lengths_that_are_transformed(op: Any, args: tuple[Any, ...], lengths: list[int]) -> None:
    assert transformed_lengths(op, args, {}) == lengths
    odd = any(length & (length - 1) for length in lengths)
    if odd:
        with pytest.raises(UnsupportedInFormat, match="not a power of two"):
            run_op(op, args, {})
        return
    result = run_op(op, args, {})
    wide = [
        x.to(torch.complex64 if x.is_complex() else torch.float32) if isinstance(x, torch.Tensor) else x for x in args
    ]
    exact = op(*wide)
    assert result.dtype is (torch.complex32 if exact.is_complex() else torch.float16)
    assert torch.equal(result.to(exact.dtype), exact.to(result.dtype).to(exact.dtype))


def test_other_lengths_are_refused_in_float16_and_all_in_bfloat16() -> None:
    assert run_op(aten.fft_fft.default, (REAL,), {}).dtype is torch.complex32
    with pytest.raises(
        UnsupportedInFormat, match="fft_fft has no float16 kernel on CUDA for length 12, which is not a power"
    ):
        run_op(aten.fft_fft.default, (REAL, 12), {})
    if torch_release() < (2, 14):
        with pytest.raises(UnsupportedInFormat, match="fft_fft has no bfloat16 kernel on CUDA"):
            run_op(aten.fft_fft.default, (REAL.bfloat16(),), {})
    else:
        wide = run_op(aten.fft_fft.default, (REAL.bfloat16(),), {})
        assert torch.equal(wide, torch.fft.fft(REAL.bfloat16().float()))
    with pytest.raises(UnsupportedInFormat, match="for length 14"):
        run_op(aten.fft_irfft.default, (PAIRS,), {})


def test_a_coefficient_that_is_too_large_overflows() -> None:
    spectrum = run_op(aten.fft_rfft.default, (torch.full((1024,), 100.0).half(),), {})
    assert math.isinf(torch.view_as_real(spectrum)[0, 0].item())


def test_float32_and_shifts_are_as_they_are() -> None:
    x = torch.arange(6.0)
    assert torch.equal(run_op(aten.fft_rfft.default, (x,), {}), torch.fft.rfft(x))
    assert run_op(aten.fft_fftshift.default, (x.bfloat16(),), {}).tolist() == [3, 4, 5, 0, 1, 2]


@pytest.mark.parametrize("kind", ["layer_norm", "embedding", "embedding_bag", "index"])
def test_gradients_that_cuda_sums_in_fp32_are_summed_so(kind: str) -> None:
    """4,096 ones: beyond 256 BF16 has no odd number, so that a sum in it stays there."""
    weight = torch.zeros(2, 2, dtype=torch.bfloat16, requires_grad=True)
    ids = torch.zeros(4096, dtype=torch.long)
    rows = torch.randn(4096, 2).bfloat16()
    out = {
        "layer_norm": lambda: run_op(aten.layer_norm.default, (rows, [2], None, weight[0]), {}),
        "embedding": lambda: run_op(aten.embedding.default, (weight, ids), {}),
        "embedding_bag": lambda: run_op(aten.embedding_bag.default, (weight, ids, torch.arange(4096)), {})[0],
        "index": lambda: run_op(aten.index.Tensor, (weight, [ids]), {}),
    }[kind]()
    assert out.dtype is torch.bfloat16
    with CUDA_ARITHMETIC:
        out.backward(torch.ones_like(out))
    assert weight.grad[0, 0] == 4096


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_an_fp32_window_makes_a_transform_compute_in_fp32(low: torch.dtype) -> None:
    x, window = (
        torch.linspace(-1, 1, 40).to(low),
        torch.hann_window(6),
    )  # a window under autocast, or made in the forward
    spectrum = run_op(aten.stft.center, (x, 6, None, None, window, True, "constant", False, None, True), {})
    assert torch.equal(spectrum, torch.stft(x.float(), 6, window=window, pad_mode="constant", return_complex=True))
    assert run_op(aten.istft.default, (spectrum, 6, None, None, window.to(low)), {}).dtype is torch.float32


def test_numbers_that_are_made_on_another_device_stay_there() -> None:
    made = run_op(aten.linspace.default, (-1, 1, 5), {"dtype": torch.float16, "device": torch.device("meta")})
    assert (made.device.type, made.dtype) == ("meta", torch.float16)


def test_kernels_that_a_release_has_added_are_not_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch 2.14 has `angle` in half, and FFTs of bfloat16 numbers, whose complex numbers stay float32."""
    for release, refused in (((2, 13, 1), {"fp16", "bf16"}), ((2, 14), set()), ((2, 15, 0), set())):
        monkeypatch.setattr(operations, "torch_release", lambda release=release: release)
        row = operations._operation_on_cuda
        assert row("aten.angle.default").refused_on_cuda == refused
        assert row("aten.fft_rfft.default").refused_on_cuda == refused - {"fp16"}
        assert row("aten.linalg_qr.default").refused_on_cuda == {"fp16", "bf16"}
