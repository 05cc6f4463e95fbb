"""The code that keeps one module in FP32, run as pasted from the report of the strategy that it recommends."""

import copy

import pytest
import torch
from torch import nn

import auditor
from auditor.report.findings import causes
from tests.support.replaying import Model


@pytest.fixture(scope="module", params=["cast", "autocast"])
def audited(request):
    torch.manual_seed(0)
    stem, head, weight = nn.Linear(16, 16), nn.Linear(16, 8), nn.Parameter(torch.linspace(0.5, 1.5, 16))
    norm = Model(lambda m, x: x / (x * x).sum(-1, keepdim=True).sqrt() * m.weight, weight=weight)
    model = Model(lambda m, x: m.head(m.norm(m.stem(x) * 300.0)), stem=stem, norm=norm, head=head).eval()
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))  # 16 * 300^2 is beyond FP16
    audit = auditor.audit(model, x, formats=("fp16",), strategies=(request.param,))
    assert audit.recommended == f"{request.param}_fp16"
    return audit, model, x


def test_the_code_of_each_cause_is_for_the_recommended_strategy_and_runs(audited):
    audit, model, x = audited
    (code,) = {cause.snippet for cause in causes(audit).wanting}
    space = {"model": copy.deepcopy(model)}
    exec(code, space)
    with torch.no_grad(), auditor.emulate("cuda"):
        found = space["model"](x)
    with torch.no_grad():
        truth = model(x)
    assert found.dtype is torch.float16
    assert float((found - truth).norm() / truth.norm()) <= audit.max_error
