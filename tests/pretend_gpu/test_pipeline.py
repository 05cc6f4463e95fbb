"""The whole audit runs natively on a GPU that is none, and finds what the audit on the CPU finds."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import auditor
from tests.architectures.zoo import specimen
from tests.pretend_gpu.models import MODELS, made
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences


@pytest.mark.parametrize("name", list(MODELS))
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


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name", ["mlp", pytest.param("transformer", marks=SLOW), pytest.param("recurrent", marks=SLOW)]
)
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
            strategies="autocast",
        )
        for device in ("cpu", "pretend")
    )
    assert differences(emulated, native) == []


@pytest.mark.parametrize("name", ["vit", "bert"])
@natively
def test_architectures_are_natively_what_they_are_emulated(name: str) -> None:
    _architecture(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["resnet", "mobilenet_v3", "gpt2", "llama", "t5", "mamba", "whisper", "mixtral", "deberta_v2"]
)
@natively
def test_more_architectures_are_natively_what_they_are_emulated(name: str) -> None:
    _architecture(name)


def _architecture(name: str) -> None:
    chosen = specimen(name)
    emulated, native = (
        auditor.audit(chosen.model, chosen.args, kwargs=chosen.kwargs, formats="fp16", device=device)
        for device in ("cpu", "pretend")
    )
    assert differences(emulated, native) == []


@natively
def test_an_audit_is_where_its_model_is() -> None:
    model, inputs = nn.Linear(4, 2).to("pretend:1"), (torch.ones(3, 4, device="pretend:1"),)
    audit = auditor.audit(model, inputs, device="cpu", formats="fp16")
    assert audit.environment.execution == "emulated"
    assert {x.device for x in model.parameters()} == {torch.device("pretend:1")}
