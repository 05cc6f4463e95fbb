"""First-order attribution against brute force: each node alone low, all else FP32, the model run to its end."""

import math
import statistics
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, fx

import auditor
from auditor.isolation.outputs import tensor_outputs
from auditor.measure.measure import Measurement
from auditor.numerics.metrics import output_error
from auditor.records import Contribution
from tests.slow.models import LARGE, MODELS, specimen
from tests.support import brute_force
from tests.support.brute_force import spearman
from tests.support.subjects import FORMATS, effects_of, measurement_of

pytestmark = pytest.mark.slow

FLOOR = 1e-7
"""Errors below this, or below ten times what FP32 itself leaves open between two kernels, are not compared."""


class OneLow(brute_force.OneLow):
    """Also knows the products that only large models use."""

    products = (*brute_force.OneLow.products, "addmm", "bmm", "conv1d")


@dataclass(frozen=True)
class Attributed:
    """A model's measurement and the contributions of its nodes."""

    measured: Measurement
    contributions: dict[str, dict[str, Contribution]]

    def error(self, interpreter: fx.Interpreter) -> float:
        """Error of the outputs when `interpreter` runs the graph."""
        flat = [x.detach() if isinstance(x, Tensor) else x for x in self.measured.flat_inputs]
        with torch.no_grad():
            outputs = interpreter.run(*flat)
        return output_error([x.detach() for x in self.measured.outputs], tensor_outputs(outputs))

    def floor(self) -> float:
        """Below this, nothing is said: autograd's kernels and those without it differ by as much."""
        return max(FLOOR, 10 * self.error(fx.Interpreter(self.measured.capture.graph_module)))


@cache
def attributed(name: str) -> Attributed:
    chosen = specimen(name)
    measured = measurement_of(chosen.model, *chosen.args, **chosen.kwargs)
    return Attributed(measured, effects_of(measured))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", MODELS | LARGE)
def test_against_brute_force(name: str, fmt: str) -> None:
    found = attributed(name)
    graph_module, floor = found.measured.capture.graph_module, found.floor()
    nodes = [node.name for node in found.measured.capture.nodes.values() if node.floating][
        :: 4 if name == "convnext_tiny" else 1
    ]
    true = {node: found.error(OneLow(graph_module, node, fmt)) for node in nodes}
    kept = [node for node in nodes if true[node] > floor]
    predicted = {node: found.contributions[node][fmt].isolated for node in kept}
    ratios = {node: predicted[node] / true[node] for node in kept}
    rho = spearman([predicted[node] for node in kept], [true[node] for node in kept])
    twentieths = statistics.quantiles(ratios.values(), n=20)
    median, low, high = statistics.median(ratios.values()), twentieths[0], twentieths[-1]
    print(f"\n| {name} | {fmt} | {len(kept)} of {len(nodes)} | {rho:.3f} | {median:.2f} | {low:.2f} .. {high:.2f} |")
    for node in sorted(kept, key=lambda node: -abs(math.log(max(ratios[node], 1e-9))))[:5]:
        op = found.measured.capture.nodes[node].op
        print(f"    {node} ({op}): predicted {predicted[node]:.3g}, true {true[node]:.3g}")
    # What is left out must be small, and must have been predicted to be.
    assert all(found.contributions[node][fmt].isolated <= 4 * floor for node in nodes if node not in predicted)
    assert len(kept) >= 30
    assert rho >= 0.97
    assert 0.9 <= median <= 1.1
    assert low >= 0.4
    assert high <= 2.5


@pytest.mark.parametrize("name", MODELS | LARGE)
def test_the_whole_plan(name: str) -> None:
    chosen = specimen(name)
    audit = auditor.audit(chosen.model, chosen.args, kwargs=chosen.kwargs, device="cpu")
    low = [plan for plan in audit.plans.values() if any(scope.precision != "fp32" for scope in plan.scopes.values())]
    assert low
    missed = []
    for plan in low:
        assert plan.measured_error is not None, plan.verification
        ratio = plan.predicted_error / plan.measured_error
        print(
            f"\n| {name} | {plan.name} | {plan.predicted_error:.2e} | {plan.measured_error:.2e} | {ratio:.2f} |", end=""
        )
        if not 1 / 1.5 <= ratio <= 1.5:
            missed.append((plan.name, ratio))
    assert missed == []
