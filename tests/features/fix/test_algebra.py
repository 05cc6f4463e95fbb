"""The `[[fix]]` tables of rules: each repairs its rule's own example, and forms of it that people write."""

import ast
import linecache
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pydantic import TypeAdapter
from torch import nn

from auditor.features.fix.algebra import Rewriter, pattern_of
from auditor.features.fix.candidates import DISPLAY, Candidate, Proposer
from auditor.features.fix.source import Source
from auditor.numerics.metrics import output_error
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule, RuleFix

RULES = {rule.code: rule for rule in load_rules()}
FIXING = [rule for rule in RULES.values() if rule.fixes]
ELSEWHERE = {"NRM003", "RED002", "RED009"}
"""Rules whose example is repaired by FP32: their fixes are for other forms of the problem."""


def proposer_of(text: str) -> Proposer:
    """A Proposer for a text in which every argument of a function is a floating-point tensor."""
    source = Source("m.py", text)
    functions = [node for node in ast.walk(source.tree) if isinstance(node, ast.FunctionDef)]
    kinds = {("m.py", one.lineno, argument.arg): "float" for one in functions for argument in one.args.args}
    return Proposer(source, kinds)


def rewritten(text: str, rule: Rule) -> list[tuple[Candidate, str]]:
    """The candidates of one rule for a text with `forward`, each with the edited text."""
    proposer = proposer_of(text)
    source = proposer.source
    (forward,) = (one for one in ast.walk(source.tree) if isinstance(one, ast.FunctionDef) and one.name == "forward")
    found = Rewriter(source, proposer).candidates(forward.body[-1], [rule])
    return [(one, source.apply(one.edits)) for one in found]


def run(text: str, inputs: tuple[str, ...], dtype: torch.dtype) -> torch.Tensor:
    space: dict[str, Any] = {"torch": torch, "nn": nn, "F": F, "math": math}
    linecache.cache["m.py"] = (len(text), None, text.splitlines(keepends=True), "m.py")
    exec(compile(text, "m.py", "exec"), space)
    torch.manual_seed(0)
    given = [eval(one, space) for one in inputs]
    return space["forward"](*(x.to(dtype) if x.is_floating_point() else x for x in given))  # type: ignore[no-any-return]


@pytest.mark.parametrize("rule", [rule for rule in FIXING if rule.code not in ELSEWHERE], ids=lambda rule: rule.code)
def test_a_fix_repairs_the_example_of_its_rule(rule: Rule) -> None:
    example = rule.example
    assert example is not None
    found = rewritten(example.code.strip() + "\n", rule)
    assert found
    for candidate, text in found:
        if candidate.safety == DISPLAY:
            continue
        expected = run(example.code, example.inputs, torch.float64)
        before = output_error([expected], [run(example.code, example.inputs, torch.float32)])
        assert output_error([expected], [run(text, example.inputs, torch.float32)]) < 1e-5 + 2 * before


FORMS = [
    ("RED005", "torch.log(x.exp().sum(dim=-1, keepdim=True))", "torch.logsumexp(x, -1, keepdim=True)"),
    ("RED005", "x.exp().sum(-1).log()", "torch.logsumexp(x, -1)"),
    ("RED005", "torch.log(1 + torch.exp(x))", "torch.nn.functional.softplus(x)"),
    ("SFT005", "torch.log(F.softmax(x + y, dim=-1))", "torch.log_softmax(x + y, -1)"),
    ("SFT005", "torch.log(x.softmax(-1) + 1e-9)", "torch.log_softmax(x, -1)"),
    ("RED004", "(x ** 2).mean(-1) - x.mean(-1).pow(2)", "x.float().var(-1, unbiased=False)"),
    ("RED004", "x.square().mean(dim=-1) - x.mean(dim=-1) * x.mean(dim=-1)", "x.float().var(-1, unbiased=False)"),
    ("ATT001", "torch.matmul(x, y.transpose(-2, -1)) / 8", "(x / 8) @ y.transpose(-2, -1)"),
    ("ATT001", "torch.einsum('id,jd->ij', x, y) * 0.1", "torch.einsum('id,jd->ij', x * 0.1, y)"),
    ("RED006", "torch.sqrt(x.pow(2).sum(-1))", "torch.linalg.vector_norm(x, dim=-1)"),
    ("RED006", "(x.square() + y * y).sqrt()", "torch.hypot(x, y)"),
    ("CON001", "x.masked_fill(y > 0, -1e9)", "x.masked_fill(y > 0, torch.finfo(x.dtype).min)"),
    ("RED001", "x.sum(1) / 64", "x.mean(1)"),
    ("RED009", "torch.log(1 + x)", "torch.log1p(x)"),
    ("RED002", "torch.log(x.prod(-1))", "x.log().sum(-1)"),
]


@pytest.mark.parametrize(("code", "written", "expected"), FORMS)
def test_forms_that_people_write(code: str, written: str, expected: str) -> None:
    text = f"def forward(x, y):\n    return {written}\n"
    texts = [text for _, text in rewritten(text, RULES[code])]
    assert f"def forward(x, y):\n    return {expected}\n" in texts


def test_a_local_variable_stands_for_its_value_unless_what_it_reads_changes() -> None:
    text = "def forward(x):\n    e = torch.exp(x)\n{}    return torch.log(e.sum(-1))\n"
    assert [one for _, one in rewritten(text.format(""), RULES["RED005"])] == [
        "def forward(x):\n    return torch.logsumexp(x, -1)\n"
    ]
    assert rewritten(text.format("    x = x * 2\n"), RULES["RED005"]) == []


