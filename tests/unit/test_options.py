"""What an audit can be asked, checked once, in one place, before anything is loaded or run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from auditor.errors import AuditorError
from auditor.options import Options, named


def options(**asked: Any) -> Options:
    return Options(rules=(), command="test", **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"formats": ("fp16", "int4")}, "int4"),
        ({"formats": ()}, "none"),
        ({"strategies": ("prune",)}, "strategies are autocast, cast and graph, not prune"),
        ({"mode": "fine-tuning"}, "modes are inference and training, not fine-tuning"),
        ({"device": "tpu"}, "tpu"),
        ({"max_error": 0.0}, "positive"),
        ({"max_error": math.nan}, "positive"),
        ({"max_error": math.inf}, "positive"),
        ({"gpu": "abacus"}, "gpu is one of T4, A100"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_said_in_one_line(asked: dict[str, Any], words: str) -> None:
    with pytest.raises(AuditorError, match=words) as caught:
        options(**asked)
    assert caught.value.slug == "bad-option"
    assert "\n" not in str(caught.value)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AuditorError) as caught:
        options(device="cuda")
    assert caught.value.slug == "no-cuda"


@pytest.mark.parametrize(
    ("device", "there", "native"),
    [("cpu", True, False), ("cpu", False, False), ("auto", True, True), ("auto", False, False), ("cuda", True, True)],
)
def test_where_the_formats_run(device: str, there: bool, native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert options(device=device).native is native


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("bf16", ("bf16",)),
        ("fp16, bf16,fp16", ("fp16", "bf16")),
        (["fp16"], ("fp16",)),
        (("fp16", "bf16"), ("fp16", "bf16")),
        ("", ()),
        ([], ()),
        (iter(["cast"]), ("cast",)),
    ],
)
def test_names_are_given_one_by_one_or_together(given: Any, names: tuple[str, ...]) -> None:
    assert named(given) == names


def test_quick_takes_the_first_of_what_was_asked_for() -> None:
    found = options(formats=("bf16", "fp16"), strategies=("cast", "autocast"), quick=True)
    assert (found.formats, found.strategies) == (("bf16",), ("cast",))
    with pytest.raises(AuditorError, match="int4"):  # what is left aside is checked all the same
        options(formats=("bf16", "int4"), quick=True)
