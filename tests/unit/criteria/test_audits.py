"""Whole audits under criteria: what the files say is what the patched model does, by hand and by definition."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli.program import main
from auditor.errors import AuditorError
from tests.subjects import normal

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
    with auditor.imitated("cuda"), torch.no_grad():
        found = by_hand(reference, low(x))
    assert plan.verification is not None
    named = {one.kind: one for one in plan.verification.criteria}
    assert {kind: one.value for kind, one in named.items()} == pytest.approx(found, rel=1e-6, abs=1e-12)
    within = found["max_abs"] <= 0.5 and found["iou"] >= 0.99 and found["kl"] <= 1e-6 and found["flips"] <= 0
    assert plan.verified is within
    assert all(one.holds for one in named.values()) is within
    assert plan.measured_error == max(one.share for one in named.values())
    assert plan.verified


def test_a_criterion_makes_a_plan_that_the_joint_error_alone_does_not() -> None:
    without = auditor.audit(detector(), normal(4, 8, 6), device="cpu", formats="bf16", strategies="cast")
    assert without.plans["cast_bf16"].verified
    assert not without.plans["cast_bf16"].kept
    baseline, plan = audited().baselines["cast_bf16"], audited().plans["cast_bf16"]
    assert {one.kind: one.holds for one in baseline.criteria}["max_abs"] is False
    assert plan.kept
    assert plan.verification.joint < 0.01


SAID = re.compile(r"alone it (?:is predicted to take|takes) (\S+)% of what '(.+)' allows")
BREAKS = re.compile(r"alone it (breaks|is predicted to break|holds|is predicted to hold) '(.+)'")


def test_verdicts_say_which_criterion_an_operation_takes_how_much_of() -> None:
    told = set()
    for report in audited().nodes:
        for fmt, verdict in report.verdicts.items():
            found = report.contributions.get(fmt)
            if (said := SAID.search(verdict.reason)) and found is not None:
                assert said[2] == found.criterion
                assert float(said[1]) / 100 == pytest.approx(found.isolated, rel=0.06)
                assert found.isolated <= 0.25 or verdict.verdict in ("sensitive", "unsafe")
                told.add(said[2])
            if (broken := BREAKS.search(verdict.reason)) and found is not None:
                assert broken[2] == found.criterion == "labels: flips <= 0"
                assert ("break" in broken[1]) == (found.isolated > 1)
    assert "boxes: max_abs <= 0.5" in told
    assert told <= set(audited().criteria)


def test_operations_run_together_are_held_to_the_criteria_too() -> None:
    audit = auditor.audit(
        detector(), normal(4, 8, 6), device="cpu", formats="bf16", strategies="cast", criteria="boxes: max_abs <= 5"
    )
    assert audit.regions
    for region in audit.regions:
        assert region.error is not None
        assert region.error > region.explained / 5  # in relative L2 it would be a hundredth of that and less


def test_the_files_hold_them_and_are_read_again(tmp_path: Path) -> None:
    audit = audited()
    audit.save(tmp_path)
    again = auditor.load(tmp_path)
    assert again.criteria == (
        "boxes: max_abs <= 0.5",
        "boxes: iou >= 0.99",
        "logits: kl <= 1e-06",
        "labels: flips <= 0",
    )
    assert again.to_json() == audit.to_json()
    for name, plan in audit.plans.items():
        assert [(one.output, one.holds) for one in plan.verification.criteria] == [
            (one.output, one.holds) for one in again.plans[name].verification.criteria
        ]
    document = audit.to_json()
    assert document["max_error"] == 1.0
    assert document["plans"]["cast_bf16"]["verification"]["joint"] == pytest.approx(
        audit.plans["cast_bf16"].verification.joint
    )


@dataclass
class Answer:
    mean: Tensor
    parts: tuple[Tensor, Tensor]
    note: str = "no tensor"


class Encoder(nn.Module):
    """Its output is a dataclass with a tuple in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> Answer:
        y = self.layer(x)
        return Answer(y.mean(-1), (y, torch.log_softmax(y, -1)))


def test_without_criteria_the_files_have_none() -> None:
    document = auditor.audit(Encoder().eval(), normal(4, 6), device="cpu", formats="bf16", strategies="cast").to_json()
    ran = document["plans"]["cast_bf16"]["verification"]
    assert (document["criteria"], ran["criteria"], ran["joint"]) == ([], [], None)
    assert document["baselines"]["cast_bf16"]["criteria"] == []


