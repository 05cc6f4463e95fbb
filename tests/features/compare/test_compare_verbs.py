"""The verbs `record` and `compare`: files, messages and exit codes."""

import json
import re
import shutil
from pathlib import Path

import pytest

from auditor import cli

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "compare"

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(16, 16), nn.LayerNorm(16, eps=EPS)

    def forward(self, x):
        return torch.tanh(self.norm(self.layer(x)))


def get_model():
    torch.manual_seed(0)
    return Net().eval()


def get_inputs():
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(SEED))
"""


@pytest.fixture
def files(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name, eps, seed in (("a", "1e-5", "0"), ("b", "1e-6", "0"), ("c", "1e-5", "1")):
        text = MODEL.replace("EPS", eps).replace("SEED", seed)
        (tmp_path / f"{name}.py").write_text(text, encoding="utf-8")
    return tmp_path


def record(name: str, *words: str) -> None:
    assert cli.main(["record", f"{name}.py", "--out", f"{name}.json", *words]) == 0


def test_two_recordings(files, capsys) -> None:
    for name in "abc":
        record(name)
    capsys.readouterr()
    assert cli.main(["compare", "a.json", "a.json"]) == 0
    assert "Equal: both runs compute the same function." in capsys.readouterr().out
    assert cli.main(["compare", "a.json", "b.json", "--html", "page/compare.html"]) == 1
    said = capsys.readouterr().out
    assert "layer_norm" in said and "eps = 1e-06" in said and "page/compare.html" in said
    assert "eps = 1e-06" in (files / "page" / "compare.html").read_text(encoding="utf-8")
    assert cli.main(["compare", "a.json", "b.json", "--fail-on", "never", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "differ"
    assert cli.main(["compare", "a.json", "c.json"]) == 2
    assert "explain other-inputs" in capsys.readouterr().err


def test_more_rounding_is_a_warning(files, capsys) -> None:
    record("a")
    assert cli.main(["record", "a.py", "--out", "low.json", "--autocast", "bf16"]) == 0
    capsys.readouterr()
    assert cli.main(["compare", "a.json", "low.json"]) == 0
    assert "Same function; B rounds more at linear" in capsys.readouterr().out
    assert cli.main(["compare", "a.json", "low.json", "--fail-on", "warning"]) == 1


def test_an_audit_is_no_recording(files, capsys) -> None:
    (files / "audit").mkdir()
    (files / "audit" / "plan.json").write_text("{}", encoding="utf-8")
    assert cli.main(["compare", "audit", "a.py"]) == 2
    assert "`diff` compares audits" in capsys.readouterr().err
    assert cli.main(["compare", "absent.json", "a.py"]) == 2
    assert "cannot read absent.json" in capsys.readouterr().err


@pytest.mark.slow
def test_targets_with_modules_of_the_same_name(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("one", "two"):
        shutil.copytree(EXAMPLES, tmp_path / name)
    wrong = (tmp_path / "two" / "original.py").read_text(encoding="utf-8").replace("nn.GELU()", "nn.SiLU()")
    (tmp_path / "two" / "original.py").write_text(wrong, encoding="utf-8")
    assert cli.main(["compare", "one/original.py", "two/original.py"]) == 1
    said = capfd.readouterr().out
    assert re.search(r"first at gelu \(original.py:(\d+)\) in A, silu \(original.py:\1\) in\s+B", said)


def test_the_example_finds_its_constant(monkeypatch, capfd) -> None:
    monkeypatch.chdir(EXAMPLES.parents[1])
    assert cli.main(["compare", "examples/compare/original.py", "examples/compare/port.py"]) == 1
    said = capfd.readouterr().out
    assert "differs: eps = 1e-06" in said and "differs: other = 1e-05" in said
    assert "normed = centered * torch.rsqrt(variance + 1e-5)" in said


@pytest.mark.slow
def test_a_target_that_fails(files, capfd) -> None:
    assert cli.main(["compare", "a.py", "absent.py"]) == 2
    assert "absent.py does not exist" in capfd.readouterr().err
