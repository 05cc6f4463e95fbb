"""Whole audits under criteria: what the files say is what the patched model does, by hand and by definition."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli.program import main
from tests.support.subjects import normal

SOURCE = '''
import torch
from torch import nn


class Detector(nn.Module):
    """Boxes in pixels, class logits and the class of each box."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.box, self.kind = nn.Linear(6, 16), nn.Linear(16, 4), nn.Linear(16, 5)

    def forward(self, x):
        seen = torch.relu(self.body(x))
        corner, size = self.box(seen).split(2, -1)
        boxes = torch.cat([400 + 100 * corner, 500 + 100 * corner + 20 * size.exp()], -1)
        logits = self.kind(seen)
        return {"boxes": boxes, "logits": logits, "labels": logits.argmax(-1)}


def get_model():
    return Detector()


def get_inputs():
    return torch.randn(4, 8, 6, generator=torch.Generator().manual_seed(0))
'''


@cache
def detector() -> nn.Module:
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    return space["Detector"]().eval()


CRITERIA = {"boxes": ["max_abs <= 0.5", "iou >= 0.99"], "logits": "kl <= 1e-6", "labels": "flips <= 0"}


@cache
def audited() -> auditor.Audit:
    return auditor.audit(detector(), normal(4, 8, 6), device="cpu", criteria=CRITERIA)


def by_hand(reference: dict[str, Tensor], low: dict[str, Tensor]) -> dict[str, float]:
    ours, theirs = reference["boxes"].double(), low["boxes"].double()
    shared = (torch.minimum(ours[..., 2:], theirs[..., 2:]) - torch.maximum(ours[..., :2], theirs[..., :2])).clamp(
        min=0
    )
    areas = [(x[..., 2:] - x[..., :2]).prod(-1) for x in (ours, theirs)]
    p, q = (x["logits"].double().softmax(-1) for x in (reference, low))
    return {
        "max_abs": float((ours - theirs).abs().max()),
        "iou": float((shared.prod(-1) / (sum(areas) - shared.prod(-1))).min()),
        "kl": float((p * (p.log() - q.log())).sum(-1).mean()),
        "flips": float((reference["labels"] != low["labels"]).double().mean()),
    }


@pytest.mark.parametrize("name", ["autocast_fp16", "autocast_bf16", "cast_fp16", "cast_bf16"])
def test_every_value_is_what_the_patched_model_gives(name: str) -> None:
    plan = audited().plans[name]
    model, x = detector(), normal(4, 8, 6)
    with torch.no_grad():
        reference = model(x)
    space: dict[str, Any] = {}
    exec(SOURCE, space)
    low = auditor.apply(space["Detector"]().eval(), plan)
    with auditor.emulate("cuda"), torch.no_grad():
        found = by_hand(reference, low(x))
    named = {one.kind: one for one in plan.verification.criteria}
    assert {kind: one.value for kind, one in named.items()} == pytest.approx(found, rel=1e-6, abs=1e-12)
    within = found["max_abs"] <= 0.5 and found["iou"] >= 0.99 and found["kl"] <= 1e-6 and found["flips"] <= 0
    assert plan.is_verified is within
    assert all(one.holds for one in named.values()) is within
    assert plan.measured_error == max(one.share for one in named.values())
    assert plan.is_verified


def test_a_criterion_makes_a_plan_that_the_joint_error_alone_does_not() -> None:
    without = auditor.audit(detector(), normal(4, 8, 6), device="cpu", formats="bf16", strategies="cast")
    assert without.plans["cast_bf16"].is_verified
    assert not without.plans["cast_bf16"].kept_modules
    baseline, plan = audited().baselines["cast_bf16"], audited().plans["cast_bf16"]
    assert {one.kind: one.holds for one in baseline.criteria}["max_abs"] is False
    assert plan.kept_modules
    assert plan.verification.joint < 0.01


def test_the_command_line_takes_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "detector.py"
    file.write_text(SOURCE + "\n\ndef far(reference, candidate):\n    return (reference - candidate).abs().max()\n")
    asked = ["--criterion", "boxes: max_abs <= 0.5", "--criterion", f"logits: {file}:far <= 0.1"]
    options = ["--formats", "bf16", "--strategies", "cast", "-q", "--out", str(tmp_path / "out")]
    assert main([str(file), *asked, *options]) in (0, 1)
    document = auditor.load(tmp_path / "out")
    plan = document.plans["cast_bf16"]
    assert [(one.output, one.holds) for one in plan.verification.criteria] == [
        ("boxes", True),
        ("logits", True),
        ("labels", True),
    ]
    assert plan.is_verified
    capsys.readouterr()
    assert main([str(file), "--criterion", "boxes: max <= 0.5", *options]) == 2
    assert "'max' is not a criterion: did you mean rel_max? Available:" in capsys.readouterr().err
