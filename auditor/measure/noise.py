"""Repeats FP32 runs, compares every operation and output, and finds the operations that cause differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from ..criteria.criterion import floor_of
from ..criteria.measure import Criteria
from ..errors import describe, let_through
from ..execution.execute import RECORDED, Executor, run_pairwise
from ..isolation import isolate
from ..isolation.members import modules_of
from ..isolation.outputs import NamedTensors
from ..isolation.run_model import run_model
from ..numerics.devices import CPU, target_type
from ..numerics.entries import is_plain
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_in
from ..records import Batch, Capture, Contribution, ModelPath, Noise, Subject
from .rerun import OutputMetric

FUSED = (nn.MultiheadAttention, nn.TransformerEncoder, nn.TransformerEncoderLayer)
"""Modules that PyTorch may compute with fused kernels in inference."""

ALIKE = 1e-5
"""Largest relative L2 difference of FP32 outputs with and without the fused path that counts as rounding."""

REPEATED = (37, 211)
"""For each repeated FP32 run: how many numbers are allocated before the run, so that memory addresses differ."""


@dataclass(frozen=True)
class FP32Runs:
    """Results of repeated FP32 runs. measured: their noise. outputs: {id of a batch: outputs of the first run}.

    graded: outputs with gradients enabled, or the model's exception; None if equal to the first run's on a CPU. fused:
    whether runs without gradients take PyTorch's fused transformer path, see `takes_fused_path`.
    """

    measured: Noise = field(default_factory=Noise)
    outputs: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    graded: list[torch.Tensor] | str | None = None
    fused: bool = False


def noise_of(
    path: ModelPath, subject: Subject, output_metric: OutputMetric, seed: int, *, native: bool = False
) -> FP32Runs:
    """Compare repeated FP32 runs with the first; returns the differences and the first run's outputs.

    On a CPU, one more run, with gradients enabled and other memory addresses, suffices if it is bit for bit identical;
    the recording may have found that. On a GPU, or if repeated runs differ, the recorded graph also runs twice, and
    every operation is compared. On a CPU as the target, the runs are those of the user: see `takes_fused_path`.
    """
    if path.repeated is not None and not native:
        return FP32Runs(Noise(runs=2), {id(subject.batches[0]): path.repeated})
    batch = (subject.held_out or subject.batches)[0]
    first = run_model(subject.model, batch, seed=seed)
    fused = target_type() == CPU and takes_fused_path(subject, batch, first, seed)
    if fused:
        first = run_model(subject.model, batch, seed=seed, fused=True)
    moved = [torch.empty(REPEATED[-1])]  # tensors that move the next runs to other memory addresses
    graded: NamedTensors | str
    try:
        graded = run_model(subject.model, batch, seed=seed, gradients=True)
    except Exception as error:
        let_through(error)
        graded = describe(error, None)
    if not native and not isinstance(graded, str) and RECORDED.same([*first], [*graded]):
        return FP32Runs(Noise(runs=2), {id(batch): first})
    count = 1
    apart = 0.0
    joint = 0.0
    outputs: dict[str, float] = {}
    for size in REPEATED:
        moved.append(torch.empty(size))
        try:
            repeated = run_model(subject.model, batch, seed=seed, fused=fused)
            distance = output_metric.distance(first, repeated)
            error_of_all = output_error(first, repeated)
        except Exception as refused:
            let_through(refused)
            break
        apart = max(apart, distance)
        joint = max(joint, error_of_all)
        count += 1
        for name, before, after in zip(first.names, first, repeated, strict=True):
            outputs[name] = max(outputs.get(name, 0.0), output_error([before], [after]))
    nodes: Mapping[str, float] = {}
    operations: tuple[str, ...] = ()
    if apart or native:
        nodes, operations = _twice(path.capture, subject, seed)
    floor = 0.0
    if operations and not isinstance(output_metric.distance, Criteria):
        floor = floor_of(apart, joint)
    result = Noise(
        runs=count,
        error=apart,
        joint=joint,
        floor=floor,
        outputs={name: error for name, error in outputs.items() if error},
        nodes=nodes,
        operations=operations,
    )
    return FP32Runs(result, {id(batch): first}, graded, fused)


def takes_fused_path(subject: Subject, batch: Batch, unfused: NamedTensors, seed: int) -> bool:
    """Whether PyTorch's fused transformer path changes the FP32 outputs by no more than FP32's rounding.

    Users of such a model get that path, so plans are compared there. Where it changes more, since it leaves out entries
    that a mask hides, plans would be compared with other numbers. unfused: the outputs without the fused path.
    """
    if not any(isinstance(module, FUSED) for module in modules_of(subject.model)):
        return False
    try:
        error = output_error(unfused, run_model(subject.model, batch, seed=seed, fused=True))
    except Exception as error_of_path:
        let_through(error_of_path)
        return False
    return 0 < error <= ALIKE


def without_noise(
    contributions: Mapping[str, Mapping[str, Contribution]], noise: Noise
) -> dict[str, dict[str, Contribution]]:
    """Contributions for predicting plans: 0 if a run changed the outputs by no more than the noise.

    Each run contains the whole noise, so a sum over operations would count the noise once per operation.
    """

    def quiet(effect: Contribution) -> Contribution:
        is_measured = effect.decided_by in ("re-run", "group")
        if is_measured and effect.isolated <= noise.floor:
            return replace(effect, isolated=0.0, own=0.0, cast=0.0)
        return effect

    result = dict[str, dict[str, Contribution]]()
    for name, formats in contributions.items():
        result[name] = {fmt: quiet(effect) for fmt, effect in formats.items()}
    return result


def _twice(capture: Capture, subject: Subject, seed: int) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Return {operation: difference of its results in two runs of the graph}, and the non-deterministic operations.

    Differences are relative L2 errors, or the share of discrete entries that differ.
    """
    differences = dict[str, float]()
    sources = list[str]()  # the operations whose inputs are equal
    first = Executor(capture.graph_module)
    second = Executor(capture.graph_module)
    inputs = capture.bind(subject.model, subject.batches[0])
    try:
        with torch.no_grad(), isolate(seed=seed):
            for n, result, other in run_pairwise(first, second, inputs):
                error = _difference_of(result, other)
                if not error > 0:
                    continue
                if not any(source.name in differences for source in n.all_input_nodes):
                    sources.append(n.name)
                differences[n.name] = error
    except Exception as error:
        let_through(error)
    return differences, tuple(sources)


def _difference_of(result: Any, other: Any) -> float:
    """The difference of two results, by their plain tensors; 0 without one."""
    pairs = zip(tensors_in(result), tensors_in(other), strict=True)
    plain = [(x, y) for x, y in pairs if is_plain(x) and is_plain(y)]
    if not plain:
        return 0.0
    return output_error([x for x, _ in plain], [y for _, y in plain])
