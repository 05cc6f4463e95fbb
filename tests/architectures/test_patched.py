"""What a plan does to a public architecture: everything but precision stays, and the model runs on plain torch."""

from __future__ import annotations

import inspect
import math

import pytest
import torch
from torch import nn

from auditor import apply
from auditor.numerics.metrics import output_error
from tests.architectures.conftest import Audited

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STRATEGIES = ("autocast", "cast")


def state_of(model: nn.Module) -> dict[str, object]:
    """Everything an audit could have left behind on the modules themselves."""
    return {
        path: (
            module.training,
            sorted(module.__dict__),
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            [parameter.requires_grad for parameter in module._parameters.values() if parameter is not None],
        )
        for path, module in model.named_modules()
    }


def test_audited_model_is_bit_for_bit_as_it_was(audited: Audited) -> None:
    before, after = audited.before.state_dict(), audited.model.state_dict()
    assert list(before) == list(after)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert [name for name in before if before[name].dtype != after[name].dtype] == []
    buffers = dict(audited.before.named_buffers())  # the non-persistent ones too
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in audited.model.named_buffers())
    assert all(parameter.grad is None for parameter in audited.model.parameters())
    assert state_of(audited.model) == state_of(audited.before)


def test_patched_copy_keeps_class_signature_and_state(audited: Audited) -> None:
    for name in audited.audit.plans:
        model = audited.fresh()
        patched = apply(model, audited.audit, name)
        assert patched is model
        assert type(patched) is type(audited.before)
        assert list(patched.state_dict()) == list(audited.before.state_dict())
        assert inspect.signature(patched.forward) == inspect.signature(audited.before.forward)


def test_patched_copy_runs_natively_with_the_error_that_was_measured(audited: Audited) -> None:
    """CPU kernels and CPU autocast lists differ a little from CUDA's, hence the room."""
    reference = audited.outputs(audited.before)
    for name, plan in audited.audit.plans.items():
        error = output_error(reference, audited.outputs(apply(audited.fresh(), audited.audit, name)))
        assert error <= 2 * plan.measured_error + 1e-6, name


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_baseline_is_what_torch_does_without_a_plan(audited: Audited, strategy: str) -> None:
    reference = audited.outputs(audited.before)
    for name, dtype in DTYPES.items():
        baseline = audited.audit.baselines[f"{strategy}_{name}"]
        error = output_error(reference, plainly_low(audited, strategy, dtype))
        assert math.isfinite(error)
        assert baseline.failure is None
        assert error / 2 < baseline.measured_error < 2 * error


def plainly_low(audited: Audited, strategy: str, dtype: torch.dtype) -> list[torch.Tensor]:
    if strategy == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            return audited.outputs(audited.fresh())
    return audited.specimen.lowered(dtype).outputs(audited.fresh().to(dtype))
