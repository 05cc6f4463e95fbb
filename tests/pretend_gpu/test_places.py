"""Audits on a GPU that is none: where its model is, what it finds there, and what can go wrong on a GPU alone."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor import Audit
from auditor.cli import main
from auditor.errors import AuditorError
from auditor.flow import run
from auditor.loading import load
from auditor.numerics import nodes, operations
from auditor.numerics.devices import choose
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.numerics.metrics import output_error
from auditor.reporters import text as render
from auditor.resources import table
from auditor.settings import Settings
from auditor.verify import artefact
from tests.pretend_gpu.memory import ALLOCATOR, counted, failing, limited
from tests.pretend_gpu.models import MODELS, Halves, architecture, fixed, made, mapped, packed
from tests.pretend_gpu.natively import ROOT, SITE, natively
from tests.pretend_gpu.same import audits, differences, same
from tests.support.refusing import refused
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

TOO_SMALL = "The GPU's memory was too small, so the audit ran on the CPU, which emulates a GPU."


def places(model: nn.Module) -> list[str]:
    return [str(x.device) for x in (*model.parameters(), *model.buffers())]


@natively
def test_an_audit_goes_where_its_model_is() -> None:
    model = seeded(lambda: nn.Linear(4, 2)).to("pretend:1")
    weight = model.weight.data_ptr()
    for inputs in (normal(3, 4).to("pretend:1"), normal(3, 4)):
        audit = auditor.audit(model, (inputs,), formats="fp16")
    assert (audit.environment.execution, audit.environment.device) == ("native", "Pretend GPU")
    assert audit.live.model is model
    assert places(model) == ["pretend:1", "pretend:1"] and model.weight.data_ptr() == weight


def by_hand(first: Any, second: Any) -> nn.Module:
    return seeded(lambda: Halves(first, second))


def by_map(first: Any, second: Any) -> nn.Module:
    model = by_hand("cpu", "cpu")
    return mapped(model, {"enter": first, "inside": second, "leave": first})


@pytest.mark.parametrize("spread", thinned([by_hand, by_map]))
@natively
def test_a_model_over_two_gpus_is_audited_where_it_is(spread: Callable[[Any, Any], nn.Module]) -> None:
    model, inputs = spread("pretend:0", "pretend:1"), (normal(6, 8),)
    before = places(model)
    native = auditor.audit(model, inputs)
    assert len(set(before)) == 2 and places(model) == before
    assert (native.environment.execution, native.environment.device) == ("native", "2 x Pretend GPU")
    emulated = auditor.audit(spread("cpu", "cpu"), inputs, device="cpu")
    found = differences(emulated, native, transfers=True)
    assert not found, found
    for audit in (emulated, native):
        assert audit.recommended and audit.plans[audit.recommended].is_verified


@natively
def test_a_model_that_names_its_devices_is_refused_elsewhere_in_one_line() -> None:
    model, inputs = seeded(fixed).eval(), (normal(2, 8).to("pretend:0"),)
    assert auditor.audit(model, inputs, formats="fp16").environment.execution == "native"
    for device in ("cpu", "pretend:0"):
        with refused(AuditorError, "no-copy", match=r"runs on pretend:0, pretend:1 and not on .*device=auto"):
            auditor.audit(model, inputs, device=device)


@natively
def test_lengths_that_have_to_stay_on_the_cpu_do() -> None:
    inputs = normal(2, 5, 4), torch.tensor([5, 3])
    audit = auditor.audit(seeded(packed).eval(), inputs, device="pretend", formats="fp16")
    assert audit.environment.execution == "native"


FILE = """
from tests.pretend_gpu.start import start

start()

import torch
from tests.pretend_gpu.models import Halves


def build():
    torch.manual_seed(0)
    return Halves("pretend:0", {second!r}).eval()


