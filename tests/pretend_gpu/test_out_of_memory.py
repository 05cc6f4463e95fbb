"""A GPU whose memory ends: the audit gets by with less of it, says how, and finds what it finds where there is enough."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor import Audit, ladder
from auditor.errors import AuditorError
from auditor.measure.estimates import estimate
from auditor.measure.measure import measure
from auditor.replay.results import OnHost
from auditor.report.reporters.text import render
from auditor.sparing import Sparing, sparing
from auditor.tape import capture
from tests.pretend_gpu.limits import counted, failing, limited
from tests.pretend_gpu.memory import ALLOCATOR
from tests.pretend_gpu.models import made
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences
from tests.subjects import normal, seeded, subject_of

SAMPLES = 8
SLOW = pytest.mark.slow


def thin() -> nn.Module:
    """Few weights, and large values between them."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def wide() -> nn.Module:
    """Many weights, and small values between them."""
    hidden = [layer for _ in range(6) for layer in (nn.Linear(512, 512), nn.GELU())]
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), *hidden, nn.Linear(512, 16))


IMAGES, ROWS = normal(SAMPLES, 3, 32, 32), normal(SAMPLES, 64)


def size_of(model: nn.Module) -> int:
    return sum(x.numel() * x.element_size() for x in model.parameters())


def values_of(model: nn.Module, x: torch.Tensor) -> int:
    """Bytes of the weights and of every layer's output: what one FP32 step holds."""
    sizes = [size_of(model)]
    for layer in model:
        x = layer(x)
        sizes.append(x.numel() * x.element_size())
    return sum(sizes)


def audited_of(audit: Audit) -> int:
    """How many samples were measured."""
    said = next((words for words in audit.environment.memory if words.endswith("samples")), f"{SAMPLES} of")
    return SAMPLES if audit.environment.execution == "emulated" else int(said.split()[0])


def with_memory(build: Callable[[], nn.Module], x: torch.Tensor, size: float, **how: Any) -> tuple[Audit, Audit]:
    """An audit that has so many bytes of a GPU, and one on the CPU of what it measured."""
    model = seeded(build)
    with limited(size):
        native = auditor.audit(model, (x,), device="auto", **how)
    return native, auditor.audit(model, (x[: audited_of(native)],), device="cpu", **how)


THIN = (4.0, 3.0, 2.5, 2.0, 1.5, 1.0)
"""Limits in units of what one FP32 forward holds, of a model whose values are large; when Python gives back what nobody holds
moves the peak, so which step is enough is not asserted, but for the last, where all of it is needed."""

EVERYTHING = (ladder.CHUNKS, ladder.SINGLY, "1 of 8 samples", ladder.HOST, ladder.INSTEAD)
EVERYTHING_BUT_SAMPLES = (ladder.CHUNKS, ladder.SINGLY, ladder.HOST, ladder.INSTEAD)
WIDE = {4.0: (), 2.0: (), 1.0: EVERYTHING}
"""The same of a model whose weights are large: a plan that stores them low needs 1.5 times their size as it is applied."""


@pytest.mark.parametrize("limit", [pytest.param(x, marks=[] if x == 1.0 else SLOW) for x in THIN])
@natively
def test_large_values_get_by_with_less_memory(limit: float) -> None:
    native, emulated = with_memory(thin, IMAGES, limit * values_of(seeded(thin), IMAGES))
    steps = [words for words in native.environment.memory if not words.endswith("samples")]
    assert steps == list(EVERYTHING_BUT_SAMPLES[: len(steps)])
    assert limit > 1.0 or ladder.HOST in steps
    assert differences(emulated, native) == []


@pytest.mark.parametrize("limit", [pytest.param(x, marks=SLOW) for x in WIDE])
@natively
def test_large_weights_get_by_with_less_memory(limit: float) -> None:
    native, emulated = with_memory(wide, ROWS, limit * size_of(seeded(wide)))
    assert native.environment.memory == WIDE[limit]
    assert native.environment.execution == ("native" if limit > 1.5 else "emulated")
    assert differences(emulated, native) == []


@natively
def test_the_record_says_what_was_done() -> None:
    native, _ = with_memory(thin, IMAGES, 1.0 * values_of(seeded(thin), IMAGES), formats="fp16", strategies="autocast")
    taken = native.environment.memory
    assert taken[0] == ladder.CHUNKS and taken[2:] == (ladder.HOST,)
    fewer = taken[1]
    said = f"The GPU's memory was too small for this audit as it is: it was run with {', '.join(taken)}."
    said += f" What was measured is of {fewer} of each batch."
    assert said in native.warnings
    assert native.inputs == (f"float32[{fewer.split()[0]}, 3, 32, 32]",)
    assert json.loads(json.dumps(native.to_json()))["environment"]["memory"] == list(taken)
    texts = native.texts("/nowhere")
    assert said in texts["report.html"].replace("&#39;", "'") and said in " ".join(render(native).split())


