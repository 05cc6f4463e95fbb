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

    local_error: Annotated[float | None, FileField("its own: FP32 inputs rounded, run low; relative L2")] = None
    propagated_error: Annotated[float | None, FileField("inside a run that is low from the start; relative L2")] = None
    disagreement: Annotated[float | None, FileField("share of discrete results that differ", least=0, most=1)] = None
    overflow: Annotated[int, FileField("elements that are finite in FP32 and infinite in the format", least=0)] = 0
    nan: Annotated[int, FileField("elements that are finite in FP32 and NaN in the format", least=0)] = 0
    underflow: Annotated[float, FileField("share of the non-zero elements that become zero", least=0, most=1)] = 0.0
    subnormal: Annotated[float, FileField("share that falls below the smallest normal number", least=0, most=1)] = 0.0
    max_ulp: Annotated[float | None, FileField("largest local error in units of the format's last place")] = None
    sqnr_db: Annotated[float | None, FileField("signal to rounding noise, 20 log10(1 / local_error)")] = None
    unsupported: Annotated[str | None, FileField("why it cannot run in the format")] = None
    cause: Annotated[
        str | None,
        FileField(
            "what makes the error; `nested`: results that are not compared; `null`: there is none",
            choices=("overflow", "underflow", "cancellation", "rounding", "discrete", "unsupported", "nan", "nested"),
        ),
    ] = None
    born: Annotated[bool, FileField("in the low run, something breaks here that was whole in every input")] = False


@dataclass(frozen=True)
class Contribution:
    """How far one node in one format moves the model's outputs (relative L2, unit 1)."""

    isolated: Annotated[float, FileField("how far it alone, low, moves the outputs; the verdict rests on this")]
    own: Annotated[float, FileField("of that, what the operation and its result make, its inputs in FP32")]
    cast: Annotated[float, FileField("how far its FP32 result does, rounded on its way into a low reader")]
    decided_by: Annotated[
        str,
        FileField(
            "how `isolated` was found: `first-order`: predicted; `re-run` of the model with this node low; `group`: "
            "re-run with this node and others low, which is no less; `not-run`: no run has told",
            choices=("first-order", "re-run", "group", "not-run"),
        ),
    ] = "first-order"
    together: Annotated[int, FileField("how many operations were low in that run", least=1)] = 1
    criterion: Annotated[str, FileField("the criterion that it takes most of, where some were set")] = ""
    batch: Annotated[int, FileField("number of the batch that `isolated` is of, if not the first", least=1)] = 1


@dataclass(frozen=True)
class Linearity:
    """Whether the first-order model behind predicted effects is accurate for this model in a format."""

    format: Annotated[str, FileField("the number format")]
    compared: Annotated[int, FileField("operations whose effect was predicted and then run", least=1)]
    least: Annotated[float, FileField("the smallest of predicted / run among them", least=0)]
    median: Annotated[float, FileField("the median of predicted / run", least=0)]
    most: Annotated[float, FileField("the largest of predicted / run", least=0)]
    holds: Annotated[bool, FileField("whether nine in ten predictions are within 1.6 times what a run says")]
    whole_predicted: Annotated[float | None, FileField("predicted error of the outputs where everything is low")]
    whole_run: Annotated[float | None, FileField("the same, run")]
    confirmed: Annotated[int, FileField("predictions beyond the budget that a run bore out", least=0)]
    refuted: Annotated[int, FileField("predictions beyond the budget that a run refuted", least=0)]
    left: Annotated[int, FileField("predictions beyond the budget that were not run", least=0)]


@dataclass(frozen=True)
class Noise:
    """How much FP32 runs from the same state and random numbers differ, when only memory addresses change."""

    runs: Annotated[int, FileField("how many times the model was run in FP32", least=1)] = 1
    error: Annotated[float, FileField("the most that a run is from the first, as the budget measures")] = 0.0
    joint: Annotated[float, FileField("the same as relative L2 of all outputs, or share of entries")] = 0.0
    floor: Annotated[float, FileField("up to this nothing is called an error; 0: nothing is spared")] = 0.0
    outputs: Annotated[Mapping[str, float], FileField("by output, the most; those that differ")] = empty()
    nodes: Annotated[Mapping[str, float], FileField("by operation: how far two runs of the graph differ")] = empty()
    operations: Annotated[tuple[str, ...], FileField("operations that are not deterministic")] = ()


