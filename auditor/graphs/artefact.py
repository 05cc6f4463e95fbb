"""A choice as a file: the lowered graph exported again and saved, and what it answers in a process of its own."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from ..errors import first_line
from ..plan.workbench import Workbench
from ..raised import let_through
from ..records import Batch
from ..verify import PROGRAM, Answers, NotHandedOver, Runs, Verifier, saved
from .exported import Exported, cannot, program_of, varies


@dataclass(frozen=True)
class Artefact:
    """content: what a file holds that `torch.export.load` reads. casts: conversions in its graph. fixed: see Exported."""

    content: bytes
    program: torch.export.ExportedProgram
    casts: int
    fixed: str


def artefact(module: fx.GraphModule, exported: Exported) -> Artefact:
    """The lowered graph as a file. Raises: PlanError(slug="cannot-export") where torch.export cannot write one."""
    try:
        return _saved(module, exported)
    except Exception as error:
        let_through(error)
        raise cannot(f"the model's graph cannot be saved as a program ({first_line(error)[:240]})") from error


def _saved(module: fx.GraphModule, exported: Exported) -> Artefact:
    fixed, program = exported.fixed, None
    if not fixed:
        try:
            program = program_of(module, exported.example, dynamic=True)
            fixed = "" if varies(program) else "the casts fix it"
        except Exception as error:
            let_through(error)
            fixed = "torch.export cannot leave it open once there are casts"
    if program is None or fixed:
        program = program_of(module, exported.audited, dynamic=False)
    file = io.BytesIO()
    torch.export.save(program, file)
    casts = sum(node.target is torch.ops.aten.to.dtype for node in program.graph.nodes)
    return Artefact(file.getvalue(), program, casts, fixed)


def answers(
    bench: Workbench, artefacts: Mapping[str, Artefact], batches: Sequence[Batch], waiting: Callable[[], None]
) -> dict[str, Answers | str]:
    """What saved programs answer in a fresh process; in this one where the inputs cannot be handed over."""
    folder = Path(tempfile.mkdtemp(prefix="programs-", dir=bench.scratch))
    for name, each in artefacts.items():
        (folder / f"{name}{PROGRAM}").write_bytes(each.content)
    try:
        with _verifier(bench, batches, folder) as verifier:
            return verifier.answers(folder, list(artefacts), waiting)
    except NotHandedOver:
        load, gradients = partial(saved, folder, bench.device), bench.graded is not None
        runs = Runs(load, batches, bench.device, bench.seed, gradients, bench.most)
        return {name: runs.answers(name) for name in artefacts}


def _verifier(bench: Workbench, batches: Sequence[Batch], folder: Path) -> Verifier:
    given: Any = pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, list(batches))
    return Verifier(
        given,
        folder,
        seed=bench.seed,
        device=bench.device,
        gradients=bench.graded is not None,
        most=bench.most,
        timeout=bench.timeout,
    )
