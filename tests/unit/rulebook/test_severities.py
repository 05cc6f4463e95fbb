"""Severities for the plan that is followed: a model of three lines, plans written by hand, what runs low resolved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.measure.calibrate import Calibration
from auditor.records import Contribution, Finding, NodeError, Plan, ScopeChoice, Verdict
from auditor.rulebook.causes import Graph, about, followed
from tests.support.capturing import captured
from tests.support.findings import finding as found


class Model(nn.Module):
    """Products, which plain autocast runs low; a power of one, which it does not, and what it meets nothing low in."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        twice = x * 2
        return self.down(self.up(twice).pow(3)) + x


TOY = captured(Model(), torch.ones(2, 4))
TWICE, UP, POW, DOWN, ADD = TOY.capture.nodes
FORMATS = ("fp16", "bf16")


def plan(strategy: str, fmt: str, verified: bool = True, speedup: float = 1.5, **scopes: str) -> Plan:
    choices = {"": ScopeChoice(fmt), **{path: ScopeChoice(low) for path, low in scopes.items()}}
    return Plan(f"{strategy}_{fmt}", strategy, fmt, choices, 0.001, 0.9, speedup, 0.001, verified)


def finding(name: str, severity: str = "error", formats: tuple[str, ...] = ("fp16",), **more: object) -> Finding:
    node = TOY.capture.nodes[name]
    about = {"owner": node.owner, "op": node.op, "source": node.source, "severity": severity, "formats": formats}
    return found("R", name, **{**about, **more})


def graph(broken: tuple[str, ...] = (), unsafe: tuple[str, ...] = ()) -> Graph:
    """Nodes that overflow, and nodes whose rounding alone is too much, in both formats."""
    errors = {name: dict.fromkeys(FORMATS, NodeError(overflow=int(name in broken))) for name in TOY.capture.nodes}
    moved = {name: dict.fromkeys(FORMATS, Contribution(0.1, 0.1, 0.0)) for name in TOY.capture.nodes}
    verdicts = {
        name: dict.fromkeys(FORMATS, Verdict("unsafe" if name in (*broken, *unsafe) else "safe", ""))
        for name in TOY.capture.nodes
    }
    return Graph(TOY.capture.nodes, Calibration(errors, moved, {}, 1), verdicts)


def one(found: Finding, followed: Plan, of: Graph) -> tuple[str, str | None, str | None]:
    (spoken,) = about([found], {followed.name: followed}, followed.name, TOY.capture, of)
    return spoken.severity, spoken.bearing, spoken.plan


AUTOCAST = plan("autocast", "fp16")
KEEPING = plan("autocast", "fp16", up="fp32")


@pytest.mark.parametrize(("severity", "less"), [("error", "warning"), ("warning", "info"), ("info", "info")])
def test_what_only_cast_weights_meet_is_less_severe_where_the_plan_is_autocast(severity: str, less: str) -> None:
    assert one(finding(TWICE, severity), AUTOCAST, graph()) == (less, "elsewhere", "autocast_fp16")


@pytest.mark.parametrize("name", [POW, ADD])
def test_what_runs_in_fp32_on_low_values_is_not_said_to_run_low_nor_to_be_spared(name: str) -> None:
    """Autocast raises the power, and a sum of a low value and an FP32 one is FP32."""
    assert one(finding(name, "warning"), AUTOCAST, graph())[:2] == ("info", "reads")
    assert one(finding(name, "warning"), plan("cast", "fp16"), graph())[:2] == ("info", "low")
    assert one(finding(name), plan("cast", "fp16", **{"": "fp32"}), graph())[1] == "kept"


def test_it_takes_the_strategies_that_compute_it_low_and_not_those_that_hand_it_what_is() -> None:
    said = about([finding(n, formats=FORMATS) for n in (TWICE, UP, POW, ADD)], {}, None, TOY.capture, graph())
    assert [f.met for f in said] == [
        dict.fromkeys(FORMATS, ("cast",)),
        dict.fromkeys(FORMATS, ("autocast", "cast")),
        dict.fromkeys(FORMATS, ("cast",)),
        dict.fromkeys(FORMATS, ("cast",)),
    ]


@pytest.mark.parametrize(("severity", "less"), [("error", "warning"), ("warning", "warning"), ("info", "info")])
def test_what_breaks_under_other_plans_stays_a_warning(severity: str, less: str) -> None:
    assert one(finding(POW, severity), AUTOCAST, graph(broken=(POW,)))[0] == less
    assert one(finding(UP, severity), plan("autocast", "bf16"), graph(broken=(UP,)))[0] == less


def test_what_the_plan_keeps_in_fp32_is_a_warning() -> None:
    assert one(finding(UP), KEEPING, graph(unsafe=(UP,))) == ("warning", "kept", "autocast_fp16")
    assert one(finding(UP, "warning"), KEEPING, graph()) == ("warning", "kept", "autocast_fp16")
    assert one(finding(UP, "info"), KEEPING, graph())[0] == "info"


def test_speed_and_gradients_are_as_severe_as_their_rules_where_the_plan_runs_them_low() -> None:
    slow = finding(UP, "warning", measurable=False)
    assert one(slow, AUTOCAST, graph())[:2] == ("warning", "low")
    assert one(slow, KEEPING, graph())[:2] == ("warning", "kept")
    assert one(slow, plan("autocast", "bf16"), graph())[:2] == ("info", "elsewhere")


def test_a_finding_on_no_operation_keeps_its_severity() -> None:
    stale = found("CFG001", "", op="auditor.ignore", formats=())
    assert one(stale, AUTOCAST, graph()) == ("warning", None, "autocast_fp16")


def test_the_plan_is_the_recommended_one_or_the_fastest_that_holds_with_anything_low() -> None:
    slow, fast, failed = plan("cast", "fp16"), plan("cast", "bf16", speedup=2.0), plan("autocast", "bf16", False, 3.0)
    nothing = replace(plan("autocast", "fp16", speedup=4.0), scopes={"": ScopeChoice("fp32")})
    plans = {p.name: p for p in (slow, fast, failed, nothing)}
    assert followed(plans, "cast_fp16") is slow
    assert followed(plans, None) is fast
    assert followed({p.name: p for p in (failed, nothing)}, None) is None
    assert followed({}, None) is None
