"""Measurements of a graph, and verdicts based on them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from .written import FileField, MeasurementField, empty

if TYPE_CHECKING:
    import torch

Distance = Callable[["Sequence[torch.Tensor]", "Sequence[torch.Tensor]"], float]
"""The distance of outputs from reference outputs, in the error budget's measure."""


@dataclass(frozen=True)
class ProductError:
    """The local error of a matrix product or convolution by cause, on a sample of its rows (relative L2)."""

    inputs: Annotated[float, FileField("error from rounding of the inputs, weights included", least=0)]
    accumulation: Annotated[float, FileField("error from sums in the accumulator's precision", least=0)]
    output: Annotated[float, FileField("error from rounding of the result", least=0)]
    whole: Annotated[float, FileField("error from all three causes together, measured", least=0)]


@dataclass(frozen=True)
class NodeError:
    """Errors of one operation in one format, on the calibration inputs; for a backward pass, of its gradients."""

    local_error: Annotated[float | None, FileField("relative L2 error of this operation on rounded inputs")] = None
    propagated_error: Annotated[float | None, FileField("relative L2 error with the whole model in the format")] = None
    disagreement: Annotated[float | None, FileField("share of discrete results that change", least=0, most=1)] = None
    overflow: Annotated[int, FileField("elements that are finite in FP32 and infinite in the format", least=0)] = 0
    nan: Annotated[int, FileField("elements that are finite in FP32 and NaN in the format", least=0)] = 0
    underflow: Annotated[float, FileField("share of the non-zero elements that become zero", least=0, most=1)] = 0.0
    subnormal: Annotated[float, FileField("share of non-zero elements that become subnormal", least=0, most=1)] = 0.0
    max_ulp: Annotated[float | None, FileField("largest local error, in units in the last place of the format")] = None
    sqnr_db: Annotated[float | None, FileField("signal-to-noise ratio, 20 log10(1 / local_error)")] = None
    unsupported: Annotated[str | None, FileField("why the operation cannot run in the format; `null`: it can")] = None
    cause: Annotated[
        str | None,
        FileField(
            "cause of the error; `nested`: the results cannot be compared; `null`: no error",
            choices=(
                "overflow",
                "underflow",
                "cancellation",
                "rounding",
                "discrete",
                "literal",
                "unsupported",
                "nan",
                "nested",
            ),
        ),
    ] = None
    product: Annotated[
        ProductError | None,
        FileField("of a matrix product or convolution: its error by cause; `null`: another operation"),
    ] = None
    originates_here: Annotated[bool, FileField("whether Inf, NaN or an exception originates at this operation")] = False


@dataclass(frozen=True)
class Contribution:
    """Relative change of the model's outputs (L2, unit 1) due to one operation in one format."""

    isolated: Annotated[float, FileField("output change with only this operation in the format; decides the verdict")]
    own: Annotated[float, FileField("part of `isolated` due to the operation and its result, with FP32 inputs")]
    cast: Annotated[float, FileField("output change if the operation runs in FP32 and only its result is rounded")]
    decided_by: Annotated[
        str,
        FileField(
            "origin of `isolated`: `first-order`: predicted; `re-run`: measured; `group`: measured "
            "together with other operations, so an upper bound; `not-run`: unknown without a run",
            choices=("first-order", "re-run", "group", "not-run"),
        ),
    ] = "first-order"
    together: Annotated[int, FileField("number of operations in low precision in that run", least=1)] = 1
    criterion: Annotated[str, FileField("the criterion of which this operation uses the largest share")] = ""
    failure: Annotated[
        str, FileField("the exception that a run with this operation in low precision raised; empty: it raised none")
    ] = ""
    batch: Annotated[int, FileField("number of the batch that gives `isolated`, if not the first", least=1)] = 1
    reads: Annotated[
        Mapping[str, float],
        FileField("by input with several readers: share of the input's `cast` if only this operation reads it rounded"),
    ] = empty()


