"""A plan, its predicted cost, and the results of running it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from ..paths import function_in
from .generation import TokenComparison
from .written import FileField, MeasurementField, empty

Execution = Annotated[str, FileField("`native`: on a GPU; `emulated`: on a CPU", choices=("native", "emulated"))]


@dataclass(frozen=True)
class CriterionValue:
    """The value of one of the user's criteria in a run."""

    output: Annotated[str, FileField("the output, or `the other outputs`, judged together")]
    kind: Annotated[str, FileField("the error measure (see [criteria](criteria.md))")]
    sign: Annotated[str, FileField("side of the limit on which it holds", choices=("<=", ">="))]
    limit: Annotated[float, FileField("the limit", exact=True)]
    value: Annotated[float | None, FileField("worst measured value; `null`: none, or not finite")]
    share: Annotated[float | None, FileField("`value` as a share of the limit; the largest share is the plan's error")]
    holds: Annotated[bool, FileField("whether it holds in every run, with and without gradients")]
    predicted: Annotated[float | None, FileField("first-order prediction of `top1`, `topk`, `flips`; `null`: none")] = (
        None
    )


@dataclass(frozen=True)
class Today:
    """FP32 with the user's own flags (such as TF32), compared with IEEE FP32."""

    computed_in: Annotated[tuple[str, ...], FileField("formats that those flags allow instead of FP32: `tf32`, `bf16`")]
    measured_error: Annotated[float | None, FileField("against IEEE FP32, worst batch; `null`: not finite or failed")]
    failure: Annotated[str | None, FileField("why it did not run")] = None


@dataclass(frozen=True)
class NonFinite:
    """The first operation of a low run that gives Inf or NaN where FP32 is finite, and the origin of the cause."""

    node: Annotated[str, FileField("the operation, by its name in the captured graph")]
    owner: Annotated[str, FileField("module of that operation")]
    op: Annotated[str, FileField("ATen overload of that operation")]
    source: Annotated[str | None, FileField("line that wrote it, as for operations")]
    value: Annotated[str, FileField("the value it produces", choices=("NaN", "Inf"))]
    cause: Annotated[
        str,
        FileField(
            "cause: `overflow` and `rounding` of the operation or its inputs; `underflow`: an input "
            "became zero; `cancellation`: an input, a difference, lost its digits and sign",
            choices=("overflow", "underflow", "cancellation", "rounding"),
        ),
    ]
    begins: Annotated[str, FileField("the operation with the cause: the same one, or one upstream")]
    begins_owner: Annotated[str, FileField("module of that operation")]
    begins_op: Annotated[str, FileField("ATen overload of that operation")]
    begins_source: Annotated[str | None, FileField("source line")]
    rules: Annotated[tuple[str, ...], FileField("codes of the rules that fired on either operation")] = ()
    batch: Annotated[int, FileField("number of the first batch with it", least=1)] = 1


@dataclass(frozen=True)
class Times:
    """Duration of one forward, over repeats."""

    median: Annotated[float, FileField("seconds of one forward", least=0)]
    low: Annotated[float, FileField("first quartile of the repeats", least=0)]
    high: Annotated[float, FileField("third quartile", least=0)]
    repeats: Annotated[int, FileField("number of timed repeats, after warm-up", least=1)]
    speedup: Annotated[float | None, FileField("speed-up: median of IEEE FP32 divided by this median")] = None
    speedup_low: Annotated[float | None, FileField("lower bound of the speed-up, from quartiles")] = None
    speedup_high: Annotated[float | None, FileField("upper bound of the speed-up, from quartiles")] = None


@dataclass(frozen=True)
class TimeAndMemory:
    """Measured time and memory of one forward."""

    eager: Annotated[Times | None, FileField("times of a plain call; `null`: see `missing`")] = None
    compiled: Annotated[Times | None, FileField("times under `torch.compile`; `null`: see `missing`")] = None
    cuda_graph: Annotated[Times | None, FileField("times of a CUDA graph replay; `null`: see `missing`")] = None
    memory: Annotated[int | None, FileField("peak bytes, including weights; `null`: see `missing`", least=0)] = None
    memory_share: Annotated[float | None, FileField("`memory` divided by FP32's; `null` for FP32", least=0)] = None
    decides: Annotated[bool, FileField("whether the recommendation uses `eager` and `memory`, as on a GPU")] = False
    missing: Annotated[Mapping[str, str], FileField("reasons for missing measurements, by name")] = empty()


