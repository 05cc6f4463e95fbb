"""What a model's code expects around it, such as its working directory, its arguments, files and inputs of its own."""

import argparse
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from tests.projects.project import (
    BUILD,
    HEAD,
    HERE,
    INPUTS,
    MODEL,
    NET,
    PARTS,
    RANDOM,
    Case,
    audit_project,
    check_error,
    check_verdict,
    first,
    package,
    run_again,
    state,
    using,
    write_project,
)

CONFIG = {"net.json": '{"width": 32}', "configs/net.yaml": "width: 32\n"}
NOISY = """
import signal, threading, warnings
from tqdm import tqdm
warnings.simplefilter("error")
signal.signal(signal.SIGTERM, lambda *_: None)
threading.Thread(target=lambda: None).start()
for number in tqdm(range(20_000)):
    print(number)
"""
BATCH = """
from typing import NamedTuple

from torch import Tensor

class Batch(NamedTuple):
    x: Tensor
"""
OF_BATCH = NET.replace("self.up(x)", "self.up(x.x)")
OF_FUNCTION = NET.replace("self.act(self.up(x))", "f(self.up(x))").replace("forward(self, x)", "forward(self, x, f)")
BATCHES = "def get_inputs():\n    torch.manual_seed(1)\n    return (Batch(torch.randn(8, 16)),)\n"
CLOSED = "def get_inputs():\n    torch.manual_seed(1)\n    return torch.randn(8, 16), lambda x: nn.functional.gelu(x)\n"

SCALED = RANDOM.replace("nn.Linear(16", "Scaled(16").replace(
    "class Net",
    """class Scaled(nn.Linear):
    gain = 0.0

    def get_extra_state(self):
        return {"gain": self.gain}

    def set_extra_state(self, state):
        self.gain = state["gain"]

    def forward(self, x):
        return self.gain * super().forward(x)

class Net""",
)


def save_checkpoint(root: Path) -> None:
    """As a training loop leaves it."""
    named = {f"module.{name}": value for name, value in {**state(), "up._extra_state": {"gain": 1.0}}.items()}
    beside = {"args": argparse.Namespace(lr=0.1, out=Path("runs")), "disc": {"a": torch.zeros(2)}}
    torch.save({"generator": {"n_averaged": torch.tensor(3), **named}, **beside}, root / "net.pt")


def save_inputs(root: Path) -> None:
    (root / "data").mkdir()
    torch.save(torch.randn(8, 16, generator=torch.Generator().manual_seed(1)), root / "data" / "x.pt")


def save_weights(root: Path) -> None:
    (root / "weights").mkdir()
    torch.save(state(), root / "weights" / "net.pt")


READING = f"""
import argparse, json, os, sys, time, yaml
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=32)
ARGS = parser.parse_args()
{PARTS.replace("32", "ARGS.width")}
def build():
    assert yaml.safe_load(open("configs/net.yaml")) == {{"width": 32}}
    assert json.load(open(os.path.join(os.path.dirname(sys.argv[0]), "net.json"))) == {{"width": 32}}
    assert json.loads(Path(__file__).with_name("net.json").read_text()) == {{"width": 32}}
    os.makedirs("runs/a", exist_ok=True)
    torch.manual_seed(0)
    net = Net()
    net.born = time.time_ns()
    return net

def get_inputs():
    return torch.load("data/x.pt")
"""
MOVING = """
import json, os
os.chdir(os.path.dirname(os.path.abspath(__file__)))
"""
FOUND = MOVING + first("assert json.load(open('net.json')) == {'width': 32}; os.chdir('/')")

