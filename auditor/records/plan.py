"""What runs of the whole model gave; what a plan is, what it was predicted to cost, and how it held up in such runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ..paths import function_in
from .generation import Generated
from .written import FileField, MeasurementField, empty


@dataclass(frozen=True)
class CriterionValue:
    """What one criterion of the user's came to in a run."""

    output: Annotated[str, FileField("the output that it speaks of, or `the other outputs`, judged together")]
    kind: Annotated[str, FileField("what is measured of it (see [criteria](criteria.md))")]
    sign: Annotated[str, FileField("on which side of the limit it holds", choices=("<=", ">="))]
    limit: Annotated[float, FileField("the limit", exact=True)]
    value: Annotated[float | None, FileField("what was measured, worst run; `null`: nothing, or not finite")]
    share: Annotated[float | None, FileField("share of the limit that `value` takes; the largest is the error")]
    holds: Annotated[bool, FileField("whether it holds in every run, with and without gradients")]
    predicted: Annotated[
        float | None, FileField("of `top1`, `topk` and `flips`, what first order says of the plan; `null`: no form")
    ] = None


@dataclass(frozen=True)
class Today:
    """FP32 as the user's own flags have it, held against FP32 in IEEE arithmetic."""

    computed_in: Annotated[tuple[str, ...], FileField("what those flags let FP32 be computed in: `tf32`, `bf16`")]
    measured_error: Annotated[float | None, FileField("against IEEE FP32, worst batch; `null`: not finite or failed")]
    failure: Annotated[str | None, FileField("why it did not run")] = None


@dataclass(frozen=True)
class NonFinite:
    """The first operation of a low run that makes Inf or NaN of what is finite in FP32, and where the cause begins."""

    node: Annotated[str, FileField("the operation, by its name in the captured graph")]
    owner: Annotated[str, FileField("module of that operation")]
    op: Annotated[str, FileField("ATen overload of that operation")]
    source: Annotated[str | None, FileField("line that wrote it, as for operations")]
    value: Annotated[str, FileField("what it makes", choices=("NaN", "Inf"))]
    cause: Annotated[
        str,
        FileField(
            "why: `overflow` and `rounding` of the operation itself or of what it reads; `underflow`: a value that it"
            " reads went to zero; `cancellation`: a difference that it reads lost its digits, and with them its sign",
            choices=("overflow", "underflow", "cancellation", "rounding"),
        ),
    ]
    begins: Annotated[str, FileField("the operation at which that happens: the same one, or one upstream")]
    begins_owner: Annotated[str, FileField("module of that operation")]
    begins_op: Annotated[str, FileField("ATen overload of that operation")]
    begins_source: Annotated[str | None, FileField("line that wrote it")]
    rules: Annotated[tuple[str, ...], FileField("codes of the rules that fired on either of the two")] = ()
    batch: Annotated[int, FileField("the first batch in which it does, of those plans are checked on", least=1)] = 1


@dataclass(frozen=True)
class Times:
    """How long one forward took, over repeats."""

    median: Annotated[float, FileField("seconds of one forward", least=0)]
    low: Annotated[float, FileField("first quartile of the repeats", least=0)]
    high: Annotated[float, FileField("third quartile", least=0)]
    repeats: Annotated[int, FileField("how many were timed, after those that warm up", least=1)]
    speedup: Annotated[float | None, FileField("median of FP32 in IEEE arithmetic over this one's")] = None
    speedup_low: Annotated[float | None, FileField("FP32's first quartile over this one's third")] = None
    speedup_high: Annotated[float | None, FileField("FP32's third quartile over this one's first")] = None


@dataclass(frozen=True)
class Timed:
    """What one forward took, measured."""

    eager: Annotated[Times | None, FileField("run as it is; `null`: see `missing`")] = None
    compiled: Annotated[Times | None, FileField("under `torch.compile`; `null`: see `missing`")] = None
    cuda_graph: Annotated[Times | None, FileField("replayed as a CUDA graph; `null`: see `missing`")] = None
    memory: Annotated[int | None, FileField("peak bytes, all included; `null`: see `missing`", least=0)] = None
    memory_share: Annotated[float | None, FileField("`memory` over FP32's; `null` of FP32", least=0)] = None
    decides: Annotated[bool, FileField("whether the recommendation goes by `eager` and `memory`: on a GPU")] = False
    missing: Annotated[Mapping[str, str], FileField("why one of these is missing, by its name")] = empty()