@dataclass(frozen=True)
class Timing:
    """The conditions of the time measurements, and the times of FP32."""

    device: Annotated[str, FileField("the GPU's name, or `cpu`")]
    batch: Annotated[int | None, FileField("batch size: first dimension of the first input")]
    threads: Annotated[int, FileField("number of CPU threads of torch", least=1)]
    fp32: Annotated[TimeAndMemory, FileField("the model in FP32, in IEEE arithmetic")]
    fp32_today: Annotated[TimeAndMemory | None, FileField("the same under the caller's own flags, such as TF32")] = None


DIRECTIONS = ("higher", "lower")
"""Allowed values: which scores are better."""


@dataclass(frozen=True)
class Evaluation:
    """The user's scoring function, the FP32 model's score, and the largest acceptable loss."""

    function: Annotated[str, FileField("the function's name, as given")]
    better: Annotated[str, FileField("which scores are better", choices=DIRECTIONS)]
    max_drop: Annotated[float | None, FileField("largest acceptable loss of a plan; `null`: not judged", exact=True)]
    score: Annotated[float, FileField("score of the FP32 model")]
    samples: Annotated[int | None, FileField("number of values in the mean; `null`: a single value", least=1)]
    of_mean: Annotated[str | None, FileField("function applied to the mean; `null`: none")]
    calls: Annotated[int, FileField("number of model calls for one score", least=0)]


@dataclass(frozen=True)
class Score:
    """The score of the model under one plan."""

    value: Annotated[float | None, FileField("score of the model under the plan; `null`: see `failure`")]
    difference: Annotated[float | None, FileField("`value` minus the FP32 model's score")] = None
    standard_error: Annotated[float | None, FileField("of `difference`, over pairs; `null`: too few pairs")] = None
    passed: Annotated[bool | None, FileField("whether it is within `max_drop`; `null`: none was given")] = None
    failure: Annotated[str | None, FileField("why there is no score, in one line")] = None

    @property
    def holds(self) -> bool:
        """Whether there is a score, and its loss is acceptable."""
        return self.failure is None and self.passed is not False


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope."""

    precision: Annotated[str, FileField("`fp32`, or the plan's `format`")]
    output: Annotated[str, FileField("`keep`: its result is not converted", choices=("cast", "keep"))] = "cast"
    keep: Annotated[tuple[str, ...], FileField("torch functions kept FP32 in a low scope; `pow` includes x ** 2")] = ()


@dataclass(frozen=True)
class Reason:
    """Why modules or operations stay FP32 under a plan, in one clause that applies to each of them."""

    kind: Annotated[
        str,
        FileField(
            "`unsafe`: it contains an operation that must not run low; `untested`: its low-precision behavior is "
            "unknown; `conflict`: if low, it would get two dtypes; `budget`: running it low alone exceeds the error "
            "budget; `margin`: that would use the budget's safety margin; `no-gain`: running it low alone gains "
            "nothing; `tied`: it shares a weight; `inherited`: its inputs or results must be FP32; `author`: the "
            "model's code requires it; `strategy`: the strategy always runs it so; `not-floating`: it has no "
            "floating-point operation",
            choices=tuple(
                "unsafe untested conflict budget margin no-gain tied inherited author strategy not-floating".split()
            ),
        ),
    ]
    words: Annotated[str, FileField("the reason in one clause, with its evidence")]
    modules: Annotated[tuple[str, ...], FileField("FP32 modules with this reason")] = ()
    operations: Annotated[tuple[str, ...], FileField("operations in low modules, or without a precision")] = ()
    functions: Annotated[tuple[str, ...], FileField("functions kept FP32 in low modules: `module..function`")] = ()
    rules: Annotated[tuple[str, ...], FileField("codes of the rules that fired on them")] = ()
    by: Annotated[str | None, FileField("the module or operation that decides, if another")] = None
    adds: Annotated[float | None, FileField("error added by running it low alone; `null`: not possible")] = None
    left: Annotated[float | None, FileField("error budget that the plan leaves unused")] = None
    saves: Annotated[float | None, FileField("share of the plan's cost saved by running it low alone")] = None
    ran: Annotated[bool, FileField("whether `adds` was measured; else it is predicted")] = False


@dataclass(frozen=True)
class Verification:
    """Results of running the artefact, or the all-low model: batches without gradients, the first also with them."""

    measured_error: Annotated[float | None, FileField("worst run without gradients; `null`: failed, Inf or NaN")] = None
    holds: Annotated[bool, FileField("whether all errors and criteria are within their limits")] = False
    inputs: Annotated[
        str, FileField("`held-out`: inputs that no plan was derived from", choices=("held-out", "audited"))
    ] = "audited"
    execution: Execution = "emulated"
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    joint: Annotated[float | None, FileField("relative L2 of all outputs, unless `measured_error` is that")] = None
    criteria: Annotated[tuple[CriterionValue, ...], FileField("the criteria that were set, each with its value")] = ()
    apart: Annotated[Mapping[str, float], FileField("by output: errors over ten times the joint error")] = empty()
    with_gradients: Annotated[float | None, FileField("`measured_error` with gradients on; `null`: not run")] = None
    ungraded: Annotated[str | None, FileField("exception of the FP32 model with gradients on; `null`: none")] = None
    noise: Annotated[float | None, FileField("difference between FP32 runs, a bound on the accuracy of errors")] = None
    floor: Annotated[float, FileField("noise floor up to which errors are ignored: three times `noise`, or 0")] = 0.0
    nonfinite: Annotated[NonFinite | None, FileField("the first operation with Inf or NaN; `null`: none")] = None

    @property
    def finite(self) -> bool:
        """Whether it ran, and the outputs were finite."""
        return self.measured_error is not None


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a forward pass needs."""

    weights: Annotated[int, FileField("bytes of parameters and buffers", least=0)]
    activations: Annotated[int, FileField("peak bytes of inputs, results and low-precision copies", least=0)]


