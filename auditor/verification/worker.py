"""Entry point of the verification process: `python -m auditor.verification.worker JOB ANSWER`."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .running import run_patched


def main(job: str, answer: str) -> None:
    """Read a job, run every plan on every batch, write the outputs or the reason of each failure."""
    warnings.simplefilter("ignore")
    work = torch.load(job, weights_only=False)  # written by the parent process a moment ago
    patched = import_file(work["file"])
    results: dict[str, Any] = {}
    for plan in work["plans"]:
        try:
            results[plan] = run_plan(patched, plan, work["batches"], work["device"], work["seed"])
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            results[plan] = f"{type(error).__name__}: {lines[0][:300]}"
    torch.save(results, answer)


def run_plan(patched: ModuleType, plan: str, batches: list[Any], device: str, seed: int) -> list[list[torch.Tensor]]:
    """Outputs of one plan on every batch."""
    model = patched.build(plan=plan).eval().to(device)
    moved = pytree.tree_map_only(torch.Tensor, lambda x: x.to(device), batches)
    return run_patched(model, moved, device, seed)


def import_file(path: str) -> ModuleType:
    """`patched_model`, imported from wherever it lies."""
    spec = importlib.util.spec_from_file_location("patched_model", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["patched_model"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main(*sys.argv[1:])
