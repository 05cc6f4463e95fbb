"""What can go wrong on a GPU alone: one test each, of whole audits where it takes one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.devices import choose
from auditor.errors import AuditorError
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.metrics import output_error
from auditor.numerics.nodes import operation_of
from auditor.numerics.operations import operation
from auditor.resources import table
from auditor.verify import artefact
from tests.pretend_gpu import kernels
from tests.pretend_gpu.memory import ALLOCATOR
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import audits, same
from tests.support.opinfo import HALVES
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned


def own(m: Any, x: Tensor) -> Tensor:
    """Its author runs a part low, and a loss that autocast refuses outside of it."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        hidden = m.inside(m.enter(x)).relu()
    scores = m.leave(hidden.float()).sigmoid()
    return F.binary_cross_entropy(scores, torch.full_like(scores, 0.5), reduction="none")


def loud() -> nn.Module:
    """A recurrent layer whose input is beyond float16 and within bfloat16."""
    over = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
    over.weight_ih_l0.data.abs_().mul_(1e-3)
    return Model(lambda m, x: m.head(m.over(x + 1e5)[0]), over=over, head=nn.Linear(8, 4))


def attending(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.into(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if m.training else 0.0))


@natively
def test_an_authors_own_region_and_a_loss_that_autocast_bans() -> None:
    layers = {"enter": linear(8, 16), "inside": linear(16, 16), "leave": linear(16, 4)}
    same(*audits(Model(own, **layers).eval(), normal(4, 8), formats="fp16"))


@natively
def test_their_overflow_is_found_in_bf16_too() -> None:
    emulated, native = audits(seeded(loud), normal(2, 3, 8), formats="bf16", strategies="autocast")
    for audit in (emulated, native):
        assert not audit.baselines["autocast_bf16"].finite
        plan = audit.plans["autocast_bf16"]
        assert plan.is_verified and {plan.scopes[p].precision for p in ("", "over") if p in plan.scopes} == {"fp32"}
        assert any("over" in reason.modules for reason in plan.reasons)
    same(emulated, native)


@natively
def test_attention_drops_the_same_entries_low_and_in_fp32() -> None:
    model, x, target = Model(attending, into=linear(8, 24), out=linear(8, 4)), normal(2, 6, 8), torch.zeros(2, 6, 4)
    asked: dict[str, Any] = {"mode": "training", "formats": "fp16", "strategies": "autocast"}
    emulated, native = audits(model, x, target, loss_fn=lambda y, t: (y - t).square().mean(), **asked)
    found = native.training.errors if native.training else {}
    assert found and all(error is not None and error < 0.05 for error in found.values()), found
    same(emulated, native)


@pytest.mark.parametrize("as_criterion", thinned([True, False]))
@natively
def test_the_users_measures_get_tensors_of_the_cpu(as_criterion: bool) -> None:
    seen: set[str] = set()

    def off(reference: Any, candidate: Any) -> float:
        pair = (reference, candidate) if as_criterion else (*reference, *candidate)
        seen.update(x.device.type for x in pair)
        return output_error([reference], [candidate]) if as_criterion else output_error(reference, candidate)

    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))).eval()
    how: dict[str, Any] = {"criteria": {"output": (off, 0.01)}} if as_criterion else {"metric": off}
    auditor.audit(model, (normal(4, 8),), device="pretend", formats="fp16", **how)
    assert seen == {"cpu"}


@pytest.mark.slow
@natively
def test_cached_memory_is_given_back_before_another_process_verifies() -> None:
    held: list[int] = []
    with TemporaryDirectory() as folder, _jobs(held):
        file = Path(folder, "model.py")
        text = (
            "from tests.pretend_gpu.start import start\n\nstart()\n\nfrom torch import nn\n\nmodel = nn.Linear(8, 8)\n"
        )
        file.write_text(text + "example_inputs = __import__('torch').ones(2, 8)\n", encoding="utf-8")
        out = [f"{file}", "--out", f"{folder}/out", "--formats", "fp16", "--strategies", "autocast"]
        assert main([*out, "--device", "pretend"]) == 0
    assert held and not any(held)


