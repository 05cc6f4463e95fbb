"""With a GPU: formats run natively there, and what the CPU emulates is what the GPU does."""

import statistics

import pytest
import torch
from torch import nn

import auditor
from benchmarks.native_ratio import FORMATS, compared, errors_on
from tests.support.subjects import normal, seeded

pytestmark = pytest.mark.gpu


def test_an_audit_runs_natively_and_leaves_the_model_on_the_cpu() -> None:
    model = seeded(
        lambda: nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.Softmax(-1))
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    audit = auditor.audit(model, (normal(32, 16),), device="cuda")
    assert audit.environment.execution == "native"
    assert audit.environment.device == torch.cuda.get_device_name()
    assert all(plan.is_verified for plan in audit.plans.values())
    assert all(plan.verification.execution == "native" for plan in audit.plans.values() if plan.verification)
    assert all(value.device.type == "cpu" for value in model.state_dict().values())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("name", ["vit", "gpt2"])
def test_emulated_errors_are_the_native_ones(name: str) -> None:
    emulated, native = errors_on("cpu", name), errors_on("cuda", name)
    medians = [compared(name, fmt, emulated, native)["median"] for fmt in FORMATS]
    assert statistics.mean(medians) == pytest.approx(1, abs=0.1)


# On a GPU, wrappers cost less than one percent of a forward under plain autocast.


def test_wrappers_cost_less_than_one_percent() -> None:
    threads = torch.get_num_threads()
    from benchmarks.wrapper_overhead import overhead

    try:
        row = overhead("vit_base_patch16_224", "cuda")
    finally:
        torch.set_num_threads(threads)  # the harness times on one thread
    assert row["wrapped norms / plain"] < 1.01
    assert row["norms in FP32 / plain"] < 1.01
