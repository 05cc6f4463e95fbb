"""Every way by which Python gets to know a dtype, or whether autocast is on, is noticed; afterwards torch is as before."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from auditor.capture import literals
from auditor.capture.asks import asking
from tests.capturing import Function
from tests.subjects import capture_of, only

X = torch.tensor([[1.0, -1.0]])


@torch.jit.script
def scripted(x: Tensor) -> Tensor:
    if x.dtype == torch.float16:
        return x + 1e-3
    return x + 1e-6


class Asking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + torch.finfo(x.dtype).resolution


ASKS: dict[str, Callable[[Tensor], Tensor]] = {
    "dtype": lambda x: x + torch.finfo(x.dtype).resolution,
    "of a part": lambda x: x + torch.finfo(x[0].exp().dtype).resolution,
    "type": lambda x: x + (1e-3 if x.type() == "torch.HalfTensor" else 1e-6),
    "itemsize": lambda x: x + (1e-3 if x.itemsize == 2 else 1e-6),
    "element_size": lambda x: x + (1e-3 if x.element_size() == 2 else 1e-6),
    "in a function of autograd": lambda x: Asking.apply(x),
    "what it is with another": lambda x: x + torch.finfo(torch.result_type(x, 1.0)).resolution,
    "scripted": scripted,
}


@pytest.mark.parametrize("ask", ASKS.values(), ids=ASKS)
def test_a_number_that_follows_a_dtype_is_found(ask: Any) -> None:
    found = only(capture_of(Function(lambda x: ask(x).exp()), X), "add")
    assert found.literals["fp16"].arguments == {1: 1e-3}


KIND = """
import torch
class Net(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x) + ({})).exp()
"""
CAST = """
import torch
class Net(torch.nn.Linear):
    eps = 1e-6
    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.eps = 1e-3 if self.weight.dtype is torch.float16 else 1e-6
        return self
    def forward(self, x):
        return (super().forward(x) + self.eps).exp()
"""
IMPORTED = """
import torch
from torch import get_autocast_dtype
class Net(torch.nn.Linear):
    def forward(self, x):
        return (super().forward(x) + (1e-3 if get_autocast_dtype("cuda") is torch.float16 else 1e-6)).exp()
"""
UNSEEN = {
    "a class": KIND.format("1e-3 if isinstance(x, torch.HalfTensor) else 1e-6"),
    "one of several": KIND.format("1e-6 if isinstance(x, (torch.FloatTensor, torch.cuda.FloatTensor)) else 1e-3"),
    "while it is cast": CAST,
    "by what the file imported": IMPORTED,
}


@pytest.mark.parametrize("text", UNSEEN.values(), ids=UNSEEN)
def test_who_may_ask_without_being_noticed_is_run_again(text: str, tmp_path: Path) -> None:
    """The files are others, since it is these that are looked at."""
    (tmp_path / "net.py").write_text(text)
    spec = importlib.util.spec_from_file_location("net", tmp_path / "net.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = only(capture_of(module.Net(2, 2), X), "add")
    assert any(each["fp16"].arguments == {1: 1e-3} for each in (found.literals, found.autocast_literals) if each)


def test_a_number_that_follows_autocast_is_found() -> None:
    def asked(x: Tensor) -> Tensor:
        low = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is torch.float16
        return (x + (1e-3 if low else 1e-6)).exp()

    assert only(capture_of(Function(asked), X), "add").autocast_literals["fp16"].arguments == {1: 1e-3}


def test_a_constant_in_the_dtype_of_another_tensor_is_found() -> None:
    found = capture_of(Function(lambda x: (x.new_tensor([0.1, 0.2]) + x + 1e-6).exp()), X)
    assert any(place.made_in.get("fp16") is torch.float16 for place in found.placeholders)


def test_who_asks_nothing_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise AssertionError("recorded again")

    monkeypatch.setattr(literals, "_recorded", refused)
    model = torch.nn.Sequential(torch.nn.LayerNorm(2, eps=1e-6), torch.nn.Linear(2, 2), torch.nn.GELU())
    assert capture_of(model, X).compared


def test_torch_is_as_before() -> None:
    def now() -> list[Any]:
        return [torch.is_autocast_enabled, torch.get_autocast_dtype, vars(torch._C.ScriptFunction)["__call__"]]

    before, heard = now(), list[None]()
    with asking(lambda: heard.append(None)):
        assert torch.is_autocast_enabled() is False
        assert np.allclose(scripted(X), X)
    assert len(heard) == 2
    assert all(a is b for a, b in zip(now(), before, strict=True))


def test_a_constant_that_python_makes_in_a_dtype_it_looked_at_is_found() -> None:
    """No operation of the tape has the dtype, or a limit of it, among its arguments."""
    model = Function(lambda x: x + torch.tensor([0.1, 0.2], dtype=x.dtype))
    assert any(place.made_in.get("fp16") is torch.float16 for place in capture_of(model, X).placeholders)
