"""Command lines of any words, and plans, weights and inputs from strangers: a correct result or one clear line, no stray file,
and nothing in them is run."""

import argparse
import ast
import copy
import importlib
import io
import json
import pickle
import random
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import auditor
from auditor import cli
from auditor.document.codec import digest
from auditor.errors import AuditorError
from auditor.reporters import REPORTERS
from tests.support.documents import at, places
from tests.support.template import STANDS_IN
from tests.unit.report.factory import make_audit

MODEL = """
import torch
def get_model(): return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
def get_inputs(): return torch.ones(2, 3)
"""
CODE = "__import__('os').system('touch canary')"
EVIL = (
    CODE,
    "'); open('canary', 'w'); ('",
    '"""\nopen(\'canary\', \'w\')\n"""',
    f"0\n{CODE}",
    f"}}}} # \r{CODE}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "<script>alert(1)</script>",
    "\x1b]0;evil\x07\x1b[2J",
    "../../canary",
    "a\u202eb\u2028c",
    "\ud800",
    "x" * 20_000,
    "'",
    "__class__",
)
VALUES = (None, True, -1, 10**400, 1e308, float("nan"), float("inf"), 0.5, "", [], {}, [[]], "fp16", "fp32", *EVIL)
COMMANDS = (
    ("apply", "plan.json", "model.py", "--out", "applied"),
    ("apply", "plan.json", "model.py", "--plan", "cast_bf16", "--out", "applied"),
    ("diff", "plan.json", "plan.json", "--html", "diff.html"),
    ("diff", "plan.json", "plan.json", "--format", "json"),
    ("snippet", "plan.json"),
    ("snippet", "plan.json", "--for", "hf", "--plan", "autocast_bf16"),
)


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(make_audit(6).to_dict()))
    found["parameters"], found["structure"] = 26, ""
    for plan in found["plans"].values():
        plan["scopes"] = {"": {"precision": plan["format"]}, "0": {"precision": "fp32"}}
    return found


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    return json.loads(json.dumps(make_audit(6).to_measurements()))


RUN: list[str] = []
"""Programs that were started, except OURS."""
OURS = ("auditor.verify.worker", "tests.support.template", STANDS_IN)
"""The process in which `apply` builds the model from the file it emitted, and those from which tests fork it."""


def _hook(event: str, args: tuple[Any, ...]) -> None:
    started = event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn")
    canary = event in ("open", "exec", "compile") and ("canary" in str(args[0]) or "canary" in str(args[-1]))
    words = " ".join(map(str, args[1])) if event == "subprocess.Popen" else ""
    if (started and not any(name in words for name in OURS)) or canary:
        RUN.append(f"{event} {args}")


@pytest.fixture(scope="module")
def hook() -> None:
    """Hears of whatever is run from here on; such a hook cannot be taken off."""
    sys.addaudithook(_hook)


@pytest.fixture
def folder(here: Path, hook: None) -> Iterator[Path]:
    (here / "model.py").write_text(MODEL)
    RUN.clear()
    yield here
    assert RUN == []
    assert not (here / "canary").exists()


def tampered(document: dict[str, Any], draw: random.Random) -> dict[str, Any]:
    """A file with one to five things in it changed, taken out, renamed, doubled or nested."""
    found = copy.deepcopy(document)
    for _ in range(draw.choice((1, 1, 2, 5))):
        near = (to for to in places(found) if len(to) <= 40)
        *way, last = draw.choice([to for to in near if to[0] != "nodes" or draw.random() < 0.3])
        inside = at(found, way)
        how = draw.choice(("value", "value", "out", "name", "name", "double", "nest"))
        if how == "value" or (isinstance(inside, list) and how != "nest"):
            inside[last] = draw.choice(VALUES)
        elif how == "nest":
            for _ in range(draw.choice((3, 60))):
                inside[last] = [inside[last]]
        elif how == "double":
            inside[draw.choice(EVIL)] = copy.deepcopy(inside[last])
        else:
            value = inside.pop(last)
            if how == "name":
                inside[draw.choice(EVIL)] = value
    return found


