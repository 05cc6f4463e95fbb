"""The plans that are programs: solved operation by operation, saved, run in a fresh process and judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..errors import PlanError, first_line
from ..formats.table import runs
from ..plan.choose import MARGIN
from ..plan.plans import judged
from ..plan.workbench import Workbench
from ..raised import let_through
from ..records import Baseline, Plan, Program, ScopeChoice, Timing, Today
from ..strategies import GRAPHS
from ..verify import PROGRAM, Answers
from .artefact import Artefact, answers, artefact
from .cut import Network
from .exported import cannot, exported
from .kept import kept_of
from .lowered import lowered
from .needed import memory_in_fp32, memory_needed
from .operations import Seen, Table, low_flops, table_of
from .search import NONE, Choice, search, without
from .trial import Refused, Trial, fitting

ROUNDS = 3
"""Times a plan is made for less error, where its artefact is beyond the budget."""

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
    """A choice, the plan that it is, and its file."""

    choice: Choice
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
        targets = dict.fromkeys(tables, MARGIN * self.bench.max_error)
        found: dict[str, _Made] = {}
        for _ in range(ROUNDS):
            pending = {n: t for n, t in targets.items() if n not in found or not found[n].plan.verified}
            if not pending:
                break
            made = {name: self._made(name, strategy, tables[name], target) for name, target in pending.items()}
            found |= self._verified(made)
            targets = {
                name: _tightened(target, found[name].plan, self.bench.max_error) for name, target in targets.items()
            }
        return Planned(
            {name: each.plan for name, each in found.items()},
            {name: self._baseline(table) for name, table in tables.items()},
            {f"{name}{PROGRAM}": each.artefact.content for name, each in found.items()},
        )

    def _made(self, name: str, strategy: str, table: Table, target: float) -> _Made:
        self.tick(name.replace("_", " "))
        choice = search(table, None if self.bench.quick else self.trial, target)
        module = lowered(self.exported, choice.table, choice.low)
        file = artefact(module, self.exported)
        plan = self._plan(name, strategy, choice, file, target)
        needed = memory_needed(module, self.seen, choice.table, choice.low)
        return _Made(choice, replace(plan, memory=needed, fp32_memory=self.in_fp32), file)

    def _plan(self, name: str, strategy: str, choice: Choice, file: Artefact, target: float) -> Plan:
        table, network = choice.table, Network(choice.table)
        program = Program(
            f"{name}{PROGRAM}",
            len(table.operations),
            len(choice.low),
            file.casts,
            kept_of(network, choice, target, self.trial.runs(table.format)),
            file.fixed or None,
        )
        return Plan(
            name=name,
            strategy=strategy,
            format=table.format,
            scopes={"": ScopeChoice(table.format if choice.low else "fp32")},
            predicted_error=math.sqrt(network.price(choice.low).square),
            low_precision_flops=low_flops(table, choice.low),
            predicted_speedup=self._speedup(choice),
            objective=self.bench.objective,
            target=self.bench.gpu,
            program=program,
        )

    def _speedup(self, choice: Choice) -> float:
        """How many times faster than FP32 it is predicted to be, whatever the objective."""
        timed = replace(self.bench, objective="time")
        network = Network(
            choice.table if self.bench.objective == "time" else table_of(self.seen, choice.table.format, timed)
        )
        elapsed, slowest = network.price(choice.low).seconds, network.price(NONE).seconds
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


def _tightened(target: float, plan: Plan, max_error: float) -> float:
    """A target for the solver that is lower by as much as the artefact was over, and by half at least."""
    if plan.verified:
        return target
    return target / 4 if plan.measured_error is None else target * min(0.5, MARGIN * max_error / plan.measured_error)
