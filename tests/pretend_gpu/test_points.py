"""What can go wrong on a GPU alone: one test each, of whole audits where it takes one."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.cli import main
from auditor.numerics.metrics import output_error
from auditor.verify import artefact
from tests.pretend_gpu.memory import ALLOCATOR
from tests.pretend_gpu.natively import natively
from tests.pretend_gpu.same import differences
from tests.support.replaying import Model, linear
from tests.support.subjects import normal, seeded
from tests.support.thinned import thinned


def own(m: Any, x: Tensor) -> Tensor:
    """Its author runs a part low, and a loss that autocast refuses outside of it."""
    with torch.autocast(x.device.type, dtype=torch.bfloat16):
        hidden = m.inside(m.enter(x)).relu()
    scores = m.leave(hidden.float()).sigmoid()
    return F.binary_cross_entropy(scores, torch.full_like(scores, 0.5), reduction="none")


def loud() -> nn.Module:
    """A recurrent layer whose input is beyond float16 and within bfloat16."""
    over = nn.RNN(8, 8, nonlinearity="relu", batch_first=True)
    over.weight_ih_l0.data.abs_().mul_(1e-3)
    return Model(lambda m, x: m.head(m.over(x + 1e5)[0]), over=over, head=nn.Linear(8, 4))


def attending(m: Any, x: Tensor) -> Tensor:
    q, k, v = m.into(x).chunk(3, -1)
    return m.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.5 if m.training else 0.0))


def audits(model: nn.Module, *inputs: Tensor, **options: Any) -> tuple[auditor.Audit, auditor.Audit]:
    emulated, native = (auditor.audit(model, inputs, device=device, **options) for device in ("cpu", "pretend"))
    return emulated, native


def same(emulated: auditor.Audit, native: auditor.Audit) -> None:
    found = differences(emulated, native)
    assert not found, found


@natively
def test_an_authors_own_region_and_a_loss_that_autocast_bans() -> None:
    layers = {"enter": linear(8, 16), "inside": linear(16, 16), "leave": linear(16, 4)}
    same(*audits(Model(own, **layers).eval(), normal(4, 8), formats="fp16"))


@natively
def test_their_overflow_is_found_in_bf16_too() -> None:
    emulated, native = audits(seeded(loud), normal(2, 3, 8), formats="bf16", strategies="autocast")
    for audit in (emulated, native):
        assert not audit.baselines["autocast_bf16"].finite
        plan = audit.plans["autocast_bf16"]
        assert plan.is_verified and {plan.scopes[path].precision for path in ("", "over") if path in plan.scopes} == {
            "fp32"
        }
        assert any("over" in reason.modules for reason in plan.reasons)
    same(emulated, native)


@natively
def test_attention_drops_the_same_entries_low_and_in_fp32() -> None:
    model, x, target = Model(attending, into=linear(8, 24), out=linear(8, 4)), normal(2, 6, 8), torch.zeros(2, 6, 4)
    emulated, native = audits(
        model,
        x,
        target,
        mode="training",
        loss_fn=lambda y, t: (y - t).square().mean(),
        formats="fp16",
        strategies="autocast",
    )
    found = native.training.errors if native.training else {}
    assert found and all(error is not None and error < 0.05 for error in found.values()), found
    same(emulated, native)


@pytest.mark.parametrize("as_criterion", thinned([True, False]))
@natively
def test_the_users_measures_get_tensors_of_the_cpu(as_criterion: bool) -> None:
    seen: set[str] = set()

    def off(reference: Any, candidate: Any) -> float:
        pair = (reference, candidate) if as_criterion else (*reference, *candidate)
        seen.update(x.device.type for x in pair)
        return output_error([reference], [candidate]) if as_criterion else output_error(reference, candidate)

    model = seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4))).eval()
    how: dict[str, Any] = {"criteria": {"output": (off, 0.01)}} if as_criterion else {"metric": off}
    auditor.audit(model, (normal(4, 8),), device="pretend", formats="fp16", **how)
    assert seen == {"cpu"}


@pytest.mark.slow
@natively
def test_cached_memory_is_given_back_before_another_process_verifies() -> None:
    held: list[int] = []
    with TemporaryDirectory() as folder, _jobs(held):
        file = Path(folder, "model.py")
        text = (
            "from tests.pretend_gpu.start import start\n\nstart()\n\nfrom torch import nn\n\nmodel = nn.Linear(8, 8)\n"
        )
        file.write_text(text + "example_inputs = __import__('torch').ones(2, 8)\n", encoding="utf-8")
        out = [f"{file}", "--out", f"{folder}/out", "--formats", "fp16", "--strategies", "autocast"]
        assert main([*out, "--device", "pretend"]) == 0
    assert held and not any(held)


@contextmanager
def _jobs(held: list[int]) -> Iterator[None]:
    """Adds what the GPU caches, and nothing uses, whenever a job is handed to the other process."""
    original = artefact.hand

    def handed(*args: Any) -> None:
        if args[1] is not None:  # the end of it
            held.append(sum(ALLOCATOR.cached))
        original(*args)

    artefact.hand = handed
    try:
        yield
    finally:
        artefact.hand = original