CASES = {
    "files, arguments and the clock": Case({**CONFIG, "model.py": READING}, prepare=save_inputs),
    "os.chdir at import and in the factory": Case(
        {**CONFIG, "model.py": FOUND}, "../project/model.py:build", "../elsewhere"
    ),
    "inputs of the package's classes": Case(
        package(data=BATCH, parts=HEAD + OF_BATCH, model=HEAD + "from .data import Batch\nfrom .parts import Net\n" + BUILD + BATCHES),
        "pkg/model.py:build",
        call="sys.modules['pkg.data'].Batch(x)"
    ),
    "a folder that is a symlink, with spaces and other alphabets": Case(
        {"releases/v 2/parts.py": PARTS, "releases/v 2/modèle 模型.py": using("parts")},
        "mon projet é/modèle 模型.py:build",
        prepare=lambda root: (root / "mon projet é").symlink_to("releases/v 2")
    ),
    "a file that is a symlink": Case(
        {"lib/parts.py": PARTS, "lib/model.py": using("parts"), "bin/README": ""},
        "bin/model.py:build",
        prepare=lambda root: (root / "bin" / "model.py").symlink_to("../lib/model.py")
    ),
    "relative weights, an environment of nothing": Case(
        {"model.py": RANDOM},
        "../model.py:build",
        "tools",
        options=("--weights", "../weights/net.pt"),
        env=dict.fromkeys(os.environ),
        prepare=save_weights
    ),
    "a checkpoint of a training loop": Case(
        {"net/model.py": SCALED}, "net/model.py:build", options=("--weights", "net.pt"), prepare=save_checkpoint
    ),
    "prints, threads, handlers and warnings as errors": Case(
        {"model.py": NOISY + MODEL}, program=(sys.executable, "-O", "-W", "error", "-m", "auditor")
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_verdict_and_emitted_file(name: str, tmp_path: Path) -> None:
    audited = audit_project(tmp_path / "project", CASES[name])
    check_verdict(audited)
    check_error(audited)


@pytest.mark.slow
def test_a_factory_that_draws_without_a_seed_has_a_verdict(tmp_path: Path) -> None:
    check_verdict(audit_project(tmp_path / "project", Case({"model.py": RANDOM})))


@pytest.mark.slow
def test_inputs_that_do_not_pickle(tmp_path: Path) -> None:
    """The artefact is imported and built in a fresh process, and what was not run there is said."""
    case = Case({"model.py": HEAD + OF_FUNCTION + BUILD + CLOSED}, call="x, gelu", program=HERE)
    audited = audit_project(tmp_path / "project", case)
    assert audited.done.returncode == 0, audited.said
    assert audited.plan["recommended"] == "cast_bf16"
    (said,) = [line for line in audited.plan["warnings"] if "fresh process" in line]
    assert "inputs" in said
    assert "fresh process" in (audited.folder / "report.html").read_text()
    check_error(audited)


def test_nothing_is_written_into_a_project(tmp_path: Path) -> None:
    """Its folders are read-only, which root does not heed."""

    def lock(root: Path) -> None:
        (root / "pkg").chmod(0o555)
        root.chmod(0o555)

    files = package()
    case = Case(files, "project/pkg/model.py:build", "..", options=("--out", "out"), prepare=lock, program=HERE)
    audited = audit_project(tmp_path / "project", case)
    check_verdict(audited)
    written = {path.relative_to(audited.root).as_posix() for path in audited.root.rglob("*") if not path.is_dir()}
    assert written == set(files)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The model in a file of its own, audited; its weights come from a file."""
    case = Case({"model.py": RANDOM}, options=("--weights", "weights/net.pt"), prepare=save_weights, program=HERE)
    audited = audit_project(tmp_path_factory.mktemp("plain") / "project", case)
    check_verdict(audited)
    return audited


def test_a_project_that_has_moved(plain, tmp_path: Path) -> None:
    """To another folder, as to another machine."""
    moved = tmp_path / "another machine" / "home"
    shutil.copytree(plain.root, moved)
    check_error(plain, moved / "audits" / "model-build", tmp_path)


@pytest.mark.slow
def test_a_file_of_that_name_in_another_project(plain, tmp_path: Path) -> None:
    """It is refused, or taken with a warning; either names it."""
    other = tmp_path / "other"
    write_project(other, Case({"model.py": MODEL.replace("GELU", "SiLU")}))
    save_weights(other)
    shutil.copytree(plain.folder, other / "audits" / "model-build")
    done = run_again(plain, other / "audits" / "model-build", other)
    named = [line for line in done.stderr.splitlines() if str(other / "model.py") in line]
    assert any("audit" in line for line in named), done.stderr


@pytest.mark.slow
def test_paths_in_pyproject_count_from_its_folder(plain, tmp_path: Path) -> None:
    root = tmp_path / "project"
    table = '[tool.auditor]\nweights = "weights/net.pt"\ninputs = "data.py:batch"\nout = "out"\nbaseline = "known"\n'
    data = HEAD + INPUTS.replace("get_inputs", "batch")
    files = {"pyproject.toml": table, "data.py": data, "net/model.py": RANDOM.replace("get_inputs", "unused")}
    shutil.copytree(plain.folder, root / "known")
    audited = audit_project(root, Case(files, cwd="net", prepare=save_weights))
    assert audited.done.returncode == 0, audited.said
    assert "Baseline" in audited.done.stdout
    assert [path.name for path in audited.cwd.iterdir()] == ["model.py"]
    check_error(audited, root / "out", root / "net")


@pytest.mark.parametrize(
    ("context", "words"), [(torch.autocast("cpu", torch.bfloat16), "autocast"), (torch.device("meta"), "meta")]
)
def test_an_audit_inside_a_mode_of_torch_says_so(context, words: str) -> None:
    with torch.device("cpu"):
        model, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4)), torch.randn(8, 16)
    with context, pytest.raises(AuditorError) as caught:
        auditor.audit(model, x, formats="bf16", strategies="cast", quick=True)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
