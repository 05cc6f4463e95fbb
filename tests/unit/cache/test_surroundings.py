"""What measurements depend on beside the model can be told, twice alike; a replaced kernel of PyTorch's cannot."""

from __future__ import annotations

import pytest
import torch

from auditor.cache import surroundings as module
from auditor.cache.content import Contents, Uncomparable
from auditor.cache.surroundings import surroundings


def test_it_is_the_same_twice() -> None:
    assert Contents().digest(surroundings("cpu")) == Contents().digest(surroundings("cpu"))


def test_every_flag_is_read_from_this_torch() -> None:
    unread = [name for name, value in module._settings()[0] if value in ("AttributeError", "RuntimeError")]
    assert unread == []


def test_this_package_counts(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cache").mkdir()
    (tmp_path / "a.py").write_text("1")
    monkeypatch.setattr(module, "__file__", str(tmp_path / "cache" / "surroundings.py"))
    before = module._code()
    (tmp_path / "b.toml").write_text("")
    with_table = module._code()
    (tmp_path / "a.py").write_text("2")
    assert len({before, with_table, module._code()}) == 3


def test_a_kernel_that_python_replaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.library, "_impls", {*torch.library._impls, "aten/relu/CPU"})
    with pytest.raises(Uncomparable, match="aten/relu/CPU"):
        surroundings("cpu")


def test_a_model_over_several_gpus_is_in_all_of_their_surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"cuda:0": "NVIDIA H100", "cuda:1": "NVIDIA A100"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    both = module._device("cuda:0,cuda:1")
    assert all(name in str(both) for name in names.values())
    assert module._device("cuda:0") != both
    assert module._device("cpu") == ["cpu"]
