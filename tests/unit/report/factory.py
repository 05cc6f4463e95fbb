"""Synthetic audits: a transformer-shaped model of any size, with one overflow, hostile names on request, no torch
run."""

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from auditor.records import (
    Contribution,
    Dtypes,
    Finding,
    Magnitudes,
    Node,
    NodeError,
    NodeReport,
    Origin,
    Reason,
    ScopeChoice,
    Subject,
    Verdict,
    Verification,
)
from auditor.records.audit import Environment, Provenance
from auditor.results import Audit, Plan

HOSTILE = "</script><script>alert(1)</script>\"'`|\n::error::pwned%<img src=x onerror=alert(2)>\x1b[31m"
ADVICE = """
Scale `fc2` down and fold the factor into the next norm, or keep the module
in FP32:

    with torch.autocast("cuda", enabled=False):
        y = self.fc2(x.float())
"""
SECONDS = {"capture": 1.2, "measure": 8.4, "solve": 0.3, "verify": 2.1}
BLOCK = (
    ("norm1", "LayerNorm", "aten.layer_norm.default", "x = self.norm1(x)"),
    ("attn.qkv", "Linear", "aten.linear.default", "q, k, v = self.qkv(x).chunk(3, dim=-1)"),
    ("attn", "Attention", "aten.split.Tensor", "q, k, v = self.qkv(x).chunk(3, dim=-1)"),
    ("attn", "Attention", "aten.matmul.default", "scores = q @ k.transpose(-2, -1)"),
    ("attn", "Attention", "aten.mul.Tensor", "scores = scores * self.scale"),
    ("attn", "Attention", "aten.softmax.int", "weights = scores.softmax(dim=-1)"),
    ("attn", "Attention", "aten.matmul.default", "x = weights @ v"),
    ("attn.proj", "Linear", "aten.linear.default", "x = self.proj(x)"),
    ("", "Block", "aten.add.Tensor", "x = residual + x"),
    ("norm2", "LayerNorm", "aten.layer_norm.default", "x = self.norm2(x)"),
    ("mlp.fc1", "Linear", "aten.linear.default", "x = self.fc1(x)"),
    ("mlp", "Mlp", "aten.gelu.default", "x = F.gelu(x)"),
    ("mlp.fc2", "Linear", "aten.linear.default", "x = self.fc2(x)"),
    ("", "Block", "aten.add.Tensor", "x = residual + x"),
)
RULES = {
    "aten.softmax.int": ("SFT001", "softmax-in-low-precision", "warning"),
    "aten.layer_norm.default": ("NRM001", "norm-statistics-in-low-precision", "warning"),
    "overflow": ("RNG001", "activation-over-fp16-range", "error"),
}


def _template(count: int) -> Iterator[tuple[str, str, str, str]]:
    yield "embed", "Embedding", "aten.embedding.default", "x = self.embed(tokens)"
    for i in range(max(count - 5, 0)):
        block, position = divmod(i, len(BLOCK))
        tail, kind, op, code = BLOCK[position]
        yield ".".join(filter(None, (f"blocks.{block}", tail))), kind, op, code
    yield "norm", "LayerNorm", "aten.layer_norm.default", "x = self.norm(x)"
    yield "head", "Linear", "aten.linear.default", "return self.head(x)"


def _format_facts(
    name: str, op: str, depth: float, overflows: bool, rng: random.Random
) -> tuple[NodeError, Contribution, Verdict]:
    fp16 = name == "fp16"
    unit = 2.0 ** (-11 if fp16 else -8)
    local = unit * rng.uniform(0.3, 0.7)
    isolated = local * rng.uniform(0.02, 0.6) * (4 if "softmax" in op else 1)
    contribution = Contribution(isolated, isolated * 0.7, isolated * 0.3)
    if overflows and fp16:
        error = NodeError(math.inf, math.inf, None, 12, 0, 0.0, 0.0, None, None, None, "overflow", originates_here=True)
        verdict = Verdict("unsafe", "alone it turns 12 finite values into Inf", "range")
        return error, Contribution(math.inf, math.inf, 0.0, "re-run"), verdict
    propagated = math.inf if fp16 and depth > 0.6 else local * (1 + 12 * depth)
    broken, snr = 3 if math.isinf(propagated) else 0, -20 * math.log10(local)
    error = NodeError(local, propagated, None, 0, broken, 0.02, 0.1, 0.5, snr, None, "rounding")
    if isolated > 0.003:
        return error, contribution, Verdict("unsafe", f"alone it costs {isolated:.1e}, over the budget", "precision")
    if isolated > 0.001:
        return error, contribution, Verdict("sensitive", f"alone it takes {isolated:.0%} of the budget", "precision")
    return error, contribution, Verdict("safe", "its effect on the outputs is below a tenth of the budget")