@dataclass(frozen=True)
class KeptOperation:
    """One operation of an exported graph that stays FP32."""

    name: Annotated[str, FileField("name in the exported graph")]
    op: Annotated[str, FileField("ATen overload")]
    kind: Annotated[
        str,
        FileField(
            "`unsafe`: it must not run low; `untested`: its low-precision behavior is unknown; `refused`: it cannot "
            "run low; `budget`: its error outweighs the time it saves; `no-gain`: running it low alone saves nothing",
            choices=("unsafe", "untested", "refused", "budget", "no-gain"),
        ),
    ]
    because: Annotated[str, FileField("the reason in one clause, with its evidence")]
    node: Annotated[str | None, FileField("its name in the captured graph; `null`: none")] = None


@dataclass(frozen=True)
class Onnx:
    """A program as an ONNX model."""

    file: Annotated[str, FileField("name of the file beside plan.json")]
    ends: Annotated[str, FileField("type of inputs and outputs: `fp32`, or `low`: the plan's", choices=("fp32", "low"))]
    nodes: Annotated[int, FileField("number of floating-point operations, without casts and constants", least=0)]
    high: Annotated[int, FileField("those of them in FP32", least=0)]
    casts: Annotated[int, FileField("number of casts in the graph", least=0)]
    runtime: Annotated[str, FileField("the runtime and its version")]
    error: Annotated[float | None, FileField("relative L2 of the runtime's outputs; `null`: it did not run")]
    program_error: Annotated[float | None, FileField("the same for the plan's exported program")]
    failure: Annotated[str | None, FileField("why it did not run, in one line")] = None
    rounded_error: Annotated[float | None, FileField("error with each value rounded to the format, as on a GPU")] = None