@dataclass(frozen=True)
class Timing:
    """What times were taken on, and those of FP32."""

    device: Annotated[str, FileField("what ran: the GPU's name, or `cpu`")]
    batch: Annotated[int | None, FileField("entries along the first axis of the first tensor that the model was given")]
    threads: Annotated[int, FileField("how many threads torch had on the CPU", least=1)]
    fp32: Annotated[Timed, FileField("the model in FP32, in IEEE arithmetic")]
    fp32_today: Annotated[Timed | None, FileField("the same under the caller's own flags, such as TF32")] = None


DIRECTIONS = ("higher", "lower")
"""Which scores are the better ones."""


@dataclass(frozen=True)
class Evaluation:
    """The user's function, what it says of the FP32 model, and how much worse a plan may be."""

    function: Annotated[str, FileField("the function, as it was named")]
    better: Annotated[str, FileField("which scores are the better ones", choices=DIRECTIONS)]
    max_drop: Annotated[float | None, FileField("how much worse a plan may score; `null`: not judged", exact=True)]
    score: Annotated[float, FileField("of the FP32 model")]
    samples: Annotated[int | None, FileField("how many numbers it is the mean of; `null`: one was given", least=1)]
    of_mean: Annotated[str | None, FileField("the function of that mean that the score is; `null`: the mean itself")]
    calls: Annotated[int, FileField("calls of the model that one score takes", least=0)]


@dataclass(frozen=True)
class Score:
    """What the function says of the model under one plan."""

    value: Annotated[float | None, FileField("of the model under the plan; `null`: see `failure`")]
    difference: Annotated[float | None, FileField("`value` minus the FP32 model's score")] = None
    standard_error: Annotated[float | None, FileField("of `difference`, over pairs; `null`: fewer than two")] = None
    passed: Annotated[bool | None, FileField("whether it is within `max_drop`; `null`: none was given")] = None
    failure: Annotated[str | None, FileField("why there is no score, in one line")] = None

    @property
    def holds(self) -> bool:
        """Whether there is a score, and it is not worse than it may be."""
        return self.failure is None and self.passed is not False


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope."""

    precision: Annotated[str, FileField("`fp32`, or the plan's `format`")]
    output: Annotated[str, FileField("`keep`: what leaves it stays as it is", choices=("cast", "keep"))] = "cast"
    keep: Annotated[tuple[str, ...], FileField("torch functions kept FP32 in a low scope; `pow` is x ** 2 too")] = ()


@dataclass(frozen=True)
class Reason:
    """Why modules or operations do not run low under a plan, in one clause that holds for each of them."""

    kind: Annotated[
        str,
        FileField(
            "`unsafe`: an operation of it must not run low; `untested`: what it does low is not known; `conflict`: low, it "
            "would meet two dtypes; `budget`: lowering it alone breaks the budget; `margin`: that takes more of the budget "
            "than plans use; `no-gain`: lowering it alone gains nothing; `tied`: it shares a weight; `inherited`: FP32 "
            "reaches or leaves it; `author`: so it is written; `strategy`: the strategy runs it so by itself; "
            "`not-floating`: nothing in it has a precision",
            choices=tuple(
                "unsafe untested conflict budget margin no-gain tied inherited author strategy not-floating".split()
            ),
        ),
    ]
    words: Annotated[str, FileField("the same in one clause, with its evidence")]
    modules: Annotated[tuple[str, ...], FileField("modules in FP32 that it is about")] = ()
    operations: Annotated[tuple[str, ...], FileField("operations in low modules, and those without a precision")] = ()
    functions: Annotated[tuple[str, ...], FileField("functions that low modules keep: `module..function`")] = ()
    rules: Annotated[tuple[str, ...], FileField("codes of the rules that fired on what it is about")] = ()
    by: Annotated[str | None, FileField("the module or operation that decides, where it is another")] = None
    adds: Annotated[float | None, FileField("what lowering it alone adds to the error; `null`: it is forbidden")] = None
    left: Annotated[float | None, FileField("how much of the budget the plan leaves")] = None
    saves: Annotated[float | None, FileField("share of the plan's cost that lowering it alone saves")] = None
    ran: Annotated[bool, FileField("whether `adds` comes from a run; else it is predicted")] = False


@dataclass(frozen=True)
class Verification:
    """The emitted artefact, or the model with everything low, run for real: batches without gradients, the first with them."""

    measured_error: Annotated[float | None, FileField("worst without gradients; `null`: failed, Inf or NaN")] = None
    holds: Annotated[bool, FileField("whether the errors are within the budget, and every criterion holds")] = False
    inputs: Annotated[str, FileField("`held-out`: inputs no plan was made from", choices=("held-out", "audited"))] = (
        "audited"
    )
    execution: Annotated[str, FileField("`native`: on a GPU; `emulated`: on a CPU", choices=("native", "emulated"))] = (
        "emulated"
    )
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    joint: Annotated[float | None, FileField("relative L2 of all outputs, if `measured_error` is another")] = None
    criteria: Annotated[tuple[CriterionValue, ...], FileField("the criteria that were set, each with its value")] = ()
    apart: Annotated[Mapping[str, float], FileField("by output: errors over ten times that of all together")] = empty()
    with_gradients: Annotated[float | None, FileField("`measured_error` with gradients; `null`: not run")] = None
    ungraded: Annotated[str | None, FileField("what the FP32 model raises with gradients; `null`: nothing")] = None
    noise: Annotated[float | None, FileField("how far apart runs in FP32 were; errors are no better known")] = None
    floor: Annotated[float, FileField("error up to which it holds all the same: three times `noise`, or 0")] = 0.0
    nonfinite: Annotated[NonFinite | None, FileField("its first operation that is not finite; `null`: none is")] = None

    @property
    def finite(self) -> bool:
        """Whether it ran, and the outputs were finite."""
        return self.measured_error is not None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a forward pass needs."""

    weights: Annotated[int, FileField("parameters and buffers", least=0)]
    activations: Annotated[int, FileField("the most that inputs, results and low copies take at one time", least=0)]


