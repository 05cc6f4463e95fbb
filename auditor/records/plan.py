"""A plan, its predicted cost, and the results of running it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Annotated

from .generation import TokenComparison
from .paths import FP32_OUTPUT, function_in
from .written import FileField, MeasurementField, empty

Execution = Annotated[
    str,
    FileField(
        "`native`: by the kernels of `device`; `emulated`: on a CPU that emulates a GPU", choices=("native", "emulated")
    ),
]


@dataclass(frozen=True)
class CriterionValue:
    """The value of one of the user's criteria in a run."""

    output: Annotated[str, FileField("name of the output, or `the other outputs`, which are judged together")]
    kind: Annotated[str, FileField("the error measure (see [criteria](criteria.md))")]
    sign: Annotated[str, FileField("whether values must be at most or at least the limit", choices=("<=", ">="))]
    limit: Annotated[float, FileField("the limit", exact=True)]
    value: Annotated[float | None, FileField("worst measured value; `null`: not measured, or not finite")]
    share: Annotated[float | None, FileField("share of the limit that the error uses; the largest is the plan's error")]
    holds: Annotated[bool, FileField("whether the criterion holds in every run, with and without gradients")]
    predicted: Annotated[
        float | None, FileField("first-order prediction of `top1`, `topk` or `flips`; `null`: no prediction")
    ] = None
    entries: Annotated[
        int | None,
        FileField("for `flips`: number of the output's entries; `null`: another measure, or several outputs"),
    ] = None


@dataclass(frozen=True)
class Today:
    """FP32 with the user's own flags (such as TF32), compared with IEEE FP32."""

    computed_in: Annotated[tuple[str, ...], FileField("formats that the flags allow instead of FP32: `tf32`, `bf16`")]
    measured_error: Annotated[float | None, FileField("error against IEEE FP32; `null`: not finite or failed")]
    failure: Annotated[str | None, FileField("why the run failed; `null`: it succeeded")] = None


INPUT = "input"
"""`NonFinite.begins_op` if an input of the model is the cause."""


@dataclass(frozen=True)
class NonFinite:
    """The first operation of a low-precision run that returns Inf or NaN although FP32 is finite, and its cause."""

    node: Annotated[str, FileField("the operation, by its name in the captured graph")]
    owner: Annotated[str, FileField("module of the operation `node`")]
    op: Annotated[str, FileField("ATen overload of the operation `node`")]
    source: Annotated[str | None, FileField("source line as `file:line`; `null`: unknown")]
    value: Annotated[str, FileField("the non-finite value that `node` returns", choices=("NaN", "Inf"))]
    cause: Annotated[
        str,
        FileField(
            "`overflow` or `rounding`: of the operation or its inputs; `underflow`: an input became "
            "zero; `cancellation`: an input is a difference that lost its digits and its sign",
            choices=("overflow", "underflow", "cancellation", "rounding"),
        ),
    ]
    begins: Annotated[str, FileField("the cause: the operation `node`, an earlier operation, or an input of the model")]
    begins_owner: Annotated[str, FileField("module of the operation `begins`")]
    begins_op: Annotated[str, FileField("ATen overload of the operation `begins`; `input`: an input of the model")]
    begins_source: Annotated[str | None, FileField("source line of the operation `begins`")]
    batch: Annotated[int, FileField("number of the first batch with Inf or NaN", least=1)] = 1


@dataclass(frozen=True)
class Times:
    """Time of one forward, measured in several repeats, in seconds; speedups relative to IEEE FP32."""

    median: Annotated[float, FileField("median seconds of one forward", least=0)]
    low: Annotated[float, FileField("first quartile of the repeats, in seconds", least=0)]
    high: Annotated[float, FileField("third quartile of the repeats, in seconds", least=0)]
    repeats: Annotated[int, FileField("number of timed repeats, after warm-up", least=1)]
    speedup: Annotated[float | None, FileField("median of IEEE FP32 divided by `median`")] = None
    speedup_low: Annotated[float | None, FileField("lower bound of `speedup`, from the quartiles")] = None
    speedup_high: Annotated[float | None, FileField("upper bound of `speedup`, from the quartiles")] = None


