"""Repairs of training steps, each where a rehearsal names the line."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from auditor.features.fix.source import Source
from auditor.features.fix.steps import REPAIRS, StepStanding, fix_step, is_repaired, is_step

HEAD = """import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
batches = [(torch.randn(8, 16), torch.randint(4, (8,))) for _ in range(4)]


"""
STEP = """def step(x, y):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
{}    return loss.detach()
"""


def body(*lines: str) -> str:
    return STEP.format("".join(f"    {line}\n" for line in lines))


UPDATE = ("scaler.step(optimizer)", "scaler.update()")
CLIP = "nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
UNSCALE = "scaler.unscale_(optimizer)"
CASES = {
    "clip-before-unscale": (body(CLIP, *UPDATE), CLIP, body(UNSCALE, CLIP, *UPDATE)),
    "clip-before-unscale, late": (body(CLIP, UNSCALE, *UPDATE), CLIP, body(UNSCALE, CLIP, *UPDATE)),
    "clip-after-step": (body(*UPDATE, CLIP), CLIP, body(UNSCALE, CLIP, *UPDATE)),
    "unscale-twice": (body(UNSCALE, UNSCALE, CLIP, *UPDATE), UNSCALE, body(UNSCALE, CLIP, *UPDATE)),
    "unscale-after-step": (body(UPDATE[0], UNSCALE, UPDATE[1]), UNSCALE, body(UNSCALE, *UPDATE)),
    "update-with-scaled-gradients": (body("optimizer.step()"), "optimizer.step()", body(*UPDATE)),
    "no-update": (body(UPDATE[0]), UPDATE[0], body(*UPDATE)),
    "update-before-step": (body(UPDATE[1], UPDATE[0]), UPDATE[1], body(*UPDATE)),
}


def repaired(kind: str, text: str, line: str) -> Iterator[str]:
    source = Source("train.py", text)
    number = next(index for index, one in enumerate(text.splitlines(), 1) if one.strip() == line)
    statement = source.statement_at(number)
    assert statement is not None
    for candidate in REPAIRS[kind](source, statement):
        yield source.apply(candidate.edits)


@pytest.mark.parametrize("case", CASES)
def test_the_order_of_an_optimizers_calls(case: str) -> None:
    text, line, expected = CASES[case]
    assert next(repaired(case.partition(",")[0], text, line)) == expected


def test_gradients_are_zeroed_before_the_backward_pass() -> None:
    text = body("optimizer.zero_grad()", *UPDATE).replace("    optimizer.zero_grad()\n    with", "    with")
    first = next(repaired("gradients-zeroed", text, "optimizer.zero_grad()"))
    assert first.index("zero_grad") < first.index("backward")
    assert ast.parse(first)


@pytest.mark.parametrize(
    ("before", "after", "holds"),
    [
        (StepStanding((("clip", "", ""),), 2.4, 0.1), StepStanding((), 0.1, 0.1), True),
        (StepStanding((("clip", "", ""),), 2.4, 0.1), StepStanding((("other", "", ""),), 0.1, 0.1), False),
        (StepStanding((("clip", "", ""),), 2.4, 0.1), StepStanding((), 0.1, 0.5), False),  # trains worse in FP32
        (StepStanding((("clip", "", ""),), 0.2, 0.1), StepStanding((), 0.4, 0.1), False),
        (StepStanding((), float("nan"), 0.1), StepStanding((), 0.1, 0.1), True),
        (StepStanding((), 0.2, 0.1), StepStanding((), 0.19, 0.1), False),
    ],
)
def test_a_repair_must_train_at_least_as_well(before: StepStanding, after: StepStanding, holds: bool) -> None:
    assert is_repaired(before, after) is holds


def test_which_targets_are_steps(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + body(*UPDATE) + "\n\ndef get_inputs():\n    return batches\n")
    assert is_step(str(file))
    assert is_step(f"{file}:step")
    assert not is_step(f"{file}:get_inputs")
    assert not is_step("json")


@pytest.mark.slow
def test_a_step_is_repaired_and_rehearsed(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(HEAD + body(CLIP, *UPDATE))
    fixes = fix_step(f"{file}:step", 0)
    assert [fix.title for fix in fixes.fixes] == ["unscale the gradients before they are clipped"]
    assert "+    scaler.unscale_(optimizer)\n     nn.utils.clip_grad_norm_" in fixes.patch
    assert "clip-before-unscale" in fixes.failing_before
    assert "clip-before-unscale" not in fixes.failing_after
    assert file.read_text() == HEAD + body(CLIP, *UPDATE)
