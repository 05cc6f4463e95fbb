"""patched_model.py in a process that has never heard of the auditor; hostile names stay names."""

import ast
import json
import math
import os
import re
import runpy
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from auditor.artefact.emit import emit
from auditor.records import Origin, Plan, Reason, ScopeChoice, Verification

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


def test_it_holds_no_absolute_path_and_finds_its_source_when_it_moves(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = source.parent / "audits" / "net"
    text = emit(origin(source), PARAMETERS, PLANS, "autocast_bf16", out)
    assert str(tmp_path) not in text
    assert str(Path.home()) not in text
    written(out, text)
    away = tmp_path / "away" / "net"
    away.parent.mkdir()
    out.rename(away)
    build = runpy.run_path(str(away / "patched_model.py"))["build"]
    monkeypatch.chdir(source.parent)
    assert type(build()).__name__ == "Net"
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=re.escape(f"cannot find ../../{source.name}, neither relative to {away}")
    ) as error:
        build()
    assert str(error.value).endswith(
        f"audit the model again, or correct the path in SOURCE in {away / 'patched_model.py'}"
    )


KINDS = (("get_model", "factory"), ("Net", "class"), ("Holder.ready", "instance"), ("audit_spec", "spec"))


@pytest.mark.parametrize(("symbol", "kind"), KINDS)
def test_every_kind_of_origin(symbol: str, kind: str, source: Path, tmp_path: Path) -> None:
    file = written(
        tmp_path / "out", emit(origin(source, symbol, kind), PARAMETERS, PLANS, "cast_bf16", tmp_path / "out")
    )
    assert runpy.run_path(str(file))["build"]().first.weight.dtype is torch.bfloat16


# The text of patched_model.py: names stay names, whatever they hold, and what it says is checked.


def namespace_of(text: str, file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"__file__": str(file), "__name__": "patched_model"}
    exec(compile(text, str(file), "exec"), found)
    return found


HOSTILE = [
    '"; import os; os.system("touch pwned") #',
    "'''\nraise SystemExit(7)\n'''",
    '"""\nopen("pwned", "w")\n"""',
    "\\",
    "a\\'; open('pwned','w') #",
    "{__import__('os').system('touch pwned')}",
    "\u2028raise SystemExit(7)",
    "\r\nraise SystemExit(7)\r\n",
    "%s%(x)s${y}{{ z }}",
    "\x00\x1b[31m",
    "'),}}\nopen('pwned', 'w')\nPLANS = ({('",
]

DATA = ("SOURCE", "PARAMETERS", "STRUCTURE", "RECOMMENDED", "PLANS")
NAMES = st.one_of(
    st.sampled_from(HOSTILE), st.text(max_size=40), st.text("\"'\\\n\r\u2028{}()#;%[], \t\0", max_size=40)
)


def data_and_code(text: str) -> tuple[dict[str, Any], str]:
    """The tables, read as literals and never run, and a dump of everything else that the file says."""
    tree, data = ast.parse(text), {}
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id in DATA:
                data[target.id] = ast.literal_eval(node.value)
                node.value = ast.Constant(None)
    return data, ast.dump(tree)


def text_naming(name: str, directory: Path) -> str:
    scopes = {"": ScopeChoice("bf16"), name: ScopeChoice("fp32", "keep")}
    why = (Reason("budget", name, (name,), rules=(name,), saves=0.125),)
    hostile = Plan(name, "autocast", "bf16", scopes, 0.0, 0.0, 1.0, reasons=why)
    place = "/nowhere/" + "".join(c for c in name if c != "\0" and not "\ud800" <= c <= "\udfff")
    source = Origin(f"{place}/model.py", None, name, name, (name,), {name: name}, weights=place)
    return emit(source, 3, {name: hostile}, name, directory)


@cache
def usual_code() -> str:
    return data_and_code(text_naming("blocks.0.norm", Path("/nowhere/out")))[1]