def run(*words: str) -> tuple[int, str, str]:
    output, errors = io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            code = cli.main(words)
        except SystemExit as left:
            code = int(left.code or 0)
    return code, output.getvalue(), errors.getvalue()


def parsed(text: str) -> ast.Module:
    """The syntax tree of what was written. That the hook hears of a text which names the canary, in a comment or as the name
    of a module, does not count: parsing runs nothing."""
    before = len(RUN)
    tree = ast.parse(text)
    del RUN[before:]
    return tree


def check(words: Sequence[str], codes: tuple[int, ...] = (0, 2)) -> None:
    """One command on what lies in this folder ends well or in one line, and what it writes is what it seems."""
    before = {path.name for path in Path().iterdir()}
    code, output, errors = run(*words)
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert code in codes, (words, errors)
    assert len(lines) == (code == 2), (words, errors)
    assert all(len(line) > 15 for line in lines)
    assert "internal error" not in errors, (words, errors)
    assert "Traceback" not in errors, words
    assert "\x1b" not in output + errors
    assert len(errors) < 2000 + 2 * len(" ".join(words)), errors  # progress repeats them
    assert code < 2 or {path.name for path in Path().iterdir()} == before, words
    if code == 0 and words[0] == "snippet":
        parsed(output)
    if code == 0 and words[0] == "apply" and "applied" in words:
        text = Path("applied/patched_model.py").read_text()
        names: dict[str, Any] = {"__name__": "patched", "__file__": str(Path("applied/patched_model.py").resolve())}
        exec(compile(parsed(text), "patched_model.py", "exec"), names)
        names["build"]()
    if code == 0 and "diff.html" in words:
        assert "<script>alert" not in Path("diff.html").read_text()


@pytest.mark.parametrize("seeds", [range(8), pytest.param(range(8, 300), marks=pytest.mark.slow)], ids=["few", "many"])
def test_measurements(seeds: range, folder: Path, document: dict[str, Any], measured: dict[str, Any]) -> None:
    (folder / "plan.json").write_text(json.dumps(document))
    for seed in seeds:
        spoilt = {**tampered(measured, random.Random(seed)), "plan": digest(document)}
        (folder / "measurements.json").write_text(json.dumps(spoilt))
        for words in COMMANDS[2:4]:
            check(words)
        check_loaded()


def check_loaded() -> None:
    """The files in this folder come back as an audit that can be told of, or are refused in one line."""
    told: dict[str, str] = {}

    def tell() -> None:
        found = auditor.load(".")
        told.update((name, REPORTERS[name](found)) for name in REPORTERS)

    if said := refusal(tell):
        assert len(said) < 2000
        assert "\n" not in said
        return
    assert all(told.values())
    assert "<script>alert" not in told["html"]


def check_calls(document: dict[str, Any]) -> None:
    for call in (
        lambda: auditor.load_plan("plan.json"),
        lambda: auditor.apply(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU()), document),
        lambda: auditor.snippet(document, "hf"),
    ):
        said = refusal(call)
        assert len(said) < 2000
        assert "\n" not in said


def refusal(call: Callable[[], object]) -> str:
    """What a call is refused with; nothing where it is not."""
    try:
        call()
    except AuditorError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 300), marks=pytest.mark.slow)], ids=["few", "many"])
def test_plans(seeds: range, folder: Path, document: dict[str, Any]) -> None:
    for seed in seeds:
        spoilt = tampered(document, random.Random(seed))
        (folder / "plan.json").write_text(json.dumps(spoilt))
        for words in COMMANDS:
            check(words)
        check_calls(spoilt)
        check_loaded()


