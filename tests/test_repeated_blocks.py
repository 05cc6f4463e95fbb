"""Faults of one line in blocks that repeat it: a card each, however many blocks, and a small plan.json."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import Audit
from auditor.document.codec import texts
from auditor.report.findings import causes

BLOCKS = 9


class Block(nn.Module):
    """A softmax without its maximum, and a norm whose squares overflow in FP16."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.a(x) @ self.b(x).transpose(1, 2) * 6
        weights = torch.exp(scores)
        weights = weights / weights.sum(-1, keepdim=True)
        x = x + weights @ x
        return x * torch.rsqrt((x * 300).pow(2).mean(-1, keepdim=True)) * 300


@pytest.fixture(scope="module")
def audit() -> Audit:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 24), *(Block(24) for _ in range(BLOCKS)), nn.Linear(24, 5)).eval()
    return auditor.audit(model, (torch.randn(4, 16, 24),), device="cpu")


@pytest.mark.parametrize("code", ["SFT002", "NRM003"])
def test_a_fault_on_a_line_has_one_card_for_all_blocks(audit: Audit, code: str) -> None:
    (card,) = [cause for cause in causes(audit).wanting if code in cause.rules]
    same = [finding for finding in card.members if finding.rule == code]
    assert sorted(int(finding.owner) for finding in same) == list(range(1, BLOCKS + 1))
    assert card.where == f"{{1-{BLOCKS}}}"


def test_no_two_cards_are_about_the_same_operation_of_a_line(audit: Audit) -> None:
    cards = causes(audit).wanting
    begins = [cause.worst.cause for cause in cards]
    assert len(set(begins)) == len(begins) <= 8
    operations = [node for cause in cards for node in {finding.node for finding in cause.members}]
    assert len(operations) > 2 * BLOCKS


def test_plan_json_is_small_for_its_operations(audit: Audit) -> None:
    assert len(audit.nodes) >= 145
    assert len(audit.findings) > 2 * BLOCKS
    assert len(audit.plans) == 4
    assert len(texts(audit)["plan.json"].encode()) < 33_000
