import ast

import torch
from torch import nn

from auditor.report.use import keep_by_hand, snippets
from tests.unit.report.factory import HOSTILE, make_audit


def test_the_code_keeps_a_module_in_fp32_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    code = keep_by_hand("1")
    assert code is not None
    exec(code.replace('"cuda"', '"cpu"'), {"model": model})
    x = torch.randn(4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = model[0](x)
        kept = model(x)
    assert low.dtype is torch.bfloat16
    assert kept.dtype is torch.float32
    assert torch.equal(kept, nn.functional.linear(low.float(), model[1].weight, model[1].bias))


def test_the_root_has_no_scope_to_keep():
    assert keep_by_hand("") is None


def test_snippets_are_python_whatever_the_names():
    hostile = keep_by_hand(HOSTILE)
    assert hostile is not None
    for code in [hostile, *(s.code for s in snippets(make_audit()))]:
        ast.parse(code)
    assert snippets(make_audit(recommended=None)) == ()