@dataclass(frozen=True)
class TimeAndMemory:
    """Time and peak memory of one forward, or the reason why a measurement is missing."""

    eager: Annotated[Times | None, FileField("times of a plain call; `null`: not measured")] = None
    compiled: Annotated[Times | None, FileField("times under `torch.compile`; `null`: not measured")] = None
    cuda_graph: Annotated[Times | None, FileField("times of a CUDA graph replay; `null`: not measured")] = None
    memory: Annotated[int | None, FileField("peak bytes, including weights; `null`: not measured", least=0)] = None
    memory_share: Annotated[float | None, FileField("`memory` divided by FP32's; `null` for FP32", least=0)] = None
    decides: Annotated[
        bool, FileField("whether `eager` and `memory` decide the recommendation; only in native runs")
    ] = False
    missing: Annotated[Mapping[str, str], FileField("by measurement: why time or memory is missing")] = empty()


@dataclass(frozen=True)
class Timing:
    """The conditions of the time and memory measurements, and their results in FP32."""

    device: Annotated[str, FileField("the GPU's name; `cpu` for the CPU of the audit")]
    batch: Annotated[int | None, FileField("batch size: first dimension of the first input")]
    threads: Annotated[int, FileField("number of CPU threads of torch", least=1)]
    fp32: Annotated[TimeAndMemory, FileField("the model in FP32, in IEEE arithmetic")]
    fp32_today: Annotated[TimeAndMemory | None, FileField("FP32 under the caller's own flags; `null`: IEEE")] = None


DIRECTIONS = ("higher", "lower")
"""Allowed values of `Evaluation.better`: whether higher or lower scores are better."""


@dataclass(frozen=True)
class Evaluation:
    """The user's scoring function, its score of the FP32 model, and how much worse a plan's score may be."""

    function: Annotated[str, FileField("name of the scoring function, as the user gave it")]
    better: Annotated[str, FileField("which scores are better", choices=DIRECTIONS)]
    max_drop: Annotated[float | None, FileField("largest allowed loss of score; `null`: no limit", exact=True)]
    score: Annotated[float, FileField("score of the FP32 model")]
    samples: Annotated[int | None, FileField("number of values that are averaged; `null`: a single value", least=1)]
    of_mean: Annotated[str | None, FileField("function from the mean to the score; `null`: the mean is the score")]
    calls: Annotated[int, FileField("number of model calls for one score", least=0)]


