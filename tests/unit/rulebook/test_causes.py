"""Which findings have one cause, on graphs of a few nodes whose errors are written down."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from auditor.measure.calibrate import Calibration
from auditor.records import Contribution, Finding, Node, NodeError, Verdict
from auditor.rulebook.causes import Graph, with_causes
from auditor.rulebook.load import load_rules
from tests.support.findings import finding as made

RULES = load_rules()
REFUSED = NodeError(unsupported="a literal does not fit float16", cause="unsupported")
OVERFLOW = NodeError(overflow=3, cause="overflow")
ROUNDED = NodeError(local_error=1e-3, cause="rounding")
FORMATS = ("fp16", "bf16")


def node(name: str, op: str, line: int | None, *inputs: str, owner: str = "") -> Node:
    source = f"model.py:{line}" if line else None
    return Node(name, f"aten.{op}.default", owner, "M", source, None, None, inputs, (2,), "float32", True)


def graph(nodes: list[Node], errors: dict[str, NodeError], effects: dict[str, float] | None = None) -> Graph:
    """Errors are FP16's and BF16's alike; what has one is unsafe, what has an effect alone too."""
    effects = effects or {}
    both = {name: dict.fromkeys(FORMATS, error) for name, error in errors.items()}
    moved = {n.name: dict.fromkeys(FORMATS, Contribution(effects.get(n.name, 0.0), 0.0, 0.0)) for n in nodes}
    bad = {*errors, *effects}
    verdicts = {n.name: dict.fromkeys(FORMATS, Verdict("unsafe" if n.name in bad else "safe", "")) for n in nodes}
    return Graph({n.name: n for n in nodes}, Calibration(both, moved, {}, 1), verdicts)


def finding(rule: str, of: Node, severity: str = "warning", fmt: str = "fp16", agrees: bool = True) -> Finding:
    at = {"owner": of.owner, "op": of.op, "source": of.source}
    return made(rule, of.name, severity=severity, formats=(fmt,), agrees=agrees, **at)


def causes(findings: list[Finding], of: Graph) -> list[str]:
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
    apart = node("x", "linear", 9)
    of = graph([*nodes, apart], {}, {"q0": 0.02, "s0": 0.05, "x": 0.9})
    assert causes([finding("MSR001", nodes[1]), finding("MSR001", apart)], of) == [
        "model.py:5 matmul",
        "model.py:9 linear",
    ]


def amplified(nodes: list[Node], effects: dict[str, float], softmax: float = 1e-4) -> Graph:
    """Of effects each is that of its own rounding, but at the softmax, whose result is as little as that."""
    of = graph(nodes, {}, effects)
    parts = {
        name: softmax if of.nodes[name].op == "aten.softmax.default" else effect for name, effect in effects.items()
    }
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
    of = Graph(fp16.nodes, Calibration(errors, moved, {}, 1), fp16.verdicts)
    found = [finding("ACT002", loud, "error"), finding("MSR002", loud, fmt="bf16")]
    assert causes(found, of) == ["model.py:1 mul", "model.py:1 mul: precision"]


def test_how_fast_a_line_runs_is_no_part_of_what_breaks_on_it() -> None:
    product = node("a", "linear", 1)
    of = graph([product], {"a": OVERFLOW})
    assert causes([finding("HWR001", product), finding("ACT002", product)], of) == [
        "model.py:1 linear: HWR001",
        "model.py:1 linear",
    ]
