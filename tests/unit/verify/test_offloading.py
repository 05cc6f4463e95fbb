"""Patched models run through accelerate's hooks: the same answers to the last bit, at the memory of one module."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor import mapped
from auditor.patch.runtime import apply_plan
from auditor.verify import instruments
from auditor.verify.offloading import OFFLOADED, answers_under, offloaded
from auditor.verify.running import Answers, answers_of
from tests.subjects import Runs

pytest.importorskip("accelerate")

IDS = torch.arange(6)[None]
READ = "a weight is read outside of the forward of the module that has it"


def tied() -> nn.Module:
    model = Runs(lambda m, x: m.head(torch.tanh(m.mid(m.table(x)))), table=nn.Embedding(16, 8), mid=nn.Linear(8, 8))
    model.head = nn.Linear(8, 16, bias=False)
    model.head.weight = model.table.weight
    return model


def with_buffers() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        return m.last((m.norm(m.conv(x)) * m.scale).mean((2, 3)))  # type: ignore[no-any-return]

    model = Runs(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4), last=nn.Linear(4, 2)).eval()
    model.register_buffer("scale", torch.randn(4, 1, 1))
    return model


def of_its_own() -> nn.Module:
    own = nn.Parameter(torch.randn(8, 8))
    return Runs(lambda m, x: m.norm(x @ m.own).pow(2).mean(-1), own=own, norm=nn.LayerNorm(8))


def reading() -> nn.Module:
    return Runs(
        lambda m, x: F.linear(m.mid(m.table(x)), m.table.weight), table=nn.Embedding(16, 8), mid=nn.Linear(8, 8)
    )


def attention() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()


def computed() -> nn.Module:
    return nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))


def stored_low() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)).bfloat16()


def shared() -> nn.Module:
    return Runs(lambda m, x: m.again(m.again(x)), again=nn.Linear(8, 8))


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, str]] = {
    "tied weights": (tied, IDS, OFFLOADED),
    "buffers": (with_buffers, torch.ones(2, 3, 8, 8), OFFLOADED),
    "parameters of the root": (of_its_own, X, OFFLOADED),
    "a recurrence": (lambda: nn.LSTM(8, 8, 2), torch.ones(5, 2, 8), OFFLOADED),
    "weights that are computed": (computed, X, OFFLOADED),
    "weights stored low": (stored_low, X, OFFLOADED),
    "a module called twice": (shared, X, OFFLOADED),
    "a child's weight read": (reading, IDS, f"{READ}, by linear"),
    "attention": (attention, torch.ones(2, 5, 8), f"{READ}, by multi_head_attention_forward"),
}


def plan_of(model: nn.Module, strategy: str, keep: bool) -> dict[str, Any]:
    """Low with an FP32 scope inside; keep: and functions that stay FP32."""
    scopes: dict[str, Any] = {"": {"precision": "fp16", **({"keep": ["tanh", "pow", "mean", "mul"]} if keep else {})}}
    last = [name for name, child in model.named_children() if strategy == "autocast" and not keep][-1:]
    scopes |= {name: {"precision": "fp32"} for name in last}
    low = any(parameter.dtype is torch.bfloat16 for parameter in model.parameters())
    held = {"raised": "weights", "stored_low": {"bfloat16": 10**6}} if low else {}
    return {"strategy": strategy, "scopes": scopes, **held}


def both(model: nn.Module, plan: dict[str, Any], x: Tensor) -> tuple[Answers | str, Answers | str]:
    """As it lies in memory, and offloaded."""
    run = partial(answers_of, batches=[((x,), {})], device="cpu")
    apply = partial(apply_plan, plan=plan)
    return answers_under(model, apply, run), offloaded(model, apply, run)


def portrait(model: nn.Module) -> list[Any]:
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return [
        *((name, id(x), x.data_ptr(), x.dtype, x.flatten().tolist()) for name, x in tensors),
        *((name, sorted(vars(module)), vars(module).get("forward")) for name, module in model.named_modules()),
    ]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("case", CASES)
def test_answers_are_those_of_the_model_in_memory(case: str, strategy: str, keep: bool) -> None:
    build, x, held = CASES[case]
    torch.manual_seed(0)
    model = build()
    before = portrait(model)
    here, there = both(model, plan_of(model, strategy, keep), x)
    assert portrait(model) == before
    if isinstance(here, str):  # such as two dtypes in one product, which no GPU takes
        assert there == here
        return
    assert isinstance(there, Answers)
    assert (here.held, there.held) == ("", held)
    assert here.graded is not None
    assert there.graded is not None
    for a, b in zip([*here.outputs[0], *here.graded], [*there.outputs[0], *there.graded], strict=True):
        assert a.dtype is b.dtype
        assert torch.equal(a, b)


def test_a_tied_weight_is_one_to_the_plan() -> None:
    """In FP32 for the table, it is in FP32 for the head that has it too."""
    torch.manual_seed(0)
    scopes = {"": {"precision": "fp16"}, "table": {"precision": "fp32"}}
    here, there = both(tied(), {"strategy": "cast", "scopes": scopes}, IDS)
    apart, _ = both(tied(), {"strategy": "cast", "scopes": {"": {"precision": "fp16"}}}, IDS)
    assert isinstance(here, Answers) and isinstance(there, Answers) and isinstance(apart, Answers)
    assert there.held == OFFLOADED
    assert torch.equal(here.outputs[0][0], there.outputs[0][0])
    assert not torch.equal(here.outputs[0][0], apart.outputs[0][0])


def test_a_weight_that_a_forward_writes_to_is_not_loaded_anew() -> None:
    """Halved by each call, it would be whole again for the second one."""

    def forward(m: Any, x: Tensor) -> Tensor:
        m.weight.data.mul_(0.5)
        return F.linear(x, m.weight)

    halving = Runs(forward, weight=nn.Parameter(torch.ones(8, 8)))
    model = Runs(lambda m, x: m.inner(m.inner(x)), inner=halving)
    plan = {"strategy": "cast", "scopes": {"": {"precision": "fp16"}}}
    here, there = both(model, plan, X)
    assert isinstance(here, Answers)
    assert isinstance(there, Answers)
    assert there.held == "a forward writes to a weight, by mul_"
    assert torch.equal(here.outputs[0][0], there.outputs[0][0])


def test_a_model_that_hides_what_it_met_is_not_taken_for_offloaded() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        try:
            return x + m.inner.weight.sum()  # type: ignore[no-any-return]
        except RuntimeError:
            return x

    model = Runs(forward, inner=nn.Linear(8, 8))
    here, there = both(model, {"strategy": "cast", "scopes": {"": {"precision": "fp16"}}}, X)
    assert isinstance(here, Answers)
    assert isinstance(there, Answers)
    assert there.held == f"{READ}, by sum"
    assert torch.equal(here.outputs[0][0], there.outputs[0][0])


def test_without_the_package_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate.hooks", None)
    _, there = both(shared(), {"strategy": "autocast", "scopes": {"": {"precision": "bf16"}}}, X)
    assert isinstance(there, Answers)
    assert there.held == "accelerate cannot be imported (pip install 'model-precision-auditor[offload]')"


def test_a_traced_model_is_run_as_it_lies() -> None:
    _, there = both(torch.fx.symbolic_trace(nn.Linear(8, 8)), {"strategy": "autocast", "scopes": {}}, X)
    assert isinstance(there, Answers)
    assert there.held == "its hooks cannot wrap a GraphModule"


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
def test_memory_is_that_of_a_module_or_two(strategy: str) -> None:
    """Twelve layers of 1 MiB in FP32: half of it in FP16, which a cast model holds of all of them."""
    model = nn.Sequential(*(nn.Linear(512, 512) for _ in range(12)))
    run = partial(answers_of, batches=[((torch.ones(1, 512),), {})], device="cpu")
    apply = partial(apply_plan, plan={"strategy": strategy, "scopes": {"": {"precision": "fp16"}}})
    run(model)  # what is made once
    most = []
    for how in (answers_under, offloaded):
        with instruments.memory("cpu") as peak:
            assert isinstance(how(model, apply, run), Answers)
        most.append(peak() / 2**20)
    if strategy == "cast":
        assert most[0] > 12 * 0.5
    assert most[1] < 3


def test_it_is_used_where_memory_is_limited() -> None:
    run = partial(answers_of, batches=[((X,), {})], device="cpu")
    apply = partial(apply_plan, plan={"strategy": "cast", "scopes": {"": {"precision": "fp16"}}})
    with mapped.limited(1 << 40):
        found = answers_under(shared(), apply, run)
    assert isinstance(found, Answers)
    assert found.held == OFFLOADED


@pytest.mark.parametrize(
    "case", ["tied weights", "buffers", "parameters of the root", "attention", "weights stored low"]
)
def test_a_limited_audit_states_the_errors_of_one_that_is_not(case: str) -> None:
    build, x, held = CASES[case]
    torch.manual_seed(0)
    model = build()
    plain = auditor.audit(model, x)
    with mapped.limited(1 << 40):
        limited = auditor.audit(model, x)
    for name, plan in plain.plans.items():
        assert limited.plans[name].verified == plan.verified
        assert limited.plans[name].measured_error == plan.measured_error
    told = [words for words in limited.warnings if words not in plain.warnings]
    if held == OFFLOADED:
        assert told == [
            "The patched models were run with the weights of one module in memory at a time, by accelerate's hooks."
        ]
    else:
        assert len(told) == 1
        assert told[0].endswith(f"mapped into memory, and not by accelerate's hooks: {held}.")
