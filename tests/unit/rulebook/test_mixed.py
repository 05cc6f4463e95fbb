"""Mixed dtypes: where an operation raises, which line made the FP32 values, the fix, and what the runs confirm."""

import ast
import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.records import Finding
from auditor.report.annotations import sarif
from auditor.reporters import text
from auditor.rulebook.failures import judge_failures
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.repairs import Conversion, plain_name, repair_of_call, repair_of_module
from tests.support.capturing import captured

RULES = tuple(rule for rule in load_rules() if rule.family in ("dtypes", "runs"))


class Layers(nn.Module):
    """Two layers, and a function between them."""

    def __init__(self, between: Callable[..., Tensor], last: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)
        self.between, self.ends = between, last
        self.table = torch.linspace(-1, 1, 64).view(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.between(self, self.first(x))
        return self.last(y) if self.ends else y


def at(code: Any, text: str) -> str:
    """The only line of a function or class with this text, as `file:line`."""
    lines, first = inspect.getsourcelines(code)
    (index,) = (index for index, line in enumerate(lines) if text in line)
    return f"test_mixed.py:{first + index}"


X = torch.linspace(-1, 1, 2 * 4 * 8).view(2, 4, 8)


def predicted(between: Callable[..., Tensor], last: bool = True) -> list[Finding]:
    toy = captured(Layers(between, last), X)
    return list(classify(toy.capture, toy.facts, RULES))


def where(m: Any, y: Tensor) -> Tensor:
    return torch.where(y > 0, y, torch.zeros(8))


def cat(m: Any, y: Tensor) -> Tensor:
    phase = torch.arange(8).float()
    return torch.cat([y[..., :4], (phase / 8).expand_as(y)[..., 4:]], -1)


def rotary(m: Any, y: Tensor) -> Tensor:
    angles = torch.arange(4)[:, None] / 10000 ** (torch.arange(8) / 8)
    return y * angles.cos()


WINDOW = torch.linspace(0, 1, 8)


def global_window(m: Any, y: Tensor) -> Tensor:
    return y * WINDOW


def from_double(m: Any, y: Tensor) -> Tensor:
    window = torch.from_numpy(np.hanning(8)).float()
    return y * window


def from_numpy(m: Any, y: Tensor) -> Tensor:
    window = torch.from_numpy(np.hanning(8).astype(np.float32))
    return y * window


def from_numbers(m: Any, y: Tensor) -> Tensor:
    window = torch.tensor(np.hanning(8), dtype=torch.float32)
    return y * window


def attribute(m: Any, y: Tensor) -> Tensor:
    return y * m.table[0]


def through_views(m: Any, y: Tensor) -> Tensor:
    grid = torch.linspace(0, 1, 8, dtype=torch.float32)
    return y + grid.view(2, 4).transpose(0, 1).reshape(8).unsqueeze(0)


def pooled(m: Any, y: Tensor) -> Tensor:
    mask = (y > 0).float()
    return (y * mask).cumsum(1) / mask.cumsum(1).clamp(min=1e-9)


def upcast(m: Any, y: Tensor) -> Tensor:
    return F.softmax(y.float(), -1)


def late(m: Any, y: Tensor) -> Tensor:
    window = torch.ones(8)
    z = m.norm(y)
    return z * window


def offsets(length: int) -> Tensor:
    return torch.from_numpy(np.arange(length, dtype=np.float32))


def elsewhere(m: Any, y: Tensor) -> Tensor:
    return y + offsets(8)


def several(m: Any, y: Tensor) -> Tensor:
    mean, scale = torch.zeros(8), torch.ones(8)
    return (y - mean) / scale


def method(m: Any, y: Tensor) -> Tensor:
    share = torch.linspace(0, 1, 32).view(4, 8)
    return torch.einsum("bij,ij->bij", y[:, :4], share)


def two_sums(m: Any, y: Tensor) -> Tensor:
    ramp = torch.linspace(0, 1, 8)
    return ramp + (y.relu() + ramp)


def of_x(m: Any, x: Tensor) -> Tensor:
    ramp = torch.linspace(0, 1, 8)
    return x + ramp


LAST = at(Layers, "return self.last")
CAST_TO_FP32 = "`.to(y.dtype)` instead of the cast to FP32"


@pytest.mark.parametrize(
    ("between", "text", "origin", "fix"),
    [
        (where, "torch.zeros", "`zeros` ({})", "`dtype=y.dtype` at {}"),
        (cat, ".float()", "the cast to FP32 ({})", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
        (rotary, "angles =", "`div` ({})", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
        (from_double, ".float()", "the cast to FP32 ({})", f"{CAST_TO_FP32} at {{}}"),
        (from_numpy, "np.", "the tensor made at {}", "`.to(y.dtype)` at {}"),
        (from_numbers, "np.", "`tensor` ({})", "`dtype=y.dtype` at {}"),
        (through_views, "linspace", "`linspace` ({})", "`dtype=y.dtype` at {}"),
        (pooled, ".float()", "the cast to FP32 ({})", f"{CAST_TO_FP32} at {{}}"),
        # `z` is set after the line; nothing before has the dtype
        (late, "ones(8)", "`ones` ({})", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
        # nothing in the function that makes the values has the dtype
        (elsewhere, "from_numpy", "the tensor made at {}", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
        (several, "mean, scale", "`zeros` ({0}) and `ones` ({0})", "`dtype=y.dtype` at {}"),
        # the sum that meets the values has no name on its left, and the other sum of the line is none of its own
        (two_sums, "linspace", "`linspace` ({})", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
        (of_x, "linspace", "`linspace` ({})", "`dtype=x.dtype` at {}"),
        (upcast, ".float()", "the cast to FP32 ({})", f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"),
    ],
)
def test_the_line_that_made_the_fp32_values_is_named_not_only_the_one_that_raises(
    between: Callable[..., Tensor], text: str, origin: str, fix: str
) -> None:
    (found,) = predicted(between)
    assert (found.rule, found.source) == ("DTY002", LAST)
    line = at(offsets if between is elsewhere else between, text)
    assert found.evidence["fp32_origin"] == origin.format(line)
    assert found.evidence["dtype_fix"] == fix.format(line)
    assert "with cast weights (not under autocast)" in found.message


def test_a_list_of_tensors_is_converted_by_the_text_of_its_item() -> None:
    found = predicted(method, last=False)[0]
    assert (found.rule, found.source) == ("DTY002", at(method, "einsum"))
    assert found.evidence["dtype_fix"] == f"`dtype=y.dtype` at {at(method, 'linspace')}"
    assert "where it is created" in found.advice
    order = ("equation", "tensors[0]", "tensors[1]")
    conversion = Conversion(("tensors[0]",), "tensors[1]", order)
    for call in ("torch.einsum('bdn,bn->bd', {}, c[:, t])", "torch.einsum('bdn,bn->bd', [{}, c[:, t]])"):
        assert repair_of_call(call.format("h"), "einsum", conversion) == call.format("h.to(c[:, t].dtype)")


def shifted(m: Any, y: Tensor) -> Tensor:
    mean = torch.tensor([0.5] * 8, dtype=torch.float32)
    scale = torch.tensor([2.0] * 8, dtype=torch.float32)
    z = m.norm.weight + m.first((y - mean) / scale)
    weight = torch.from_numpy(np.ones(8, dtype=np.float32))
    return z * weight


def test_an_operation_that_reads_a_further_fp32_tensor_has_a_finding_with_its_line() -> None:
    toy = captured(Layers(shifted), X)
    found = classify(toy.capture, toy.facts, RULES)
    said = f"mixed ({at(shifted, 'z =')})"
    judged = judge_failures(found, {("cast", "fp16"): said}, toy.capture, RULES)
    assert [one.source for one in judged] == [at(shifted, "z ="), LAST]
    assert at(shifted, "np.ones") in judged[1].message


class Called(nn.Module):
    """Modules whose FP32 argument is not the first, or that have no attribute `weight`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(8, 8)
        self.bag, self.rnn = nn.EmbeddingBag(8, 8, mode="sum"), nn.GRU(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if self.kind == "bag":
            counts = torch.ones(2, 4, dtype=torch.float32)
            return self.bag(h.argmax(-1), per_sample_weights=counts)
        if self.kind == "rnn":
            state = torch.zeros(1, 2, 8)
            return self.rnn(h, state)[0]
        wide = h.float()
        return self.attention(wide, wide, wide)[0]


@pytest.mark.parametrize(
    ("kind", "text", "fix"),
    [
        ("bag", "counts =", "`dtype=self.bag.weight.dtype` at {}"),
        ("rnn", "state =", "`dtype=h.dtype` at {}"),
        ("attention", "self.attention(", "convert the input with `.to(weight.dtype)`"),
    ],
)
def test_the_fix_converts_the_fp32_argument_of_a_module_and_names_what_the_module_has(
    kind: str, text: str, fix: str
) -> None:
    toy = captured(Called(kind).eval(), X)
    found = next(one for one in classify(toy.capture, toy.facts, RULES) if one.owner)
    assert str(found.evidence["dtype_fix"]).startswith(fix.format(at(Called, text)))


def test_a_global_tensor_is_named_with_the_line_that_sets_it() -> None:
    (found,) = predicted(global_window)
    lines = inspect.getsource(inspect.getmodule(at)).splitlines()  # type: ignore[arg-type]
    line = f"test_mixed.py:{lines.index('WINDOW = torch.linspace(0, 1, 8)') + 1}"
    assert found.evidence["fp32_origin"] == f"`WINDOW` ({line})"
    assert found.evidence["dtype_fix"] == f"`self.last(y.to(self.last.weight.dtype))` at {LAST}"


def test_a_tensor_in_a_list_is_named_by_the_list() -> None:
    model = Layers(lambda m, y: F.linear(y, m.tables[0]))
    model.tables = [model.table]
    del model.table
    toy = captured(model, X)
    found = classify(toy.capture, toy.facts, RULES)[0]
    assert found.evidence["fp32_origin"].startswith("the attribute `tables`")
    assert found.evidence["dtype_fix"].startswith("`self.register_buffer` for each tensor of `tables`")


def test_a_plain_attribute_is_named_with_the_line_that_sets_it() -> None:
    (found,) = predicted(attribute)
    line = at(Layers, "self.table =")
    assert found.evidence["fp32_origin"] == f"the attribute `table` ({line}), which is no buffer"
    assert found.evidence["dtype_fix"].endswith(f", which model.half() converts, at {line}")


def written(m: Any, y: Tensor) -> Tensor:
    result = torch.zeros(2, 4, 8)
    result[:, torch.arange(4)] = y
    return result


def scattered(m: Any, y: Tensor) -> Tensor:
    return torch.zeros(2, 4, 8).scatter_add(1, torch.zeros(2, 4, 8, dtype=torch.long), y)


def copied(m: Any, y: Tensor) -> Tensor:
    return torch.zeros(2, 4, 8).index_copy_(1, torch.arange(4), y)


def masked(m: Any, y: Tensor) -> Tensor:
    values = m.norm(y)
    return values.masked_scatter(torch.ones(2, 4, 8, dtype=torch.bool), y)


def interpolated(m: Any, y: Tensor) -> Tensor:
    return torch.lerp(y, -y, torch.linspace(0, 1, 8))


def attending(m: Any, y: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(y, y, y, attn_mask=torch.zeros(4, 4))


def batched(m: Any, y: Tensor) -> Tensor:
    return torch.baddbmm(torch.zeros(2, 4, 4), y, y.transpose(1, 2))


def contracted(m: Any, y: Tensor) -> Tensor:
    return torch.einsum("bij,jk->bik", y, torch.linspace(0, 1, 64).view(8, 8))


def functional(m: Any, y: Tensor) -> Tensor:
    return F.linear(y, m.table)


def normalized(m: Any, y: Tensor) -> Tensor:
    return m.norm(y.float())


CAST, BOTH, AUTOCAST = "cast", "autocast cast", "autocast"


@pytest.mark.parametrize(
    ("between", "code", "strategies"),
    [
        (written, "DTY001", BOTH),
        (scattered, "DTY001", CAST),  # autocast promotes
        (copied, "DTY001", BOTH),
        (masked, "DTY001", AUTOCAST),
        (interpolated, "DTY005", BOTH),
        (attending, "DTY004", CAST),
        (batched, "DTY002", CAST),
        (contracted, "DTY002", CAST),
        (functional, "DTY002", CAST),
        (normalized, "DTY003", CAST),
    ],
)
def test_a_refused_mixture_is_an_error_in_the_runs_that_raised(
    between: Callable[..., Tensor], code: str, strategies: str
) -> None:
    audit = auditor.audit(Layers(between, last=False), (X,), formats=("fp16",))
    (found,) = (finding for finding in audit.findings if finding.rule.startswith(("DTY", "RUN")))
    assert (found.rule, found.severity, found.agrees) == (code, "error", True)
    assert found.met == {"fp16": tuple(strategies.split())}
    raised = {name.partition("_")[0] for name, ran in audit.baselines.items() if ran.failure}
    assert raised == {*strategies.split()}
    assert all(ran.failure is None or ran.failure.endswith(f"({found.source})") for ran in audit.baselines.values())


@pytest.mark.parametrize(
    "between", [lambda m, y: m.norm(F.gelu(y)), lambda m, y: y.float().to(y.dtype), lambda m, y: y * 2.0]
)
def test_a_model_that_runs_has_no_such_finding(between: Callable[..., Tensor]) -> None:
    audit = auditor.audit(Layers(between), (X,), formats=("fp16",))
    assert [finding.rule for finding in audit.findings if finding.rule.startswith(("DTY", "RUN"))] == []
    assert "fails" not in text(audit).lower()


def test_the_first_screen_says_what_raises_where_and_how_to_fix_it() -> None:
    audit = auditor.audit(Layers(written), (X,), formats=("fp16", "bf16"))
    shown = text(audit, width=400)
    assert "othing to fix" not in shown
    said = "FP16 and BF16 under autocast and with cast weights, without a plan: index_put_ has inputs of different dtypes, float16 and float32"
    line, made = at(written, "result[:"), at(written, "torch.zeros")
    assert f"{said} ({line})" in shown
    assert f"The FP32 values come from `zeros` ({made}). Fix: `dtype=y.dtype` at {made}" in shown
    results = json.loads(sarif(audit))["runs"][0]["results"]
    (result,) = (result for result in results if result["ruleId"] == "DTY001")
    assert result["level"] == "error"
    assert result["locations"][0]["physicalLocation"]["region"]["startLine"] == int(line.partition(":")[2])


def refusing(m: Any, y: Tensor) -> Tensor:
    if y.dtype == torch.bfloat16:
        raise ValueError("no bfloat16 here")
    return y


def test_a_run_that_raises_anything_else_is_a_finding_with_the_message() -> None:
    audit = auditor.audit(Layers(refusing), (X,), formats=("bf16",), strategies=("cast",))
    (found,) = (finding for finding in audit.findings if finding.rule == "RUN001")
    assert found.source == at(refusing, "raise")
    assert found.severity == "error"
    assert found.message.endswith(f"in BF16 with cast weights: ValueError: no bfloat16 here ({found.source})")


def test_a_run_that_raises_only_in_another_format_than_the_plans_is_a_warning() -> None:
    audit = auditor.audit(Layers(refusing), (X,), formats=("fp16", "bf16"))
    (found,) = (finding for finding in audit.findings if finding.rule == "RUN001")
    assert audit.recommended is not None
    assert audit.recommended.endswith("fp16")
    assert (found.severity, found.met) == ("warning", {"bf16": ("autocast", "cast")})


def twice(m: Any, y: Tensor) -> Tensor:
    written = torch.zeros(2, 4, 8).index_copy(1, torch.arange(4), y)
    mixed = torch.lerp(y, -y, torch.linspace(0, 1, 8))
    return written.to(y.dtype) + mixed


def test_what_an_earlier_error_hides_is_a_warning_and_what_a_run_passed_is_dropped() -> None:
    toy = captured(Layers(twice, last=False), X)
    found = classify(toy.capture, toy.facts, RULES)
    lines = at(twice, "index_copy"), at(twice, "lerp")
    assert [(one.rule, one.source) for one in found] == [("DTY001", lines[0]), ("DTY005", lines[1])]
    first, second = (judge_failures(found, {("cast", "fp16"): f"mixed ({line})"}, toy.capture, RULES) for line in lines)
    assert [(one.rule, one.agrees, one.severity) for one in first] == [
        ("DTY001", True, "error"),
        ("DTY005", None, "warning"),
    ]
    assert [(one.rule, one.agrees, one.severity) for one in second] == [("DTY005", True, "error")]
    assert "in FP16 with cast weights" in second[0].message
    assert judge_failures(found, {}, toy.capture, RULES) == ()


FILL = Conversion(("source",), "self", ("self", "mask", "source"))
PRODUCT = Conversion(("other",), "self", ("self", "other"))


@pytest.mark.parametrize(
    ("code", "function", "conversion", "repaired"),
    [
        ("x = x.masked_scatter(m, y)", "masked_scatter", FILL, "x.masked_scatter(m, y.to(x.dtype))"),
        ("x.masked_scatter_(m, y + 1)", "masked_scatter", FILL, "x.masked_scatter_(m, (y + 1).to(x.dtype))"),
        ("f(torch.masked_scatter(x, m, source=y))", "masked_scatter", FILL, "torch.masked_scatter(x, m, source=y.to(x.dtype))"),
        ("x.masked_scatter(m, y.to(x.device))", "masked_scatter", FILL, "x.masked_scatter(m, y.to(x.device, x.dtype))"),
        ("return a @ b", "matmul", PRODUCT, "a @ b.to(a.dtype)"),
        ("if torch.matmul(a, b).any():", "matmul", PRODUCT, "torch.matmul(a, b.to(a.dtype))"),
        ("return a * 2 @ b", "matmul", PRODUCT, "a * 2 @ b.to((a * 2).dtype)"),
        ("x.view(4).masked_scatter(m, y)", "masked_scatter", FILL, "x.view(4).masked_scatter(m, y.to(x.view(4).dtype))"),
        ("self.embed(i).masked_scatter(m, y)", "masked_scatter", FILL, None),  # would embed twice
        ("x.masked_scatter(", "masked_scatter", FILL, None),
        ("y = g(x)", "matmul", PRODUCT, None),
        (None, "matmul", PRODUCT, None),
    ],
)  # fmt: skip
def test_the_repaired_call(code: str | None, function: str, conversion: Conversion, repaired: str | None) -> None:
    assert repair_of_call(code, function, conversion) == repaired


@pytest.mark.parametrize(
    ("expression", "name"),
    [
        ("x", "x"),
        ("self.mask", "self.mask"),
        ("x[0]", "x[0]"),
        ("y[:, 2:].transpose(1, 2)", "y"),
        ("0.1 * flow", "flow"),
        ("torch.reshape(x, (2, 4))", "x"),
        ("x + y", None),  # one of them may be a number
        ("f(x)", None),
        ("batch['x']", None),
        ("2.0", None),
    ],
)
def test_the_name_of_a_tensor_with_the_dtype_of_an_expression(expression: str, name: str | None) -> None:
    assert plain_name(ast.parse(expression, mode="eval").body) == name


def test_the_repaired_call_of_a_module() -> None:
    assert (
        repair_of_module("return self.head(self.pool(x)) + 1", "head")
        == "self.head(self.pool(x).to(self.head.weight.dtype))"
    )
    assert repair_of_module("for layer in self.layers: x = layer(x)", "0") is None