@dataclass(frozen=True)
class Linearity:
    """How accurately first-order predictions match measured effects, for this model in one format."""

    format: Annotated[str, FileField("the number format")]
    compared: Annotated[int, FileField("number of operations whose effect was both predicted and measured", least=1)]
    least: Annotated[float, FileField("smallest ratio of prediction to measurement", least=0)]
    median: Annotated[float, FileField("median ratio of prediction to measurement", least=0)]
    most: Annotated[float, FileField("largest ratio of prediction to measurement", least=0)]
    holds: Annotated[
        bool, FileField("whether at least nine in ten predictions are within a factor of 1.6 of the measurement")
    ]
    whole_predicted: Annotated[float | None, FileField("predicted output error with the whole model in low precision")]
    whole_run: Annotated[float | None, FileField("measured output error with the whole model in low precision")]
    confirmed: Annotated[
        int,
        FileField(
            "number of operations predicted above the error budget whose measured effect was above it too", least=0
        ),
    ]
    refuted: Annotated[
        int,
        FileField("number of operations predicted above the error budget whose measured effect was within it", least=0),
    ]
    left: Annotated[int, FileField("number of operations predicted above the error budget that were not run", least=0)]


@dataclass(frozen=True)
class Noise:
    """Differences between FP32 runs from the same state and random numbers, where only memory addresses change."""

    runs: Annotated[int, FileField("number of FP32 runs", least=1)] = 1
    error: Annotated[float, FileField("largest difference from the first run, in the error budget's measure")] = 0.0
    joint: Annotated[float, FileField("`error` as relative L2 of all outputs, or share of discrete entries")] = 0.0
    floor: Annotated[float, FileField("errors up to this value count as noise; 0: no noise")] = 0.0
    outputs: Annotated[Mapping[str, float], FileField("by output: largest difference, if above 0")] = empty()
    nodes: Annotated[Mapping[str, float], FileField("by operation: difference between two runs of the graph")] = empty()
    operations: Annotated[tuple[str, ...], FileField("operations that are not deterministic")] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on one operation in one format, with the reason."""

    verdict: Annotated[
        str,
        FileField(
            "`safe`; `sensitive`: alone in low precision, uses more than a quarter of the error budget; `unsafe`: "
            "alone in low precision, exceeds the error budget, turns outputs Inf or NaN, or flips discrete results; "
            "or is not supported in the format; `untested`",
            choices=("safe", "sensitive", "unsafe", "untested"),
        ),
    ]
    reason: Annotated[str, FileField("reason for the verdict, in one clause")]
    limited_by: Annotated[str | None, FileField("the format's limitation", choices=("range", "precision"))] = None
    batch: Annotated[int, FileField("number of the batch that decides the verdict, if not the first", least=1)] = 1


@dataclass(frozen=True)
class Magnitudes:
    """Range statistics of one tensor, or of several pooled, with a histogram by powers of two."""

    max_abs: Annotated[float, FileField("largest finite magnitude", least=0)]
    min_abs: Annotated[float, FileField("smallest non-zero magnitude; 0: all are zero", least=0)]
    zeros: Annotated[int, FileField("number of zeros", least=0)]
    exponents: Annotated[Mapping[int, int], FileField('`{"e": count}`: numbers with 2^e <= |x| < 2^(e+1)', least=1)]
    nonfinite: Annotated[int, FileField("number of Inf and NaN entries", least=0)] = 0
    norm: Annotated[float, FileField("L2 norm of the finite values, if measured", least=0)] = 0.0
    rounding: Annotated[Mapping[str, float], FileField("by format: relative L2 error of rounding")] = empty()

    @property
    def nonzero(self) -> int:
        """Number of finite, non-zero entries of the tensor."""
        return sum(self.exponents.values())


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer."""

    name: Annotated[str, FileField("name in the state dict; if it has none, name in the captured graph")]
    kind: Annotated[str, FileField("parameter or buffer", choices=("parameter", "buffer"))]
    range: Annotated[Magnitudes, FileField("magnitudes of the values")]


FAILURES = ("DTY", "RUN")
"""Prefixes of the rules about runs of the whole model in low precision that raised."""


@dataclass(frozen=True)
class InputRange:
    """The range of one input tensor over all calibration inputs. The range of complex numbers is that of their parts."""

    name: Annotated[str, FileField("argument of the model's forward; `x_0`: the first tensor in the container `x`")]
    dtype: Annotated[str, FileField("dtype of the tensor")]
    shape: Annotated[tuple[int, ...], FileField("shape of the tensor in the first batch")]
    minimum: Annotated[float | None, FileField("smallest finite value; `null`: no finite value")]
    maximum: Annotated[float | None, FileField("largest finite value; `null`: no finite value")]
    beyond_fp16: Annotated[int, FileField("number of floating-point values whose magnitude exceeds 65504", least=0)] = 0
    nonfinite: Annotated[int, FileField("number of Inf and NaN values", least=0)] = 0


