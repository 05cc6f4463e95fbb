"""Values rounded to a format, raised, lowered, moved, and the numbers that tensors of every layout hold."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from auditor.numerics.casting import (
    asked_for,
    carried_in,
    format_in,
    in_float32,
    in_format,
    like,
    plain,
    round_to,
    round_tree,
    widen,
)
from auditor.numerics.entries import dense, entries, extent, is_number, is_plain, places
from auditor.numerics.formats import FORMATS, Format, narrower
from auditor.numerics.nodes import op_name, to_device
from auditor.numerics.operations import operation
from tests.support.formats import ieee_format, temporary_format

aten = torch.ops.aten


def test_in_float32_raises_computes_and_rounds() -> None:
    # 2048 + 1 + 1 = 2050 in FP32, a value of fp16; step by step in fp16 it stays 2048
    x = torch.tensor([2048.0, 1.0, 1.0]).half()
    result = in_float32(aten.sum.default, (x,), {}, FORMATS["fp16"])
    assert (float(result), result.dtype) == (2050.0, torch.float16)


def test_raising_and_lowering_leave_other_types_alone() -> None:
    tree = {"half": torch.ones(1).half(), "double": torch.ones(1).double(), "index": [torch.tensor([1])], "literal": 2}
    up, down = widen(tree), round_tree({**tree, "full": torch.ones(1)}, FORMATS["bf16"])
    assert (up["half"].dtype, up["double"].dtype, up["index"][0].dtype) == (torch.float32, torch.float64, torch.int64)
    assert (down["half"].dtype, down["full"].dtype, down["double"].dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float64,
    )
    assert up["literal"] == down["literal"] == 2


def test_raising_forgets_what_a_tensor_carried() -> None:
    # 1.3 in FP8 E4M3, spaced by 1/8 between 1 and 2: 1.25
    carried = round_tree(torch.tensor([1.3]), FORMATS["fp8_e4m3"])
    assert (float(carried), carried_in(carried)) == (1.25, FORMATS["fp8_e4m3"])
    up = widen(carried)
    assert (float(up), up.dtype, carried_in(up)) == (1.25, torch.float32, None)


# Tensors that say whose values they hold: rounded to a format that torch does not compute in, worked out by hand.

E5M2, E4M3, FP16 = FORMATS["fp8_e5m2"], FORMATS["fp8_e4m3"], FORMATS["fp16"]


def test_values_are_on_the_grid_in_float32() -> None:
    # two fraction bits: 1.125 is a tie between 1 and 1.25 and goes to 1, 1.375 goes to 1.5; beyond 57344 is infinity
    found = in_format(torch.tensor([1.125, 1.375, 1.3, 1e6]), E5M2)
    assert carried_in(found) is E5M2
    assert (found.dtype, format_in(found)) == (torch.float32, E5M2)
    assert found.tolist() == [1.0, 1.5, 1.25, math.inf]
    assert in_format(torch.tensor([1e6, -1e6]), E4M3).tolist() == [448.0, -448.0]  # it has no infinity


def test_what_torch_computes_in_has_its_own_type() -> None:
    found = in_format(torch.tensor([1.0]), FP16)
    assert (carried_in(found), found.dtype, format_in(found)) == (None, torch.float16, FP16)
    again = in_format(in_format(torch.tensor([1.3]), E5M2), FP16)
    assert (carried_in(again), again.item()) == (None, 1.25)


def test_what_is_in_the_format_is_handed_on() -> None:
    x = in_format(torch.tensor([1.3]), E5M2)
    assert in_format(x, E5M2) is x
    other = in_format(x, E4M3)
    assert format_in(other) is E4M3


def test_whatever_torch_does_with_it_is_plain() -> None:
    x = in_format(torch.tensor([1.25]), E5M2)
    assert carried_in(plain(x)) is None
    assert carried_in(x) is E5M2
    assert format_in(plain(x)) is FORMATS["fp32"]
    for result in (x + x, x.clone(), x[0]):
        assert carried_in(result) is None
    own = torch.ones(1)
    assert plain(own) is own


@pytest.mark.parametrize(
    ("given", "expected"), [(torch.float16, FP16), (torch.int64, None), (None, None), (E5M2, E5M2)]
)
def test_what_stands_in_the_place_of_a_dtype(given: object, expected: object) -> None:
    assert asked_for(given) is expected


def test_like_another() -> None:
    x = torch.tensor([1.3])
    assert like(x, in_format(x, E5M2)).item() == 1.25
    assert like(x, x.half()).dtype is torch.float16
    assert like(x, torch.tensor([1])).tolist() == [1]


SPARSE = {
    "coo": torch.Tensor.to_sparse,
    "csr": torch.Tensor.to_sparse_csr,
    "csc": torch.Tensor.to_sparse_csc,
    "bsr": lambda x: x.to_sparse_bsr((1, 2)),
    "bsc": lambda x: x.to_sparse_bsc((2, 1)),
}


@pytest.mark.parametrize("layout", SPARSE)
def test_of_a_sparse_tensor_the_entries_it_holds_are_rounded(layout: str) -> None:
    x = SPARSE[layout](torch.tensor([[0.0, 1.3], [1.375, 0.0]]))
    found = in_format(x, E5M2)
    assert (carried_in(found), found.layout) == (E5M2, x.layout)
    assert found.to_dense().tolist() == [[0.0, 1.25], [1.5, 0.0]]
    assert carried_in(x) is None


def test_a_nested_tensor_stays_as_it_is() -> None:
    x = torch.nested.nested_tensor([torch.tensor([1.3]), torch.tensor([1.3, 1.4])])
    assert in_format(x, E5M2) is x


# The numbers that tensors of every layout hold.

EYE = torch.tensor([[1.0, 0.0], [0.0, -2.0]])
RAGGED = [torch.ones(1, 2), torch.full((2, 2), 3.0)]


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc])
def test_of_a_sparse_tensor_those_that_it_holds(layout: torch.layout) -> None:
    x = EYE.to_sparse(layout=layout)
    assert entries(x).tolist() == [1.0, -2.0]
    assert torch.equal(dense(x), EYE)
    assert [p.shape[-1] for p in places(x)] == ([2] if layout is torch.sparse_coo else [3, 2])
    assert not is_plain(x)
    assert extent(x) == ((2, 2), (2,))


def test_entries_of_one_place_are_one() -> None:
    twice = torch.sparse_coo_tensor(torch.tensor([[0, 0], [1, 1]]), torch.tensor([1.0, 2.0]), (2, 2))
    assert entries(twice).tolist() == [3.0]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_of_a_nested_tensor_its_parts_one_after_the_other(layout: torch.layout) -> None:
    x = torch.nested.nested_tensor(RAGGED, layout=layout)
    assert entries(x).tolist() == [1.0, 1.0, 3.0, 3.0, 3.0, 3.0]
    assert extent(x) == ((1, 2), (2, 2))
    assert not is_plain(x)
    assert places(x) == []


def test_complex_numbers_are_pairs_as_their_views_say() -> None:
    z = torch.tensor([3 + 4j])
    assert entries(z).tolist() == [[3.0, 4.0]]
    assert entries(z.conj()).tolist() == [[3.0, -4.0]]
    assert entries(z.conj().imag).tolist() == [-4.0]
    assert not entries(z.conj().imag).is_neg()


def test_what_is_plain_already_is_no_copy() -> None:
    assert entries(EYE) is EYE
    assert dense(EYE) is EYE
    assert extent(EYE) == ((2, 2),)


def test_8_bit_numbers_can_be_computed_with() -> None:
    assert entries(torch.ones(1).to(torch.float8_e5m2)).dtype is torch.float32


@pytest.mark.parametrize(
    ("x", "expected"),
    [(EYE, True), (torch.tensor([1j]), True), (torch.tensor([1]), False), (torch.ones(1, device="meta"), False)],
)
def test_what_has_numbers(x: Tensor, expected: bool) -> None:
    assert is_number(x) is expected


# A transfer is no cast, whatever dtype its value has by then.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int64])
def test_the_dtype_stays(dtype: torch.dtype) -> None:
    moved = to_device(torch.ones(2, 3, dtype=dtype), torch.device("meta"))
    assert (moved.dtype, moved.device.type, moved.shape) == (dtype, "meta", (2, 3))


def test_patterns_look_through_it() -> None:
    row = operation(op_name(to_device))
    assert row.known and row.transparent and not row.cast


# Rounding against an independent one: written from the table's numbers alone, and TF32 worked out by hand.

NARROW = narrower()
FP32_BITS = st.integers(0, 2**32 - 1)


def rounded_by_table(x: Tensor, fmt: Format) -> Tensor:
    """Nearest even multiple of the spacing at x, in float64, where every step below is exact."""
    wide = x.double()
    exponent = (torch.frexp(wide.abs())[1] - 1).clamp_min(fmt.min_exponent)
    nearest = torch.ldexp(torch.ldexp(wide, fmt.mantissa - exponent).round(), exponent - fmt.mantissa)
    beyond = torch.sign(wide) * (math.inf if fmt.overflows_to == "inf" else fmt.largest)
    finite = torch.where(nearest.abs() > fmt.largest, beyond, nearest)
    return torch.where(torch.isfinite(wide), finite, torch.where(torch.isnan(wide), wide, beyond)).float()


def assert_same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype is torch.float32
    same = (actual == expected) & (torch.signbit(actual) == torch.signbit(expected))
    assert bool((same | (actual.isnan() & expected.isnan())).all())


def from_bits(*patterns: int) -> Tensor:
    """FP32 values of 32-bit patterns."""
    signed = [pattern - 2**32 if pattern >= 2**31 else pattern for pattern in patterns]
    return torch.tensor(signed, dtype=torch.int32).view(torch.float32)


def every_pattern(dtype: torch.dtype) -> Tensor:
    """All 65536 values of a 16-bit type, as FP32."""
    return torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()


@pytest.mark.parametrize("name", NARROW)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_table_predicts_every_16_bit_value(name: str, dtype: torch.dtype) -> None:
    values = every_pattern(dtype)
    assert_same(round_to(values, name), rounded_by_table(values, FORMATS[name]))


@settings(deadline=None, derandomize=True)
@given(bits=FP32_BITS, exponent_bits=st.integers(2, 8), mantissa=st.integers(1, 15))
def test_the_numbers_of_any_format_predict_any_fp32_value(bits: int, exponent_bits: int, mantissa: int) -> None:
    x = from_bits(bits)
    with temporary_format(ieee_format("e0m0", exponent_bits, mantissa)) as fmt:
        assert_same(round_to(x, "e0m0"), rounded_by_table(x, fmt))


@pytest.mark.parametrize("name", NARROW)
@settings(deadline=None, derandomize=True)
@given(bits=FP32_BITS)
def test_the_table_predicts_any_fp32_value(name: str, bits: int) -> None:
    x = from_bits(bits)
    assert_same(round_to(x, name), rounded_by_table(x, FORMATS[name]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1 + 2**-10, 1 + 2**-10),  # the last fraction bit that is kept
        (1 + 2**-11, 1.0),  # a tie between 1 and 1 + 2^-10: fraction 0 is even
        (1 + 3 * 2**-11, 1 + 2 * 2**-10),  # a tie between fractions 1 and 2: 2 is even
        (1 + 2**-11 + 2**-23, 1 + 2**-10),  # just above the tie
        (2 - 2**-23, 2.0),  # carries into the exponent
        (3 * 2.0**-137, 2 * 2.0**-136),  # subnormal spacing 2^-136; 1.5 of it is a tie, 2 is even
        (2.0**-137, 0.0),  # half of it: 0 is even
        (3.4028234663852886e38, math.inf),  # (2 - 2^-23) * 2^127 rounds up to 2^128
        ((2 - 2**-10) * 2.0**127, (2 - 2**-10) * 2.0**127),
        (math.inf, math.inf),
        (math.nan, math.nan),
        (-0.0, -0.0),
    ],
)
def test_tf32_by_hand(value: float, expected: float) -> None:
    assert_same(round_to(torch.tensor([value]), "tf32"), torch.tensor([expected]))


def test_tf32_keeps_a_nan_whose_fraction_lies_in_the_dropped_bits() -> None:
    assert bool(round_to(from_bits(0x7F800001, 0xFF800001), "tf32").isnan().all())


def test_shapes_and_strides_survive() -> None:
    x = torch.arange(12.0).reshape(3, 4).t() / 3
    assert torch.equal(round_to(x, "tf32"), round_to(x.contiguous(), "tf32"))
    assert round_to(torch.empty(0, 3), "tf32").shape == (0, 3)
    assert round_to(torch.tensor(1 / 3), "tf32").shape == ()


def test_fp32_is_left_alone() -> None:
    x = torch.tensor([1 / 3, 1e-45])
    assert torch.equal(round_to(x, "fp32"), x)
