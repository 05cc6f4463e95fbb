"""A plan run twice: the patched model under the emulation, and the recording's replay under the plan's policy."""

import copy
import random

import torch
from torch import Tensor, nn

from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy
from auditor.isolation.outputs import tensor_outputs
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.records import Batch, Capture, Plan, ScopeChoice
from auditor.verify.running import run_patched
from tests.support.problems import owners_of, tied_owners

Labels = dict[str, str]
Answer = list[Tensor] | str
"""Tensors, or why there are none."""


def everything(capture: Capture, fmt: str) -> Labels:
    """What a user gets without a plan."""
    return dict.fromkeys(owners_of(capture), fmt)


def drawn(capture: Capture, strategy: str, fmt: str, rnd: random.Random) -> Labels:
    """Any choice of precisions that the strategy allows."""
    labels = {owner: rnd.choice([fmt, "fp32"]) for owner in owners_of(capture)}
    for group in tied_owners(capture) if strategy == "cast" else ():
        labels |= dict.fromkeys(group, labels[group[0]])
    return labels


def plan_of(capture: Capture, strategy: str, fmt: str, labels: Labels) -> Plan:
    """The plan that gives every owner its precision, with the scopes that have to be listed."""
    wrapped = Policy(capture, strategy, lambda owner: labels.get(owner, "fp32"), fmt).wrapped
    scopes = {
        path: ScopeChoice(boundary.precision, output="keep" if boundary.keeps else "cast")
        for path, boundary in wrapped.items()
    }
    return Plan(f"{strategy}_{fmt}", strategy, fmt, scopes, 0.0, 1.0, 1.0)


def emulated_answer(
    model: nn.Module, capture: Capture, batch: Batch, strategy: str, fmt: str, labels: Labels
) -> Answer:
    """What the model says that follows the plan, run as a GPU would run it."""
    patched = apply_plan(copy.deepcopy(model), plan_table(plan_of(capture, strategy, fmt, labels)))
    try:
        return run_patched(patched, [batch], "cpu")[0]
    except Exception as error:
        return _reason(error)


def replayed_answer(
    model: nn.Module, capture: Capture, batch: Batch, strategy: str, fmt: str, labels: Labels
) -> Answer:
    """What the recording says under the plan's policy."""
    how = Policy(capture, strategy, lambda owner: labels.get(owner, "fp32"), fmt)
    interpreter = Executor(capture.graph_module, how)
    try:
        with torch.no_grad():
            return tensor_outputs(interpreter.run(*capture.bind(model, batch)))
    except UnsupportedInFormat as error:
        return _reason(error)


def difference(one: Answer, other: Answer) -> float:
    """Largest relative L2 distance of two answers; 0 where both refuse, infinite where only one does or shapes differ.

    Entries that are infinite or NaN must be so in both.
    """
    if isinstance(one, str) or isinstance(other, str):
        return 0.0 if isinstance(one, str) and isinstance(other, str) else float("inf")
    if [x.shape for x in one] != [x.shape for x in other]:
        return float("inf")
    return max((_distance(a.double(), b.double()) for a, b in zip(one, other, strict=True)), default=0.0)


def _distance(a: Tensor, b: Tensor) -> float:
    finite = torch.isfinite(a)
    if not torch.equal(finite, torch.isfinite(b)):
        return float("inf")
    a, b = a[finite], b[finite]
    distance, size = float((a - b).norm()), float(b.norm())
    return 0.0 if distance == 0 else distance / size if size else float("inf")


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:160]}"
