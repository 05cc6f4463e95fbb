"""The user's own score of programs: their files, loaded in a fresh process, in the model's place."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..plan.scores import InFp32, tell
from ..plan.workbench import Workbench
from ..score import Given, judged
from ..verify import PROGRAM, NotHandedOver, Runs, Verifier, saved
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
    where: dict[str, Any] = {"seed": bench.seed, "device": bench.device}
    folder = Path(tempfile.mkdtemp(prefix="scored-", dir=bench.scratch))
    for name, content in files.items():
        (folder / f"{name}{PROGRAM}").write_bytes(content)
    if scoring.place is not None:
        try:
            with Verifier(bench.subject.batches[:1], folder, timeout=bench.timeout, **where) as verifier:
                return verifier.scores(folder, list(files), scoring, most, lambda words: tell(words, most))
        except NotHandedOver:
            pass
    runs = Runs(partial(saved, folder, bench.device), **where)
    return {name: score.scorer.here(runs, name, most) for name in files}
