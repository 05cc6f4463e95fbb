"""Criteria as people write them, and what is said of those that mean nothing."""

from pathlib import Path
from typing import Any

import pytest

from auditor.criteria import Criterion, criteria_of
from auditor.errors import AuditorError


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


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("logits", "cannot parse the criterion 'logits': write 'OUTPUT: KIND <= X'"),
        ("logits: kl < 1", "cannot parse the criterion"),
        ("logits: kll <= 1", "'kll' is not a criterion: did you mean kl? Available: rel_l2, max_abs, mean_abs"),
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
        ("a: kl <= 1; a: kl <= 2", "two criteria set a: kl: 'a: kl <= 1' and 'a: kl <= 2'"),
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
    assert Criterion(output, "max_abs", 1.0).speaks_of(name) is meant


def test_a_name_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scores.py").write_text("far = 3\n")
    with pytest.raises(
        AuditorError, match=r"scores.py has no function 'far': a criterion names a function as f.py:name"
    ):
        criteria_of(f"boxes: {tmp_path / 'scores.py'}:far <= 0.5")
