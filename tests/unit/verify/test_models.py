"""Plans of models with habits, verified: what the audit states is what a patched model does when it is called by hand."""

from __future__ import annotations

import copy
import runpy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.capture.emulation import emulate
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.process import reseed
from auditor.numerics.metrics import output_error


def called(model: nn.Module, x: Tensor, *, low: bool) -> list[Tensor]:
    """As a user calls it, on a GPU or its emulation where it is low."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        reseed(0)
        if not low:
            return tensor_outputs(model(x.clone()))
        with emulate("cuda"):
            return tensor_outputs(model(x.clone()))


def test_a_model_that_depends_on_values_takes_its_own_path_low(root: Path) -> None:
    # The second batch leaves by the early exit; the others are iterated to a tolerance, in each precision in its own
    # number of steps.
    example = runpy.run_path(str(root / "examples" / "06_value_dependent.py"))
    model, batches = example["get_model"](), example["get_eval_inputs"]()
    references = [called(model, x, low=False) for (x,) in batches]
    audit = auditor.audit(model, batches, device="cpu", strategies="cast", formats="bf16", max_error=0.05)
    assert audit.capture_method == "path"
    for name, plan in audit.plans.items():
        patched = auditor.apply(copy.deepcopy(model), audit, name)
        by_hand = [output_error(r, called(patched, x, low=True)) for r, (x,) in zip(references, batches, strict=True)]
        assert plan.verified, plan.verification
        assert plan.measured_error == pytest.approx(max(by_hand), rel=1e-6)
    low = copy.deepcopy(model).bfloat16()
    plain = [output_error(r, called(low, x.bfloat16(), low=True)) for r, (x,) in zip(references, batches, strict=True)]
    assert audit.baselines["cast_bf16"].measured_error == pytest.approx(max(plain), rel=1e-6)
