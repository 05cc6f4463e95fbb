"""Whole audits under criteria: what the files say is what the patched model does, by hand and by definition."""

import math
from functools import cache
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.errors import CallbackError
from auditor.records import Audit
from auditor.report.view import ReportView
from auditor.reporters import REPORTERS
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

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
    assert not without.plans["cast_bf16"].has_fp32
    baseline, plan = audited().baselines["cast_bf16"], audited().plans["cast_bf16"]
    assert {one.kind: one.holds for one in baseline.criteria}["max_abs"] is False
    assert plan.has_fp32
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
    assert "'max' is not a kind of criterion: did you mean rel_max? Available:" in capsys.readouterr().err


# Discrete outputs may not flip unless that is allowed; what else the recording shows is proposed, and said of nothing
# else.


def net(forward: Any) -> nn.Module:
    return seeded(lambda: Model(forward, body=nn.Linear(6, 16), head=nn.Linear(16, 5)))


def found_by(forward: Any, *inputs: Tensor, **how: Any) -> Audit:
    return auditor.audit(net(forward), inputs or (normal(32, 6),), **{"formats": "bf16", "strategies": "cast", **how})


def proposals(audit: Audit) -> dict[str, str]:
    return {one.output: one.criterion for one in audit.proposals}


def near_ties(self: Any, x: Tensor) -> dict[str, Tensor]:
    """A mask of what is above the reference's own values: rounding flips about half of it, unless the layer is FP32."""
    y = self.body(x)
    return {"y": y, "mask": y > THRESHOLD}


with torch.no_grad():
    THRESHOLD = net(lambda self, x: self.body(x))(normal(32, 6)) * (1 + 1e-4)


def test_a_mask_may_not_flip_by_default() -> None:
    found = found_by(near_ties)
    assert found.criteria == ("mask: flips <= 0", "the other outputs: rel_l2 <= 0.01")
    assert found.baselines["cast_bf16"].criteria[0].value > 0.01
    assert not found.baselines["cast_bf16"].criteria[0].holds
    assert all(plan.verification.criteria[0].value == 0 for plan in found.plans.values() if plan.is_verified)
    held = next(one for one in found.proposals if one.holds)
    assert (held.output, held.criterion) == ("mask", "mask: flips <= 0")
    assert found.baselines["cast_bf16"].criteria[0].entries == 32 * 16
    flat = " ".join(REPORTERS["text"](found).split())
    assert "By default no entry of mask may differ" in flat
    assert "To allow a share X of the entries to differ: --criterion 'mask: flips <= X'" in flat


