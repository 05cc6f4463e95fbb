"""The plans that are programs: solved operation by operation, saved, run in a fresh process, judged and scored."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from ..artefact.strategies import GRAPHS, SHIPPED
from ..errors import PlanError, first_line
from ..numerics.formats import runs
from ..plan.costs import memory_of
from ..plan.scores import InFp32
from ..plan.search import MARGIN, RUNS, choose, verified
from ..plan.verified import answered
from ..plan.workbench import Workbench
from ..records import Baseline, Memory, Plan, Program, ScopeChoice, Timing, Today
from ..verify import PROGRAM
from .choices import Choice, OperationRefused, Operations, Trial, kept_of, lowered, memory_needed
from .exported import Saved, cannot, exported, saved
from .operations import Table, table_of

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


def graphs_of(
    bench: Workbench, strategies: Sequence[str], formats: Sequence[str], tick: Tick, score: InFp32 | None = None
) -> Planned:
    """A plan for every format that torch computes in, verified on inputs it was not made from where there are any. score: of
    the FP32 model, where plans are to be scored too.

    Where the model cannot be exported that is said, and plans of other strategies stand alone.
    Raises: PlanError(slug="cannot-export") where there are no others.
    """
    wanted = [name for name in strategies if name in GRAPHS]
    if not wanted:
        return Planned()
    try:
        return _Stage(bench, tick).graphs(wanted[0], formats, score)
    except PlanError as error:
        if error.slug != "cannot-export" or len(wanted) == len(strategies):
            raise
        return Planned(said=(f"There is no plan of strategy {wanted[0]}: {error}",))


class _Stage:
    """One exported model, and what its plans have in common."""

    def __init__(self, bench: Workbench, tick: Tick) -> None:
        self.tick, subject = tick, bench.subject
        tick("exporting the model")
        self.exported = exported(subject.model, subject.batches[0])
        agrees = Trial(self.exported, bench).agrees
        if not agrees(subject.batches[0]):
            raise cannot("the graph that torch.export makes of the model does not answer as the model does")
        batches, held_out = (tuple(filter(agrees, some)) for some in (subject.batches, subject.held_out))
        if len(batches) + len(held_out) < len(subject.batches) + len(subject.held_out):
            bench = replace(bench, subject=replace(subject, batches=batches, held_out=held_out))
        self.bench, self.trial = bench, Trial(self.exported, bench)
        self.in_fp32 = memory_in_fp32(bench)

    def graphs(self, strategy: str, formats: Sequence[str], score: InFp32 | None) -> Planned:
        """All there is."""
        baselines, spaces = dict[str, Baseline](), dict[str, Operations]()
        for format in filter(runs, formats):
            name = f"{strategy}_{format}"
            table, baselines[name] = self._all_low(table_of(self.exported.graph_module.graph, format, self.bench))
            spaces[name] = Operations(table, self.trial)
        files = dict[str, bytes]()

        def make(name: str, limit: float) -> Choice:
            self.tick(name.replace("_", " "))
            return choose(spaces[name], limit, 0 if self.bench.options.quick else RUNS)

        def verify(chosen: Mapping[str, Choice]) -> dict[str, Plan]:
            plans = {}
            for name, choice in chosen.items():
                module = lowered(self.exported, spaces[name].table, choice.low)
                file = saved(module, self.exported)
                files[f"{name}{PROGRAM}"] = file.content
                plans[name] = self._plan(name, strategy, spaces[name], choice, file, memory_needed(module))
            return answered(self.bench, plans, partial(self.tick, "running the programs"), files)

        plans = verified(spaces, self.bench.max_error, make, verify, lambda name, plan: plan.verified)
        if score is not None:
            plans = score.under(plans, self.bench, files)
        return Planned(plans, baselines, files)

    def _all_low(self, table: Table) -> tuple[Table, Baseline]:
        """The table without what raises where everything is low that can be, and what that comes to."""
        low = table.can_be_low()
        while True:
            try:
                error = self.trial.error(table, low)
                return table, Baseline(error if math.isfinite(error) else None, math.isfinite(error))
            except OperationRefused as refused:
                name = refused.name
                if name not in low:
                    return table, Baseline(None, False, first_line(refused.said))
                if name in table.may_be_low():
                    kept = f"it does not run low: {refused}"[:200]
                    operation = replace(table.operations[name], kind="refused", kept=kept)
                    table = replace(table, operations={**table.operations, name: operation})
                low -= {name}

    def _plan(self, name: str, strategy: str, space: Operations, choice: Choice, file: Saved, needed: Memory) -> Plan:
        table = space.table
        kept = kept_of(space, choice, MARGIN * self.bench.max_error)
        counts = len(table.operations), len(choice.low), file.casts
        return Plan(
            name=name,
            strategy=strategy,
            format=table.format,
            scopes={"": ScopeChoice(table.format if choice.low else "fp32")},
            predicted_error=choice.predicted_error,
            low_precision_flops=table.low_flops(choice.low),
            predicted_speedup=self._speedup(space, choice),
            objective=self.bench.options.objective,
            target=self.bench.options.figures,
            program=Program(f"{name}{PROGRAM}", *counts, kept, file.fixed or None),
            memory=needed,
            fp32_memory=self.in_fp32,
        )

    def _speedup(self, space: Operations, choice: Choice) -> float:
        """How many times faster than FP32 it is predicted to be, whatever the objective."""
        bench = replace(self.bench, options=self.bench.options.having(objective="time"))
        table = table_of(self.exported.graph_module.graph, space.table.format, bench)
        (elapsed, _), (slowest, _) = table.price(choice.low), table.price(frozenset())
        return slowest / elapsed if elapsed else 1.0


def memory_in_fp32(bench: Workbench) -> Memory:
    """What the model needs in FP32, which every other plan of the audit is held against too."""
    format = next(iter(bench.contributions))
    nothing_low = bench.problem(SHIPPED[0], format).resolve(lambda owner: "fp32")
    return memory_of(bench.capture, bench.costs, nothing_low, format)