@natively
def test_a_device_that_was_asked_for_is_not_left() -> None:
    gc.collect()
    model, before = seeded(wide), list(ALLOCATOR.used)
    with limited(size_of(model) / 2), pytest.raises(AuditorError, match="--device cpu") as raised:
        auditor.audit(model, (ROWS,), device="pretend", formats="fp16", strategies="autocast")
    assert raised.value.slug == "out-of-memory"
    assert "\n" not in str(raised.value) and "pretend:0 (Pretend GPU)" in str(raised.value)
    gc.collect()
    assert ALLOCATOR.used <= before


@natively
def test_the_cpu_in_its_place_is_said() -> None:
    with limited(1000):
        audit = auditor.audit(seeded(thin), (IMAGES,), device="auto", formats="fp16", strategies="autocast")
    assert (audit.environment.execution, audit.environment.device) == ("emulated", "cpu")
    assert audit.environment.memory[-1] == ladder.INSTEAD
    assert any(text.endswith("it was run on the CPU, which imitates a GPU.") for text in audit.warnings)


class Mixing(nn.Module):
    """What a sample comes to depends on the others."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = thin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x - x.mean(0, keepdim=True))


@natively
def test_a_batch_whose_samples_depend_on_each_other_is_left_whole() -> None:
    limit = 1.0 * values_of(seeded(thin), IMAGES)
    native, emulated = with_memory(Mixing, IMAGES, limit, formats="fp16", strategies="autocast")
    assert native.environment.memory[:2] == (ladder.CHUNKS, ladder.HOST)
    assert differences(emulated, native) == []


class Chooser(nn.Module):
    """Answers with a choice alone; what decides it is read on."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.enter(x).relu()).argmax(-1)


class ReadOn(nn.Module):
    """Its first output is read by what gives the second."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.enter(x).exp()
        return hidden, self.leave(hidden / hidden.sum(-1, keepdim=True))


@pytest.mark.parametrize("build", [Chooser, ReadOn])
@natively
def test_values_on_the_host_are_attributed_alike(build: Callable[[], nn.Module]) -> None:
    subject = subject_of(seeded(build).to("pretend"), normal(8, 8).to("pretend"))
    captured = capture(subject, ("fp16", "bf16"))
    found = []
    for host in (False, True):
        with sparing(Sparing(host=host)):
            measured = measure(captured, subject.model, subject.batches[0], ("fp16", "bf16"))
            estimates = estimate(measured, 0)
        shares = {(name, fmt): estimates.contribution(name, fmt) for name in measured.live for fmt in measured.formats}
        found.append((measured.errors, shares))
        assert isinstance(measured.values, OnHost) is host
    assert found[0] == found[1]
    assert any(one.isolated for one in found[0][1].values())


@pytest.mark.parametrize("part", [0.5, *(pytest.param(i / 20, marks=SLOW) for i in range(20) if i != 10)])
@natively
def test_no_allocation_that_fails_becomes_a_verdict(part: float) -> None:
    """Whichever it is: the audit begins again, and finds the same."""
    model, inputs = made("recurrent")
    found: list[int] = []
    with counted(found):
        whole = auditor.audit(model, inputs, device="pretend")
    with failing(int(part * found[0]) + 1):
        again = auditor.audit(model, inputs, device="pretend")
    assert again.environment.memory == (ladder.CHUNKS,)
    assert differences(whole, again) == []


@pytest.mark.parametrize("part", [pytest.param(i / 10, marks=SLOW) for i in range(10)])
@natively
def test_no_allocation_that_fails_in_training_becomes_a_verdict(part: float) -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (y - t).square().mean()

    def trained() -> Audit:
        return auditor.audit(
            seeded(thin), (IMAGES[:2], torch.zeros(2, 4)), mode="training", loss_fn=loss, device="pretend"
        )

    found: list[int] = []
    with counted(found):
        whole = trained()
    with failing(int(part * found[0]) + 1):
        again = trained()
    assert again.environment.memory == (ladder.CHUNKS,)
    assert differences(whole, again) == []


@pytest.mark.slow
@natively
def test_a_training_step_gets_by_with_less_memory() -> None:
    def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (y - t).square().mean()

    def trained(device: str, count: int = SAMPLES) -> Audit:
        batch = IMAGES[:count], torch.zeros(count, 4)
        return auditor.audit(
            seeded(thin), batch, mode="training", loss_fn=loss, device=device, formats="fp16", strategies="autocast"
        )

    with limited(4.0 * values_of(seeded(thin), IMAGES)):
        native = trained("auto")
    assert native.environment.execution == "native" and native.environment.memory
    assert differences(trained("cpu", audited_of(native)), native) == []
