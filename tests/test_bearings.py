"""What a card says becomes of an operation under the plan, held against the dtypes of a run under that plan."""

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Audit

LOW = ("float16", "bfloat16")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)


class Sums(Layers):
    """A sum of 32 entries that FP16 cannot hold, which autocast makes in FP32, and one of both, which promotes."""

    def forward(self, x: Tensor) -> Tensor:
        large = self.first(x).abs() * 4e4
        return self.last((large.sum(-1, keepdim=True) + large) * 1e-6)


class Transform(Layers):
    """Of what no layer made, and back: low values reach the first under cast weights alone, and the second never."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x) + torch.fft.irfft(torch.fft.rfft(x), n=8))


class Inner(Layers):
    """A transform of what a layer made, which is kept in FP32 by its module."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.fft.rfft(self.first(x)).abs().sum(-1, keepdim=True) + self.first(x))


def audited(model: nn.Module, **asked: object) -> Audit:
    torch.manual_seed(1)
    return auditor.audit(model, (torch.randn(4, 8),), **asked)  # type: ignore[arg-type]


@pytest.fixture(
    scope="module", params=[(Sums, "autocast"), (Sums, "cast"), (Transform, "autocast"), (Inner, "autocast")]
)
def audit(request: pytest.FixtureRequest) -> Audit:
    model, strategy = request.param
    return audited(model(), strategies=(strategy,))


def test_bearings_are_what_ran(audit: Audit) -> None:
    reports = {report.node.name: report for report in audit.nodes}
    spoken = [f for f in audit.findings if f.bearing and f.plan == audit.recommended]
    assert spoken
    for finding in spoken:
        ran = reports[finding.node].planned
        assert ran is not None
        inputs = [reports[name].planned for name in reports[finding.node].node.inputs if name in reports]
        if finding.bearing == "low":
            assert ran.computed in LOW
        elif finding.bearing == "reads":
            assert ran.computed not in LOW
            assert any(made is not None and made.output in LOW for made in inputs) or set(ran.inputs) & set(LOW)
        elif finding.bearing == "kept":
            assert ran.computed not in LOW
        else:
            fmt = audit.plans[finding.plan or ""].format
            assert fmt not in finding.formats or ran.computed not in LOW


def test_what_meets_no_low_value_is_not_spoken_of() -> None:
    found = {(f.rule, f.op) for f in audited(Transform()).findings}
    assert ("LIN002", "aten.fft_rfft.default") in found
    assert ("LIN002", "aten.fft_irfft.default") not in found  # it reads the complex64 of the first, which raises if low