class Tagger(nn.Module):
    """Tags of 120 words. The scores of the two best tags differ by 3e-4, which only the last layer's rounding decides."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
        self.last = nn.Linear(64, 30)
        with torch.no_grad():
            self.last.weight[1] = self.last.weight[0] * (1 + 3e-4)
            self.last.bias[:2] += 3
            self.last.bias[1] = self.last.bias[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x + self.body(x)).argmax(-1)


def test_a_plan_for_a_default_limit_says_how_many_entries_change_without_it() -> None:
    found = auditor.audit(seeded(Tagger), normal(120, 64), device="cpu", formats="fp16", strategies="autocast")
    verdict = " ".join(REPORTERS["text"](found).split()).partition("To do")[0]
    without = verdict.partition("Without the plan, in FP16 under autocast, ")[2]
    assert (
        " of 120 entries of `output` change, and the limit is `output: flips <= 0`; to allow this: --criterion"
        in without
    )
    assert "largest share" not in without


def mask_of(self: Any, x: Tensor) -> dict[str, Tensor]:
    """A mask of 16 entries for each row, above 0."""
    return {"mask": self.body(x) > 0}


@pytest.mark.parametrize(("rows", "limit"), [(62, "0"), (63, "0.001"), (64, "0.001")])
def test_the_default_limit_of_a_mask_depends_on_its_size(rows: int, limit: str) -> None:
    # 62 x 16 = 992 entries, of which 0.001 is less than one entry; 63 x 16 = 1,008
    found = auditor.audit(net(mask_of), normal(rows, 6), device="cpu", formats=("bf16",))
    assert found.criteria == (f"mask: flips <= {limit}",)
    flat = unescape(" ".join(REPORTERS["md"](found).split()).replace("\\", ""))
    allowed = "no entry" if limit == "0" else "at most a share of 0.001 of the entries"
    assert f"By default {allowed} of mask may differ" in flat
    assert "--criterion 'mask: flips <= X'" in flat
    assert f" of {rows * 16:,} entries of `mask` change" in flat


def choices_of(self: Any, x: Tensor) -> dict[str, Tensor]:
    """Choices and counts of choices, as integers and in floating point, beside their scores."""
    scores = self.body(x)
    above = scores > 0
    return {
        "scores": scores,
        "mask": above.float(),
        "classes": scores.argmax(-1).to(torch.float32)[:, None],
        "signs": scores.sign(),
        "label": torch.where(above, 1.0, 0.0),
        "count": above.sum(),
        "each": torch.count_nonzero(above, 0),
        "share": above.float().mean(),
        "number": above.sum().float(),
    }


def test_choices_in_floating_point_may_flip_as_integers_may_and_counts_are_numbers() -> None:
    found = auditor.audit(net(choices_of), normal(128, 6), device="cpu", formats=("bf16",))
    assert set(found.criteria) == {
        "mask: flips(values) <= 0.001",
        "classes: flips(values) <= 0",
        "signs: flips(values) <= 0.001",
        "label: flips(values) <= 0.001",
        "count: rel_l2 <= 0.01",
        "each: rel_l2 <= 0.01",
        "the other outputs: rel_l2 <= 0.01",
    }
    flat = unescape(" ".join(REPORTERS["md"](found).split()).replace("\\", ""))
    assert "By default count may have a relative error of 0.01, since it counts choices" in flat
    assert "By default no entry of classes may differ" in flat


def counts_of(self: Any, x: Tensor) -> dict[str, Tensor]:
    """Histograms of choices, numbers computed from counts, and choices computed from counts, beside their scores."""
    scores = self.body(x)
    chosen = scores.argmax(-1)
    ones, empty = torch.ones_like(chosen), torch.zeros(16, dtype=torch.long)
    histogram = empty.index_add(0, chosen, ones)
    return {
        "scores": scores,
        "index_add": histogram,
        "scatter_add": empty.scatter_add(0, chosen, ones),
        "index_put": empty.index_put((chosen,), ones, accumulate=True),
        "bins": 4 * torch.bincount(chosen, minlength=16),
        "pairs": torch.stack([2 * histogram.clamp(max=100), histogram.max() - histogram]),
        "written": empty.index_put((chosen,), ones),
        "most": histogram.argmax()[None],
        "doubled": 2 * chosen[:8],
    }


def test_histograms_and_numbers_computed_from_counts_are_numbers() -> None:
    found = auditor.audit(net(counts_of), normal(128, 6), device="cpu", formats=("bf16",))
    assert set(found.criteria) == {
        "index_add: rel_l2 <= 0.01",
        "scatter_add: rel_l2 <= 0.01",
        "index_put: rel_l2 <= 0.01",
        "bins: rel_l2 <= 0.01",
        "pairs: rel_l2 <= 0.01",
        "written: flips <= 0",
        "most: flips <= 0",
        "doubled: flips <= 0",
        "the other outputs: rel_l2 <= 0.01",
    }


def test_few_pixels_of_a_floating_point_mask_do_not_keep_a_model_in_fp32() -> None:
    """One flipped pixel of 4,096 is a relative error of about 1 / sqrt(2,048), above the budget."""

    def segment(self: Any, x: Tensor) -> Tensor:
        return (self.body(x) > THRESHOLD_OF_FEW).float()

    inputs = normal(256, 6)
    with torch.no_grad():
        scores = net(lambda self, x: self.body(x))(inputs)
    THRESHOLD_OF_FEW = scores.clone() - 1.0
    THRESHOLD_OF_FEW[0, 0] = scores[0, 0] * (1 - 1e-7)
    found = auditor.audit(net(segment), inputs, device="cpu", formats=("bf16",), strategies=("cast",))
    assert found.criteria == ("output: flips(values) <= 0.001",)
    (plan,) = found.plans.values()
    assert plan.kept_modules == ()
    assert "of 4,096 entries of `output` change" in ReportView(found).headline + REPORTERS["md"](found).replace(
        "\\", ""
    )


def test_some_flips_are_allowed_by_a_criterion_or_a_metric_of_ones_own() -> None:
    allowed = found_by(near_ties, criteria="mask: flips <= 1")
    assert allowed.criteria == ("mask: flips <= 1", "the other outputs: rel_l2 <= 0.01")
    assert allowed.metric.startswith("largest value of a criterion")
    assert allowed.plans["cast_bf16"].is_verified
    assert allowed.plans["cast_bf16"].kept_modules == ()
    assert not any(one.holds for one in allowed.proposals)
    own = found_by(near_ties, metric=lambda r, c: float((r[0] - c[0].float()).norm() / r[0].norm()))
    assert (own.metric, own.criteria, own.proposals) == ("<lambda>", (), ())


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (lambda self, x: self.head(self.body(x)).log_softmax(-1), {"output": "output: nats <= 0.02"}),
        (lambda self, x: self.body(x).log_softmax(0).view(-1), {"output": "output: nats(dim=0) <= 0.02"}),
        (lambda self, x: self.head(self.body(x)), {"output": "output: kl <= 0.001"}),
        (lambda self, x: self.head(self.body(x)).reshape(4, 8, 5), {"output": "output: kl <= 0.001"}),
        (lambda self, x: self.head(self.body(x)).softmax(-1), {}),
        (lambda self, x: self.head(self.body(x))[:, :1].relu(), {}),
        (lambda self, x: self.body(x).tanh(), {}),
    ],
)
def test_log_probabilities_and_logits_are_known_by_their_last_operation(forward: Any, expected: dict[str, str]) -> None:
    assert proposals(found_by(forward)) == expected


def decoded(self: Any, x: Tensor, grid: Tensor) -> Tensor:
    return (self.body(x)[:, 0] + grid + 0.5) * 8


def test_positions_that_whole_numbers_are_added_into_may_be_in_pixels() -> None:
    inputs = normal(32, 6), torch.arange(32) + 100
    found = found_by(decoded, *inputs)
    assert proposals(found) == {"output": "output: max_abs <= 0.5"}
    assert found.plans["cast_bf16"].kept_modules == ()  # an error of 0.3 % is within the budget, and pixels off
    set_ = found_by(decoded, *inputs, criteria=found.proposals[0].criterion)
    assert set_.baselines["cast_bf16"].criteria[0].value > 0.5
    assert set_.plans["cast_bf16"].is_verified
    assert set_.plans["cast_bf16"].verification.criteria[0].value <= 0.5
    scaled = found_by(lambda self, x, m: self.body(x) * m[:, None], normal(32, 6), torch.ones(32, dtype=torch.long))
    assert proposals(scaled) == {}


def test_an_output_far_worse_than_the_rest_is_named() -> None:
    def forward(self: Any, x: Tensor) -> dict[str, Tensor]:
        y = self.body(x).tanh()
        return {"large": y, "small": (y[:, :1] + 1 - 1 - y[:, :1] * 0.999).tanh()}

    found = found_by(forward)
    plan = found.plans["cast_bf16"]
    assert plan.is_verified
    error = plan.verification.apart["small"]
    assert set(plan.verification.apart) == {"small"}
    assert error > 10 * plan.measured_error
    (one,) = found.proposals
    assert (one.output, one.criterion) == ("small", "small: rel_l2 <= 0.01")
    assert (
        f"its own relative error is {error:.2g} in BF16 with cast weights, {error / plan.measured_error:,.0f} times"
        in one.because
    )
    own = found_by(forward, criteria="small: rel_l2 <= 1000")
    assert proposals(own) == {}
    assert found.recommended == own.recommended == "cast_bf16"
    sentence = f"But output `small` on its own has error {error:.2g}, above the budget of 0.01;"
    headline = " ".join(ReportView(found).headline.split())
    assert sentence in headline
    assert "--criterion 'small: rel_l2 <= 0.01'" in headline
    assert "on its own" not in ReportView(own).headline
    held = found_by(forward, criteria="small: rel_l2 <= 0.01")
    line = forward.__code__.co_firstlineno + 2
    blamed = {finding.source for finding in held.findings if finding.severity == "warning"}
    assert blamed and all(source.startswith(f"{Path(__file__).name}:{line}") for source in blamed), blamed


class Picture(nn.Module):
    """A small decoder of images."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        return self.last(self.first(z).relu()).tanh().clamp(-1, 1)


