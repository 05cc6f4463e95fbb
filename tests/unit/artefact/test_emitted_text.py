"""The text of patched_model.py: names stay names, whatever they hold, and what it says is checked."""

import ast
import math
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

SCOPES = {"": ScopeChoice("bf16"), "norm": ScopeChoice("fp32")}
PLANS = {
    f"{strategy}_bf16": Plan(f"{strategy}_bf16", strategy, "bf16", SCOPES, 0.001, 0.5, 1.5)
    for strategy in ("autocast", "cast")
}


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


def test_a_source_that_is_gone_is_named(tmp_path: Path) -> None:
    gone = Origin(str(tmp_path / "gone.py"), None, "get_model", "factory")
    text = emit(gone, 1, PLANS, "cast_bf16", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"gone\.py"):
        namespace_of(text, tmp_path / "patched_model.py")["build"]()
