"""From the Pareto curve to one plan: the fastest point that holds when the graph is run under it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from .execute import PolicyInterpreter
from .numerics.kernels import UnsupportedInFormat
from .outputs import tensor_outputs
from .records import Batch, Capture, Finding, Plan, ScopeChoice, Verdict
from .solve import Candidate, Problem, candidates, must_stay_fp32
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
    """Bisection over the curve, begun where the prediction puts the budget. Everything FP32 needs no run."""
    fails, holds = -1, len(curve) - 1
    probe = next((i for i, point in enumerate(curve) if point.predicted_error <= budget), holds)
    probe = min(probe, holds - 1)
    while holds - fails > 1:
        if simulated_error(problem, curve[probe], trial) <= budget:
            holds, probe = probe, max(probe - 1, fails + 1)
        else:
            fails, probe = probe, (probe + holds + 1) // 2
        if not fails < probe < holds:
            probe = (fails + holds) // 2
    return curve[holds]


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
    reasons = _reasons(problem, findings)
    root = chosen.precision[""]
    scopes = {"": ScopeChoice(root, tuple(reasons.get("", ())) if root == "fp32" else ())}
    for owner in sorted(chosen.precision, key=lambda path: (path.count("."), path)):
        precision = chosen.precision[owner]
        if owner and precision != _inherited(owner, scopes):
            because = reasons.get(owner, ()) if precision == "fp32" else ()
            scopes[owner] = ScopeChoice(precision, tuple(because), _output(problem, owner, chosen.precision))
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


def _reasons(problem: Problem, findings: Sequence[Finding]) -> dict[str, list[str]]:
    """Per scope: rules that fired on its unsafe or sensitive nodes, then the worst node's own reason."""
    forced = must_stay_fp32(problem)
    reasons: dict[str, list[str]] = {}
    worst: dict[str, tuple[float, str]] = {}
    for name, node in problem.capture.nodes.items():
        verdict = problem.verdicts.get(name, Verdict("safe", ""))
        if verdict.verdict == "safe":
            continue
        weight = 1e9 if verdict.verdict == "unsafe" else 0.0
        contribution = problem.contributions.get(name)
        weight += min(contribution.isolated, 1e8) if contribution else 0.0
        if weight > worst.get(node.owner, (-1.0, ""))[0]:
            worst[node.owner] = (weight, f"{name} is {verdict.verdict}: {verdict.reason}")
        codes = {f.rule for f in findings if f.node == name and problem.format in f.formats}
        reasons.setdefault(node.owner, []).extend(sorted(codes - set(reasons.get(node.owner, []))))
    for owner, (_, text) in worst.items():
        reasons.setdefault(owner, []).append(text)
    for node in problem.capture.nodes.values():
        if node.owner not in reasons and node.owner not in forced:
            reasons[node.owner] = ["its share of the error is worth more than the time it would save"]
    return reasons
