"""Every question people ask gets an answer from the audit, or is said not to apply."""

from __future__ import annotations

from dataclasses import replace

import pytest

from auditor.records import Baseline
from auditor.report.questions import LARGE_CONSTANTS, SMALL_CONSTANTS, Answer, questions
from auditor.report.reporters import html
from tests.unit.report.factory import make_audit

ASKED = (
    "Which layer makes",
    "close is it to overflow",
    "keep one module",
    "least that must stay",
    "accuracy drops",
    "FP16 or BF16",
    "Trained in BF16",
    "faster",
    "memory",
    "What does autocast keep",
    "small constants",
    "mask constant",
    "even run",
    "unscaling",
    "loss scale",
    "BF16 training stall",
    "positions and angles",
    "compiled",
)


def answers(audit):
    return {item.question: item for item in questions(audit)}


@pytest.mark.parametrize("words", ASKED)
@pytest.mark.parametrize("options", [{}, {"empty": True}, {"recommended": None, "formats": ("bf16",)}], ids=str)
def test_every_question_is_answered_in_a_sentence(words, options):
    (found,) = [item for question, item in answers(make_audit(60, **options)).items() if words in question]
    assert found.answer.endswith((".", "!"))
    assert found.section


def test_answers_come_from_the_audit():
    found = answers(make_audit(60))
    assert found["Which layer makes the NaN or Inf?"].answer == "In FP16, linear in blocks.2.attn.proj at model.py:27."
    assert "1.87x, with 93% of the FLOPs" in found["Will it be faster?"].answer


def test_shapes_that_slow_it_down_are_counted():
    audit = make_audit(60)
    slow = replace(audit.findings[0], rule="HWR001", name="misaligned-matrix-product")
    found = answers(replace(audit, findings=(*audit.findings, slow)))["Will it be faster?"]
    assert "1 operation has a shape" in found.answer


def test_baselines_that_fail_are_named():
    audit = make_audit(60)
    baselines = {**audit.baselines, "cast_fp16": Baseline(None, False, "expected Half but found Float.")}
    found = answers(replace(audit, baselines=baselines))["Does a plain cast or plain autocast even run?"]
    assert found.answer == "Not cast_fp16. cast_fp16: expected Half but found Float."


def test_positions_are_looked_for_by_their_rules():
    audit = make_audit(60)
    rotary = replace(audit.findings[0], rule="POS001")
    found = answers(replace(audit, findings=(rotary,)))["Are positions and angles exact enough?"]
    assert found.applies
    assert "1 finding, the first in" in found.answer


def test_what_must_stay_is_told_from_what_merely_gains_nothing():
    question = "What is the least that must stay FP32?"
    audit = make_audit(60)

    def said(least):
        plan = replace(audit.plans["autocast_fp16"], least=least)
        return answers(replace(audit, plans={**audit.plans, plan.name: plan}))[question].answer

    assert said(("blocks.2.attn.proj",)) == (
        "FP16 under autocast: 1 module, blocks.2.attn.proj. The plan also leaves norm in FP32, where lowering gains little "
        "or nothing."
    )
    assert said(()).startswith("Nothing. The plan leaves blocks.2.attn.proj, norm in FP32")
    assert said(None) == "FP16 under autocast: 2 modules, blocks.2.attn.proj, norm."


def test_every_answer_leads_to_a_section_there_is():
    audit = make_audit(60)
    page = html.render(audit)
    assert all(f'id="{item.section}"' in page for item in questions(audit))


@pytest.mark.parametrize("codes", [SMALL_CONSTANTS, LARGE_CONSTANTS])
def test_questions_about_constants_name_rules_that_there_are(codes, root):
    known = {path.name.partition("-")[0] for path in root.glob("rules/*/*.toml")}
    assert set(codes) <= known


def test_a_rule_about_a_constant_answers_its_question():
    audit = make_audit()
    asked = "Does a mask constant overflow?"
    without = {answer.question: answer for answer in questions(replace(audit, findings=()))}
    finding = replace(audit.findings[0], rule="CON001", owner="head", source="model.py:7")
    with_one = {answer.question: answer for answer in questions(replace(audit, findings=(finding,)))}
    assert not without[asked].applies
    assert with_one[asked].answer == "1 finding, the first in head at model.py:7."


def test_code_in_an_answer_is_set_as_code(monkeypatch):
    said = Answer("Why?", "never `model.half()`, for training", "use")
    monkeypatch.setattr(html, "questions", lambda audit: (said,))
    page = html.render(make_audit())
    answers = page.partition('id="questions"')[2].partition("</section>")[0]
    assert "<code>model.half()</code>" in answers
    assert "`" not in answers