SOFTMAX = "def forward(x):\n    m = x - 1\n{}    return e / e.sum(-1, keepdim=True)\n"


@pytest.mark.parametrize(
    ("assignment", "after"),
    [
        ("    e = torch.exp(m)\n", "    m = x - 1\n    return torch.softmax(m, -1)\n"),
        ("    z = m\n    e = torch.exp(z)\n", "    m = x - 1\n    z = m\n    return torch.softmax(z, -1)\n"),
        ("    e = m.exp()  # large\n", "    m = x - 1\n    e = m.exp()  # large\n    return torch.softmax(m, -1)\n"),
        (
            "    e = m.exp()\n    y = e\n",
            "    m = x - 1\n    e = m.exp()\n    y = e\n    return torch.softmax(m, -1)\n",
        ),
    ],
    ids=["unread", "read by the rewritten text", "with a comment", "read elsewhere"],
)
def test_assignments_that_a_rewriting_leaves_unread_are_deleted(assignment: str, after: str) -> None:
    ((_, text),) = rewritten(SOFTMAX.format(assignment), RULES["SFT003"])
    assert text == f"def forward(x):\n{after}"


@pytest.mark.parametrize("change", ["e[0] = 1", "e.clamp_(max=9)", "x[0] = 1"])
def test_a_value_that_is_changed_in_place_does_not_stand_for_its_variable(change: str) -> None:
    text = f"def forward(x):\n    e = torch.exp(x)\n    {change}\n    return torch.log(e.sum(-1))\n"
    assert rewritten(text, RULES["RED005"]) == []


def test_an_expression_over_several_lines_stays_python() -> None:
    text = "def forward(x):\n    return 1 - (torch.sum(x\n        .abs(), -1) / 64)\n"
    found = [after for _, after in rewritten(text, RULES["RED001"])]
    assert found
    for after in found:
        ast.parse(after)


def test_formatted_strings_stay_as_they_are() -> None:
    text = 'def forward(x):\n    return f"{torch.exp(x).sum(-1).log()}"\n'
    assert rewritten(text, RULES["RED005"]) == []


def test_an_operand_is_put_in_parentheses() -> None:
    text = "def forward(q, k, b):\n    return b - q @ k / 8.0\n"
    ((_, after),) = rewritten(text, RULES["ATT001"])
    assert after == "def forward(q, k, b):\n    return b - ((q / 8.0) @ k)\n"


def test_a_text_that_is_no_python_is_refused_with_its_rule() -> None:
    with pytest.raises(ValueError, match="not a Python expression with holes"):
        TypeAdapter(RuleFix).validate_python({"match": ["torch.log({x}"], "replace": ["{x}"]})


def test_a_rewriting_joins_operations_if_one_is_left_of_several() -> None:
    """`x.float().var(...)` is one operation, as autocast's own conversions are none."""
    joining = {rule.code for rule in FIXING if any(fix.joins for fix in rule.fixes)}
    assert {"RED005", "RED004", "RED006", "SFT002", "SFT005", "NRM002"} <= joining
    assert joining.isdisjoint({"ATT001", "CON001", "CON005"})


LINEAR = "torch.nn.functional.linear"
MERGES = [
    ("F.linear(x, w + b @ a, c)", f"{LINEAR}(x, w, c) + {LINEAR}({LINEAR}(x, a), b)"),
    ("F.linear(x, w + b @ a, bias=c)", f"{LINEAR}(x, w, bias=c) + {LINEAR}({LINEAR}(x, a), b)"),
    ("F.linear(x, w + 0.5 * (b @ a))", f"{LINEAR}(x, w) + {LINEAR}({LINEAR}(x, a), (b * 0.5))"),
    ("(w + b @ a) @ x", "w @ x + b @ (a @ x)"),
    ("x @ (torch.matmul(b, a) + w)", "x @ w + (x @ b) @ a"),
    ("x @ (w + b @ a * 2).T", "x @ w.t() + (x @ a.t()) @ (b * 2).t()"),
    ("x @ (w + b @ a).t()", "x @ w.t() + (x @ a.t()) @ b.t()"),
]


@pytest.mark.parametrize(("written", "expected"), MERGES)
def test_a_merged_weight_becomes_two_products(written: str, expected: str) -> None:
    text = f"def forward(x, w, a, b, c):\n    return {written}\n"
    proposer = proposer_of(text)
    function = proposer.source.tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    found = Rewriter(proposer.source, proposer).without_rule(function.body[0])
    after = text.replace(written, expected)
    assert after in [proposer.source.apply(one.edits) for one in found]
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(4, 4, generator=g, dtype=torch.float64) for _ in range(4)]
    space: dict[str, Any] = {"torch": torch, "F": F}
    results = []
    for one in (text, after):
        exec(one, space)
        results.append(space["forward"](*given, torch.ones(4, dtype=torch.float64)))
    assert torch.allclose(*results)


def test_a_merged_weight_that_a_call_multiplies_stays() -> None:
    """The call would run twice."""
    text = "def forward(x, w, a, b):\n    return F.linear(torch.dropout(x, 0.1, True), w + b @ a)\n"
    proposer = proposer_of(text)
    function = proposer.source.tree.body[0]
    assert isinstance(function, ast.FunctionDef)
    assert list(Rewriter(proposer.source, proposer).without_rule(function.body[0])) == []


@pytest.mark.parametrize("rule", FIXING, ids=lambda rule: rule.code)
def test_patterns_and_replacements_are_python(rule: Rule) -> None:
    for fix in rule.fixes:
        for text in (*fix.match, *fix.replace):
            assert pattern_of(text).form.head
