"""The search for plans below 16 bits against all choices, or a long random search, on eight small models: in bits, and in
predicted time at the budget."""

import math
import random
from collections.abc import Callable

import pytest
from torch import Tensor, nn

from auditor.asked import validate
from auditor.capture.several import record_paths
from auditor.criteria.budget import budget_of
from auditor.features.quantization.choices import Choice, bits_of
from auditor.features.quantization.search import QuantizedPlans
from auditor.isolation import isolate
from auditor.isolation.process import ieee
from auditor.loading import from_object
from auditor.measure.calibrate import calibrate_paths
from auditor.measure.noise import noise_of
from auditor.measure.quantized import fits, layers_of
from auditor.measure.rerun import OutputMetric
from auditor.plan.context import MeasuredModel, PlanningContext, in_unit
from auditor.records.quantization import MIXED, QuantizedPlan
from auditor.rulebook.verdicts import judge
from auditor.settings import Settings
from tests.support.searched import MODELS

pytestmark = pytest.mark.slow

SCHEMES = ("int8", "int4", "fp8", "mxfp6", "nvfp4")
"""For each layer one of these, or 16 bits."""

RUNS = 200
"""Runs of one random search, for each measure; if there are no more choices, all of them are run."""

IDLE = 25
"""Changes in a row without an improvement, after which the random search starts again."""


def quantized_plans(model: nn.Module, x: Tensor, budget: float) -> tuple[QuantizedPlans, QuantizedPlan]:
    """The stages of an audit up to its plans of schemes, without a margin for unseen inputs, and the mixed plan."""
    subject, seed = from_object(model, (x,)), 0
    with ieee(), isolate(seed=seed):
        recordings = record_paths(subject, ("bf16",), seed)
        layers = layers_of(recordings.first.capture).values()
        fitting = [scheme for scheme in SCHEMES if any(fits(layer, scheme) for layer in layers)]
        asked = {"device": "cpu", "formats": ",".join((*fitting, "bf16")), "max_error": budget, "gpu": "B200"}
        options = validate(Settings, asked)
        limits = options.max_error, options.metric, options.criteria
        output_metric = OutputMetric(*budget_of(subject, recordings.first.capture, *limits, seed))
        captured, relative = calibrate_paths(recordings, subject, options.formats, seed, output_metric, options.schemes)
        noise = noise_of(recordings.first, subject, output_metric, seed, native=False)
        measured = in_unit(relative, output_metric.unit)
        judged = judge(captured, measured, options.formats, output_metric.budget, noise.measured)
        planning = PlanningContext.of(
            MeasuredModel(subject, captured, measured, options, output_metric, noise), judged, ()
        )
        making = QuantizedPlans(planning, margin=1.0)
        made = {plan.name: plan for plan in making.plans()}
    return making, made[MIXED]


class Judge:
    """Errors, bits and predicted seconds of choices. known: {choice: its error}."""

    def __init__(self, making: QuantizedPlans) -> None:
        self.making, self.known = making, dict[Choice, float]()
        self.options = [("", *group.squares) for group in making.groups]

    def layers(self, choice: Choice) -> dict[str, str]:
        groups = self.making.groups
        return {key: scheme for group, scheme in zip(groups, choice, strict=True) for key in group.keys}

    def error(self, choice: Choice) -> float:
        if choice not in self.known:
            self.known[choice] = self.making.run(self.layers(choice), self.making.planning.subject.batches).error
        return self.known[choice]

    def bits(self, choice: Choice) -> float:
        groups = self.making.groups
        total = sum(bits_of(scheme) * group.elements for group, scheme in zip(groups, choice, strict=True))
        return total / sum(group.elements for group in groups)

    def seconds(self, choice: Choice) -> float:
        return self.making._seconds(self.layers(choice))


def best_of_all(judge: Judge, price: Callable[[Choice], float], limit: float, own: Choice) -> Choice:
    """The cheapest choice within the limit: of all choices, or of many climbs, each of which changes the schemes of random
    groups while runs stay within the limit."""
    draw = random.Random(0)
    kept = ("",) * len(judge.options)
    found = [own, kept]
    left = RUNS
    while left > 0:
        at = draw.choice(found)
        idle = 0
        while left > 0 and idle < IDLE:
            idle += 1
            other = list(at)
            for place in draw.sample(range(len(at)), min(draw.choice((1, 1, 2, 3)), len(at))):
                other[place] = draw.choice(judge.options[place])
            choice = tuple(other)
            if price(choice) >= price(at):
                continue
            left -= choice not in judge.known
            if judge.error(choice) <= limit:
                at, idle = choice, 0
        left -= 1  # a climb costs a run, whatever it finds, so that the search ends
        found = sorted({*found, at}, key=price)[:8]
    return found[0]


@pytest.mark.parametrize("budget", [0.1, 0.03])
@pytest.mark.parametrize("build", MODELS)
def test_no_long_random_search_is_a_fifth_better(build: Callable[[], tuple[nn.Module, Tensor]], budget: float) -> None:
    model, x = build()
    making, plan = quantized_plans(model.eval(), x, budget)
    judge = Judge(making)
    own = tuple(plan.layers[group.keys[0]] for group in making.groups)
    assert plan.calibration_error <= budget
    number = math.prod(map(len, judge.options))
    for price in (judge.bits, judge.seconds):
        best = best_of_all(judge, price, budget, own)
        gap = price(own) / price(best) - 1
        print(f"{build.__name__}, {budget}, {price.__name__}: {gap:.1%} ({number:,} choices, {len(own)} groups)")
        assert gap <= 0.2, best
