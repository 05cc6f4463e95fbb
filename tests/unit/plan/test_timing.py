"""Times of FP32 and of every plan: measured on the emitted file where there is one, held against FP32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.plan.verified import against
from auditor.records import Timed, Times
from auditor.verify import running


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
