"""Checkpoints: which are read, how they are fitted, and whether random weights are noticed."""

import argparse
import io
import json
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from auditor.errors import LoadError
from auditor.loading import cautions, load
from auditor.loading.state import load_into, reject_non_finite
from auditor.loading.statedicts import load_state
from tests.support.refusing import refused
from tests.support.small_models import tied
from tests.support.subjects import seeded

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.head = nn.Linear(3, 4)
    def forward(self, x):
        return self.head(self.first(x))
"""


def state() -> dict[str, torch.Tensor]:
    return {
        "first.weight": torch.full((3, 3), 2.0),
        "first.bias": torch.zeros(3),
        "head.weight": torch.full((4, 3), 3.0),
        "head.bias": torch.zeros(4),
    }


def test_weights_that_are_given_are_the_models(write, tmp_path):
    save_file({f"module.{name}": value for name, value in state().items()}, tmp_path / "w.safetensors")
    subject = load(write(NET), weights=str(tmp_path / "w.safetensors"))
    assert subject.model.head.weight.unique().tolist() == [3.0]
    assert not subject.random_weights
    assert subject.origin.weights == str(tmp_path / "w.safetensors")


@pytest.mark.parametrize(
    ("make", "slug", "words"),
    [
        (lambda p: None, "missing-weights", "does not exist"),
        (
            lambda p: torch.save({"first.bias": torch.ones(3)}, p),
            "weights-mismatch",
            "missing weights (3: first.weight, head.",
        ),
        (
            lambda p: torch.save({**state(), "head.bias": torch.full((4,), torch.nan)}, p),
            "nan-weights",
            "head.bias contains 4",
        ),
    ],
)
def test_bad_checkpoints(write, tmp_path, make, slug, words):
    path = tmp_path / "w.pt"
    make(path)
    with refused(LoadError, slug, words):
        load(write(NET), weights=str(path))


SAVED = "import pathlib\nHERE = pathlib.Path(__file__).parent\n"


def test_weights_trained_while_the_model_is_made_are_not_random(write):
    train = """
def get_model():
    net = Net()
    net(torch.ones(2, 3)).sum().backward()
    torch.optim.SGD(net.parameters(), 0.1).step()
    return net
def get_inputs():
    return (torch.ones(2, 3),)
