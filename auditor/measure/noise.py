"""FP32 run again and again: how far it is from itself, at every operation and output, and which operations make it so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from ..criteria.criterion import floor_of
from ..criteria.measure import Criteria
from ..errors import first_line, let_through
from ..execution.execute import RECORDED, Executor
from ..isolation import isolated
from ..isolation.answer import answer
from ..isolation.outputs import NamedTensors
from ..numerics.entries import is_plain
from ..numerics.metrics import output_error
from ..numerics.nodes import tensors_of
from ..records import Batch, Capture, Contribution, Noise, Subject
from .rerun import Yardstick

REPEATED = (37, 211)
"""Numbers that are allocated before the FP32 model is run once more, a run each, so that its memory lies elsewhere."""


@dataclass(frozen=True)
class FP32Runs:
    """What was found, and the outputs of the first run as {id of a batch: outputs}.

    graded: outputs with gradients enabled, or what the model raises then; None where they say nothing new: on a CPU, the
    same to the bit.
    """

    found: Noise = field(default_factory=Noise)
    known: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    graded: list[torch.Tensor] | str | None = None


def noise_of(capture: Capture, subject: Subject, yardstick: Yardstick, seed: int, *, native: bool = False) -> FP32Runs:
    """How far runs in FP32 are from the first on what plans are checked on, and the outputs of that one.

    One more run, with gradients and other memory, that gives the same to the bit is repetition enough on a CPU. The recorded
    graph is run twice, operation by operation, on a GPU and wherever the model differs from itself. As far as the model runs again.
    """
    batch = (subject.held_out or subject.batches)[0]
    first, moved, runs = answer(subject.model, batch, seed=seed), [torch.empty(REPEATED[-1])], 1
    graded = _with_gradients(subject, batch, seed)
    if not native and not isinstance(graded, str) and RECORDED.same([*first], [*graded]):
        return FP32Runs(Noise(runs=2), {id(batch): first})
    error, joint = 0.0, 0.0
    outputs: dict[str, float] = {}
    for size in REPEATED:
        moved.append(torch.empty(size))
        try:
            again = answer(subject.model, batch, seed=seed)
            error, joint = max(error, yardstick.distance(first, again)), max(joint, output_error(first, again))
        except Exception as refused:
            let_through(refused)
            break
        runs += 1
        for name, was, now in zip(first.names, first, again, strict=True):
            outputs[name] = max(outputs.get(name, 0.0), output_error([was], [now]))
    nodes, sources = _twice(capture, subject, seed) if error or native else ({}, ())
    result = Noise(
        runs=runs,
        error=error,
        joint=joint,
        floor=floor_of(error, joint) if sources and not isinstance(yardstick.distance, Criteria) else 0.0,
        outputs={name: apart for name, apart in outputs.items() if apart},
        nodes=nodes,
        operations=sources,
    )
    return FP32Runs(result, {id(batch): first}, graded)


def _with_gradients(subject: Subject, batch: Batch, seed: int) -> NamedTensors | str:
    """FP32 outputs of a run with gradients enabled; or why the model cannot be run so."""
    try:
        return answer(subject.model, batch, seed=seed, gradients=True)
    except Exception as error:
        let_through(error)
        return f"{type(error).__name__}: {first_line(error)}"


def without_noise(found: Mapping[str, Mapping[str, Contribution]], noise: Noise) -> dict[str, dict[str, Contribution]]:
    """Contributions to predict plans from: where a run moved the outputs by no more than the noise, nothing is known of them.

    Each such run has all of the noise in it, which would be counted once an operation.
    """

    def quiet(one: Contribution) -> Contribution:
        ran = one.decided_by in ("re-run", "group")
        return replace(one, isolated=0.0, own=0.0, cast=0.0) if ran and one.isolated <= noise.floor else one

    return {name: {fmt: quiet(one) for fmt, one in formats.items()} for name, formats in found.items()}


def _twice(capture: Capture, subject: Subject, seed: int) -> tuple[Mapping[str, float], tuple[str, ...]]:
    """How far each operation's results are apart in two runs of the graph, and which make that of equal inputs."""
    first, apart, sources = dict[str, Any](), dict[str, float](), list[str]()

    def compare(n: fx.Node, result: Any) -> None:
        if n.op == "call_function" and (found := _difference(first[n.name], result)) > 0:
            if not any(source.name in apart for source in n.all_input_nodes):
                sources.append(n.name)
            apart[n.name] = found

    inputs = capture.bind(subject.model, subject.batches[0])
    try:
        for observe in (lambda n, result: first.update({n.name: result}), compare):
            with torch.no_grad(), isolated(seed=seed):
                Executor(capture.graph_module, observer=observe).run(*inputs)
    except Exception as error:
        let_through(error)
    return apart, tuple(sources)


def _difference(result: Any, other: Any) -> float:
    """Relative L2 of all floating results, or the share of others that differ; 0 for what is not compared."""
    pairs = [(a, b) for a, b in zip(tensors_of(result), tensors_of(other), strict=True) if is_plain(a) and is_plain(b)]
    return output_error([a for a, _ in pairs], [b for _, b in pairs]) if pairs else 0.0
