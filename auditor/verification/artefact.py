"""The emitted file in a process of its own: nothing of this one can help it to work."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import VerifyError
from ..records import Batch

TIMEOUT = 1800
"""Seconds after which a verification that hangs is given up."""


def verify_emitted(
    patched_file: Path, plans: Sequence[str], batches: Sequence[Batch], seed: int, device: str
) -> dict[str, list[list[torch.Tensor]] | str]:
    """Outputs of each plan on each batch, or the one-line reason why it failed: {plan: [[tensor, ...], ...] | reason}.

    The process starts in an empty directory and imports `patched_model` by path, as a user's script would.
    Raises: VerifyError(slug="verification-crashed") if the process itself dies.
    """
    with tempfile.TemporaryDirectory() as scratch:
        job, answer = Path(scratch, "job.pt"), Path(scratch, "answer.pt")
        content = {
            "file": str(patched_file),
            "plans": list(plans),
            "batches": list(batches),
            "seed": seed,
            "device": device,
        }
        torch.save(content, job)
        done = subprocess.run(
            [sys.executable, "-m", f"{__package__}.worker", str(job), str(answer)],
            cwd=scratch,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=TIMEOUT,
        )
        if done.returncode != 0 or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise VerifyError(f"the process that ran patched_model.py died: {last[:300]}", slug="verification-crashed")
        result: dict[str, Any] = torch.load(answer, weights_only=True)
        return result


def compare(
    reference: Sequence[Sequence[torch.Tensor]],
    candidate: Sequence[Sequence[torch.Tensor]],
    distance: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float],
) -> float:
    """Worst distance over the batches."""
    return max(distance(r, c) for r, c in zip(reference, candidate, strict=True))


def _environment() -> dict[str, str]:
    here = str(Path(__file__).resolve().parents[2])  # a plain checkout is found without being installed
    paths = [*(p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p), here]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
