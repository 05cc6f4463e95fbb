"""Audits many models in parallel, each in its own process, and writes one page about all of them."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from . import __version__
from .asked import OPTIONS, Command, by_option, validate
from .document.codec import PLAN
from .document.compare import compare, regressions, settings
from .document.read import load
from .errors import AuditorError, describe
from .processes import GRACE, HERE, PARENT, Process, how_ended, wait_until
from .records import Audit, Plan, folder
from .report import diff
from .report.blocks import environment
from .report.words import count
from .resources import tables

NOT_HERE = ("out", "format", "open", "dry_run", "baseline", "explain_layer", "quiet", "debug", "per_module_ignores")
"""Options of an audit that the TOML file may not set: the fleet sets them, or they only suit a single audit."""

NAME = r"\w[\w .+-]{,99}(?<!\.)"
"""Pattern of a target's name, which becomes a folder's name."""

KEPT = "fleet.json"

CRASHED = "explain process-ended"
"""Text that an audit's error contains if the model crashed the process."""

STATES = ("failed", "got worse", "without a plan", "findings", "clean", "not audited yet")
"""States of a target, the most urgent first."""


@dataclass(frozen=True)
class FleetTarget:
    """One model and its audit. words: the command line, without program and --out; folder: base of relative paths.

    directory: where the audit's files go. limit: seconds that the audit may take. retries: maximum number of restarts
    after a crash. threads: number of threads of the audit's process, unless OMP_NUM_THREADS is set.
    """

    name: str
    words: tuple[str, ...]
    folder: Path
    directory: Path = Path()
    limit: float | None = None
    retries: int = 0
    threads: int = 1

    @property
    def asked(self) -> str:
        """A digest of the options and of the files they name; if the digest changes, the target is audited again.

        Files that the named files import are not included.
        """
        digest = hashlib.sha256(repr((__version__, self.words, self.folder)).encode())
        for word in self.words:
            named = word.partition("=")[2] if word.startswith("--") else word
            for path in sorted({named, named.partition(":")[0]}):
                with suppress(OSError, ValueError):
                    digest.update(hashlib.sha256((self.folder / path).read_bytes()).digest())
        return digest.hexdigest()[:16]


def read(file: Path) -> tuple[FleetTarget, ...]:
    """Read the targets of a file, in order. Raises: AuditorError(slug="bad-fleet"), with the file and the target."""
    table = tables(file, "bad-fleet")
    for unknown in table.keys() - {"target", "defaults"}:
        raise _bad(file, f"unknown table {unknown!r}: a file has [[target]] tables, and [defaults] for all targets")
    entries = table.get("target")
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise _bad(file, "the file names no model: add a [[target]] table with name and target")
    shared = by_option(table.get("defaults", {}), f"{file}: [defaults]", "bad-fleet", NOT_HERE)
    targets = [_target(file, number, entry, shared) for number, entry in enumerate(entries, 1)]
    first: dict[str, FleetTarget] = {}
    for target in targets:
        if (other := first.setdefault(target.name.casefold(), target)) is not target:
            raise _bad(file, f"the targets {other.name!r} and {target.name!r} would have one folder: rename one")
    return tuple(targets)


def _target(file: Path, number: int, entry: Mapping[str, Any], shared: Mapping[str, Any]) -> FleetTarget:
    given = dict(entry)
    name, target = given.pop("name", None), given.pop("target", None)
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        allowed = "letters, digits, spaces and . _ + -, at most 100 characters"
        raise _bad(file, f"target {number} needs a name that a folder can have: {allowed}")
    if not isinstance(target, str) or not target:
        raise _bad(file, f"target {name!r} has no key `target`, which names the file or module of the model")
    place = f"{file}: target {name!r}"
    options = {**shared, **by_option(given, place, "bad-fleet", NOT_HERE)}
    try:
        validate(Command, options, place, "bad-fleet", options)
    except AuditorError as error:
        raise error if error.slug == "bad-fleet" else AuditorError(f"{place}: {error}", "bad-fleet") from error
    return FleetTarget(name, (*_words(options), target), file.resolve().parent)


def _words(given: Mapping[str, Any]) -> Iterator[str]:
    """Convert options to command-line arguments, such as `--formats=fp16`."""
    for name, value in given.items():
        flag, values = str(OPTIONS[name].flag), value if isinstance(value, list) else [value]
        if isinstance(value, bool):
            yield flag if value else f"--no-{OPTIONS[name].key}"
        elif name == "criteria":
            yield from (f"{flag}={one}" for one in values)
        else:
            yield f"{flag}={','.join(map(str, values))}"


def _bad(file: Path, message: str) -> AuditorError:
    return AuditorError(f"{file}: {message}", slug="bad-fleet")


