"""What the report says of predictions is what was found of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Linearity
from auditor.report.origins import origins
from auditor.report.reporters import files


class Chain(nn.Module):
    """Linear from end to end."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(15):
            x = x * 1.013 + 0.037
        return x


@cache
def audit() -> auditor.Audit:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
    return auditor.audit(Chain(), x, formats=("bf16",), max_error=1e-4, device="cpu")


def test_the_sentence_on_a_linear_model_has_the_numbers_of_its_runs() -> None:
    (found,) = audit().linearity
    claims = [r for r in audit().nodes if r.verdicts["bf16"].verdict == "unsafe"]
    run = [r for r in claims if r.contributions["bf16"].decided_by == "re-run"]
    assert (found.confirmed, found.refuted, found.left) == (len(run), 0, len(claims) - len(run))
    said = origins(audit(), "bf16").linearity
    assert said == (
        f"{found.compared} operations predicted to first order were also run: predictions are {found.least:.2g} to "
        f"{found.most:.2g} times what the runs say, {found.median:.2g} times in the median. Runs bear out {len(run)} of "
        f"{len(run)} predictions beyond the budget. {found.left} more are beyond it by prediction alone."
    )
    assert 0.6 < found.least <= found.most < 1.6
    assert said in files(audit())["report.html"]


def test_a_verdict_says_predicted_where_nothing_was_run_and_one_operation_has_one_number() -> None:
    shown = {source.report.node.name: source for source in origins(audit(), "bf16").sources}
    assert shown
    for report in audit().nodes:
        found, verdict = report.contributions["bf16"], report.verdicts["bf16"]
        assert ("predicted" in verdict.reason) == (found.decided_by == "first-order")
        assert f"{found.isolated:.2g}" in verdict.reason
        if source := shown.get(report.node.name):
            assert (source.moved, source.predicted) == (found.isolated, found.decided_by == "first-order")


FOUND = Linearity("bf16", 12, 0.5, 1.25, 9.75, False, None, None, confirmed=3, refuted=1, left=0)


@pytest.mark.parametrize(
    ("found", "sentence"),
    [
        (
            FOUND,
            "12 operations predicted to first order were also run: predictions are 0.5 to 9.8 times what the runs say, 1.2 "
            "times in the median. First order does not hold on this model, so more were run. Runs bear out 3 of 4 "
            "predictions beyond the budget.",
        ),
        (
            Linearity("bf16", 1, 1.1, 1.1, 1.1, True, None, None, confirmed=1, refuted=0, left=1),
            "1 operation predicted to first order was also run: the prediction is 1.1 times what the run says. Runs bear out "
            "1 of 1 prediction beyond the budget. 1 more is beyond it by prediction alone.",
        ),
        (
            Linearity("bf16", 6, 0.9, 1.0, 1.1, True, None, None, confirmed=0, refuted=0, left=0),
            "6 operations predicted to first order were also run: predictions are 0.9 to 1.1 times what the runs say, 1 times "
            "in the median.",
        ),
    ],
)
def test_sentences(found: Linearity, sentence: str) -> None:
    assert origins(replace(audit(), linearity=(found,)), "bf16").linearity == sentence


def test_nothing_is_said_where_nothing_was_held_against_a_run() -> None:
    assert origins(replace(audit(), linearity=()), "bf16").linearity == ""