@dataclass(frozen=True)
class KeptOperation:
    """One operation of an exported graph that stays FP32."""

    name: Annotated[str, FileField("in the exported graph")]
    op: Annotated[str, FileField("ATen overload")]
    kind: Annotated[
        str,
        FileField(
            "`unsafe`: it must not run low; `untested`: what it does low is not known; `refused`: it cannot run low; "
            "`budget`: its error would be worth more than its time; `no-gain`: lowering it alone saves nothing",
            choices=("unsafe", "untested", "refused", "budget", "no-gain"),
        ),
    ]
    because: Annotated[str, FileField("the same in one clause, with its evidence")]
    node: Annotated[str | None, FileField("its name in the captured graph; `null`: there is none")] = None


@dataclass(frozen=True)
class Onnx:
    """A program as an ONNX model."""

    file: Annotated[str, FileField("name of the file beside plan.json")]
    ends: Annotated[str, FileField("inputs and outputs: `fp32`, or `low`: the plan's", choices=("fp32", "low"))]
    nodes: Annotated[int, FileField("operations on floating values, without casts and constants", least=0)]
    high: Annotated[int, FileField("those of them that read or give FP32 where they could another format", least=0)]
    casts: Annotated[int, FileField("casts in the graph", least=0)]
    runtime: Annotated[str, FileField("what ran it, and its version")]
    error: Annotated[float | None, FileField("relative L2 of the runtime's outputs; `null`: it did not run")]
    program_error: Annotated[float | None, FileField("the same of the plan's own program")]
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    rounded_error: Annotated[float | None, FileField("with every value rounded to the format, as a GPU does")] = None


