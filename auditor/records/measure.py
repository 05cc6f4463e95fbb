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
"""How far outputs are from reference outputs: the measure that an error budget speaks of."""


@dataclass(frozen=True)
class NodeError:
    """Errors of one node in one format, on the calibration inputs; for a backward pass, of the gradients it returns."""

    local_error: Annotated[float | None, FileField("of the operation alone on rounded FP32 inputs; relative L2")] = None
    propagated_error: Annotated[float | None, FileField("accumulated, in a run all low; relative L2")] = None
    disagreement: Annotated[float | None, FileField("share of discrete results that differ", least=0, most=1)] = None
    overflow: Annotated[int, FileField("elements that are finite in FP32 and infinite in the format", least=0)] = 0
    nan: Annotated[int, FileField("elements that are finite in FP32 and NaN in the format", least=0)] = 0
    underflow: Annotated[float, FileField("share of the non-zero elements that become zero", least=0, most=1)] = 0.0
    subnormal: Annotated[float, FileField("share of the elements that become subnormal", least=0, most=1)] = 0.0
    max_ulp: Annotated[float | None, FileField("largest local error in units of the format's last place")] = None
    sqnr_db: Annotated[float | None, FileField("signal-to-noise ratio, 20 log10(1 / local_error)")] = None
    unsupported: Annotated[str | None, FileField("why it cannot run in the format")] = None
    cause: Annotated[
        str | None,
        FileField(
            "the cause of the error; `nested`: results cannot be compared; `null`: no error",
            choices=("overflow", "underflow", "cancellation", "rounding", "discrete", "unsupported", "nan", "nested"),
        ),
    ] = None
    born: Annotated[bool, FileField("whether Inf, NaN or a raised error originates here in the low run")] = False


@dataclass(frozen=True)
class Contribution:
    """How far one node in one format moves the model's outputs (relative L2, unit 1)."""

    isolated: Annotated[float, FileField("how far it moves the outputs when only it runs low; decides the verdict")]
    own: Annotated[float, FileField("part of that due to the operation and its result, with FP32 inputs")]
    cast: Annotated[float, FileField("how far rounding its FP32 result for a low reader moves the outputs")]
    decided_by: Annotated[
        str,
        FileField(
            "origin of `isolated`: `first-order`: predicted; `re-run` of the model with this node low; `group`: "
            "re-run with this node and others low, an upper bound; `not-run`: unknown without a run",
            choices=("first-order", "re-run", "group", "not-run"),
        ),
    ] = "first-order"
    together: Annotated[int, FileField("number of low operations in that run", least=1)] = 1
    criterion: Annotated[str, FileField("the criterion with the largest share of its limit")] = ""
    batch: Annotated[int, FileField("number of the batch of `isolated`, if not the first", least=1)] = 1


@dataclass(frozen=True)
class Linearity:
    """Whether the first-order model behind predicted effects is accurate for this model in a format."""

    format: Annotated[str, FileField("the number format")]
    compared: Annotated[int, FileField("operations whose effect was predicted and then run", least=1)]
    least: Annotated[float, FileField("smallest ratio of prediction to measurement", least=0)]
    median: Annotated[float, FileField("median ratio of prediction to measurement", least=0)]
    most: Annotated[float, FileField("largest ratio of prediction to measurement", least=0)]
    holds: Annotated[bool, FileField("whether nine in ten predictions are within a factor of 1.6 of the measurement")]
    whole_predicted: Annotated[float | None, FileField("predicted output error with everything low")]
    whole_run: Annotated[float | None, FileField("the same, measured")]
    confirmed: Annotated[int, FileField("predictions above the budget that a run confirmed", least=0)]
    refuted: Annotated[int, FileField("predictions above the budget that a run refuted", least=0)]
    left: Annotated[int, FileField("predictions above the budget that were not run", least=0)]


