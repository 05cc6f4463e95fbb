"""What a plan is, what it was predicted to cost, and how it held up."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from .program import Program
from .run import CriterionValue, NonFinite, Score, Timed
from .written import Written

RAISED = ("none", "inputs", "weights", "attributes", "kept")
"""What becomes of that which an audited model stores, or is given, in FP16 or BF16."""


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope."""

    precision: Annotated[str, Written("`fp32`, or the plan's `format`")]
    because: Annotated[
        tuple[str, ...], Written("codes of rules and reasons in words; empty where all of it runs low")
    ] = ()
    output: Annotated[
        str,
        Written(
            "`cast`: what leaves the scope is in the precision around it; `keep`: it stays as it is (strategy `cast` only)",
            choices=("cast", "keep"),
        ),
    ] = "cast"
    cost: Annotated[
        float | None,
        Written(
            "share of what the plan takes, by its objective, that lowering this island's own operations would save, casts not counted; "
            "`null` where it runs low",
        ),
    ] = None
    keep: Annotated[
        tuple[str, ...],
        Written(
            "functions of torch that stay FP32 in a low scope and in the modules in it: `pow` is torch.pow, x.pow and x ** 2; "
            "empty where there are none"
        ),
    ] = ()


KINDS = (
    "unsafe",
    "untested",
    "conflict",
    "budget",
    "margin",
    "no-gain",
    "tied",
    "inherited",
    "author",
    "strategy",
    "not-floating",
)
"""Why something does not run low, in one word."""


@dataclass(frozen=True)
class Reason:
    """Why modules or operations do not run low under a plan, in one clause that holds for each of them."""

    kind: Annotated[
        str,
        Written(
            "`unsafe`: an operation of it must not run low; `untested`: what it does low is not known; `conflict`: low, it "
            "would be handed two dtypes; `budget`: lowering it alone breaks the budget; `margin`: that stays within the "
            "budget, but not within the share of it that a plan uses; `no-gain`: it can be lowered, alone, and nothing is "
            "gained by it; `tied`: it shares a weight; `inherited`: FP32 reaches it, or would have to leave it; `author`: so it is "
            "written; `strategy`: the strategy runs it so by itself; `not-floating`: nothing in it has a precision",
            choices=KINDS,
        ),
    ]
    words: Annotated[str, Written("the same in one clause, with its evidence")]
    modules: Annotated[tuple[str, ...], Written("modules in FP32 that it is about")] = ()
    operations: Annotated[
        tuple[str, ...], Written("operations in modules that run low, and those without a precision, by name")
    ] = ()
    by: Annotated[str | None, Written("the module or operation that decides, where it is another")] = None
    adds: Annotated[
        float | None,
        Written("what lowering it alone adds to the plan's error, of several the most; `null` where that is forbidden"),
    ] = None
    left: Annotated[float | None, Written("how much of the budget the plan leaves")] = None
    saves: Annotated[
        float | None,
        Written(
            "share of what the plan still takes, by its objective, that lowering it alone saves, of several the most"
        ),
    ] = None
    ran: Annotated[
        bool, Written("whether `adds` comes from a run of the recorded graph with it lowered; else it is predicted")
    ] = False


@dataclass(frozen=True)
class Verification:
    """The emitted artefact, run for real: the batches without gradients, and the first one with them.

    error: relative L2 of all outputs, worst run without gradients; None if it failed. execution: native | emulated.
    """

    error: Annotated[float | None, Written("as it was run; `measured_error` is that of a run that counts")]
    finite: Annotated[bool, Written("whether the outputs were")]
    worst_output: Annotated[float | None, Written("the largest of any one output tensor")]
    inputs: Annotated[
        str,
        Written(
            "`held-out`: inputs the plan was not made from; `audited`: the same inputs", choices=("held-out", "audited")
        ),
    ]
    execution: Annotated[
        str, Written("`native`: on a GPU; `emulated`: on a CPU that imitated one", choices=("native", "emulated"))
    ]
    failure: Annotated[str | None, Written("why the patched model did not run, in one line")] = None
    joint: Annotated[
        float | None,
        Written(
            "relative L2 of all outputs together, or the share of an integer output's entries that differ where that is "
            "larger; worst run without gradients, where `measured_error` is something else"
        ),
    ] = None
    criteria: Annotated[
        tuple[CriterionValue, ...], Written("the criteria that were set, each with what it came to")
    ] = ()
    apart: Annotated[
        Mapping[str, float],
        Written("relative L2 error of each output whose own is over ten times that of all outputs together, by name"),
    ] = field(default_factory=dict)
    with_gradients: Annotated[
        float | None,
        Written(
            "`measured_error` on the first batch outside of `torch.no_grad()`, where PyTorch runs some operations by other "
            "kernels; `null`: not run so"
        ),
    ] = None
    ungraded: Annotated[
        str | None,
        Written(
            "what the FP32 model raises with gradients enabled, so that the patched one was not run so; `null`: nothing"
        ),
    ] = None
    noise: Annotated[
        float | None,
        Written(
            "how far apart runs of the FP32 model were, by what `measured_error` is in; errors are no better known than that"
        ),
    ] = None
    floor: Annotated[
        float, Written("error up to which it holds all the same: three times `noise`, where that is over the budget")
    ] = 0.0
    nonfinite: Annotated[
        NonFinite | None, Written("where the run is not finite: its first operation that is not, as for `baselines`")
    ] = None


