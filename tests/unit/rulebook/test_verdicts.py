"""Verdicts from hand-made errors, one per line of the table; NaN fails every threshold."""

from __future__ import annotations

import math

import pytest
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.measure.calibrate import calibrate
from auditor.records import Capture, Contribution, Magnitudes, Node, NodeError, Verdict
from auditor.rulebook.verdicts import SENSITIVE_SHARE, Judgement, judge, verdict_of
from tests.support.subjects import FORMATS, normal, only, seeded, subject_of

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
    assert "author keeps it in FP32" in found.reason


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
            ["overflow", "1e+06 is beyond 6.55e+04", "non-finite"],
            "range",
        ),
        (NodeError(nan=1, cause="nan"), math.inf, ["nan", "non-finite"], "range"),
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


BUDGETS = NodeError(local_error=0.1, cause="rounding")


@pytest.mark.parametrize(
    ("contribution", "verdict", "reason"),
    [
        (Contribution(0.001, 0, 0), "safe", "alone it is predicted to move the outputs by 0.001"),
        (Contribution(0.001, 0, 0, "re-run"), "safe", "alone it moves the outputs by 0.001"),
        (Contribution(0.001, 0, 0, "group", 4), "safe", "low together with 3 others it moves the outputs by 0.001"),
        (Contribution(0.005, 0, 0), "sensitive", "alone it is predicted to take 50% of the error budget"),
        (Contribution(0.005, 0, 0, "re-run"), "sensitive", "alone it takes 50% of the error budget"),
        (
            Contribution(0.005, 0, 0, "group", 2),
            "sensitive",
            "low together with 1 other it takes 50% of the error budget",
        ),
        (
            Contribution(0.02, 0, 0),
            "unsafe",
            "rounding: alone it is predicted to move the outputs by 0.02, over the budget of 0.01",
        ),
        (
            Contribution(0.02, 0, 0, "re-run"),
            "unsafe",
            "rounding: alone it moves the outputs by 0.02, over the budget of 0.01",
        ),
        (
            Contribution(0.01004, 0, 0, "re-run"),
            "unsafe",
            "rounding: alone it moves the outputs by 0.01004, over the budget of 0.01",
        ),
        (
            Contribution(0.0, 0, 0, "not-run"),
            "untested",
            "only a run can tell what it does to the outputs, and the runs that an audit affords did not get to it",
        ),
    ],
)
def test_a_run_and_a_prediction_have_different_words(contribution: Contribution, verdict: str, reason: str) -> None:
    found = verdict_of(node(), BUDGETS, contribution, SPAN, BOTH, "fp16", 0.01)
    assert (found.verdict, found.reason) == (verdict, reason)


class Plain(nn.Module):
    """A product, which both strategies lower, and a softmax, which autocast keeps in FP32."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.lin(x).softmax(-1)


def judged(model: nn.Module, *inputs: Tensor) -> tuple[Capture, Judgement]:
    subject = subject_of(model, *inputs)
    traced = capture(subject, FORMATS)
    return traced, judge(traced, calibrate(traced, subject, FORMATS, 0, lambda name: None), FORMATS, 0.01)


def test_exposure_under_the_two_strategies() -> None:
    traced, found = judged(seeded(Plain), normal(2, 4))
    linear, softmax = only(traced, "linear").name, only(traced, "softmax").name
    for fmt in FORMATS:
        assert set(found.exposed[linear][fmt]) == {"autocast", "cast"}
        assert set(found.exposed[softmax][fmt]) == {"cast"}
    assert set(found.verdicts) == set(traced.nodes)
    assert all(set(formats) == set(FORMATS) for formats in found.verdicts.values())


@pytest.mark.parametrize(
    ("isolated", "criterion", "decided_by", "together", "words"),
    [
        (0.34, "boxes: max_abs <= 0.5", "first-order", 1, "alone it is predicted to take 34% of what 'boxes: max_abs <= 0.5' allows"),
        (0.0123, "boxes: max_abs <= 0.5", "re-run", 1, "alone it takes 1.2% of what 'boxes: max_abs <= 0.5' allows"),
        (3.4, "boxes: iou >= 0.9", "re-run", 1, "alone it takes 340% of what 'boxes: iou >= 0.9' allows"),
        (1.001, "boxes: iou >= 0.9", "re-run", 1, "alone it takes just over 100% of what 'boxes: iou >= 0.9' allows"),
        (512.3, "boxes: iou >= 0.9", "re-run", 1, "alone it takes 512 times what 'boxes: iou >= 0.9' allows"),
        (0.2, "boxes: iou >= 0.9", "group", 4, "low together with 3 others it takes 20% of what 'boxes: iou >= 0.9' allows"),
        (2.25, "mask: flips <= 0", "re-run", 1, "alone it breaks 'mask: flips <= 0'"),
        (2.25, "y: top1 >= 1", "first-order", 1, "alone it is predicted to break 'y: top1 >= 1'"),
        (0.0, "mask: flips <= 0", "re-run", 1, "alone it holds 'mask: flips <= 0'"),
        (0.5, "x: psnr >= 1", "re-run", 1, "alone it takes 50% of what 'x: psnr >= 1' allows"),
        (math.inf, "boxes: iou >= 0.9", "re-run", 1, "the outputs turn non-finite"),
    ],
)  # fmt: skip
def test_with_criteria_the_words_say_of_which_it_takes_how_much(
    isolated: float, criterion: str, decided_by: str, together: int, words: str
) -> None:
    found = Contribution(isolated, 0.0, 0.0, decided_by, together, criterion)
    said = verdict_of(node(), NodeError(local_error=1e-3), found, SPAN, BOTH, "fp16", 1.0)
    assert said.reason == words
    assert said.verdict == ("unsafe" if isolated > 1 else "sensitive" if isolated > 0.25 else "safe")
