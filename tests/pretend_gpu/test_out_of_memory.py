"""A GPU whose memory ends, or that gives up in the middle of an audit."""

import gc

import pytest
import torch
from torch import nn

import auditor
from auditor import Audit
from auditor.errors import AuditorError
from auditor.flow import TOO_SMALL
from auditor.report.reporters import text as render
from tests.pretend_gpu.memory import ALLOCATOR, counted, failing, limited
from tests.pretend_gpu.models import made
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences
from tests.support.refusing import refused
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned

SLOW = pytest.mark.slow


def thin() -> nn.Module:
    """Few weights, and large values between them."""
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


IMAGES = normal(8, 3, 32, 32)


@pytest.mark.slow
@natively
def test_a_device_that_was_asked_for_is_not_left() -> None:
    gc.collect()
    model, before = seeded(thin), list(ALLOCATOR.used)
    with limited(1000), refused(AuditorError, "out-of-memory", match="--device cpu"):
        auditor.audit(model, (IMAGES,), device="pretend", formats="fp16", strategies="autocast")
    gc.collect()
    assert ALLOCATOR.used <= before


@pytest.mark.parametrize("size", [1000, pytest.param(2_000_000, marks=SLOW)])
@natively
def test_the_cpu_in_its_place_is_said(size: int) -> None:
    def audited(device: str) -> Audit:
        return auditor.audit(seeded(thin), (IMAGES,), device=device, formats="fp16", strategies="autocast")

    with limited(size):
        audit = audited("auto")
    assert (audit.environment.execution, audit.environment.device) == ("emulated", "cpu")
    assert audit.warnings[-1] == TOO_SMALL
    texts = audit.texts("/nowhere")
    assert TOO_SMALL in texts["report.html"].replace("&#39;", "'") and TOO_SMALL in " ".join(render(audit).split())
    assert differences(audited("cpu"), audit) == []


@pytest.mark.parametrize("part", [0.5, *(pytest.param(part, marks=SLOW) for part in (0.05, 0.3, 0.75, 0.95))])
@natively
def test_no_allocation_that_fails_becomes_a_verdict(part: float) -> None:
    """Whichever it is: the audit begins again, and finds the same."""
    model, inputs = made("recurrent")
    found: list[int] = []
    with counted(found):
        whole = auditor.audit(model, inputs, device="auto")
    with failing(int(part * found[0]) + 1):
        again = auditor.audit(model, inputs, device="auto")
    assert again.warnings[-1] == TOO_SMALL
    assert differences(whole, again) == []


# A GPU that gives up in the middle of an audit: one line, wherever that is, and never a verdict of an operation.

SAID = "CUDA error: device-side assert triggered"


@pytest.mark.parametrize("share", thinned([0.4, 0.002, 0.95]))
@natively
def test_it_ends_in_one_line(share: float) -> None:
    model, inputs = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2))).eval(), (normal(3, 4),)
    found: list[int] = []
    with counted(found):
        auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    last, take = ALLOCATOR.taken + int(share * found[0]), ALLOCATOR.take

    def failing(size: int, index: int) -> object:
        if ALLOCATOR.taken >= last:  # and from here on: nothing runs on it any more
            raise torch.AcceleratorError(SAID)
        return take(size, index)

    ALLOCATOR.take = failing  # type: ignore[assignment,method-assign]
    try:
        with pytest.raises(AuditorError, match=SAID) as caught:
            auditor.audit(model, inputs, device="pretend", formats="fp16", strategies="autocast")
    finally:
        del ALLOCATOR.take
    assert caught.value.slug in ("device-failed", "no-copy") and "\n" not in str(caught.value)
    assert all(x.device.type == "cpu" for x in model.parameters())
