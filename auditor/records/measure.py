"""What was measured of a graph, and what was judged by it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from .written import Written

if TYPE_CHECKING:
    import torch

Distance = Callable[["Sequence[torch.Tensor]", "Sequence[torch.Tensor]"], float]
"""How far outputs are from reference outputs: the measure that an error budget speaks of."""


@dataclass(frozen=True)
class NodeError:
    """What one format does to one node, measured on the reference inputs; of a backward pass, to what it hands back."""

    local_error: Annotated[
        float | None, Written("its own: reference inputs rounded, operation in the format, result rounded; relative L2")
    ] = None
    propagated_error: Annotated[float | None, Written("inside a run that is low from the start; relative L2")] = None
    disagreement: Annotated[
        float | None, Written("share of discrete results that differ; `null` for floating ones", least=0, most=1)
    ] = None
    overflow: Annotated[int, Written("elements that are finite in FP32 and infinite in the format", least=0)] = 0
    nan: Annotated[int, Written("elements that are finite in FP32 and NaN in the format", least=0)] = 0
    underflow: Annotated[float, Written("share of the non-zero elements that become zero", least=0, most=1)] = 0.0
    subnormal: Annotated[
        float, Written("share of the non-zero elements that fall below the smallest normal number", least=0, most=1)
    ] = 0.0
    max_ulp: Annotated[float | None, Written("largest local error in units of the format's last place")] = None
    sqnr_db: Annotated[float | None, Written("signal to rounding noise, 20 log10(1 / local_error)")] = None
    unsupported: Annotated[str | None, Written("why it cannot run in the format")] = None
    cause: Annotated[
        str | None,
        Written(
            "what makes the error; `nested`: results that are not compared; `null`: there is none",
            choices=("overflow", "underflow", "cancellation", "rounding", "discrete", "unsupported", "nan", "nested"),
        ),
    ] = None
    born: Annotated[bool, Written("in the low run, something breaks here that was whole in every input")] = False


DECIDED_BY = ("first-order", "re-run", "group", "not-run")
"""Ways in which a contribution is found."""


@dataclass(frozen=True)
class Contribution:
    """How far one node in one format moves the model's outputs, or the gradients of its parameters (relative L2, unit 1).

    isolated: inputs, op and result low, all else FP32; this decides the verdict. own: the op and its result alone.
    cast: rounding the node's FP32 result on its way into a low consumer. Of gradients: isolated is what the node moves
    forwards and backwards together, own the forward part, backward the other; cast is not asked for.
    """

    isolated: Annotated[
        float,
        Written(
            "how far it alone, low, moves the outputs (relative L2, or a share of `criterion`); the verdict rests on this"
        ),
    ]
    own: Annotated[float, Written("of that, what the operation and its result make, its inputs in FP32")]
    cast: Annotated[float, Written("how far its FP32 result does, rounded on its way into a low reader")]
    decided_by: Annotated[
        str,
        Written(
            "how `isolated` was found: `first-order`: predicted; `re-run` of the model with this node low; `group`: "
            "re-run with this node and others low, which is no less; `not-run`: a run would have to tell, and none did",
            choices=DECIDED_BY,
        ),
    ] = "first-order"
    together: Annotated[int, Written("how many operations were low in that run", least=1)] = 1
    criterion: Annotated[
        str, Written("the criterion that it takes most of, where some were set: effects are shares of what that allows")
    ] = ""
    batch: Annotated[int, Written("number of the batch that `isolated` is of, where it is not the first", least=1)] = 1
    backward: Annotated[float, Written("of gradients, the part that is made backwards")] = 0.0


@dataclass(frozen=True)
class Linearity:
    """Whether first order, from which effects are predicted, holds on this model in a format."""

    format: Annotated[str, Written("the number format")]
    compared: Annotated[int, Written("operations whose effect was predicted and then run", least=1)]
    least: Annotated[float, Written("the smallest of predicted / run among them", least=0)]
    median: Annotated[float, Written("the median of predicted / run", least=0)]
    most: Annotated[float, Written("the largest of predicted / run", least=0)]
    holds: Annotated[bool, Written("whether nine in ten predictions are within 1.6 times what a run says")]
    whole_predicted: Annotated[
        float | None, Written("predicted error of the outputs where everything is low; `null`: it cannot be compared")
    ]
    whole_run: Annotated[float | None, Written("the same, run")]
    confirmed: Annotated[int, Written("predictions beyond the budget that a run bore out", least=0)]
    refuted: Annotated[int, Written("predictions beyond the budget that a run refuted", least=0)]
    left: Annotated[int, Written("predictions beyond the budget that were not run", least=0)]


@dataclass(frozen=True)
class Noise:
    """How far FP32 is from itself: runs from the same state, with the same random numbers, whose memory lies elsewhere."""

    runs: Annotated[int, Written("how many times the model was run in FP32", least=1)] = 1
    error: Annotated[
        float, Written("the most that a run's outputs are from those of the first, by what the budget measures")
    ] = 0.0
    joint: Annotated[
        float,
        Written("the same as relative L2 of all outputs, or the share of an integer output's entries that differ"),
    ] = 0.0
    floor: Annotated[
        float,
        Written(
            "up to this nothing is called an error: three times `error`; 0 where `joint` is a third or more, since nothing can "
            "be told then, where no operation is at fault but state that cannot be put back, and where criteria were set"
        ),
    ] = 0.0
    outputs: Annotated[
        Mapping[str, float], Written("the most by output, relative L2 or share of entries; those that differ")
    ] = field(default_factory=dict)
    nodes: Annotated[
        Mapping[str, float],
        Written("by operation, of two runs of the recorded graph, in the same way; those that differ"),
    ] = field(default_factory=dict)
    operations: Annotated[
        tuple[str, ...],
        Written("operations that are not deterministic: of the same inputs they make other results the second time"),
    ] = ()


@dataclass(frozen=True)
class Verdict:
    """What is said of one node in one format, and why."""

    verdict: Annotated[
        str,
        Written(
            "`safe`; `sensitive`: alone it takes more than a quarter of the budget; `unsafe`: alone it breaks the budget, "
            "turns a finite output non-finite, flips discrete results, or does not exist in the format; `untested`",
            choices=("safe", "sensitive", "unsafe", "untested"),
        ),
    ]
    reason: Annotated[str, Written("why, in one clause")]
    limited_by: Annotated[
        str | None, Written("what the format has too little of; `null`: neither", choices=("range", "precision"))
    ] = None
    batch: Annotated[int, Written("number of the batch that it comes from, where it is not the first", least=1)] = 1


@dataclass(frozen=True)
class Magnitudes:
    """Magnitudes of one tensor, or of several together: a histogram by powers of two, from which any scaling can be read.

    exponents: {floor(log2|x|): count} of what is finite and not zero.
    """

    max_abs: Annotated[float, Written("the largest finite magnitude", least=0)]
    min_abs: Annotated[float, Written("the smallest magnitude that is not zero; 0 if there is none", least=0)]
    zeros: Annotated[int, Written("how many are zero", least=0)]
    exponents: Annotated[
        Mapping[int, int],
        Written(
            '`{"e": how many}`: numbers with 2^e <= magnitude < 2^(e+1); -127 holds FP32\'s subnormal numbers', least=1
        ),
    ]
    nonfinite: Annotated[int, Written("how many are Inf or NaN", least=0)] = 0
    norm: Annotated[float, Written("L2 norm of the finite ones, where it was measured", least=0)] = 0.0
    rounding: Annotated[
        Mapping[str, float],
        Written(
            "by format: relative L2 error of rounding them without overflow, where it was measured; its negative log2 is the "
            "bits that stay"
        ),
    ] = field(default_factory=dict)

    @property
    def nonzero(self) -> int:
        """How many entries are finite and not zero."""
        return sum(self.exponents.values())

    @property
    def zero_share(self) -> float:
        """Share of exact zeros among the finite entries; 0 where there are none."""
        finite = self.nonzero + self.zeros
        return self.zeros / finite if finite else 0.0


@dataclass(frozen=True)
class Weight:
    """Magnitudes of a parameter or buffer."""

    name: Annotated[str, Written("in the state dict, or the graph's where it has none there")]
    kind: Annotated[str, Written("what it is", choices=("parameter", "buffer"))]
    range: Annotated[Magnitudes, Written("its magnitudes")]


MEASURED = frozenset({"MSR001", "MSR002", "MSR003"})
"""Rules that report the measurement itself, where no other rule accounts for it."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that fired on a node.

    declared: the severity in the rule's file. measurable: whether running the operation low can bear the rule out at all.
    """

    rule: Annotated[str, Written("the rule's code, see [rules.md](rules.md)")]
    name: Annotated[str, Written("the rule's name")]
    node: Annotated[str, Written("the node it fired on, by its name in the captured graph", measured=True)] = ""
    owner: Annotated[str, Written("module of that node")]
    op: Annotated[str, Written("ATen overload of that node")]
    source: Annotated[str | None, Written("line that wrote it, as for operations")]
    severity: Annotated[
        str,
        Written(
            "of the rules it supersedes the highest; `info` where the measurement does not bear the rule out; lower where "
            "`plan` is spared it (see [how severe a finding is](command-line.md#how-severe-a-finding-is))",
            choices=("error", "warning", "info"),
        ),
    ]
    confidence: Annotated[
        str, Written("`high` where measured to be unsafe, else as its rule says", choices=("high", "medium", "low"))
    ]
    formats: Annotated[tuple[str, ...], Written("formats it speaks of")]
    message: Annotated[str, Written("what is wrong here, with this model's numbers", measured=True)] = ""
    why: Annotated[str, Written("why that hurts, as the rule has it", measured=True)] = ""
    advice: Annotated[str, Written("what to do, as the rule has it", measured=True)] = ""
    evidence: Annotated[Mapping[str, Any], Written("the facts that the rule read", measured=True)] = field(
        default_factory=dict
    )
    agrees: Annotated[bool | None, Written("whether the measurement bears it out; `null` where there is none")] = None
    cause: Annotated[
        str,
        Written(
            "line and operation at which what it reports begins; findings with the same one have one cause",
            measured=True,
        ),
    ] = ""
    plan: Annotated[
        str | None,
        Written(
            "the plan that `severity` speaks of: the recommended one, else the fastest that holds the budget; `null`: none "
            "does",
            measured=True,
        ),
    ] = None
    bearing: Annotated[
        str | None,
        Written(
            "what becomes of it under that plan. `low`: the operation runs low, and the plan holds the budget; `reads`: it runs "
            "in FP32 whatever the plan keeps, on what was low before; `kept`: the plan keeps it in FP32; `elsewhere`: only "
            "other plans run it in a format that the finding speaks of; `stops`: there is no such plan, and the operation is "
            "unsafe; `null`: none of this can be said",
            choices=("low", "reads", "kept", "elsewhere", "stops"),
            measured=True,
        ),
    ] = None
    references: Annotated[tuple[str, ...], Written("what the rule refers to", measured=True)] = ()
    declared: Annotated[str, Written("the severity that the rule states", measured=True)] = ""
    measurable: Annotated[
        bool, Written("whether running the operation low can bear the rule out at all", measured=True)
    ] = True
    called_from: Annotated[str | None, Written("the call beside that line, as for operations", measured=True)] = None
    met: Annotated[
        Mapping[str, tuple[str, ...]],
        Written(
            "by format, the strategies under which the operation runs in it where all of the model does, if any",
            measured=True,
        ),
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class FlaggedRegion:
    """Connected nodes that are sensitive or unsafe in a format, low together while all else is FP32."""

    format: Annotated[str, Written("the format it was run in")]
    nodes: Annotated[tuple[str, ...], Written("what was run low, by name in the captured graph")]
    scope: Annotated[str, Written("the deepest module that holds all of it")]
    local_error: Annotated[
        float | None, Written("of the values that leave it, the worst one's; relative L2; `null`: not finite")
    ]
    error: Annotated[
        float | None,
        Written("of the model's outputs; relative L2, or the largest share of a criterion where some were set"),
    ]
    explained: Annotated[
        float,
        Written(
            "what its operations' own errors, and the roundings of what enters, add up to in quadrature: an `error` far "
            "above it says that they reinforce each other, far below that they cancel"
        ),
    ]
    failure: Annotated[str | None, Written("why it did not run")] = None
