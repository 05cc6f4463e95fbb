"""Times of FP32 and of every plan: measured on the emitted file where there is one, held against FP32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.plan.verified import against
from auditor.records import Timed, Times
from auditor.verify import running

MODEL = """
import torch
from torch import nn

torch.set_float32_matmul_precision("medium")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.head = nn.Linear(32, 32), nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.lin(x).relu())

def get_model():
    torch.manual_seed(0)
    return Net()

def get_inputs():
    return torch.ones(6, 32)
"""


def test_a_speed_up_has_the_spread_of_both() -> None:
    whole = Timed(eager=Times(0.4, 0.3, 0.5, 9), compiled=Times(0.1, 0.1, 0.1, 9), memory=200)
    found = against(Timed(eager=Times(0.2, 0.1, 0.25, 9), memory=50), whole)
    assert found.eager is not None and found.compiled is None
    assert found.eager.speedup == pytest.approx(2.0)
    assert found.eager.speedup_low == pytest.approx(0.3 / 0.25)
    assert found.eager.speedup_high == pytest.approx(0.5 / 0.1)
    assert found.memory_share == 0.25
    assert against(Timed(missing={"eager": "it raised"}), whole) == Timed(missing={"eager": "it raised"})


def test_a_model_in_hand_is_timed_as_it_is_and_its_recommendation_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "SECONDS", 0.001)
    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    given: Any = (model.eval(), (torch.ones(6, 32),))
    asked = {"device": "cpu", "formats": ("bf16", "fp8_e4m3"), "strategies": "autocast"}
    untimed = auditor.audit(*given, **asked)
    assert untimed.timing is None and all(plan.timed is None for plan in untimed.plans.values())
    audit = auditor.audit(*given, **asked, measure_time=True)
    assert (audit.timing.device, audit.timing.batch, audit.timing.fp32_today) == ("cpu", 6, None)
    assert audit.timing.threads == torch.get_num_threads()
    ran = audit.plans["autocast_bf16"].timed
    assert ran is not None and ran.eager is not None and ran.memory is not None and not ran.decides
    whole = audit.timing.fp32
    assert ran.eager.speedup == pytest.approx(whole.eager.median / ran.eager.median)
    assert ran.memory_share == pytest.approx(ran.memory / whole.memory)
    assert audit.plans["autocast_fp8_e4m3"].timed is None  # nothing runs in it
    assert (audit.recommended, audit.recommendation) == (untimed.recommended, untimed.recommendation)


@pytest.mark.slow
def test_the_emitted_file_is_timed_in_a_process_of_its_own_under_flags_that_its_source_sets(tmp_path: Path) -> None:
    file, out = tmp_path / "net.py", tmp_path / "out"
    file.write_text(MODEL, encoding="utf-8")
    from auditor.cli.program import main

    assert main([str(file), "--measure-time", "--device", "cpu", "--formats", "bf16", "-q", "--out", str(out)]) in (
        0,
        1,
    )
    audit = auditor.load(out)
    assert torch.get_float32_matmul_precision() == "highest"
    assert audit.environment.flags["float32_matmul_precision"] == "medium"
    assert audit.timing.fp32_today.eager is not None and audit.timing.fp32_today.eager.speedup is not None
    for plan in audit.plans.values():
        assert plan.timed is not None and plan.timed.eager is not None
        assert (plan.timed.compiled is None) == ("compiled" in plan.timed.missing)
    assert audit.timing.fp32.memory == 4 * (32 * 32 + 32 + 32 * 4 + 4) + 4 * 6 * 32 + 2 * 4 * 6 * 32
