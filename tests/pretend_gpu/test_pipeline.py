"""The whole audit runs natively on a GPU that is none, and finds what the audit on the CPU finds."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import auditor
from auditor.errors import AuditorError
from auditor.flow import run
from auditor.loading import load
from auditor.resources import resource_dir
from auditor.rulebook.load import load_rules
from auditor.settings import Settings
from tests.pretend_gpu.models import MODELS, architecture, made
from tests.pretend_gpu.natively import ROOT, SITE, natively
from tests.pretend_gpu.same import differences
from tests.support.thinned import thinned

SLOW = pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n == "recurrent" else SLOW) for n in MODELS])
@natively
def test_an_audit_finds_natively_what_it_finds_emulated(name: str) -> None:
    model, inputs = made(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    emulated = auditor.audit(model, inputs, device="cpu")
    native = auditor.audit(model, inputs, device="pretend:1")
    assert (native.environment.execution, native.environment.device) == ("native", "Pretend GPU")
    assert all(plan.verification.execution == "native" for plan in native.plans.values() if plan.verification)
    assert differences(emulated, native) == []
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", thinned(["mlp", "transformer", "recurrent", "convolutional"], 4))
@natively
def test_a_training_step_is_natively_what_it_is_emulated(name: str) -> None:
    model, inputs = made(name)
    target = torch.zeros_like(model(*inputs))
    weight = torch.tensor(2.0)  # which the loss closes over
    emulated, native = (
        auditor.audit(
            model,
            (*inputs, target),
            mode="training",
            loss_fn=lambda y, t: (weight * (y - t)).square().mean(),
            device=device,
        )
        for device in ("cpu", "pretend")
    )
    assert differences(emulated, native) == []


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
    assert differences(emulated, native) == []


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


MORE = "mobilenet bert resnet convnext unet mamba mixtral deberta_v2".split()


@SLOW
@pytest.mark.parametrize("name", MORE)
@natively
def test_architectures_are_natively_what_they_are_emulated(name: str) -> None:
    chosen = architecture(name)
    emulated, native = (
        auditor.audit(chosen.model, chosen.args, kwargs=chosen.kwargs, formats="fp16", device=device)
        for device in ("cpu", "pretend")
    )
    assert differences(emulated, native) == []
