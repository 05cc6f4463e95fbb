"""What every audit must leave behind, whatever the model: all of it untouched, and verified plans that hold by hand."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.emulation.emulate import emulate_unless_native
from auditor.isolation import in_eval
from auditor.isolation.run_model import run_model
from auditor.numerics.metrics import output_error
from auditor.records import Audit, Distance
from tests.support.replaying import Model, assert_same, linear
from tests.support.sentences import assert_no_false_fp32

Call = tuple[tuple[Any, ...], dict[str, Any]]
LAST_BIT = 2.0**-24
"""Half a unit of FP32: two runs in FP32 may be as far apart."""

Build = Callable[[], tuple[nn.Module, Call]]


def held(
    build: Build,
    *,
    some_plan_verified: bool = True,
    reference: Build | None = None,
    in_fp32: float = LAST_BIT,
    **options: Any,
) -> Audit:
    """The audit of what `build()` makes, once its promises were kept.

    build: makes the same model and call every time, so that nothing here needs `copy.deepcopy` of either. reference:
    makes what plans are to be compared with, where that is not the model itself. in_fp32: how far apart two runs in FP32
    may be, where the model has an operation that does not give the same bits twice.
    Promises: the model's tensors and the inputs are bit for bit what they were; each verified plan, applied to another
    model of `build()` and called as its user calls it, in eval mode, errs by what the plan states, without gradients and
    with them; no page says that the model has to stay in FP32 where a low-precision run was within every limit.
    """
    with torch.random.fork_rng(devices=[]):
        (model, (args, kwargs)), (untouched, call) = build(), build()
        audit = auditor.audit(model, args, kwargs=kwargs, device="cpu", **options)
        assert_same(tensors_of(model), tensors_of(untouched))
        assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in untouched.parameters()]
        assert_same(tensors_in((args, kwargs)), tensors_in(call))
        verified = {name: plan for name, plan in audit.plans.items() if plan.is_verified}
        assert verified or not some_plan_verified, {name: plan.verification for name, plan in audit.plans.items()}
        for name, plan in verified.items():
            ran = plan.verification
            judged, noise = (build, reference or build, audit, name), max(in_fp32, 2 * ran.noise)
            distance = output_error if ran.joint is None else share_of(options.get("max_error", 0.01))
            _errs_by(plan.measured_error, *judged, noise=noise, distance=distance)
            if ran.joint is not None:
                _errs_by(ran.joint, *judged, noise=noise)
            if ran.with_gradients is not None:
                _errs_by(ran.with_gradients, *judged, noise=noise, gradients=True, distance=distance)
    assert_no_false_fp32(audit)
    return audit


def share_of(max_error: float) -> Distance:
    """What outputs take of a budget by which no discrete one may be another."""

    def share(reference: Sequence[Tensor], candidate: Sequence[Tensor]) -> float:
        both = list(zip(reference, candidate, strict=True))
        assert all(torch.equal(r, c) for r, c in both if not (r.is_floating_point() or r.is_complex()))
        floating = [(r, c) for r, c in both if r.is_floating_point() or r.is_complex()]
        return output_error([r for r, _ in floating], [c for _, c in floating]) / max_error if floating else 0.0

    return share


def _errs_by(
    stated: float | None,
    build: Build,
    reference: Build,
    audit: Audit,
    plan: str,
    *,
    noise: float,
    gradients: bool = False,
    distance: Distance = output_error,
) -> None:
    """The plan errs by what is stated; the reference and the patched model may be as far off as two runs in FP32."""
    compared, compared_call = reference()
    with in_eval(compared):
        expected = run_model(compared, compared_call, gradients=gradients)
    another, call = build()
    with in_eval(another):
        patched = auditor.apply(another, audit, plan)
        found = run_model(patched, call, around=lambda: emulate_unless_native("cpu"), gradients=gradients)
    within = pytest.approx(stated, rel=1e-6, abs=(1 if distance is output_error else 100) * noise)
    assert distance(expected, found) == within, (plan, gradients)


def a_format(name: str) -> str:
    """FP16 or BF16, as the name goes: half of a table in each."""
    return ("fp16", "bf16")[len(name) % 2]


def raised(build: Build) -> Build:
    """The same model and call with every FP16 and BF16 tensor in FP32."""

    def in_fp32() -> tuple[nn.Module, Call]:
        model, call = build()
        return model._apply(_wide), torch.utils._pytree.tree_map_only(Tensor, _wide, call)

    return in_fp32


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def tensors_of(model: nn.Module) -> list[Tensor]:
    return [tensor for _, tensor in sorted({**dict(model.named_parameters()), **dict(model.named_buffers())}.items())]


def tensors_in(tree: object) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def drawn(make: Callable[[], nn.Module], *shape: int) -> Build:
    """A model and an input of this shape, both drawn anew from one seed."""

    def build() -> tuple[nn.Module, Call]:
        torch.manual_seed(0)
        return make(), ((torch.randn(*shape),), {})

    return build


# Small models that others are made of, or stand around.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 32)
        self.norm = nn.LayerNorm(32)
        self.last = nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(torch.relu(self.first(x))))


def around(inner: nn.Module) -> nn.Module:
    return Model(lambda m, x: m.head(torch.tanh(m.inner(x))), inner=inner, head=nn.Linear(8, 4))


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x))


def model_of(function: Callable[..., Any], **state: Any) -> nn.Module:
    """A function over three layers of its own."""
    layers = {name: linear(8, 8, seed=seed) for seed, name in enumerate(("first", "second", "third"))}
    return Model(function, **layers, **state).eval()
