"""Checkpoints: which are read, how they are fitted, and whether random weights are noticed."""

import sys

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from auditor.errors import LoadError
from auditor.loading import cautions, load
from auditor.loading.state import reject_non_finite
from tests.support.refusing import refused

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
        (lambda p: torch.save({"first.bias": torch.ones(3)}, p), "weights-mismatch", "3 missing (first.weight, head."),
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


def test_a_library_that_is_imported_while_the_model_is_made_is_watched_too(write, tmp_path, monkeypatch):
    """As `from transformers import AutoModel` in a factory, which takes `safe_open` before anybody could replace it there."""
    for name in [name for name in sys.modules if name in ("safetensors", "safetensors.torch")]:
        monkeypatch.delitem(sys.modules, name)
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