@pytest.mark.parametrize("formats", ["fp16", "bf16"])
def test_fields_and_positions_name_outputs(formats: str) -> None:
    asked = {"parts.1": "nats <= 0.1", "mean": "max_abs <= 1"}
    audit = auditor.audit(Encoder().eval(), normal(4, 6), device="cpu", formats=formats, criteria=asked)
    assert audit.criteria == ("parts.1: nats <= 0.1", "mean: max_abs <= 1", "the other outputs: rel_l2 <= 0.01")
    for plan in audit.plans.values():
        assert [one.output for one in plan.verification.criteria] == ["parts.1", "mean", "the other outputs"]
        assert plan.verified


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("part.1: nats <= 0.1", "returns no 'part.1', .* did you mean parts.1. It returns mean, parts.0, parts.1"),
        ("parts: iou >= 0.1", "iou is for boxes, four numbers in the last dimension, and parts.0 is float32"),
        ("mean: top1 >= 1; mean: topk(9) >= 1", r"topk\(9\) wants more entries than dimension -1 of mean has"),
    ],
)
def test_what_does_not_fit_the_model_is_one_line(asked: str, said: str) -> None:
    with pytest.raises(AuditorError, match=said) as caught:
        auditor.audit(Encoder().eval(), normal(4, 6), device="cpu", criteria=asked)
    assert caught.value.slug == "bad-criterion"


class Sometimes(nn.Module):
    """Its second output is there for large batches only, and then comes first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"scaled": 100 * y, "y": y} if len(x) > 2 else {"y": y}


def test_an_output_that_not_every_input_gives_is_judged_where_it_is() -> None:
    batches = [(normal(4, 6),), (normal(2, 6),)]
    asked = {"device": "cpu", "formats": "bf16", "strategies": "cast"}
    audit = auditor.audit(Sometimes().eval(), batches, criteria=["scaled: max_abs <= 100", "y: max_abs <= 1"], **asked)
    scaled, y = audit.plans["cast_bf16"].verification.criteria
    largest = Sometimes()(batches[0][0])["scaled"].abs().max().item()
    assert y.value < scaled.value <= 100 * y.value + 2**-8 * largest  # and a rounding of its own, half a unit
    assert audit.plans["cast_bf16"].verified
    with pytest.raises(
        AuditorError, match=r"returns no 'scaled', which 'scaled: max_abs <= 1' speaks of\. It returns y"
    ):
        auditor.audit(Sometimes().eval(), batches[::-1], criteria="scaled: max_abs <= 1", **asked)


class Masked(nn.Module):
    """Scores and where they are large: the mask is all that is wanted of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key, self.query = nn.Linear(8, 16), nn.Linear(8, 16)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        return {"scores": scores, "mask": scores > 0.25}


def test_a_mask_that_must_not_flip_keeps_what_decides_it_in_fp32() -> None:
    x, asked = normal(4, 32, 8), {"device": "cpu", "formats": "bf16", "strategies": "autocast", "max_error": 0.05}
    loose = auditor.audit(Masked().eval(), x, criteria="mask: flips <= 0.1", **asked).plans["autocast_bf16"]
    strict = auditor.audit(Masked().eval(), x, criteria="mask: flips <= 0", **asked)
    flipped = next(one for one in loose.verification.criteria if one.output == "mask")
    assert 0 < flipped.value <= 0.1
    assert not loose.kept
    plan = strict.plans["autocast_bf16"]
    assert next(one for one in plan.verification.criteria if one.output == "mask").value == 0
    assert plan.verified
    assert plan.kept
    broken = [r for r in strict.nodes if "breaks 'mask: flips <= 0'" in r.verdicts["bf16"].reason]
    assert {r.verdicts["bf16"].verdict for r in broken} == {"unsafe"}


class Kept(nn.Module):
    """Outputs of every layout, and of no entries."""

    def __init__(self, wanted: str) -> None:
        super().__init__()
        self.layer, self.wanted = nn.Linear(6, 8), wanted

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.wanted == "sparse":
            return y.to_sparse()
        if self.wanted == "nested":
            return torch.nested.nested_tensor([y[:2], y[:3]])
        return torch.view_as_complex(y.unflatten(-1, (4, 2))) if self.wanted == "complex" else y[y.shape[0] :]


@pytest.mark.parametrize(
    ("wanted", "asked"),
    [
        ("sparse", "output: kl <= 0.1; output: max_abs <= 0.1"),
        ("nested", "output: max_abs <= 0.1"),
        ("complex", "output: max_abs <= 0.1; output: rel_l2 <= 0.1"),
        ("empty", "output: kl <= 0.1; output: max_abs <= 0.1; output: cosine >= 0.5"),
    ],
)
def test_every_layout_is_held(wanted: str, asked: str) -> None:
    x, options = normal(4, 6), {"device": "cpu", "formats": "bf16", "strategies": "cast"}
    plan = auditor.audit(Kept(wanted).eval(), x, criteria=asked, **options).plans["cast_bf16"]
    assert plan.verified
    assert all(one.holds for one in plan.verification.criteria)
    assert any(one.value not in (0.0, 1.0) for one in plan.verification.criteria) is (wanted != "empty")


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
    assert plan.verified
    capsys.readouterr()
    assert main([str(file), "--criterion", "boxes: max <= 0.5", *options]) == 2
    assert "'max' is no kind of criterion: did you mean rel_max? They are" in capsys.readouterr().err
