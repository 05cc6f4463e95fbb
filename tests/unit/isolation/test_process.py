"""The process is put back: every generator, dtype, thread count and gradient mode."""

import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from auditor.isolation import isolate
from auditor.isolation.process import (
    OVERRIDES,
    disable_fused_path,
    flags,
    ieee,
    loose,
    process_state,
    reseed,
    under,
)

SET: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "dtype": (torch.get_default_dtype, lambda: torch.set_default_dtype(torch.float64)),
    "threads": (torch.get_num_threads, lambda: torch.set_num_threads(torch.get_num_threads() + 1)),
    "gradients": (torch.is_grad_enabled, lambda: torch.set_grad_enabled(not torch.is_grad_enabled())),
    "products": (torch.get_float32_matmul_precision, lambda: torch.set_float32_matmul_precision("medium")),
    "algorithms": (
        torch.are_deterministic_algorithms_enabled,
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
    ),
    "autocast": (lambda: torch.is_autocast_enabled("cpu"), lambda: torch.set_autocast_enabled("cpu", True)),
    "dtype of autocast": (
        lambda: torch.get_autocast_dtype("cuda"),
        lambda: torch.set_autocast_dtype("cuda", torch.bfloat16),
    ),
    "attention": (torch.backends.cuda.flash_sdp_enabled, lambda: torch.backends.cuda.enable_flash_sdp(False)),
    "environment": (lambda: dict(os.environ), lambda: os.environ.update(AUDITOR_TEST_SET="1")),
    "directory": (Path.cwd, lambda: os.chdir("/")),
    "path": (lambda: list(sys.path), lambda: sys.path.insert(0, "/nowhere")),
    "warnings": (lambda: list(warnings.filters), lambda: warnings.simplefilter("error", append=True)),
}


@pytest.mark.parametrize("name", SET)
def test_what_a_forward_sets_for_the_whole_process_comes_back(name: str) -> None:
    read, put = SET[name]
    before = read()
    back = process_state()
    try:
        with isolate():
            put()
            assert read() != before
        assert read() == before
    finally:
        back()


B = torch.backends
PARTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


@pytest.fixture
def as_it_was() -> Iterator[None]:
    before = flags()
    with under(before):
        yield
    assert flags() == before


def precisions() -> set[object]:
    found = flags()
    return {found[f"{part}.fp32_precision"] for part in PARTS}


def tried_out() -> None:
    B.cudnn.benchmark = True
    B.cuda.matmul.allow_bf16_reduced_precision_reduction = False


ALLOWING: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "the older way": lambda: torch.set_float32_matmul_precision("medium"),
    "products": lambda: setattr(B.cuda.matmul, "fp32_precision", "tf32"),
    "all": lambda: setattr(B, "fp32_precision", "tf32"),
    "none of cuDNN": lambda: setattr(B.cudnn, "allow_tf32", False),
    "tried out": tried_out,
}


@pytest.mark.usefixtures("as_it_was")
@pytest.mark.parametrize("allow", ALLOWING.values(), ids=ALLOWING)
def test_fp32_is_ieee_in_the_body_and_within_it_flags_can_be_what_they_were(allow: Callable[[], object]) -> None:
    allow()
    allowed = flags()
    with ieee():
        inside = flags()
        assert precisions() == {"ieee"}
        assert not B.cudnn.allow_tf32 and not B.cudnn.benchmark
        with under(allowed):
            assert flags() == allowed
        assert flags() == inside
    assert flags() == allowed


def test_flags_that_are_frozen_are_set_all_the_same() -> None:
    """Importing torch's own tests freezes them, as `torch.backends.disable_global_flags` does."""
    start = flags()
    torch.backends.disable_global_flags()
    try:
        with ieee():
            assert precisions() == {"ieee"}
        assert flags() == start
        with pytest.raises(RuntimeError, match="not allowed"):
            torch.backends.cudnn.benchmark = True
    finally:
        torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True


@pytest.mark.usefixtures("as_it_was")
def test_what_they_allow_beside_fp32_depends_on_the_device() -> None:
    assert loose(flags(), "cpu") == ()
    assert loose(flags(), "cuda:0") == ("tf32",)  # cuDNN's convolutions, by default
    B.cudnn.allow_tf32 = False
    assert loose(flags(), "cuda:0") == ()
    torch.set_float32_matmul_precision("medium")
    assert loose(flags(), "cpu") == ("bf16",)
    assert loose(flags(), "cuda:0") == ("tf32",)


def test_flags_of_their_own_names_are_there_and_variables_that_overrule_them(monkeypatch: pytest.MonkeyPatch) -> None:
    found = flags()
    for name in ("float32_matmul_precision", "cudnn.benchmark", "cudnn.deterministic", "deterministic_algorithms"):
        assert name in found
    assert not set(OVERRIDES) & set(found)
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    assert flags()["NVIDIA_TF32_OVERRIDE"] == "0"


@pytest.mark.parametrize("before", [True, False])
def test_the_fused_path_is_off_and_then_as_it_was(before: bool) -> None:
    kept = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(before)
    try:
        with disable_fused_path():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(kept)


@pytest.mark.skipif(torch.accelerator.current_accelerator() is not None, reason="torch is built for an accelerator")
def test_seeding_where_no_gpu_can_be_formats_no_call_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    """An audit seeds before each of its runs, and `torch.manual_seed` takes milliseconds for stacks that nobody reads."""
    expected = torch.rand(3, generator=torch.Generator().manual_seed(7))
    back = process_state()
    monkeypatch.setattr(traceback, "format_stack", None)
    try:
        reseed(7)
        drawn = torch.rand(3)
    finally:
        back()
    assert torch.equal(drawn, expected)
