"""A sample of `benchmarks/families`: public models of many kinds are captured, measured and handed verified plans."""

import importlib

import pytest
import torch

from auditor.records import Audit
from benchmarks.families import library
from tests.any_model.holding import held

SAMPLE = (
    "timm:levit",
    "timm:xcit",
    "torchvision:swin_transformer",
    "torchvision:detection.retinanet",
    "torchvision:optical_flow.raft",
    "transformers:wav2vec2",
    "transformers:clip",
    "transformers:detr",
    "transformers:bamba",
)
"""Of kinds that `tests/architectures` has none of."""


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLE)
def test_a_public_model_is_audited(name: str) -> None:
    where, _, model = name.partition(":")
    pytest.importorskip("transformers")
    importlib.import_module("benchmarks.families")
    pytest.importorskip(where)

    def build() -> tuple[torch.nn.Module, tuple[tuple[object, ...], dict[str, object]]]:
        torch.manual_seed(0)
        made, args, kwargs = library(where).build(model)
        return made, (args, kwargs)

    check(held(build))


def check(audit: Audit) -> None:
    assert audit.nodes
    assert all(report.errors for report in audit.nodes)
    assert all(plan.is_verified for plan in audit.plans.values()), {n: p.verification for n, p in audit.plans.items()}
    holds = [
        b.measured_error
        for n, b in audit.baselines.items()
        if n.startswith("autocast") and b.measured_error is not None
    ]
    if any(error <= audit.max_error for error in holds):
        assert max(plan.low_precision_flops for plan in audit.plans.values()) >= 0.95
