"""From the Pareto curve to one plan: the fastest point that holds when the graph is run under it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .execute import PolicyInterpreter
from .islands import savings
from .numerics.kernels import UnsupportedInFormat
from .outputs import tensor_outputs
from .problem import FORBIDDEN, Problem
from .records import Batch, Capture, Finding, Plan, ScopeChoice
from .solve import Candidate, between, candidates, evaluate
from .strategies import Running, plain, running

MARGIN = 0.8
"""Share of the budget a plan may use on the inputs it is made from: other inputs deserve some room."""

Distance = Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], float]


@dataclass(frozen=True)
class Trial:
    """One model on one batch, its FP32 outputs, and the measure of distance that the budget speaks of."""

    capture: Capture
    model: nn.Module
    batch: Batch
    reference: Sequence[torch.Tensor]
    distance: Distance

    def error(self, how: Running) -> float:
        """Distance of a low run of the graph from the reference. Raises: UnsupportedInFormat where an operation refuses."""
        interpreter = PolicyInterpreter(
            self.capture, how.setting, placeholder_precision=how.placeholder_precision, literals=how.literals
        )
        with torch.no_grad():
            outputs = interpreter.run(*self.capture.bind(self.model, self.batch))
        return self.distance(self.reference, tensor_outputs(outputs))


def make_plan(problem: Problem, trial: Trial, budget: float, findings: Sequence[Finding]) -> Plan:
    """The fastest candidate whose simulated error stays within `budget`.

    Candidates run from everything low to everything FP32, so a bisection needs few runs; the last one always holds.
    """
    curve = candidates(problem)
    chosen = _fastest_that_holds(problem, curve, trial, budget)
    slowest = max(curve, key=lambda point: point.seconds).seconds
    return Plan(
        name=f"{problem.strategy}_{problem.format}",
        strategy=problem.strategy,
        format=problem.format,
        scopes=scopes_of(problem, chosen, findings),
        predicted_error=chosen.predicted_error,
        low_precision_flops=chosen.low_flops,
        predicted_speedup=slowest / chosen.seconds if chosen.seconds else 1.0,
        pareto=tuple((point.predicted_error, point.seconds / slowest if slowest else 1.0) for point in curve),
    )


def _fastest_that_holds(problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float) -> Candidate:
    """First over the curve, then between the last point that fails and the first that holds."""
    found = _bisect(problem, curve, trial, budget)
    if found == 0:
        return curve[0]
    finer = between(problem, curve[found - 1], curve[found])
    return finer[_bisect(problem, finer, trial, budget)]


def _bisect(problem: Problem, curve: Sequence[Candidate], trial: Trial, budget: float) -> int:
    """Index of the first point that holds; begun where the prediction puts it. The last one is known to hold."""
    fails, holds = -1, len(curve) - 1
    probe = next((i for i, point in enumerate(curve) if point.predicted_error <= budget), holds)
    probe = min(probe, holds - 1)
    while holds - fails > 1:
        if _allowed(curve[probe]) and simulated_error(problem, curve[probe], trial) <= budget:
            holds, probe = probe, max(probe - 1, fails + 1)
        else:
            fails, probe = probe, (probe + holds + 1) // 2
        if not fails < probe < holds:
            probe = (fails + holds) // 2
    return holds


def _allowed(point: Candidate) -> bool:
    """Whether no unsafe node runs low: that one run happens to hold does not make it safe."""
    return point.predicted_error < math.sqrt(FORBIDDEN)


def simulated_error(problem: Problem, candidate: Candidate, trial: Trial) -> float:
    """Error of the captured graph, every node run as the candidate's precisions ask; inf where an operation refuses."""
    precision: Callable[[str], str] = lambda owner: candidate.precision.get(owner, "fp32")  # noqa: E731
    try:
        return trial.error(running(problem.capture, problem.strategy, precision, problem.format))
    except UnsupportedInFormat:
        return float("inf")


def plain_error(capture: Capture, strategy: str, fmt: str, trial: Trial) -> float:
    """Error without a plan: everything under autocast, or everything cast. Raises: UnsupportedInFormat where it cannot run."""
    return trial.error(running(capture, strategy, plain(fmt), fmt))


def scopes_of(problem: Problem, chosen: Candidate, findings: Sequence[Finding]) -> dict[str, ScopeChoice]:
    """The table of scopes: the root, and every module whose precision differs from that of the module above it."""
    scopes: dict[str, ScopeChoice] = {}
    saved = savings(problem, chosen)
    for owner in sorted(chosen.precision, key=lambda path: (path.count(".") + bool(path), path)):
        precision = chosen.precision[owner]
        if not owner or precision != _inherited(owner, scopes):
            because = _because(problem, chosen, owner, findings) if precision == "fp32" else ()
            cost = saved[owner] if precision == "fp32" else None
            scopes[owner] = ScopeChoice(precision, because, _output(problem, owner, chosen.precision), cost)
    return scopes


def _inherited(path: str, scopes: Mapping[str, ScopeChoice]) -> str:
    while path:
        path = path.rpartition(".")[0]
        if path in scopes:
            return scopes[path].precision
    return scopes[""].precision


def _output(problem: Problem, owner: str, precision: Mapping[str, str]) -> str:
    """keep: what leaves an FP32 island is read by FP32 scopes alone, or is an output of the model."""
    if precision[owner] != "fp32":
        return "cast"
    inside = {name for name, node in problem.capture.nodes.items() if _within(node.owner, owner)}
    outside = [
        node.owner
        for name, node in problem.capture.nodes.items()
        if name not in inside and any(source in inside for source in node.inputs)
    ]
    return "keep" if all(precision.get(reader, "fp32") == "fp32" for reader in outside) else "cast"


def _within(path: str, scope: str) -> bool:
    return path == scope or path.startswith(f"{scope}.")


def _because(problem: Problem, chosen: Candidate, owner: str, findings: Sequence[Finding]) -> tuple[str, ...]:
    """Rules that fired on the scope's unsafe and sensitive nodes, then the worst node's own reason, or the price."""
    names = [name for name, node in problem.capture.nodes.items() if node.owner == owner]
    marked = [name for name in names if problem.verdicts[name].verdict in ("unsafe", "sensitive")]
    codes = sorted({f.rule for f in findings if f.node in marked and problem.format in f.formats})
    if not marked:
        return (*codes, _price(problem, chosen, owner))
    worst = max(marked, key=lambda name: (problem.verdicts[name].verdict == "unsafe", _weight(problem, name)))
    verdict = problem.verdicts[worst]
    return (*codes, f"{worst} is {verdict.verdict}: {verdict.reason}")


def _weight(problem: Problem, name: str) -> float:
    contribution = problem.contributions.get(name)
    return contribution.isolated if contribution is not None else 0.0


def _price(problem: Problem, chosen: Candidate, owner: str) -> str:
    """What lowering one FP32 scope would do to the plan."""
    lowered = evaluate(problem, {**chosen.precision, owner: problem.format})
    if lowered.predicted_error >= math.sqrt(FORBIDDEN):
        return "it must share the precision of a scope that stays FP32"
    saved = 1 - lowered.seconds / chosen.seconds if chosen.seconds else 0.0
    change = f"the predicted error from {chosen.predicted_error:.2g} to {lowered.predicted_error:.2g}"
    return f"lowering it would take {change}, and " + (f"save {saved:.1%} of the time" if saved > 0 else "save no time")