def _node(i: int, owner: str, kind: str, op: str, code: str) -> Node:
    name, place = f"{op.split('.')[1]}_{i}", (f"model.py:{20 + (i - 1) % len(BLOCK)}", "/repo/model.py", code)
    inputs = (f"n{i - 1}",) if i else ("tokens",)
    return Node(name, op, owner, kind, *place, inputs, (8, 128, 256), "float32", True, column=9)


def _under_autocast(op: str) -> Dtypes:
    """Products run low, norms and softmax in FP32; the rest computes in what it is handed."""
    if "linear" in op or "matmul" in op:
        return Dtypes(("float32",), "float16", "float16")
    if "norm" in op or "softmax" in op or "embedding" in op:
        return Dtypes(("float32", "int64") if "embedding" in op else ("float16",), "float32", "float32")
    return (
        Dtypes(("float16", "float32"), "float32", "float32") if "add" in op else Dtypes(("float16",), *2 * ("float16",))
    )


def _reports(nodes: int, formats: tuple[str, ...], hostile: bool, rng: random.Random) -> tuple[NodeReport, ...]:
    reports: list[NodeReport] = []
    for i, (owner, kind, op, code) in enumerate(_template(nodes)):
        depth = i / nodes
        if hostile and i % 5 == 0:
            owner, code = f"{owner}.{HOSTILE}", HOSTILE
        node = _node(i, owner, kind, op, code)
        if reports:
            node = replace(node, inputs=(reports[-1].node.name,))
        overflows = i == int(nodes * 0.6)
        facts = {f: _format_facts(f, op, depth, overflows, rng) for f in formats}
        center = 15.5 if overflows else 6 * math.sin(depth * 5) - 2
        exponents = range(int(center) - 9, int(center) + 4)
        spread = {e: max(1, round(4e4 * math.exp(-((e - center) ** 2) / 9))) for e in exponents}
        fired = ("RNG001",) if overflows else (RULES[op][0],) if op in RULES else ()
        reports.append(
            NodeReport(
                node=node,
                findings=fired,
                errors={f: fact[0] for f, fact in facts.items()},
                contributions={f: fact[1] for f, fact in facts.items()},
                verdicts={f: fact[2] for f, fact in facts.items()},
                exposed=dict.fromkeys(formats, ("cast",)),
                range=Magnitudes(2.0 ** (center + 4) * 0.97, 2.0 ** (center - 9), 41, spread),
                flops=int(1e9) if "linear" in op or "matmul" in op else int(1e6),
                planned=_under_autocast(op) if "fp16" in formats else None,
            )
        )
    reports += [_discrete(reports[-1].node.name, formats), _untested(reports[-1].node.name, formats)]
    return tuple(reports)


def _discrete(reads: str, formats: tuple[str, ...]) -> NodeReport:
    """An argmax in the root: no range, no source line, an integer output compared by disagreement."""
    node = Node("argmax", "aten.argmax.default", "", "Root", None, None, None, (reads,), (8,), "int64", False)
    return NodeReport(
        node=node,
        findings=(),
        errors={f: NodeError(disagreement=0.125, cause="discrete") for f in formats},
        contributions={f: Contribution(0.125, 0.125, 0.0, "re-run") for f in formats},
        verdicts={f: Verdict("unsafe", "1 of 8 results differs", "precision") for f in formats},
        exposed=dict.fromkeys(formats, ("autocast", "cast")),
        range=None,
        flops=0,
        planned=Dtypes(("float16",), "float16", "int64") if "fp16" in formats else None,
    )


def _untested(reads: str, formats: tuple[str, ...]) -> NodeReport:
    """A custom operation that no format could run."""
    node = Node("scan", "mylib.scan.default", "scan", "Scan", "lib.py:9", None, None, (reads,), (), "float32", True)
    return NodeReport(
        node=node,
        findings=(),
        errors={f: NodeError(local_error=math.nan, unsupported="no kernel for Half") for f in formats},
        contributions={},
        verdicts={f: Verdict("untested", "the operation does not run in this format") for f in formats},
        exposed=dict.fromkeys(formats, ()),
        range=Magnitudes(0.0, 0.0, 1, {}),
        flops=0,
    )


