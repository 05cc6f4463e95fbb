"""A rehearsal runs the user's step in every recipe as it would run there, whatever the step is made of."""

import dataclasses
import itertools
import multiprocessing
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import auditor
from auditor.features.rehearsal import session
from auditor.records import ScopeChoice
from tests.features.rehearsal.cases import CASES, classes, mlp, plain, rehearsed
from tests.support.replaying import Model


def test_batches_of_a_function_are_made_again_for_each_pass_and_an_iterator_ends_the_rehearsal() -> None:
    step, batches = CASES["clean_mlp"].make()
    few = batches[:2]
    again = auditor.rehearse(step, lambda: iter(few), 5, remedies=False)
    once = auditor.rehearse(step, iter(few), 5, remedies=False)
    assert (again.steps, again.batches) == (5, 2)
    assert (once.steps, len(once.runs["fp32"].losses)) == (2, 2)
    assert again.runs["fp32"].losses == auditor.rehearse(step, few, 5, remedies=False).runs["fp32"].losses


@pytest.mark.parametrize("mode", ["plain", "own regions and scaler"])
def test_a_step_with_regions_and_a_scaler_of_its_own_is_rehearsed_where_they_are(mode: str) -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")

    def own(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            out = model(x)
        loss = F.cross_entropy(out.float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    step = own if mode != "plain" else plain(model, optimizer, clip=1.0)
    found = auditor.rehearse(step, classes(4), 4, remedies=False)
    losses = {name: torch.tensor(run.losses) for name, run in found.runs.items()}
    assert all(run.failure is None and not run.skipped for run in found.runs.values())
    assert torch.allclose(losses["fp16_autocast"], losses["fp32"], rtol=5e-3)
    assert not torch.equal(losses["bf16_autocast"], losses["fp32"])
    assert not torch.equal(losses["bf16_autocast"], losses["fp16_autocast"])
    assert torch.allclose(losses["bf16_autocast"], losses["fp32"], rtol=5e-2)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_plan_is_rehearsed_with_its_own_scopes_against_fp32(precision: str) -> None:
    model = mlp(16, 32, 4)
    plan = auditor.audit(model, torch.randn(8, 16), formats=["bf16"]).plans["autocast_bf16"]
    plan = dataclasses.replace(plan, scopes={"": ScopeChoice(precision)})
    step = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    run = auditor.rehearse(step, classes(4), 3, plan=plan, remedies=False).runs["plan"]
    assert all(error == 0 if precision == "fp32" else error > 1e-3 for error in run.errors)
    assert (len(run.errors), run.failure) == (3, None)


class Nested(torch.optim.SGD):
    """An optimizer that calls another."""

    def __init__(self, inner: torch.optim.Optimizer, own: Any) -> None:
        super().__init__(own, lr=0.5)
        self.inner = inner

    def step(self, closure: Any = None) -> None:
        self.inner.step()
        super().step()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gradients_of_a_second_optimizer_are_those_after_the_update_of_the_first(precision: str, nested: bool) -> None:
    """With the plan all in FP32, every error is zero: FP32's gradients are of the same weights, also after an update.
    Under autocast, no cast of a weight is older than the update."""
    first, last = mlp(16, 8), mlp(8, 4)
    plan = auditor.audit(last, torch.randn(8, 8), formats=["bf16"]).plans["autocast_bf16"]
    plan = dataclasses.replace(plan, scopes={"": ScopeChoice(precision)})
    one = torch.optim.SGD(first.parameters(), lr=0.5)
    two = Nested(one, last.parameters()) if nested else torch.optim.SGD(last.parameters(), lr=0.5)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        for optimizer in (two,) if nested else (one, two):
            for model in (first, last):
                model.zero_grad()
            F.cross_entropy(last(first(x)), y).backward()
            optimizer.step()

    runs = auditor.rehearse(step, classes(4), 3, plan=plan, remedies=False).runs
    assert all(error < 0.02 for row in runs["bf16_autocast"].parameters.values() for error in row.error)
    run = runs["plan"]
    errors = [error for row in run.parameters.values() for error in row.error]
    assert len(errors) == 4 * 3
    assert all(error == 0 if precision == "fp32" else error > 1e-4 for error in errors)
    lost = [share for row in run.parameters.values() for share in row.updates_lost]  # each measured after its own
    assert max(lost) < 0.5


@pytest.mark.parametrize("what", ["model", "step"])
def test_what_is_compiled_runs_eagerly_in_every_recipe(what: str) -> None:
    """The compiler returns code that computes zeros: neither what it compiled before nor what it could compile now may run."""

    def compiler(graph: Any, inputs: Any) -> Any:
        return lambda *args: tuple(x * 0 for x in graph.forward(*args))

    def made(compiles: bool) -> Any:
        model = mlp(16, 32, 4)
        fast = torch.compile(model, backend=compiler) if compiles and what == "model" else model
        step = plain(fast, torch.optim.SGD(model.parameters(), lr=0.1))
        return torch.compile(step, backend=compiler) if compiles and what == "step" else step, fast

    (eager, _), (step, fast), batches = made(False), made(True), classes(4)
    if what == "model":
        assert not fast(batches[0][0]).any()
    expected, found = (auditor.rehearse(one, batches, 3, remedies=False).runs for one in (eager, step))
    torch._dynamo.reset()
    assert {n: run.losses for n, run in found.items()} == {n: run.losses for n, run in expected.items()}
    assert {n: run.errors for n, run in found.items()} == {n: run.errors for n, run in expected.items()}
    assert set(found["bf16"].parameters) == {"0.weight", "0.bias", "2.weight", "2.bias"}


def test_sparse_gradients_and_a_gradient_penalty_are_unscaled_once() -> None:
    torch.manual_seed(0)
    table, head = nn.Embedding(50, 16, sparse=True), mlp(16, 4)
    head[0].bias.requires_grad_(False)
    optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=0.1)

    def step(ids: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        x = table(ids)
        loss = F.cross_entropy(head(x), y)
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + 10 * gradient.square().sum()).backward()
        optimizer.step()
        head[0].bias.requires_grad_(True)
        return loss

    found = auditor.rehearse(step, [(torch.randint(50, (32,)), torch.randint(4, (32,)))], 4, remedies=False)
    for name, largest in (("fp16_autocast", 5e-3), ("bf16", 5e-2)):
        run = found.runs[name]
        assert (run.failure, run.skipped) == (None, [])
        assert set(run.parameters) == {"Embedding1.weight", "Sequential0.0.weight", "Sequential0.0.bias"}
        assert all(error is not None and error < largest for error in run.errors)


def test_a_teacher_that_follows_the_model_is_in_bf16_too() -> None:
    """The teacher's weight starts at 1, and each step brings it 1/1000 of the way to 3: by 2^-9, a quarter of the spacing
    of BF16 numbers, which BF16 rounds away."""
    student, teacher = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False).requires_grad_(False)
    nn.init.constant_(student.weight, 3.0)
    nn.init.ones_(teacher.weight)
    optimizer = torch.optim.SGD(student.parameters(), lr=0.0)

    def step(x: torch.Tensor) -> float:
        optimizer.zero_grad()
        student(x).sum().backward()
        optimizer.step()
        with torch.no_grad():
            teacher.weight.lerp_(student.weight, 0.001)
            return float(teacher(x))

    runs = auditor.rehearse(step, [torch.ones(1, 1)], 4, remedies=False).runs
    expected = [3 - 2 * 0.999**k for k in range(1, 5)]
    assert runs["fp32"].losses == pytest.approx(expected, rel=1e-6)
    assert runs["bf16_autocast"].losses == pytest.approx(expected, rel=2**-8)
    assert runs["bf16_autocast"].losses[3] > 1
    assert runs["bf16"].losses == [1.0] * 4
    assert set(runs["bf16"].parameters) == {"weight"}


