"""A rehearsal runs the user's step in every recipe, says of each run what is so, and leaves everything as it was."""

import dataclasses
import itertools
import json
import os
import random
import signal
from mmap import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import auditor
from auditor.capture.emulation import Emulation
from auditor.errors import AuditorError
from auditor.records import ScopeChoice
from auditor.rehearsal import session
from auditor.rehearsal.judge import problems_of
from auditor.rehearsal.result import FP32, Recipe, RecipeRun
from auditor.report.blocks import Grid
from auditor.report.rehearsal import overview
from benchmarks.rehearsal import costs
from tests.rehearsal.cases import CASES, Made, classes, mlp, plain, rehearsed
from tests.support.refusing import refused
from tests.support.replaying import Model


def test_the_batch_that_breaks_is_named_with_its_operation_and_line() -> None:
    found = rehearsed("experts_with_a_rare_batch", 6, remedies=False)
    run = found.runs["fp16_autocast"]
    assert {each.batch for each in run.skipped} == {3, 4, 5}  # three of six batches have the row
    assert run.scale == 65536 / 2**3
    assert "backward pass of div" in run.skipped[0].where
    assert "cases.py" in run.skipped[0].where
    assert run.losses[0] == pytest.approx(found.runs["fp32"].losses[0], rel=1e-2)
    assert found.recommended == "bf16_autocast"


def test_batches_of_a_function_are_made_again_for_each_pass_and_an_iterator_ends_the_rehearsal() -> None:
    step, batches = CASES["clean_mlp"].make()
    few = batches[:2]
    again = auditor.rehearse(step, lambda: iter(few), 5, remedies=False)
    once = auditor.rehearse(step, iter(few), 5, remedies=False)
    assert (again.steps, again.batches) == (5, 2)
    assert (once.steps, len(once.runs["fp32"].losses)) == (2, 2)
    assert again.runs["fp32"].losses == auditor.rehearse(step, few, 5, remedies=False).runs["fp32"].losses


@pytest.mark.slow
def test_the_operation_to_blame_is_that_of_the_first_skipped_steps_where_later_ones_were_not_searched() -> None:
    found = rehearsed("cross_entropy_by_hand", 30, remedies=False)
    assert [each.module for each in found.runs["fp16_autocast"].skipped][:5] == ["(loss)"] * 4 + [None]
    (skipped,) = [p for p in found.problems if (p.recipe, p.kind) == ("fp16_autocast", "steps-skipped")]
    assert skipped.module == "(loss)"


@pytest.mark.slow
def test_the_order_of_batches_changes_no_statement() -> None:
    step, batches = CASES["experts_with_a_rare_batch"].make()
    found = auditor.rehearse(step, batches[::-1], 12, remedies=False)
    assert ("fp16_autocast", "steps-skipped") in {(each.recipe, each.kind) for each in found.problems}
    assert {each.batch for each in found.runs["fp16_autocast"].skipped} == {0, 1, 2}


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
    assert all(
        lost < 0.5 for row in run.parameters.values() for lost in row.updates_lost
    )  # each measured after its own


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


@pytest.mark.parametrize(("later", "behind"), [(0.0, False), (0.02, True)])
def test_a_loss_that_fluctuates_around_that_of_fp32_is_not_behind(later: float, behind: bool) -> None:
    """Twelve steps of a sentence encoder in BF16, whose loss is rounded to 1/64: the last is 0.006 above FP32's, the last six 0.003 on average."""
    fp32 = [2.3846, 2.3888, 2.3463, 2.3771, 2.3878, 2.3683, 2.3640, 2.3945, 2.3919, 2.4294, 2.3932, 2.3220]
    low = [2.3906, 2.3906, 2.3438, 2.3750, 2.3750, 2.3594, 2.3594, 2.3906, 2.4062, 2.4375, 2.3906, 2.3281]
    runs = {"fp32": RecipeRun(FP32, fp32), "bf16": RecipeRun(Recipe("bf16", "BF16"), [x + later for x in low])}
    assert [each.kind for each in problems_of(runs)] == ["loss-behind"] * behind


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
    run = found.runs["fp16_autocast"]
    assert (run.failure, run.skipped, set(run.parameters)) == (
        None,
        [],
        {"Embedding1.weight", "Sequential0.0.weight", "Sequential0.0.bias"},
    )
    assert all(error is not None and error < 5e-3 for error in run.errors)


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


