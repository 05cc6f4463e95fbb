"""Outputs held against a reference by all criteria at once."""

from __future__ import annotations

import pytest
import torch

from auditor.criteria import criteria_of
from auditor.criteria.measure import bound
from auditor.errors import AuditorError
from auditor.isolation.outputs import NamedTensors

REFERENCE = NamedTensors(
    [torch.tensor([10.0, 20.0]), torch.tensor([3.0, 4.0]), torch.tensor([1, 2])], ("boxes", "z", "ids")
)


def test_the_largest_share_counts_and_the_others_are_judged_together() -> None:
    found = bound(criteria_of({"boxes": "max_abs <= 0.5"}), 0.2, REFERENCE)
    low = [torch.tensor([10.25, 20.0]), torch.tensor([3.0, 4.5]), torch.tensor([1, 2])]
    held = found.held(REFERENCE, low)
    assert [str(one.criterion) for one in held] == ["boxes: max_abs <= 0.5", "the other outputs: rel_l2 <= 0.2"]
    assert [one.value for one in held] == pytest.approx([0.25, 0.1])
    assert [one.share for one in held] == pytest.approx([0.5, 0.5])
    low[2] = torch.tensor([1, 3])  # half of a discrete output: 0.5 of 0.2
    assert found(REFERENCE, low) == pytest.approx(2.5)


def test_outputs_go_by_the_names_of_their_own_reference() -> None:
    found = bound(criteria_of({"boxes": "max_abs <= 0.5"}), 0.2, REFERENCE)
    turned = NamedTensors([torch.tensor([3.0]), torch.tensor([10.0])], ("z", "boxes"))
    assert found.held(turned, [torch.tensor([3.0]), torch.tensor([11.0])])[0].value == 1.0
    without = NamedTensors([torch.tensor([3.0])], ("z",))
    assert found.held(without, [torch.tensor([3.0])])[0].value is None
    assert found(without, [torch.tensor([3.0])]) == 0.0


def test_values_over_runs_are_the_worst_and_what_no_run_has_does_not_hold() -> None:
    found = bound(criteria_of(["boxes: max_abs <= 0.5", "z: cosine >= 0.9"]), 0.2, REFERENCE)
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
            "the model returns no 'box', which 'box: max_abs <= 1' speaks of: did you mean boxes? It returns boxes, z, ids",
        ),
        ("nothing.like.it: max_abs <= 1", "speaks of. It returns boxes, z, ids"),
        ("ids: max_abs <= 1", "'ids: max_abs <= 1': max_abs is for outputs of floating-point numbers"),
    ],
)
def test_names_that_the_model_does_not_return(text: str, said: str) -> None:
    with pytest.raises(AuditorError, match=said.replace("?", r"\?")) as caught:
        bound(criteria_of(text), 0.01, REFERENCE)
    assert caught.value.slug == "bad-criterion"
