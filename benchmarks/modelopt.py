"""Quantization plans against ModelOpt's `auto_quantize`: the fewest bits that meet the same criterion on held-out inputs.

python -m benchmarks.modelopt [MODEL ...] [--packages DIR]

Both tools choose a scheme, or 16 bits, for the same groups of the same layers, from the same calibration inputs, in the same
arithmetic: ModelOpt's quantizers call `fake_quantize`. One judge, which uses neither tool, measures all choices.
ModelOpt takes a number of bits, so it is asked for ever fewer until the criterion fails. `INSTALL` says how to install it.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import json
import logging
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import Tensor, nn

from auditor.asked import validate
from auditor.capture.several import record_paths
from auditor.criteria.budget import budget_of
from auditor.features.quantization.choices import bits_of
from auditor.features.quantization.search import QuantizedPlans
from auditor.isolation import in_eval, isolate
from auditor.isolation.process import ieee
from auditor.loading import from_object
from auditor.loading.placement import place_subject
from auditor.measure.calibrate import calibrate_paths
from auditor.measure.noise import noise_of
from auditor.measure.rerun import OutputMetric
from auditor.numerics.schemes import SCHEMES
from auditor.plan.context import MeasuredModel, PlanningContext, in_unit
from auditor.records.quantization import QuantizedPlan
from auditor.rulebook.verdicts import judge as judge_verdicts
from auditor.settings import Settings
from benchmarks.harness import Row, in_process_of_its_own, report
from benchmarks.quantized_models import MODELS, Judge, Layers, quantized_input, quantized_weight

INSTALL = "pip install --no-deps nvidia-modelopt==0.47.0 pulp==3.3.2 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3"
"""Without their dependencies, which are there or for GPUs; best in an environment of its own."""
METHODS = ("gradient", "kl_div")
STEP, FINE = 0.5, 0.02
"""Steps of the bits that ModelOpt is asked for: everywhere, and next to the criterion."""
SHUFFLES = 5
"""Random rankings, of which the median counts."""


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    logging.disable(logging.ERROR)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        yield


def format_of(scheme: str) -> dict[str, Any]:
    """ModelOpt's configuration of a scheme: its quantizers call `fake_quantize`, with the scheme's bits per weight."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend("auditor"):
        tensor_quantizer.register_quant_backend("auditor", _fake_quantize)
    weight, activation = SCHEMES[scheme].weight, SCHEMES[scheme].activation

    def entry(of: str, **more: str) -> dict[str, Any]:
        own = {"backend": "auditor", "backend_extra_args": {"scheme": scheme, "of": of}}
        name = "*weight_quantizer" if of == "weight" else "*input_quantizer"
        return {"quantizer_name": name, "cfg": {"num_bits": 8, "axis": None, "type": "dynamic", **own}, **more}

    entries = [{"quantizer_name": "*", "enable": False}, entry("weight")]
    if activation is not None:
        entries += [entry("rows"), entry("image", parent_class="nn.Conv2d")]
    return {"quant_cfg": entries, "algorithm": "max", "effective_bits": weight.bits}


def _fake_quantize(x: Tensor, quantizer: Any) -> Tensor:
    """The backend that ModelOpt calls; gradients pass as if nothing were rounded."""
    with torch.no_grad():
        scheme, of = quantizer.backend_extra_args["scheme"], quantizer.backend_extra_args["of"]
        plain = x.detach()
        made = quantized_weight(plain, scheme) if of == "weight" else quantized_input(plain, scheme, of == "image")
    return made + (x - plain) if x.requires_grad else made


