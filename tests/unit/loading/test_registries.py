"""Models that a configuration describes, by Hydra, OmegaConf or a registry: docs/command-line.md's three lines for each."""

import re
from pathlib import Path

import pytest
import torch

from auditor.cli import main
from auditor.loading import load

NET = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8, act="ReLU"):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, width), getattr(nn, act)(), nn.Linear(width, 4)

    def forward(self, x):
        return self.down(self.act(self.up(x)))
"""
INPUTS = "\n\ndef get_inputs():\n    return torch.ones(2, 8)\n"
REGISTERED = NET.replace("class Net", "from mmengine.registry import MODELS\n\n@MODELS.register_module()\nclass Net")

FILES = {
    "hydra": {
        "hydra_net.py": NET,
        "conf/config.yaml": "defaults:\n  - model: wide\n  - _self_\nsize: 16\n",
        "conf/model/wide.yaml": "_target_: hydra_net.Net\nwidth: ${size}\nact: GELU\n",
    },
    "omegaconf": {"omegaconf_net.py": NET, "config.yaml": "model: {width: '${size}', act: GELU}\nsize: 16\n"},
    "mmengine": {"mmengine_net.py": REGISTERED, "configs/net.py": "model = dict(type='Net', width=16, act='GELU')\n"},
}
HEADS = {
    "hydra": "import hydra\n",
    "omegaconf": "from omegaconf import OmegaConf\nfrom omegaconf_net import Net\n",
    "mmengine": "from mmengine import Config\nfrom mmengine.registry import MODELS\nimport mmengine_net\n",
}
MARKS = {"hydra": "hydra.compose", "omegaconf": "OmegaConf.load", "mmengine": "MODELS.build"}


def of_the_docs(root: Path, library: str) -> str:
    """The function of docs/command-line.md that uses the library."""
    page = (root / "docs" / "command-line.md").read_text(encoding="utf-8")
    functions = re.findall(r"def build\(\):\n(?: +.+\n)+", page)
    (function,) = [one for one in functions if MARKS[library] in one]
    assert function.count("\n") <= 4
    return function


@pytest.fixture(params=FILES)
def target(request: pytest.FixtureRequest, root: Path, tmp_path: Path) -> str:
    library = request.param
    pytest.importorskip(library)
    for name, text in FILES[library].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    head = HEADS[library] + "from pathlib import Path\nimport torch\n\n"
    (tmp_path / "audit_me.py").write_text(head + of_the_docs(root, library) + INPUTS)
    return f"{tmp_path / 'audit_me.py'}:build"


def test_the_model_is_the_configured_one(target: str, here: Path) -> None:
    model = load(target).model
    assert model.up.out_features == 16
    assert isinstance(model.act, torch.nn.GELU)


def test_its_plan_is_verified_in_a_fresh_process(target: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (target, "--formats", "bf16", "--strategies", "cast", "--quick", "--out", "out")
    assert main(words) == 0
    assert "verified" in capsys.readouterr().out
