"""Code of the report to copy: run as pasted, for the strategy that is recommended."""

import ast
import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from auditor.report.use import keep_by_hand, snippets
from tests.unit.report.factory import HOSTILE, make_audit

CAST = make_audit(recommended="cast_fp16")


class Scaled(nn.Module):
    """Gives a tensor and a list, takes one by name, and holds a buffer and an integer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.tensor(1 / 3))
        self.register_buffer("steps", torch.tensor(3))

    def forward(self, x, *, shift):
        return self.linear(x) * self.scale, [shift * self.steps]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.scaled, self.last = nn.Linear(8, 8), Scaled(), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        y, (z,) = self.scaled(x, shift=x)
        return self.last(y + z)


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_the_code_keeps_a_module_in_fp32_with_cast_weights(stored):
    model, x, seen = Model().to(stored), torch.randn(4, 8), []
    before = copy.deepcopy(model.scaled).float().state_dict()
    exec(keep_by_hand(CAST, "scaled"), {"model": model})
    model.scaled.linear.register_forward_hook(lambda module, args, result: seen.append(result.dtype))
    assert model(x.half()).dtype is torch.float16
    assert seen == [torch.float32]
    assert all(torch.equal(x, before[name]) for name, x in model.scaled.state_dict().items())
    assert {name: x.dtype for name, x in model.state_dict().items() if not name.startswith("scaled")} == dict.fromkeys(
        ("first.weight", "first.bias", "last.weight", "last.bias"), torch.float16
    )


def test_a_weight_that_another_module_reads_cannot_be_kept_so():
    tied = replace(CAST, tied_parameters=(("embed.weight", "head.weight"), ("a.x.weight", "a.y.weight")))
    assert keep_by_hand(tied, "head") is None
    assert keep_by_hand(tied, "a") is not None
    assert keep_by_hand(replace(tied, recommended="autocast_fp16"), "head") is not None


def test_the_code_keeps_a_module_in_fp32_under_autocast():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    code = keep_by_hand(make_audit(), "1")
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
    assert keep_by_hand(make_audit(), "") is None
    assert keep_by_hand(make_audit(recommended=None), "1") is None


def test_snippets_are_python_whatever_the_names():
    for code in [
        *(keep_by_hand(audit, HOSTILE) for audit in (make_audit(), CAST)),
        *(s.text for s in snippets(make_audit())),
    ]:
        ast.parse(code)
    assert snippets(make_audit(recommended=None)) == ()
