"""Models stored in BF16 or FP16, whole or in part: held against the same values in FP32, and given back as they were."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.emulation.emulate import emulate_unless_native
from auditor.errors import AuditorError
from auditor.isolation.run_model import run_model
from auditor.numerics.metrics import output_error
from tests.any_model.holding import Build, Call, held, raised
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.small_models import tied
from tests.support.thinned import thinned

BF16, FP16 = torch.bfloat16, torch.float16


def seeded(make: Callable[[], tuple[nn.Module, Call]]) -> Build:
    def build() -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        model, call = make()
        return model.eval(), call

    return build


def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape).to(dtype)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8))


def follows(m: Any, x: Tensor) -> Tensor:
    """The usual mixture: norms in FP32, what they read and give cast by hand."""
    return m.last(m.norm(m.first(x.to(m.first.weight.dtype)).float()).to(m.last.weight.dtype))


def masked(m: Any, x: Tensor) -> Tensor:
    """A mask made of the smallest number of whatever dtype the weights are in."""
    dtype = next(m.parameters()).dtype
    mask = torch.ones(5, 5, dtype=dtype).triu(1) * torch.finfo(dtype).min
    x = x.to(dtype)
    return m.last((m.first(x) @ m.key(x).mT + mask).softmax(-1) @ x)


def rotated(m: Any, x: Tensor) -> Tensor:
    a, b = m.first(x).float().chunk(2, -1)
    return m.last(torch.cat((a * m.cos - b * m.sin, a * m.sin + b * m.cos), -1).to(x.dtype))


def mixture() -> nn.Module:
    """Experts in BF16 behind a router in FP32."""

    def forward(m: Any, x: Tensor) -> Tensor:
        shares = m.router(x.float()).softmax(-1).to(x.dtype)
        return shares[:, :1] * m.one(x) + shares[:, 1:] * m.two(x)

    return Model(forward, router=nn.Linear(16, 2), one=mlp().bfloat16(), two=mlp().bfloat16())


def counting() -> nn.Module:
    """Writes to its buffers, two of which are one storage."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.mean.mul_(0.9).add_(x.mean(0) * 0.1)
        return m.layers(x - m.mean + m.shift)

    flat = torch.randn(32)
    return Model(forward, layers=mlp(), mean=flat[:16], shift=flat[16:])


def fp32_table() -> nn.Module:
    angles = torch.outer(torch.arange(6.0), 1e4 ** -(torch.arange(8) / 8))
    layers = {"first": nn.Linear(16, 16).bfloat16(), "last": nn.Linear(16, 16).bfloat16()}
    return Model(rotated, **layers, cos=angles.cos(), sin=angles.sin())


def switched_off(m: Any, x: Tensor) -> Tensor:
    """The author's own region around what has to be precise."""
    y = m.first(x)
    with torch.autocast("cpu", enabled=False):
        y = m.norm(y.float())
    return m.last(y.to(x.dtype))


def layers(low: torch.dtype) -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 32).to(low), "norm": nn.LayerNorm(32), "last": nn.Linear(32, 8).to(low)}


def attention() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 16), "key": nn.Linear(16, 16), "last": nn.Linear(16, 8)}


def one(x: Tensor) -> Call:
    return (x,), {}


STORED: dict[str, Callable[[], tuple[nn.Module, Call]]] = {
    "all in BF16": lambda: (mlp().bfloat16(), one(normal(4, 16, dtype=BF16))),
    "all in FP16": lambda: (mlp().half(), one(normal(4, 16, dtype=FP16))),
    "norms in FP32": lambda: (Model(follows, **layers(FP16)), one(normal(4, 16, dtype=FP16))),
    "a router in FP32": lambda: (mixture(), one(normal(4, 16, dtype=BF16))),
    "inputs in containers": lambda: (
        Model(lambda m, batch, scale: {"y": m.body(batch["x"][0]) * scale}, body=mlp()).bfloat16(),
        ((), {"batch": {"x": [normal(4, 16, dtype=BF16)]}, "scale": torch.tensor(2.0, dtype=BF16)}),
    ),
    "tied weights": lambda: (tied(32, 16, norm=nn.LayerNorm(16)).half(), one(torch.randint(0, 32, (2, 5)))),
    "masks by finfo": lambda: (Model(masked, **attention()).half(), one(normal(2, 5, 16, dtype=FP16))),
    "rotary tables in FP32": lambda: (fp32_table(), one(normal(2, 6, 16, dtype=BF16))),
    "buffers that it writes to": lambda: (counting().bfloat16(), one(normal(4, 16, dtype=BF16))),
    "a buffer alone": lambda: (
        Model(lambda m, x: m.last(m.first(x).relu() * m.table), first=nn.Linear(16, 32), last=nn.Linear(32, 8), table=normal(32, dtype=BF16)),
        one(normal(4, 16)),
    ),
    "BF16 and FP16": lambda: (
        Model(lambda m, x: m.last(m.first(x).to(m.last.weight.dtype)), first=nn.Linear(16, 32).bfloat16(), last=nn.Linear(32, 8).half()),
        one(normal(4, 16, dtype=BF16)),
    ),
    "autocast switched off inside": lambda: (Model(switched_off, **layers(BF16)), one(normal(4, 16, dtype=BF16))),
    "a recurrent layer": lambda: (Model(lambda m, x: m.body(x)[0], body=nn.LSTM(16, 8, batch_first=True)).half(), one(normal(2, 5, 16, dtype=FP16))),
}  # fmt: skip