def test_everything_comes_back_as_it_was() -> None:
    model = mlp(16, 32, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    batches, taken, inner = iter(classes(40)), [], plain(model, optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        taken.append(random.random())
        inner(x, y)
        schedule.step()

    step(*next(batches))
    weights = [p.detach().clone() for p in model.parameters()]
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    state, random_state, torch_state = optimizer.state_dict(), random.getstate(), torch.get_rng_state()
    backward, hooks = torch.autograd.backward, len(optimizer._optimizer_step_pre_hooks)
    auditor.rehearse(step, batches, 5)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(torch.equal(a, p.grad) for a, p in zip(gradients, model.parameters(), strict=True))
    assert all(p.dtype is torch.float32 for p in model.parameters())
    assert str(optimizer.state_dict()) == str(state)
    assert (random.getstate(), schedule.last_epoch, len(taken)) == (random_state, 1, 1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert torch.autograd.backward is backward
    assert len(optimizer._optimizer_step_pre_hooks) == hooks
    assert len(list(batches)) == 39


def _no_optimizer() -> Made:
    model = mlp(16, 4)
    return lambda x, y: F.cross_entropy(model(x), y).backward(), classes(1)


def _makes_its_own() -> Made:
    model = mlp(16, 4)
    return lambda x, y: plain(model, torch.optim.SGD(model.parameters(), lr=0.1))(x, y), classes(1)


def _raises() -> Made:
    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        raise ValueError("no such thing")

    return step, classes(1)


def _closure() -> Made:
    model = mlp(16, 4)
    optimizer = torch.optim.LBFGS(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)

    return step, classes(1)


def _ends() -> Made:
    step, _ = _no_optimizer()
    return step, []


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (_no_optimizer, "calls no optimizer's step"),
        (_makes_its_own, "creates its own SGD"),
        (_raises, "the step raised ValueError: no such thing"),
        (_closure, "LBFGS.step gets a closure"),
        (_ends, "batches is empty"),
    ],
)
def test_a_step_that_cannot_be_rehearsed_is_refused_in_one_line(make: Any, said: str) -> None:
    with refused(AuditorError, "bad-step", match=said):
        auditor.rehearse(*make(), 3)


def test_a_recipe_that_raises_or_is_killed_fails_alone_with_the_losses_until_then() -> None:
    model = mlp(16, 4)
    inner = plain(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step(x: torch.Tensor, y: torch.Tensor, ends: bool) -> float:
        if ends and model[0].weight.dtype is torch.bfloat16:
            os.kill(os.getpid(), signal.SIGKILL)
        if ends and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.float16:
            raise ValueError("no such thing")
        return inner(x, y)

    batches = [(*one, i == 2) for i, one in enumerate(classes(3))]
    found, until = auditor.rehearse(step, batches, 4), auditor.rehearse(step, batches, 2, remedies=False)
    assert {name: len(run.losses) for name, run in found.runs.items()} == {
        "fp32": 4,
        "bf16_autocast": 4,
        "fp16_autocast": 2,
        "bf16": 2,  # and no remedy is tried
    }
    assert {name for name, run in found.runs.items() if run.failure is None} == {"fp32", "bf16_autocast"}
    assert all(found.runs[name].losses == until.runs[name].losses for name in ("fp16_autocast", "bf16"))
    assert f"was killed by SIGKILL (at: step 1, loss {found.runs['bf16'].losses[1]})" in str(found.runs["bf16"].failure)
    assert "in step 2 (batch 2), the step raised ValueError: no such" in str(found.runs["fp16_autocast"].failure)
    assert {(each.recipe, each.kind) for each in found.problems} == {("bf16", "fails"), ("fp16_autocast", "fails")}
    rows = next(block for block in overview(found) if isinstance(block, Grid)).rows
    assert rows[2][1:] == (f"{found.runs['fp16_autocast'].losses[1]:.4g}", *[""] * 5, "failed in step 2")


@pytest.mark.parametrize("what", ["step", "batches"])
def test_what_raises_in_fp32_is_refused_with_the_step_at_which_it_does(what: str) -> None:
    model = mlp(16, 4)
    inner, calls = plain(model, torch.optim.SGD(model.parameters(), lr=0.1)), itertools.count()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        if what == "step" and next(calls) == 3:
            raise ValueError("no such thing")
        return inner(x, y)

    def batches() -> Any:
        yield from classes(2)
        if what == "batches":
            raise ValueError("no such thing")

    said = {"step": r"in step 3 \(batch 1\), the step raised", "batches": "before step 2, the batches raised"}[what]
    with refused(AuditorError, "bad-step", match=f"^the step fails in FP32: {said} ValueError: no such thing"):
        auditor.rehearse(step, batches, 5)


def test_two_models_are_told_apart() -> None:
    found = rehearsed("adversarial_pair", 4, remedies=False)
    names = set(found.runs["bf16"].parameters)
    assert {"Sequential0.0.weight", "Sequential1.2.bias"} <= names
    assert len(names) == 8
    assert found.runs["fp32"].backward_passes == 2


class Turned(nn.Module):
    """Multiplies by a complex buffer, whose entries are imaginary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(16, 8), mlp(8, 4)
        self.register_buffer("turn", torch.full((4,), 1j))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        turned = torch.view_as_complex(x.float().unflatten(-1, (4, 2))) * self.turn
        return self.last(torch.view_as_real(turned).flatten(-2).to(x.dtype))


def test_parameters_of_no_module_complex_buffers_and_groups_that_a_step_holds_are_rehearsed() -> None:
    model, temperature, calls = Turned(), nn.Parameter(torch.ones(())), itertools.count()
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
        assert "ParameterList1.0" in runs[name].parameters


def test_an_operation_that_fp32_makes_infinite_too_is_not_blamed_where_a_plan_adds_casts() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.last = nn.LayerNorm(16), mlp(16, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(self.norm(x) * 2)
            hidden = x.masked_fill(x < 0, -torch.inf).softmax(-1)
            return self.last(hidden).abs().add(1) * 7e4

    model = Masked()
    plan = auditor.audit(model, torch.randn(8, 16), formats=["fp16"]).plans["autocast_fp16"]
    plan = dataclasses.replace(plan, scopes={"": ScopeChoice("fp16"), "norm": ScopeChoice("fp32")})
    step = plain(model, torch.optim.SGD(model.parameters(), lr=1e-9))
    skipped = auditor.rehearse(step, classes(1), 1, plan=plan, remedies=False).runs["plan"].skipped
    assert "mul" in skipped[0].where, skipped


def test_a_module_whose_constructor_failed_is_of_no_matter() -> None:
    class Unfinished(nn.Module):
        def __init__(self) -> None:
            raise ValueError

    kept = Unfinished.__new__(Unfinished)
    assert rehearsed("clean_mlp", 2, remedies=False).runs["fp32"].failure is None, kept


def test_an_adapter_begins_with_gradients_of_zero_and_goes_on() -> None:
    found = rehearsed("adapter_that_begins_at_zero", 6, remedies=False)
    row = found.runs["bf16_autocast"].parameters["a"]
    assert (row.zero_gradient[0], row.zero_gradient[-1]) == (1, 0)
    assert row.error[-1] < 0.05


TRAIN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Linear(8, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def get_batches():
    return [torch.randn(4, 8) for _ in range(3)]
def step(x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    print("in the step")
    return loss
def fails(x):
    return 1 / 0
"""


def test_the_command_writes_its_files_and_refuses_in_one_line(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    from auditor.cli import main

    (tmp_path / "train.py").write_text(TRAIN)
    monkeypatch.chdir(tmp_path)
    assert main(["rehearse", "train.py:step", "--steps", "5", "--quiet"]) == 0
    said = capsys.readouterr()
    assert "Train in BF16 under autocast, without further changes" in said.out
    assert "in the step" not in said.out
    data = json.loads(Path("audits/train-step-rehearsal/rehearsal.json").read_text())
    assert (data["steps"], data["batches"], len(data["runs"]["fp32"]["losses"])) == (5, 3, 5)
    page = Path("audits/train-step-rehearsal/rehearsal.html").read_text()
    assert page.count('<path class="line') >= 6
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert main(["rehearse", "train.py:fails", "--steps", "5", "--out", "other", "--quiet"]) == 2
    assert "ZeroDivisionError: division by zero (train.py:17)" in capsys.readouterr().err
    assert not Path("other").exists()


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


class Counting(torch.optim.SGD):
    """Counts its updates of a weight, also those of forked processes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates = torch.frombuffer(mmap(-1, 4), dtype=torch.float32)

    def step(self, closure: Any = None) -> None:
        self.updates += sum(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step()


def test_shadows_apply_no_update_and_updates_in_fp32_are_not_emulated(monkeypatch: Any) -> None:
    emulated, whole = [0], Emulation.whole

    def count(self: Any, *args: Any) -> Any:
        emulated[0] += str(args[0]).startswith("aten")  # not of torch's profiler, which surrounds an update
        return whole(self, *args)

    monkeypatch.setattr(Emulation, "whole", count)
    model = mlp(16, 4)
    optimizer = Counting(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = emulated[0]
        optimizer.step()
        return float(emulated[0] - before)

    runs = auditor.rehearse(step, classes(2), 3, remedies=False).runs
    assert float(optimizer.updates) == 2 * (1 + 4 * 3)  # two weights, in the first look and three steps of four recipes
    assert {name for name, run in runs.items() if any(run.losses)} == {"bf16"}


@pytest.mark.slow
def test_a_recipe_costs_at_most_three_times_its_steps(monkeypatch: Any) -> None:
    monkeypatch.setattr(session, "LOOKS", 5)  # as many of 20 steps as 24 are of 100
    alone, recipes = costs(20)
    assert len(recipes) == 4
    assert max(recipes.values()) <= 3 * alone
