"""An audit that finds no memory begins again, a step sparer each time, and never for any other reason."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auditor import ladder
from auditor.errors import AuditorError
from auditor.options import Options
from auditor.records import Subject
from auditor.sparing import now
from auditor.stages import Stages
from tests.subjects import normal, subject_of

FULL = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """`cuda:0`, of which nothing is asked but its name."""
    device = SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 0,
        device_count=lambda: 1,
        get_device_name=lambda device: "A GPU",
        empty_cache=lambda: None,
        is_initialized=lambda: False,
    )
    monkeypatch.setattr("auditor.devices._module", lambda kind: device)


def climbing(fails: int, error: Exception = FULL, *, device: str = "cuda", **how: Any) -> list[tuple[Any, ...]]:
    """(what was done so far, samples, device) of every attempt; the first `fails` of them raise."""
    attempts: list[tuple[Any, ...]] = []

    def once(subject: Subject, options: Options) -> Any:
        attempts.append((now().taken, subject.batches[0][0][0].shape[0], options.where))
        if len(attempts) <= fails:
            with Stages(None)("measure", ""):
                raise error
        return attempts

    subject = subject_of(nn.Linear(4, 2), normal(8, 4))
    return ladder.climbed(once, subject, Options((), "", device=device, **how))  # type: ignore[return-value]


@pytest.mark.usefixtures("gpu")
def test_each_step_is_sparer_than_the_last() -> None:
    taken = [(done, samples) for done, samples, _ in climbing(6)]
    chunks, singly, host = ladder.CHUNKS, ladder.SINGLY, ladder.HOST
    assert taken == [
        ((), 8),
        ((chunks,), 8),
        ((chunks, singly), 8),
        ((chunks, singly, "4 of 8 samples"), 4),
        ((chunks, singly, "4 of 8 samples", host), 4),
        ((chunks, singly, "2 of 8 samples", host), 2),
        ((chunks, singly, "1 of 8 samples", host), 1),
    ]
    assert not now().taken


@pytest.mark.usefixtures("gpu")
def test_auto_ends_on_the_cpu_with_the_whole_batch() -> None:
    done, samples, device = climbing(7, device="auto")[-1]
    assert (done[-1], samples, device) == (ladder.INSTEAD, 8, "cpu")


@pytest.mark.usefixtures("gpu")
def test_a_device_that_was_named_ends_in_one_line() -> None:
    with pytest.raises(
        AuditorError, match=r"out of memory on cuda:0 \(A GPU\), with .* \(CUDA out of memory"
    ) as raised:
        climbing(99)
    assert raised.value.slug == "out-of-memory" and "\n" not in str(raised.value)


@pytest.mark.usefixtures("gpu")
def test_one_format_is_not_measured_one_at_a_time() -> None:
    assert [done for done, *_ in climbing(2, formats=("fp16",))][2] == (ladder.CHUNKS, "4 of 8 samples")


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    "error", [MemoryError("host"), RuntimeError("DefaultCPUAllocator: can't allocate memory"), ValueError()]
)
def test_other_errors_are_not_about_the_gpu(error: Exception) -> None:
    with pytest.raises(AuditorError):
        climbing(1, error)


@pytest.mark.parametrize(
    "build", [lambda: FULL, lambda: RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate")]
)
@pytest.mark.usefixtures("gpu")
def test_libraries_beside_torch_say_it_too(build: Callable[[], Exception]) -> None:
    assert len(climbing(1, build())) == 2


def test_a_cpu_has_no_steps() -> None:
    with pytest.raises(AuditorError, match="out of memory in the stage"):
        climbing(1, device="cpu")
