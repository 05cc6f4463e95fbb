"""Whatever the command line or a plan.json holds: an answer, or one clear line and exit code 2, and no stray file."""

import importlib
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.files.test_strangers import run
from tests.unit.report.factory import make_audit

MODEL = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
def get_inputs(): return torch.ones(2, 3)
"""
OPTIONS = (
    "--inputs --weights --formats --strategies --max-error --device --mode --out --fail-on --format --baseline --rules "
    "--seed --model-explorer --dry-run --quiet -q --plan --html --debugg --help- -- -x --out= --seed=x"
).split()
VALUES = (
    "model.py model.py:model model.py:absent absent.py . plan.json broken.json fp16 bf16,fp16 fp8 autocast cast 0.01 nan "
    "-1 1e999 cpu tpu cuda training text json sarif md warning never explain rules apply diff completion bash SFT001 "
    "float32[2,3] x:float32[2,3] x:float32[ int64[2]<0 a:b:c timm: hf: hf:. model.py:get_inputs w.pt w.safetensors"
).split()
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)
WORDS = st.lists(st.sampled_from(OPTIONS) | st.sampled_from(VALUES) | TEXT, max_size=7)


def fuzzed(examples: int) -> settings:
    """The same examples on every run, however slow one of them is."""
    quiet = list(HealthCheck)
    return settings(max_examples=examples, deadline=None, suppress_health_check=quiet, derandomize=True, database=None)


@pytest.fixture(scope="module")
def document() -> dict:
    """A plan that fits the model above."""
    plan = json.loads(json.dumps(make_audit(30).to_dict()))
    plan["parameters"] = 26
    for item in plan["plans"].values():
        item["scopes"] = {"": {"precision": item["format"]}, "0": {"precision": "fp32"}}
    return plan


@pytest.fixture(scope="module")
def folder(tmp_path_factory, document):
    path = tmp_path_factory.mktemp("fuzz")
    (path / "model.py").write_text(MODEL)
    (path / "plan.json").write_text(json.dumps(document))
    (path / "broken.json").write_text('{"format_version": 1, "plans": {"a": 3}}')
    for name in ("w.pt", "w.safetensors"):
        (path / name).write_bytes(b"no weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(importlib.import_module("auditor.flow"), "run", lambda *args, **options: make_audit(4))
        patch.setattr("auditor.verify.artefact.standby", nullcontext)  # nothing is run there
        yield path


def check(code: int, errors: str, words: object) -> None:
    assert code in (0, 1, 2), words
    assert "Traceback" not in errors, words
    assert "internal error" not in errors, (words, errors)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == (code == 2), (words, errors)
    assert all(len(line) > 15 for line in lines)


@fuzzed(60)
@given(words=WORDS)
@example(words=[])
@example(words=["model.py", "--inputs", "int64[2]<0"])
@example(words=["model.py", "--inputs", "float32[99999999,99999999,99999]"])
@example(words=["model.py", "--seed", "-1"])
@example(words=["model.py", "--seed", str(10**30)])
@example(words=["model.py", "--out", "x" * 300])
@example(words=["model.py", "--rules", "model.py"])
@example(words=["x" * 5000])
@example(words=["diff", "plan.json", "plan.json", "--html", "."])
def test_command_lines(folder, words):
    before = {path.name for path in folder.iterdir()}
    code, _, errors = run(*words)
    check(code, errors, words)
    if code == 2:
        assert {path.name for path in folder.iterdir()} == before, words


def test_the_unchanged_plan_is_accepted(folder):
    assert run("apply", "plan.json", "model.py", "--out", "fits")[0] == 0
    assert Path("fits/patched_model.py").exists()
