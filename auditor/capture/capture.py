"""Records a model's run on its first batch as a graph, and checks that a replay of the graph reproduces the run."""

from __future__ import annotations

import linecache
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from ..errors import AuditorError, CaptureError, MeasureError, describe, let_through
from ..isolation import isolate
from ..isolation.members import modules_of
from ..isolation.outputs import NamedTensors, tensor_outputs
from ..isolation.process import disable_compilers, disable_fused_path
from ..isolation.run_model import copy_batch, from_the_start, run_model
from ..numerics.entries import over_tensors
from ..numerics.formats import dtype_name
from ..numerics.metrics import output_error
from ..numerics.nodes import row_of, tensors_in
from ..records import AutocastRegion, Batch, Capture, ModelPath, Node, Placeholder, Subject
from .builder import Binder, RecordedModule, Recording, tensor_at
from .calls import paths_of
from .literals import compare_literals
from .paths import on_the_path, usable
from .record import record
from .source import SourceLine, line_of

AGREEMENT = 1e-6
"""Relative L2 difference up to which two runs of a model count as equal: memory addresses may change the rounding."""

REPEATS = 1e-4
"""Relative L2 difference up to which a replay of the graph counts as equal to the recorded run: memory addresses change
the rounding, and a model may magnify the change."""

NOISE = 8.0
"""A replay may differ from the recorded run by this many times the difference between two replays, which is not 0 if
operations are non-deterministic."""

_PATH = "Python code or a shape depends on the values of tensors; only operations that these inputs run are audited."
_THREADS = (
    "The model calls modules in other threads. Operations in these threads are not audited, and autocast does not "
    "reach them. To have the modules audited, call them in the thread that runs the model."
)
_HANDLING = (
    "every run of the audit starts with the model's original parameters, buffers and attributes; state in closures, "
    "globals, caches and iterators is not restored."
)


