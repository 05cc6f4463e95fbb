"""The verb `fleet`: many models audited, and one page about them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from .. import folder
from ..errors import AuditorError
from ..processes import unwound
from ..report.words import count, printable
from ..settings import Directory, Flag, Location, Option, Seconds
from .program import Verb, say

if TYPE_CHECKING:
    from ..fleet.index import Row
    from ..fleet.running import Outcome, Task
    from ..fleet.targets import Target

Count = Annotated[int, Field(ge=0, lt=10_000)]
INDEX, PLAN = "index.html", "plan.json"


class Fleet(Verb):
    """Audit many models, each in a process of its own; DIR/index.html tells of all."""

    takes = ("targets", "out", "jobs", "timeout", "retries", "force", "baseline", "address", "quiet")
    targets: Annotated[Location, Option(shown="TARGETS")]
    """a TOML file of [[target]] tables: name, target, options of an audit"""
    out: Annotated[Location, Option(flag="--out")]
    """where the audits go, a folder each, and the page"""
    jobs: Annotated[Count | None, Option("a whole number", "N")] = None
    """audits at once; half of the processors unless given"""
    timeout: Seconds = None
    """for one audit, which fails beyond; none unless given"""
    retries: Annotated[Count, Option("a whole number", "N")] = 1
    """of one that a signal ended"""
    force: Flag = False
    """also audit what was audited with the same options before"""
    baseline: Directory = None
    """an earlier fleet: say what got worse since, and exit with 1"""
    address: Annotated[str | None, Option(shown="ADDRESS")] = None
    """a Ray cluster that makes the audits (auto: the one this is in)"""

    def run(self) -> int:
        """Make the audits that are not there, write the page. Raises: AuditorError."""
        from ..fleet import index, running, targets

        wanted = targets.read(self.targets)
        if self.baseline is not None and not self.baseline.is_dir():
            raise AuditorError(
                f"{self.baseline} is no directory of an earlier fleet: name the --out of one", "bad-option"
            )
        folder.check_directory(self.out, (INDEX, running.KEPT))
        outcomes = {} if self.force else running.kept_in(self.out)
        known = {
            t.name: outcomes[t.name] for t in wanted if t.name in outcomes and _stands(outcomes[t.name], t, self.out)
        }
        jobs = self.jobs or max((os.cpu_count() or 1) // 2, 1)
        threads = (
            {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // jobs, 1))}
        )
        tasks = [
            running.Task(t, self.out / t.name, self.timeout, self.retries, threads)
            for t in wanted
            if t.name not in known
        ]
        found = dict(known)

        def write() -> list[Row]:
            rows = index.rows_of(wanted, found, self.out, self.baseline)
            folder.write(self.out, {INDEX: index.render(rows, self.baseline)})
            return rows

        def done(task: Task, ended: Outcome) -> None:
            found[task.target.name] = ended
            running.keep(self.out, found)
            how = "audited" if ended.audited else f"failed: {ended.said}"
            tell(f"  {len(found)} of {len(wanted)}, {task.target.name}, {ended.seconds:.0f} s, {how}")

        def tell(line: str) -> None:
            if not self.quiet:
                print(line, file=sys.stderr, flush=True)

        tell(f"fleet: {count(len(wanted), 'model')}, {len(known)} audited before")
        write()
        with unwound():
            try:
                if self.address is not None:
                    from ..fleet.cluster import run_all as on_a_cluster

                    on_a_cluster(tasks, self.address, done)
                else:
                    running.run_all(tasks, jobs, done)
            finally:
                rows = write()
        say(f"{index.headline(rows)}\n" + "".join(_told(row) for row in rows))
        say(f"Fleet    {self.out / INDEX}\n")
        return int(any(row.state in ("failed", "worse") or (row.findings or {}).get("error") for row in rows))


def _told(row: Row) -> str:
    """A line about a target that needs a look; nothing about others."""
    why = row.said or "; ".join(row.worse)
    return f"{row.name}: {row.state}, {printable(why)}\n" if why else ""


def _stands(ended: Outcome, target: Target, out: Path) -> bool:
    """Whether a target need not be audited again."""
    from ..fleet.running import asked_of

    return ended.audited and ended.asked == asked_of(target) and (out / target.name / PLAN).is_file()