def get_inputs():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
"""


@pytest.mark.slow
@pytest.mark.parametrize("second", ["pretend:0", "pretend:1"])
@natively
def test_a_file_may_put_its_model_on_gpus_and_its_inputs_on_the_cpu(second: str) -> None:
    with TemporaryDirectory() as folder:
        file = Path(folder, "placed.py")
        file.write_text(FILE.format(second=second), encoding="utf-8")
        assert main([f"{file}:build", "--out", f"{folder}/out", "--formats", "fp16", "--strategies", "autocast"]) == 0
        audit = auditor.load(f"{folder}/out")
    (plan,) = audit.plans.values()
    assert audit.environment.execution == "native" and plan.is_verified
    assert plan.verification is not None and plan.verification.execution == "native"


@natively
def test_audits_keep_no_copy_of_the_model() -> None:
    model, inputs = made("mlp")
    before = _used()
    audit = auditor.audit(model, inputs, device="pretend:1", formats="fp16")
    assert audit.live.model is model
    weights = sum(x.numel() * x.element_size() for x in model.parameters())
    inputs_alone = sum(x.numel() * x.element_size() for x in inputs)  # torch may hold on to what it saw last
    assert _used()[1] - before[1] <= inputs_alone < weights


def _used() -> list[int]:
    gc.collect()
    return list(ALLOCATOR.used)


# The whole audit runs natively on a GPU that is none, and finds what the audit on the CPU finds.


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "recurrent" else pytest.mark.slow) for n in MODELS])
@natively
def test_an_audit_finds_natively_what_it_finds_emulated(name: str) -> None:
    model, inputs = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    emulated = auditor.audit(model, inputs, device="cpu")
    native = auditor.audit(model, inputs, device="pretend:1")
    assert (native.environment.execution, native.environment.device) == ("native", "Pretend GPU")
    assert all(plan.verification.execution == "native" for plan in native.plans.values() if plan.verification)
    same(emulated, native)
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", thinned(["mlp", "transformer", "recurrent", "convolutional"], 4))
@natively
def test_a_training_step_is_natively_what_it_is_emulated(name: str) -> None:
    model, inputs = made(name)
    target = torch.zeros_like(model(*inputs))
    weight = torch.tensor(2.0)  # which the loss closes over
    asked: dict[str, Any] = {"mode": "training", "strategies": "autocast"}
    same(*audits(model, *inputs, target, loss_fn=lambda y, t: (weight * (y - t)).square().mean(), **asked))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01_digits_attention.py", "07_vae_decoder.py"])
@natively
def test_examples_are_natively_what_they_are_emulated(name: str) -> None:
    """As `python -m auditor examples/...` audits it: its plans are verified in a process that has the pretend GPU, too."""
    subject, asked = load(str(ROOT / "examples" / name)), {"command": "", "formats": ("fp16",)}
    emulated = run(replace(subject, origin=None), Settings(device="cpu", **asked))
    native = run(subject, Settings(device="pretend", **asked))
    assert native.plans and all(plan.is_verified for plan in native.plans.values())
    assert {p.verification.execution for p in native.plans.values() if p.verification} == {"native"}
    same(emulated, native)


@pytest.mark.slow
@natively
def test_without_the_device_in_the_other_process_the_audit_fails_there() -> None:
    """So the agreement of the examples is that of a run there."""
    path = os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in path.split(os.pathsep) if Path(part) != SITE)
    try:
        with pytest.raises(AuditorError, match="device string: pretend") as raised:
            run(
                load(str(ROOT / "examples" / "07_vae_decoder.py")),
                Settings(command="", formats=("fp16",), strategies=("autocast",), device="pretend"),
            )
    finally:
        os.environ["PYTHONPATH"] = path
    assert raised.value.slug == "not-rebuilt"


@pytest.mark.slow
@pytest.mark.parametrize("name", "mobilenet bert resnet convnext unet mamba mixtral deberta_v2".split())
@natively
def test_architectures_are_natively_what_they_are_emulated(name: str) -> None:
    chosen = architecture(name)
    same(*audits(chosen.model, *chosen.args, kwargs=chosen.kwargs, formats="fp16"))


# An audit on a GPU whose memory ends, or that gives up in the middle of it.


def thin() -> nn.Module:
    """Few weights, and large values between them."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


IMAGES = normal(8, 3, 32, 32)


@pytest.mark.slow
@natively
def test_a_device_that_was_asked_for_is_not_left() -> None:
    gc.collect()
    model, before = seeded(thin), list(ALLOCATOR.used)
    with limited(1000), refused(AuditorError, "out-of-memory", match="--device cpu"):
        auditor.audit(model, (IMAGES,), device="pretend", formats="fp16", strategies="autocast")
    gc.collect()
    assert ALLOCATOR.used <= before


