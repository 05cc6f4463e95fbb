"""The training section: rendered from a real audit, from an empty window, and with names that try to break out."""

from __future__ import annotations

from dataclasses import replace

import torch

from auditor.numerics.histogram import magnitudes_of
from auditor.records.audit import Audit
from auditor.report.reporters import html, markdown, text
from auditor.report.training import loop_code, training_section
from auditor.training.window import loss_scale
from tests.unit.report.factory import HOSTILE, make_audit
from tests.unit.training.conftest import Trained


def with_training(trained: Trained, **changes: object) -> Audit:
    assert trained.audit.training is not None
    return replace(trained.audit, training=replace(trained.audit.training, **changes))


def empty_window() -> object:
    far = torch.cat((torch.full((100,), 2.0**3), torch.full((100,), 2.0**-40)))
    return loss_scale({"up": magnitudes_of(far)})


def test_the_section_holds_window_advice_and_loop(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None and training.fp16 is not None and training.fp16.init is not None
    page = html(trained.audit)
    section = page.partition('<section id="training">')[2].partition("</section>")[0]
    assert "Gradients against FP16" in section
    assert f"{training.fp16.maximum:,.10g}" in section
    assert all(advice.title.replace("'", "&#39;") in section for advice in training.advice)
    assert "loss_fn(model(inputs).float(), targets)" in section
    assert '<a href="#training">' in page
    assert training.recommendation.split(":")[0] in " ".join(text(trained.audit, width=200).split())
    assert "**Training**: " in markdown(trained.audit)


def test_inference_has_no_section() -> None:
    page = html(make_audit())
    assert 'id="training"' not in page
    assert training_section(make_audit()) == []


def test_an_empty_window_is_said(trained: Trained) -> None:
    audit = with_training(trained, fp16=empty_window(), format="bf16")
    section = html(audit).partition('<section id="training">')[2].partition("</section>")[0]
    assert "It is empty" in section


def test_nothing_low_is_said(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None
    audit = with_training(
        trained,
        fp16=None,
        bf16=None,
        format=None,
        trials=(),
        batch_sizes=(),
        nodes=(),
        advice=(),
        modules=tuple(replace(m, low=None) for m in training.modules),
        parameters=tuple(replace(p, low=False) for p in training.parameters),
    )
    section = html(audit).partition('<section id="training">')[2].partition("</section>")[0]
    assert "No gradient is in a low format" in section
    assert "Nothing stands out" in section
    assert loop_code(audit) is None


def test_hostile_names_add_no_markup(trained: Trained) -> None:
    training = trained.audit.training
    assert training is not None
    modules = tuple(replace(m, module=HOSTILE) for m in training.modules)
    nodes = tuple(replace(n, owner=HOSTILE, source=HOSTILE) for n in training.nodes)
    page = html(with_training(trained, modules=modules, nodes=nodes, loss_source=HOSTILE))
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
