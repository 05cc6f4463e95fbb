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
import math
import random
import statistics
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.asked import validate, with_rules
from auditor.capture.several import record_paths
from auditor.isolation import isolate
from auditor.isolation.process import ieee
from auditor.loading import from_object, in_eval
from auditor.loading.placement import place_subject
from auditor.measure.calibrate import calibrate_paths
from auditor.measure.noise import noise_of
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from auditor.plan.quantized import QuantizedPlans
from auditor.plan.units import in_unit, yardstick_of
from auditor.plan.workbench import Workbench
from auditor.records.quantization import QuantizedPlan
from auditor.rulebook.verdicts import judge as judge_verdicts
from auditor.settings import Settings
from benchmarks.harness import Row, in_process_of_its_own, report
from benchmarks.quantized_models import MODELS, Case

INSTALL = "pip install --no-deps nvidia-modelopt==0.47.0 pulp==3.3.2 omegaconf==2.4.0 antlr4-python3-runtime==4.9.3"
"""Without their dependencies, which are there or for GPUs; best in an environment of its own."""
METHODS = ("gradient", "kl_div")
STEP, FINE = 0.5, 0.02
"""Steps of the bits that ModelOpt is asked for: everywhere, and next to the criterion."""
SHUFFLES = 5
"""Random rankings, of which the median counts."""

Layers = Mapping[str, str]
"""{module: scheme, or "" for 16 bits}."""


def quantized_weight(weight: Tensor, scheme: str) -> Tensor:
    """[out, in, *kernel] -> the same; rows are output channels, and blocks lie along the input channels."""
    moved = weight.movedim(1, -1)
    return fake_quantize(moved.flatten(1), SCHEMES[scheme].weight).values.view(moved.shape).movedim(-1, 1)


def quantized_input(x: Tensor, scheme: str, convolves: bool) -> Tensor:
    """A convolution sums over positions, so its input has one scale where a linear layer's has one per row."""
    by = SCHEMES[scheme].activation
    assert by is not None
    moved = x.movedim(1, -1) if convolves else x
    by = replace(by, block=(0, 0)) if convolves and by.block == (1, 0) else by
    made = fake_quantize(moved.reshape(-1, moved.shape[-1]), by).values.view(moved.shape)
    return made.movedim(-1, 1) if convolves else made


@dataclass
class Judge:
    """Measures choices in plain PyTorch, on the calibration and on the held-out inputs: the larger error counts."""

    case: Case
    schemes: Sequence[str]
    known: dict[tuple[str, ...], float] = field(default_factory=dict)
    weights: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules, self.options = dict[str, nn.Module](), dict[str, tuple[str, ...]]()
        for name, module in self.case.model.named_modules():
            if not isinstance(module, nn.Linear | nn.Conv2d) and type(module).__name__ != "Conv1D":
                continue
            rows, *rest = _upright(module, module.weight).shape
            kind = "convolution" if isinstance(module, nn.Conv2d) else "linear"
            fitting = [s for s in self.schemes if SCHEMES[s].fits(kind, rows * math.prod(rest[1:]), rest[0])]
            self.modules[name] = module
            self.options[name] = tuple(sorted(fitting, key=lambda s: SCHEMES[s].weight.bits))
        self.numbers = {name: module.weight.numel() for name, module in self.modules.items()}
        self.reference = self.outputs({})

    def bits(self, layers: Layers) -> float:
        """Mean bits per weight; 16 where not quantized."""
        widths = {name: SCHEMES[layers[name]].weight.bits if layers.get(name) else 16.0 for name in self.modules}
        return sum(widths[name] * number for name, number in self.numbers.items()) / sum(self.numbers.values())

    def error(self, layers: Layers) -> float:
        """The value of the criterion."""
        key = tuple(layers.get(name, "") for name in self.modules)
        if key not in self.known:
            pairs = zip(self.outputs(layers), self.reference, strict=True)
            self.known[key] = max(self._difference(output.double(), expected.double()) for output, expected in pairs)
        return self.known[key]

    def _difference(self, output: Tensor, reference: Tensor) -> float:
        if not self.case.kl:
            return float((output - reference).norm() / reference.norm())
        rows, expected = (x.flatten(0, -2).log_softmax(-1) for x in (output, reference))
        return float(F.kl_div(rows, expected, log_target=True, reduction="batchmean"))

    @torch.no_grad()
    def outputs(self, layers: Layers) -> list[Tensor]:
        """The outputs on both inputs with quantized layers; the model is as before afterwards."""
        with contextlib.ExitStack() as stack:
            for name, scheme in layers.items():
                if not scheme:
                    continue
                module = self.modules[name]
                if (name, scheme) not in self.weights:
                    made = quantized_weight(_upright(module, module.weight.data), scheme)
                    self.weights[name, scheme] = _upright(module, made)
                stack.callback(setattr, module.weight, "data", module.weight.data)
                module.weight.data = self.weights[name, scheme]
                if SCHEMES[scheme].activation is not None:
                    hook = module.register_forward_pre_hook(partial(_quantize_first, scheme))
                    stack.callback(hook.remove)
            return [self.case.model(*args) for args in (self.case.args, self.case.others)]


