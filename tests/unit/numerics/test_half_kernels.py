"""The table of half kernels against PyTorch's OpInfo, for every operation that both know; and what run_op makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auditor.numerics.formats import dtype_of
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.operations import operation
from tests.support.opinfo import HALVES, has_half, infos

BY_ARGUMENTS = {"linalg_matrix_power", "matrix_power"}
"""OpInfo speaks of all calls at once: a negative power is that of an inverse, which has no half kernel; others are products."""

OF_A_CPU = ["_upsample_bilinear2d_aa"]
"""Of which a rule, LIN005, says that it raises on a CPU."""

NO_TENSORS = {"broadcast_shapes"}


@pytest.mark.parametrize("fmt", HALVES)
def test_the_table_says_of_cuda_what_opinfo_says(fmt: str) -> None:
    known = set(infos()) - BY_ARGUMENTS - NO_TENSORS
    assert len(known) > 500
    refused = {name for name in known if fmt in operation(f"aten.{name}").refused_on_cuda}
    expected = {name for name in known if not has_half(name, fmt)}
    assert sorted(expected - refused) == [], "OpInfo has no half kernel, and half_kernels.toml does not list them"
    assert sorted(refused - expected) == [], "half_kernels.toml lists them, and OpInfo has half kernels"


@pytest.mark.parametrize("fmt", HALVES)
def test_what_this_cpu_lacks_is_computed_in_float32(fmt: str) -> None:
    """Else an operation that CUDA runs would be called unsupported."""
    lacking = [name for name in infos() if has_half(name, fmt) and not has_half(name, fmt, "cpu")]
    rows = [operation(f"aten.{name}") for name in lacking]
    assert "rrelu" in lacking or fmt == "bf16"
    assert [row.name for row in rows if row.half_on_cpu and not row.powers_of_two] in ([], OF_A_CPU)


def test_a_power_of_a_matrix_is_refused_where_it_is_negative() -> None:
    x = torch.tensor([[2.0, 0.0], [0.0, 4.0]]).half()
    power = torch.ops.aten.linalg_matrix_power.default
    assert run_op(power, (x, 3), {}).tolist() == [[8.0, 0.0], [0.0, 64.0]]
    with pytest.raises(UnsupportedInFormat):
        run_op(power, (x, -1), {})


@pytest.mark.parametrize("fmt", HALVES)
@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("angle", (torch.ones(2),)),
        ("igamma", (torch.ones(2), torch.ones(2))),
        ("igammac", (torch.ones(2), torch.ones(2))),
        ("histc", (torch.ones(2), 4, 0, 2)),
    ],
)
def test_operations_of_the_cpu_alone_are_refused(name: str, args: tuple[Any, ...], fmt: str) -> None:
    op = getattr(torch.ops.aten, name).default
    low = tuple(x.to(dtype_of(fmt)) if isinstance(x, torch.Tensor) else x for x in args)
    op(*low)  # the CPU has it
    with pytest.raises(UnsupportedInFormat, match=f"{name} has no .*float16 kernel on CUDA"):
        run_op(op, low, {})


def test_complex_numbers_are_of_two_float16_and_never_of_bfloat16() -> None:
    op = torch.ops.aten.complex.default
    assert run_op(op, (torch.ones(2).half(), torch.ones(2).half()), {}).dtype is torch.complex32
    with pytest.raises(UnsupportedInFormat, match="complex has no bfloat16 kernel on CUDA"):
        run_op(op, (torch.ones(2).bfloat16(), torch.ones(2).bfloat16()), {})
