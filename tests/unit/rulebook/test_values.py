"""Numbers a node meets: literals, guards, weights, and magnitudes measured in FP32."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.measure.calibrate import calibrate
from auditor.records import Capture, Contribution, Magnitudes, Node, NodeError, Verdict
from auditor.rulebook.values import literal_results
from auditor.rulebook.verdicts import SENSITIVE_SHARE, Judgement, judge, verdict_of
from tests.support.capturing import captured, facts_of
from tests.support.replaying import Model
from tests.support.subjects import FORMATS, measurement_of, normal, only, seeded, subject_of


def test_constants_are_literals_not_axes_or_exponents_of_ten() -> None:
    facts = facts_of(lambda x: (x.clamp(-3, 0.25) + 1e-6).masked_fill(x > 1, -1e9).sum(-1), torch.ones(2, 2)).facts
    assert facts["clamp"].constants == (-3.0, 0.25)
    assert (facts["clamp"].constant_max_abs, facts["clamp"].constant_min_abs) == (3.0, 0.25)
    assert facts["clamp"].constant_gap_to_one == 0.75
    assert facts["clamp"].constant_largest == -3.0
    assert facts["masked_fill"].constants == (-1e9,)
    assert facts["sum_1"].constants == ()
    assert (facts["add"].eps, facts["clamp"].eps) == (1e-6, None)


def test_ranges_of_activations_weights_and_buffers() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[4.0, 0.0], [0.5, -8.0]]))
    model[1].running_var.copy_(torch.tensor([100.0, 0.25]))
    facts = captured(model, torch.tensor([[2.0, 1.0]])).facts
    linear, norm = facts["linear"], facts["batch_norm"]
    assert linear.buffer_max_abs is None
    assert linear.input_max_abs == 2.0
    assert linear.output_max_abs == 8.0
    assert linear.headroom_bits["fp16"] == pytest.approx(math.log2(65504 / 8))
    assert linear.headroom_bits["bf16"] == pytest.approx(math.log2(torch.finfo(torch.bfloat16).max / 8))
    assert norm.buffer_max_abs == 100.0
    assert norm.input_max_abs == 8.0


def test_shapes_of_arithmetic() -> None:
    facts = facts_of(
        lambda x: (
            *(x**2, x * x, x**3, x[:, :1] * x[:, 1:]),
            *(x - x.mean(), x - x.exp().mean(), x - x.max(-1, keepdim=True)[0]),
        ),
        torch.ones(2, 2),
    ).facts
    assert [name for name, fact in facts.items() if fact.squares] == ["pow_1", "mul"]
    assert [name for name, fact in facts.items() if fact.centres] == ["sub"]
    assert [name for name, fact in facts.items() if fact.shifts_by_max] == ["sub_2"]


WORKED_OUT = ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")
"""Formats of the table below; what others make of its literals is not looked at."""


@pytest.mark.parametrize(
    ("literal", "too_large", "one"),
    [
        (65504.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # FP16's largest
        (65519.0, ("fp8_e4m3", "fp8_e5m2"), ()),  # rounds down to it; 65520 does not
        (65520.0, ("fp16", "fp8_e4m3", "fp8_e5m2"), ()),
        (3.4e38, ("bf16", "fp16", "fp8_e4m3", "fp8_e5m2"), ()),  # BF16 ends at 3.3895e38, half a spacing on 3.396e38
        (449.0, ("fp8_e4m3",), ()),  # ends at 448, has no infinity
        (1 - 2**-11, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),  # FP16's and TF32's neighbor of 1
        (1 - 1e-4, (), ("tf32", "bf16", "fp16", "fp8_e4m3", "fp8_e5m2")),
        (1 + 2**-10, (), ("bf16", "fp8_e4m3", "fp8_e5m2")),
        (0.5, (), ()),
    ],
)
def test_literals_against_the_formats(literal: float, too_large: tuple[str, ...], one: tuple[str, ...]) -> None:
    facts = facts_of(lambda x: x * literal, torch.ones(2)).facts["mul"]
    found = (facts.constants_beyond, facts.constants_as_one)
    assert tuple(tuple(fmt for fmt in fmts if fmt in WORKED_OUT) for fmts in found) == (too_large, one)


def test_whole_numbers_come_from_integers() -> None:
    def function(x: Tensor, ids: Tensor) -> list[Tensor]:
        return [
            x + ids.to(x.dtype).view(2, 1),
            x * torch.arange(2, dtype=x.dtype),
            x * torch.arange(0, 1, 0.5, dtype=x.dtype),
            x * (ids > 0).to(x.dtype),
            (ids * 2).to(x.dtype) - 1,
        ]

    facts = facts_of(function, torch.ones(2, 2), torch.tensor([1, 2])).facts
    assert [name for name, fact in facts.items() if fact.whole_numbers] == ["to", "arange", "to_2"]
    assert [name for name, fact in facts.items() if fact.reads_whole_numbers] == ["add", "mul", "sub"]
    assert (facts["to"].input_dtype, facts["to"].dtype, facts["arange"].input_dtype) == ("int64", "float32", None)


def test_what_a_sine_is_taken_of_is_a_phase() -> None:
    def function(x: Tensor, f: Tensor) -> list[Tensor]:
        return [torch.cat([x.exp() * f.view(2) + 1, x]).sin().tanh(), (x - f).abs().sin(), x.neg().cos().sin()]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    assert [name for name, fact in facts.items() if fact.in_a_phase] == [
        *("exp", "view", "mul", "add", "cat"),
        *("abs_1", "neg", "cos"),
    ]


def test_bits_that_cancel() -> None:
    facts = facts_of(lambda x, y: (x - y, x + y, x - 1000.0), torch.full((2,), 1024.0), torch.full((2,), 1022.0)).facts
    assert facts["sub"].cancelled_bits == 9  # 1024 / 2
    assert facts["add"].cancelled_bits == pytest.approx(-1, abs=0.01)
    assert facts["sub_1"].cancelled_bits is None


def test_the_smallest_divisor() -> None:
    toy = facts_of(lambda x, y: (x / y.view(2), y.log(), y / 4.0, x * y), torch.ones(2), torch.tensor([0.0, 1e-9]))
    facts = toy.facts
    assert facts["div"].divisor_min_abs == facts["log"].divisor_min_abs == pytest.approx(1e-9)
    assert facts["div_1"].divisor_min_abs is facts["mul"].divisor_min_abs is None


def test_a_run_of_additions_is_counted_at_its_end() -> None:
    def function(x: Tensor, y: Tensor) -> list[Tensor]:
        total = x
        for _ in range(3):
            total = 0.5 * total + y.tanh()
        return [(total - x).exp() + y, x + y]

    facts = facts_of(function, torch.ones(2), torch.ones(2)).facts
    # a difference is not part of a run, and exp starts afresh
    runs = {name: fact.additions for name, fact in facts.items() if fact.additions}
    assert runs == {"add_2": 3, "add_3": 1, "add_4": 1}


def test_updates_below_half_a_spacing_add_up() -> None:
    def function(x: Tensor) -> Tensor:
        total = x
        for _ in range(4):
            total = total + 0.003 * x
        return total + 0.5

    facts = facts_of(function, torch.tensor([1.0, 0.5])).facts
    # at 1 BF16 numbers are 1/128 apart, FP16 numbers 1/1024: 0.003 is below 1/256, and above 1/2048
    assert facts["add_3"].additions == 4
    assert facts["add_3"].absorbed["bf16"] == pytest.approx(4 * 0.003 * 128)
    assert facts["add_3"].absorbed["fp16"] == 0
    low = torch.tensor([1.0, 0.5]).bfloat16()
    total = low
    for _ in range(4):
        total = total + 0.003 * low
    assert total[0] == 1  # where it is largest, nothing arrived


def masked() -> nn.Module:
    """A mask in each of the ways that people write one. The product is 1e4 at least: larger than all else that is computed."""

    def forward(m: Any, x: Tensor, keep: Tensor) -> Tensor:
        scores = x @ m.large
        filled = scores.masked_fill(~keep, -1e9) / 8
        chosen = torch.where(keep, scores, torch.tensor(-1e8))
        told = (1.0 - keep.float()) * -1e7
        limit = torch.full((4, 4), torch.finfo(x.dtype).min)
        total = filled.softmax(-1) + chosen.softmax(-1) + (scores + told).softmax(-1) + (scores + m.added).softmax(-1)
        return total + (scores + limit.triu(1)).softmax(-1) + scores.clamp(max=2e4)

    return Model(forward, added=torch.full((4, 4), -5e6).triu(1), large=nn.Parameter(torch.full((4, 4), 5e3)))


def test_masks_are_written_and_what_is_computed_is_not() -> None:
    keep = torch.ones(4, 4).tril().bool()
    measured = measurement_of(masked(), normal(4, 4).abs() + 1, keep)
    found = literal_results(measured.capture, measured.ranges)
    ops = {name: measured.capture.nodes[name].op.split(".")[1] for name in found}
    assert sorted(ops.values()) == sorted(
        ["masked_fill", "div", "where", "mul", "add", "add", "add", "full", "triu"]
    ), ops
    computed = {node.op.split(".")[1] for name, node in measured.capture.nodes.items() if name not in found}
    assert {"matmul", "softmax", "clamp"} <= computed


# Verdicts from hand-made errors, one per line of the table; NaN fails every threshold.

BOTH = ("autocast", "cast")
SPAN = Magnitudes(1e6, 1.0, 0, {})


def node(dtype: str = "float32", floating: bool = True) -> Node:
    return Node("mul", "aten.mul.Tensor", "", "", None, None, None, (), (1,), dtype, floating)


def verdict(
    isolated: float, error: NodeError | None = None, exposed: tuple[str, ...] = BOTH, dtype: str = "float32"
) -> Verdict:
    contribution = Contribution(isolated, 0.0, 0.0)
    return verdict_of(node(dtype), error or NodeError(local_error=1e-3), contribution, SPAN, exposed, "fp16", 0.01)


@pytest.mark.parametrize(
    ("isolated", "expected"),
    [
        (0.0, "safe"),
        (0.0025, "safe"),  # a quarter of 0.01
        (0.00251, "sensitive"),
        (0.01, "sensitive"),
        (0.010001, "unsafe"),
        (math.inf, "unsafe"),
        (math.nan, "unsafe"),
    ],
)
def test_thresholds(isolated: float, expected: str) -> None:
    assert SENSITIVE_SHARE == 0.25
    assert verdict(isolated).verdict == expected


def test_what_nothing_lowers_is_safe_as_written() -> None:
    found = verdict(math.inf, NodeError(unsupported="no kernel"), exposed=())
    assert found.verdict == "safe"
    assert "no strategy runs the operation on low-precision values" in found.reason


def test_what_cannot_run_is_unsafe_whatever_it_contributes() -> None:
    found = verdict(0.0, NodeError(unsupported="fft has no float16 kernel"), exposed=("cast",))
    assert (found.verdict, found.reason) == ("unsafe", "fft has no float16 kernel")


def test_untested() -> None:
    assert verdict_of(node(), None, Contribution(0, 0, 0), SPAN, BOTH, "fp16", 0.01).verdict == "untested"
    assert verdict_of(node(), NodeError(), None, SPAN, BOTH, "fp16", 0.01).verdict == "untested"
    double = verdict(0.0, dtype="float64")
    assert double.verdict == "untested"
    assert "float64" in double.reason


@pytest.mark.parametrize(
    ("error", "isolated", "words", "limit"),
    [
        (
            NodeError(overflow=3, cause="overflow"),
            math.inf,
            ["1e+06 overflows (the largest number is 65504)", "Inf or NaN"],
            "range",
        ),
        (NodeError(nan=1, cause="nan"), math.inf, ["nan", "Inf or NaN"], "range"),
        (NodeError(underflow=1.0, cause="underflow"), 0.5, ["underflow", "0.5", "budget of 0.01"], "range"),
        (NodeError(local_error=0.1, cause="cancellation"), 0.5, ["cancellation"], "precision"),
        (NodeError(local_error=0.1, cause="rounding"), 0.5, ["rounding"], "precision"),
        (NodeError(disagreement=0.25, cause="discrete"), 0.5, ["25.00%", "flip"], "precision"),
    ],
)
def test_reasons_name_the_cause_and_the_limit(error: NodeError, isolated: float, words: list[str], limit: str) -> None:
    found = verdict(isolated, error)
    assert found.verdict == "unsafe"
    assert [word for word in words if word not in found.reason] == []
    assert found.limited_by == limit


ALONE = "if it alone runs in low precision"
TOGETHER = "if it and 3 others run in low precision"
OVER = "above the budget of 0.01 (cause: rounding)"
BUDGETS = NodeError(local_error=0.1, cause="rounding")


@pytest.mark.parametrize(
    ("contribution", "verdict", "reason"),
    [
        (Contribution(0.001, 0, 0), "safe", f"it is predicted to change the outputs by 0.001 {ALONE}"),
        (Contribution(0.001, 0, 0, "re-run"), "safe", f"it changes the outputs by 0.001 {ALONE}"),
        (Contribution(0.001, 0, 0, "group", 4), "safe", f"it changes the outputs by 0.001 {TOGETHER}"),
        (
            Contribution(0.005, 0, 0, "group", 2),
            "sensitive",
            "it uses 50% of the error budget if it and 1 other run in low precision",
        ),
        (Contribution(0.02, 0, 0), "unsafe", f"it is predicted to change the outputs by 0.02 {ALONE}, {OVER}"),
        (Contribution(0.01004, 0, 0, "re-run"), "unsafe", f"it changes the outputs by 0.01004 {ALONE}, {OVER}"),
        (
            Contribution(0.0, 0, 0, "not-run"),
            "untested",
            "only a run can measure the effect on the outputs, and the audit's limited number of runs did not include this operation",
        ),
    ],
)
def test_a_run_and_a_prediction_have_different_words(contribution: Contribution, verdict: str, reason: str) -> None:
    found = verdict_of(node(), BUDGETS, contribution, SPAN, BOTH, "fp16", 0.01)
    assert (found.verdict, found.reason) == (verdict, reason)


def plain() -> nn.Module:
    """A product, which both strategies lower, and a softmax, which autocast keeps in FP32."""
    return Model(lambda m, x: m.lin(x).softmax(-1), lin=nn.Linear(4, 4))


def judged(model: nn.Module, *inputs: Tensor) -> tuple[Capture, Judgement]:
    subject = subject_of(model, *inputs)
    traced = capture(subject, FORMATS)
    return traced, judge(traced, calibrate(traced, subject, FORMATS, 0), FORMATS, 0.01)


def test_exposure_under_the_two_strategies() -> None:
    traced, found = judged(seeded(plain), normal(2, 4))
    linear, softmax = only(traced, "linear").name, only(traced, "softmax").name
    for fmt in FORMATS:
        assert set(found.exposed[linear][fmt]) == {"autocast", "cast"}
        assert set(found.exposed[softmax][fmt]) == {"cast"}
    assert set(found.verdicts) == set(traced.nodes)
    assert all(set(formats) == set(FORMATS) for formats in found.verdicts.values())


@pytest.mark.parametrize(
    ("isolated", "criterion", "decided_by", "together", "words"),
    [
        (0.34, "boxes: max_abs <= 0.5", "first-order", 1, f"it is predicted to use 34% of what 'boxes: max_abs <= 0.5' allows {ALONE}"),
        (3.4, "boxes: iou >= 0.9", "re-run", 1, f"it uses 340% of what 'boxes: iou >= 0.9' allows {ALONE}"),
        (1.001, "boxes: iou >= 0.9", "re-run", 1, f"it uses just over 100% of what 'boxes: iou >= 0.9' allows {ALONE}"),
        (512.3, "boxes: iou >= 0.9", "re-run", 1, f"it uses 512 times what 'boxes: iou >= 0.9' allows {ALONE}"),
        (0.2, "boxes: iou >= 0.9", "group", 4, f"it uses 20% of what 'boxes: iou >= 0.9' allows {TOGETHER}"),
        (2.25, "mask: flips <= 0", "re-run", 1, f"it violates 'mask: flips <= 0' {ALONE}"),
        (2.25, "y: top1 >= 1", "first-order", 1, f"it is predicted to violate 'y: top1 >= 1' {ALONE}"),
        (0.0, "mask: flips <= 0", "re-run", 1, f"it meets 'mask: flips <= 0' {ALONE}"),
        (math.inf, "boxes: iou >= 0.9", "re-run", 1, "the outputs turn Inf or NaN"),
    ],
)  # fmt: skip
def test_with_criteria_the_words_say_of_which_it_takes_how_much(
    isolated: float, criterion: str, decided_by: str, together: int, words: str
) -> None:
    found = Contribution(isolated, 0.0, 0.0, decided_by, together, criterion)
    said = verdict_of(node(), NodeError(local_error=1e-3), found, SPAN, BOTH, "fp16", 1.0)
    assert said.reason == words
    assert said.verdict == ("unsafe" if isolated > 1 else "sensitive" if isolated > 0.25 else "safe")
