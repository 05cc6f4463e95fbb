"""A rehearsal leaves the user's objects as they were, and its other passes change nothing of theirs."""

import random
from mmap import mmap
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import auditor
from auditor.emulation.emulate import Emulation
from tests.features.rehearsal.cases import classes, mlp, plain, rehearsed


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


def test_a_module_whose_constructor_failed_is_of_no_matter() -> None:
    class Unfinished(nn.Module):
        def __init__(self) -> None:
            raise ValueError

    kept = Unfinished.__new__(Unfinished)
    assert rehearsed("clean_mlp", 2, remedies=False).runs["fp32"].failure is None, kept


class Counting(torch.optim.SGD):
    """Counts its updates of a weight, also those of forked processes."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.updates = torch.frombuffer(mmap(-1, 4), dtype=torch.float32)

    def step(self, closure: Any = None) -> None:
        self.updates += sum(p.grad is not None for group in self.param_groups for p in group["params"])
        super().step()


def test_shadows_apply_no_update_and_updates_in_fp32_are_not_emulated(monkeypatch: Any) -> None:
    emulated, whole = [0], Emulation.run_op

    def count(self: Any, *args: Any) -> Any:
        emulated[0] += str(args[0]).startswith("aten")  # not of torch's profiler, which surrounds an update
        return whole(self, *args)

    monkeypatch.setattr(Emulation, "run_op", count)
    model = mlp(16, 4)
    optimizer = Counting(model.parameters())

    def step(x: torch.Tensor, y: torch.Tensor) -> float:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        before = emulated[0]
        optimizer.step()
        return float(emulated[0] - before)

    runs = auditor.rehearse(step, classes(2), 3, remedies=False).runs
    searched = 2  # in BF16, where the returned number differs from FP32's: the first step is run again, twice
    # two weights, in the first look and three steps of four recipes
    assert float(optimizer.updates) == 2 * (1 + 4 * 3 + searched)
    assert {name for name, run in runs.items() if any(run.losses)} == {"bf16"}