@dataclass(frozen=True)
class Program:
    """A plan as a program of its own: the exported graph with a precision for every operation."""

    file: Annotated[str, FileField("name of the file beside plan.json, read by `torch.export.load`")]
    operations: Annotated[int, FileField("operations of the graph that read FP32 values", least=0)]
    low: Annotated[int, FileField("those that run in the format", least=0)]
    casts: Annotated[int, FileField("conversions in the graph", least=0)]
    kept: Annotated[tuple[KeptOperation, ...], FileField("operations that stay FP32")] = ()
    fixed: Annotated[str | None, FileField("why it takes the audited batch size alone; `null`: it takes any")] = None
    onnx: Annotated[Onnx | None, FileField("the same as an ONNX model, where that was asked for")] = None


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with what it costs and how it held up."""

    name: Annotated[str, FileField("the same as its key in `plans`")]
    strategy: Annotated[str, FileField("`autocast`: torch.autocast; `cast`: weights stored low; `graph`: a program")]
    format: Annotated[str, FileField("name of the low format, such as `fp16`")]
    scopes: Annotated[Mapping[str, ScopeChoice], FileField("precision by module; others have the nearest one above")]
    predicted_error: Annotated[float, FileField("before anything was run: all roundings, in quadrature")] = math.nan
    low_precision_flops: Annotated[float, FileField("share of the FLOPs that run low", least=0, most=1)] = math.nan
    predicted_speedup: Annotated[float, FileField("over FP32, see [costs](method.md#what-a-choice-costs)")] = math.nan
    verification: Annotated[Verification | None, FileField("run of the patched model; `null`: not run")] = None
    note: Annotated[str, MeasurementField("what is to be said of it beside, in words")] = ""
    reasons: Annotated[tuple[Reason, ...], FileField("why modules and operations do not run low")] = ()
    least: Annotated[tuple[str, ...] | None, FileField("FP32 modules that have to be; `null`: not sought")] = None
    objective: Annotated[str, FileField("what the plan minimises", choices=("time", "memory", "flops"))] = "time"
    raised: Annotated[
        str,
        FileField(
            "what is raised to FP32 where the plan does not store it low, since the audited model came with it in "
            "FP16 or BF16: `none`; `inputs`; `weights`: parameters and buffers too; `attributes`: also tensors that "
            "modules hold without registering them; `kept`: nothing, since the forward casts to what it is stored in",
            choices=("none", "inputs", "weights", "attributes", "kept"),
        ),
    ] = "none"
    stored_low: Annotated[Mapping[str, int], FileField("by dtype: weights in it; `apply` refuses more")] = empty()
    reach: Annotated[float | None, FileField("if nothing is low: smallest error of a low run")] = None
    target: Annotated[str | None, FileField("the GPU that `predicted_speedup` is for")] = None
    memory: Annotated[MemoryUse | None, FileField("what one forward needs under the plan")] = None
    fp32_memory: Annotated[MemoryUse | None, FileField("the same without the plan")] = None
    program: Annotated[Program | None, FileField("what a plan of strategy `graph` is")] = None
    score: Annotated[Score | None, FileField("what the user's own function says of the model under it")] = None

    timed: Annotated[Timed | None, FileField("time and memory of one forward of the patched model")] = None
    generated: Annotated[Generated | None, FileField("tokens that it decodes; `null`: none were asked for")] = None

    @property
    def measured_error(self) -> float | None:
        """Of its artefact, worst batch; None where it was not run, failed, or is not finite."""
        return self.verification.measured_error if self.verification else None

    @property
    def verified(self) -> bool:
        """Whether its artefact was run, and is within the budget."""
        return self.verification is not None and self.verification.holds

    @property
    def holds(self) -> bool:
        """Whether it is verified, and the user's own score, where there is one, no worse than it may be."""
        return self.verified and (self.score is None or self.score.holds)

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """Modules in FP32 with something in them that has a precision; where no reasons are known, scopes in FP32."""
        if not self.reasons:
            return tuple(path for path, choice in self.scopes.items() if choice.precision == "fp32")
        return tuple(path for reason in self.reasons if reason.kind != "not-floating" for path in reason.modules)

    def reasons_of(self, path: str) -> tuple[Reason, ...]:
        """Why a scope, or what it keeps of functions, is not low."""
        here = {path, *(function_in(path, name) for name in self.scopes[path].keep)}
        return tuple(reason for reason in self.reasons if here.intersection((*reason.modules, *reason.functions)))

    @property
    def islands(self) -> int:
        """How many scopes have another precision than the root."""
        return sum(choice.precision != self.scopes[""].precision for choice in self.scopes.values())

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(module, function) of what stays FP32 in low scopes."""
        return tuple((path, name) for path, choice in self.scopes.items() for name in choice.keep)
