"""What operations compute in, and why that is FP32: every sentence on a model on which it is true, seen in a run of its
own."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.records import Dtypes, NodeReport
from auditor.records.audit import Audit
from auditor.report.kept import computed_in, dtype_label, tally, why_raised
from tests.support.subjects import normal, seeded


class Kept(nn.Module):
    """Amplifies rounding, so that it stays in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 3000.0) - 3000.0


class Mixed(nn.Module):
    """An operation for each reason there is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(16, 64), nn.LayerNorm(64), nn.Linear(64, 64)
        self.kept, self.last = Kept(), nn.Linear(64, 1024)

    def forward(self, x: Tensor) -> Tensor:
        scaled = x * 2
        low = self.first(scaled)
        single = self.norm(low)
        both = single * low
        asked = low.float()
        with torch.autocast("cuda", enabled=False):
            off = self.second(asked)
        ramp = torch.arange(64, dtype=torch.float32)
        return self.kept(self.last(both + off / 100 + ramp / 1000))


REASONS = {
    "the module is in FP32: add_2 is unsafe": {"add", "sub"},
    "autocast runs layer_norm in FP32 by itself": {"layer_norm"},
    "the model's code requests FP32": {"to", "arange"},
    "the model's code switches autocast off there": {"linear"},
    "reads FP32 from": {"mul", "div", "add"},
}


@pytest.fixture(scope="module")
def audit() -> Audit:
    return auditor.audit(seeded(Mixed), normal(256, 16), formats=("fp16",), strategies=("autocast",), device="cpu")


def reasons(audit: Audit) -> dict[str, list[NodeReport]]:
    plan, found = audit.plans[audit.recommended or ""], dict[str, list[NodeReport]]()
    for report in audit.nodes:
        found.setdefault(why_raised(plan)(report), []).append(report)
    return found


def test_each_reason_is_given_where_it_is_true(audit: Audit) -> None:
    assert audit.recommended == "autocast_fp16"
    assert audit.plans["autocast_fp16"].scopes["kept"].precision == "fp32"
    found = reasons(audit)
    for start, ops in REASONS.items():
        assert {
            r.node.op.split(".")[1] for why, reports in found.items() if why.startswith(start) for r in reports
        } == ops
    assert all(not why or why.startswith(tuple(REASONS)) for why in found)
    assert {computed_in(r) for r in found[""]} == {"fp16"}
    assert {computed_in(r) for why, reports in found.items() if why for r in reports} == {"fp32"}


def test_a_batch_norm_with_fp32_statistics_reads_both() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.norm(self.conv(x)).mean((2, 3)))

    found = auditor.audit(seeded(Net), normal(4, 3, 8, 8), formats=("fp16",), strategies=("autocast",), device="cpu")
    given = {r.node.op.split(".")[1]: (why, r.planned) for why, rs in reasons(found).items() for r in rs}
    assert given["batch_norm"] == (
        "the inputs are FP16 and FP32, so torch computes in FP32, the wider format",
        Dtypes(("float16", "float32"), "float32", "float16"),
    )
    assert {why for op, (why, _) in given.items() if op != "batch_norm"} == {""}


def test_labels_and_tallies(audit: Audit) -> None:
    assert [dtype_label(d) for d in ("float16", "bfloat16", "float32", "float64", "int64", "bool", "float8_e4m3fn")] == [
        "FP16", "BF16", "FP32", "FP64", "int64", "bool", "float8_e4m3fn",
    ]  # fmt: skip
    one = audit.nodes[0]
    low, high = (replace(one, planned=Dtypes((), name, name)) for name in ("float16", "float32"))
    assert tally([low, low]) == "FP16"
    assert tally([low, high, low]) == "FP16 2 times and FP32 once"
    assert tally([replace(one, planned=None)]) == ""
    assert computed_in(replace(one, planned=Dtypes((), "int64", "int64"))) is None
