"""What a model does when it is run as its user runs it: FP32 under the user's own flags, and the time and memory it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from .written import Written


@dataclass(frozen=True)
class Today:
    """FP32 as the user's own flags have it, held against FP32 in IEEE arithmetic."""

    computed_in: Annotated[
        tuple[str, ...],
        Written("what the flags in `environment` let FP32 be computed in on this device: `tf32`, `bf16`"),
    ]
    measured_error: Annotated[
        float | None,
        Written(
            "of the model under those flags against FP32 in IEEE arithmetic, from which all other errors are, worst batch; "
            "`null`: it failed or was not finite"
        ),
    ]
    finite: Annotated[bool, Written("whether the outputs were")]
    failure: Annotated[str | None, Written("why it did not run")] = None


@dataclass(frozen=True)
class NonFinite:
    """The first operation of a low run that makes Inf or NaN of what is finite in FP32, and where the cause begins."""

    node: Annotated[str, Written("the operation, by its name in the captured graph")]
    owner: Annotated[str, Written("module of that operation")]
    op: Annotated[str, Written("ATen overload of that operation")]
    source: Annotated[str | None, Written("line that wrote it, as for operations")]
    value: Annotated[str, Written("what it makes", choices=("NaN", "Inf"))]
    cause: Annotated[
        str,
        Written(
            "why: `overflow` and `rounding` of the operation itself or of what it reads; `underflow`: a value that it reads "
            "went to zero; `cancellation`: a difference that it reads lost its digits, and with them its sign",
            choices=("overflow", "underflow", "cancellation", "rounding"),
        ),
    ]
    begins: Annotated[str, Written("the operation at which that happens: the same one, or one upstream")]
    begins_owner: Annotated[str, Written("module of that operation")]
    begins_op: Annotated[str, Written("ATen overload of that operation")]
    begins_source: Annotated[str | None, Written("line that wrote it")]
    rules: Annotated[tuple[str, ...], Written("codes of the rules that fired on either of the two")] = ()
    batch: Annotated[
        int, Written("number of the batch that it was run on, where it is not the first", sparse=True, least=1)
    ] = 1


@dataclass(frozen=True)
class Times:
    """How long one forward took, over repeats."""

    median: Annotated[float, Written("seconds of one forward", least=0)]
    low: Annotated[float, Written("first quartile of the repeats", least=0)]
    high: Annotated[float, Written("third quartile", least=0)]
    repeats: Annotated[int, Written("how many were timed, after those that warm up", least=1)]
    speedup: Annotated[
        float | None,
        Written(
            "median of FP32 in IEEE arithmetic, run in the same way, over this one's; `null` where that was not run"
        ),
    ] = None
    speedup_low: Annotated[float | None, Written("FP32's first quartile over this one's third")] = None
    speedup_high: Annotated[float | None, Written("FP32's third quartile over this one's first")] = None


@dataclass(frozen=True)
class Timed:
    """What one forward took, measured."""

    eager: Annotated[Times | None, Written("run as it is; `null`: see `missing`")] = None
    compiled: Annotated[Times | None, Written("under `torch.compile`; `null`: see `missing`")] = None
    cuda_graph: Annotated[Times | None, Written("captured in a CUDA graph and replayed; `null`: see `missing`")] = None
    memory: Annotated[
        int | None,
        Written(
            "bytes: the model's parameters and buffers, the inputs, and the most that torch's allocator gave out beyond them "
            "in one forward, run as it is; `null`: see `missing`",
            least=0,
        ),
    ] = None
    memory_share: Annotated[
        float | None, Written("`memory` over that of FP32 in IEEE arithmetic; `null` of that itself", least=0)
    ] = None
    decides: Annotated[
        bool,
        Written(
            "whether the recommendation goes by `eager` and `memory`: on a GPU; those of a CPU say nothing of the GPU in `target`"
        ),
    ] = False
    missing: Annotated[
        Mapping[str, str], Written("why there is none of `eager`, `compiled`, `cuda_graph` or `memory`, by its name")
    ] = field(default_factory=dict)


@dataclass(frozen=True)
class Timing:
    """What times were taken on, and those of FP32."""

    device: Annotated[str, Written("what ran: the GPU's name, or `cpu`")]
    batch: Annotated[int | None, Written("entries along the first axis of the first tensor that the model was given")]
    threads: Annotated[int, Written("how many threads torch had on the CPU", least=1)]
    fp32: Annotated[Timed, Written("the model in FP32, in IEEE arithmetic")]
    fp32_today: Annotated[
        Timed | None,
        Written("the same under the caller's own flags, where these let it be computed otherwise, such as in TF32"),
    ] = None
