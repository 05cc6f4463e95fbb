"""Batches in the forms in which users have them reach the step, and a file's only step is found."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from auditor.errors import LoadError
from auditor.features.rehearsal.batches import call_step, number_batches
from auditor.features.rehearsal.loops import find_step
from auditor.loading.importer import import_source
from tests.support.refusing import refused

X, Y = torch.ones(4, 3), torch.zeros(4)
PAIR = {"x": X, "y": Y}


def both(x: Any, y: Any) -> Any:
    return x, y


def one(batch: Any) -> Any:
    return batch


def keywords(**batch: Any) -> Any:
    return batch


def entries(*batch: Any) -> Any:
    return batch


def nothing() -> Any:
    return ()


def optional(x: Any, scale: float = 1.0) -> Any:
    return x, scale


@pytest.mark.parametrize(
    ("step", "batch", "given"),
    [
        (both, (X, Y), (X, Y)),
        (both, [X, Y], (X, Y)),
        (both, PAIR, (X, Y)),
        (both, {**PAIR, "mask": X}, (X, Y)),
        (one, PAIR, PAIR),
        (one, (X, Y), (X, Y)),
        (one, X, X),
        (one, {"batch": X}, X),
        (keywords, PAIR, PAIR),
        (entries, (X, Y), (X, Y)),
        (entries, X, (X,)),
        (entries, None, ()),
        (nothing, None, ()),
        (optional, {"x": X}, (X, 1.0)),
    ],
)
def test_a_batch_reaches_the_step_as_its_signature_requires(step: Any, batch: Any, given: Any) -> None:
    value = call_step(step, batch)
    assert type(value) is type(given)
    assert len(value) == len(given)
    assert value is given or all(a is b or a == b for a, b in zip(value, given, strict=True))


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (X, "the step takes x, y, and a batch is a Tensor: give tuples or dicts"),
        ({"x": X, "labels": Y}, "the step takes x, y, and a batch has x, labels: rename y"),
    ],
)
def test_a_batch_that_lacks_an_argument_is_refused_in_one_line(batch: Any, said: str) -> None:
    with refused(LoadError, "bad-step", match=said):
        call_step(both, batch)


@pytest.mark.parametrize(
    ("batches", "step", "count"),
    [
        (X, one, 1),
        (PAIR, keywords, 1),
        ((X, Y), both, 1),
        ([(X, Y)], both, 1),
        ([X, X], one, 2),
        ((X, X), one, 2),
        ((X, Y), one, 1),
        ((X, Y), entries, 1),
        (X.split(1), one, 4),
        (X.split(1), optional, 4),
        (lambda: X, one, 1),
        (DataLoader(TensorDataset(X, Y), 2), both, 2),
        (None, nothing, 1),
    ],
)
def test_one_tensor_or_dict_is_one_batch(batches: Any, step: Any, count: int) -> None:
    numbered = number_batches(batches, step)
    assert [next(numbered)[0] for _ in range(count + 1)] == [*range(count), 0]


def test_empty_batches_end() -> None:
    assert list(number_batches([], one)) == []


TRAIN = "def update(x): x.backward()\ndef evaluate(x): return x\n"
NET = """
from torch import nn
class Net(nn.Module):
    def training_step(self, batch): return batch
    def configure_optimizers(self): return None
"""


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (TRAIN, "update"),
        (TRAIN + "def train_step(x): return update(x)\n", "train_step"),
        (TRAIN + "def step(x): return update(x)\ndef train_step(x): return update(x)\n", "step"),
        (NET, "Net"),
        (NET + "net = Net()\n", "Net.py:Net or Net.py:net"),
        (TRAIN + "def other(x): x.backward()\n", "Net.py:update or Net.py:other"),
        ("def evaluate(x): return x\n", r"no training step \(its functions: evaluate\)"),
        ("x = 1\n", "no training step: define step"),
    ],
)
def test_the_only_step_of_a_file_is_found_and_several_are_listed(tmp_path: Path, text: str, found: str) -> None:
    (file := tmp_path / "train_one.py").write_text(text)
    module = import_source("train_one", file)
    if found.isidentifier():
        assert find_step(module, "train_one.py", "Net.py") == found
    else:
        with refused(LoadError, "missing-target", match=found):
            find_step(module, "train_one.py", "Net.py")


UPDATE = "def one_update(x):\n    loss = f(x)\n    loss.backward()\n    opt.step()\n"
HELPER = "def differentiate(x):\n    x.backward()\ndef advance(x):\n    differentiate(x)\n    opt.step()\n"
MAIN = "def main():\n    for x in loader:\n        f(x).backward()\n        opt.step()\n"
EPOCH = "def train_one_epoch(loader):\n    for x in loader:\n        one_update(x)\n"
MAKES = "def make(rate=1):\n    def step(x):\n        x.backward()\n        opt.step()\n    return step\n"
CLOSED = "def close_and_step(x):\n    def closure():\n        x.backward()\n        return x\n    opt.step(closure)\n"
OBJECT = """
class Engine:
    def train_step(self, x):
        x.backward()
        opt.step()
    def evaluate(self, x): return x
engine = Engine()
"""
MICRO = "def accumulate(xs):\n    for x in xs:\n        x.backward()\n    opt.step()\n"
BY_GRAD = "def by_grad(x):\n    torch.autograd.grad(x, p)\n    opt.step()\n"
ACCELERATED = "def accelerated(x):\n    accelerator.backward(x)\n    opt.step()\n"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (UPDATE + EPOCH + MAIN, "one_update"),
        (HELPER, "advance"),
        (MAIN, r"no training step, main\(\) runs a whole training: move the body of its loop"),
        (MAKES, r"makes a step: name it with its call, Net.py:make\(\)"),
        (CLOSED, "close_and_step"),
        (OBJECT, "engine.train_step"),
        (MICRO + EPOCH, "accumulate"),
        (BY_GRAD, "by_grad"),
        (ACCELERATED, "accelerated"),
        (UPDATE + MICRO, "Net.py:one_update or Net.py:accumulate"),
        (OBJECT + UPDATE, "Net.py:one_update or Net.py:engine.train_step"),
    ],
)
def test_files_in_many_layouts_have_one_step_or_list_them(tmp_path: Path, text: str, found: str) -> None:
    (file := tmp_path / "train_many.py").write_text(text)
    module = import_source("train_many", file)
    if found.replace(".", "").isidentifier():
        assert find_step(module, "train_many.py", "Net.py") == found
    else:
        with refused(LoadError, "missing-target", match=found):
            find_step(module, "train_many.py", "Net.py")
