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
        tick("exporting the model")
        return _planned(_trial(bench), wanted[0], formats, tick, score)
    except PlanError as error:
        if error.slug != "cannot-export" or len(wanted) == len(strategies):
            raise
        return Planned(said=(f"There is no plan of strategy {wanted[0]}: {error}",))


def _trial(bench: Workbench) -> Trial:
    """The exported model, and those batches on which it answers as the model does."""
    subject = bench.subject
    trial = Trial(exported(subject.model, subject.batches[0]), bench)
    if not trial.agrees(subject.batches[0]):
        raise cannot("the graph that torch.export makes of the model does not answer as the model does")
    batches, held_out = (tuple(filter(trial.agrees, some)) for some in (subject.batches, subject.held_out))
    if len(batches) + len(held_out) == len(subject.batches) + len(subject.held_out):
        return trial
    return replace(trial, bench=replace(bench, subject=replace(subject, batches=batches, held_out=held_out)))


def _planned(trial: Trial, strategy: str, formats: Sequence[str], tick: Tick, score: InFp32 | None) -> Planned:
    bench = trial.bench
    baselines, spaces, files = dict[str, Baseline](), dict[str, Operations](), dict[str, bytes]()
    for format in filter(runs, formats):
        table, baseline = _all_low(trial, table_of(trial.exported.graph_module.graph, format, bench))
        spaces[f"{strategy}_{format}"], baselines[f"{strategy}_{format}"] = Operations(table, trial), baseline

    def make(name: str, limit: float) -> Choice:
        tick(name.replace("_", " "))
        return choose(spaces[name], limit, 0 if bench.options.quick else RUNS)

    def verify(chosen: Mapping[str, Choice]) -> dict[str, Plan]:
        plans = {}
        for name, choice in chosen.items():
            module = lowered(trial.exported, spaces[name].table, choice.low)
            file = saved(module, trial.exported)
            files[f"{name}{PROGRAM}"] = file.content
            plans[name] = _plan(name, strategy, trial, spaces[name], choice, file, memory_needed(module))
        return answered(bench, plans, partial(tick, "running the programs"), files)

    plans = verified(spaces, bench.max_error, make, verify, lambda name, plan: plan.verified)
    return Planned(score.under(plans, bench, files) if score else plans, baselines, files)


def _all_low(trial: Trial, table: Table) -> tuple[Table, Baseline]:
    """The table without what raises where everything is low that can be, and what that comes to."""
    low = table.can_be_low()
    while True:
        try:
            error = trial.error(table, low)
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


def _plan(
    name: str, strategy: str, trial: Trial, space: Operations, choice: Choice, file: Saved, needed: Memory
) -> Plan:
    table, bench = space.table, trial.bench
    kept = kept_of(space, choice, MARGIN * bench.max_error)
    in_time = replace(bench, options=bench.options.having(objective="time"))
    seconds = table_of(trial.exported.graph_module.graph, table.format, in_time)
    (elapsed, _), (slowest, _) = seconds.price(choice.low), seconds.price(frozenset())
    return Plan(
        name=name,
        strategy=strategy,
        format=table.format,
        scopes={"": ScopeChoice(table.format if choice.low else "fp32")},
        predicted_error=choice.predicted_error,
        low_precision_flops=table.low_flops(choice.low),
        predicted_speedup=slowest / elapsed if elapsed else 1.0,
        objective=bench.options.objective,
        target=bench.options.figures,
        program=Program(
            f"{name}{PROGRAM}", len(table.operations), len(choice.low), file.casts, kept, file.fixed or None
        ),
        memory=needed,
        fp32_memory=memory_in_fp32(bench),
    )


def memory_in_fp32(bench: Workbench) -> Memory:
    """What the model needs in FP32, which every other plan of the audit is held against too."""
    format = next(iter(bench.contributions))
    nothing_low = bench.problem(SHIPPED[0], format).resolve(lambda owner: "fp32")
    return memory_of(bench.capture, bench.costs, nothing_low, format)