@dataclass(frozen=True)
class Program:
    """A plan as an exported graph with a precision for every operation."""

    file: Annotated[str, FileField("name of the file beside plan.json, read by `torch.export.load`")]
    operations: Annotated[int, FileField("number of operations with FP32 inputs in the exported graph", least=0)]
    low: Annotated[int, FileField("number of those that run in the format", least=0)]
    casts: Annotated[int, FileField("number of casts in the graph", least=0)]
    kept: Annotated[tuple[KeptOperation, ...], FileField("operations that stay FP32")] = ()
    fixed: Annotated[str | None, FileField("why the batch size is fixed; `null`: it is variable")] = None
    onnx: Annotated[Onnx | None, FileField("the program as an ONNX model, if requested")] = None


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with its predicted cost and measured results."""

    name: Annotated[str, FileField("its key in `plans`")]
    strategy: Annotated[str, FileField("`autocast`: torch.autocast; `cast`: weights stored low; `graph`: a program")]
    format: Annotated[str, FileField("name of the low format, such as `fp16`")]
    scopes: Annotated[Mapping[str, ScopeChoice], FileField("precision by module; others have their nearest parent's")]
    predicted_error: Annotated[float, FileField("predicted: root sum of squares of all rounding errors")] = math.nan
    low_precision_flops: Annotated[float, FileField("share of the FLOPs that run low", least=0, most=1)] = math.nan
    predicted_speedup: Annotated[float, FileField("[predicted](method.md#what-a-choice-costs), over FP32")] = math.nan
    verification: Annotated[Verification | None, FileField("results of running the artefact; `null`: not run")] = None
    note: Annotated[str, MeasurementField("notes, in words")] = ""
    reasons: Annotated[tuple[Reason, ...], FileField("why modules and operations stay FP32")] = ()
    least: Annotated[tuple[str, ...] | None, FileField("FP32 modules that must stay so; `null`: not determined")] = None
    objective: Annotated[str, FileField("what the plan minimizes", choices=("time", "memory", "flops"))] = "time"
    raised: Annotated[
        str,
        FileField(
            "which FP16 or BF16 tensors of the audited model become FP32 unless the plan stores them "
            "low: `none`; `inputs`; `weights`: parameters and buffers too; `attributes`: also "
            "unregistered tensors of modules; `kept`: none, since the forward casts to their dtype",
            choices=("none", "inputs", "weights", "attributes", "kept"),
        ),
    ] = "none"
    stored_low: Annotated[Mapping[str, int], FileField("by dtype: weights in it; `apply` rejects more")] = empty()
    reach: Annotated[float | None, FileField("if the plan has nothing low: smallest error of a low run")] = None
    target: Annotated[str | None, FileField("the GPU that `predicted_speedup` is for")] = None
    memory: Annotated[MemoryUse | None, FileField("memory of one forward under the plan")] = None
    fp32_memory: Annotated[MemoryUse | None, FileField("the same without the plan")] = None
    program: Annotated[Program | None, FileField("the exported program of a plan of strategy `graph`")] = None
    score: Annotated[Score | None, FileField("the user's score of the model under the plan")] = None
    timed: Annotated[TimeAndMemory | None, FileField("time and memory of one forward of the patched model")] = None
    generated: Annotated[TokenComparison | None, FileField("tokens decoded under the plan; `null`: none asked")] = None

    @property
    def measured_error(self) -> float | None:
        """Error of the artefact, worst batch; None if it was not run, failed, or is not finite."""
        return self.verification.measured_error if self.verification else None

    @property
    def is_verified(self) -> bool:
        """Whether the artefact was run and met the error budget."""
        return self.verification is not None and self.verification.holds

    @property
    def holds(self) -> bool:
        """Whether it is verified, and the user's score, if any, is acceptable."""
        return self.is_verified and (self.score is None or self.score.holds)

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """FP32 modules that contain operations or weights; without recorded reasons, FP32 scopes."""
        if not self.reasons:
            return tuple(path for path, choice in self.scopes.items() if choice.precision == "fp32")
        return tuple(path for reason in self.reasons if reason.kind != "not-floating" for path in reason.modules)

    def reasons_of(self, path: str) -> tuple[Reason, ...]:
        """The reasons why a scope, or a function in it, stays FP32."""
        here = {path, *(function_in(path, name) for name in self.scopes[path].keep)}
        return tuple(reason for reason in self.reasons if here.intersection((*reason.modules, *reason.functions)))

    @property
    def islands(self) -> int:
        """Number of scopes whose precision differs from the root's."""
        return sum(choice.precision != self.scopes[""].precision for choice in self.scopes.values())

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(module, function) for every function that stays FP32 in a low scope."""
        return tuple((path, name) for path, choice in self.scopes.items() for name in choice.keep)