def test_gradients_of_parameters_that_two_optimizers_share_are_unscaled_once() -> None:
    model = mlp(16, 4)
    optimizer = Nested(torch.optim.SGD(model.parameters(), lr=0.1), model.parameters())
    run = auditor.rehearse(plain(model, optimizer), classes(4), 3, remedies=False).runs["fp16_autocast"]
    assert (run.failure, run.skipped, len(run.errors)) == (None, [], 3)
    assert all(error is not None and error < 5e-3 for error in run.errors)
    assert len({(*run.errors,), *((*row.error,) for row in run.parameters.values())}) == 1 + 2  # of all, and of each


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_are_computed_again_in_the_recipe_of_the_step(reentrant: bool) -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.last(checkpoint(m.first, x.requires_grad_(), use_reentrant=reentrant))

    model = Model(forward, first=mlp(16, 32, 4), last=nn.Linear(4, 4))
    step = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = auditor.rehearse(step, classes(4), 4, remedies=False)
    for name, largest in (("bf16_autocast", 2e-2), ("fp16_autocast", 2e-3)):
        run = found.runs[name]
        assert (run.backward_passes, run.skipped, run.failure) == (1, [], None)
        assert all(0 < error < largest for error in run.errors)


def test_two_models_are_told_apart() -> None:
    found = rehearsed("adversarial_pair", 4, remedies=False)
    names = set(found.runs["bf16"].parameters)
    assert {"Sequential0.0.weight", "Sequential1.2.bias"} <= names
    assert len(names) == 8
    assert found.runs["fp32"].backward_passes == 2


