"""Which findings have one cause, and how severe they are for the plan that is followed."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.measure.calibrate import Calibration
from auditor.records import Contribution, Finding, Node, NodeError, Plan, ScopeChoice, Verdict, Verification
from auditor.report.origins import cause
from auditor.rulebook.causes import FlowGraph, about, with_causes
from auditor.rulebook.load import load_rules
from tests.support.capturing import Function, captured
from tests.support.findings import finding as found
from tests.support.replaying import Model
from tests.support.subjects import FORMATS

RULES = load_rules()
REFUSED = NodeError(unsupported="a literal does not fit float16", cause="unsupported")
OVERFLOW = NodeError(overflow=3, cause="overflow")
ROUNDED = NodeError(local_error=1e-3, cause="rounding")


def node(name: str, op: str, line: int | None, *inputs: str, owner: str = "") -> Node:
    source = f"model.py:{line}" if line else None
    return Node(name, f"aten.{op}.default", owner, "M", source, None, None, inputs, (2,), "float32", True)


def graph(nodes: list[Node], errors: dict[str, NodeError], effects: dict[str, float] | None = None) -> FlowGraph:
    """Errors are FP16's and BF16's alike; what has one is unsafe, what has an effect alone too."""
    effects = effects or {}
    both = {name: dict.fromkeys(FORMATS, error) for name, error in errors.items()}
    moved = {n.name: dict.fromkeys(FORMATS, Contribution(effects.get(n.name, 0.0), 0.0, 0.0)) for n in nodes}
    bad = {*errors, *effects}
    verdicts = {n.name: dict.fromkeys(FORMATS, Verdict("unsafe" if n.name in bad else "safe", "")) for n in nodes}
    return FlowGraph({n.name: n for n in nodes}, Calibration(both, moved, {}, 1), verdicts)


def finding(rule: str, of: Node, severity: str = "warning", fmt: str = "fp16", agrees: bool = True) -> Finding:
    at = {"owner": of.owner, "op": of.op, "source": of.source}
    return found(rule, of.name, severity=severity, formats=(fmt,), agrees=agrees, **at)


def causes(findings: list[Finding], of: FlowGraph) -> list[str]:
    return [found.cause for found in with_causes(findings, of, RULES)]


def test_what_reads_something_broken_and_is_broken_has_it_from_there() -> None:
    square, total, root = node("a", "square", 1), node("b", "sum", 2, "a"), node("c", "sqrt", 3, "b")
    of = graph([square, total, root], {"a": OVERFLOW, "b": OVERFLOW, "c": OVERFLOW})
    found = [finding("NRM003", square, "error"), finding("RED002", total, "error"), finding("MSR001", root)]
    assert causes(found, of) == ["model.py:1 square"] * 3


def test_a_literal_that_does_not_fit_is_a_cause_of_its_own() -> None:
    scores, mask = node("a", "mul", 1), node("b", "masked_fill", 2, "a")
    of = graph([scores, mask], {"a": OVERFLOW, "b": REFUSED})
    found = [finding("MSR001", scores), finding("CON001", mask, "error")]
    assert causes(found, of) == ["model.py:1 mul", "model.py:2 masked_fill"]


@pytest.mark.parametrize("line", [7, None])
def test_blocks_that_repeat_have_one_cause_whatever_the_measurement_says_of_each(line: int | None) -> None:
    nodes = [node(f"a{i}", "exp", line, owner=f"blocks.{i}.norm") for i in range(3)]
    of = graph(nodes, {"a0": OVERFLOW, "a1": OVERFLOW})
    found = [*(finding("ACT001", n) for n in nodes[:2]), finding("ACT001", nodes[2], "info", agrees=False)]
    assert causes(found, of) == [f"{'model.py:7' if line else 'blocks.*.norm'} exp"] * 3


def test_what_the_measurement_alone_finds_goes_to_the_nearest_rule_that_is_borne_out() -> None:
    names = [node(name, "linear", i, *inputs) for i, (name, inputs) in enumerate(CHAIN, 1)]
    of = graph(names, {}, {name: 0.02 for name, _ in CHAIN})
    by = {n.name: n for n in names}
    rules = [finding("SFT001", by["b"]), finding("ATT003", by["e"])]
    alone = [finding("MSR001", by[name]) for name in "acdf"]
    assert causes([*rules, *alone], of)[2:] == ["model.py:2 linear", "model.py:2 linear", *["model.py:5 linear"] * 2]


CHAIN = [("a", ()), ("b", ("a",)), ("c", ("b",)), ("d", ("e",)), ("e", ("c",)), ("f", ("e",))]


def test_where_no_rule_foresaw_it_what_lies_together_has_one_cause_at_its_strongest_operation() -> None:
    nodes = [
        node(f"{name}{i}", op, line, *inputs, owner=f"layers.{i}.{name}")
        for i in range(2)
        for name, op, line, inputs in (("q", "linear", 4, ()), ("s", "matmul", 5, (f"q{i}",)))
    ]
    of = graph(nodes, {}, {"q0": 0.02, "s0": 0.05, "q1": 0.02, "s1": 0.04})
    both = [finding(rule, n, fmt=fmt) for n in nodes for rule, fmt in (("MSR001", "fp16"), ("MSR002", "bf16"))]
    assert set(causes(both, of)) == {"model.py:5 matmul"}
    apart, turned = node("x", "linear", 9), node("t", "numpy_T", 6, "s0")
    of = graph([*nodes, apart, turned], {}, {"q0": 0.02, "s0": 0.05, "t": 0.06, "x": 0.9})
    found = [finding("MSR001", one) for one in (nodes[1], turned, apart)]
    assert causes(found, of) == ["model.py:5 matmul"] * 2 + ["model.py:9 linear"]


def amplified(nodes: list[Node], effects: dict[str, float], softmax: float = 1e-4) -> FlowGraph:
    """Of effects each is that of its own rounding, but at the softmax, whose result is as little as that."""
    of = graph(nodes, {}, effects)
    parts = {n: softmax if of.nodes[n].op == "aten.softmax.default" else effect for n, effect in effects.items()}
    moved = {name: dict.fromkeys(FORMATS, Contribution(effects[name], part, part)) for name, part in parts.items()}
    return replace(of, measured=replace(of.measured, contributions=moved))


def attention(*above: Node, softmax_reads: str) -> list[Node]:
    q, k = node("q", "linear", 1, "x"), node("k", "linear", 1, "x")
    return [
        q,
        k,
        node("s", "matmul", 2, "q", "k"),
        *above,
        node("w", "softmax", 5, softmax_reads),
        node("o", "linear", 6, "w"),
    ]


EFFECTS = {"q": 0.09, "k": 0.06, "s": 0.02, "w": 0.04}


def test_ahead_of_what_amplifies_the_value_that_it_reads_is_the_cause_not_the_largest_effect() -> None:
    nodes = attention(node("c", "mul", 3, "s"), node("m", "masked_fill", 4, "c"), softmax_reads="m")
    of = amplified(nodes, EFFECTS | {"c": 0.03, "m": 0.05})
    found = [finding("MSR002", n, fmt="bf16") for n in nodes if n.name != "o"]
    assert set(causes(found, of)) == {"model.py:3 mul"}
    assert set(causes(found, amplified(nodes, EFFECTS | {"c": 0.03, "m": 0.05}, softmax=0.02))) == {"model.py:1 linear"}
    assert set(causes(found, amplified(nodes, EFFECTS | {"c": 0.03, "m": 0.05, "q": 0.9}))) == {"model.py:1 linear"}


def test_rounding_is_no_part_of_a_break_on_the_same_line() -> None:
    loud = node("a", "mul", 1)
    fp16 = graph([loud], {"a": OVERFLOW}, {"a": math.inf})
    errors = {"a": {"fp16": OVERFLOW, "bf16": ROUNDED}}
    moved = {"a": {"fp16": Contribution(math.inf, 0.0, 0.0), "bf16": Contribution(0.05, 0.0, 0.0)}}
    of = FlowGraph(fp16.nodes, Calibration(errors, moved, {}, 1), fp16.verdicts)
    found = [finding("ACT002", loud, "error"), finding("MSR002", loud, fmt="bf16")]
    assert causes(found, of) == ["model.py:1 mul", "model.py:1 mul: precision"]


def test_how_fast_a_line_runs_is_no_part_of_what_breaks_on_it() -> None:
    product = node("a", "linear", 1)
    of = graph([product], {"a": OVERFLOW})
    assert causes([finding("HWR001", product), finding("ACT002", product)], of) == [
        "model.py:1 linear: HWR001",
        "model.py:1 linear",
    ]


# Severities for the plan that is followed: a model of three lines, plans written by hand, what runs low resolved.


# Products, which plain autocast runs low; a power of one, which it does not, and what it meets nothing low in.
LAYERS = {"up": nn.Linear(4, 4), "down": nn.Linear(4, 4)}
TOY = captured(Model(lambda m, x: m.down(m.up(x * 2).pow(3)) + x, **LAYERS), torch.ones(2, 4))
TWICE, UP, POW, DOWN, ADD = TOY.capture.nodes


def plan(strategy: str, fmt: str, verified: bool = True, speedup: float = 1.5, **scopes: str) -> Plan:
    choices = {"": ScopeChoice(fmt), **{path: ScopeChoice(low) for path, low in scopes.items()}}
    return Plan(f"{strategy}_{fmt}", strategy, fmt, choices, 0.001, 0.9, speedup, Verification(0.001, verified))


def severity_finding(name: str, severity: str = "error", formats: tuple[str, ...] = ("fp16",), **more: Any) -> Finding:
    node = TOY.capture.nodes[name]
    about = {"owner": node.owner, "op": node.op, "source": node.source, "severity": severity, "formats": formats}
    return found("R", name, **{**about, **more})


def severity_graph(broken: tuple[str, ...] = (), unsafe: tuple[str, ...] = ()) -> FlowGraph:
    """Nodes that overflow, and nodes whose rounding alone is too much, in both formats."""
    errors = {name: dict.fromkeys(FORMATS, NodeError(overflow=int(name in broken))) for name in TOY.capture.nodes}
    moved = {name: dict.fromkeys(FORMATS, Contribution(0.1, 0.1, 0.0)) for name in TOY.capture.nodes}
    verdicts = {
        name: dict.fromkeys(FORMATS, Verdict("unsafe" if name in (*broken, *unsafe) else "safe", ""))
        for name in TOY.capture.nodes
    }
    return FlowGraph(TOY.capture.nodes, Calibration(errors, moved, {}, 1), verdicts)


def one(found: Finding, reference_plan: Plan, of: FlowGraph) -> tuple[str, str | None, str | None]:
    (spoken,) = about([found], {reference_plan.name: reference_plan}, reference_plan.name, TOY.capture, of)
    return spoken.severity, spoken.bearing, spoken.plan


AUTOCAST = plan("autocast", "fp16")
KEEPING = plan("autocast", "fp16", up="fp32")


@pytest.mark.parametrize(("severity", "less"), [("error", "warning"), ("warning", "info"), ("info", "info")])
def test_what_only_cast_weights_meet_is_less_severe_where_the_plan_is_autocast(severity: str, less: str) -> None:
    assert one(severity_finding(TWICE, severity), AUTOCAST, severity_graph()) == (less, "elsewhere", "autocast_fp16")


@pytest.mark.parametrize("name", [POW, ADD])
def test_what_runs_in_fp32_on_low_values_is_not_said_to_run_low_nor_to_be_spared(name: str) -> None:
    """Autocast raises the power, and a sum of a low value and an FP32 one is FP32."""
    assert one(severity_finding(name, "warning"), AUTOCAST, severity_graph())[:2] == ("info", "reads")
    assert one(severity_finding(name, "warning"), plan("cast", "fp16"), severity_graph())[:2] == ("info", "low")
    assert one(severity_finding(name), plan("cast", "fp16", **{"": "fp32"}), severity_graph())[1] == "kept"


def test_it_takes_the_strategies_that_compute_it_low_and_not_those_that_hand_it_what_is() -> None:
    said = about(
        [severity_finding(n, formats=FORMATS) for n in (TWICE, UP, POW, ADD)], {}, None, TOY.capture, severity_graph()
    )
    assert [f.met for f in said] == [
        dict.fromkeys(FORMATS, ("cast",)),
        dict.fromkeys(FORMATS, ("autocast", "cast")),
        dict.fromkeys(FORMATS, ("cast",)),
        dict.fromkeys(FORMATS, ("cast",)),
    ]


@pytest.mark.parametrize(("severity", "less"), [("error", "warning"), ("warning", "warning"), ("info", "info")])
def test_what_breaks_under_other_plans_stays_a_warning(severity: str, less: str) -> None:
    assert one(severity_finding(POW, severity), AUTOCAST, severity_graph(broken=(POW,)))[0] == less
    assert one(severity_finding(UP, severity), plan("autocast", "bf16"), severity_graph(broken=(UP,)))[0] == less


def test_what_the_plan_keeps_in_fp32_is_a_warning() -> None:
    assert one(severity_finding(UP), KEEPING, severity_graph(unsafe=(UP,))) == ("warning", "kept", "autocast_fp16")
    assert one(severity_finding(UP, "warning"), KEEPING, severity_graph()) == ("warning", "kept", "autocast_fp16")
    assert one(severity_finding(UP, "info"), KEEPING, severity_graph())[0] == "info"


def test_speed_and_gradients_are_as_severe_as_their_rules_where_the_plan_runs_them_low() -> None:
    slow = severity_finding(UP, "warning", measurable=False)
    assert one(slow, AUTOCAST, severity_graph())[:2] == ("warning", "low")
    assert one(slow, KEEPING, severity_graph())[:2] == ("warning", "kept")
    assert one(slow, plan("autocast", "bf16"), severity_graph())[:2] == ("info", "elsewhere")


def test_a_finding_on_no_operation_keeps_its_severity() -> None:
    stale = found("CFG001", "", op="auditor.ignore", formats=())
    assert one(stale, AUTOCAST, severity_graph()) == ("warning", None, "autocast_fp16")


def test_the_plan_is_the_recommended_one_or_the_fastest_that_holds_with_anything_low() -> None:
    slow, fast, failed = plan("cast", "fp16"), plan("cast", "bf16", speedup=2.0), plan("autocast", "bf16", False, 3.0)
    nothing = replace(plan("autocast", "fp16", speedup=4.0), scopes={"": ScopeChoice("fp32")})
    plans = {p.name: p for p in (slow, fast, failed, nothing)}

    def named(plans: dict[str, Plan], recommended: str | None) -> str | None:
        (spoken,) = about([severity_finding(TWICE, "error")], plans, recommended, TOY.capture, severity_graph())
        return spoken.plan

    assert named(plans, "cast_fp16") == "cast_fp16"
    assert named(plans, None) == "cast_bf16"
    assert named({p.name: p for p in (failed, nothing)}, None) is None
    assert named({}, None) is None


# Autocast casts at a product what it computed in FP32: the product is the cause, not the operation before or after it.


class Bank(nn.Module):
    """A filter bank on a power spectrum, as of a mel spectrogram: the power overflows FP16, and so does its product."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.body = kind, nn.Linear(3, 4)
        self.filters = nn.Parameter(torch.full((8, 3), 0.25))

    def forward(self, x: Tensor) -> Tensor:
        large = x.pow(2) if self.kind == "power" else x.exp() if self.kind == "exponential" else x.cumsum(-1)
        return self.body(torch.log(torch.clamp(large @ self.filters, min=1e-5)))


