"""An audit that comes back from its files says what it said before, and says what is not there."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.document.again import ALONE, load
from auditor.document.write import texts
from auditor.errors import PlanError
from auditor.records import Audit
from auditor.report import reporters
from tests.unit.report.factory import make_audit

KINDS: dict[str, dict[str, Any]] = {
    "usual": {},
    "hostile": {"nodes": 60, "hostile": True, "synthetic": True},
    "empty": {"empty": True},
    "one format": {"nodes": 30, "formats": ("bf16",), "recommended": None},
}


class Net(nn.Module):
    """An overflow in FP16, a discrete output, two names of one weight, a path with a slash."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.by_name = nn.ModuleDict({"a/b~c": nn.Linear(8, 4)})

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.second(self.first(x).relu() * 1e6) / 1e6
        scores = self.by_name["a/b~c"](x).masked_fill(x[:, :4] > 9, -1e9).softmax(-1)
        return scores, scores.argmax(-1)


def seeded() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture(scope="module")
def real() -> Audit:
    return auditor.audit(seeded(), torch.randn(16, 8), device="cpu")


@pytest.fixture(scope="module")
def trained() -> Audit:
    data = [(torch.randn(8, 8), torch.randint(0, 4, (8,))) for _ in range(2)]

    def loss(outputs: Any, target: Tensor) -> Tensor:
        return nn.functional.nll_loss(outputs[0].log(), target)

    return auditor.audit(seeded(), data, mode="training", loss_fn=loss, device="cpu")


def told(audit: Audit) -> dict[str, str]:
    """All that reporters say of it."""
    return {name: reporters.rendered(name, audit) for name in reporters.names()}


def check(audit: Audit, folder: Path) -> Audit:
    """It comes back from its files with everything; what is found."""
    audit.save(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = load(folder)
    assert repr(found.nodes) == repr(load(folder / "plan.json").nodes)
    assert {name: text.encode() for name, text in texts(found).items()} == {
        name: before[name] for name in ("plan.json", "measurements.json")
    }
    assert told(found) == told(audit)
    found.save(folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_made_up_audits_come_back(kind: str, tmp_path: Path) -> None:
    check(make_audit(**KINDS[kind]), tmp_path)


def test_a_real_audit_comes_back_whole(real: Audit, tmp_path: Path) -> None:
    found = check(real, tmp_path)
    assert found.tied_parameters == (("first.weight", "second.weight"),)
    assert [r.node.name for r in found.nodes] == [r.node.name for r in real.nodes]
    errors = [(a.errors["fp16"], b.errors["fp16"]) for a, b in zip(real.nodes, found.nodes, strict=True) if a.errors]
    assert any(a.local_error == float("inf") == b.local_error for a, b in errors)
    assert [r.verdicts for r in found.nodes] == [r.verdicts for r in real.nodes]
    assert found.recommended == real.recommended
    assert found.plans.keys() == real.plans.keys()
    for name, plan in found.plans.items():
        assert (plan.scopes.keys(), plan.verified) == (real.plans[name].scopes.keys(), real.plans[name].verified)
        assert plan.verification is not None


def test_training_comes_back(trained: Audit, tmp_path: Path) -> None:
    found = check(trained, tmp_path)
    assert found.training is not None
    assert trained.training is not None
    assert [trial.scale for trial in found.training.trials] == [trial.scale for trial in trained.training.trials]
    windows = found.training.fp16, trained.training.fp16
    assert len({(w.minimum, w.maximum, w.init, w.largest) for w in windows if w is not None}) == 1


def test_its_plans_are_applied_to_a_model_in_hand(real: Audit, tmp_path: Path) -> None:
    real.save(tmp_path)
    x = torch.randn(4, 8)
    results = []
    for plan in (real, auditor.load(tmp_path), Audit.load(tmp_path), tmp_path):
        with auditor.imitated("cuda"):
            results.append(auditor.apply(seeded(), plan, "autocast_bf16")(x)[0])
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_the_model_is_not_there(real: Audit, tmp_path: Path) -> None:
    real.save(tmp_path)
    found = load(tmp_path)
    assert (found.subject.present, found.subject.batches, found.seconds) == (False, (), real.seconds)
    with pytest.raises(PlanError, match="hold no model") as caught:
        found.subject.model(torch.ones(1, 8))
    assert caught.value.slug == "no-model-here"


def test_a_plan_alone_says_what_is_not_there(real: Audit, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(texts(real)["plan.json"])
    found = load(tmp_path)
    assert found.nodes == ()
    assert found.warnings[-1] == ALONE
    assert len(found.findings) == len(real.findings)
    assert {(f.rule, f.owner) for f in found.findings} == {(f.rule, f.owner) for f in real.findings}
    assert all(told(found).values())
    assert ALONE in " ".join(told(found)["md"].split())


def test_measurements_of_another_audit_are_refused(real: Audit, tmp_path: Path) -> None:
    real.save(tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    plan["plans"]["cast_fp16"]["verified"] = not plan["plans"]["cast_fp16"]["verified"]
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    with pytest.raises(PlanError, match=r"was written with another plan\.json") as caught:
        load(tmp_path)
    assert caught.value.slug == "bad-plan"
    (tmp_path / "measurements.json").unlink()
    assert load(tmp_path).plans["cast_fp16"].verified == plan["plans"]["cast_fp16"]["verified"]


@pytest.mark.parametrize(
    ("kind", "pointer"),
    [
        ("inf", "/nodes/0/name"),
        ("inf", "/nodes/99999"),
        ("inf", "/nodes/-1/code"),
        ("inf", ""),
        ("inf", "/nodes/\u0661/code"),
        ("inf", "/plans/cast_fp16/strategy"),
        ("big", "/plans/cast_fp16/failure"),
    ],
)
def test_what_is_not_finite_has_to_be_a_null_of_the_files(real: Audit, tmp_path: Path, kind: str, pointer: str) -> None:
    real.save(tmp_path)
    measured = json.loads((tmp_path / "measurements.json").read_text())
    changed = copy.deepcopy(measured)
    changed["not_finite"] = {kind: [pointer]}
    (tmp_path / "measurements.json").write_text(json.dumps(changed))
    with pytest.raises(PlanError, match="leads to no null") as caught:
        load(tmp_path)
    assert caught.value.slug == "bad-plan"


def test_paths_in_the_files_are_those_of_the_repository(real: Audit, tmp_path: Path) -> None:
    here = str(Path(__file__).resolve().parents[3])
    written = texts(real)
    assert all(here not in text for text in written.values())
    nodes = json.loads(written["measurements.json"])["nodes"]
    assert {node["file"] for node in nodes} >= {"tests/unit/document/test_again.py"}
