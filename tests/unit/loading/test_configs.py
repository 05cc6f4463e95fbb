"""Constructor calls in TARGET whose arguments are names of the model's file, and calls of them, nested or not."""

from pathlib import Path

import pytest

from auditor.artefact.emit import emit
from auditor.errors import LoadError
from auditor.isolation.members import size_of
from auditor.loading import load
from auditor.loading.target import parse

FILE = """
from dataclasses import dataclass, field
import torch
from torch import nn

@dataclass
class Head:
    size: int = 2
    bias: bool = True

@dataclass
class Config:
    width: int = 4
    n_layer: int = 1
    head: Head = field(default_factory=Head)

    @classmethod
    def small(cls): return cls(width=3)

    def __post_init__(self):
        if self.width < 1: raise ValueError("no width")

TINY = Config(width=2)

class GPT(nn.Module):
    def __init__(self, config, act=nn.ReLU, dtype=None, parts=()):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(config.width, config.width, dtype=dtype) for _ in range(config.n_layer)))
        self.act, self.head = act(), nn.Linear(config.width, config.head.size, bias=config.head.bias)
        self.parts = nn.ModuleList(part(2, 2) for part in parts)
        self.width = config.width
    def forward(self, x): return self.head(self.act(self.layers(x[:, :self.width])))

class Table:
    def build(self, config):
        return GPT(**{key: value for key, value in config.items() if key != "type"})

TABLE = Table()

def get_inputs(): return torch.ones(2, 4)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "gpt_model.py").write_text(FILE)
    return tmp_path / "gpt_model.py"


@pytest.mark.parametrize(
    ("call", "layers", "width"),
    [
        ("GPT(Config(n_layer=2))", 2, 4),
        ("GPT(config=Config(3, n_layer=2))", 2, 3),
        ("GPT(Config(head=Head(size=3, bias=False)))", 1, 4),
        ("GPT(Config.small(), act=nn.GELU, dtype=torch.float32)", 1, 3),
        ("GPT(TINY, parts=[nn.Linear])", 1, 2),
        ("TABLE.build(dict(type='GPT', config=Config(width=3), parts=[]))", 1, 3),
    ],
)
def test_configs_of_the_file_build_the_model_and_build_it_again(
    call: str, layers: int, width: int, file: Path, tmp_path: Path
) -> None:
    subject = load(f"{file}:{call}")
    assert (len(subject.model.layers), subject.model.width) == (layers, width)
    text = emit(subject.origin, size_of(subject.model), {}, None, tmp_path)
    names: dict[str, object] = {"__name__": "patched_model", "__file__": str(tmp_path / "patched_model.py")}
    exec(compile(text, "patched_model.py", "exec"), names)
    again = names["make_original"](names["SOURCE"], names["__file__"], (), {})
    assert {n: x.shape for n, x in again.state_dict().items()} == {
        n: x.shape for n, x in subject.model.state_dict().items()
    }


def test_nothing_but_names_calls_and_literals_is_evaluated() -> None:
    for bad in ("Net([x for x in y])", "Net(a + b)", "Net(f()())", "Net(**kw)", "Net(a[0])", "Net(lambda: 1)"):
        with pytest.raises(LoadError, match="cannot read the arguments") as raised:
            parse(f"model.py:{bad}")
        assert raised.value.slug == "bad-target"


def test_a_name_that_the_file_lacks_is_suggested_and_a_config_that_raises_is_named(file: Path) -> None:
    with pytest.raises(LoadError, match=r"has no 'Confg', .*: did you mean Config\?") as raised:
        load(f"{file}:GPT(Confg(n_layer=2))")
    assert raised.value.slug == "no-symbol"
    with pytest.raises(LoadError, match=r"an argument in .* raised ValueError: no width \(gpt_model.py:") as raised:
        load(f"{file}:GPT(Config(width=0))")
    assert raised.value.slug == "model-raises"
