"""The lists of autocast against the dispatcher of the torch that is installed, and against what its autocast does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from auditor.numerics.autocast import autocast_arguments
from auditor.numerics.formats import FORMATS
from auditor.numerics.operations import treatment
from auditor.resources import table
from tests.support.autocast_calls import FP32, LOWER, NONE, PROMOTE, Make
from tests.support.fake_cuda import autocast, first_dtype, overload

KEYS = {"cuda": "AutocastCUDA", "cpu": "AutocastCPU"}
LISTS = ("lower_precision", "fp32", "fp32_unless_dtype_given", "fp32_append_dtype", "promote", "banned")
FP16, WIDE = torch.float16, torch.float32

UNTRIED = {
    "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell",
    "gru_cell",
    "cudnn_convolution",
    "cudnn_convolution_transpose",
    "_scaled_dot_product_flash_attention",
    "grid_sampler",
    "linalg_matrix_norm",
    "binary_cross_entropy",
}
"""Registered, and beyond what fake tensors can run; see autocast_calls.py."""


OF_CUDA_BUILDS = {"_cudnn_rnn", "miopen_rnn"}
"""Registered where torch is built for a GPU: what `lstm` and its like come to there."""


def registered(device: str) -> set[str]:
    names = torch._C._dispatch_get_registrations_for_dispatch_key(KEYS[device])
    return {name.removeprefix("aten::") for name in names if name.startswith("aten::")} - OF_CUDA_BUILDS


def listed(device: str) -> list[str]:
    return [name for key in LISTS for name in table("numerics/autocast")[device].get(key, ())]


@pytest.mark.parametrize("device", KEYS)
def test_the_table_lists_what_torch_registers(device: str) -> None:
    ours, torchs = set(listed(device)), registered(device)
    advice = f"torch {torch.__version__} changed its autocast lists: edit auditor/numerics/autocast.toml, [{device}]"
    assert sorted(torchs - ours) == [], f"{advice}; these are missing"
    assert sorted(ours - torchs) == [], f"{advice}; these are no longer registered"


@pytest.mark.parametrize("device", KEYS)
def test_no_name_is_on_two_lists(device: str) -> None:
    composites = [name for rows in table("numerics/autocast")[device].get("composites", {}).values() for name in rows]
    names = listed(device) + composites
    assert sorted({name for name in names if names.count(name) > 1}) == []


def test_every_registered_operation_is_tried() -> None:
    tried = {*LOWER, *FP32, *PROMOTE}
    assert sorted(set(listed("cuda")) - tried - UNTRIED) == []


def test_the_cpu_is_another_policy() -> None:
    assert (treatment("aten.softmax.int", "cpu"), treatment("aten.cat.default", "cpu")) == ("none", "promote")
    assert treatment("aten.binary_cross_entropy.default", "cpu") == "fp32"


def maker(dtype: torch.dtype) -> Make:
    return lambda *shape: torch.empty(*shape, dtype=dtype, device="cuda")


def true_dtype(name: str, *args: Any) -> torch.dtype:
    return first_dtype(overload(name)(*args))


@pytest.mark.parametrize("name", LOWER)
def test_autocast_lowers(name: str) -> None:
    assert treatment(f"aten.{name}") == "lower"
    with autocast(FP16):
        assert true_dtype(name, *LOWER[name](maker(WIDE))) is FP16
    with autocast(torch.bfloat16):
        assert true_dtype(name, *LOWER[name](maker(WIDE))) is torch.bfloat16


@pytest.mark.parametrize("name", FP32)
def test_autocast_raises(name: str) -> None:
    assert treatment(f"aten.{name}") in ("fp32", "fp32_unless_dtype")
    with autocast(FP16):
        assert true_dtype(name, *FP32[name](maker(FP16))) is WIDE


@pytest.mark.parametrize("name", ["softmax.int", "log_softmax.int", "cumsum", "sum.dim_IntList"])
def test_a_dtype_that_is_given_counts(name: str) -> None:
    with autocast(FP16):
        x = maker(WIDE)(2, 3)
        axis = [1] if name == "sum.dim_IntList" else 1
        assert first_dtype(overload(name)(x, axis, dtype=FP16)) is FP16
    assert treatment(f"aten.{name}") == "fp32_unless_dtype"


@pytest.mark.parametrize("name", PROMOTE)
def test_autocast_promotes(name: str) -> None:
    assert treatment(f"aten.{name}") == "promote"
    with autocast(FP16):
        low, wide = maker(FP16), maker(WIDE)
        assert true_dtype(name, *PROMOTE[name](low, wide)) is WIDE
        assert true_dtype(name, *PROMOTE[name](wide, low)) is WIDE
        assert true_dtype(name, *PROMOTE[name](low, low)) is FP16


@pytest.mark.parametrize("name", NONE)
def test_autocast_leaves_alone(name: str) -> None:
    assert treatment(f"aten.{name}") == "none"
    with autocast(FP16):
        assert true_dtype(name, *NONE[name](maker(FP16))) is FP16
        assert true_dtype(name, *NONE[name](maker(WIDE))) is WIDE


def test_autocast_refuses() -> None:
    with autocast(FP16), pytest.raises(RuntimeError, match="unsafe to autocast"):
        overload("binary_cross_entropy")(maker(FP16)(2), maker(FP16)(2))


def composites() -> list[str]:
    """Operations made of others, which the graph keeps whole: autocast treats their parts."""
    every = (name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::"))
    return sorted(
        name
        for name in every
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CompositeImplicitAutograd")
        and not name.endswith(("out", "backward"))
        and not name.partition(".")[0].endswith("_")
    )


def plausible_arguments(t: Make) -> list[tuple[Any, ...]]:
    x, v = t(4, 4), t(4)
    whole = torch.zeros(4, dtype=torch.int64, device="cuda")
    return [
        *((x,), (x, x), (x, x, x), (v, v), (x, 1), (x, 2.0), (x, [1]), (x, v), ([x, x],), (v, x), (x, whole)),
        *((t(2, 4, 4), t(2, 4, 4)), (t(1, 4, 8, 8),), (t(1, 4, 8, 8), [2, 2]), (x, [0, 1]), (x, 2, 1), (x, -1, None)),
    ]


def attempt(name: str, args: tuple[Any, ...], enabled: bool) -> torch.dtype | None:
    """Dtype of the result with autocast on or off; None where the operation refuses the arguments."""
    torch.set_autocast_enabled("cuda", enabled)
    try:
        return true_dtype(name, *args)
    except Exception:
        return None


def mistakes(t: Make) -> tuple[int, list[str]]:
    """How many operations took some of the arguments, and those of them where the policy predicts another dtype."""
    tried, wrong = 0, []
    for name in composites():
        for args in plausible_arguments(t):
            actual = attempt(name, args, enabled=True)
            if actual is not None:
                tried += 1
                op = name if "." in name else f"{name}.default"
                expected = attempt(name, autocast_arguments(f"aten.{op}", args, {}, FORMATS["fp16"])[0], enabled=False)
                if expected is not actual:
                    wrong.append(f"{name}: {actual}, where the policy says {expected}")
                break
    return tried, wrong


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [WIDE, FP16])
def test_composites_behave_as_their_parts(dtype: torch.dtype) -> None:
    with autocast(FP16):
        tried, wrong = mistakes(maker(dtype))
    assert tried > 200
    assert not wrong, "\n".join(["add to [cuda.composites] of auditor/numerics/autocast.toml:", *wrong])
