"""Runs the audits of a fleet, each in its own process, on this machine or a Ray cluster. Stores how each audit ended,
so that an interrupted fleet can continue."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from .. import __version__
from ..document.codec import PLAN
from ..errors import AuditorError
from ..processes import GRACE, HERE, Process, how_ended, wait_until
from ..records import folder
from ..records.audit import FILES
from .targets import FleetTarget

KEPT = "fleet.json"
PROCESSORS = os.cpu_count() or 1

CRASHED = "explain process-ended"
"""Text that an audit's error contains if the model crashed the process."""


class Outcome(BaseModel):
    """How the audit of one target ended. code: exit code of the last try, negative after a signal; said: the error in
    one line, if any; asked: digest of the target's options and files."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    asked: str
    code: int
    said: str = ""
    seconds: float = 0.0
    tries: int = 1

    @property
    def has_audit(self) -> bool:
        """Whether the audit finished, with or without findings."""
        return self.code in (0, 1)


_OUTCOMES = TypeAdapter(dict[str, Outcome])


def asked_of(target: FleetTarget) -> str:
    """A digest of a target's options and of the files they name; if the digest changes, the target is audited again.

    Files that the named files import are not included.
    """
    told = json.dumps([__version__, list(target.words), str(target.folder)])
    digest = hashlib.sha256(told.encode("utf-8", "surrogateescape"))
    for word in target.words:
        named = word.partition("=")[2] if word.startswith("--") else word
        for path in sorted({named, named.partition(":")[0]}):
            with suppress(OSError, ValueError):
                digest.update(hashlib.sha256((target.folder / path).read_bytes()).digest())
    return digest.hexdigest()[:16]


def earlier_outcomes(directory: Path, targets: Sequence[FleetTarget]) -> dict[str, Outcome]:
    """{target: outcome} of a directory's finished audits with unchanged targets; empty without readable fleet.json."""
    try:
        before = _OUTCOMES.validate_json((directory / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return {
        target.name: outcome
        for target in targets
        if (outcome := before.get(target.name)) is not None
        and outcome.has_audit
        and outcome.asked == asked_of(target)
        and (directory / target.name / PLAN).is_file()
    }


def keep(directory: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Save the outcomes in fleet.json. Raises: AuditorError(slug="bad-output")."""
    folder.write(directory, {KEPT: _OUTCOMES.dump_json(dict(outcomes), indent=1) + b"\n"})


def run_all(tasks: Sequence[FleetTarget], jobs: int, done: Callable[[FleetTarget, Outcome], None]) -> None:
    """Run all audits, at most `jobs` at a time; `done` is called when an audit has ended.

    If an exception is raised, all running audits are stopped and count as not audited.
    """
    over = threading.Event()
    with ThreadPoolExecutor(jobs) as pool:
        running = {pool.submit(run, task, over.is_set): task for task in tasks}
        try:
            for future in as_completed(running):
                done(running[future], future.result())
        except BaseException:
            over.set()
            pool.shutdown(cancel_futures=True)
            raise


def run_on_cluster(tasks: Sequence[FleetTarget], address: str, done: Callable[[FleetTarget, Outcome], None]) -> None:
    """Run all audits on a cluster, each on any node with a free processor; `done` is called when an audit has ended and
    its files are copied back.

    If a node is lost, its audit restarts on another node, at most `retries` times; others are unaffected. The
    targets' files must exist at the same paths on every node. Raises: AuditorError(slug="no-ray").
    """
    try:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except ImportError as error:
        raise AuditorError(f"--address needs ray ({error}): pip install ray, or omit --address", "no-ray") from error
    except (ConnectionError, ValueError, RuntimeError) as error:
        how = "start a cluster with `ray start --head`"
        raise AuditorError(f"there is no Ray cluster at {address}: {how}", slug="no-ray") from error
    try:
        audited = ray.remote(num_cpus=1)(_run_on_node)
        waiting = {audited.options(max_retries=task.retries).remote(task): task for task in tasks}
        while waiting:
            (reference,), _ = ray.wait([*waiting], num_returns=1)
            task = waiting.pop(reference)
            try:
                outcome, texts = ray.get(reference)
            except ray.exceptions.RayError as error:
                said = f"the node that ran it was lost ({type(error).__name__}), {task.retries + 1} times"
                outcome, texts = Outcome(asked=asked_of(task), code=2, said=said, tries=task.retries + 1), {}
            if texts:
                folder.write(task.directory, texts)
            done(task, outcome)
    finally:
        ray.shutdown()


def _run_on_node(task: FleetTarget) -> tuple[Outcome, dict[str, str]]:
    """Audit into a temporary folder, and return the outcome with the files."""
    with tempfile.TemporaryDirectory(prefix=folder.OWN, ignore_cleanup_errors=True) as scratch:
        ended = run(replace(task, directory=Path(scratch, "audit")))
        there = [Path(scratch, "audit", name) for name in FILES]
        return ended, {file.name: file.read_text(encoding="utf-8") for file in there if file.is_file()}


def run(task: FleetTarget, unwanted: Callable[[], bool] = lambda: False) -> Outcome:
    """Run an audit, and after a crash up to `task.retries` more times. unwanted: polled; if true, the audit stops."""
    start, tries, crashed = time.monotonic(), 0, True
    while crashed and tries <= task.retries and not (tries and unwanted()):
        tries += 1
        code, said, crashed = _try(task, unwanted)
    return Outcome(asked=asked_of(task), code=code, said=said, seconds=round(time.monotonic() - start, 2), tries=tries)


def command_of(task: FleetTarget) -> list[str]:
    """The command line that audits one target, as a list of words."""
    return [sys.executable, "-m", "auditor", *task.words, "--out", str(task.directory.absolute()), "--quiet"]


def _try(task: FleetTarget, unwanted: Callable[[], bool]) -> tuple[int, str, bool]:
    """Run a target's audit once. Returns its exit code, its error line if it failed, and whether it crashed."""
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), HERE])
    environment = {"OMP_NUM_THREADS": str(task.threads), **os.environ, "PYTHONPATH": path}
    process = Process(command_of(task), cwd=task.folder, env=environment)
    try:
        if not wait_until(lambda: process.poll() is not None or unwanted(), task.limit):
            return 2, f"it took longer than {task.limit:g} seconds", False
    finally:
        process.end(GRACE)
    if (code := process.returncode) < 0:
        return code, f"the process {how_ended(code)}", True
    lines = process.last_words()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    said = (errors or lines or [f"it {how_ended(code)} without a message"])[-1][:500]
    return code, said if code > 1 else "", code > 1 and any(CRASHED in line for line in lines)
