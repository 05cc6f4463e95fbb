"""The plans that are programs: solved operation by operation, saved, run in a fresh process and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..artefact.strategies import GRAPHS
from ..errors import PlanError, first_line
from ..numerics.formats import runs
from ..plan.search import MARGIN, RUNS, choose, verified
from ..plan.verified import judged
from ..plan.workbench import Workbench
from ..raised import let_through
from ..records import Baseline, Plan, Program, ScopeChoice, Timing, Today
from ..verify import PROGRAM, Answers
from .artefact import Artefact, answers, artefact
from .cut import Network
from .exported import cannot, exported
from .kept import kept_of
from .lowered import lowered
from .needed import memory_in_fp32, memory_needed
from .operations import Seen, Table, low_flops, table_of
from .search import Choice, Operations, without
from .trial import Refused, Trial, fitting

Tick = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """plans, baselines: by name; files: programs among them, by the names of the files. said: what else is to be told.

    fp32_today, timing: see Audit.
    """

    plans: Mapping[str, Plan] = field(default_factory=dict)
    baselines: Mapping[str, Baseline] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    said: tuple[str, ...] = ()
    fp32_today: Today | None = None
    timing: Timing | None = None

    def beside(self, baselines: Mapping[str, Baseline], plans: Mapping[str, Plan]) -> Planned:
        """These after others."""
        return replace(self, baselines={**baselines, **self.baselines}, plans={**plans, **self.plans})


@dataclass(frozen=True)
class _Made:
    """A plan, and its file."""

    plan: Plan
    artefact: Artefact


def graphs_of(bench: Workbench, strategies: Sequence[str], formats: Sequence[str], tick: Tick) -> Planned:
    """A plan for every format that torch computes in, verified on inputs it was not made from where there are any.

    Where the model cannot be exported that is said, and plans of other strategies stand alone.
    Raises: PlanError(slug="cannot-export") where there are no others.
    """
    wanted = [name for name in strategies if name in GRAPHS]
    if not wanted:
        return Planned()
    try:
        return _Stage(bench, tick).graphs(wanted[0], formats)
    except PlanError as error:
        if error.slug != "cannot-export" or len(wanted) == len(strategies):
            raise
        return Planned(said=(f"There is no plan of strategy {wanted[0]}: {error}",))


class _Stage:
    """One exported model, and what its plans have in common."""

    def __init__(self, bench: Workbench, tick: Tick) -> None:
        self.bench, self.tick = bench, tick
        tick("exporting the model")
        self.exported = exported(bench.subject.model, bench.subject.batches[0])
        self.batches = fitting(self.exported, bench, bench.subject.batches)
        if not self.batches or self.batches[0] is not bench.subject.batches[0]:
            raise cannot("the graph that torch.export makes of the model does not answer as the model does")
        held_out = tuple(fitting(self.exported, bench, bench.subject.held_out))
        alike = len(held_out) == len(bench.subject.held_out)
        self.judging = bench if alike else replace(bench, subject=replace(bench.subject, held_out=held_out))
        self.seen = Seen(self.exported, self.batches[0], bench)
        self.trial = Trial(self.exported, bench, self.batches)
        self.in_fp32 = memory_in_fp32(bench)

    def graphs(self, strategy: str, formats: Sequence[str]) -> Planned:
        """All there is."""
        tables = {f"{strategy}_{fmt}": table_of(self.seen, fmt, self.bench) for fmt in formats if runs(fmt)}
        spaces = {name: Operations(table, self.trial) for name, table in tables.items()}
        found: dict[str, _Made] = {}

        def make(name: str, limit: float) -> Choice:
            self.tick(name.replace("_", " "))
            return spaces[name].without_refused(choose(spaces[name], limit, 0 if self.bench.quick else RUNS))

        def verify(chosen: Mapping[str, Choice]) -> dict[str, Plan]:
            made = {name: self._made(name, strategy, spaces[name], choice) for name, choice in chosen.items()}
            found.update(self._verified(made))
            return {name: found[name].plan for name in chosen}

        verified(spaces, self.bench.max_error, make, verify, lambda name, plan: plan.verified)
        return Planned(
            {name: each.plan for name, each in found.items()},
            {name: self._baseline(table) for name, table in tables.items()},
            {f"{name}{PROGRAM}": each.artefact.content for name, each in found.items()},
        )

    def _made(self, name: str, strategy: str, space: Operations, choice: Choice) -> _Made:
        module = lowered(self.exported, space.table, choice.low)
        file = artefact(module, self.exported)
        plan = self._plan(name, strategy, space, choice, file)
        needed = memory_needed(module, self.seen, space.table, choice.low)
        return _Made(replace(plan, memory=needed, fp32_memory=self.in_fp32), file)

    def _plan(self, name: str, strategy: str, space: Operations, choice: Choice, file: Artefact) -> Plan:
        table = space.table
        program = Program(
            f"{name}{PROGRAM}",
            len(table.operations),
            len(choice.low),
            file.casts,
            kept_of(space, choice, MARGIN * self.bench.max_error),
            file.fixed or None,
        )
        return Plan(
            name=name,
            strategy=strategy,
            format=table.format,
            scopes={"": ScopeChoice(table.format if choice.low else "fp32")},
            predicted_error=choice.predicted_error,
            low_precision_flops=low_flops(table, choice.low),
            predicted_speedup=self._speedup(space, choice),
            objective=self.bench.objective,
            target=self.bench.gpu,
            program=program,
        )

    def _speedup(self, space: Operations, choice: Choice) -> float:
        """How many times faster than FP32 it is predicted to be, whatever the objective."""
        network = space.network
        if self.bench.objective != "time":
            network = Network(table_of(self.seen, space.table.format, replace(self.bench, objective="time")))
        elapsed, slowest = network.price(choice.low).seconds, network.price(frozenset()).seconds
        return slowest / elapsed if elapsed else 1.0

    def _verified(self, made: Mapping[str, _Made]) -> dict[str, _Made]:
        """Each with what its file answers in a fresh process, on the inputs that plans are judged on."""
        bench = self.judging
        batches = bench.subject.held_out or tuple(self.batches)
        expected = Answers([bench.reference(batch) for batch in batches], bench.graded)
        self.tick("running the programs")
        given = answers(bench, {name: each.artefact for name, each in made.items()}, batches, self._waiting)
        return {
            name: replace(each, plan=judged(bench, each.plan, expected, given[name])) for name, each in made.items()
        }

    def _waiting(self) -> None:
        self.tick("running the programs")

    def _baseline(self, table: Table) -> Baseline:
        """The graph with everything low that can be."""
        while True:
            try:
                error = self.trial.error(table, table.can_be_low())
                return Baseline(error if math.isfinite(error) else None, math.isfinite(error))
            except Refused as refused:
                if refused.name not in table.can_be_low():
                    return Baseline(None, False, first_line(refused.said))
                table = without(table, refused)
            except Exception as error:
                let_through(error)
                return Baseline(None, False, first_line(error))