@dataclass(frozen=True)
class Outcome:
    """How the last try of a target's audit ended. asked: digest of the target; code: exit code, negative after a signal;
    said: in one line why there is no audit, or ""."""

    asked: str
    code: int
    said: str = ""
    seconds: float = 0.0


_OUTCOMES = TypeAdapter(dict[str, Outcome])


def earlier_outcomes(directory: Path, targets: Sequence[FleetTarget]) -> dict[str, Outcome]:
    """{target: outcome} of a directory's finished audits with unchanged targets; empty without readable fleet.json."""
    before: dict[str, Outcome] = {}
    with suppress(OSError, ValueError):
        before = _OUTCOMES.validate_json((directory / KEPT).read_bytes())
    finished = [one for one in targets if one.name in before and has_audit(one.directory)]
    return {
        one.name: earlier for one in finished if not (earlier := before[one.name]).said and earlier.asked == one.asked
    }


def keep(directory: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Save the outcomes in fleet.json. Raises: AuditorError(slug="bad-output")."""
    folder.write(directory, {KEPT: _OUTCOMES.dump_json(dict(outcomes), indent=1) + b"\n"})


def run_all(
    tasks: Sequence[FleetTarget], jobs: int, address: str | None, done: Callable[[FleetTarget, Outcome], None]
) -> None:
    """Run all audits, at most `jobs` at a time, or on the Ray cluster at `address`, each on any node with a free
    processor. `done` is called when an audit has ended and its files are in its directory.

    If an exception is raised, all running audits are stopped and count as not audited. If a node is lost, its audit
    restarts on another node, at most `retries` times; others are unaffected. The targets' files must exist at the same
    paths on every node. Raises: AuditorError(slug="no-ray").
    """
    with _on_this_machine(jobs) if address is None else _on_cluster(address) as start:
        running = {start(task): task for task in tasks}
        for future in as_completed([*running]):
            task = running.pop(future)
            try:
                outcome, files = future.result()
            except Exception as error:
                outcome, files = Outcome(task.asked, 2, f"it could not be run, {describe(error)}"), {}
            if files:
                folder.write(task.directory, files)
            done(task, outcome)


@contextmanager
def _on_this_machine(jobs: int) -> Iterator[Callable[[FleetTarget], Future[Any]]]:
    """Yields a function that starts an audit, whose future result is its outcome and {}."""
    over, pool = threading.Event(), ThreadPoolExecutor(jobs)
    try:
        yield lambda task: pool.submit(lambda: (run(task, over.is_set), {}))
    finally:
        over.set()
        pool.shutdown(cancel_futures=True)


@contextmanager
def _on_cluster(address: str) -> Iterator[Callable[[FleetTarget], Future[Any]]]:
    """Yields a function that starts an audit, whose future result is its outcome and {path: contents} of its files."""
    try:
        import ray

        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, ignore_reinit_error=True)
    except (ImportError, ConnectionError, ValueError, RuntimeError) as error:
        how = "pip install ray, start a cluster with `ray start --head`, or omit --address"
        raise AuditorError(f"no Ray cluster at {address} ({type(error).__name__}): {how}", slug="no-ray") from error
    audited = ray.remote(num_cpus=1)(_run_on_node)
    try:
        yield lambda task: audited.options(max_retries=task.retries).remote(task).future()
    finally:
        ray.shutdown()


def _run_on_node(task: FleetTarget) -> tuple[Outcome, dict[str, bytes]]:
    """Audit into a temporary folder, and return the outcome with the files."""
    with tempfile.TemporaryDirectory(prefix=folder.OWN, ignore_cleanup_errors=True) as scratch:
        directory = Path(scratch, "audit")
        outcome = run(replace(task, directory=directory))
        return outcome, {str(f.relative_to(directory)): f.read_bytes() for f in directory.rglob("*") if f.is_file()}


def run(task: FleetTarget, unwanted: Callable[[], bool] = lambda: False) -> Outcome:
    """Run an audit, and after a crash up to `task.retries` more times. unwanted: polled; if true, the audit stops."""
    start = time.monotonic()
    asked = task.asked
    process = _start(task)
    try:
        is_in_time = wait_until(lambda: process.poll() is not None or unwanted(), task.limit)
    finally:
        process.end(GRACE)
    code = process.returncode
    lines = process.last_words()
    has_crashed = code < 0 or (code > 1 and any(CRASHED in line for line in lines))
    if has_crashed and is_in_time and task.retries and not unwanted():
        outcome = run(replace(task, retries=task.retries - 1), unwanted)
        return replace(outcome, seconds=_seconds_since(start))
    message = ""
    if not is_in_time:
        code = 2
        message = f"it took longer than {task.limit:g} seconds"
    elif code < 0:
        message = f"the process {how_ended(code)}"
    elif code > 1:
        message = _last_error(lines, code)
    return Outcome(asked, code, message, _seconds_since(start))


def _start(task: FleetTarget) -> Process:
    """Start the process of an audit."""
    out = str(task.directory.absolute())
    command = [sys.executable, "-m", "auditor", *task.words, "--out", out, "--quiet"]
    path = HERE
    if os.environ.get("PYTHONPATH"):
        path = os.pathsep.join([os.environ["PYTHONPATH"], HERE])
    environment = {"OMP_NUM_THREADS": str(task.threads), **os.environ}
    environment["PYTHONPATH"] = path
    environment[PARENT] = str(os.getpid())
    return Process(command, cwd=task.folder, env=environment)


def _last_error(lines: Sequence[str], code: int) -> str:
    """The last error in the output of an audit, or its last line, or how the process ended."""
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    shown = errors or lines or [f"it {how_ended(code)} without a message"]
    return shown[-1][:500]


def _seconds_since(start: float) -> float:
    return round(time.monotonic() - start, 2)


@dataclass(frozen=True)
class Row:
    """One model. outcome: None if not audited yet; state: one of STATES; said: why it failed, or what got worse; plan:
    the recommended plan; findings: {severity: number}, None without an audit."""

    target: FleetTarget
    outcome: Outcome | None
    state: str
    said: Sequence[str] = ()
    plan: Plan | None = None
    budget: str = ""
    findings: Mapping[str, int] | None = None


def has_audit(directory: Path) -> bool:
    """Whether a directory contains the files of an audit, or those of a pipeline's components."""
    return (directory / PLAN).is_file() or bool(components_in(directory))


def components_in(directory: Path) -> list[str]:
    """Names of the folders in which the audits of a pipeline's components are; [] for the audit of one model."""
    if (directory / PLAN).is_file():
        return []
    return sorted(file.parent.name for file in directory.glob(f"*/{PLAN}"))


def rows_of(target: FleetTarget, outcome: Outcome | None, baseline: Path | None) -> list[Row]:
    """The rows of a target: one, or one for each component of a pipeline, and one for the components that failed."""
    components = components_in(target.directory) if outcome is not None else []
    if outcome is None or not components:
        return [row_of(target, outcome, baseline)]
    rows = list[Row]()
    for name in components:
        part = replace(target, name=f"{target.name}/{name}", directory=target.directory / name)
        row = row_of(part, replace(outcome, said="", code=0), baseline)
        has_errors = bool(row.findings and row.findings["error"])
        if row.state == "clean" and has_errors and outcome.code:
            row = replace(row, state="findings")
        rows.append(row)
    if outcome.said:
        rows.append(Row(target, outcome, "failed", [outcome.said]))
    return rows


def row_of(target: FleetTarget, outcome: Outcome | None, baseline: Path | None) -> Row:
    """The row of a target. baseline: the output directory of an earlier fleet run."""
    if outcome is None:
        return Row(target, outcome, "not audited yet")
    before = None
    if baseline is not None:
        before = _audit_in(baseline / target.name)
    after = None
    if not outcome.said:
        after = _audit_in(target.directory)
    if after is None:
        reasons = [outcome.said or "its output files are missing or cannot be read"]
        if before is not None:
            reasons.append("audited before, not now")
        return Row(target, outcome, "failed", reasons)
    plan = after.plans.get(after.recommended or "")
    worse = regressions(compare(before, after)) if before is not None else []
    if worse:
        state = "got worse"
    elif plan is None:
        state = "without a plan"
    elif outcome.code == 1:
        state = "findings"
    else:
        state = "clean"
    findings = Counter(finding.severity for finding in after.findings)
    return Row(target, outcome, state, worse, plan, settings(after)["budget"], findings)


def _audit_in(directory: Path) -> Audit | None:
    with suppress(AuditorError):
        return load(directory)
    return None


def headline(rows: Sequence[Row]) -> str:
    """How many models there are, and how many of them are in each state that needs attention, in one sentence."""
    number_of = Counter(row.state for row in rows)
    counts = [
        f"{number_of[state]:,} {state}" for state in STATES if number_of[state] and state not in ("findings", "clean")
    ]
    return f"{count(len(rows), 'model')}: {', '.join(counts) if counts else 'all have a recommended plan'}."


def render(rows: Sequence[Row], baseline: Path | None) -> str:
    """The page as one HTML file without external resources."""
    order = sorted(rows, key=lambda row: STATES.index(row.state))
    counts = Counter(row.state for row in order)
    page = environment().get_template("fleet.html.jinja")
    return page.render(rows=order, states=counts, headline=headline(rows), baseline=baseline, diff=diff)
