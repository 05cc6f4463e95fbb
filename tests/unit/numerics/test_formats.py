"""The table of formats against what torch itself says of the same types."""

import pytest
import torch

from auditor.artefact import runtime
from auditor.errors import AuditorError
from auditor.numerics.formats import (
    FORMATS,
    auditable,
    dtype_of,
    format_of,
    is_low,
    label,
    narrower,
)
from tests.support.formats import ieee_format, temporary_format
from tests.support.refusing import refused

STORED = [name for name, fmt in FORMATS.items() if fmt.dtype is not None]


@pytest.mark.parametrize("name", STORED)
def test_rows_agree_with_torch(name: str) -> None:
    fmt = FORMATS[name]
    info = torch.finfo(fmt.dtype)
    assert fmt.largest == info.max
    assert fmt.smallest_normal == info.smallest_normal
    assert fmt.epsilon == info.eps


@pytest.mark.parametrize("name", STORED)
def test_smallest_subnormal_is_the_first_value_above_zero(name: str) -> None:
    fmt = FORMATS[name]
    smallest = torch.tensor(fmt.smallest_subnormal, dtype=torch.float64)
    assert float(smallest.to(fmt.dtype).double()) == fmt.smallest_subnormal
    assert float((smallest / 2).to(fmt.dtype).double()) == 0.0  # the tie between 0 and 1 goes to the even one, 0


def test_formats_and_dtypes_are_found_from_each_other() -> None:
    computed = {name: dtype_of(name) for name, row in FORMATS.items() if row.native}
    assert computed == {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    assert [format_of(dtype).name for dtype in computed.values()] == [*computed]
    assert [name for name, dtype in computed.items() if is_low(dtype)] == ["bf16", "fp16"]


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
def test_what_torch_does_not_compute_real_numbers_in_has_no_format(dtype: torch.dtype) -> None:
    assert (format_of(dtype), is_low(dtype)) == (None, False)


@pytest.mark.parametrize("name", ["tf32", "fp8_e4m3"])
def test_a_format_without_arithmetic_has_no_dtype_to_run_in(name: str) -> None:
    with refused(AuditorError, "no-arithmetic", match="torch cannot compute in"):
        dtype_of(name)


def test_what_can_be_audited_takes_less_room_than_fp32() -> None:
    assert auditable() == ("fp16", "bf16", "fp8_e4m3", "fp8_e5m2")
    assert narrower() == ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")


def test_labels_are_how_people_write_the_names() -> None:
    assert [label(name) for name in ("bf16", "fp8_e4m3", "e6m9")] == ["BF16", "FP8 E4M3", "E6M9"]


def test_ieee_works_out_the_rows_of_the_table() -> None:
    for name, exponent_bits, mantissa in (("fp16", 5, 10), ("bf16", 8, 7), ("fp8_e5m2", 5, 2)):
        made, row = ieee_format(name, exponent_bits, mantissa), FORMATS[name]
        numbers = ("mantissa", "min_exponent", "largest", "bytes", "label")
        assert [getattr(made, key) for key in numbers] == [getattr(row, key) for key in numbers]


def test_a_format_of_a_test_is_in_the_table_for_as_long_as_the_body_runs() -> None:
    with temporary_format(ieee_format("e6m9", 6, 9)) as row:
        # bias 31: exponents -30 to 31, nine fraction bits
        assert (row.smallest_normal, row.largest, row.bytes) == (2.0**-30, (2 - 2.0**-9) * 2.0**31, 2)
        assert FORMATS["e6m9"] is row
        assert "e6m9" in auditable()
        assert "e6m9" in narrower()
    assert "e6m9" not in FORMATS


def test_a_byte_that_is_begun_is_taken() -> None:
    assert [ieee_format(f"e6m{m}", 6, m).bytes for m in (1, 2, 5, 9, 10)] == [1, 2, 2, 2, 3]  # 8, 9, 12, 16, 17 bits


def test_what_a_patched_model_brings_along_agrees_with_the_table() -> None:
    run = {name: row.dtype for name, row in FORMATS.items() if row.native and row.bytes <= 4}
    assert run == runtime.DTYPES
    assert {*runtime.DTYPES.values()} <= {torch.float16, torch.bfloat16, torch.float32}
