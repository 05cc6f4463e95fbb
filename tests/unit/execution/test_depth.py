"""Errors along a run under a plan, against two whole runs kept in memory and compared afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from auditor.capture.capture import capture
from auditor.execution.beside import UnderPlan, under_plan
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, scoped
from auditor.loading import from_object
from auditor.numerics.metrics import relative_l2
from auditor.records import Plan, ScopeChoice
from tests.support.subjects import normal, seeded


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


def kept(captured, subject, how):
    """Every value of one run."""
    values = {}
    run = Executor(captured.graph_module, how, lambda n, value: values.update({n.name: value}))
    with torch.no_grad():
        run.run(*captured.bind(subject.model, subject.batches[0]))
    return values


@pytest.mark.parametrize(
    "chosen",
    [
        plan("autocast", "bf16"),
        plan("autocast", "fp16", norm="fp32"),
        plan("autocast", "fp16", last="fp32"),  # reads a low value
        plan("cast", "fp16"),
        plan("cast", "fp16", norm="fp32"),
        plan("cast", "bf16", first="fp32", last="fp32"),
    ],
    ids=lambda chosen: "-".join((chosen.name, *list(chosen.scopes)[1:])),
)
def test_errors_are_those_of_two_whole_runs(subject, captured, chosen):
    found = under_plan(captured, subject.model, subject.batches[0], chosen).errors
    how = Policy(captured, chosen.strategy, scoped(chosen.scopes), chosen.format)
    low = kept(captured, subject, how)
    reference = kept(captured, subject, Policy.wide(captured))
    floating = [name for name, node in captured.nodes.items() if node.floating]
    assert list(found) == floating
    assert found == pytest.approx({name: relative_l2(reference[name], low[name]) for name in floating}, rel=1e-5)
    assert max(found.values()) > 1e-5


class Regional(nn.Module):
    """A layer that its author runs in BF16, and one that it leaves as it is."""

    def __init__(self):
        super().__init__()
        self.inside, self.outside = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        with torch.autocast("cuda", torch.bfloat16):
            y = self.inside(x)
        return self.outside(y.float())


def test_a_plan_does_not_take_the_author_s_region_away():
    """The region is BF16 with a plan and without: nothing is lost there by the plan."""
    subject = from_object(seeded(Regional), normal(4, 8))
    captured = capture(subject, ("bf16",))
    found = under_plan(captured, subject.model, subject.batches[0], plan("autocast", "bf16")).errors
    assert found["linear"] == 0 < found["linear_1"]


def test_a_plan_that_lowers_nothing_has_no_error(subject, captured):
    everything = plan("autocast", "bf16", first="fp32", norm="fp32", last="fp32")
    everything = Plan(**{**vars(everything), "scopes": {"": ScopeChoice("fp32")}})
    assert set(under_plan(captured, subject.model, subject.batches[0], everything).errors.values()) == {0.0}


def test_a_plan_that_cannot_run_has_no_errors():
    class Factor(nn.Module):
        def forward(self, x):
            return torch.linalg.cholesky(x)

    subject = from_object(Factor(), torch.eye(3))
    captured = capture(subject, ("fp16",))
    assert under_plan(captured, subject.model, subject.batches[0], plan("cast", "fp16")) == UnderPlan()


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_an_island_that_reads_a_low_value_computes_in_fp32(strategy):
    """What is beyond FP16 inside of the island is finite there: 300 squared is 90000."""

    class Norm(nn.Module):
        def forward(self, x):
            return x / x.pow(2).mean(-1, keepdim=True).sqrt()

    subject = from_object(nn.Sequential(nn.Linear(8, 8), Norm(), nn.Linear(8, 4)).eval(), torch.full((5, 8), 300.0))
    with torch.no_grad():
        subject.model[0].weight.copy_(torch.eye(8))
    captured = capture(subject, ("fp16",))
    found = under_plan(captured, subject.model, subject.batches[0], plan(strategy, "fp16", **{"1": "fp32"})).errors
    assert list(found) == list(captured.nodes)
    assert max(found.values()) < 2e-3