KINDS = {
    "power": 300 + torch.arange(16.0).reshape(2, 8),
    "exponential": 11.5 + torch.arange(16.0).reshape(2, 8) / 64,
    "total": 20000 + torch.arange(16.0).reshape(2, 8),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_overflow_in_the_cast_at_a_product_belongs_to_the_product(kind: str) -> None:
    audit = auditor.audit(Bank(kind).eval(), (KINDS[kind],), formats="fp16", strategies="autocast")
    wanting = [one for one in audit.findings if one.severity != "info"]
    assert {one.cause.partition(" ")[2] for one in wanting} == {"matmul"}
    assert "ACT008" in {one.rule for one in wanting}
    first = audit.baselines["autocast_fp16"].nonfinite
    assert (first.op, first.begins) == ("aten.matmul.default", "matmul")
    assert "see ACT008" in cause(audit, first, "fp16")
    assert all("an input of" in n.verdicts["fp16"].reason for n in audit.nodes if n.node.name == "matmul")


def test_with_cast_weights_the_operation_before_the_product_is_a_cause_of_its_own() -> None:
    audit = auditor.audit(Bank("power").eval(), (KINDS["power"],), formats="fp16")
    causes = {one.cause.partition(" ")[2] for one in audit.findings if one.severity != "info"}
    assert {"pow", "matmul"} <= causes
    assert audit.baselines["cast_fp16"].nonfinite.begins == "pow_1"


def test_the_operation_at_which_inf_begins_is_reported_beside_a_rule_in_its_module() -> None:
    model = nn.Sequential(Bank("power"))
    audit = auditor.audit(model.eval(), (KINDS["power"],), formats="fp16")
    assert {("ACT008", "matmul"), ("MSR001", "pow_1")} <= {(one.rule, one.node) for one in audit.findings}


def test_what_only_a_strategy_meets_that_was_not_asked_for_is_a_note() -> None:
    model = nn.Sequential(Bank("power"))
    audit = auditor.audit(model.eval(), (KINDS["power"],), formats="fp16", strategies="autocast")
    assert {one.severity for one in audit.findings if one.node == "pow_1"} == {"info"}
    assert {one.node for one in audit.findings if one.severity != "info"} <= {"matmul", "clamp", "log"}


def test_an_input_that_overflows_is_named_where_the_result_is_finite() -> None:
    model, x = Function(lambda x, y: y / x), torch.tensor([[1e5, 2.0], [3e5, 4.0]])
    audit = auditor.audit(model, (x * 1.0, torch.ones(2, 2) * 1e5), formats="fp16", strategies="cast")
    (div,) = (one for one in audit.nodes if one.node.op == "aten.div.Tensor")
    assert "an input of 3e+05 overflows" in div.verdicts["fp16"].reason
    assert div.verdicts["fp16"].limited_by == "range"


class Looked(nn.Module):
    """A position in [0, 1) becomes an index: in FP16 the largest position rounds to 1, one beyond the table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.table[(x * 4).long()] * x


def test_a_reason_names_the_exception_that_a_run_raised() -> None:
    audit = auditor.audit(Looked(), (torch.tensor([0.1, 0.5, 0.99999]),), formats="fp16")
    (mul,) = (one for one in audit.nodes if one.node.name == "mul")
    verdict = mul.verdicts["fp16"]
    assert verdict.verdict == "unsafe"
    assert "raises IndexError: index 4 is out of bounds" in verdict.reason
    assert "Inf or NaN" not in verdict.reason
    assert not [one.message for one in audit.findings if "Inf or NaN" in one.message and one.node == "mul"]


def test_outputs_that_rounding_breaks_are_explained_by_the_rule_in_the_module() -> None:
    """The mean itself is finite; its rounding makes a variance negative, and the root NaN: one problem, of RED004."""

    def deviation(x: Tensor) -> Tensor:
        return (x.square().mean(-1) - x.mean(-1).square()).sqrt()

    x = 40 + torch.linspace(0, 1, 4 * 64).reshape(4, 64) / 8
    model = nn.Sequential(Function(deviation))
    audit = auditor.audit(model, (x,), device="cpu", strategies="cast", max_error=0.05)
    codes = {finding.rule for finding in audit.findings}
    assert "RED004" in codes
    assert not {"MSR001", "MSR002"} & codes, audit.findings
