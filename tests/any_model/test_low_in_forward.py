"""Half precision, FP8 and FP64 that the author asks for, masks and dtypes that follow it: all part of the reference."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.errors import CaptureError
from auditor.execution.policy import Policy, choice_from_scopes
from auditor.records import ScopeChoice
from tests.any_model.holding import drawn, held
from tests.any_model.test_stored_low import mlp, normal, one, seeded
from tests.support.refusing import refused
from tests.support.replaying import Model, replayed
from tests.support.subjects import only
from tests.support.thinned import thinned

BF16, FP16 = torch.bfloat16, torch.float16


def scores(m: Any, x: Tensor) -> Any:
    return m.last(torch.matmul(m.first(x).half(), m.key(x).half().mT).float().softmax(-1))


def two_layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 16), "last": nn.Linear(16, 8)}


def cast_weights(m: Any, x: Tensor) -> Tensor:
    return F.linear(x.bfloat16(), m.first.weight.bfloat16(), m.first.bias.bfloat16()).float()


def accumulated(m: Any, x: Tensor) -> Any:
    """Summed in a buffer that is made in BF16."""
    total = torch.zeros(4, 16, dtype=BF16)
    for _ in range(3):
        total += m.first(x).to(total.dtype)
    return m.last(total.float())


CASES = {
    "a product in FP16": lambda: (Model(scores, first=nn.Linear(16, 16), key=nn.Linear(16, 16), last=nn.Linear(4, 8)), one(normal(4, 16))),
    "a value in BF16": lambda: (Model(lambda m, x: m.last(m.first(x).bfloat16().float()), **two_layers()), one(normal(4, 16))),
    "weights cast to BF16": lambda: (Model(cast_weights, first=nn.Linear(16, 16)), one(normal(4, 16))),
    "a softmax in FP16": lambda: (Model(lambda m, x: m.last(m.first(x).half().softmax(-1).float()), **two_layers()), one(normal(4, 16))),
    "a sum in BF16": lambda: (Model(accumulated, **two_layers()), one(normal(4, 16))),
    "a result in FP16": lambda: (Model(lambda m, x: m.body(x).half(), body=mlp()), one(normal(4, 16))),
    "an input that it raises": lambda: (Model(lambda m, x: m.body(x.float()), body=mlp()), one(normal(4, 16, dtype=FP16))),
    "inputs in containers": lambda: (
        Model(lambda m, batch, mask: m.body(batch["x"][0].to(m.body[0].weight.dtype) + mask.float()), body=mlp()),
        (({"x": [normal(4, 16, dtype=BF16)]},), {"mask": normal(16, dtype=FP16)}),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", thinned(CASES))
def test_what_the_author_computes_in_half_is_part_of_the_reference(kind: str) -> None:
    audit = held(seeded(CASES[kind]))
    assert {plan.upcast for plan in audit.plans.values()} == {"none"}
    assert not audit.live.warnings
    assert all(plan.is_verified for plan in audit.plans.values())
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.5


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_region_of_the_authors_own_is_judged_as_what_it_is(device: str) -> None:
    """A product of 1e6 in a BF16 region: FP16 would overflow, but never gets there."""

    def forward(m: Any, x: Tensor) -> Any:
        with torch.autocast(device, dtype=BF16):
            y = m.first(x * 1e6)
        return m.last(y.float() / 1e6)

    audit = held(seeded(lambda: (Model(forward, **two_layers()), one(normal(4, 16)))), strategies=("autocast",))
    product = next(report for report in audit.nodes if report.node.owner == "first")
    verdict = product.verdicts["fp16"]
    assert (verdict.verdict, verdict.reason) == ("safe", "the model's code requires BF16 here under every plan")
    plan = audit.plans["autocast_fp16"]
    assert plan.is_verified
    assert plan.predicted_error < 0.01
    assert plan.low_precision_flops == 1.0


def raised_where_half(m: Any, x: Tensor) -> Tensor:
    """Its norm is computed in FP32 where the convolution before it answered in half; in FP32 there is no such cast."""
    y = m.first(x)
    normal = nn.functional.normalize(y.float() if y.dtype != torch.float32 else y, dim=1).to(y.dtype)
    return m.last(normal)


def test_a_layer_whose_result_is_raised_counts_as_low() -> None:
    audit = held(drawn(lambda: Model(raised_where_half, first=nn.Conv1d(4, 8, 3), last=nn.Conv1d(8, 4, 3)), 2, 4, 16))
    convolutions = {report.node.name for report in audit.nodes if "conv" in report.node.op}
    low = [plan for plan in audit.plans.values() if all(choice.precision != "fp32" for choice in plan.scopes.values())]
    assert low
    assert len(convolutions) == 2
    for plan in low:
        assert plan.low_precision_flops == 1.0, plan.name
        assert not convolutions & {name for reason in plan.reasons for name in reason.operations}


# FP64 parts: kept as they are in the reference and under every plan, and `untested`; the rest is audited.

FP64 = torch.float64


def middle(m: Any, x: Tensor) -> Tensor:
    return m.last(m.wide(m.first(x).double()).float())


def layers() -> dict[str, nn.Module]:
    return {"first": nn.Linear(16, 32), "wide": nn.Linear(32, 32).double(), "last": nn.Linear(32, 8)}


def solved(m: Any, x: Tensor) -> Tensor:
    y = m.first(x).double()
    return m.last(torch.linalg.solve(y.mT @ y + torch.eye(32, dtype=FP64), torch.eye(32, dtype=FP64)).float())


WIDE_CASES = {
    "a layer": lambda: (Model(middle, **layers()), one(normal(4, 16))),
    "a solver": lambda: (Model(solved, **layers()), one(normal(4, 16))),
    "a buffer": lambda: (
        Model(lambda m, x: m.body((x.double() * m.scale).float()), body=mlp(), scale=torch.rand(16, dtype=FP64)),
        one(normal(4, 16)),
    ),
    "a sum": lambda: (Model(lambda m, x: m.body(x.double().cumsum(0).to(x.dtype)), body=mlp()), one(normal(4, 16))),
    "an input": lambda: (Model(lambda m, x: m.body(x.float()), body=mlp()), one(normal(4, 16, dtype=FP64))),
    "an output": lambda: (Model(lambda m, x: m.body(x).double().logsumexp(-1), body=mlp()), one(normal(4, 16))),
}


@pytest.mark.parametrize("kind", thinned(WIDE_CASES))
def test_fp64_is_kept_and_the_rest_is_audited(kind: str) -> None:
    build = seeded(WIDE_CASES[kind])
    audit = held(build)
    wide = [report for report in audit.nodes if report.node.dtype == "float64"]
    assert all(report.verdicts[fmt].verdict == "untested" for report in wide for fmt in audit.formats)
    assert all("float64" in report.verdicts["fp16"].reason for report in wide)
    assert any(r.verdicts["fp16"].verdict != "untested" for r in audit.nodes)
    expected = {name for name, tensor in build()[0].state_dict().items() if tensor.dtype is FP64}
    for name in audit.plans:
        state = auditor.apply(build()[0], audit, name).state_dict()
        assert {key for key, tensor in state.items() if tensor.dtype is FP64} == expected


def test_a_model_in_fp64_alone_has_nothing_to_audit() -> None:
    with refused(CaptureError, "nothing-to-audit", match=r"only in FP64.*model\.float\(\)"):
        auditor.audit(mlp().double(), normal(4, 16, dtype=FP64), device="cpu")


# FP8 in the model itself: weights and buffers that forward turns into numbers, and values cast to FP8 on the way.

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16


def coded(*blocks: int) -> dict[str, Tensor]:
    """A weight of 16 by 16 in FP8, with a scale for each block of rows."""
    weight = torch.randn(*blocks, 16 // max(1, *blocks), 16) if blocks else torch.randn(1, 16, 16)
    scale = weight.abs().amax((1, 2), keepdim=True) / 448
    return {"code": (weight / scale).to(E4M3), "scale": scale}


def decoded(m: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = m.code.to(dtype) * m.scale.to(dtype)
    return weight.reshape(16, 16)


def linear(m: Any, x: Tensor) -> Any:
    return m.body(F.linear(x, decoded(m, x.dtype)))


def as_parameter(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**parts, "code": nn.Parameter(parts["code"], requires_grad=False)}


def activations(dtype: torch.dtype) -> Any:
    """Scaled to what FP8 holds, cast, and scaled back: quantisation as it is simulated."""

    def forward(m: Any, x: Tensor) -> Any:
        y = m.first(x)
        scale = y.abs().amax() / torch.finfo(dtype).max
        return m.body((y / scale).to(dtype).to(y.dtype) * scale)

    return forward


FP8_CASES = {
    "a buffer": lambda: (Model(linear, body=mlp(), **coded()), one(normal(4, 16))),
    "a parameter": lambda: (Model(linear, body=mlp(), **as_parameter(coded())), one(normal(4, 16))),
    "turned into BF16": lambda: (
        Model(lambda m, x: m.body(F.linear(x.bfloat16(), decoded(m, BF16)).float()), body=mlp(), **coded()),
        one(normal(4, 16)),
    ),
    "activations in E4M3": lambda: (Model(activations(E4M3), first=nn.Linear(16, 16), body=mlp()), one(normal(4, 16))),
}


@pytest.mark.parametrize("kind", thinned(FP8_CASES))
def test_fp8_values_stay_what_the_author_made_them(kind: str) -> None:
    build = seeded(FP8_CASES[kind])
    audit = held(build)
    assert audit.plans["autocast_fp16"].is_verified
    assert audit.plans["autocast_fp16"].low_precision_flops >= 0.5
    for name in audit.plans:
        model: Any = auditor.apply(build()[0], audit, name)
        if hasattr(model, "code"):
            assert model.code.dtype is E4M3
            assert torch.equal(model.code.float(), build()[0].code.float())  # type: ignore[operator,union-attr]


# Masks whose value follows a dtype, where the model that is stored low computes in FP32 what autocast computes low.


def rotated(m: Any, x: Tensor) -> Tensor:
    """Attention with rotary tables in FP32, which raise what they turn; masked by the least number of its own dtype.

    back: the weights of attention return to the dtype of the values.
    """
    q, k, v = m.qkv(x).chunk(3, -1)
    angle = torch.arange(x.shape[1], dtype=torch.float32)[:, None] * torch.linspace(0.1, 1, 16)
    q, k = (y * angle.cos() + y.flip(-1) * angle.sin() for y in (q, k))
    similar = torch.einsum("bid,bjd->bij", q, k)
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = similar.masked_fill(later, -torch.finfo(similar.dtype).max).softmax(-1)
    return m.out((weights.to(v.dtype) if m.back else weights) @ v)


@pytest.mark.parametrize("back", [True, False], ids=["cast back", "left in FP32"])
def test_the_mask_is_that_of_the_run_in_which_it_is_low(back: bool) -> None:
    def make() -> nn.Module:
        return Model(rotated, qkv=nn.Linear(16, 48), out=nn.Linear(16, 16), back=back)

    audit = held(drawn(make, 2, 8, 16), objective="flops")  # in time, a model as small as this saves next to nothing
    assert not any(v.verdict == "unsafe" for report in audit.nodes for v in report.verdicts.values())
    for name, plan in audit.plans.items():
        assert plan.is_verified
        # what the tables raise is a tenth each; a product that reads both may round the tables and give FP32
        kept = {0.0} if plan.strategy == "autocast" else {0.1} if back else {0.1, 0.2}
        assert round(1 - plan.low_precision_flops, 2) in kept, name


# A dtype handed to a module as an argument is its caller's to say: plans know what is then computed in.


def handing() -> nn.Module:
    layers = {name: nn.Linear(64, 64) for name in ("first", "last")}
    embedding = Model(lambda m, t, dtype: m.last(nn.functional.silu(m.first(t.to(dtype)))), **layers)
    return Model(lambda m, t, hidden_dtype=None: m.embedding(t, hidden_dtype), embedding=embedding)


def conditioned(m: Any, x: Tensor, t: Tensor) -> Tensor:
    """As diffusion models do it: the embedding of the time is computed in what the model is in."""
    h = m.before(x)
    t = torch.cos(t[:, None] * torch.arange(64) / 64)
    return m.after(h) + m.time(t, hidden_dtype=h.dtype)


def test_the_callers_scope_says_what_is_cast_to() -> None:
    layers = {"before": nn.Linear(64, 64), "time": handing(), "after": nn.Linear(64, 64)}
    capture = replayed(Model(conditioned, **layers), normal(2, 64), normal(2))
    cast = only(capture, "to")
    assert [call.handed for call in cast.calls] == [False, True, True]
    for root, inner, written in (("fp32", "bf16", {}), ("bf16", "fp32", {1: torch.bfloat16})):
        scopes = {"": ScopeChoice(root), "time": ScopeChoice(inner)}
        how = Policy(capture, "cast", choice_from_scopes(scopes), "bf16")
        assert how.casts(cast).literals.arguments == written