@dataclass(frozen=True)
class Noise:
    """How much FP32 runs from the same state and random numbers differ, when only memory addresses change."""

    runs: Annotated[int, FileField("how many times the model was run in FP32", least=1)] = 1
    error: Annotated[float, FileField("largest difference from the first run, in the budget's measure")] = 0.0
    joint: Annotated[float, FileField("the same as relative L2 of all outputs, or share of discrete entries")] = 0.0
    floor: Annotated[float, FileField("errors up to this are ignored; 0: none")] = 0.0
    outputs: Annotated[Mapping[str, float], FileField("largest difference of each output, if any")] = empty()
    nodes: Annotated[Mapping[str, float], FileField("by operation: difference between two runs of the graph")] = empty()
    operations: Annotated[tuple[str, ...], FileField("operations that are not deterministic")] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on one node in one format, with the reason."""

    verdict: Annotated[
        str,
        FileField(
            "`safe`; `sensitive`: alone it uses more than a quarter of the error budget; `unsafe`: "
            "alone it exceeds the budget, turns outputs Inf or NaN, flips discrete results, or is "
            "not supported in the format; `untested`",
            choices=("safe", "sensitive", "unsafe", "untested"),
        ),
    ]
    reason: Annotated[str, FileField("why, in one clause")]
    limited_by: Annotated[str | None, FileField("the format's limitation", choices=("range", "precision"))] = None
    batch: Annotated[int, FileField("number of the batch that decides it, if not the first", least=1)] = 1


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of one or more tensors: a histogram by powers of two, which covers any scaling."""

    max_abs: Annotated[float, FileField("the largest finite magnitude", least=0)]
    min_abs: Annotated[float, FileField("the smallest magnitude that is not zero; 0 if there is none", least=0)]
    zeros: Annotated[int, FileField("number of zeros", least=0)]
    exponents: Annotated[Mapping[int, int], FileField('`{"e": count}`: numbers with 2^e <= |x| < 2^(e+1)', least=1)]
    nonfinite: Annotated[int, FileField("number of Inf and NaN", least=0)] = 0
    norm: Annotated[float, FileField("L2 norm of the finite values, where measured", least=0)] = 0.0
    rounding: Annotated[Mapping[str, float], FileField("by format: relative L2 error of rounding them")] = empty()

    @property
    def nonzero(self) -> int:
        """Number of finite, non-zero entries."""
        return sum(self.exponents.values())


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer."""

    name: Annotated[str, FileField("name in the state dict, else in the graph")]
    kind: Annotated[str, FileField("kind of the value", choices=("parameter", "buffer"))]
    range: Annotated[Magnitudes, FileField("its magnitudes")]


MEASURED = frozenset({"MSR001", "MSR002", "MSR003"})
"""Rules that report the measurement itself, where no other rule accounts for it."""


CODE = r"^[A-Z]{3}\d{0,3}$"
"""A rule's code, or the letters of a family, with or without the beginning of a number."""


@dataclass(frozen=True)
class Ignore:
    """Suppresses findings whose code starts with `code`, in modules whose path matches the glob `module`.

    source: where the user wrote it; reason: the user's reason ("" if none is required).
    """

    code: Annotated[str, Field(pattern=CODE)]
    module: str = "*"
    reason: str = ""
    source: str = "ignore"
    __pydantic_config__: ClassVar[dict[str, str]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A match of a rule, or a result of the measurement, at a node."""

    rule: Annotated[str, FileField("the rule's code, see [rules.md](rules.md)")]
    name: Annotated[str, FileField("the rule's name")]
    node: Annotated[str, MeasurementField("name of the node in the captured graph")] = ""
    owner: Annotated[str, FileField("module of that node")]
    op: Annotated[str, FileField("ATen overload of that node")]
    source: Annotated[str | None, FileField("source line, as for operations")]
    severity: Annotated[str, FileField("severity under the recommended plan", choices=("error", "warning", "info"))]
    confidence: Annotated[str, FileField("the rule's; `high` if measured unsafe", choices=("high", "medium", "low"))]
    formats: Annotated[tuple[str, ...], FileField("formats it concerns")]
    message: Annotated[str, MeasurementField("the problem here, with this model's numbers")] = ""
    why: Annotated[str, MeasurementField("why it is a problem, from the rule")] = ""
    advice: Annotated[str, MeasurementField("the remedy, from the rule")] = ""
    evidence: Annotated[Mapping[str, Any], MeasurementField("facts used by the rule")] = empty()
    agrees: Annotated[bool | None, FileField("whether the measurement confirms it; `null`: no measurement")] = None
    cause: Annotated[str, MeasurementField("source line and operation of the cause, equal for all findings of it")] = ""
    plan: Annotated[str | None, MeasurementField("the plan of `severity`; `null`: none meets the budget")] = None
    bearing: Annotated[
        str | None,
        MeasurementField(
            "under that plan it runs `low`, `reads` values in FP32 that were low before, or is "
            "`kept` in FP32; `elsewhere`: only other plans run it in a format of the finding; "
            "`stops`: there is no such plan, and it is unsafe",
            choices=("low", "reads", "kept", "elsewhere", "stops"),
        ),
    ] = None
    references: Annotated[tuple[str, ...], MeasurementField("references of the rule")] = ()
    declared: Annotated[str, MeasurementField("the rule's default severity")] = ""
    measurable: Annotated[bool, MeasurementField("whether running it low can confirm the rule")] = True
    called_from: Annotated[str | None, MeasurementField("the call that led to that line, as for operations")] = None
    met: Annotated[Mapping[str, tuple[str, ...]], MeasurementField("by format: strategies that run it low")] = empty()


@dataclass(frozen=True)
class FlaggedRegion:
    """Connected nodes that are sensitive or unsafe in a format, measured together in it with all else in FP32."""

    format: Annotated[str, FileField("the format of the run")]
    nodes: Annotated[tuple[str, ...], FileField("names of the low nodes in the captured graph")]
    scope: Annotated[str, FileField("the innermost module that contains all of them")]
    local_error: Annotated[float | None, FileField("worst error of its results; `null`: not finite")]
    error: Annotated[float | None, FileField("error of the outputs; relative L2, or share of a criterion's limit")]
    explained: Annotated[float, FileField("root sum of squares of its own errors; below `error` if they reinforce")]
    failure: Annotated[str | None, FileField("why the run failed")] = None
