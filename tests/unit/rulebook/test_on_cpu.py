"""Texts of rules in audits for a CPU: nothing that is only true of a GPU."""

import re

import pytest
import torch

import auditor
from auditor.reporters import REPORTERS
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from auditor.settings import Settings
from tests.support.replaying import Model
from tests.support.subjects import normal

GPU = re.compile(r"\b(CUDA|GPUs?|cuFFT|cuDNN|cuBLAS)\b")
ON_CPU = {rule.code: rule for rule in Settings(on="cpu").rulebook}


@pytest.mark.parametrize("rule", ON_CPU.values(), ids=ON_CPU)
def test_no_text_of_a_rule_speaks_of_gpus_in_an_audit_for_a_cpu(rule: Rule) -> None:
    remedies = [rule.advice, *(other.advice for other in rule.other_advice)]
    for text in (rule.message, rule.why, *remedies):
        assert text.strip()
        assert not GPU.search(text)


def test_rules_for_cuda_have_their_own_texts() -> None:
    known = {rule.code: rule for rule in load_rules()}
    of_cuda = {rule.code: rule for rule in Settings().rulebook}
    assert of_cuda == known
    assert "cuFFT" in of_cuda["LIN002"].why


def test_findings_on_a_cpu_say_what_the_cpu_does() -> None:
    model = Model(lambda m, x: torch.fft.rfft(x.softmax(-1) * 2).abs())
    audit = auditor.audit(model, normal(2, 16), on="cpu", formats=("bf16",), strategies=("cast",))
    (found,) = (finding for finding in audit.findings if finding.rule == "LIN002")
    assert found.message == "the transform fft_rfft raises an error in BF16: a CPU has no half-precision transforms"
    assert not any(GPU.search(text) for one in audit.findings for text in (one.message, one.why, one.advice))
    for name in ("text", "md", "sarif"):
        assert not GPU.search(REPORTERS[name](audit)), name
