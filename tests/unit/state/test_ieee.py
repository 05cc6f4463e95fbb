"""FP32 is FP32 in an audit, whatever the caller allowed; what the caller allowed comes back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from auditor.state.ieee import ieee

_PARTS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")


def flags() -> dict[str, object]:
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
    start = flags()
    with ieee():
        pass
    assert flags() == start
    try:
        allow()
        allowed = flags()
        with ieee():
            inside = flags()
        assert {inside[name] for name in _PARTS} == {"ieee"}
        assert not inside["convolutions"] and not inside["benchmark"]
        assert flags() == allowed
    finally:
        torch.backends.fp32_precision = "none"
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.allow_tf32 = True
        torch.set_float32_matmul_precision("highest")
        for name, value in start.items():
            if "." in name:
                library, part = name.split(".")
                getattr(getattr(torch.backends, library), part).fp32_precision = value


def test_what_follows_the_general_setting_follows_it_afterwards() -> None:
    parts = torch.backends.mkldnn.matmul, torch.backends.cuda.matmul
    own = [part.fp32_precision for part in parts]
    for part in parts:  # who sets the older flag, as another test may have, sets these too
        part.fp32_precision = "none"
    torch.backends.fp32_precision = "tf32"
    try:
        with ieee():
            pass
        torch.backends.fp32_precision = "none"
        assert torch.backends.mkldnn.matmul.fp32_precision == torch.backends.cuda.matmul.fp32_precision == "none"
    finally:
        torch.backends.fp32_precision = "none"
        for part, precision in zip(parts, own, strict=True):
            part.fp32_precision = precision


def test_flags_that_are_frozen_are_set_all_the_same() -> None:
    """Importing torch's own tests freezes them, as `torch.backends.disable_global_flags` does."""
    start = flags()
    torch.backends.disable_global_flags()
    try:
        with ieee():
            assert {flags()[name] for name in _PARTS} == {"ieee"}
        assert flags() == start
        with pytest.raises(RuntimeError, match="not allowed"):
            torch.backends.cudnn.benchmark = True
    finally:
        torch.backends.__dict__["__allow_nonbracketed_mutation_flag"] = True