@dataclass(frozen=True)
class Verdict:
    """The verdict on one node in one format, with the reason."""

    verdict: Annotated[
        str,
        FileField(
            "`safe`; `sensitive`: alone it takes more than a quarter of the budget; `unsafe`: alone it breaks the "
            "budget, turns outputs non-finite, flips discrete results, or does not exist in the format; `untested`",
            choices=("safe", "sensitive", "unsafe", "untested"),
        ),
    ]
    reason: Annotated[str, FileField("why, in one clause")]
    limited_by: Annotated[str | None, FileField("what the format lacks", choices=("range", "precision"))] = None
    batch: Annotated[int, FileField("number of the batch that it comes from, where it is not the first", least=1)] = 1


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of one or more tensors: a histogram by powers of two, which covers any scaling."""

    max_abs: Annotated[float, FileField("the largest finite magnitude", least=0)]
    min_abs: Annotated[float, FileField("the smallest magnitude that is not zero; 0 if there is none", least=0)]
    zeros: Annotated[int, FileField("how many are zero", least=0)]
    exponents: Annotated[Mapping[int, int], FileField('`{"e": count}`: numbers with 2^e <= |x| < 2^(e+1)', least=1)]
    nonfinite: Annotated[int, FileField("how many are Inf or NaN", least=0)] = 0
    norm: Annotated[float, FileField("L2 norm of the finite ones, where it was measured", least=0)] = 0.0
    rounding: Annotated[Mapping[str, float], FileField("by format: relative L2 error of rounding them")] = empty()

    @property
    def nonzero(self) -> int:
        """Number of finite, non-zero entries."""
        return sum(self.exponents.values())


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer."""

    name: Annotated[str, FileField("in the state dict, or the graph's where it has none there")]
    kind: Annotated[str, FileField("what it is", choices=("parameter", "buffer"))]
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
    node: Annotated[str, MeasurementField("the node it fired on, by its name in the captured graph")] = ""
    owner: Annotated[str, FileField("module of that node")]
    op: Annotated[str, FileField("ATen overload of that node")]
    source: Annotated[str | None, FileField("line that wrote it, as for operations")]
    severity: Annotated[str, FileField("under the plan that is followed", choices=("error", "warning", "info"))]
    confidence: Annotated[str, FileField("`high` if found unsafe, else the rule's", choices=("high", "medium", "low"))]
    formats: Annotated[tuple[str, ...], FileField("formats it speaks of")]
    message: Annotated[str, MeasurementField("what is wrong here, with this model's numbers")] = ""
    why: Annotated[str, MeasurementField("why that hurts, as the rule has it")] = ""
    advice: Annotated[str, MeasurementField("what to do, as the rule has it")] = ""
    evidence: Annotated[Mapping[str, Any], MeasurementField("the facts that the rule read")] = empty()
    agrees: Annotated[bool | None, FileField("whether the measurement bears it out; `null` where there is none")] = None
    cause: Annotated[str, MeasurementField("line and operation at which it begins, the same for one cause")] = ""
    plan: Annotated[str | None, MeasurementField("the plan of `severity`; `null`: none holds the budget")] = None
    bearing: Annotated[
        str | None,
        MeasurementField(
            "under that plan it runs `low`, `reads` in FP32 what was low before, or is `kept` in FP32; `elsewhere`: "
            "only other plans run it in a format of the finding; `stops`: there is no such plan, and it is unsafe",
            choices=("low", "reads", "kept", "elsewhere", "stops"),
        ),
    ] = None
    references: Annotated[tuple[str, ...], MeasurementField("what the rule refers to")] = ()
    declared: Annotated[str, MeasurementField("the severity that the rule states")] = ""
    measurable: Annotated[bool, MeasurementField("whether running it low can bear the rule out")] = True
    called_from: Annotated[str | None, MeasurementField("the call beside that line, as for operations")] = None
    met: Annotated[Mapping[str, tuple[str, ...]], MeasurementField("by format: strategies that run it low")] = empty()


@dataclass(frozen=True)
class FlaggedRegion:
    """Connected nodes that are sensitive or unsafe in a format, measured together in it with all else in FP32."""

    format: Annotated[str, FileField("the format it was run in")]
    nodes: Annotated[tuple[str, ...], FileField("what was run low, by name in the captured graph")]
    scope: Annotated[str, FileField("the deepest module that holds all of it")]
    local_error: Annotated[float | None, FileField("of the values that leave it, the worst; `null`: not finite")]
    error: Annotated[float | None, FileField("of the model's outputs; relative L2, or share of a criterion")]
    explained: Annotated[float, FileField("its operations' own errors, in quadrature; below `error` if they reinforce")]
    failure: Annotated[str | None, FileField("why it did not run")] = None
