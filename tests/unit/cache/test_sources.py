"""The files that a model's code stands in, those it imports included; PyTorch's and Python's own are left out."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from auditor.cache.sources import code_of


def imported(folder: Path, name: str, text: str) -> ModuleType:
    file = folder / f"{name}.py"
    file.write_text(text)
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODEL = """
import json, math
import torch
from torch import nn
import cache_helper
class Net(nn.Linear):
    def forward(self, x):
        return cache_helper.twice(super().forward(x))
"""


@pytest.fixture
def net(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    for name in ("cache_model", "cache_helper", "cache_unused"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    imported(tmp_path, "cache_helper", "def twice(x): return x * 2\n")
    imported(tmp_path, "cache_unused", "pass\n")
    found: nn.Module = imported(tmp_path, "cache_model", MODEL).Net(2, 2)
    return found


def test_the_users_files_count_and_no_others(net: nn.Module, tmp_path: Path) -> None:
    assert [name for name, _ in code_of(net)] == [str(tmp_path / f"cache_{name}.py") for name in ("helper", "model")]


@pytest.mark.parametrize("name", ["cache_model", "cache_helper"])
def test_a_change_of_either_is_seen(name: str, net: nn.Module, tmp_path: Path) -> None:
    before = code_of(net)
    with (tmp_path / f"{name}.py").open("a") as file:
        file.write("# a comment\n")
    assert code_of(net) != before


def test_files_beside_the_model_count(net: nn.Module, tmp_path: Path) -> None:
    (tmp_path / "loss.txt").write_text("1")
    found = code_of(net, [tmp_path / "loss.txt"])
    (tmp_path / "loss.txt").write_text("2")
    assert len(found) == 3
    assert code_of(net, [tmp_path / "loss.txt"]) != found


def test_what_a_file_beside_the_model_names_counts(net: nn.Module, tmp_path: Path) -> None:
    """A module that a forward came to by a name in a string, and what that one imports."""
    text = "from cache_model import Net\n"
    imported(tmp_path, "cache_unused", text)
    (tmp_path / "cache_helper.py").write_text("def twice(x): return x + x\n")
    assert [name for name, _ in code_of(nn.Linear(2, 2), [str(tmp_path / "cache_unused.py")])] == [
        str(tmp_path / f"cache_{name}.py") for name in ("helper", "model", "unused")
    ]


def test_code_without_a_file_is_compared_as_it_was_compiled() -> None:
    def made(text: str) -> nn.Module:
        space = {"nn": nn, "__name__": "nowhere"}
        exec(compile(text, "<cell>", "exec"), space)
        return space["Cell"]()  # type: ignore[operator,no-any-return]

    text = "class Cell(nn.Module):\n  def forward(self, x):\n    return helped(x)\ndef helped(x):\n  return x * {}\n"
    one, same, other, spaced = (
        code_of(made(each)) for each in (text.format(2), text.format(2), text.format(3), "\n" + text.format(2))
    )
    assert [name for name, _ in one] == ["nowhere.Cell.forward", "nowhere.helped"]
    assert one == same == spaced != other


def test_torch_alone_leaves_nothing() -> None:
    assert code_of(nn.Sequential(nn.Linear(1, 1), nn.ReLU())) == []
