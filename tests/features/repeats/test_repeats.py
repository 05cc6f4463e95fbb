"""The error over the calls of a repeated module, over layers in a list, and over batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.features.repeats.report import repeats_lines, repeats_section
from auditor.records import Audit
from tests.support.subjects import normal


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x)


class Denoiser(nn.Module):
    """Its values grow with the timestep, so that the FP16 of a large one overflows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))

    def forward(self, sample: Tensor, timestep: Tensor) -> Tensor:
        for layer in self.layers:
            sample = layer(sample)
        return sample + (sample * timestep - sample * timestep.float()).mean()


class Sampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.denoiser = Denoiser()

    def forward(self, x: Tensor) -> Tensor:
        for step in range(4):
            x = x - 0.1 * self.denoiser(x, torch.tensor(float(step)))
        return x


@pytest.fixture(scope="module")
def sampler() -> Audit:
    torch.manual_seed(0)
    return auditor.audit(Sampler().eval(), normal(2, 8), formats="bf16", strategies="autocast", device="cpu")


@pytest.fixture(scope="module")
def denoiser() -> Audit:
    torch.manual_seed(0)
    batches = [{"sample": normal(2, 8), "timestep": torch.tensor(time)} for time in (900.0, 10.0, 500.0)]
    return auditor.audit(Denoiser().eval(), batches, formats="bf16", strategies="autocast", device="cpu")


def test_calls_of_a_sampler_s_denoiser(sampler: Audit) -> None:
    calls, layers = sampler.repeats
    assert (calls.kind, calls.module) == ("calls", "denoiser")
    assert calls.names == ("call 1", "call 2", "call 3", "call 4")
    assert all(error is not None and 1e-4 < error < 1e-2 for error in calls.errors)
    assert (layers.kind, layers.module) == ("layers", "denoiser.layers")
    assert layers.names == tuple(f"denoiser.layers.{index}" for index in range(3))


def test_batches_are_named_by_the_number_that_differs(denoiser: Audit) -> None:
    batches, layers = denoiser.repeats
    assert batches.kind == "batches"
    assert batches.names == ("batch 1 (timestep 900)", "batch 2 (timestep 10)", "batch 3 (timestep 500)")
    assert denoiser.plan is not None
    assert denoiser.plan.measured_error == max(error or 0.0 for error in batches.errors)
    assert layers.kind == "layers"


def test_the_section_has_a_chart_and_a_table_with_the_worst(denoiser: Audit) -> None:
    worst = denoiser.repeats[0].names[denoiser.repeats[0].worst]
    line, *_ = repeats_lines(denoiser)
    assert line.startswith(f"Under BF16 under autocast, the error of the outputs is largest in {worst}: ")
    prose, chart, table = repeats_section(denoiser)[:3]
    assert prose.texts == (line,)  # type: ignore[union-attr]
    assert chart.label == "Error by batch: the outputs"
    assert [row[0] for row in table.rows] == list(denoiser.repeats[0].names)  # type: ignore[union-attr]
    assert table.rows[table.bold][0] == worst  # type: ignore[union-attr]


def test_a_loaded_audit_has_the_same_section(denoiser: Audit, tmp_path: Path) -> None:
    denoiser.save(tmp_path)
    assert 'id="repeats"' in (tmp_path / "report.html").read_text()
    assert repeats_section(auditor.load(tmp_path)) == repeats_section(denoiser)


def test_a_model_that_runs_once_has_no_section() -> None:
    audit = auditor.audit(Layer().eval(), normal(2, 8), formats="bf16", strategies="autocast", device="cpu")
    assert audit.repeats == ()
    assert repeats_section(audit) == []
