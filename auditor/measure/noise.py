"""Repeats FP32 runs, compares every operation and output, and finds the operations that cause differences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

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
    """The measured noise of FP32, and the outputs of the first run as {id of a batch: outputs}.

    graded: outputs with gradients enabled, or the model's exception; None if equal to the first run's on a CPU. fused:
    whether runs without gradients take PyTorch's fused transformer path, see `takes_fused_path`.
    """

    found: Noise = field(default_factory=Noise)
    known: dict[int, list[torch.Tensor]] = field(default_factory=dict)
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
    first, moved, runs = run_model(subject.model, batch, seed=seed), [torch.empty(REPEATED[-1])], 1
    fused = target_type() == CPU and takes_fused_path(subject, batch, first, seed)
    if fused:
        first = run_model(subject.model, batch, seed=seed, fused=True)
    graded: NamedTensors | str
    try:
        graded = run_model(subject.model, batch, seed=seed, gradients=True)
    except Exception as error:
        let_through(error)
        graded = describe(error, None)
    if not native and not isinstance(graded, str) and RECORDED.same([*first], [*graded]):
        return FP32Runs(Noise(runs=2), {id(batch): first})
    apart, joint = 0.0, 0.0
    outputs: dict[str, float] = {}
    for size in REPEATED:
        moved.append(torch.empty(size))
        try:
            again = run_model(subject.model, batch, seed=seed, fused=fused)
            apart, joint = max(apart, output_metric.distance(first, again)), max(joint, output_error(first, again))
        except Exception as refused:
            let_through(refused)
            break
        runs += 1
        for name, was, now in zip(first.names, first, again, strict=True):
            outputs[name] = max(outputs.get(name, 0.0), output_error([was], [now]))
    nodes, sources = _twice(path.capture, subject, seed) if apart or native else ({}, ())
    result = Noise(
        runs=runs,
        error=apart,
        joint=joint,
        floor=floor_of(apart, joint) if sources and not isinstance(output_metric.distance, Criteria) else 0.0,
        outputs={name: error for name, error in outputs.items() if error},
        nodes=nodes,
        operations=sources,
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


def without_noise(found: Mapping[str, Mapping[str, Contribution]], noise: Noise) -> dict[str, dict[str, Contribution]]:
    """Contributions for predicting plans: 0 if a run changed the outputs by no more than the noise.

    Each run contains the whole noise, so a sum over operations would count the noise once per operation.
    """

    def quiet(one: Contribution) -> Contribution:
        ran = one.decided_by in ("re-run", "group")
        return replace(one, isolated=0.0, own=0.0, cast=0.0) if ran and one.isolated <= noise.floor else one

    return {name: {fmt: quiet(one) for fmt, one in formats.items()} for name, formats in found.items()}


def _twice(capture: Capture, subject: Subject, seed: int) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """Return {operation: difference of its results in two runs of the graph}, and the non-deterministic operations.

    Differences are relative L2 errors, or the share of discrete entries that differ.
    """
    apart, sources = dict[str, float](), list[str]()
    first, second = (Executor(capture.graph_module) for _ in range(2))
    inputs = capture.bind(subject.model, subject.batches[0])
    try:
        with torch.no_grad(), isolate(seed=seed):
            for n, result, other in run_pairwise(first, second, inputs):
                pairs = zip(tensors_in(result), tensors_in(other), strict=True)
                compared = [(a, b) for a, b in pairs if is_plain(a) and is_plain(b)]
                error = output_error([a for a, _ in compared], [b for _, b in compared]) if compared else 0.0
                if error > 0 and not any(source.name in apart for source in n.all_input_nodes):
                    sources.append(n.name)
                apart |= {n.name: error} if error > 0 else {}
    except Exception as error:
        let_through(error)
    return apart, tuple(sources)
