"""The user's own score of programs: their files, loaded in a fresh process, in the model's place."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import first_line
from ..plan.scores import InFp32, tell
from ..plan.workbench import Workbench
from ..raised import let_through
from ..score import Given, judged
from ..verify import NotHandedOver, Standing, Verifier
from ..verify.programs import SUFFIX
from .stage import Planned


def scored(planned: Planned, score: InFp32 | None, bench: Workbench) -> Planned:
    """The programs, those that are verified with their scores. score: of the FP32 model; None where nobody asked."""
    verified = {name: plan.program for name, plan in planned.plans.items() if plan.verified and plan.program}
    if score is None or not verified:
        return planned
    files = {name: planned.files[program.file] for name, program in verified.items()}
    given = _given(files, score, bench)
    plans = {
        name: replace(plan, score=judged(score.scorer.scoring, score.given, given[name])) if name in given else plan
        for name, plan in planned.plans.items()
    }
    return replace(planned, plans=plans)


def _given(files: Mapping[str, bytes], score: InFp32, bench: Workbench) -> dict[str, Given | str]:
    """What the function gives of each, in a process of its own where it is found there."""
    most, scoring = len(score.given.values), score.scorer.scoring
    if scoring.place is not None:
        where = {"seed": bench.seed, "device": bench.device, "timeout": bench.timeout, "entry": "programs"}
        try:
            with Verifier.begun(bench.subject.batches[:1], **where) as (verifier, folder):
                for name, content in files.items():
                    Path(folder, f"{name}{SUFFIX}").write_bytes(content)
                return verifier.scores(folder, list(files), scoring, most, lambda words: tell(words, most))
        except NotHandedOver:
            pass
    return {name: _here(name, content, score, bench) for name, content in files.items()}


def _here(name: str, content: bytes, score: InFp32, bench: Workbench) -> Given | str:
    most = len(score.given.values)
    try:
        program = torch.export.load(io.BytesIO(content)).module().to(bench.device)
    except Exception as error:
        let_through(error)
        return f"it cannot be loaded: {first_line(error)}"
    return score.scorer.here(Standing(program), None, name, most)
