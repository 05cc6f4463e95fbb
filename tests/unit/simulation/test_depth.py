"""Errors along a run under a plan, against two whole runs kept in memory and compared afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.load import from_object
from auditor.numerics.metrics import relative_l2
from auditor.records import Plan, ScopeChoice
from auditor.simulation.depth import plan_errors
from auditor.simulation.execute import PolicyInterpreter, Setting
from auditor.simulation.strategies import running, scoped
from auditor.tape import capture


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.LayerNorm(16)
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        scores = self.last(self.norm(torch.relu(self.first(x))))
        return scores, scores.argmax(-1)


def plan(strategy: str, fmt: str, **scopes: str) -> Plan:
    table = {path: ScopeChoice(precision) for path, precision in scopes.items()}
    return Plan(f"{strategy}_{fmt}", strategy, fmt, {"": ScopeChoice(fmt), **table}, 0.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def subject():
    torch.manual_seed(0)
    return from_object(Net().eval(), torch.randn(5, 8))


@pytest.fixture(scope="module")
def captured(subject):
    return capture(subject, ("fp16", "bf16"))


def kept(captured, subject, **options):
    """Every value of one run."""
    values = {}
    setting = options.pop("setting", lambda name: Setting("fp32", autocast=False))
    run = PolicyInterpreter(captured, setting, observe=lambda n, value: values.update({n.name: value}), **options)
    with torch.no_grad():
        run.run(*captured.bind(subject.model, subject.batches[0]))
    return values


@pytest.mark.parametrize(
    "chosen", [plan("autocast", "bf16"), plan("autocast", "fp16", norm="fp32"), plan("cast", "fp16")]
)
def test_errors_are_those_of_two_whole_runs(subject, captured, chosen):
    found = plan_errors(captured, subject.model, subject.batches[0], chosen)
    how = running(captured, chosen.strategy, scoped(chosen.scopes), chosen.format)
    options = {"placeholder_precision": how.placeholder_precision, "literals": how.literals}
    low = kept(captured, subject, setting=how.setting, **options)
    reference = kept(captured, subject)
    floating = [name for name, node in captured.nodes.items() if node.floating]
    assert list(found) == floating
    assert found == {name: relative_l2(reference[name], low[name]) for name in floating}
    assert max(found.values()) > 1e-5


def test_a_plan_that_lowers_nothing_has_no_error(subject, captured):
    everything = plan("autocast", "bf16", first="fp32", norm="fp32", last="fp32")
    everything = Plan(**{**vars(everything), "scopes": {"": ScopeChoice("fp32")}})
    assert set(plan_errors(captured, subject.model, subject.batches[0], everything).values()) == {0.0}


def test_a_plan_that_cannot_run_has_no_errors():
    class Factor(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x)

    subject = from_object(Factor(), torch.eye(3))
    captured = capture(subject, ("fp16",))
    assert plan_errors(captured, subject.model, subject.batches[0], plan("cast", "fp16")) == {}
