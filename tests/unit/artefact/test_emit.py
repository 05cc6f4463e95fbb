"""patched_model.py in a process that has never heard of the auditor; hostile names stay names."""

import copy
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.artefact.emit import emit
from auditor.numerics.metrics import output_error
from auditor.records import Origin, Plan, ScopeChoice, Verification
from auditor.verify import Answers, Verifier, run_patched

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))

def get_model(width=8):
    torch.manual_seed(0)
    return Net(width)

class Holder:
    ready = get_model()

def audit_spec():
    return {"model": get_model()}
"""
PARAMETERS = (4 * 8 + 8) + (8 + 8) + (8 * 2 + 2)
SCOPES = {"": ScopeChoice("bf16"), "norm": ScopeChoice("fp32"), "last": ScopeChoice("fp32", "keep")}
BLOCKER = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "auditor":
            raise ImportError(f"{name} is not for a patched model")

sys.meta_path.insert(0, Refuse())
"""
TRAIN = """
import json, pickle, sys
import torch
sys.path.insert(0, sys.argv[1])
import patched_model

model = patched_model.build().train()
before = [p.detach().clone() for p in model.parameters()]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
with torch.no_grad():
    result = model(torch.ones(2, 4)).dtype
model(torch.randn(16, 4)).square().sum().backward()
optimizer.step()
print(json.dumps({
    "class": type(model).__name__,
    "plans": sorted(patched_model.PLANS),
    "moved": [not torch.equal(p, q) for p, q in zip(model.parameters(), before)],
    "dtypes": sorted({str(p.dtype) for p in model.parameters()}),
    "result": str(result),
    "cast": str(patched_model.build(plan="cast_bf16").first.weight.dtype),
    "wide": patched_model.original(5).first.out_features,
    "pickled": type(pickle.loads(pickle.dumps(model))).__name__,
    "modules": sorted(m for m in sys.modules if m.partition(".")[0] == "auditor"),
}))
"""


def plan(strategy: str, **changes: Any) -> Plan:
    scopes = changes.pop("scopes", SCOPES)
    return Plan(f"{strategy}_bf16", strategy, "bf16", scopes, 0.001, 0.5, 1.5, Verification(0.002, True), **changes)


PLANS = {"autocast_bf16": plan("autocast"), "cast_bf16": plan("cast")}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """The user's model file, in a folder of its own."""
    path = tmp_path / "user" / "net.py"
    path.parent.mkdir()
    path.write_text(MODEL)
    return path


def origin(path: Path | None, symbol: str = "get_model", kind: str = "factory") -> Origin:
    return Origin(str(path) if path else None, None, symbol, kind)


def written(directory: Path, text: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "patched_model.py"
    file.write_text(text, encoding="utf-8")
    return file


def run_alone(script: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A process in another directory, without PYTHONPATH, in which importing the auditor fails."""
    cwd.mkdir(parents=True, exist_ok=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    command = [sys.executable, "-c", BLOCKER + script, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)


def test_it_builds_and_trains_where_the_auditor_cannot_be_imported(source: Path, tmp_path: Path) -> None:
    file = written(tmp_path / "out", emit(origin(source), PARAMETERS, PLANS, "autocast_bf16", tmp_path / "out"))
    done = run_alone(TRAIN, file.parent, cwd=tmp_path / "elsewhere")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found == {
        "class": "Net",
        "plans": ["autocast_bf16", "cast_bf16"],
        "moved": [True] * 6,
        "dtypes": ["torch.float32"],
        "result": "torch.float32",
        "cast": "torch.bfloat16",
        "wide": 5,
        "pickled": "Net",
        "modules": [],
    }


BUILD_TWICE = """
import os, runpy
for folder in sys.argv[2:]:
    os.chdir(folder)
    print(type(runpy.run_path(f"{sys.argv[1]}/patched_model.py")["build"]()).__name__)
"""


def test_it_holds_no_absolute_path_and_finds_its_source_when_it_moves(source: Path, tmp_path: Path) -> None:
    out = source.parent / "audits" / "net"
    text = emit(origin(source), PARAMETERS, PLANS, "autocast_bf16", out)
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    written(out, text)
    away = tmp_path / "away" / "net"
    away.parent.mkdir()
    out.rename(away)
    done = run_alone(BUILD_TWICE, away, source.parent, tmp_path, cwd=tmp_path)
    assert done.stdout.strip() == "Net", done.stderr
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"FileNotFoundError: ../../{source.name} has moved relative to {away}")
    assert last.endswith("audit the model again, or edit SOURCE there")


KINDS = (("get_model", "factory"), ("Net", "class"), ("Holder.ready", "instance"), ("audit_spec", "spec"))


@pytest.mark.parametrize(("symbol", "kind"), KINDS)
def test_every_kind_of_origin(symbol: str, kind: str, source: Path, tmp_path: Path) -> None:
    file = written(
        tmp_path / "out", emit(origin(source, symbol, kind), PARAMETERS, PLANS, "cast_bf16", tmp_path / "out")
    )
    assert runpy.run_path(str(file))["build"]().first.weight.dtype is torch.bfloat16


@pytest.mark.slow
def test_the_fresh_process_computes_what_this_one_does_and_says_why_a_plan_fails(source: Path, tmp_path: Path) -> None:
    broken = plan("autocast", scopes={"": ScopeChoice("fp16"), "gone": ScopeChoice("fp32")})
    several = {**PLANS, "autocast_fp16": broken}
    file = written(tmp_path / "out", emit(origin(source), PARAMETERS, several, None, tmp_path / "out"))
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(1))
    with Verifier([((x,), {})], tmp_path) as verifier:
        answers = verifier.ask(file, list(several))
    model, reference = by_its_source(x)
    assert isinstance(answers["autocast_fp16"], str)
    assert "'gone'" in answers["autocast_fp16"]
    for name in PLANS:
        found = answers[name]
        assert isinstance(found, Answers)
        (there,) = found.outputs
        (here,) = run_patched(apply_plan(copy.deepcopy(model), plan_table(PLANS[name])), [((x,), {})], "cpu")
        assert torch.equal(there[0], here[0])
        assert 0 < output_error(reference, there) < 0.05


def by_its_source(x: torch.Tensor) -> tuple[torch.nn.Module, list[torch.Tensor]]:
    """The model, made in this process, and what it answers in FP32."""
    namespace: dict[str, Any] = {}
    exec(MODEL, namespace)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        model = namespace["get_model"]()
        return model, [model(x)]
