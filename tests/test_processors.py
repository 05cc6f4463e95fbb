"""An audit says the same on a processor without AVX2 as on this one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = """
import json
import torch
import auditor
from tests.test_processors import audited
print(json.dumps([torch.backends.cpu.get_cpu_capability(), audited()]))
"""
LEAST = {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"}
"""The least that torch, oneDNN and MKL can be told to use of a processor."""


def audited() -> dict[str, Any]:
    """Verdicts, and what of the plans is FP32 with their errors, of a model with every kind of product."""
    import torch
    from torch import Tensor, nn

    import auditor
    from tests.support.replaying import Model

    def forward(m: Any, x: Tensor) -> Tensor:
        rows = nn.functional.max_pool2d(m.norm(m.conv(x)).relu(), 2).flatten(2).permute(2, 0, 1)
        h = m.recurrent(rows)[0]
        return m.head(m.attention(h, h, h)[0].mean(0))

    torch.manual_seed(0)
    first = {"conv": nn.Conv2d(3, 16, 3, padding=1), "norm": nn.BatchNorm2d(16)}
    second = {"recurrent": nn.LSTM(16, 32), "attention": nn.MultiheadAttention(32, 4)}
    model, x = Model(forward, **first, **second, head=nn.Linear(32, 10)).eval(), torch.randn(8, 3, 16, 16)
    audit = auditor.audit(model, (x,), device="cpu", strategies=("cast",), max_error=1.5e-3)
    plans = audit.plans.values()
    return {
        "verdicts": {r.node.name: {fmt: one.verdict for fmt, one in r.verdicts.items()} for r in audit.nodes},
        "fp32": {p.name: sorted(path for path, scope in p.scopes.items() if scope.precision == "fp32") for p in plans},
        "verified": {p.name: p.is_verified for p in plans},
        "errors": {p.name: p.measured_error for p in plans},
    }


@pytest.mark.slow
def test_an_audit_says_the_same_whatever_the_processor_has(root: Path) -> None:
    found = []
    for env in ({}, LEAST):
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT], cwd=root, env=os.environ | env, capture_output=True, text=True, check=True
        )
        found.append(json.loads(run.stdout.splitlines()[-1]))
    (ours, said), (least, otherwise) = found
    if ours == least:
        pytest.skip("this processor has no more than the least")
    errors, others = said.pop("errors"), otherwise.pop("errors")
    assert said == otherwise
    assert any(said["fp32"].values()) and errors.keys() == others.keys()
    for name, error in errors.items():
        assert error == pytest.approx(others[name], rel=0.02), name