@contextmanager
def _jobs(held: list[int]) -> Iterator[None]:
    """Adds what the GPU caches, and nothing uses, whenever a job is handed to the other process."""
    original = artefact.hand

    def handed(*args: Any) -> None:
        if args[1] is not None:  # the end of it
            held.append(sum(ALLOCATOR.cached))
        original(*args)

    artefact.hand = handed
    try:
        yield
    finally:
        artefact.hand = original


# What makes the pretend GPU one, and which kernels there are: asked of the device, or of the tables where there is
# none.


@natively
def test_devices_do_not_mix() -> None:
    here, there, host = torch.ones(2, device="pretend"), torch.ones(2, device="pretend:1"), torch.ones(2)
    for a, b in ((here, there), (here, host), (host, there)):
        with pytest.raises(RuntimeError, match="same device"):
            a + b
    assert (here + torch.tensor(1.0)).tolist() == [2, 2]


@natively
def test_a_device_that_is_not_there_is_named() -> None:
    assert choose("pretend") == "pretend:0" and choose(torch.device("pretend", 1)) == "pretend:1"
    with refused(AuditorError, "no-cuda", match="pretend:0, pretend:1 only"):
        choose("pretend:2")


# Which kernels there are is asked of the device where there is one, and of the tables where there is none.

aten = torch.ops.aten


def angles(m: Any, x: Tensor) -> Tensor:
    """Operations that CUDA has no half kernel for, and the CPU has."""
    hidden = m.enter(x)
    return m.leave(hidden + hidden.angle() + torch.igamma(hidden.abs() + 1, hidden.abs()))


def spectral(m: Any, x: Tensor) -> Tensor:
    """A transform of 16 entries, a power of two."""
    spectrum = torch.fft.rfft(m.enter(x), norm="ortho")
    return m.leave(torch.fft.fftshift(torch.fft.irfft(spectrum * 0.5, n=16, norm="ortho").float()))


@natively
def test_the_device_has_the_last_word() -> None:
    x = normal(4, 4).half()
    kept = list(table("numerics/half_kernels")["missing_on_cuda"])
    try:
        table("numerics/half_kernels")["missing_on_cuda"].append("tanh")
        _forget()
        with pytest.raises(UnsupportedInFormat, match="tanh has no float16 kernel on CUDA"):
            run_op(aten.tanh.default, (x,), {})
        assert run_op(aten.tanh.default, (x.to("pretend"),), {}).dtype is torch.float16
        table("numerics/half_kernels")["missing_on_cuda"][:] = [name for name in kept if name != "angle"]
        _forget()
        run_op(aten.angle.default, (x,), {})
        with pytest.raises(UnsupportedInFormat, match="angle_cuda"):
            run_op(aten.angle.default, (x.to("pretend"),), {})
    finally:
        table("numerics/half_kernels")["missing_on_cuda"][:] = kept
        _forget()


def _forget() -> None:
    operation.cache_clear()
    operation_of.cache_clear()


@natively
def test_what_cuda_lacks_is_unsafe_natively_and_emulated() -> None:
    emulated, native = audits(Model(angles, enter=linear(8, 8), leave=linear(8, 4)).eval(), normal(4, 8))
    for audit in (emulated, native):
        for name in ("angle", "igamma"):
            (report,) = (r for r in audit.nodes if r.node.op == f"aten.{name}.default")
            assert {report.verdicts[fmt].verdict for fmt in HALVES} == {"unsafe"}
    same(emulated, native)


@natively
def test_a_transform_of_a_power_of_two_runs_in_fp16_alone() -> None:
    emulated, native = audits(Model(spectral, enter=linear(16, 16), leave=linear(16, 4)).eval(), normal(4, 16))
    for audit in (emulated, native):
        (report,) = (r for r in audit.nodes if r.node.op == "aten.fft_rfft.default")
        assert report.verdicts["bf16"].verdict == "unsafe", report
        assert report.verdicts["fp16"].verdict == "safe", report
    same(emulated, native)


# On a GPU: FP32 as it is set beside IEEE FP32, the noise of kernels that add in an order that varies, and measured
# times.


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
