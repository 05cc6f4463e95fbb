"""What backward passes make of the verdicts: reasons in words, and which verdicts they change."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from auditor.records import NodeError, Verdict
from auditor.records.training import BackwardNode
from auditor.rulebook.verdicts import Judgement, reasoned, with_backward
from auditor.training.step import capture_step
from tests.support.stepping import Scaled, subject_on
from tests.support.subjects import capture_of

BREAKS = NodeError(local_error=float("inf"), overflow=1)


def node(name: str, reaches: Mapping[str, str], **errors: NodeError) -> BackwardNode:
    return BackwardNode(name, "aten.exp.default", "", None, errors, {}, reaches, {})


SAFE, UNSAFE = Verdict("safe", "fine"), Verdict("unsafe", "overflow", "range")


def judged(verdict: Verdict, exposed: tuple[str, ...]) -> Verdict:
    """The verdict of the audited graph's `exp` once its backward pass was found to break."""
    model, x = Scaled(1.0, torch.Tensor.exp), torch.ones(1)
    audited = capture_of(model, x)
    step = capture_step(subject_on(model, x, torch.ones(1)), ())
    before = Judgement(
        {name: {"fp16": verdict, "bf16": SAFE} for name in audited.nodes},
        {name: {"fp16": exposed, "bf16": exposed} for name in audited.nodes},
    )
    (found,) = reasoned([node("exp", {"fp16": "w"}, fp16=BREAKS)])
    loss = node("sum_1", {"fp16": "w"}, fp16=BREAKS)  # of the loss: the audited graph has no such operation
    after = with_backward(before, audited, reasoned([found, loss]), step)
    assert after.verdicts["exp"]["bf16"] == SAFE
    assert before.verdicts["exp"]["fp16"] == verdict  # the first judgement stays as it was
    return after.verdicts["exp"]["fp16"]


def test_what_breaks_backwards_is_unsafe() -> None:
    found = judged(SAFE, ("autocast",))
    assert (found.verdict, found.limited_by) == ("unsafe", "range")
    assert found.reason.startswith("its backward pass turns 1 finite gradient")


def test_what_never_runs_low_or_is_unsafe_already_keeps_its_reason() -> None:
    assert judged(SAFE, ()) == SAFE
    assert judged(UNSAFE, ("cast",)) == UNSAFE
