"""FP64 parts: kept as they are in the reference and under every plan, and `untested`; the rest is audited."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import CaptureError
from tests.any_model.holding import Call, held, raised
from tests.any_model.test_stored_low import Runs, mlp, normal, one, seeded

FP64 = torch.float64


def middle(m: Any, x: Tensor) -> Tensor:
    return m.last(m.wide(m.first(x).double()).float())


def followed(m: Any, x: Tensor) -> Tensor:
    return m.last(m.wide(m.first(x).to(m.wide.weight.dtype)).to(m.last.weight.dtype))


def layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 32), "wide": nn.Linear(32, 32).double(), "last": nn.Linear(32, 8)}


def solved(m: Any, x: Tensor) -> Tensor:
    y = m.first(x).double()
    return m.last(torch.linalg.solve(y.mT @ y + torch.eye(32, dtype=FP64), torch.eye(32, dtype=FP64)).float())


CASES = {
    "a layer": lambda: (Runs(middle, **layers()), one(normal(4, 16))),
    "a layer that is followed": lambda: (Runs(followed, **layers()), one(normal(4, 16))),
    "a solver": lambda: (Runs(solved, **layers()), one(normal(4, 16))),
    "a buffer": lambda: (
        Runs(lambda m, x: m.body((x.double() * m.scale).float()), body=mlp(), scale=torch.rand(16, dtype=FP64)),
        one(normal(4, 16)),
    ),
    "a sum": lambda: (Runs(lambda m, x: m.body(x.double().cumsum(0).to(x.dtype)), body=mlp()), one(normal(4, 16))),
    "an input": lambda: (Runs(lambda m, x: m.body(x.float()), body=mlp()), one(normal(4, 16, dtype=FP64))),
    "an output": lambda: (Runs(lambda m, x: m.body(x).double().logsumexp(-1), body=mlp()), one(normal(4, 16))),
    "a number that is a parameter": lambda: (
        Runs(lambda m, x: m.body(x) * m.gain, body=mlp(), gain=nn.Parameter(torch.tensor(1.5, dtype=FP64))),
        one(normal(4, 16)),
    ),
}


@pytest.mark.parametrize("kind", CASES)
def test_fp64_is_kept_and_the_rest_is_audited(kind: str) -> None:
    build = seeded(CASES[kind])
    audit = held(build)
    wide = [report for report in audit.nodes if report.node.dtype == "float64"]
    assert all(report.verdicts[fmt].verdict == "untested" for report in wide for fmt in audit.formats)
    assert all("float64" in report.verdicts["fp16"].reason for report in wide)
    assert any(r.verdicts["fp16"].verdict != "untested" for r in audit.nodes)
    expected = {name for name, tensor in build()[0].state_dict().items() if tensor.dtype is FP64}
    for name in audit.plans:
        state = auditor.apply(build()[0], audit, name).state_dict()
        assert {key for key, tensor in state.items() if tensor.dtype is FP64} == expected


def test_fp64_beside_bf16() -> None:
    """What is stored in BF16 is raised to FP32, and what is FP64 stays."""

    def build() -> tuple[nn.Module, Call]:
        scale = torch.rand(16, dtype=FP64)
        model = Runs(
            lambda m, x: m.body((x.double() * m.scale).to(m.body[0].weight.dtype)), body=mlp().bfloat16(), scale=scale
        )
        return model, one(normal(4, 16, dtype=torch.bfloat16))  # fmt: skip

    audit = held(seeded(build), reference=raised(seeded(build)))
    assert all(plan.raised == "weights" for plan in audit.plans.values())


def test_a_model_in_fp64_alone_has_nothing_to_audit() -> None:
    with pytest.raises(CaptureError, match=r"FP64 alone.*model\.float\(\)") as caught:
        auditor.audit(mlp().double(), normal(4, 16, dtype=FP64), device="cpu")
    assert caught.value.slug == "nothing-to-audit"
    assert "\n" not in str(caught.value)