def _findings(reports: tuple[NodeReport, ...], hostile: bool) -> tuple[Finding, ...]:
    found = []
    for report in reports:
        for code in report.findings:
            name, severity = next((n, s) for c, n, s in RULES.values() if c == code)
            overflow = code == "RNG001"
            found.append(
                Finding(
                    rule=code,
                    name=name,
                    node=report.node.name,
                    owner=report.node.owner,
                    op=report.node.op,
                    source=report.node.source,
                    severity=severity,
                    confidence="high" if overflow else "medium",
                    formats=("fp16",) if overflow else ("fp16", "bf16"),
                    message=HOSTILE
                    if hostile
                    else "The largest activation is 9.9e5; FP16 ends at 65504."
                    if overflow
                    else "sums over 128 elements are accumulated\nand rounded in low precision",
                    why="FP16 has five exponent bits: nothing above 65504 can be stored, and the result becomes Inf.",
                    advice=ADVICE,
                    evidence={"max_abs": report.range.max_abs if report.range else None, "elements": 12}
                    if overflow
                    else {"reduction": 128},
                    agrees=True if overflow else None,
                )
            )
    return tuple(found)


def _plan(strategy: str, fmt: str, island: str | None, measured: float | None) -> Plan:
    scopes, reasons = {"": ScopeChoice(fmt)}, ()
    if island is not None:
        overflows = Reason("unsafe", "12 values overflow FP16", (island,), rules=("RNG001",))
        reasons = (overflows, Reason("margin", "the budget has no room", ("norm",), rules=("NRM001",)))
        scopes[island] = ScopeChoice("fp32")
        scopes["norm"] = ScopeChoice("fp32")
    predicted = {"fp16": 0.0008, "bf16": 0.0061}[fmt]
    finite = measured is not None
    failure = None if finite else "RuntimeError: expected scalar type"
    ran = Verification(measured, finite, "held-out", "emulated", failure)
    share = 0.93 if island else 0.981
    return Plan(f"{strategy}_{fmt}", strategy, fmt, scopes, predicted, share, 1.87, ran, reasons=reasons)


def make_audit(
    nodes: int = 120,
    *,
    hostile: bool = False,
    formats: tuple[str, ...] = ("fp16", "bf16"),
    recommended: str | None = "autocast_fp16",
    synthetic: bool = False,
    empty: bool = False,
) -> Audit:
    """A believable audit of `nodes` operations; `hostile` puts markup, quotes and control characters in every name."""
    rng = random.Random(7)
    reports = () if empty else _reports(nodes, formats, hostile, rng)
    island = next((r.node.owner for r in reports if "RNG001" in r.findings), None)
    made = (
        (_plan("autocast", "fp16", island, 0.00083), Verification(None, False)),
        (_plan("autocast", "bf16", None, 0.0058), Verification(0.0058, True)),
        (_plan("cast", "fp16", island, 0.0011), Verification(None, False)),
        (_plan("cast", "bf16", None, None), Verification(0.021, True)),
    )
    plans, baselines = ({} if empty else {pair[0].name: pair[which] for pair in made} for which in (0, 1))
    name = HOSTILE if hostile else "TinyGPT"
    return Audit(
        subject=Provenance(
            name,
            "model.py:get_model",
            "/repo/model.py",
            "get_inputs() in model.py",
            "checkpoint weights.safetensors",
            synthetic_inputs=synthetic,
            random_weights=synthetic,
        ),
        live=Subject(
            nn.Identity(), (), name, "", "", "", origin=Origin("/repo/model.py", None, "get_model", "factory")
        ),
        parameters=124_439_808,
        inputs=("int64[8, 128]",),
        graph_inputs=("tokens",),
        graph_outputs=() if empty else ("argmax",),
        environment=Environment("0.1.0", "2.13.0+cpu", "cpu", "emulated", 0, SECONDS),
        formats=formats,
        max_error=0.01,
        metric="relative L2 of the outputs",
        capture_method="run",
        nodes=reports,
        findings=_findings(reports, hostile),
        plans=plans,
        baselines=baselines,
        recommended=None if empty else recommended,
        recommendation="FP16 is three times as precise here as BF16 and 2 modules cover its overflow."
        if recommended
        else "Keep the model in FP32: no plan with low precision is within the error budget of 0.01.",
        flags={} if empty else {"cuda.matmul.allow_tf32": 0.044},
        warnings=("Inputs were synthesised.",) if synthetic else (),
        command="python -m auditor model.py --max-error 0.01",
    )


AUDITS: dict[str, dict[str, Any]] = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True, "synthetic": True},
    "empty": {"empty": True},
    "one-format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
}
"""What is asked of `make_audit` for one of each kind."""


def with_reasons(audit: Audit) -> Audit:
    """The audit with why operations of its recommended plan compute in FP32."""
    norms = tuple(r.node.name for r in audit.nodes if "norm" in r.node.op)
    first = audit.nodes[0].node.name
    reasons = (
        Reason("inherited", "it is handed FP32 by the parameter embed.weight", operations=(first,)),
        Reason("strategy", "autocast always runs layer_norm in FP32", operations=norms),
    )
    name = audit.recommended or ""
    plan = audit.plans[name]
    return replace(audit, plans={**audit.plans, name: replace(plan, reasons=(*plan.reasons, *reasons))})
