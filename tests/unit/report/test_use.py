"""Code of the report to copy: run as pasted, for the strategy that is recommended."""

from __future__ import annotations

import ast

import pytest
import torch
from torch import nn

from auditor.report.kept import keep_alone
from auditor.report.plans import snippets
from tests.unit.report.factory import HOSTILE, make_audit


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_the_code_keeps_one_module_in_fp32(strategy: str) -> None:
    code = keep_alone(make_audit(recommended=f"{strategy}_bf16"), "1")
    assert code is not None
    torch.manual_seed(0)
    names = {"model": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))}
    exec(code, names)
    seen: list[torch.dtype] = []
    for module in names["model"]:
        module.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    names["model"](torch.randn(4, 8))
    handed_on = torch.float32 if strategy == "autocast" else torch.bfloat16
    assert seen[0] == seen[2] == torch.bfloat16
    assert seen[1] in (torch.float32, handed_on)
    stored = torch.bfloat16 if strategy == "cast" else torch.float32
    assert [layer.weight.dtype for layer in names["model"]] == [stored, torch.float32, stored]


def test_the_root_and_no_plan_have_none() -> None:
    assert keep_alone(make_audit(), "") is None
    assert keep_alone(make_audit(recommended=None), "1") is None
    assert snippets(make_audit(recommended=None)) == ()


def test_snippets_are_python_whatever_the_names() -> None:
    kept = (keep_alone(make_audit(recommended=name), HOSTILE) for name in ("autocast_fp16", "cast_fp16"))
    for code in [*kept, *(s.text for s in snippets(make_audit()))]:
        ast.parse(code or "")