MEASURED = frozenset({"MSR001", "MSR002", "MSR003"})
"""Codes of the rules that report an operation which is measured unsafe, if no other rule reports it."""


CODE = r"^[A-Z]{3}\d{0,3}$"
"""Pattern of a rule's code, or of the beginning of a code: NRM001, NRM00 or NRM."""


@dataclass(frozen=True)
class Ignore:
    """Suppresses findings whose code starts with `code`, in modules whose path matches the glob `module`.

    source: the option, or file and line, of this setting; reason: the user's reason ("" if none is required).
    """

    code: Annotated[str, Field(pattern=CODE)]
    module: str = "*"
    reason: str = ""
    source: str = "ignore"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A match of a rule, or an unsafe measurement, at one operation."""

    rule: Annotated[str, FileField("code of the rule, see [rules.md](rules.md)")]
    name: Annotated[str, FileField("name of the rule")]
    node: Annotated[str, MeasurementField("name of the operation in the captured graph")] = ""
    owner: Annotated[str, FileField("module that contains the operation")]
    op: Annotated[str, FileField("ATen overload of the operation")]
    source: Annotated[str | None, FileField("source line as `file:line`; `null`: unknown")]
    severity: Annotated[str, FileField("severity under the recommended plan", choices=("error", "warning", "info"))]
    confidence: Annotated[
        str, FileField("the rule's confidence; `high` if the operation is unsafe", choices=("high", "medium", "low"))
    ]
    formats: Annotated[tuple[str, ...], FileField("formats in which the problem occurs")]
    message: Annotated[str, MeasurementField("the problem, with this model's numbers")] = ""
    why: Annotated[str, MeasurementField("why it is a problem, from the rule")] = ""
    advice: Annotated[str, MeasurementField("the remedy, from the rule")] = ""
    evidence: Annotated[Mapping[str, Any], MeasurementField("facts that the rule compares or shows, by name")] = empty()
    agrees: Annotated[bool | None, FileField("whether measurements confirm the finding; `null`: not measured")] = None
    cause: Annotated[str, MeasurementField("source line and operation of the cause, shared by related findings")] = ""
    plan: Annotated[str | None, MeasurementField("plan that `severity` refers to; `null`: no such plan")] = None
    bearing: Annotated[
        str | None,
        MeasurementField(
            "what `plan` does with the operation: `low`: runs it in low precision; `kept`: keeps it "
            "in FP32; `reads`: runs it in FP32 on values that were in low precision before; "
            "`elsewhere`: only other plans run it in a format of the finding; `stops`: there is no "
            "such plan, and the operation is unsafe",
            choices=("low", "reads", "kept", "elsewhere", "stops"),
        ),
    ] = None
    references: Annotated[tuple[str, ...], MeasurementField("references of the rule")] = ()
    declared: Annotated[str, MeasurementField("the rule's default severity")] = ""
    measurable: Annotated[bool, MeasurementField("whether a run in low precision can confirm the rule")] = True
    called_from: Annotated[str | None, MeasurementField("user's call that reached `source`; `null`: none")] = None
    met: Annotated[
        Mapping[str, tuple[str, ...]], MeasurementField("by format: strategies that run it in low precision")
    ] = empty()


@dataclass(frozen=True)
class FlaggedRegion:
    """Connected operations that are sensitive or unsafe in a format, run together in it with all others in FP32."""

    format: Annotated[str, FileField("the format of the run")]
    nodes: Annotated[tuple[str, ...], FileField("names of the operations in low precision in the captured graph")]
    scope: Annotated[str, FileField("innermost module that contains all these operations")]
    local_error: Annotated[float | None, FileField("largest error of the region's results; `null`: not finite")]
    error: Annotated[float | None, FileField("error of the outputs: relative L2, or share of a criterion's limit")]
    explained: Annotated[
        float, FileField("root sum of squares of the separate errors; they reinforce each other if `error` is larger")
    ]
    failure: Annotated[str | None, FileField("why the run failed; `null`: it succeeded")] = None