class ModelOpt:
    """One search of `auto_quantize`, which `layers` solves again for any number of bits. seconds: processor time; forwards,
    backwards: passes of the model that scored it, in which the gradient method runs every layer in every scheme."""

    def __init__(self, judge: Judge, method: str, groups: Sequence[Sequence[str]]) -> None:
        from modelopt.torch.quantization import auto_quantize
        from modelopt.torch.quantization.algorithms import AutoQuantizeSearcher

        group = {name: "+".join(names) for names in groups for name in names}
        spaces = [
            {
                "module_name_patterns": [name for name, one in judge.options.items() if one == options],
                "quantization_formats": [format_of(scheme) for scheme in options],
            }
            for options in {*judge.options.values()}
        ]
        AutoQuantizeSearcher.quant_grouping_rules[:] = [lambda _, name: group.get(name)]
        self.forwards = self.backwards = 0
        case = judge.case
        generator = torch.Generator().manual_seed(0)

        def forward(model: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
            self.forwards += 1
            result: Tensor = model(*args)
            return result

        def loss(output: Tensor, _: Any) -> Tensor:
            self.backwards += 1
            return case.loss(output, generator)

        start = time.process_time()
        with _quietly():
            _, self.state = auto_quantize(
                copy.deepcopy(case.model),
                constraints={"effective_bits": 8.0},
                quantization_formats=[format_of(scheme) for scheme in judge.schemes],
                module_search_spaces=spaces,
                data_loader=[case.args],
                forward_step=forward,
                loss_func=loss,
                num_calib_steps=1,
                num_score_steps=1,
                method=method,
            )
        self.seconds = time.process_time() - start

    def layers(self, bits: float) -> Layers:
        """What `auto_quantize` chooses within so many bits per weight."""
        from modelopt.torch.quantization.algorithms import get_auto_quantize_config

        with _quietly():
            made = get_auto_quantize_config(self.state, {"effective_bits": bits})
        chosen = {}
        for one in made["quant_cfg"]:
            name, _, of = one["quantizer_name"].rpartition(".")
            if of == "weight_quantizer" and one["enable"]:
                chosen[name] = one["cfg"]["backend_extra_args"]["scheme"]
        return chosen


NATIVE = {
    "fp8": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int8_weights": "INT8_WEIGHT_ONLY_CFG",
    "int4": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
}
"""ModelOpt's own formats that are nearest to schemes; MX and NVFP4 need a GPU even to simulate."""


def native_formats() -> Row:
    """For a random layer [256, 512], by scheme: share of the weights that ModelOpt's own arithmetic rounds otherwise, relative
    L2 error of its weights and of ours; and whether its result equals the judge's if its quantizers call `fake_quantize`."""
    import modelopt.torch.quantization as mtq

    torch.manual_seed(0)
    layer, x, found = nn.Linear(512, 256), torch.randn(16, 512), Row()
    for scheme, name in NATIVE.items():
        with _quietly(), torch.no_grad():
            weight, ours = layer.weight, quantized_weight(layer.weight, scheme)
            native = mtq.quantize(copy.deepcopy(layer), getattr(mtq, name), lambda model: model(x))
            theirs = native.weight_quantizer(weight)
            called = mtq.quantize(copy.deepcopy(layer), format_of(scheme), lambda model: model(x))(x)
            given = x if SCHEMES[scheme].activation is None else quantized_input(x, scheme, convolves=False)
            same = torch.equal(called, nn.functional.linear(given, ours, layer.bias))
            errors = [float((one - weight).norm() / weight.norm()) for one in (theirs, ours)]
            differ = float(((theirs - ours).abs() > 1e-5 * weight.abs().max()).double().mean())
        found[scheme] = {"differ": differ, "their error": errors[0], "our error": errors[1], "equal if called": same}
    return found


def fewest(judge: Judge, tool: ModelOpt, limits: Sequence[float], least: float) -> list[tuple[float, float]]:
    """(bits, error) of the choice with the fewest bits within each limit, among those for bits in steps, and then by
    bisection. least: bits of the smallest choice."""
    found = {16.0: (16.0, 0.0)}

    def ask(budget: float) -> float:
        layers = tool.layers(budget)
        found[budget] = judge.bits(layers), judge.error(layers)
        return found[budget][1]

    budget = least + 1e-6
    while budget < 16 and not ask(budget) <= min(limits):
        budget += STEP
    for limit in limits:
        high = min(budget for budget, (_, error) in found.items() if error <= limit)
        low = max((budget for budget in found if budget < high), default=high)
        while high - low > FINE:
            middle = (low + high) / 2
            low, high = (low, middle) if ask(middle) <= limit else (middle, high)
    return [min(one for one in found.values() if one[1] <= limit) for limit in limits]


@dataclass
class Planned:
    """Our plan for a limit. rank: squared effect per bit saved of each group with the fewest bits; runs: passes of the model
    that measured layers or choices, for all plans; seconds: processor time."""

    plan: QuantizedPlan
    rank: Mapping[tuple[str, ...], float]
    runs: int
    seconds: float


def plan_for(judge: Judge, limit: float) -> Planned:
    """The audit up to its plan of all schemes, without the plans of BF16."""
    case = judge.case
    own: Row = {"criteria": f"output: kl <= {limit:.17g}"} if case.kl else {"max_error": limit}
    formats = ",".join((*judge.schemes, "bf16"))
    options = validate(Settings, {"device": "cpu", "formats": formats, **own})
    subject, seed = from_object(case.model, case.args), options.seed
    start = time.process_time()
    with ieee(), isolate(seed=seed), in_eval(subject.model):
        subject = place_subject(replace(subject, held_out=((case.others, {}),)), options.where, seed)
        recordings = record_paths(subject, options.formats, seed)
        limits = options.max_error, options.metric, options.criteria
        output_metric = OutputMetric(*budget_of(subject, recordings.first.capture, *limits, options.seed))
        captured, relative = calibrate_paths(recordings, subject, options.formats, seed, output_metric, options.schemes)
        noise = noise_of(recordings.first, subject, output_metric, seed, native=False)
        measured = in_unit(relative, output_metric.unit)
        judged = judge_verdicts(captured, measured, options.formats, output_metric.budget, noise.measured)
        model = MeasuredModel(subject, captured, measured, options, output_metric, noise)
        planning = PlanningContext.of(model, judged, ())
        making = QuantizedPlans(planning, margin=1.0)  # ModelOpt keeps none
        plans = making.plans()
    seconds = time.process_time() - start
    rank = {}
    for group in making.groups:
        smallest = min(group.squares, key=bits_of)
        rank[group.keys] = group.squares[smallest] / (16 - bits_of(smallest)) / group.elements
    measurements = sum(one.decided_by == "re-run" for one in measured.quantized.values())
    return Planned(plans[-1], rank, measurements + sum(plan.runs for plan in plans), seconds)


def ranked(judge: Judge, order: Sequence[Sequence[str]], bits: float) -> float:
    """Error if groups get fewer bits in this order, as long as the mean is at least `bits`: each group the wider scheme, then
    each the narrower one."""
    layers = dict.fromkeys(judge.modules, "")
    for step in (-1, 0):
        for group in order:
            changed = layers | {name: judge.options[name][step] for name in group}
            layers = changed if judge.bits(changed) >= bits - 1e-9 else layers
    return judge.error(layers)


def compared(name: str) -> list[Row]:
    """A row for each choice of schemes and each criterion."""
    case, rows = MODELS[name](), list[Row]()
    case.model.eval().requires_grad_(True)
    for schemes in case.choices:
        judge = Judge(case, schemes)
        smallest = {module: options[0] for module, options in judge.options.items()}
        worst = judge.error(smallest)
        limits = [worst * (share**2 if case.kl else share) for share in case.limits]
        ours = [plan_for(judge, limit) for limit in limits]
        groups = list(ours[0].rank)
        assert {key for group in groups for key in group} == {*judge.modules}
        theirs: dict[str, Row] = {}
        for method in METHODS:
            judge.known.clear()
            tool = ModelOpt(judge, method, groups)
            start = time.process_time()
            found = fewest(judge, tool, limits, judge.bits(smallest))
            spent = tool.seconds + time.process_time() - start
            passes = tool.forwards + tool.backwards + len(judge.known)
            theirs[method] = {"found": found, "scored": tool.seconds, "seconds": spent, "runs": passes}
        for i, (limit, mine) in enumerate(zip(limits, ours, strict=True)):
            order = sorted(groups, key=lambda group: mine.rank[group])
            shuffled = [random.Random(seed).sample(order, len(order)) for seed in range(SHUFFLES)]
            bits = mine.plan.effective_bits
            row: Row = {
                "model": name,
                "schemes": ", ".join(schemes),
                "criterion": f"{'kl' if case.kl else 'rel_l2'} <= {limit:.2g}",
                "limit": limit,
                "ours": bits,
                "our error": judge.error(mine.plan.layers),
                "told": max(mine.plan.calibration_error, mine.plan.held_out_error or 0.0),
                "random": statistics.median(ranked(judge, each, bits) for each in shuffled) / limit,
                "inverted": ranked(judge, order[::-1], bits) / limit,
                "our ranking": ranked(judge, order, bits) / limit,
                "seconds": mine.seconds,
                "runs": mine.runs,
                "layers": len(judge.modules),
                "groups": len(groups),
            }
            for method, each in theirs.items():
                row[method], row[f"{method} error"] = each["found"][i]
                row |= {f"{method} {key}": each[key] for key in ("scored", "seconds", "runs")}
            rows.append(row)
    return rows


COLUMNS = {
    "model": "",
    "schemes": "",
    "criterion": "",
    "ours": ".2f",
    "gradient": ".2f",
    "kl_div": ".2f",
    "our error": ".2g",
    "random": ".1f",
    "inverted": ".1f",
    "runs": "d",
    "gradient runs": "d",
    "kl_div runs": "d",
    "seconds": ".0f",
    "gradient seconds": ".0f",
    "kl_div seconds": ".0f",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--packages", metavar="DIR", default="", help="where the packages of the models are installed")
    parser.add_argument("--measure", metavar="MODEL", help="one model, as JSON")
    options = parser.parse_args()
    if options.packages:
        sys.path.append(options.packages)
    if options.measure:
        print(json.dumps(compared(options.measure)))
        return
    place = ("--packages", options.packages) if options.packages else ()
    found = [in_process_of_its_own("benchmarks.modelopt", "--measure", name, *place) for name in options.models]
    report(
        "modelopt",
        [row for each in found for row in each],
        COLUMNS,
        {"modelopt": version("nvidia-modelopt"), "native": native_formats()},
    )


if __name__ == "__main__":
    main()
