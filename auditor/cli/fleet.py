"""The verb `fleet`: audits many models and writes one summary page."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from .. import folder
from ..report.words import count, printable
from ..settings import Directory, Flag, Location, Option, Seconds, bad
from .program import Verb, say

if TYPE_CHECKING:
    from ..fleet.index import Row
    from ..fleet.running import Outcome, Task

Count = Annotated[int, Field(ge=0, lt=10_000)]
INDEX = "index.html"


class Fleet(Verb):
    """Audit many models, each in its own process; DIR/index.html summarizes all audits."""

    takes = ("targets", "out", "jobs", "timeout", "retries", "force", "baseline", "address", "quiet")
    targets: Annotated[Location, Option(shown="TARGETS")]
    """a TOML file with one [[target]] table per model, which has its name, target and audit options"""
    out: Annotated[Location, Option(flag="--out")]
    """output directory DIR, with a folder for each audit and the summary page"""
    jobs: Annotated[Count | None, Option("a whole number", "N")] = None
    """number of audits to run in parallel; by default half the number of processors"""
    timeout: Seconds = None
    """time limit of one audit in seconds (default: none)"""
    retries: Annotated[Count, Option("a whole number", "N")] = 1
    """number of retries if an audit's process crashes or is killed, for example for lack of memory"""
    force: Flag = False
    """repeat all audits, even those whose target and options have not changed since the last run"""
    baseline: Directory = None
    """directory of an earlier fleet run: list regressions since that run, and exit with code 1 if there are any"""
    address: Annotated[str | None, Option(shown="ADDRESS")] = None
    """address of a Ray cluster on which to run the audits; `auto`: the cluster of this machine"""

    def run(self) -> int:
        from ..fleet import cluster, index, running, targets

        wanted = targets.read(self.targets)
        if self.baseline is not None and not self.baseline.is_dir():
            raise bad(f"{self.baseline} is no directory of an earlier fleet: name the --out of one")
        folder.check_directory(self.out)
        outcomes = {} if self.force else running.earlier_outcomes(self.out, wanted)
        jobs = self.jobs or max(running.PROCESSORS // 2, 1)
        tasks = [
            running.Task(target, self.out / target.name, self.timeout, self.retries, max(running.PROCESSORS // jobs, 1))
            for target in wanted
            if target.name not in outcomes
        ]

        def tell(line: str) -> None:
            if not self.quiet:
                print(line, file=sys.stderr, flush=True)

        def write() -> list[Row]:
            rows = index.rows_of(wanted, outcomes, self.out, self.baseline)
            folder.write(self.out, {INDEX: index.render(rows, self.baseline)})
            return rows

        def note(task: Task, outcome: Outcome) -> None:
            outcomes[task.target.name] = outcome
            running.keep(self.out, outcomes)
            how = "audited" if outcome.has_audit else f"failed: {outcome.said}"
            tell(f"  {len(outcomes)} of {len(wanted)}, {task.target.name}, {outcome.seconds:.0f} s, {how}")

        tell(f"fleet: {count(len(wanted), 'model')}, {len(outcomes)} audited before")
        write()
        try:
            if self.address is not None:
                cluster.run_all(tasks, self.address, note)
            else:
                running.run_all(tasks, jobs, note)
        finally:
            rows = write()
        looks = [(row, row.said or "; ".join(row.worse)) for row in rows]
        lines = [f"{row.name}: {row.state}, {printable(why)}\n" for row, why in looks if why]
        say(f"{index.headline(rows)}\n{''.join(lines)}Fleet    {self.out / INDEX}\n")
        return int(any(row.state in ("failed", "worse") or (row.findings or {}).get("error") for row in rows))