@pytest.mark.parametrize("size", [1000, pytest.param(2_000_000, marks=pytest.mark.slow)])
@natively
def test_the_cpu_in_its_place_is_said(size: int) -> None:
    def audited(device: str) -> Audit:
        return auditor.audit(seeded(thin), (IMAGES,), device=device, formats="fp16", strategies="autocast")

    with limited(size):
        audit = audited("auto")
    assert (audit.environment.execution, audit.environment.device) == ("emulated", "cpu")
    assert audit.warnings[-1] == TOO_SMALL
    texts = audit.texts("/nowhere")
    assert TOO_SMALL in texts["report.html"].replace("&#39;", "'") and TOO_SMALL in " ".join(render(audit).split())
    same(audited("cpu"), audit)


@pytest.mark.parametrize("part", [0.5, *(pytest.param(p, marks=pytest.mark.slow) for p in (0.05, 0.3, 0.75, 0.95))])
@natively
def test_no_allocation_that_fails_becomes_a_verdict(part: float) -> None:
    """Whichever it is: the audit begins again, and finds the same."""
    model, inputs = made("recurrent")
    found: list[int] = []
    with counted(found):
        whole = auditor.audit(model, inputs, device="auto", strategies="autocast")
    with failing(int(part * found[0]) + 1):
        again = auditor.audit(model, inputs, device="auto", strategies="autocast")
    assert again.warnings[-1] == TOO_SMALL
    same(whole, again)


# A GPU that gives up in the middle of an audit: one line, wherever that is, and never a verdict of an operation.

SAID = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize("share", thinned([0.4, 0.002, 0.95]))
@natively
def test_it_ends_in_one_line(share: float) -> None:
    model, inputs = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))).eval(), (normal(3, 4),)
    found: list[int] = []
    with counted(found):
        auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    last, take = ALLOCATOR.taken + int(share * found[0]), ALLOCATOR.take

    def failing(size: int, index: int) -> object:
        if ALLOCATOR.taken >= last:  # and from here on: nothing runs on it any more
            raise torch.AcceleratorError(SAID)
        return take(size, index)

    ALLOCATOR.take = failing  # type: ignore[assignment,method-assign]
    try:
        with pytest.raises(AuditorError, match=SAID) as caught:
            auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    finally:
        del ALLOCATOR.take
    assert caught.value.slug in ("device-failed", "no-copy") and "\n" not in str(caught.value)
    assert all(x.device.type == "cpu" for x in model.parameters())


# What can go wrong on a GPU alone: one test each, of whole audits where it takes one.


def own(m: Any, x: Tensor) -> Tensor:
    """Its author runs a part low, and a loss that autocast refuses outside of it."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        hidden = m.inside(m.enter(x)).relu()
    scores = m.leave(hidden.float()).sigmoid()
    return F.binary_cross_entropy(scores, torch.full_like(scores, 0.5), reduction="none")


def attending(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.into(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if m.training else 0.0))


@natively
def test_an_authors_own_region_and_a_loss_that_autocast_bans() -> None:
    layers = {"enter": linear(8, 16), "inside": linear(16, 16), "leave": linear(16, 4)}
    same(*audits(Model(own, **layers).eval(), normal(4, 8), formats="fp16"))


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


@natively
def test_a_device_that_is_not_there_is_named() -> None:
    assert choose("pretend") == "pretend:0" and choose(torch.device("pretend", 1)) == "pretend:1"
    with refused(AuditorError, "no-cuda", match="pretend:0, pretend:1 only"):
        choose("pretend:2")


# Which kernels there are is asked of the device where there is one, and of the tables where there is none.

aten = torch.ops.aten


@natively
def test_the_device_has_the_last_word() -> None:
    x = normal(4, 4).half()
    missing = table("numerics/cuda_kernels")["missing"]["in_both"]
    kept = list(missing)
    try:
        missing.append("tanh")
        _forget()
        with pytest.raises(UnsupportedInFormat, match="tanh has no float16 kernel on CUDA"):
            run_op(aten.tanh.default, (x,), {})
        assert run_op(aten.tanh.default, (x.to("pretend"),), {}).dtype is torch.float16
        missing[:] = [name for name in kept if name != "angle"]
        _forget()
        run_op(aten.angle.default, (x,), {})
        with pytest.raises(UnsupportedInFormat, match="angle_cuda"):
            run_op(aten.angle.default, (x.to("pretend"),), {})
    finally:
        missing[:] = kept
        _forget()


def _forget() -> None:
    operations._operation.cache_clear()
    nodes._operation_of.cache_clear()


# On a GPU: FP32 as it is set beside IEEE FP32, and measured times.


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
