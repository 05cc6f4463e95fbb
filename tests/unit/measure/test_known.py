"""What is asked of a yardstick is noted; measures that nobody can name again are not kept by."""

from __future__ import annotations

import torch

from auditor.criteria import criteria_of
from auditor.criteria.measure import Criteria
from auditor.formats.metrics import output_error
from auditor.measure.known import Heard, measure_of
from auditor.measure.rerun import SENSITIVE_SHARE, Yardstick


def test_a_yardstick_notes_what_it_was_asked() -> None:
    heard, plain = Heard(0.5, output_error, 2.0), Yardstick(0.5, output_error, 2.0)
    assert heard.asked == set()
    one, other = [torch.ones(2)], [torch.ones(2) * 2]
    assert heard(one, other) == plain(one, other)
    assert heard.asked == {"distance"}
    assert SENSITIVE_SHARE * heard.limit == SENSITIVE_SHARE * plain.limit
    assert heard.asked == {"distance", "limit"}


def test_measures_are_told_apart_by_what_they_say() -> None:
    def made(*written: str, budget: float = 0.01) -> Criteria:
        return Criteria(criteria_of(list(written)), budget, ("logits", "boxes"))

    known = [
        measure_of(output_error),
        measure_of(made("logits: kl <= 0.01")),
        measure_of(made("logits: kl <= 0.02")),
        measure_of(made("boxes: max_abs <= 0.01")),
        measure_of(made("logits: kl <= 0.01", budget=0.02)),  # boxes are held to it
    ]
    assert None not in known
    assert len({str(each) for each in known}) == len(known)
    assert measure_of(made("logits: kl <= 0.01")) == known[1]


def test_a_function_of_the_users_own_is_none() -> None:
    def mine(reference: object, candidate: object) -> float:
        return 0.0

    assert measure_of(mine) is None
    assert measure_of(Criteria(criteria_of({"logits": (mine, 0.1)}), 0.01, ("logits",))) is None
    assert measure_of(Criteria(criteria_of("logits: kl <= 0.01"), 0.01, ("logits", "x"), mine)) is None