@dataclass(frozen=True)
class Score:
    """The score of the model under one plan."""

    value: Annotated[float | None, FileField("score of the model under the plan; `null`: no score")]
    difference: Annotated[float | None, FileField("`value` minus the FP32 model's score")] = None
    standard_error: Annotated[float | None, FileField("standard error of `difference`; `null`: unknown")] = None
    passed: Annotated[bool | None, FileField("whether the drop is within `max_drop`; `null`: no `max_drop`")] = None
    failure: Annotated[str | None, FileField("why the score is missing, in one line")] = None

    @property
    def holds(self) -> bool:
        """Whether the plan has a score, and the score is at most `max_drop`, if given, worse than FP32's."""
        return self.failure is None and self.passed is not False


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope: a module, with all submodules that are not scopes themselves."""

    precision: Annotated[str, FileField("`fp32`, or the plan's `format`")]
    output: Annotated[str, FileField("`keep`: no cast to the caller's precision", choices=("cast", "keep"))] = "cast"
    keep: Annotated[tuple[str, ...], FileField("torch functions in the scope kept in FP32; `pow`: also x ** 2")] = ()
    fp32_output: Annotated[
        tuple[str, ...], FileField("torch functions of the scope that read low-precision inputs and return FP32")
    ] = ()

    @property
    def exceptions(self) -> tuple[str, ...]:
        """Names of functions kept in FP32, and names, with the suffix FP32_OUTPUT, of functions with FP32 output."""
        return *self.keep, *(f"{name}{FP32_OUTPUT}" for name in self.fp32_output)


@dataclass(frozen=True)
class Reason:
    """Why modules or operations are kept in FP32 under a plan; the reason applies to each module or operation."""

    kind: Annotated[
        str,
        FileField(
            "`unsafe`: contains an operation that must not run in low precision; `untested`: "
            "behavior in low precision is unknown; `conflict`: would get inputs of two dtypes in "
            "low precision; `budget`: if it were in low precision too, the plan would exceed the error budget; "
            "`margin`: the plan would use the budget's safety margin; `no-gain`: low precision saves nothing; `tied`: "
            "shares a weight; `inherited`: inputs or results must be FP32; `author`: the model's "
            "code requires FP32; `strategy`: the strategy always uses FP32; `not-floating`: has no "
            "floating-point operation",
            choices=tuple(
                "unsafe untested conflict budget margin no-gain tied inherited author strategy not-floating".split()
            ),
        ),
    ]
    words: Annotated[str, FileField("the reason in one clause, with its evidence")]
    modules: Annotated[tuple[str, ...], FileField("modules in FP32 for this reason")] = ()
    operations: Annotated[tuple[str, ...], FileField("operations in FP32, or in integers, for this reason")] = ()
    functions: Annotated[tuple[str, ...], FileField("FP32 functions in low-precision modules: `module..function`")] = ()
    rules: Annotated[tuple[str, ...], FileField("codes of the rules that report these modules or operations")] = ()
    by: Annotated[str | None, FileField("another module or operation that is the cause; `null`: none")] = None
    adds: Annotated[float | None, FileField("error that low precision would add; `null`: not possible")] = None
    left: Annotated[float | None, FileField("part of the error budget that the plan leaves unused")] = None
    saves: Annotated[float | None, FileField("share of the plan's cost that low precision would save")] = None
    ran: Annotated[bool, FileField("`true`: `adds` was measured; `false`: `adds` is predicted")] = False


@dataclass(frozen=True)
class Verification:
    """Results of running a model, patched or entirely in low precision, on all batches without gradients, and on the
    first batch also with gradients."""

    measured_error: Annotated[float | None, FileField("worst run without gradients; `null`: failed, Inf or NaN")] = None
    holds: Annotated[bool, FileField("whether all errors and criteria are within their limits")] = False
    inputs: Annotated[
        str, FileField("`audited`: calibration inputs; `held-out`: held-out inputs", choices=("held-out", "audited"))
    ] = "audited"
    execution: Execution = "emulated"
    failure: Annotated[str | None, FileField("why the run failed, in one line; `null`: it succeeded")] = None
    joint: Annotated[float | None, FileField("relative L2 error of all outputs; `null`: failed, Inf or NaN")] = None
    criteria: Annotated[tuple[CriterionValue, ...], FileField("the user's criteria, each with its measured value")] = ()
    apart: Annotated[
        Mapping[str, float], FileField("by output: its error, only if over 10 times the error of all outputs together")
    ] = empty()
    with_gradients: Annotated[float | None, FileField("`measured_error` with gradients on; `null`: not run")] = None
    ungraded: Annotated[
        str | None, FileField("exception with gradients on, of a program or the FP32 model; `null`: none")
    ] = None
    noise: Annotated[float | None, FileField("difference between FP32 runs, which limits errors' accuracy")] = None
    floor: Annotated[float, FileField("errors up to this value count as noise: three times `noise`, or 0")] = 0.0
    nonfinite: Annotated[NonFinite | None, FileField("first operation that returns Inf or NaN; `null`: none")] = None
    batches: Annotated[int, FileField("number of batches that were run", least=1)] = 1
    allowed: Annotated[float | None, FileField("largest error that was allowed; `null`: unknown")] = None
    by_batch: Annotated[
        tuple[float | None, ...],
        FileField("error of each batch, in order, if there are several; `null`: Inf or NaN"),
    ] = ()
    scattered: Annotated[
        float | None,
        FileField("outputs of up to 16 numbers: root mean square error at weights changed by 1 %; `null`: not run"),
    ] = None

    @property
    def finite(self) -> bool:
        """Whether the run succeeded and all outputs were finite."""
        return self.measured_error is not None

    @property
    def worst_error(self) -> float:
        """The error that is compared with the budget: of the runs without and with gradients, and of those at changed
        weights; inf if the run failed or gave Inf or NaN."""
        if self.measured_error is None:
            return math.inf
        return max(self.measured_error, self.with_gradients or 0.0, self.scattered or 0.0)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that a forward pass needs."""

    weights: Annotated[int, FileField("bytes of parameters and buffers", least=0)]
    activations: Annotated[int, FileField("peak bytes of inputs, results and low-precision copies", least=0)]


@dataclass(frozen=True)
class KeptOperation:
    """An operation of an exported program that is kept in FP32, or a product with FP32 output, with the reason."""

    name: Annotated[str, FileField(f"name in the exported graph, plus `{FP32_OUTPUT}` if only the output is FP32")]
    op: Annotated[str, FileField("ATen overload")]
    kind: Annotated[
        str,
        FileField(
            "`unsafe`: must not run in low precision; `untested`: behavior in low precision is "
            "unknown; `refused`: cannot run in low precision; `budget`: no tested plan with it in low "
            "precision met the error budget, or none is predicted to; `no-gain`: low precision saves nothing",
            choices=("unsafe", "untested", "refused", "budget", "no-gain"),
        ),
    ]
    because: Annotated[str, FileField("the reason in one clause, with its evidence")]
    node: Annotated[str | None, FileField("name of the operation in the captured graph; `null`: none")] = None

    @property
    def only_output(self) -> bool:
        """Whether only the output is FP32, and the inputs of the product are low-precision."""
        return self.name.endswith(FP32_OUTPUT)


