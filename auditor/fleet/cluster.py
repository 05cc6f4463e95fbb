"""Runs a fleet on a Ray cluster: each audit is a task on any node with a free processor."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .. import folder
from ..errors import AuditorError
from ..records.audit import FILES
from .running import Outcome, asked_of, run
from .targets import FleetTarget


def run_all(tasks: Sequence[FleetTarget], address: str, done: Callable[[FleetTarget, Outcome], None]) -> None:
    """Run all audits on a cluster; `done` is called when an audit has ended and its files are copied back.

    If a node is lost, its task restarts elsewhere, up to its number of retries; other tasks are unaffected. The
    targets' files must exist at the same paths on every node. Raises: AuditorError(slug="no-ray").
    """
    ray = _connect(address)
    try:
        audited = ray.remote(num_cpus=1)(_audit)
        waiting = {audited.options(max_retries=task.retries).remote(task): task for task in tasks}
        while waiting:
            (reference,), _ = ray.wait([*waiting], num_returns=1)
            task = waiting.pop(reference)
            try:
                outcome, texts = ray.get(reference)
            except ray.exceptions.RayError as error:
                said = f"the node that ran it was lost ({type(error).__name__}), {task.retries + 1} times"
                outcome = Outcome(asked=asked_of(task), code=2, said=said, tries=task.retries + 1)
                texts = {}
            if texts:
                folder.write(task.directory, texts)
            done(task, outcome)
    finally:
        ray.shutdown()


def _connect(address: str) -> Any:
    try:
        import ray
    except ImportError as error:
        raise AuditorError(f"--address needs ray ({error}): pip install ray, or leave it out", slug="no-ray") from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise AuditorError(
            f"there is no Ray cluster at {address}: start a cluster with `ray start --head`", "no-ray"
        ) from error
    return ray


def _audit(task: FleetTarget) -> tuple[Outcome, dict[str, str]]:
    """The task on a node: audit into a temporary folder, and return the outcome with the files."""
    with tempfile.TemporaryDirectory(prefix=folder.OWN, ignore_cleanup_errors=True) as scratch:
        ended = run(replace(task, directory=Path(scratch, "audit")))
        there = [Path(scratch, "audit", name) for name in FILES]
        return ended, {file.name: file.read_text(encoding="utf-8") for file in there if file.is_file()}