@settings(max_examples=25, deadline=None)
@given(name=NAMES)
def test_whatever_a_name_holds_only_the_tables_differ(name: str) -> None:
    """No node of the syntax tree comes from a name, and every name comes back as it went in."""
    data, code = data_and_code(text_naming(name, Path("/nowhere/out")))
    assert code == usual_code()
    assert list(data) == list(DATA)
    assert data["RECOMMENDED"] == name
    assert list(data["PLANS"]) == [name]
    island = {"precision": "fp32", "because": [name, name], "cost": "12.5% of the predicted time", "output": "keep"}
    assert data["PLANS"][name]["scopes"][name] == island
    assert data["SOURCE"]["symbol"] == data["SOURCE"]["kind"] == name
    assert data["SOURCE"]["init_args"] == (name,)
    assert data["SOURCE"]["init_kwargs"] == {name: name}


def test_an_island_is_shown_with_rule_evidence_and_cost(tmp_path: Path) -> None:
    words = "layer_norm_3 is unsafe: 12 values overflow FP16: alone it moves the outputs by 0.31"
    scopes = {"": ScopeChoice("fp16"), "blocks.0.norm": ScopeChoice("fp32")}
    why = (Reason("unsafe", words, ("blocks.0.norm",), rules=("NRM001",), saves=0.0031),)
    plan = Plan("cast_fp16", "cast", "fp16", scopes, 0.001, 0.5, 1.5, reasons=why)
    text = emit(None, 1, {"cast_fp16": plan}, None, tmp_path)
    assert (
        """            'blocks.0.norm': {
                'precision': 'fp32',
                'because': [
                    'NRM001',
                    'layer_norm_3 is unsafe: 12 values overflow FP16: alone it moves the outputs by 0.31',
                ],
                'cost': '0.3% of the predicted time',
            },
"""
        in text
    )
    assert "            '': {'precision': 'fp16'},\n" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_file_imports_torch_and_the_standard_library_alone(tmp_path: Path) -> None:
    text = emit(None, 1, PLANS, None, tmp_path)

    def imported(nodes: Iterable[ast.AST]) -> set[str]:
        return {
            (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name).partition(".")[0]
            for node in nodes
            if isinstance(node, (ast.Import, ast.ImportFrom))
        }

    tree = ast.parse(text)
    assert imported(tree.body) - {"torch"} <= sys.stdlib_module_names
    more = imported(ast.walk(tree)) - {"torch"} - sys.stdlib_module_names
    assert more == {"safetensors"}  # where weights in that format are read
    assert "auditor" not in text.replace("auditors", "")


def test_without_a_source_there_is_apply_alone(tmp_path: Path) -> None:
    found = namespace_of(emit(None, 6, PLANS, "autocast_bf16", tmp_path), tmp_path / "patched_model.py")
    with pytest.raises(ValueError, match=r"use apply\(model\)"):
        found["build"]()


def test_apply_checks_the_plan_and_the_model(tmp_path: Path) -> None:
    found = namespace_of(emit(None, 6, PLANS, None, tmp_path), tmp_path / "patched_model.py")
    with pytest.raises(ValueError, match="choose one of autocast_bf16, cast_bf16"):
        found["apply"](torch.nn.Linear(2, 2))  # nothing is recommended
    with pytest.raises(ValueError, match="6 parameters, this model has 8"):
        found["apply"](torch.nn.Linear(3, 2), "cast_bf16")


def test_numbers_that_python_cannot_spell_are_left_out(tmp_path: Path) -> None:
    odd = Plan("cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16")}, math.inf, 0.0, 1.0, Verification(math.nan))
    found = namespace_of(emit(None, 1, {"cast_bf16": odd}, None, tmp_path), tmp_path / "patched_model.py")
    assert (found["PLANS"]["cast_bf16"]["predicted_error"], found["PLANS"]["cast_bf16"]["measured_error"]) == (
        None,
        None,
    )