@dataclass(frozen=True)
class Onnx:
    """An exported program as an ONNX model, and its error when a runtime runs it."""

    file: Annotated[str, FileField("name of the file next to plan.json")]
    ends: Annotated[str, FileField("dtype of inputs and outputs; `low`: the plan's format", choices=("fp32", "low"))]
    nodes: Annotated[int, FileField("number of floating-point operations, without casts and constants", least=0)]
    high: Annotated[int, FileField("number of FP32 operations among the `nodes`", least=0)]
    casts: Annotated[int, FileField("number of casts in the graph", least=0)]
    runtime: Annotated[str, FileField("name and version of the runtime")]
    error: Annotated[float | None, FileField("relative L2 error of the runtime's outputs; `null`: no run")]
    program_error: Annotated[float | None, FileField("relative L2 error of the plan's exported program")]
    failure: Annotated[str | None, FileField("why the runtime failed, in one line; `null`: it succeeded")] = None
    rounded_error: Annotated[float | None, FileField("error with all values rounded to the format, as on GPUs")] = None
    note: Annotated[str, FileField('which exporter wrote the file, if the first one failed; `""`: the first')] = ""


@dataclass(frozen=True)
class Program:
    """A plan of strategy `graph`: an exported program with a precision for every operation."""

    file: Annotated[str, FileField("name of the file next to plan.json, for `torch.export.load`")]
    operations: Annotated[int, FileField("number of operations with FP32 inputs in the exported graph", least=0)]
    low: Annotated[int, FileField("number of these operations that run in the format, outputs included", least=0)]
    casts: Annotated[int, FileField("number of casts in the graph", least=0)]
    kept: Annotated[tuple[KeptOperation, ...], FileField("operations and outputs kept in FP32")] = ()
    fixed: Annotated[str | None, FileField("why the batch size is fixed; `null`: variable size")] = None
    onnx: Annotated[Onnx | None, FileField("the program as an ONNX model, if requested")] = None


OPTIMISTIC = 2.0
"""Ratio of predicted to measured error above which a measurement on few batches may be a lucky one."""

MANY_BATCHES = 8
"""Number of batches from which on a measured error counts, whatever was predicted."""