def turned(m: Any, x: torch.Tensor) -> torch.Tensor:
    """Multiplies by a complex buffer, whose entries are imaginary."""
    x = m.first(x)
    turned = torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * m.turn
    return m.last(torch.view_as_real(turned).flatten(-2).to(x.dtype))


def test_parameters_of_no_module_complex_buffers_and_groups_that_a_step_holds_are_rehearsed() -> None:
    model = Model(turned, first=mlp(16, 8), last=mlp(8, 4), turn=torch.full((4,), 1j))
    temperature, calls = nn.Parameter(torch.ones(())), itertools.count()
    optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=1.0)
    group = optimizer.param_groups[0]

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        group["lr"] = 0.0 if next(calls) < 2 else 0.1
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x) * temperature, y)
        loss.backward()
        optimizer.step()
        return loss

    runs = auditor.rehearse(step, classes(1), 4, remedies=False).runs
    fp32 = torch.tensor(runs["fp32"].losses)
    assert fp32[0] == fp32[1] == fp32[2] > fp32[3]
    for name, tolerance in (("fp16_autocast", 1e-3), ("bf16_autocast", 5e-3), ("bf16", 5e-3)):
        assert torch.allclose(torch.tensor(runs[name].losses), fp32, rtol=tolerance), name
        assert len(set(runs[name].losses[:3])) == 1
        assert runs[name].parameters["temperature"].module == ""


def test_an_adapter_begins_with_gradients_of_zero_and_goes_on() -> None:
    found = rehearsed("adapter_that_begins_at_zero", 6, remedies=False)
    row = found.runs["bf16_autocast"].parameters["a"]
    assert (row.zero_gradient[0], row.zero_gradient[-1]) == (1, 0)
    assert row.error[-1] < 0.05


def test_gradients_of_a_skipped_step_are_there_after_the_update() -> None:
    def loss_fn(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return 1e4 * F.cross_entropy(out, y)  # in FP16, 1e4 times the scale of 65536 overflows

    model = mlp(16, 4)
    inner = plain(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss_fn)

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        inner(x, y)
        return float(sum(p.grad.norm() for p in model.parameters()))  # type: ignore[union-attr]

    run = auditor.rehearse(step, classes(4), 4, remedies=False).runs["fp16_autocast"]
    assert (run.failure, len(run.skipped)) == (None, 4)


def test_a_recipe_runs_each_step_once_and_once_more_where_it_is_compared(monkeypatch: Any) -> None:
    """`python -m benchmarks.rehearsal --cost` measures the seconds."""
    monkeypatch.setattr(session, "LOOKS", 5)
    calls = multiprocessing.Value("i", 0)  # of all processes: each recipe has its own
    model = mlp(16, 32, 4)
    inner = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        with calls.get_lock():
            calls.value += 1
        return inner(x, y)

    runs = auditor.rehearse(step, classes(4), 20, remedies=False).runs
    assert len(runs) == 4
    assert 20 * len(runs) <= calls.value <= (20 + 5) * len(runs)


def test_an_optimizer_that_expects_every_gradient_is_compared_and_skipped() -> None:
    class Signs(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            for p in (p for group in self.param_groups for p in group["params"]):
                p.sub_(p.grad.sign(), alpha=1e-3)

    model = mlp(8, 8)
    optimizer = Signs(model.parameters(), {})

    def step(batch: torch.Tensor) -> None:
        optimizer.zero_grad()
        (model(batch).square().mean() * 1e4).backward()  # at FP16's first loss scale, gradients overflow
        optimizer.step()

    runs = auditor.rehearse(step, [torch.randn(8, 8)] * 3, 6, remedies=False).runs
    assert runs["fp16_autocast"].skipped and runs["fp16_autocast"].failure is None
    assert all(runs[name].share("error") is not None for name in ("bf16_autocast", "bf16"))
