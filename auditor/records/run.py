"""What runs of the whole model gave: FP32 under the user's own flags, low without a plan; their time, memory and score."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from .written import FileField, empty


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


@dataclass(frozen=True)
class Today:
    """FP32 as the user's own flags have it, held against FP32 in IEEE arithmetic."""

    computed_in: Annotated[tuple[str, ...], FileField("what those flags let FP32 be computed in: `tf32`, `bf16`")]
    measured_error: Annotated[float | None, FileField("against IEEE FP32, worst batch; `null`: not finite")]
    finite: Annotated[bool, FileField("whether the outputs were")]
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
class Baseline:
    """What happens without a plan: the whole model under plain autocast, or plainly cast."""

    measured_error: Annotated[float | None, FileField("as of plans; `null`: it failed or was not finite")]
    finite: Annotated[bool, FileField("whether the outputs were")]
    failure: Annotated[str | None, FileField("why it did not run")] = None
    criteria: Annotated[tuple[CriterionValue, ...], FileField("the criteria that were set, each with its value")] = ()
    nonfinite: Annotated[NonFinite | None, FileField("its first operation that is not finite; `null`: none is")] = None