@pytest.mark.parametrize("kind", thinned(STORED))
def test_models_stored_low_are_held_against_the_same_values_in_fp32(kind: str) -> None:
    build = seeded(STORED[kind])
    audit = held(build, reference=raised(build))
    assert all(plan.is_verified and plan.upcast == "weights" for plan in audit.plans.values())
    assert "the model stores" in audit.live.warnings[0]
    low = audit.plans["autocast_fp16"]
    assert low.low_precision_flops > 0.9
    assert low.measured_error


def test_the_audit_is_that_of_the_fp32_model() -> None:
    """Raised by hand, the model has the same verdicts, plans and errors."""
    build = seeded(STORED["all in BF16"])
    ours, theirs = (auditor.audit(model, *call, device="cpu") for model, (call, _) in (build(), raised(build)()))
    assert [node.verdicts for node in ours.nodes] == [node.verdicts for node in theirs.nodes]
    for name, plan in ours.plans.items():
        assert (plan.scopes, plan.measured_error) == (theirs.plans[name].scopes, theirs.plans[name].measured_error)


def test_a_part_that_the_forward_casts_to_stays_as_it_is() -> None:
    """`.bfloat16()` written out wants BF16 weights: the reference has them, and so has every plan."""

    def build() -> tuple[nn.Module, Call]:
        parts = {"first": nn.Linear(16, 32), "low": nn.Linear(32, 32).bfloat16(), "last": nn.Linear(32, 8)}
        return Model(lambda m, x: m.last(m.low(m.first(x).bfloat16()).float()), **parts), one(normal(4, 16))

    audit = held(seeded(build))
    assert "the model itself casts to bfloat16" in audit.live.warnings[0]
    for name, plan in audit.plans.items():
        assert plan.is_verified
        model = auditor.apply(seeded(build)()[0], audit, name)
        assert model.low.weight.dtype is BF16
        assert model.first.weight.dtype is not BF16 or plan.format == "bf16"


def test_inputs_in_half_that_an_fp32_model_does_not_cast_are_raised() -> None:
    def build() -> tuple[nn.Module, Call]:
        return mlp(), one(normal(4, 16, dtype=FP16))

    audit = held(seeded(build), reference=raised(seeded(build)))
    assert "were converted to FP32" in audit.live.warnings[0]
    model, _ = seeded(build)()
    assert auditor.apply(model, audit, "autocast_bf16")[0].weight.dtype is torch.float32


def test_a_training_step_of_a_model_stored_low() -> None:
    torch.manual_seed(0)
    model, x, target = mlp().bfloat16(), normal(8, 16, dtype=BF16), normal(8, 8, dtype=BF16)
    before = [p.detach().clone() for p in model.parameters()]
    audit = auditor.audit(model, (x, target), mode="training", loss_fn=F.mse_loss, device="cpu")
    assert audit.training is not None
    assert all(torch.equal(p, b) and p.dtype is BF16 for p, b in zip(model.parameters(), before, strict=True))


def test_a_plan_says_no_to_weights_that_lost_more_than_the_audited_ones() -> None:
    """A plan in FP16 rounded what came in BF16, and one made of an FP32 model takes no BF16 weights."""
    build = seeded(STORED["all in BF16"])
    model, (call, _) = build()
    audit = auditor.audit(model, call, device="cpu")
    twice = auditor.apply(auditor.apply(build()[0], audit, "cast_bf16"), audit, "autocast_fp16")
    once = auditor.apply(build()[0], audit, "autocast_fp16")
    assert (
        output_error(*(run_model(m, (call, {}), around=lambda: emulate_unless_native("cpu")) for m in (once, twice)))
        == 0
    )
    rounded = auditor.apply(build()[0], audit, "cast_fp16")
    wide, wide_call = raised(build)()
    of_fp32 = auditor.audit(wide, wide_call[0], device="cpu")
    for lost, plans, dtype in ((rounded, audit, "float16"), (build()[0], of_fp32, "bfloat16")):
        with refused(AuditorError, "plan-mismatch", match=f"stored in torch.{dtype}: load the FP32 checkpoint"):
            auditor.apply(lost, plans, "autocast_bf16")


SOURCE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, dtype=torch.{dtype}):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(16, 32, dtype=dtype), nn.LayerNorm(32), nn.Linear(32, 8, dtype=dtype)

    def forward(self, x):
        return self.last(self.norm(self.first(x).float()).to(self.last.weight.dtype))

def get_inputs():
    torch.manual_seed(1)
    return torch.randn(4, 16).to(torch.{dtype})
"""


def test_the_written_file_patches_a_model_stored_low(tmp_path: Path) -> None:
    """On the command line the model is made by its source, in BF16, in a process of its own."""
    from auditor.flow import run
    from auditor.loading import load
    from auditor.loading.importer import import_source
    from auditor.results import Audit
    from auditor.settings import Settings

    (tmp_path / "net.py").write_text(SOURCE.format(dtype="bfloat16"), encoding="utf-8")
    audit = Audit.of(run(load(f"{tmp_path / 'net.py'}:Net"), Settings(command="", device="cpu")))
    assert all(plan.is_verified for plan in audit.plans.values())
    audit.save(tmp_path / "files")
    patched = import_source("patched_model", tmp_path / "files" / "patched_model.py")
    torch.manual_seed(0)
    reference = patched.original().float()
    for name, plan in audit.plans.items():
        for way in (
            lambda m, n=name: patched.apply(m, n),
            lambda m, n=name: auditor.apply(m, tmp_path / "files/plan.json", n),
        ):
            torch.manual_seed(0)
            model = way(patched.original())
            with patched.user_module(patched.SOURCE, patched.__file__) as source:
                batch = source.get_inputs()
            found = run_model(model, ((batch,), {}), around=lambda: emulate_unless_native("cpu"))
            error = output_error(run_model(reference, ((batch.float(),), {})), found)
            assert error == pytest.approx(plan.measured_error, rel=1e-6)  # fmt: skip
