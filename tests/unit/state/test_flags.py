"""Flags of FP32 are read, set as somebody else had them, and put back."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from auditor.state.flags import OVERRIDES, flags, libraries, loose, under
from auditor.state.ieee import ieee

B = torch.backends


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = flags()
    with under(before):
        yield
    assert flags() == before


def _medium() -> None:
    torch.set_float32_matmul_precision("medium")


def _products() -> None:
    B.cuda.matmul.fp32_precision = "tf32"


def _all() -> None:
    B.fp32_precision = "tf32"


def _none_of_cudnn() -> None:
    B.cudnn.allow_tf32 = False


def _tried_out() -> None:
    B.cudnn.benchmark = True
    B.cuda.matmul.allow_bf16_reduced_precision_reduction = False


@pytest.mark.parametrize("allow", [_medium, _products, _all, _none_of_cudnn, _tried_out])
def test_within_an_audit_they_can_be_what_they_were_before(allow: Callable[[], None]) -> None:
    start = flags()
    allow()
    set_ = flags()
    assert set_ != start
    with ieee():
        inside = flags()
        assert inside["cudnn.conv.fp32_precision"] == "ieee"
        with under(set_):
            assert flags() == set_
        assert flags() == inside
    assert flags() == set_


def test_what_they_allow_beside_fp32_depends_on_the_device() -> None:
    assert loose(flags(), "cpu") == ()
    assert loose(flags(), "cuda:0") == ("tf32",)  # cuDNN's convolutions, by default
    B.cudnn.allow_tf32 = False
    assert loose(flags(), "cuda:0") == ()
    _medium()
    assert loose(flags(), "cpu") == ("bf16",)
    assert loose(flags(), "cuda:0") == ("tf32",)
    older = {"cuda.matmul.allow_tf32": True, "cudnn.allow_tf32": False}  # all there is before torch 2.9
    assert loose(older, "cuda:0") == ("tf32",)


def test_flags_of_their_own_names_are_there_and_variables_that_overrule_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flags()
    for name in ("float32_matmul_precision", "cudnn.benchmark", "cudnn.deterministic", "deterministic_algorithms"):
        assert name in found
    assert not set(OVERRIDES) & set(found)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert flags()["NVIDIA_TF32_OVERRIDE"] == "0"


def test_libraries_are_those_of_the_device() -> None:
    assert libraries("cpu")["onednn"].count(".") >= 1
    assert "onednn" not in libraries("cuda:0")
