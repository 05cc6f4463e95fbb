"""What happens without a plan: the user's own model all low, and what the rules alone would keep in FP32."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from ..capture.imitated import as_on
from ..criteria.criterion import FLOOR
from ..criteria.measure import Criteria
from ..isolation.answer import answer
from ..isolation.outputs import NamedTensors
from ..isolation.process import loose, under
from ..numerics.formats import dtype_of, runs
from ..raised import let_through
from ..records import Baseline, Batch, Plan, RulesOnly, Today
from ..verify import failure_of
from .choices import everything, ruled
from .modules import Modules
from .plans import NONE
from .problem import Problem
from .trial import Trial
from .verified import as_run, worst_of
from .workbench import Workbench


def baselines_of(
    bench: Workbench, strategies: Sequence[str], formats: Sequence[str], plain: Mapping[str, Plan] = NONE
) -> dict[str, Baseline]:
    """Plain autocast, plain cast, and beside each what the rules alone would do, with nothing measured.

    The first two are runs of the model itself on the inputs that plans are checked on. The last is no plan that anyone
    runs: the captured graph stands in for it, on those of the inputs that it is valid for; where the rules keep nothing,
    it is the plain one. plain: plans with everything low that were run, see `as_run`.
    """
    trial = bench.trial(bench.usable(bench.checks) or bench.usable(bench.subject.batches))
    found: dict[str, Baseline] = {}
    for problem in [bench.problem(strategy, fmt) for strategy in strategies for fmt in formats]:
        name, kept = problem.name, ruled(problem, bench.findings)
        ran = name in plain and plain[name].measured_error is not None
        if not ran:
            found[name] = _plain(bench, problem) if runs(problem.format) else _replayed(bench, problem, trial)
        else:
            found |= as_run({name: Baseline(None, False)}, {name: plain[name]})
        alone = found[name].measured_error, found[name].finite
        if "fp32" in kept.precision.values():
            alone = _measured(Modules(problem, trial, bench.max_error).error(kept))
        found[name] = replace(found[name], rules_only=RulesOnly(*alone, low_precision_flops=kept.low_flops))
    return found


def today_of(bench: Workbench) -> Today | None:
    """The model in FP32 under the caller's own flags, on the inputs that plans are checked on; None where it is what it is
    in IEEE arithmetic, as far as that is from itself."""
    allowed = loose(bench.flags, bench.device)
    if not allowed and not (bench.native and bench.flags.get("cudnn.benchmark")):
        return None
    references = bench.references(bench.checks)

    try:
        with under(bench.flags):
            found = [answer(bench.subject.model, batch, seed=bench.seed) for batch in bench.checks]
        worst = worst_of([bench.distance(*pair) for pair in zip(references, found, strict=True)])
    except Exception as error:
        let_through(error)
        return Today(allowed, None, False, failure_of(error))
    return None if worst <= FLOOR * bench.floor.error else Today(allowed, *_measured(worst))


def _plain(bench: Workbench, problem: Problem) -> Baseline:
    """The model with everything low, as a user of the strategy runs it without a plan."""
    try:
        low = [_plainly_low(bench, problem, batch) for batch in bench.checks]
        pairs = [*zip(bench.references(bench.checks), low, strict=True)]
        errors = [bench.distance(*pair) for pair in pairs]
    except Exception as error:
        let_through(error)
        return Baseline(None, False, failure_of(error))
    criteria = bench.distance.values(pairs) if isinstance(bench.distance, Criteria) else ()
    return Baseline(*_measured(worst_of(errors)), criteria=criteria)


def _replayed(bench: Workbench, problem: Problem, trial: Trial) -> Baseline:
    """Everything low in a format that torch does not compute in: the captured graph stands in for the model."""
    low = everything(problem, problem.format)
    return Baseline(*_measured(Modules(problem, trial, bench.max_error).error(low)))


def _plainly_low(bench: Workbench, problem: Problem, batch: Batch) -> NamedTensors:
    model = bench.subject.model
    plain, most = problem.how.without_plan(model, batch, dtype_of(problem.format)), bench.most

    @contextmanager
    def around() -> Iterator[None]:
        with as_on(bench.device, most), plain.calling():
            yield

    with plain.storing():
        return answer(model, plain.batch, seed=bench.seed, around=around)


def _measured(error: float) -> tuple[float | None, bool]:
    """What is kept of an error, and whether it is finite."""
    finite = math.isfinite(error)
    return (error if finite else None), finite
