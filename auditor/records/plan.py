"""What a plan is, what it was predicted to cost, and how it held up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ScopeChoice:
    """Precision of one scope. output: "keep" leaves an FP32 island's result FP32 (cast strategy), "cast" lowers it.

    cost: share of the plan's predicted time that lowering this island's own operations would save, casts not counted;
    None if it is low.
    """

    precision: str
    because: tuple[str, ...] = ()
    output: str = "cast"
    cost: float | None = None


@dataclass(frozen=True)
class Verification:
    """The emitted artefact, run for real. error: relative L2 of all outputs, worst run; None if it failed.

    Runs are the batches without gradients, and the first one with them. worst_output: the largest error of any single
    output tensor. inputs: "held-out" or "audited". execution: native | emulated. failure: why, in one line.
    """

    error: float | None
    finite: bool
    worst_output: float | None
    inputs: str
    execution: str
    failure: str | None = None


@dataclass(frozen=True)
class Memory:
    """Bytes a forward pass needs: its weights and buffers, and the most its inputs and activations take at one time."""

    weights: int
    activations: int


@dataclass(frozen=True)
class Plan:
    """Precision of every scope under one strategy and format, with what it costs and how it held up.

    target: the device that the speed-up is predicted for; memory, fp32_memory: predicted, with the plan and without.
    """

    name: str
    strategy: str
    format: str
    scopes: Mapping[str, ScopeChoice]
    predicted_error: float
    low_precision_flops: float
    predicted_speedup: float
    measured_error: float | None = None
    verified: bool = False
    verification: Verification | None = None
    pareto: tuple[tuple[float, float], ...] = ()
    note: str = ""
    target: str | None = None
    memory: Memory | None = None
    fp32_memory: Memory | None = None


@dataclass(frozen=True)
class Baseline:
    """What happens without a plan: the whole model under plain autocast, or plainly cast. None if it raised.

    rules_only: the same with FP32 wherever a rule fired; low_precision_flops: of that, the share that is low.
    """

    measured_error: float | None
    finite: bool
    failure: str | None = None
    low_precision_flops: float | None = None
    rules_only: Baseline | None = None
