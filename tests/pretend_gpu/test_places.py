"""An audit goes where its model is: on one GPU, on several, or from a file that put it there."""

import gc
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor import Audit
from auditor.cli import main
from auditor.errors import AuditorError
from auditor.flow import TOO_SMALL, run
from auditor.loading import load
from auditor.report.reporters import text as render
from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
from auditor.settings import Settings
from tests.pretend_gpu.memory import ALLOCATOR, counted, failing, limited
from tests.pretend_gpu.models import MODELS, Halves, architecture, fixed, made, mapped, packed
from tests.pretend_gpu.natively import ROOT, SITE, natively
from tests.pretend_gpu.same import audits, differences, same
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned


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
    torch.manual_seed(0)
    return Halves(first, second).eval()


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
    same(*audits(model, *inputs, target, mode="training", loss_fn=lambda y, t: (weight * (y - t)).square().mean()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["01_digits_attention.py", "07_vae_decoder.py"])
@natively
def test_examples_are_natively_what_they_are_emulated(name: str) -> None:
    """As `python -m auditor examples/...` audits it: its plans are verified in a process that has the pretend GPU, too."""
    rules, subject = tuple(load_rules([resource_dir("rules")])), load(str(ROOT / "examples" / name))
    asked: dict[str, Any] = {"rulebook": rules, "command": "", "formats": ("fp16",)}
    emulated = run(replace(subject, origin=None), Settings(device="cpu", **asked))
    native = run(subject, Settings(device="pretend", **asked))
    assert native.plans and all(plan.is_verified for plan in native.plans.values())
    assert {p.verification.execution for p in native.plans.values() if p.verification} == {"native"}
    same(emulated, native)


@pytest.mark.slow
@natively
def test_without_the_device_in_the_other_process_the_audit_fails_there() -> None:
    """So the agreement of the examples is that of a run there."""
    rules, path = tuple(load_rules([resource_dir("rules")])), os.environ["PYTHONPATH"]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in path.split(os.pathsep) if Path(part) != SITE)
    try:
        with pytest.raises(AuditorError, match="device string: pretend") as raised:
            run(
                load(str(ROOT / "examples" / "07_vae_decoder.py")),
                Settings(rulebook=rules, command="", formats=("fp16",), strategies=("autocast",), device="pretend"),
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
        whole = auditor.audit(model, inputs, device="auto")
    with failing(int(part * found[0]) + 1):
        again = auditor.audit(model, inputs, device="auto")
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