"""
    subject = load(write(NET + train))
    assert not subject.random_weights
    assert subject.weights_source == "trained by get_model"
    assert not any("RANDOM" in said for said in cautions(subject))
    assert load(write(NET + train.replace(".step()", ""))).random_weights


@pytest.mark.parametrize(
    ("tail", "random"),
    [
        ("def get_model(): return Net()\n", True),
        ("model = Net()\n", True),
        ("def get_model():\n    m = Net(); m.load_state_dict(torch.load(HERE / 'w.pt')); return m\n", False),
        ("model = Net()\nmodel.load_state_dict(torch.load(HERE / 'w.pt'))\n", False),
        ("from safetensors.torch import load_model\n"
         "def get_model():\n    m = Net(); load_model(m, str(HERE / 'w.safetensors')); return m\n", False),
        ("from safetensors.torch import load_file\n"
         "def get_model():\n    m = Net(); m.head.weight.data = load_file(HERE / 'w.safetensors')['head.weight']; return m\n",
         False),
        ("def get_model(): return Net()\n"
         "def get_inputs(): return torch.load(HERE / 'w.pt')['first.weight']\n", True),
        ("DATA = torch.load(HERE / 'w.pt')\ndef get_model(): return Net()\n", True),
        ("def audit_spec(): return {'model': Net(), 'inputs': torch.load(HERE / 'w.pt')['first.weight']}\n", True),
        ("def get_model(): return nn.ReLU()\ndef get_inputs(): return torch.ones(2)\n", False),
    ],
)  # fmt: skip
def test_random_weights_are_noticed(write, tmp_path, tail, random):
    torch.save(state(), tmp_path / "w.pt")
    save_file(state(), tmp_path / "w.safetensors")
    subject = load(write(SAVED + NET + tail))
    assert subject.random_weights is random
    assert any("RANDOM" in warning for warning in cautions(subject)) is random


def test_a_library_that_is_imported_while_the_model_is_made_is_watched_too(write, tmp_path):
    """As `from transformers import AutoModel` in a factory, which takes `safe_open` before anybody could replace it there."""
    save_file(state(), tmp_path / "w.safetensors")
    (tmp_path / "some_hub.py").write_text(
        "from safetensors import safe_open\n"
        "def fill(net, file):\n"
        "    with safe_open(file, 'pt') as stored:\n"
        "        net.head.weight.data = stored.get_tensor('head.weight')\n"
    )
    tail = "def get_model():\n    import some_hub\n    m = Net(); some_hub.fill(m, str(HERE / 'w.safetensors')); return m\n"
    assert not load(write(SAVED + NET + tail)).random_weights


LARGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "entries",
    [
        torch.empty(0),
        torch.tensor([LARGE, LARGE]),  # their sum is infinite
        torch.tensor([60_000.0, 60_000.0], dtype=torch.float16),
        torch.tensor([448.0, 448.0]).to(torch.float8_e4m3fn),
    ],
)
def test_finite_weights_pass(entries):
    model = nn.Module()
    model.weight = nn.Parameter(entries, requires_grad=False)
    reject_non_finite(model)


def test_buffers_may_be_infinite():
    model = nn.Module()
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf, torch.inf]))
    reject_non_finite(model)
    model.mask[0] = torch.nan
    with pytest.raises(LoadError, match="mask contains 1 NaN"):
        reject_non_finite(model)


# State dicts as they are found in checkpoints: read without running code, fitted onto a model, or one line why not.


def model_of(seed: int = 0) -> nn.Module:
    return seeded(lambda: tied(5, 4, norm=nn.BatchNorm1d(4)), seed=seed)


class Scaled(nn.Linear):
    """A layer with extra state that is no tensor."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return {"scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


class Mine:
    """A class of a project's own."""


def state_of() -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model_of(seed=7).state_dict().items()}


def safetensors(folder: Path) -> Path:
    save_file({k: v for k, v in state_of().items() if k != "head.weight"}, folder / "w.safetensors")
    return folder / "w.safetensors"


def sharded(folder: Path) -> Path:
    parts = {"a.safetensors": ["embed.weight"], "b.safetensors": [k for k in state_of() if k.startswith("norm")]}
    for file, names in parts.items():
        save_file({name: state_of()[name] for name in names}, folder / file)
    index = folder / "w.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {name: file for file, names in parts.items() for name in names}}))
    return index


def torch_file(content: Any, **options: Any) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        torch.save(content, folder / "w.pt", **options)
        return folder / "w.pt"

    return write


def prefixed(prefix: str) -> dict[str, Tensor]:
    return {f"{prefix}{name}": value for name, value in state_of().items()}


BESIDE = {
    "arguments": argparse.Namespace(lr=0.1, out=Path("runs"), more=types.SimpleNamespace(a=1)),
    "best": np.float64(0.5),
    "draws": np.random.get_state(),
    "bytes": io.BytesIO(b"1"),
}
CHECKPOINTS = {
    "safetensors, tied weights once": safetensors,
    "sharded": sharded,
    "plain": torch_file(state_of()),
    "in the format before zip": torch_file(state_of(), _use_new_zipfile_serialization=False),
    **{f"in {key!r}": torch_file({"epoch": 3, key: state_of()}) for key in ("model_state_dict", "net", "generator", "params")},
    "in two containers": torch_file({"model": {"state_dict": state_of()}}),
    "averaged beside not": torch_file({"params": {k: v * 0 for k, v in state_of().items()}, "params_ema": state_of()}),
    "from DDP and torch.compile": torch_file(prefixed("module._orig_mod.")),
    "from Lightning": torch_file({"state_dict": prefixed("model."), "lr": 0.1}),
    "a prefix, but not on one key": torch_file({**prefixed("module."), "n_averaged": torch.tensor(3)}),
    "a loss beside the model": torch_file({"state_dict": {"loss.weight": torch.ones(3), **prefixed("model.")}}),
    **{f"beside {key}": torch_file({"model": state_of(), key: value}) for key, value in BESIDE.items()},
}  # fmt: skip


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpoints_that_fit(kind: str, tmp_path: Path) -> None:
    model = model_of()
    load_into(model, CHECKPOINTS[kind](tmp_path))
    assert model.head.weight is model.embed.weight
    assert all(torch.equal(value, state_of()[name]) for name, value in model.state_dict().items())


