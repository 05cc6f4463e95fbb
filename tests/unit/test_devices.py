"""Which device an audit runs on, for what was asked for; refused in one line where there is none."""

from __future__ import annotations

import pytest
import torch

from auditor.devices import chosen, is_native, name_of, type_of
from auditor.errors import AuditorError


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("asked", "device"),
    [
        ("auto", "cuda:1"),
        ("cuda", "cuda:1"),
        ("cuda:0", "cuda:0"),
        (torch.device("cuda:0"), "cuda:0"),
        (torch.device("cuda"), "cuda:1"),
        ("cpu", "cpu"),
        (torch.device("cpu"), "cpu"),
    ],
)
def test_devices_have_a_number(asked: object, device: str) -> None:
    assert chosen(asked) == device
    assert is_native(device) == (type_of(device) == "cuda")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("asked", "slug", "words"),
    [
        ("cuda:2", "no-cuda", "cuda:0, cuda:1 alone"),
        ("mps", "bad-option", "not mps"),
        ("xpu:0", "bad-option", "not xpu:0"),
        ("gpu", "bad-option", "not gpu"),
        ("cuda:", "bad-option", "not cuda:"),
        ("cuda:x", "bad-option", "not cuda:x"),
        (0, "bad-option", "not 0"),
    ],
)
def test_what_is_no_device_of_an_audit_is_said_in_one_line(asked: object, slug: str, words: str) -> None:
    with pytest.raises(AuditorError, match=words) as caught:
        chosen(asked)
    assert caught.value.slug == slug and "\n" not in str(caught.value)


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen("auto") == "cpu" == name_of("cpu")
    with pytest.raises(AuditorError, match="sees no CUDA device"):
        chosen("cuda:1")
