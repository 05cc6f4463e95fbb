"""The gain that an audit predicts for a repair agrees with the plan of the repaired source."""

from dataclasses import replace
from pathlib import Path

import pytest

from auditor import flow
from auditor.loading import load
from auditor.records import Audit
from auditor.settings import Settings
from tests.features.fix.problems import PROBLEMS, Problem

MEAN = """
def op(h, index):
    out = torch.zeros(128, 256, dtype=h.dtype).index_add(0, index, h)
    n = torch.zeros(128).index_add(0, index, torch.ones(128))
    return (out / n.clamp(min=1)[:, None]).to(h.dtype)
"""
"""A sum in low precision, and FP32 values that the next layer would convert: the two lines that the findings name."""

REPAIRED = {
    "norm_upcast": ("bf16", ""),
    "one_hot_mix": ("bf16", ""),
    "scatter_mean": ("bf16", MEAN),
    "groups": ("fp16", "def op(h):\n    return F.layer_norm(h.view(128, 8, 32), (32,)).view(128, 256)"),
}
"""{problem: the format, and the helper as the findings' lines make it, "" for a person's}: FP32 values that are converted where
low-precision ones meet them, a cast to FP32 that is left out, a tensor made in low precision, and operations that become one."""


def audited(folder: Path, problem: Problem, fmt: str) -> Audit:
    (folder / ".git").mkdir(parents=True)
    file = problem.write(folder)
    return flow.run(load(str(file)), Settings(formats=(fmt,), strategies=("cast",)))


@pytest.mark.parametrize("name", REPAIRED)
def test_a_repair_is_predicted_within_15_percent(name: str, tmp_path: Path) -> None:
    problem = next(one for one in PROBLEMS if one.name == name)
    fmt, helper = REPAIRED[name]
    audit = audited(tmp_path / "before", problem, fmt)
    after = replace(problem, name=f"{name}_repaired", helper=helper or problem.fixed)
    plan = audited(tmp_path / "after", after, fmt).plan
    assert plan is not None
    assert audit.repairs
    assert audit.repairs[0].speedup == pytest.approx(plan.speedup, rel=0.15)