def test_what_is_left_out_is_said(tmp_path: Path) -> None:
    notes = load_into(model_of(), CHECKPOINTS["a prefix, but not on one key"](tmp_path))
    assert notes == ["w.pt also contains n_averaged, which the model lacks: ignored"]
    assert load_into(model_of(), CHECKPOINTS["from DDP and torch.compile"](tmp_path)) == []


def test_extra_state_is_loaded_and_need_not_be_there(tmp_path: Path) -> None:
    saved = Scaled(2, 2)
    saved.scale = 3
    model = nn.Sequential(Scaled(2, 2))
    path = torch_file({f"module.0.{key}": value for key, value in saved.state_dict().items()})(tmp_path)
    assert load_into(model, path) == []
    assert model[0].scale == 3
    assert torch.equal(model[0].weight, saved.weight)
    plain = torch_file(nn.Sequential(nn.Linear(2, 2)).state_dict())(tmp_path)
    assert load_into(model, plain) == ["w.pt lacks 0._extra_state: they keep their initial values"]
    load_into(nn.Sequential(nn.Linear(2, 2)), path)
    other = torch_file({f"0.{key}": {} if key == "_extra_state" else x for key, x in saved.state_dict().items()})
    with pytest.raises(LoadError, match="does not fit the model: KeyError: 'scale'"):
        load_into(model, other(tmp_path))


def scripted(folder: Path) -> Path:
    torch.jit.script(nn.Linear(2, 2)).save(str(folder / "w.pt"))
    return folder / "w.pt"


UNREAD = {
    "a class of the user's": (
        torch_file({"model": state_of(), "config": Mine()}),
        r"since it contains [\w.]*Mine: save",
    ),
    "that, in the format before zip": (
        torch_file(Mine(), _use_new_zipfile_serialization=False),
        r"contains [\w.]*Mine: ",
    ),
    "a whole model": (torch_file(nn.Linear(2, 2)), r"contains torch\.nn\.modules\.linear\.Linear: save plain tensors"),
    "TorchScript": (scripted, r"w\.pt is a TorchScript archive, .*torch\.jit\.load"),
    "no tensors": (torch_file({"model": {"epoch": 1}, "_extra_state": 3}), r"w\.pt contains no state dict"),
}


@pytest.mark.parametrize("kind", UNREAD)
def test_what_cannot_be_read_is_one_line_that_names_it(kind: str, tmp_path: Path) -> None:
    make, words = UNREAD[kind]
    with refused(LoadError, "bad-weights", match=words):
        load_into(model_of(), make(tmp_path))


WRONG = {
    "missing": ({k: v for k, v in state_of().items() if k != "norm.bias"}, r"missing weights \(1: norm\.bias\)"),
    "unexpected": ({**state_of(), "norm.extra": torch.ones(1)}, r"unexpected weights \(1: norm\.extra\)"),
    "another shape": ({**state_of(), "norm.bias": torch.ones(5)}, r"size mismatch for norm\.bias"),
    "another model's": ({"model.up.weight": torch.ones(5)}, r"unexpected weights \(1: model\.up\.weight\)"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_another_checkpoint_is_refused_in_one_line(kind: str) -> None:
    content, words = WRONG[kind]
    with pytest.raises(ValueError, match=rf"w\.pt does not fit the model: .*{words}") as caught:
        load_state(model_of(), content, "w.pt")
    assert "\n" not in str(caught.value)