def _upright(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight with output channels first; GPT-2's have them last."""
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _quantize_first(scheme: str, module: nn.Module, args: Any) -> Any:
    return (quantized_input(args[0], scheme, isinstance(module, nn.Conv2d)), *args[1:])


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
    given = quantizer.backend_extra_args
    with torch.no_grad():
        plain = x.detach()
        of_weight = given["of"] == "weight"
        made = (
            quantized_weight(plain, given["scheme"])
            if of_weight
            else quantized_input(plain, given["scheme"], given["of"] == "image")
        )
    return x + (made - plain) if x.requires_grad else made


class ModelOpt:
    """One search of `auto_quantize`, which `layers` solves again for any number of bits. seconds: processor time; forwards,
    backwards: passes of the model that scored it, in which the gradient method runs every layer in every scheme."""

    def __init__(self, judge: Judge, method: str, groups: Sequence[Sequence[str]]) -> None:
        from modelopt.torch.quantization import auto_quantize
        from modelopt.torch.quantization.algorithms import AutoQuantizeSearcher
        from modelopt.torch.quantization.nn.modules import tensor_quantizer

        if not tensor_quantizer.is_registered_quant_backend("auditor"):
            tensor_quantizer.register_quant_backend("auditor", _fake_quantize)
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
    that measured layers or choices; seconds: processor time."""

    plan: QuantizedPlan
    rank: Mapping[tuple[str, ...], float]
    runs: int
    seconds: float


def plan_for(judge: Judge, limit: float) -> Planned:
    """The audit up to its plan of all schemes, without the plans of BF16."""
    case = judge.case
    own: Row = {"criteria": f"output: kl <= {limit:.17g}"} if case.kl else {"max_error": limit}
    formats = ",".join((*judge.schemes, "bf16"))
    options = with_rules(validate(Settings, {"device": "cpu", "formats": formats, **own}))
    subject, seed = from_object(case.model, case.args), options.seed
    start = time.process_time()
    with ieee(), isolate(seed=seed), in_eval(subject.model):
        subject = place_subject(replace(subject, held_out=((case.others, {}),)), options.where, seed)
        recordings = record_paths(subject, options.formats, seed)
        yardstick = yardstick_of(subject, options, recordings.first.capture)
        captured, relative = calibrate_paths(recordings, subject, options.formats, seed, yardstick, options.schemes)
        noise = noise_of(recordings.first.capture, subject, yardstick, seed, native=False)
        measured = in_unit(relative, yardstick.unit)
        judged = judge_verdicts(captured, measured, options.formats, yardstick.budget, noise.found)
        bench = Workbench(subject, captured, measured, judged, (), options, yardstick, noise)
        making = QuantizedPlans.of(bench)
        plan = making.plans()[-1]
    seconds = time.process_time() - start
    rank = {}
    for group in making.groups:
        smallest = min(group.options.values(), key=lambda one: one.bits)
        rank[group.keys] = smallest.square / (16 * group.elements - smallest.bits)
    measurements = sum(one.decided_by == "re-run" for one in measured.quantized.values())
    return Planned(plan, rank, measurements + plan.runs, seconds)


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
    report("modelopt", [row for each in found for row in each], COLUMNS, {"modelopt": version("nvidia-modelopt")})


if __name__ == "__main__":
    main()