class Runs:
    """What runs code where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, ("touch canary",)


def weights() -> dict[str, bytes]:
    """Files that are no weights, by name."""
    saved, beside, array, bomb = (io.BytesIO() for _ in range(4))
    torch.save({"0.weight": Runs()}, saved)
    torch.save({"model": {"0.weight": torch.ones(4, 3)}, "arguments": argparse.Namespace(runs=Runs())}, beside)
    np.savez(array, x=np.array([Runs()], dtype=object))
    with zipfile.ZipFile(bomb, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.npy", bytes(20_000_000))
        archive.writestr("archive/data.pkl", bytes(20_000_000))
    header = json.dumps({"0.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    return {
        "code.pt": saved.getvalue(),
        "beside.pt": beside.getvalue(),
        "legacy.pth": pickle.dumps({"0.weight": Runs()}),
        "code.npz": array.getvalue(),
        "bomb.npz": bomb.getvalue(),
        "bomb.pt": bomb.getvalue(),
        "cut.pt": saved.getvalue()[:200],
        "empty.pt": b"",
        "empty.safetensors": b"",
        "header.safetensors": (2**62).to_bytes(8, "little") + b"{}",
        "huge.safetensors": len(header).to_bytes(8, "little") + header,
        "deep.safetensors": (10**5).to_bytes(8, "little") + b"[" * 10**5,
        "path.safetensors.index.json": json.dumps({"weight_map": {"0.weight": "../../../etc/passwd"}}).encode(),
        "type.safetensors.index.json": b'{"weight_map": [1]}',
        "deep.safetensors.index.json": b"[" * 10**5,
    }


@pytest.mark.parametrize("name", list(weights()))
@pytest.mark.parametrize("option", ["--weights", "--inputs"])
def test_weights_and_inputs(name: str, option: str, folder: Path) -> None:
    (folder / name).write_bytes(weights()[name])
    code, output, errors = run("model.py", option, name, "--dry-run", "-q")
    assert (code, output) == (2, "")
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert "internal error" not in line
    assert name.split(".")[0] in line or option in line


OPTIONS = (
    "--inputs --weights --formats --strategies --max-error --device --mode --out --fail-on --format --baseline --rules "
    "--seed --model-explorer --dry-run --quiet -q --plan --html --debugg --help- -- -x --out= --seed=x"
).split()
WORDS = (
    "model.py model.py:model model.py:absent absent.py . plan.json broken.json fp16 bf16,fp16 fp8 autocast cast 0.01 nan "
    "-1 1e999 cpu tpu cuda training text json sarif md warning never explain rules apply diff completion bash SFT001 "
    "float32[2,3] x:float32[2,3] x:float32[ int64[2]<0 a:b:c timm: hf: hf:. model.py:get_inputs w.pt w.safetensors"
).split()
TEXT = st.text(st.characters(exclude_characters="\0", exclude_categories=("Cs",)), max_size=12)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, document: dict[str, Any]) -> Iterator[None]:
    """What the words may name, and an audit that is always the same."""
    path = tmp_path_factory.mktemp("words")
    (path / "model.py").write_text(MODEL)
    (path / "plan.json").write_text(json.dumps(document))
    (path / "broken.json").write_text('{"format_version": 1, "plans": {"a": 3}}')
    for name in ("w.pt", "w.safetensors"):
        (path / name).write_bytes(b"no weights")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        patch.setattr(importlib.import_module("auditor.flow"), "run", lambda *args, **options: make_audit(4))
        patch.setattr("auditor.verify.artefact.standby", nullcontext)  # nothing is run there
        assert run(*COMMANDS[0])[0] == 0  # the unchanged plan is accepted
        yield


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
@given(words=st.lists(st.sampled_from(OPTIONS) | st.sampled_from(WORDS) | TEXT, max_size=7))
@example(words=[])
@example(words=["model.py", "--inputs", "int64[2]<0"])
@example(words=["model.py", "--inputs", "float32[99999999,99999999,99999]"])
@example(words=["model.py", "--seed", "-1"])
@example(words=["model.py", "--seed", str(10**30)])
@example(words=["model.py", "--out", "x" * 300])
@example(words=["model.py", "--rules", "model.py"])
@example(words=["x" * 5000])
@example(words=["diff", "plan.json", "plan.json", "--html", "."])
def test_command_lines(files: None, words: list[str]) -> None:
    check(words, (0, 1, 2))
