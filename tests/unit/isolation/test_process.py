"""The process is put back: every generator, dtype, thread count and gradient mode."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from auditor.isolation import isolated
from auditor.isolation.process import OVERRIDES, flags, ieee, loose, process_state, uncompiled, under, unfused

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
        with isolated():
            put()
            assert read() != before
        assert read() == before
    finally:
        back()


_PARTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def precisions() -> dict[str, object]:
    found: dict[str, object] = {}
    for name in _PARTS:
        library, part = name.split(".")
        found[name] = getattr(getattr(torch.backends, library), part).fp32_precision
    return found | {"convolutions": torch.backends.cudnn.allow_tf32, "benchmark": torch.backends.cudnn.benchmark}


def _nothing() -> None:
    pass


def _older() -> None:
    torch.set_float32_matmul_precision("medium")


def _finer() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"


def _general() -> None:
    torch.backends.fp32_precision = "tf32"


def _benchmark() -> None:
    torch.backends.cudnn.benchmark = True


@pytest.mark.parametrize("allow", [_nothing, _older, _finer, _general, _benchmark])
def test_fp32_is_ieee_in_the_body_and_flags_come_back(allow: Callable[[], None]) -> None:
    start = precisions()
    with ieee():
        pass
    assert precisions() == start
    try:
        allow()
        allowed = precisions()
        with ieee():
            inside = precisions()
        assert {inside[name] for name in _PARTS} == {"ieee"}
        assert not inside["convolutions"] and not inside["benchmark"]
        assert precisions() == allowed
    finally:
        torch.backends.fp32_precision = "none"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        for name, value in start.items():
            if "." in name:
                library, part = name.split(".")
                getattr(getattr(torch.backends, library), part).fp32_precision = value


def test_flags_that_are_frozen_are_set_all_the_same() -> None:
    """Importing torch's own tests freezes them, as `torch.backends.disable_global_flags` does."""
    start = precisions()
    torch.backends.disable_global_flags()
    try:
        with ieee():
            assert {precisions()[name] for name in _PARTS} == {"ieee"}
        assert precisions() == start
        with pytest.raises(RuntimeError, match="not allowed"):
            torch.backends.cudnn.benchmark = True
    finally:
        torch.backends.disable_global_flags.__globals__["__allow_nonbracketed_mutation_flag"] = True


B = torch.backends


@pytest.fixture
def as_it_was() -> Iterator[None]:
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


@pytest.mark.usefixtures("as_it_was")
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


@pytest.mark.usefixtures("as_it_was")
def test_what_they_allow_beside_fp32_depends_on_the_device() -> None:
    assert loose(flags(), "cpu") == ()
    assert loose(flags(), "cuda:0") == ("tf32",)  # cuDNN's convolutions, by default
    B.cudnn.allow_tf32 = False
    assert loose(flags(), "cuda:0") == ()
    _medium()
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
        with unfused():
            assert not torch.backends.mha.get_fastpath_enabled()
        assert torch.backends.mha.get_fastpath_enabled() is before
    finally:
        torch.backends.mha.set_fastpath_enabled(kept)


def test_compiled_functions_run_as_they_were_written() -> None:
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    compiled = torch.compile(lambda x: x + 1, backend=backend)
    with uncompiled():
        assert compiled(torch.ones(1)).item() == 2.0
    assert graphs == []
    assert compiled(torch.ones(1)).item() == 2.0
    assert len(graphs) == 1