@dataclass(frozen=True)
class Plan:
    """A plan: the precision of every scope under one strategy and format, with predicted cost and measured results."""

    name: Annotated[str, FileField("key of this plan in `plans`")]
    strategy: Annotated[str, FileField("`autocast`: torch.autocast; `cast`: low-precision weights; `graph`: a program")]
    format: Annotated[str, FileField("name of the low-precision format, such as `fp16`")]
    scopes: Annotated[Mapping[str, ScopeChoice], FileField("precision by module; default: the nearest parent's")]
    predicted_error: Annotated[float, FileField("predicted error: root sum of squares of rounding errors")] = math.nan
    low_precision_flops: Annotated[float, FileField("share of the FLOPs in low precision", least=0, most=1)] = math.nan
    predicted_speedup: Annotated[float, FileField("[predicted](method.md#what-a-choice-costs) speedup")] = math.nan
    verification: Annotated[Verification | None, FileField("results of running the patched model; `null`: none")] = None
    note: Annotated[str, MeasurementField("notes on the plan, in words")] = ""
    reasons: Annotated[tuple[Reason, ...], FileField("why modules and operations are in FP32")] = ()
    least: Annotated[tuple[str, ...] | None, FileField("modules that require FP32; `null`: not determined")] = None
    objective: Annotated[str, FileField("what the plan minimizes", choices=("time", "memory", "flops"))] = "time"
    upcast: Annotated[
        str,
        FileField(
            "which FP16 or BF16 tensors of the audited model become FP32, unless the plan stores "
            "them in low precision: `none`; `inputs`; `weights`: parameters and buffers too; "
            "`attributes`: also unregistered tensors of modules; `kept`: none, since the model's "
            "forward casts to their dtype",
            choices=("none", "inputs", "weights", "attributes", "kept"),
        ),
    ] = "none"
    stored_low: Annotated[
        Mapping[str, int], FileField("by dtype: number of weights stored in it; `apply` rejects a model with more")
    ] = empty()
    reach: Annotated[float | None, FileField("in an all-FP32 plan: smallest error of a low-precision run")] = None
    target: Annotated[str | None, FileField("the GPU or kind of CPU that `predicted_speedup` is for")] = None
    memory: Annotated[MemoryUse | None, FileField("memory of one forward under the plan")] = None
    fp32_memory: Annotated[MemoryUse | None, FileField("memory of one forward in FP32")] = None
    program: Annotated[Program | None, FileField("the exported program of a plan of strategy `graph`")] = None
    score: Annotated[Score | None, FileField("the user's score of the model under the plan; `null`: none")] = None
    timed: Annotated[TimeAndMemory | None, FileField("time and memory of one forward of the patched model")] = None
    generated: Annotated[TokenComparison | None, FileField("tokens decoded under the plan; `null`: none")] = None
    gpu_only: Annotated[
        str | None,
        FileField("exception of the patched model on the audit's CPU, without emulation; `null`: none, or not tried"),
    ] = None

    @property
    def measured_error(self) -> float | None:
        """Error of the patched model in the worst batch; None if the model was not run, failed, or gave Inf or NaN."""
        return self.verification.measured_error if self.verification else None

    @property
    def is_verified(self) -> bool:
        """Whether the patched model was run and met the error budget."""
        return self.verification is not None and self.verification.holds

    @property
    def is_doubtful(self) -> bool:
        """Whether the plan is verified on few batches, although its predicted error is above what is allowed, and more
        than OPTIMISTIC times the measured error: other inputs may then exceed the limit."""
        ran, error = self.verification, self.measured_error
        if ran is None or error is None or ran.allowed is None or ran.batches >= MANY_BATCHES:
            return False
        return self.is_verified and self.predicted_error > max(ran.allowed, OPTIMISTIC * error)

    @property
    def holds(self) -> bool:
        """Whether the plan is verified, the user's score, if any, is acceptable, and decoding, if asked for, works."""
        decodes = self.generated is None or self.generated.failure is None
        return self.is_verified and decodes and (self.score is None or self.score.holds)

    @property
    def has_low(self) -> bool:
        """Whether any scope is in low precision."""
        return any(choice.precision != "fp32" for choice in self.scopes.values())

    @property
    def has_fp32(self) -> bool:
        """Whether any module, function or operation of the program is kept in FP32."""
        kept = self.program is not None and bool(self.program.kept)
        return kept or any(choice.precision == "fp32" or choice.exceptions for choice in self.scopes.values())

    @property
    def kept_modules(self) -> tuple[str, ...]:
        """FP32 modules that contain operations or weights. If no reasons are recorded: the FP32 scopes."""
        if not self.reasons:
            return tuple(path for path, choice in self.scopes.items() if choice.precision == "fp32")
        return tuple(path for reason in self.reasons if reason.kind != "not-floating" for path in reason.modules)

    def reasons_of(self, path: str) -> tuple[Reason, ...]:
        """The reasons why a scope, or a function in it, is kept in FP32."""
        here = {path, *(function_in(path, name) for name in self.scopes[path].exceptions)}
        return tuple(reason for reason in self.reasons if here.intersection((*reason.modules, *reason.functions)))

    @property
    def measured_times(self) -> Times | None:
        """Measured times of eager execution in native runs, which replace the predicted times; None if not measured."""
        times = self.timed.eager if self.timed and self.timed.decides else None
        return times if times and times.speedup else None

    @property
    def speedup(self) -> float:
        """Speedup over FP32: measured in native runs, otherwise predicted."""
        return (self.measured_times.speedup if self.measured_times else None) or self.predicted_speedup

    @property
    def memory_share(self) -> float:
        """Memory as a share of FP32's: measured in native runs, otherwise predicted; 1 if unknown."""
        if self.timed and self.timed.decides and self.timed.memory_share is not None:
            return self.timed.memory_share
        needed: list[int] = [sum(astuple(use)) for use in (self.memory, self.fp32_memory) if use is not None]
        return needed[0] / needed[1] if len(needed) == 2 else 1.0

    @property
    def islands(self) -> int:
        """Number of scopes whose precision differs from the precision of the root."""
        return sum(choice.precision != self.scopes[""].precision for choice in self.scopes.values())

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(module, function) for every function that is kept in FP32, or has FP32 output, in a low-precision scope."""
        return tuple((path, name) for path, choice in self.scopes.items() for name in choice.exceptions)
