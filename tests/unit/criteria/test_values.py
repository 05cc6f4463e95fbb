"""What each kind makes of two tensors, by hand: values, shares, quadratic forms, and all criteria at once."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.criteria import Criterion, criteria_of
from auditor.criteria.criterion import KINDS, Kind, floor_of
from auditor.criteria.margins import FORMS, count_replaced, form_of, margins_of
from auditor.criteria.measure import criteria_for
from auditor.criteria.values import VALUES, unfit, value
from auditor.errors import AuditorError
from auditor.isolation.outputs import NamedTensors
from tests.support.refusing import refused
from tests.support.subjects import normal
from tests.support.thinned import thinned

INF = math.inf


def of(text: str, reference: list | Tensor, candidate: list | Tensor) -> float:
    (one,) = criteria_of(f"output: {text}")
    kind = torch.float64 if torch.as_tensor(reference).is_floating_point() else None
    return value(one, torch.as_tensor(reference, dtype=kind), torch.as_tensor(candidate, dtype=kind))


def log(*shares: float) -> list[float]:
    return [math.log(share) for share in shares]


@pytest.mark.parametrize(
    ("text", "reference", "candidate", "found"),
    [
        ("rel_l2 <= 1", [3.0, 4.0], [3.0, 4.5], 0.1),
        ("max_abs <= 1", [3.0, 4.0], [3.25, 3.5], 0.5),
        ("mean_abs <= 1", [3.0, 4.0], [3.25, 3.5], 0.375),
        ("rel_max <= 1", [3.0, -4.0], [3.25, -3.5], 0.125),
        # row 1: 0.5 log(0.5 / 0.25) + 0.5 log(0.5 / 0.75); row 2: nothing
        ("kl <= 1", [log(0.5, 0.5), [1.0, 1.0]], [log(0.25, 0.75), [7.0, 7.0]], 0.25 * math.log(4 / 3)),
        ("kl(dim=0) <= 1", [[0.0, 1.0], [0.0, 1.0]], [log(0.25, 0.75)] * 2, 0.0),
        ("kl <= 1", [[0.0, -INF]], [[5.0, -INF]], 0.0),
        ("nats <= 1", [log(0.5, 0.5)], [log(0.25, 0.75)], math.log(2)),
        ("top1 >= 1", [[1.0, 2.0], [2.0, 1.0]], [[2.0, 1.0], [2.0, 1.0]], 0.5),
        ("top1 >= 1", [[2.0, 2.0]], [[1.0, 2.0]], 1.0),  # either of two largest
        ("top1 >= 1", [[4.0, 3.0, 2.0, 1.0]], [[1.0, 1.0, 1.0, 1.0]], 1.0),  # argmax gives the first of equal entries
        ("top1(dim=0) >= 1", [[1.0, 2.0], [2.0, 1.0]], [[1.0, 2.0], [0.0, 1.0]], 0.5),
        ("topk(2) >= 1", [[3.0, 2.0, 1.0]], [[3.0, 1.0, 2.0]], 0.5),
        ("flips <= 1", [True, False, True, True], [True, True, True, True], 0.25),
        ("flips <= 1", [0.0, -1.0, 2.0, 1.0], [0.1, -2.0, -1.0, 1.0], 0.5),
        ("flips <= 1", [0.0, -INF], [-INF, -INF], math.nan),
        ("flips(0.5) <= 1", [0.4, 0.6], [0.6, 0.7], 0.5),
        ("flips(values) <= 1", [0.0, 1.0, 7.0, 2.0], [0.0, 1.0, 8.0, 2.0], 0.25),
        ("rel_l2 <= 1", [30, 40], [30, 45], 0.1),  # integers that count
        ("cosine >= 1", [[1.0, 0.0], [0.0, 2.0]], [[1.0, 1.0], [0.0, 1.0]], (1 + math.sqrt(0.5)) / 2),
        ("cosine >= 1", [[0.0, 0.0]], [[0.0, 0.0]], 1.0),
        ("psnr >= 1", [0.0, 2.0], [0.2, 2.0], 10 * math.log10(4 / 0.02)),
        ("psnr(1) >= 1", [0.0, 2.0], [0.2, 2.0], 10 * math.log10(1 / 0.02)),
        ("iou >= 1", [[0.0, 0, 2, 2], [0, 0, 1, 1]], [[0.0, 0, 2, 1], [0, 0, 1, 1]], 0.5),
        ("iou(mean) >= 1", [[0.0, 0, 2, 2], [0, 0, 1, 1]], [[0.0, 0, 2, 1], [0, 0, 1, 1]], 0.75),
        ("iou(cxcywh) >= 1", [[1.0, 1, 2, 2]], [[1.0, 0.5, 2, 1]], 0.5),
        ("iou(xywh) >= 1", [[0.0, 0, 2, 2]], [[0.0, 0, 2, 1]], 0.5),
        ("iou >= 1", [[1.0, 1, 1, 1]], [[1.0, 1, 1, 1]], 1.0),  # a box without a size, where it was
        ("max_abs <= 1", [1.0, INF], [1.5, INF], 0.5),
        ("max_abs <= 1", [1.0, INF], [1.5, 3.0], math.nan),
        ("max_abs <= 1", [1.0, 2.0], [1.5, math.nan], math.nan),
        ("kl <= 1", [[1.0, 2.0]], [[1.0, -INF]], math.nan),
    ],
)
def test_by_hand(text: str, reference: list, candidate: list, found: float) -> None:
    assert of(text, reference, candidate) == pytest.approx(found, rel=1e-9, abs=1e-12, nan_ok=True)


@pytest.mark.parametrize("text", ["top1 >= 1", "topk(3) >= 1", "topk(2, dim=0) >= 1"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_ranks_are_those_of_float64(text: str, dtype: torch.dtype) -> None:
    (one,) = criteria_of(f"output: {text}")
    reference = normal(40, 6).to(dtype)
    candidate = (reference.double() + 0.2 * normal(40, 6, seed=1)).to(dtype)
    expected = value(one, reference.double(), candidate.double())
    assert 0.5 < value(one, reference, candidate) == expected < 1
    reference[0, 0] = candidate[0, 0] = -INF
    assert value(one, reference, candidate) == value(one, reference.double(), candidate.double())
    candidate[1, 1] = INF
    assert math.isnan(value(one, reference, candidate))


@pytest.mark.parametrize(
    "text", ["kl <= 1", "max_abs <= 1", "top1 >= 1", "iou >= 1", "psnr >= 30", "cosine >= 1", "flips <= 0"]
)
def test_nothing_differs_where_there_is_nothing(text: str) -> None:
    (one,) = criteria_of(f"output: {text}")
    nothing = torch.zeros(0, 4)
    assert one.share(value(one, nothing, nothing)) == 0
    assert unfit(one, "output", nothing) is None


def test_kl_keeps_its_digits_where_distributions_are_near() -> None:
    # 1/2 d' F d with F = diag(p) - p p': p = (1/2, 1/2), d = (e, -e) gives e^2 / 2
    small = 1e-8
    expected = pytest.approx(small**2 / 2, rel=1e-6)
    assert of("kl <= 1", torch.zeros(1, 2).double(), torch.tensor([[small, -small]]).double()) == expected


def test_a_function_is_called_with_the_two_tensors() -> None:
    one = Criterion("output", "far", 1.0, function=lambda r, c: (r - c).abs().sum())
    assert value(one, torch.ones(2), torch.zeros(2)) == 2.0
    broken = Criterion("output", "far", 1.0, function=lambda r, c: r.no_such_thing)
    with pytest.raises(AuditorError, match="the criterion far of output raised AttributeError: "):
        value(broken, torch.ones(2), torch.zeros(2))


@pytest.mark.parametrize(
    ("text", "reference", "why"),
    [
        (
            "iou >= 0.5",
            torch.ones(2, 3),
            "iou is for boxes, four numbers in the last dimension, and it is float32[2, 3]",
        ),
        ("kl <= 0.5", torch.ones(2, 3).long(), "kl needs floating-point outputs, and it is int64[2, 3]"),
        ("top1 >= 0.5", torch.tensor(1.0), "top1 uses dimension -1, and it is float32[]"),
        ("kl(dim=2) <= 0.5", torch.ones(2, 3), "kl(dim=2) uses dimension 2, and it is float32[2, 3]"),
        ("kl <= 0.5", torch.ones(2, 1), "compares the entries of dimension -1, and it, float32[2, 1], has only one"),
        ("topk(5) >= 0.5", torch.ones(2, 3), "topk(5) needs more entries than dimension -1 of it has"),
        ("cosine >= 0.5", torch.ones(2, dtype=torch.complex64), "cosine is for real numbers, and it is complex64[2]"),
        ("kl <= 0.5", torch.nested.nested_tensor([torch.ones(2)]), "kl is for tensors of one shape, and it is nested"),
        ("kl <= 0.5", torch.tensor([[INF, 1.0]]), "whose FP32 values are not finite"),
    ],
)
def test_what_does_not_fit_says_why(text: str, reference: Tensor, why: str) -> None:
    (one,) = criteria_of(f"it: {text}")
    assert why in (unfit(one, "it", reference) or "")


# Directions, limits and shares of the kinds.


def test_every_kind_has_its_arithmetic_and_its_words() -> None:
    assert KINDS.keys() == VALUES.keys()
    assert all(kind.name == name and kind.says and kind.unit for name, kind in KINDS.items())


def brackets(kind: Kind) -> str:
    return f"({', '.join(kind.takes)})" if kind.takes else ""


def test_the_page_on_criteria_has_every_kind_as_it_is() -> None:
    page = (Path(__file__).parents[3] / "docs" / "criteria.md").read_text(encoding="utf-8")
    rows = [f"| `{kind.name}{brackets(kind)}` | {kind.unit} | `{kind.sign}` | {kind.says} |" for kind in KINDS.values()]
    found = page.partition("<!-- kinds -->\n")[2].partition("<!-- end of kinds -->")[0].splitlines()
    assert found == rows


@pytest.mark.parametrize(
    ("kind", "value", "limit", "share"),
    [
        ("max_abs", 0.25, 0.5, 0.5),
        ("kl", 0.01, 0.04, 0.5),  # grows with the square of an error: the root of a quarter
        ("cosine", 0.99, 0.96, 0.5),  # the same: sqrt(0.01 / 0.04)
        ("top1", 0.99, 0.98, 0.5),
        ("iou", 0.8, 0.9, 2.0),
        ("psnr", 60.0, 40.0, 0.1),  # 20 dB are a factor of 10 in size
        ("psnr", math.inf, 40.0, 0.0),
        ("flips", 0.0, 0.0, 0.0),
        ("flips", 0.25, 0.0, 2.25),
        ("top1", 0.75, 1.0, 2.25),
        ("max_abs", math.nan, 1.0, math.inf),
    ],
)
def test_the_share_by_hand(kind: str, value: float, limit: float, share: float) -> None:
    assert Criterion("it", kind, limit).share(value) == pytest.approx(share)


@pytest.mark.parametrize("kind", [*KINDS, "own"])
def test_a_share_is_above_one_exactly_where_the_limit_does_not_hold(kind: str) -> None:
    for limit in (0.0, 0.1, 0.9, 1.0):
        one = Criterion("it", kind, limit, function=max if kind == "own" else None)
        for given in (0.0, 0.1, math.nextafter(0.1, 1), math.nextafter(0.9, 0), 0.9, 1.0, math.nan):
            assert (one.share(given) <= 1) == one.holds(given)


def test_the_floor_is_three_times_the_noise_as_long_as_outputs_are_alike() -> None:
    assert floor_of(0.0, 0.0) == 0.0
    assert floor_of(0.02, 0.01) == 0.06
    assert floor_of(5.0, 0.3) == 15.0  # in the user's own measure
    assert floor_of(0.02, 0.34) == 0.0
    assert floor_of(math.inf, 0.0) == 0.0


# Quadratic forms of the kinds, against the kinds themselves on small errors.

CASES = {
    "rel_l2 <= 0.1": normal(6, 5),
    "kl <= 0.1": 3 * normal(6, 5),
    "kl(dim=0) <= 0.2": 2 * normal(6, 5),
    "kl <= 0.3": torch.log_softmax(normal(6, 5), -1),
    "cosine >= 0.9": normal(6, 5),
    "cosine(dim=0) >= 0.8": normal(6, 5),
    "psnr >= 30": normal(6, 5),
    "psnr(2) >= 20": normal(6, 5),
    "top1 >= 0.9": normal(6, 5),
    "top1(dim=0) >= 0.9": normal(6, 5),
    "topk(2) >= 0.9": normal(6, 5),
    "flips <= 0.1": normal(6, 5),
    "flips(0.5) <= 0.1": normal(6, 5),
}


@pytest.mark.parametrize("text", CASES)
def test_the_mean_square_over_all_signs_is_the_square_of_the_share(text: str) -> None:
    # E <A e, d>^2 over random signs e is |A' d|^2: row by row of the identity in place of random signs, exactly
    (one,) = criteria_of(f"output: {text}")
    reference = CASES[text].double()
    error = 1e-4 * normal(6, 5, seed=1).double()
    form = form_of(one, reference)
    basis = torch.eye(reference.numel(), dtype=torch.float64).reshape(-1, *reference.shape)
    square = sum(float((form(unit) * error).sum()) ** 2 for unit in basis)
    margins = margins_of(one, reference)
    low = reference + error
    share = margins.share(reference, low) if margins else one.share(value(one, reference, low))
    assert math.sqrt(square) == pytest.approx(share, rel=1e-3)


def test_kinds_without_a_form_and_limits_that_allow_nothing_have_none() -> None:
    assert set(FORMS) == {text.partition(" ")[0].partition("(")[0] for text in CASES}
    for text in ("max_abs <= 1", "top1 >= 0.2", "kl <= 0", "cosine >= 1"):
        (one,) = criteria_of(f"output: {text}")
        assert form_of(one, normal(3, 4)) is None


# Margins of decisions.


def test_margins_by_hand() -> None:
    # rows 3 > 1 and 2 > 1.5: margins 2 and 0.5, both moved by 0.25: the root of (0.25^2 + 0.25^2) / 2
    (one,) = criteria_of("output: top1 >= 0.9")
    reference = torch.tensor([[3.0, 1.0, -9.0], [-9.0, 1.5, 2.0]])
    margins = margins_of(one, reference)
    assert margins.size.tolist() == [2.0, 0.5]
    low = reference + torch.tensor([[0.0, 0.25, 9.0], [0.0, 0.0, 0.25]]) + 1e-3  # a third entry says nothing
    assert margins.change(reference, low) == pytest.approx(0.25)
    # a normal error of 0.5 flips the second in Phi(-1) = 0.1587 of cases, the first in Phi(-4) = 0.00003
    assert margins.flips(0.5) == pytest.approx((0.158655 + 0.000032) / 2, rel=1e-3)
    assert margins.flips(margins.allowed_change) == pytest.approx(0.1, rel=1e-4)
    assert margins.share(reference, low) == pytest.approx(0.25 / margins.allowed_change)


def test_candidates_on_a_grid_may_be_equal() -> None:
    # between 16 and 32 BF16's spacing is 2^(4 - 7) = 0.125, which adds 0.125^2 / 6 to the mean square; the second row is clear
    (one,) = criteria_of("output: top1 >= 0.9")
    reference = torch.tensor([[20.03, 19.97, 0.0], [0.0, 24.0, 17.0]])
    low = reference.bfloat16().float()
    moved = (low[0, 0] - low[0, 1] - reference[0, 0] + reference[0, 1]) ** 2
    assert margins_of(one, reference).change(reference, low) == pytest.approx(float(moved + 0.125**2 / 6) ** 0.5)


@pytest.mark.parametrize(
    ("kind", "pair"),
    thinned([("topk(3) >= 0.5", 0.65), ("topk(10) >= 0.7", 0.45), ("flips <= 0.1", 1), ("top1 >= 0.5", 0.85)], 2),
)
def test_as_many_flip_as_margins_let_expect(kind: str, pair: float) -> None:
    # pair: what the k-th against the next alone would let expect of the largest error
    (one,) = criteria_of(f"output: {kind}")
    reference = 2 * normal(1000, 40)
    margins = margins_of(one, reference)
    for size in (0.1, 0.3):
        lows = [reference + size * normal(1000, 40, seed=seed) for seed in range(1, 65)]
        seen = sum(abs(one.how.best - value(one, reference, low)) for low in lows) / len(lows)
        change = sum(margins.change(reference, low) for low in lows) / len(lows)
        assert 0.95 <= margins.flips(change) / seen <= 1.05
    alone = replace(margins, inside=None, outside=None).flips(change) / seen
    assert alone == pytest.approx(pair, abs=0.05)
    assert margins.flips(margins.allowed_change) == pytest.approx(margins.limit, rel=1e-4)


@pytest.mark.parametrize(("by", "sizes"), [("token", (0.774, 0.774)), ("step", (0.141, 1.407)), ("nothing", (1, 1))])
def test_errors_of_different_sizes_flip_by_their_mean(by: str, sizes: tuple[float, float]) -> None:
    # 0.02 for one half and 0.2 for the other: mean 0.11, root mean square 0.142; 0.11 / 0.142 = 0.774
    (one,) = criteria_of("output: top1 >= 0.9")
    reference = normal(200, 40, 16)
    margins, late = margins_of(one, reference), torch.arange(40)[:, None] >= 20
    large = {"token": normal(200, 40, 1, seed=2) > 0, "step": late, "nothing": late | True}[by]
    low = reference + torch.where(large, 0.2, 0.02) * normal(200, 40, 16, seed=1)
    found = margins.size_by_step(reference, low, 40)
    assert (float(found[:20].mean()), float(found[20:].mean())) == pytest.approx(sizes, rel=0.08)
    change, seen = float(margins.change(reference, low)), 1 - value(one, reference, low)
    assert margins.flips(float(found.mean()) * change) == pytest.approx(seen, rel=0.08)
    assert torch.equal(margins.size_by_step(reference, reference, 40), torch.ones(40).double())


def test_what_leaves_the_chosen_by_hand() -> None:
    # Of a, b > c, d, errors independent, all four equal: either of the chosen is one of the two largest in half of all cases
    equal = torch.zeros(1, 2, dtype=torch.float64)
    assert float(count_replaced(equal, equal, 1.0)) == pytest.approx(1.0, rel=1e-3)
    # far apart but for the k-th and the next, whose margin of 1 flips in Phi(-1) of cases; and not at all
    inside, outside = torch.tensor([[9.0, 1.0]]).double(), torch.tensor([[0.0, -9.0]]).double()
    assert float(count_replaced(inside, outside, 1.0)) == pytest.approx(0.158655, rel=1e-3)
    assert float(count_replaced(inside, outside, 0.0)) == 0.0


def test_errors_far_from_a_threshold_flip_nothing() -> None:
    # errors grow with the size: near the threshold 0.1 % of 1, and 100 times that far away, where they do not matter
    (one,) = criteria_of("output: flips(1.0) <= 0.1")
    reference = torch.cat([1 + 0.1 * normal(400_000, 1), 100 + 10 * normal(400_000, 1)])
    low = reference * (1 + 1e-3 * normal(800_000, 1, seed=1))
    margins, seen = margins_of(one, reference), value(one, reference, low)
    assert margins.flips(margins.change(reference, low, near=True)) == pytest.approx(seen, rel=0.1)
    assert margins.flips(margins.change(reference, low)) > 10 * seen


@pytest.mark.parametrize(("threshold", "share"), [(0.5, 1 / 2), (0.5 + 2**-9, 0.0), (0.5 + 2**-10, 1 / 4)])
def test_rounding_alone_puts_a_threshold_in_the_middle_of_the_grid(threshold: float, share: float) -> None:
    # from 0.5 on BF16 has a number every h = 2^-8: what lies between the threshold and the middle of its neighbors flips, which
    # is h / 2 where the threshold is one of them and nothing where it is that middle; a density of 1 per unit, over [0.3, 0.9)
    (one,) = criteria_of(f"output: flips({threshold}) <= 0.1")
    reference = torch.linspace(0.3, 0.9, 600_001)[:-1]
    low = reference.bfloat16().float()
    margins, seen = margins_of(one, reference), value(one, reference, low)
    assert seen == pytest.approx(share * 2**-8 / 0.6, abs=1e-5)
    assert margins.flips(margins.change(reference, low, near=True)) == pytest.approx(seen, rel=0.1, abs=1e-4)


def test_what_is_equal_or_infinite_is_no_decision() -> None:
    (one,) = criteria_of("output: top1 >= 0.9")
    reference = torch.tensor([[1.0, 1.0, 0.0], [2.0, -torch.inf, -torch.inf], [0.5, 0.25, 0.0]])
    margins = margins_of(one, reference)
    assert margins.size.tolist() == [0.25]
    assert margins.flips(math.inf) == pytest.approx(2 / 9, rel=1e-3)  # of one of three rows, another of three entries


# Outputs held against a reference by all criteria at once.

REFERENCE = NamedTensors(
    [torch.tensor([10.0, 20.0]), torch.tensor([3.0, 4.0]), torch.tensor([1, 2])], ("boxes", "z", "ids")
)


def test_the_largest_share_counts_and_the_others_are_judged_together() -> None:
    found = criteria_for(criteria_of({"boxes": "max_abs <= 0.5"}), 0.2, REFERENCE)
    low = [torch.tensor([10.25, 20.0]), torch.tensor([3.0, 4.5]), torch.tensor([1, 2])]
    held = found.evaluate(REFERENCE, low)
    assert [str(one.criterion) for one in held] == ["boxes: max_abs <= 0.5", "the other outputs: rel_l2 <= 0.2"]
    assert [one.value for one in held] == pytest.approx([0.25, 0.1])
    assert [one.share for one in held] == pytest.approx([0.5, 0.5])
    low[2] = torch.tensor([1, 3])  # half of a discrete output: 0.5 of 0.2
    assert found(REFERENCE, low) == pytest.approx(2.5)


def test_outputs_go_by_the_names_of_their_own_reference() -> None:
    found = criteria_for(criteria_of({"boxes": "max_abs <= 0.5"}), 0.2, REFERENCE)
    turned = NamedTensors([torch.tensor([3.0]), torch.tensor([10.0])], ("z", "boxes"))
    assert found.evaluate(turned, [torch.tensor([3.0]), torch.tensor([11.0])])[0].value == 1.0
    without = NamedTensors([torch.tensor([3.0])], ("z",))
    assert found.evaluate(without, [torch.tensor([3.0])])[0].value is None
    assert found(without, [torch.tensor([3.0])]) == 0.0


def test_values_over_runs_are_the_worst_and_what_no_run_has_does_not_hold() -> None:
    found = criteria_for(criteria_of(["boxes: max_abs <= 0.5", "z: cosine >= 0.9"]), 0.2, REFERENCE)
    near, far = ([torch.tensor([10.0 + by, 20.0]), REFERENCE[1], REFERENCE[2]] for by in (0.25, 0.75))
    boxes, angle, others = found.values([(REFERENCE, near), (REFERENCE, far)])
    assert (boxes.value, boxes.holds, boxes.share) == (0.75, False, 1.5)
    assert (angle.value, angle.holds, angle.sign) == (1.0, True, ">=")
    assert (others.output, others.kind, others.value, others.holds) == ("the other outputs", "rel_l2", 0.0, True)
    boxes, *_ = found.values([(REFERENCE, near)], [(REFERENCE, far)])
    assert (boxes.value, boxes.holds) == (0.25, False)
    without = NamedTensors([torch.tensor([3.0])], ("w",))
    assert [(one.value, one.holds) for one in found.values([(without, list(without))])][:2] == [(None, False)] * 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "box: max_abs <= 1",
            "the model has no output 'box', which 'box: max_abs <= 1' names: did you mean boxes? It returns boxes, z, ids",
        ),
        ("nothing.like.it: max_abs <= 1", "names. It returns boxes, z, ids"),
        ("ids: max_abs <= 1", "'ids: max_abs <= 1': max_abs needs floating-point outputs"),
    ],
)
def test_names_that_the_model_does_not_return(text: str, said: str) -> None:
    with refused(AuditorError, "bad-criterion", match=said.replace("?", r"\?")):
        criteria_for(criteria_of(text), 0.01, REFERENCE)


# Criteria as people write them, and what is said of those that mean nothing.


def gap(reference: Any, candidate: Any) -> float:
    return float((reference - candidate).abs().max())


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("logits: kl <= 0.01", "logits: kl <= 0.01"),
        ("logits:kl<=1e-2", "logits: kl <= 0.01"),
        (" 0 : topk( 5 ) >= .98 ", "0: topk(5) >= 0.98"),
        ("masks: kl(dim=1) <= 0.1", "masks: kl(dim=1) <= 0.1"),
        ("masks: kl(1) <= 0.1", "masks: kl(dim=1) <= 0.1"),
        ("boxes: iou(mean) >= 0.9", "boxes: iou(mean) >= 0.9"),
        ("boxes: iou(mean, cxcywh) >= 0.9", "boxes: iou(cxcywh, mean) >= 0.9"),
        ("image: psnr(255) >= 40", "image: psnr(255.0) >= 40"),
        ("mask: flips(0.5) <= 0", "mask: flips(0.5) <= 0"),
        ("hidden.0: rel_l2 <= 1e-3", "hidden.0: rel_l2 <= 0.001"),
        ("vector: cosine >= 0.9999999", "vector: cosine >= 0.9999999"),
    ],
)
def test_one_is_read_and_written_again(text: str, written: str) -> None:
    (found,) = criteria_of(text)
    assert str(found) == written
    assert criteria_of(written) == (found,)


def test_every_form_says_the_same() -> None:
    wanted = (Criterion("boxes", "max_abs", 0.5), Criterion("boxes", "iou", 0.9), Criterion("0", "kl", 0.01))
    assert criteria_of("boxes: max_abs <= 0.5; boxes: iou >= 0.9; 0: kl <= 0.01") == wanted
    assert criteria_of(["boxes: max_abs <= 0.5", "boxes: iou >= 0.9", "0: kl <= 0.01"]) == wanted
    assert criteria_of({"boxes": ["max_abs <= 0.5", "iou >= 0.9"], 0: "kl <= 0.01"}) == wanted
    assert criteria_of({"boxes": "max_abs <= 0.5; iou >= 0.9", "0": "kl <= 0.01"}) == wanted
    assert criteria_of(wanted) == wanted
    assert criteria_of(None) == criteria_of([]) == ()


def test_a_function_has_a_limit_beside_it() -> None:
    (one,) = criteria_of({"boxes": (gap, 0.5)})
    assert (one.kind, one.limit, one.function, str(one)) == ("gap", 0.5, gap, "boxes: gap <= 0.5")
    assert len(criteria_of({"boxes": [(gap, 0.5), "iou >= 0.9"]})) == 2


def test_higher_values_of_a_function_are_better_where_its_limit_says_so(tmp_path: Path) -> None:
    def likeness(r: Tensor, c: Tensor) -> float:
        return 1 - float((r - c).abs().max())

    (one,) = criteria_of({"image": (likeness, ">= 0.75")})
    assert str(one) == "image: likeness >= 0.75"
    (one,) = criteria_for([one], 0.01, NamedTensors([torch.zeros(2)], ("image",))).each
    assert one.best == 1.0  # for equal outputs
    assert [one.holds(x) for x in (1.0, 0.75, 0.5, math.nan)] == [True, True, False, False]
    assert [one.share(x) for x in (1.0, 0.875, 0.75, 0.5)] == [0.0, 0.5, 1.0, 2.0]
    assert criteria_of({"image": (likeness, "<= 0.75")})[0].best is None
    likeness.higher_is_better = True  # type: ignore[attr-defined]
    assert str(criteria_of({"image": (likeness, 0.75)})[0]) == "image: likeness >= 0.75"
    (tmp_path / "scores.py").write_text("def near(r, c):\n    return 1.0\n")
    several = criteria_of(f"image: max_abs <= 0.5; psnr >= 40; {tmp_path / 'scores.py'}:near >= 0.9; other: kl <= 1")
    assert [(x.output, x.how.sign) for x in several] == [
        *[("image", "<="), ("image", ">="), ("image", ">=")],
        ("other", "<="),
    ]


def test_an_infinite_best_value_counts_in_decibels() -> None:
    one = Criterion("image", "ratio", 40.0, function=gap, best=math.inf)
    assert [one.share(x) for x in (math.inf, 60.0, 40.0)] == pytest.approx([0.0, 0.1, 1.0])


@pytest.mark.parametrize("low", [torch.float16, torch.bfloat16])
def test_functions_get_fp32_tensors(low: torch.dtype) -> None:
    """As features of an FP32 network, such as LPIPS, need them."""
    network, r = nn.Linear(4, 2), normal(3, 4)

    def far(r: Tensor, c: Tensor) -> float:
        return float((network(r) - network(c)).detach().abs().max())

    expected = far(r, r.to(low).float())
    assert value(Criterion("output", "far", 1.0, function=far), r, r.to(low)) == expected
    assert (
        value(Criterion("output", "dtype", 1.0, function=lambda r, c: c.dtype is torch.float64), r, r.double()) == 1.0
    )


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("logits", "cannot parse the criterion 'logits': write 'OUTPUT: KIND <= X'"),
        ("logits: kl < 1", "cannot parse the criterion"),
        ("logits: kll <= 1", "'kll' is not a kind of criterion: did you mean kl? Available: rel_l2, max_abs, mean_abs"),
        ("logits: kl >= 1", "lower values of kl are better: write 'logits: kl <= 1'"),
        ("logits: top1 <= 0.01", "higher values of top1 are better: write 'logits: top1 >= 0.01'. top1: share of rows"),
        ("logits: kl <= some", "the limit of 'logits: kl' must be a number, not 'some'"),
        ("logits: kl <= -1", "the limit of kl must be 0 or more, and finite, not -1"),
        ("logits: top1 >= 99", "the limit of top1 must be from 0 to 1, not 99"),
        ("logits: topk >= 0.9", "topk needs a number in brackets: write topk(5)"),
        ("logits: topk(0) >= 0.9", "k of topk must be a whole number above 0, not 0"),
        ("logits: topk(a) >= 0.9", "k of topk must be a number, not 'a'"),
        ("logits: max_abs(3) <= 0.9", "max_abs takes nothing in brackets, not '3'"),
        ("logits: kl(axis=1) <= 0.9", "kl takes dim in brackets, not 'axis=1'"),
        ("boxes: iou(xyzw) >= 0.9", "iou takes form, over in brackets, not 'xyzw'"),
        ("image: psnr(0) >= 9", "peak of psnr must be a number above 0, not 0"),
        ("", "cannot parse the criterion '': write"),
        ({"a": ""}, "cannot parse the criterion '': write"),
        ([None], "criteria are strings or a dict by output, not None"),
        ("a: max_abs <= 1\nb: max_abs <= 1", "cannot parse the criterion"),
        ("a: kl <= 1; a: kl <= 2", "two criteria limit kl of a: keep 'a: kl <= 1' or 'a: kl <= 2'"),
        (3, "criteria are strings or a dict by output, not 3"),
        ({"a": 3}, "criteria of 'a' are strings such as 'max_abs <= 0.5', or (function, limit), not 3"),
        ({"a": (gap, "x")}, "the limit of 'a: gap' must be a number, not 'x'"),
        ({None: "kl <= 1"}, "an output is named by a string or a position, not by None"),
        ("a: nowhere.py:score <= 1", "nowhere.py does not exist"),
    ],
)
def test_what_means_nothing_is_refused_in_one_line(given: Any, said: str) -> None:
    with pytest.raises(AuditorError) as caught:
        criteria_of(given)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.slug in ("bad-criterion", "missing-target")


@pytest.mark.parametrize(
    ("output", "name", "meant"),
    [
        ("boxes", "boxes", True),
        ("boxes", "boxes.0", True),
        ("boxes", "boxes2", False),
        ("boxes", "0.boxes", False),
        ("*.boxes", "0.boxes", True),
        ("0", "0", True),
        ("0", "10", False),
        ("*", "anything.at.all", True),
    ],
)
def test_names_prefixes_and_patterns(output: str, name: str, meant: bool) -> None:
    assert Criterion(output, "max_abs", 1.0).covers(name) is meant


def test_a_name_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("far = 3\n")
    with pytest.raises(
        AuditorError, match=r"scores.py has no function 'far': a criterion names a function as f.py:name"
    ):
        criteria_of(f"boxes: {tmp_path / 'scores.py'}:far <= 0.5")
