"""The verb `fleet`: many models audited, and one page about them."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .. import folder
from ..errors import AuditorError
from ..report.words import count, printable
from . import streams, verbs
from .options import audit_parser

if TYPE_CHECKING:
    from ..fleet.index import Row
    from ..fleet.outcome import Outcome
    from ..fleet.running import Task
    from ..fleet.targets import Target

INDEX, PLAN = "index.html", "plan.json"


def fleet_parser() -> argparse.ArgumentParser:
    made = verbs.parser("fleet", "Audit many models, each in a process of its own; DIR/index.html tells of all.")
    add = made.add_argument
    add(
        "targets",
        metavar="TARGETS",
        type=Path,
        help="a TOML file of [[target]] tables: name, target, options of an audit",
    )
    add("--out", metavar="DIR", type=Path, required=True, help="where the audits go, a folder each, and the page")
    add("--jobs", metavar="N", type=_count, help="audits at once; default: half of the processors")
    add("--limit", metavar="SECONDS", type=verbs.seconds, help="for one audit, which fails beyond; default: none")
    add("--retries", metavar="N", type=_count, default=1, help="for one that a signal ended, default %(default)s")
    add("--again", action="store_true", help="also audit what was audited with the same options before")
    add("--baseline", metavar="DIR", type=Path, help="an earlier fleet: say what got worse since, and exit with 1")
    add("--address", metavar="ADDRESS", help="a Ray cluster that makes the audits (auto: the one this is part of)")
    add("-q", "--quiet", action="store_true", help="no progress on stderr")
    return made


def fleet(args: argparse.Namespace) -> int:
    """Make the audits that are not there, write the page. Raises: AuditorError."""
    from ..fleet import index, outcome, targets
    from ..fleet.running import Task

    wanted = targets.read(args.targets, _known(), _wrong)
    if args.baseline is not None and not args.baseline.is_dir():
        raise AuditorError(f"{args.baseline} is no directory of an earlier fleet: name the --out of one", "bad-option")
    folder.check_directory(args.out, (INDEX, outcome.KEPT))
    outcomes = {} if args.again else outcome.kept_in(args.out)
    known = {t.name: outcomes[t.name] for t in wanted if t.name in outcomes and _stands(outcomes[t.name], t, args.out)}
    jobs = args.jobs or max((os.cpu_count() or 1) // 2, 1)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
    tasks = [Task(t, args.out / t.name, args.limit, args.retries, threads) for t in wanted if t.name not in known]
    found = dict(known)
    said = _Said(args.quiet, len(wanted), len(known))

    def write() -> list[Row]:
        rows = index.rows_of(wanted, found, args.out, args.baseline)
        folder.write(args.out, {INDEX: index.render(rows, args.baseline)})
        return rows

    def done(task: Task, ended: Outcome) -> None:
        found[task.target.name] = ended
        outcome.keep(args.out, found)
        said(task.target.name, ended)

    write()
    with _ended_as_interrupted():
        try:
            _run(args, tasks, jobs, done)
        finally:
            rows = write()
    streams.say(f"{index.headline(rows)}\n" + "".join(_told(row) for row in rows))
    streams.say(f"Fleet    {args.out / INDEX}\n")
    return int(any(row.state in ("failed", "worse") or (row.findings or {}).get("error") for row in rows))


def _run(args: argparse.Namespace, tasks: Sequence[Task], jobs: int, done: Callable[[Task, Outcome], None]) -> None:
    if args.address is not None:
        from ..fleet.cluster import run_all as on_a_cluster

        on_a_cluster(tasks, args.address, done)
    else:
        from ..fleet.local import run_all

        run_all(tasks, jobs, done)


class _Said:
    """A line on stderr for each audit that ends."""

    def __init__(self, quiet: bool, total: int, known: int) -> None:
        self._quiet, self._total, self._done = quiet, total, known
        self._say(f"fleet: {count(total, 'model')}, {known} audited before")

    def __call__(self, name: str, ended: Outcome) -> None:
        self._done += 1
        how = "audited" if ended.audited else f"failed: {ended.said}"
        self._say(f"  {self._done} of {self._total}, {name}, {ended.seconds:.0f} s, {how}")

    def _say(self, line: str) -> None:
        if not self._quiet:
            print(line, file=sys.stderr, flush=True)


def _told(row: Row) -> str:
    """A line about a target that needs a look; nothing about others."""
    why = row.said or "; ".join(row.worse)
    return f"{row.name}: {row.state}, {printable(why)}\n" if why else ""


@contextmanager
def _ended_as_interrupted() -> Iterator[None]:
    """What ends this process from outside is heard as Ctrl-C is: the audits at work are ended first."""

    def interrupted(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupted)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _stands(ended: Outcome, target: Target, out: Path) -> bool:
    """Whether a target need not be audited again."""
    from ..fleet.outcome import asked_of

    return ended.audited and ended.asked == asked_of(target) and (out / target.name / PLAN).is_file()


def _known() -> dict[str, tuple[str, ...]]:
    """Names of the options of an audit, as a TOML file has them: how each is written, and after it how it is switched off."""
    options = [[word for word in action.option_strings if word.startswith("--")] for action in audit_parser()._actions]
    return {words[0].removeprefix("--").replace("-", "_"): tuple(words) for words in options if words}


def _wrong(words: Sequence[str]) -> str | None:
    """What argparse says of the words of an audit; None where they will do."""
    said = StringIO()
    with redirect_stderr(said):
        try:
            audit_parser().parse_args(words)
        except SystemExit:
            return said.getvalue().splitlines()[0].removeprefix("error: ")
    return None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or len(text) > 4:
        raise argparse.ArgumentTypeError(f"{text[:20]!r} is no whole number")
    return int(text)
