"""On a GPU: FP32 as it is set beside IEEE FP32, the noise of kernels that add in an order that varies, and measured times."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

import auditor
from tests.pretend_gpu import kernels
from tests.pretend_gpu.natively import natively

X = torch.linspace(-1, 1, 12 * 16).reshape(12, 16)


@natively
def test_tf32_is_a_row_of_its_own_where_flags_allow_it() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval(), torch.randn(2, 3, 8, 8)
    asked: dict[str, Any] = {"formats": "fp16", "strategies": "autocast", "device": "pretend"}
    audit = auditor.audit(model, (x,), **asked)
    today = audit.fp32_today
    assert today is not None and today.computed_in == ("tf32",) and today.measured_error is not None
    assert audit.environment.flags["cudnn.allow_tf32"] is True and torch.backends.cudnn.allow_tf32
    with torch.no_grad():
        exact, rounded = model(x), nn.Sequential(*model).to("pretend")(x.to("pretend")).cpu()
        model.to("cpu")
    assert abs(today.measured_error - float((rounded - exact).norm() / exact.norm())) < 1e-6
    torch.backends.cudnn.allow_tf32 = False
    try:
        assert auditor.audit(model, (x,), **asked).fp32_today is None
    finally:
        torch.backends.cudnn.allow_tf32 = True


class Pools(nn.Module):
    """Sums in which much cancels, so that their order shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        rows = torch.cat([h, h.detach() * 0 + 3e4, h.detach() * 0 - 3e4])
        where = torch.arange(len(rows), device=x.device) % 3
        return self.b(torch.zeros(3, 16, device=x.device).index_add(0, where, rows))


@natively
def test_what_atomics_do_is_no_error() -> None:
    torch.manual_seed(0)
    model, computed, order = Pools().eval(), kernels._computed, torch.Generator()

    def atomic(op: Any, packet: str, args: Any, kwargs: Any, low: Any) -> Any:
        if packet != "index_add":
            return computed(op, packet, args, kwargs, low)
        given, axis, index, rows = args
        shuffled = torch.randperm(len(index), generator=order)
        return computed(op, packet, (given, axis, index[shuffled], rows[shuffled]), kwargs, low)

    asked: dict[str, Any] = {"formats": "fp16", "strategies": "autocast", "device": "pretend", "max_error": 1e-4}
    still = auditor.audit(model, (X,), **asked)
    assert still.noise is not None and not still.noise.error and not still.noise.operations
    kernels._computed = atomic
    try:
        audit = auditor.audit(model, (X,), **asked)
    finally:
        kernels._computed = computed
    noise = audit.noise
    assert noise is not None and noise.operations == ("index_add",)
    assert noise.error > 1e-4 and set(noise.nodes) == {"index_add", "linear_1"}
    before = {report.node.name: report.verdicts["fp16"].verdict for report in still.nodes}
    assert before["linear"] == "unsafe" or before["linear_1"] == "unsafe"
    hidden = [r for r in audit.nodes if audit.max_error < r.contributions["fp16"].isolated <= noise.floor]
    assert hidden  # each of these would have been called an error
    for report in hidden:
        verdict = report.verdicts["fp16"]
        assert verdict.verdict == "safe" and "the difference between FP32 runs" in verdict.reason
    assert any("index_add in" in warning for warning in audit.warnings)


class Clock:
    """Events of a GPU that times itself; here by the clock of the CPU, so times are those of the emulation."""

    def __init__(self, enable_timing: bool) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Clock) -> float:
        return 1000 * (end.at - self.at)


@natively
def test_on_a_gpu_with_a_clock_times_are_measured_and_decide() -> None:
    torch.manual_seed(0)
    module: Any = type(torch.get_device_module("pretend"))
    model, asked = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).eval(), {"formats": "fp16"}
    assert auditor.audit(model, (X,), device="pretend", **asked).timing is None  # it has no events
    module.Event = Clock
    try:
        audit = auditor.audit(model, (X,), device="pretend", **asked)
    finally:
        del module.Event
    timing = audit.timing
    assert timing is not None and (timing.device, timing.batch) == ("Pretend GPU", 12)
    assert timing.fp32.eager is not None and timing.fp32.memory is not None
    weights = 4 * (16 * 64 + 64 + 64 * 4 + 4)
    assert timing.fp32.memory >= weights + X.nbytes + 4 * 12 * 64
    for plan in audit.plans.values():
        assert plan.timed is not None and plan.timed.decides and plan.timed.eager is not None
    if audit.recommended is not None:
        assert "x measured" in audit.recommendation
        ran = audit.plans[audit.recommended].timed
        assert ran is not None and ran.eager is not None and (ran.eager.speedup_high or 0) >= 1
    else:
        highs = [plan.timed.eager.speedup_high for plan in audit.plans.values() if plan.timed and plan.timed.eager]
        assert all(high is not None and high < 1 for high in highs)
