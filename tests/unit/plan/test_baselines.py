"""Baselines are runs of the model as its user runs it, on the inputs that plans are checked on."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from auditor.isolation.process import flags, ieee
from auditor.measure.rerun import Yardstick
from auditor.plan.plans import Planner
from auditor.plan.verified import today_of
from auditor.plan.workbench import Workbench
from tests.support import planning
from tests.support.capturing import Function
from tests.support.subjects import normal, seeded

Seen = tuple[int, torch.dtype, torch.dtype]


def logbook() -> tuple[list[Seen], Callable[[Seen], None]]:
    seen: list[Seen] = []
    return seen, lambda entry: seen.append(entry)


SEEN, note = logbook()
"""What Noting was asked. No attribute of it and no global that it names, since every run leaves those as they were."""


class Noting(nn.Module):
    """Notes the dtype in which it is asked, how often, and the shape."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.lin(x)
        note((len(x), x.dtype, y.dtype))
        return y


def bench_of(model: nn.Module, *held_out: Tensor, formats: Sequence[str] = ("bf16",)) -> Workbench:
    bench = planning.bench_of(model, normal(3, 4), formats=formats)
    subject = replace(bench.subject, held_out=tuple(((x,), {}) for x in held_out))
    return replace(bench, subject=subject, yardstick=Yardstick(0.01))


def test_the_model_itself_is_run_low_on_every_check_whatever_its_shape() -> None:
    model = seeded(Noting)
    bench = bench_of(model, normal(2, 4), normal(5, 4))
    SEEN.clear()
    found = Planner(bench).baselines()
    low = [seen for seen in SEEN if seen[2] is not torch.float32]
    assert low == [
        (2, torch.float32, torch.bfloat16),
        (5, torch.float32, torch.bfloat16),
        (2, torch.bfloat16, torch.bfloat16),
        (5, torch.bfloat16, torch.bfloat16),
    ]
    for baseline in found.values():
        assert 0 < baseline.measured_error < 0.01
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_what_raises_is_the_baselines_failure() -> None:
    factoring = Function(lambda x: torch.linalg.cholesky(x.t() @ x + torch.eye(4, dtype=x.dtype)).float())
    found = Planner(bench_of(factoring, formats=("fp16",))).baselines()
    cast = found["cast_fp16"]
    assert (cast.measured_error, cast.finite) == (None, False)
    assert "cholesky" in str(cast.failure)


ALLOWED = {"mkldnn.matmul.fp32_precision": "tf32"}


def test_fp32_as_the_caller_has_it_set_is_a_row_where_it_differs() -> None:
    """A GPU loses bits where the flags of TF32 allow it: so does this model."""
    before = flags()
    rounds = Function(lambda x: x * (1 + 2.0**-11 * (torch.backends.mkldnn.matmul.fp32_precision == "tf32")))
    with ieee():
        found = today_of(replace(bench_of(rounds), flags=ALLOWED))
        assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
    assert flags() == before
    assert found is not None and (found.computed_in, found.failure) == (("tf32",), None)
    assert found.measured_error == pytest.approx(2.0**-11, rel=1e-3)


def test_fp32_as_it_is_set_is_no_row_where_it_is_the_same() -> None:
    bench = replace(bench_of(seeded(Noting)), flags={**flags(), "mkldnn.matmul.fp32_precision": "ieee"})
    SEEN.clear()
    assert today_of(bench) is None and not SEEN  # nothing else is allowed, so nothing is run
    assert today_of(replace(bench, flags=ALLOWED)) is None and SEEN


def test_fp32_that_fails_as_it_is_set_says_so() -> None:
    def fails(x: Tensor) -> Tensor:
        if torch.backends.mkldnn.matmul.fp32_precision == "tf32":
            raise RuntimeError("no such arithmetic")
        return x + 1

    with ieee():
        found = today_of(replace(bench_of(Function(fails)), flags=ALLOWED))
    said = "RuntimeError: no such arithmetic"
    assert found is not None and found.measured_error is None and str(found.failure).startswith(said)
