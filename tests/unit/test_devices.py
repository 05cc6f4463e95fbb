"""Which device an audit runs on, for what was asked for; refused in one line where there is none."""

from __future__ import annotations

import pytest
import torch

from auditor.asked import validate
from auditor.devices import choose, follow, is_native, is_spread, libraries, name_of, row_of, type_of
from auditor.errors import AuditorError
from auditor.settings import Settings


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
        ("cpu", "cpu"),
    ],
)
def test_devices_have_a_number(asked: object, device: str) -> None:
    assert choose(asked) == device
    assert is_native(device) == (type_of(device) == "cuda")


@pytest.mark.usefixtures("two")
def test_a_gpu_that_is_not_there_is_told_from_those_that_are() -> None:
    with pytest.raises(AuditorError, match="sees cuda:0, cuda:1 alone") as caught:
        choose("cuda:2")
    assert caught.value.slug == "no-cuda"


@pytest.mark.parametrize("asked", ["mps", "xpu:0", "gpu", "cuda:", "cuda:x", "cpu:1", 0])
def test_what_is_no_device_of_an_audit(asked: object) -> None:
    with pytest.raises(AuditorError, match="device takes auto, cpu, cuda or cuda:N"):
        validate(Settings, {"device": asked})


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto") == "cpu" == name_of("cpu")
    with pytest.raises(AuditorError, match="sees no CUDA device"):
        choose("cuda:1")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("asked", "found", "device"),
    [
        ("auto", {"cpu"}, "cuda:1"),
        ("auto", {"cuda:0", "cpu"}, "cuda:0"),
        ("auto", {"cuda:1", "cuda:0"}, "cuda:0,cuda:1"),
        ("cuda", {"cuda:1", "cuda:0"}, "cuda:0,cuda:1"),
        ("cuda:0", {"cuda:1", "cuda:0"}, "cuda:0"),
        ("cpu", {"cuda:1", "cuda:0"}, "cpu"),
    ],
)
def test_an_audit_follows_its_model_unless_told_where_to_go(asked: str, found: set[str], device: str) -> None:
    chosen_one = follow(asked, found)
    assert chosen_one == device
    assert is_spread(chosen_one) == ("," in device) and is_native(chosen_one) == (device != "cpu")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_the_figures_of_a_gpu_go_by_its_name(name: str, row: str | None) -> None:
    assert row_of(name) == row


def test_libraries_are_those_of_the_device() -> None:
    assert libraries("cpu")["onednn"].count(".") >= 1
    assert "onednn" not in libraries("cuda:0")