def likeness(reference: list[Tensor], candidate: list[Tensor]) -> float:
    return 1 - float((reference[0] - candidate[0]).abs().mean())


def decibels(reference: list[Tensor], candidate: list[Tensor]) -> float:
    error = float((reference[0] - candidate[0]).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


@pytest.mark.parametrize("metric", [likeness, decibels])
def test_a_metric_of_which_higher_values_are_better(metric: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metric, "higher_is_better", True, raising=False)
    options: dict[str, Any] = {"formats": "bf16", "strategies": "autocast", "device": "cpu"}
    model, z = seeded(Picture), normal(1, 4, 16, 16)
    audit = auditor.audit(model, z, metric=metric, max_error=0.05, **options)
    assert audit.metric == f"loss of {metric.__name__}"
    assert audit.plan is not None
    assert audit.plan.measured_error is not None
    assert 0 < audit.plan.measured_error < 0.05
    strict = auditor.audit(model, z, metric=metric, max_error=audit.plan.measured_error / 2, **options)
    assert strict.plan is None or strict.plan.measured_error is not None
    assert strict.plan is None or strict.plan.measured_error < audit.plan.measured_error


def test_a_metric_that_is_large_for_equal_outputs_names_the_remedy() -> None:
    with refused(CallbackError, "bad-callback", "returned 1 for equal outputs", "likeness.higher_is_better = True"):
        auditor.audit(seeded(Picture), normal(1, 4, 16, 16), metric=likeness, formats="bf16", device="cpu")


def test_an_image_gets_a_hint_at_perceptual_measures() -> None:
    audit = auditor.audit(seeded(Picture), normal(1, 4, 16, 16), formats="bf16", strategies="autocast", device="cpu")
    (proposal,) = audit.proposals
    assert proposal.criterion == "output: psnr >= 40"
    assert "LPIPS" in proposal.because


def test_a_denoiser_has_no_logits() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    audit = auditor.audit(model, normal(2, 8), formats="bf16", strategies="autocast", device="cpu")
    assert audit.proposals == ()
