"""The verb `fleet`: many models audited, and one page about them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from .. import folder
from ..asked import asked
from ..errors import AuditorError
from ..processes import unwound
from ..report.words import count, printable
from .program import say

if TYPE_CHECKING:
    from ..fleet.index import Row
    from ..fleet.running import Outcome, Task
    from ..fleet.targets import Target

INDEX, PLAN = "index.html", "plan.json"


def fleet(args: argparse.Namespace) -> int:
    """Make the audits that are not there, write the page. Raises: AuditorError."""
    from ..fleet import index, running, targets

    wanted, settings = targets.read(args.targets), asked(vars(args), configurable=False)
    if args.baseline is not None and not args.baseline.is_dir():
        raise AuditorError(f"{args.baseline} is no directory of an earlier fleet: name the --out of one", "bad-option")
    folder.check_directory(args.out, (INDEX, running.KEPT))
    outcomes = {} if args.force else running.kept_in(args.out)
    known = {t.name: outcomes[t.name] for t in wanted if t.name in outcomes and _stands(outcomes[t.name], t, args.out)}
    jobs = args.jobs or max((os.cpu_count() or 1) // 2, 1)
    threads = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
    tasks = [
        running.Task(t, args.out / t.name, settings.timeout, args.retries, threads)
        for t in wanted
        if t.name not in known
    ]
    found = dict(known)

    def write() -> list[Row]:
        rows = index.rows_of(wanted, found, args.out, args.baseline)
        folder.write(args.out, {INDEX: index.render(rows, args.baseline)})
        return rows

    def done(task: Task, ended: Outcome) -> None:
        found[task.target.name] = ended
        running.keep(args.out, found)
        how = "audited" if ended.audited else f"failed: {ended.said}"
        tell(f"  {len(found)} of {len(wanted)}, {task.target.name}, {ended.seconds:.0f} s, {how}")

    def tell(line: str) -> None:
        if not settings.quiet:
            print(line, file=sys.stderr, flush=True)

    tell(f"fleet: {count(len(wanted), 'model')}, {len(known)} audited before")
    write()
    with unwound():
        try:
            if args.address is not None:
                from ..fleet.cluster import run_all as on_a_cluster

                on_a_cluster(tasks, args.address, done)
            else:
                running.run_all(tasks, jobs, done)
        finally:
            rows = write()
    say(f"{index.headline(rows)}\n" + "".join(_told(row) for row in rows))
    say(f"Fleet    {args.out / INDEX}\n")
    return int(any(row.state in ("failed", "worse") or (row.findings or {}).get("error") for row in rows))


def _told(row: Row) -> str:
    """A line about a target that needs a look; nothing about others."""
    why = row.said or "; ".join(row.worse)
    return f"{row.name}: {row.state}, {printable(why)}\n" if why else ""


def _stands(ended: Outcome, target: Target, out: Path) -> bool:
    """Whether a target need not be audited again."""
    from ..fleet.running import asked_of

    return ended.audited and ended.asked == asked_of(target) and (out / target.name / PLAN).is_file()