@dataclass(frozen=True)
class Memory:
    """Bytes that a forward pass needs."""

    weights: Annotated[int, Written("parameters and buffers", least=0)]
    activations: Annotated[int, Written("the most that inputs, results and low copies take at one time", least=0)]


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with what it costs and how it held up."""

    name: Annotated[str, Written("the same as its key in `plans`")]
    strategy: Annotated[
        str,
        Written(
            "`autocast`: weights stay FP32, regions run under torch.autocast; `cast`: weights are stored in the format; "
            "`graph`: a program of its own, in which every operation has its precision"
        ),
    ]
    format: Annotated[str, Written("name of the low format, such as `fp16`")]
    scopes: Annotated[
        Mapping[str, ScopeChoice],
        Written("precision by module; a module that is not listed has that of the nearest listed one above it"),
    ]
    predicted_error: Annotated[
        float, Written("before anything was run: the contributions of all roundings, in quadrature")
    ] = math.nan
    low_precision_flops: Annotated[
        float, Written("share of the floating-point operations that run low", least=0, most=1)
    ] = math.nan
    predicted_speedup: Annotated[
        float,
        Written(
            "over FP32, by a roofline model of the GPU in `target` (see [how it works](how-it-works.md#what-a-choice-costs))"
        ),
    ] = math.nan
    measured_error: Annotated[
        float | None,
        Written(
            "of the patched model against FP32, without gradients, worst batch; `null`: it failed or was not finite"
        ),
    ] = None
    verified: Annotated[
        bool, Written("the patched model was run, without gradients and with them, and is within the budget both times")
    ] = False
    verification: Annotated[Verification | None, Written("the run of the patched model; `null`: it was not run")] = None
    pareto: Annotated[
        tuple[tuple[float, float], ...],
        Written("`[predicted error, time as a share of the slowest]` of the plans it was chosen from", measured=True),
    ] = ()
    note: Annotated[str, Written("what is to be said of it beside, in words", measured=True)] = ""
    reasons: Annotated[
        tuple[Reason, ...], Written("why modules and operations do not run low under the plan, each one once")
    ] = ()
    least: Annotated[
        tuple[str, ...] | None,
        Written(
            "modules that stay FP32, whole or in part, where all that gains nothing by it is low too: the recorded graph, run so, holds the "
            "budget wherever the plan does; `null`: not looked for"
        ),
    ] = None
    objective: Annotated[
        str,
        Written(
            "what the plan was to have little of within the budget: `time`, `memory`, or `flops` in FP32",
            choices=("time", "memory", "flops"),
        ),
    ] = "time"
    raised: Annotated[
        str,
        Written(
            "what is raised to FP32 where the plan does not store it low, since the audited model came with it in FP16 or "
            "BF16: `none`; `inputs`; `weights`: parameters and buffers too; `attributes`: also tensors that modules hold "
            "without registering them; `kept`: nothing, since the forward casts to what it is stored in",
            choices=RAISED,
        ),
    ] = "none"
    stored_low: Annotated[
        Mapping[str, int],
        Written(
            "how many numbers of the audited model's parameters were stored in FP16 or BF16, by torch's name of the dtype; "
            "`apply` refuses a model with more, unless it stays low"
        ),
    ] = field(default_factory=dict)
    reach: Annotated[
        float | None, Written("where nothing is low: the smallest error that a run with anything low has")
    ] = None
    target: Annotated[str | None, Written("the GPU that `predicted_speedup` is for; `null` where it is not known")] = (
        None
    )
    memory: Annotated[Memory | None, Written("what one forward needs under the plan")] = None
    fp32_memory: Annotated[Memory | None, Written("the same without the plan")] = None
    program: Annotated[
        Program | None,
        Written("what a plan of strategy `graph` is; its scopes say of the root what most of it runs in"),
    ] = None
    score: Annotated[
        Score | None,
        Written("what the user's own function (`evaluation`) says of the model under the plan; only of verified plans"),
    ] = None

    timed: Annotated[
        Timed | None, Written("time and memory of one forward of the patched model, measured where `timing` says")
    ] = None

    @property
    def holds(self) -> bool:
        """Whether it is verified, and the user's own score, where there is one, no worse than it may be."""
        return self.verified and (self.score is None or self.score.holds)

    @property
    def kept(self) -> tuple[str, ...]:
        """Modules in FP32 with something in them that has a precision; where no reasons are known, scopes in FP32."""
        if not self.reasons:
            return tuple(path for path, choice in self.scopes.items() if choice.precision == "fp32")
        return tuple(path for reason in self.reasons if reason.kind != "not-floating" for path in reason.modules)

    @property
    def islands(self) -> int:
        """How many scopes have another precision than the root."""
        return sum(choice.precision != self.scopes[""].precision for choice in self.scopes.values())

    @property
    def exceptions(self) -> tuple[tuple[str, str], ...]:
        """(module, function) of what stays FP32 in low scopes."""
        return tuple((path, name) for path, choice in self.scopes.items() for name in choice.keep)
