"""Casts to FP16 that the user's step makes itself, and tensors that it stores in FP16, outside modules."""

from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

import auditor
from tests.features.rehearsal.cases import classes, mlp
from tests.features.rehearsal.stepping import Loop
from tests.features.rehearsal.steps_by_hand import a_memory_bank_in_fp16


def test_a_memory_bank_in_fp16_is_the_fault_and_not_the_product_that_reads_it() -> None:
    found = auditor.rehearse(partial(a_memory_bank_in_fp16, Loop()), classes(2), 3, remedies=False)
    assert {run.failure for run in found.runs.values()} == {None}
    kinds = {problem.kind: problem for problem in found.problems_of("as_written")}
    assert "stored in FP16" in kinds["state-lost"].text
    assert found.runs["fp32"].losses != found.runs["as_written"].losses


def test_a_bank_that_is_a_variable_of_the_file_is_fp32_in_the_fp32_recipe() -> None:
    model = mlp(16, 8, 4)
    bank = torch.full((64, 4), 1 / 3).half()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    seen = torch.zeros(1).share_memory_()

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        logits = model(x) @ bank.T
        loss = F.cross_entropy(logits, y)
        loss.backward()
        optimizer.step()
        bank[:32] = model(x).detach().half() * 0 + 0.3333  # a write of another dtype than the bank has in FP32
        seen.fill_(float(bank.dtype is torch.float32))
        return loss.detach()

    found = auditor.rehearse(step, classes(2), 2, remedies=False)
    assert {name: run.failure for name, run in found.runs.items() if run.failure} == {}
    assert bank.dtype is torch.float16


def test_gradients_that_the_step_casts_to_fp16_are_compared_with_those_of_fp32() -> None:
    model = mlp(16, 8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu")

    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        for p in model.parameters():
            assert p.grad is not None
            p.grad = (p.grad * 1e-6).half().float() * 1e6
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    problems = auditor.rehearse(step, classes(2), 3, remedies=False).problems_of("as_written")
    assert "gradients-off" in {problem.kind for problem in problems}