def capture(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> Capture:
    """Record the model's run on its first batch as a Capture: a graph with a description of every operation."""
    return record_path(subject, formats, seed).capture


def record_path(subject: Subject, formats: tuple[str, ...] = (), seed: int = 0) -> ModelPath:
    """Record the model's run on its first batch, replay the graph, and compare the outputs.

    formats: for each, also find the numbers in the graph that Python derives from a dtype, such as
    `torch.finfo(x.dtype).min`. The result lists all batches for which the graph is known to be valid. Raises:
    CaptureError(slug="capture-failed") if the model does not run, or if the replay fails or has other outputs;
    CaptureError(slug="nothing-to-audit") if no operation could run in another precision.
    """
    batch: Batch = subject.batches[0]

    def run() -> tuple[Recording, NamedTensors, bool, str | None]:
        with isolate(batch):  # changes to the inputs are not state of the model
            recording, outputs = record(subject.model, batch)
        return recording, outputs, *history_matters(subject.model, batch, outputs, seed)

    try:
        recording, outputs, repeats, history = from_the_start(subject.model, batch, run, seed)
    except Exception as error:
        let_through(error)
        if isinstance(error, AuditorError) and (error.slug == "emulation-busy" or not isinstance(error, MeasureError)):
            raise
        raise CaptureError(
            f"{subject.name} could not be recorded: {describe(error)}. "
            "Check that the model runs on these inputs in FP32, outside torch.compile.",
            slug="capture-failed",
        ) from error
    result = assemble(recording, subject.model, batch)
    _check_floating(result, subject.name, outputs)
    _check_repeats(result, subject, batch, outputs)
    result = compare_literals(result, recording, subject.model, batch, formats, seed)
    result = replace(
        result,
        same_path=on_the_path(recording, subject, seed) if recording.reads else frozenset(),
        warnings=(*result.warnings, *([history] if history else [])),
    )
    return ModelPath(result, tuple(usable(result, subject)), outputs.names, outputs if repeats else None)


def record_with_gradients(subject: Subject, seed: int = 0) -> Capture:
    """Record the first batch's run with gradients enabled, so that detached values and `no_grad` blocks are known.

    Exceptions of the model's code are passed on.
    """
    batch: Batch = subject.batches[0]

    def run() -> Recording:
        with isolate(batch):  # changes to the inputs are not state of the model
            recording, _ = record(subject.model, batch)
        return recording

    recording = from_the_start(subject.model, batch, run, seed, gradients=True)
    return assemble(recording, subject.model, batch)


def _check_floating(capture: Capture, name: str, outputs: NamedTensors) -> None:
    """Raises CaptureError(slug="nothing-to-audit") if no recorded operation could run in another precision."""
    floating = [node.dtype for node in capture.nodes.values() if node.floating]
    if not outputs:
        message = (
            f"{name} returns no tensor, so there is no output to compare. Return tensors from its forward: the operations "
            "behind a number (.item()), an array or a text cannot be determined."
        )
    elif not floating:
        message = (
            f"no floating-point operation leads to the tensors that {name} returns, so there is no precision to audit. Pass a "
            "model that computes its outputs from floating-point tensors. The operations behind a number (.item()), an array, "
            "a text, or entries that determine a shape cannot be determined."
        )
    elif set(floating) <= {"float64", "complex128"}:
        message = (
            f"{name} computes only in FP64, which an audit does not lower. Pass model.float() and inputs in FP32 to audit "
            "lower precisions."
        )
    else:
        return
    raise CaptureError(message, slug="nothing-to-audit")


def _check_repeats(recording: Capture, subject: Subject, batch: Batch, outputs: Sequence[torch.Tensor]) -> None:
    """Replay the graph. Raises CaptureError(slug="capture-failed") if this fails, or differs from the recorded run much
    more than two replays differ: the noise of non-deterministic operations is not an error of the recording."""

    def replay_outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            return _unnest(tensor_outputs(recording.graph_module(*recording.bind(subject.model, batch))))

    try:
        again = replay_outputs()
    except Exception as error:
        let_through(error)
        raise CaptureError(
            f"{subject.name} runs, but a replay of its recorded operations fails: {describe(error)}. Check whether the model "
            "uses an operation that works only inside a context manager, or a resource that is freed after the run.",
            slug="capture-failed",
        ) from error
    outputs = _unnest(outputs)
    difference = output_error(outputs, again) if len(again) == len(outputs) else math.inf
    if difference <= REPEATS:
        return
    is_noise = math.isfinite(difference) and difference <= NOISE * output_error(again, replay_outputs())
    if not is_noise:
        raise CaptureError(
            f"{subject.name} returns other outputs than a replay of its recorded operations. Check whether the model keeps "
            "state outside its modules, or uses a non-deterministic operation.",
            slug="capture-failed",
        )


def _unnest(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [part for x in tensors for part in (x.unbind() if x.is_nested else [x])]


def history_matters(
    model: nn.Module, batch: Batch, outputs: Sequence[torch.Tensor], seed: int
) -> tuple[bool, str | None]:
    """Whether a later call, with gradients enabled, has the same outputs; if not, a warning if the cause is state that
    the model keeps between calls.

    The caller has just run the model, and restores the model's state later. outputs: those of that run. The model
    is first called on changed inputs, since some state affects only a call that follows other inputs. A cache that is
    filled once changes no output; growing caches, counters and statistics do.
    """

    def call_model(given: Batch) -> list[torch.Tensor]:
        with isolate(batch, seed=seed), disable_fused_path(), disable_compilers():
            args, kwargs = copy_batch(given)
            return [x.detach().clone() for x in tensor_outputs(model(*args, **kwargs))]

    def roll(x: torch.Tensor) -> torch.Tensor:
        """Roll a tensor by one along its last dimension; masks and tensors without strides are returned unchanged."""
        moved = x.dtype is not torch.bool and x.layout is torch.strided and not x.is_nested and x.dim() > 0
        return x.detach().roll(1, -1) if moved else x

    try:
        # Kernels on sparse matrices read beyond their memory if rolled indices describe no matrix: such ones must raise.
        with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            call_model(over_tensors(roll, batch))
    except Exception as problem:  # the model may not accept these values
        let_through(problem)
    try:
        if output_error(outputs, run_model(model, batch, seed=seed, gradients=True)) == 0:
            return True, None
    except Exception as problem:  # the model may not run with gradients
        let_through(problem)
    try:
        error = output_error(outputs, call_model(batch))
        if error <= AGREEMENT:
            return False, None
        what = f"differs by {error:.2g} (relative L2; for integers the share that changed, if larger)"
    except MeasureError:
        what = "returns other shapes"
    except Exception as problem:
        let_through(problem)
        what = f"fails ({describe(problem)})"
    return False, f"The model keeps state between calls: a later call on the same inputs {what}; {_HANDLING}"


def assemble(recording: Recording, model: nn.Module, batch: Batch) -> Capture:
    """Convert a Recording to a Capture: the graph, with a description of every operation and placeholder."""
    paths = paths_of(model)
    placeholders = _describe_placeholders(recording, model)
    types = {paths[id(module)][0]: type(module) for module in modules_of(model)}
    order = tuple(placeholder.name for placeholder in placeholders)
    operations = [node for node in recording.graph.nodes if node.op == "call_function"]
    warnings = list[str]()
    if recording.reads:
        warnings.append(_PATH)
    if recording.elsewhere:
        warnings.append(_THREADS)
    return Capture(
        graph_module=RecordedModule(nn.Module(), recording.graph),
        nodes={node.name: _describe(node, recording, types) for node in operations},
        placeholders=placeholders,
        outputs=recording.outputs,
        bind=Binder(order, recording.names, recording.constants, tuple(batch[1])),
        method="path" if recording.reads else "run",
        operations=recording.operations,
        aliases={first: tuple(others) for first, *others in paths.values() if others},
        warnings=tuple(warnings),
    )


def _describe_placeholders(recording: Recording, model: nn.Module) -> tuple[Placeholder, ...]:
    paths = paths_of(model)
    holders: dict[int, dict[str, None]] = {}  # {id of a parameter or buffer: first paths of its modules}
    for module in modules_of(model):
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            holders.setdefault(id(tensor), {})[paths[id(module)][0]] = None
    placeholders = list[Placeholder]()
    for node in recording.graph.find_nodes(op="placeholder"):
        kind = recording.kinds[node.name]
        if kind == "held":
            kind = "constant"
        fqn = recording.names.get(node.name)
        own_holders: Iterable[str] = ()
        if fqn is not None:
            own_holders = holders.get(id(tensor_at(model, fqn)), ())
        placeholders.append(
            Placeholder(
                node.name,
                kind,
                fqn,
                holders=tuple(own_holders),
                argument=node.name if kind == "input" else None,
                made=recording.made.get(node.name),
            )
        )
    return tuple(placeholders)


def _describe(node: fx.Node, recording: Recording, types: dict[str, type[nn.Module]]) -> Node:
    """The operation as a Node: its module, source line and ATen name."""
    mark = recording.marks[node.name]
    owner = mark.calls[-1].path
    kind = types.get(owner)
    forward = getattr(kind, "forward", None)
    forward_module = getattr(forward, "__module__", None) or ""
    region = None
    if mark.region is not None:
        region = AutocastRegion(mark.region.enabled, mark.region.dtype, mark.depth)
    # Only the in-place operation itself, not nodes that update views of the written tensor.
    in_place = mark.in_place is not None and row_of(node).name in (mark.in_place, mark.in_place.removesuffix("_"))
    shape: tuple[int, ...] = ()
    dtype = ""
    is_floating = False
    tensor = next(iter(tensors_in(node.meta.get("val"))), None)
    if tensor is not None:
        shape = tuple(tensor.shape)
        dtype = dtype_name(tensor.dtype)
        is_floating = tensor.is_floating_point() or tensor.is_complex()
    return Node(
        name=node.name,
        op=node.meta["op"],
        owner=owner,
        owner_type=kind.__name__ if kind else "",
        inputs=tuple(source.name for source in node.all_input_nodes),
        shape=shape,
        dtype=dtype,
        floating=is_floating,
        calls=mark.calls,
        returned=tuple(recording.returned.get(node.name, ())),
        region=region,
        in_place=in_place,
        torch_module=forward_module.startswith("torch."),
        function=mark.function,
        steers=node.name in recording.steering,
        **_source_fields(mark.written),
    )


def _source_fields(written: SourceLine | None) -> dict[str, Any]:
    """The fields of a Node about its source line, and about the user's call that reached the line."""
    if written is None:
        return {"source": None, "source_path": None, "code": None}
    place = written.place
    fields: dict[str, Any] = {
        "source": line_of(place),
        "source_path": place.file,
        "code": linecache.getline(place.file, place.line).strip() or None,
        "column": place.column,
        "expressions": written.expressions,
    }
    caller = written.caller
    if caller is not None:
        fields["called_from"] = f"{line_of(caller)} in {written.function}"
        fields["caller_path"] = caller.file
        fields["caller_column"] = caller.column
    return fields
