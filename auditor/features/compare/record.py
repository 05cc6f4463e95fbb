"""Records one run of a model for a comparison: fingerprints and rounding errors of every value, but no tensors.

Cost: the run with autograd, an FP64 replay with its backward pass, and an FP64 replay with changed stored tensors. If
low precision flipped a decision, one more FP64 replay takes the run's decisions.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from ...capture.capture import assemble
from ...capture.record import record
from ...emulation.emulate import Emulation
from ...emulation.regions import Region
from ...errors import AuditorError, CaptureError, describe, let_through
from ...execution.execute import Executor
from ...isolation import in_eval, isolate
from ...isolation.outputs import NamedTensors
from ...isolation.process import under
from ...isolation.run_model import from_the_start, lowered_batch
from ...loading.state import present
from ...measure.decisions import find_deciding
from ...numerics.entries import entries, over_tensors
from ...numerics.formats import dtype_name, is_low
from ...numerics.nodes import arguments_with_defaults, overload_of, row_of, tensors_in
from ...records import Batch, Capture, Subject
from .fingerprint import LARGEST, Fingerprint, distance, fingerprint, project, sketch
from .recording import STORED, Output, Recording, Value
from .replay import InDouble, double_by_default

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "numpy")
"""Libraries whose versions a recording names, if the model's code has imported them."""

LONGEST = 120
"""Maximum number of characters of a source line, and of the value of an argument."""


def record_run(subject: Subject, seed: int = 0, autocast: torch.dtype | None = None) -> Recording:
    """Run the model on its batches, and describe every value of the run.

    The run takes the model as it is stored, with its own autocast regions; without a GPU, half precision is emulated.
    autocast: dtype of an autocast region around the run. Sums are over all batches that run the same operations.
    Raises: CaptureError(slug="capture-failed") if the model does not run, or computes nothing.
    """
    recorded: Recording | None = None
    left_out = 0
    with _surroundings(subject, seed):
        for batch in subject.batches:
            one = _record_batch(subject, batch, seed, autocast)
            if recorded is None:
                recorded = one
            elif list(one.values) == list(recorded.values):
                recorded = _add_batch(recorded, one)
            else:
                left_out += 1
    assert recorded is not None
    if left_out:
        note = f"{left_out} of {len(subject.batches)} batches run other operations than the first"
        recorded = replace(recorded, not_compared=(*recorded.not_compared, note))
    return recorded


@contextmanager
def _surroundings(subject: Subject, seed: int) -> Iterator[None]:
    """In the `with` block, the process is as the user's run had it, and is restored afterwards."""
    with ExitStack() as stack:
        stack.enter_context(under(subject.flags))
        stack.enter_context(isolate(seed=seed))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(in_eval(subject.model))
        stack.enter_context(present(subject.model))
        yield


def _add_batch(one: Recording, other: Recording) -> Recording:
    """The recording over the batches of two recordings of the same operations."""
    pairs = zip(one.values.values(), other.values.values(), strict=True)
    values = {mine.name: mine + yours for mine, yours in pairs}
    outputs = tuple(replace(output, wide=(), run=()) for output in one.outputs)
    return replace(one, values=values, outputs=outputs, batches=one.batches + other.batches)


@dataclass
class _Run:
    """The recorded run of one batch. capture: its graph. given: the graph's inputs. actual: {operation: its result in
    the run}. outputs: of the run. gradients: whether autograd was on, so that `no_grad` blocks are recorded."""

    capture: Capture
    given: list[Any]
    actual: Mapping[str, Any]
    outputs: NamedTensors
    gradients: bool
    stored: Mapping[str, str] = field(default_factory=dict)


def _record_batch(subject: Subject, batch: Batch, seed: int, autocast: torch.dtype | None) -> Recording:
    run = _run(subject, batch, seed, autocast)
    with double_by_default():
        measured = _Measured(run)
        backward_failed = measured.replay()
        measured.perturb()
        if measured.flips:
            measured.replay_with_decisions()
    values = {n.name: measured.value_of(n) for n in run.capture.graph_module.graph.nodes if n.name in measured.prints}
    outputs = zip(run.outputs.names, run.capture.outputs, measured.outputs, run.outputs, strict=True)
    return Recording(
        target=subject.target,
        environment=_environment(subject, autocast),
        values=values,
        outputs=tuple(Output(name, value, tuple(sketch(x)), tuple(sketch(y))) for name, value, x, y in outputs),
        not_compared=tuple(_not_compared(run, measured, values, backward_failed)),
    )


def _run(subject: Subject, batch: Batch, seed: int, autocast: torch.dtype | None) -> _Run:
    """Run the model on a batch and keep the result of every operation. Raises: CaptureError."""
    model = subject.model
    refused: Exception | None = None
    for given in _as_stored(model, batch):
        for gradients in (True, False):
            try:
                return _run_once(model, given, batch, seed, autocast, gradients)
            except Exception as error:
                let_through(error)
                if isinstance(error, AuditorError):
                    raise
                refused = refused or error
    assert refused is not None
    message = f"{subject.name} could not be recorded: {describe(refused)}. Check that the model runs on these inputs."
    raise CaptureError(message, slug="capture-failed") from refused


def _as_stored(model: nn.Module, batch: Batch) -> Iterator[Batch]:
    """The batch, and then the batch in the low dtype in which the model stores its parameters, if it does."""
    yield batch
    low = {x.dtype for x in model.parameters() if is_low(x.dtype)}
    for dtype in sorted(low, key=str):
        yield lowered_batch(batch, dtype)


def _run_once(
    model: nn.Module, given: Batch, batch: Batch, seed: int, autocast: torch.dtype | None, gradients: bool
) -> _Run:
    actual = dict[fx.Node, Any]()

    def keep(node: fx.Node, value: Any) -> None:
        actual[node] = over_tensors(lambda x: x.detach().clone(), value)

    around = Region(True, dtype_name(autocast or torch.float32))

    def run() -> tuple[Any, NamedTensors]:
        with isolate(given):  # changes to the inputs are not state of the model
            return record(model, given, handler=Emulation(lenient=True), around=around, observer=keep)

    recording, outputs = from_the_start(model, given, run, seed, gradients)
    capture = assemble(recording, model, given)
    results = {node.name: value for node, value in actual.items() if node.name in capture.nodes}
    stored = {place.name: place.kind for place in capture.placeholders if place.kind in STORED}
    return _Run(capture, capture.bind(model, batch), results, outputs, gradients, stored)


class _Measured:
    """What FP64 replays say of a run. prints, live, gradients, errors, slack, flips: {node: ...}, see `Value`.

    outputs: the outputs in FP64.
    """

    def __init__(self, run: _Run) -> None:
        self.run = run
        self.prints = dict[str, list[Fingerprint]]()
        self.live = dict[str, dict[int, Fingerprint]]()
        self.gradients = dict[str, dict[int, Fingerprint]]()
        self.errors = dict[str, float]()
        self.flips = dict[str, float]()
        self.slack = dict[str, float]()
        self.order_slack = dict[str, float]()
        self.outputs = list[torch.Tensor]()
        self.semantics = InDouble(run.stored, gradients=True)
        self._deciding = find_deciding(run.capture)
        self._places = {place.name: place for place in run.capture.placeholders}

    def replay(self) -> str | None:
        """Replay the run in FP64 and differentiate the outputs. Returns why the backward pass failed, if it did."""
        executor = Executor(self.run.capture.graph_module, self.semantics)
        leaves = list[torch.Tensor]()
        with torch.enable_grad(), isolate(seed=0):
            for n, result in executor.steps(*self.run.given):
                tensors = tensors_in(result)
                if n.op == "output":
                    self.outputs = tensors
                    continue
                if tensors:
                    self._note(n, tensors, leaves)
                    self.semantics.note_inner(n, executor.value_of) if n.op == "call_function" else None
            try:
                self._differentiate(leaves)
            except Exception as error:
                let_through(error)
                self.live.clear()
                self.gradients.clear()
                return describe(error)
            finally:
                self.outputs = [x.detach() for x in self.outputs]
        return None

    def _note(self, n: fx.Node, tensors: Sequence[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        """Fingerprint a result, compare it with the run's, and listen for its gradient."""
        self.prints[n.name] = [fingerprint(x) for x in tensors]
        own = tensors_in(self.run.actual.get(n.name))
        if len(own) == len(tensors):
            self._note_error(n, own, tensors)
        for index, x in enumerate(tensors):
            if x.requires_grad:
                x.register_hook(partial(self._note_gradient, n.name, index, x.detach()))
                if n.op == "placeholder":
                    leaves.append(x)

    def _note_error(self, n: fx.Node, own: Sequence[torch.Tensor], wide: Sequence[torch.Tensor]) -> None:
        self.errors[n.name] = max(map(relative_error, own, wide))
        if n.name in self._deciding:
            share = max(map(changed_share, own, wide))
            if share:
                self.flips[n.name] = share

    def _note_gradient(self, name: str, index: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        alive = entries(gradient) != 0
        self.gradients.setdefault(name, {})[index] = fingerprint(gradient)
        if not bool(alive.all()):
            self.live.setdefault(name, {})[index] = fingerprint(x, alive)

    def _differentiate(self, leaves: list[torch.Tensor]) -> None:
        """Run the backward pass of a projection of all outputs; hooks note the gradients."""
        projected = [project(x) for x in self.outputs if x.requires_grad]
        if projected and leaves:
            real = [x.real for x in projected]
            torch.autograd.grad(torch.stack(real).sum(), leaves, allow_unused=True)

    def perturb(self) -> None:
        """Replay with stored tensors changed by a rounding each: how much do the fingerprints move?"""
        semantics = InDouble(self.run.stored, noise=1.0)
        with torch.no_grad(), isolate(seed=0):
            for n, result in Executor(self.run.capture.graph_module, semantics).steps(*self.run.given):
                if n.name in self.prints:
                    self._note_slack(n.name, [fingerprint(x) for x in tensors_in(result)])

    def _note_slack(self, name: str, changed: Sequence[Fingerprint]) -> None:
        pairs = [pair for pair in zip(self.prints[name], changed, strict=False) if math.isfinite(distance(*pair))]
        self.slack[name] = max((distance(x, y) for x, y in pairs), default=0.0)
        self.order_slack[name] = max((distance(x, y, ordered=True) for x, y in pairs), default=0.0)

    def replay_with_decisions(self) -> None:
        """Replay with the decisions of the run: the errors are then those of the continuous part."""
        held = {name: self.run.actual[name] for name in self._deciding if name in self.run.actual}
        semantics = InDouble(self.run.stored, held=held)
        try:
            with torch.no_grad(), isolate(seed=0):
                for n, result in Executor(self.run.capture.graph_module, semantics).steps(*self.run.given):
                    own = tensors_in(self.run.actual.get(n.name))
                    wide = tensors_in(result)
                    if n.name in self.errors and len(own) == len(wide):
                        self.errors[n.name] = max(map(relative_error, own, wide))
        except Exception as error:  # a shape may depend on a decision
            let_through(error)

    def value_of(self, n: fx.Node) -> Value:
        """The row of a node."""
        node = self.run.capture.nodes.get(n.name)
        place = self._places.get(n.name)
        prints = tuple(self.prints[n.name])
        run = tensors_in(self.run.actual.get(n.name)) or tensors_in(self._given(n))
        measured: dict[str, Any] = {
            "dtype": dtype_name(run[0].dtype) if run else "",
            "prints": prints,
            "live": self._listed(self.live, n.name, len(prints)),
            "gradients": self._listed(self.gradients, n.name, len(prints)) if place is not None or node else (),
            "error": self.errors.get(n.name, 0.0),
            "flips": self.flips.get(n.name, 0.0),
            "slack": self.slack.get(n.name, 0.0),
            "order_slack": self.order_slack.get(n.name, 0.0),
        }
        if node is None:
            assert place is not None
            given = self._given(n)
            trainable = isinstance(given, nn.Parameter) and given.requires_grad
            owner = place.fqn or (place.made.name if place.made is not None else "") or n.name
            source = place.made.source if place.made is not None else None
            return Value(
                n.name, place.kind, place.kind, owner, (), source=source, trainable=trainable, **measured
            )
        return Value(
            n.name,
            "operation",
            node.op,
            node.owner,
            node.inputs,
            inner=self.semantics.inner.get(n.name, ()),
            source=node.source,
            code=node.code[:LONGEST] if node.code else None,
            called_from=node.called_from,
            literals=literals_of(n),
            wide=n.name not in self.semantics.narrow,
            **measured,
        )

    def _given(self, n: fx.Node) -> Any:
        """The run's value of a placeholder; None for an operation."""
        names = [place.name for place in self.run.capture.placeholders]
        return self.run.given[names.index(n.name)] if n.name in names else None

    def _listed(
        self, found: Mapping[str, Mapping[int, Fingerprint]], name: str, count: int
    ) -> tuple[Fingerprint | None, ...]:
        """Fingerprints of a node's results by position; () without any."""
        own = found.get(name)
        return tuple(map(own.get, range(count))) if own else ()


def relative_error(run: torch.Tensor, wide: torch.Tensor) -> float:
    """Relative L2 difference between a result of the run and FP64's; inf if only the run is not finite.

    Discrete results have the error 0: their flips are counted apart. Shapes may differ if they depend on values: inf.
    """
    if run.shape != wide.shape:
        return math.inf
    if not (run.is_floating_point() or run.is_complex()):
        return 0.0
    ours = entries(run).double().to(wide.device)
    exact = entries(wide.detach()).double()
    counted = exact.abs() < LARGEST
    if bool((counted & ~ours.isfinite()).any()):
        return math.inf
    difference = float(torch.where(counted, ours - exact, 0.0).norm())
    scale = float(torch.where(counted, exact, 0.0).norm())
    if scale:
        return difference / scale
    return 1.0 if difference else 0.0


def changed_share(run: torch.Tensor, wide: torch.Tensor) -> float:
    """The share of entries in which a discrete result of the run differs from FP64's; 0 for continuous results."""
    if run.is_floating_point() or run.is_complex() or run.shape != wide.shape or not run.numel():
        return 0.0
    return float((run.to(wide.device) != wide).double().mean())


def literals_of(n: fx.Node) -> dict[str, str]:
    """{argument: value} of an operation's arguments that are not tensors; of the defaults, only numbers with a point."""
    if not isinstance(overload_of(n.target), torch._ops.OpOverload):
        return {str(index): repr(x) for index, x in enumerate(n.args) if isinstance(x, (int, float))}
    given = {argument.name for argument, _ in zip(overload_of(n.target)._schema.arguments, n.args, strict=False)}
    result = {}
    for name, value in arguments_with_defaults(n).items():
        has_tensor = any(isinstance(x, fx.Node) for x in _flat(value))
        is_default = name not in given and name not in n.kwargs
        if value is None or has_tensor or (is_default and not isinstance(value, float)):
            continue
        result[name] = str(value).removeprefix("torch.")[:LONGEST]
    return result


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat(item)
    else:
        yield value


def _not_compared(run: _Run, measured: _Measured, values: Mapping[str, Value], failed: str | None) -> Iterator[str]:
    """What a comparison of this recording cannot cover, in sentences."""
    narrow = sorted({value.packet for value in values.values() if not value.wide})
    if narrow:
        yield f"without an FP64 kernel, so in FP32: {', '.join(narrow)}"
    if failed is not None:
        yield f"gradients: the backward pass in FP64 failed ({failed})"
    elif not run.gradients:
        yield "gradients: the model does not run with autograd on"
    lost = sorted({row_of(n).name for n in run.capture.graph_module.graph.nodes if n.name in measured.semantics.lost})
    if lost:
        yield f"gradients through {', '.join(lost)}, which have none"
    if run.capture.method == "path":
        yield "code that depends on values of tensors: only the branches that this run took"


def _environment(subject: Subject, autocast: torch.dtype | None) -> dict[str, str]:
    """{name: version or setting} of what may change a run."""
    parameter = next(subject.model.parameters(), None)
    device = parameter.device.type if parameter is not None else "cpu"
    found = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "processor": torch.backends.cpu.get_cpu_capability(),
        "threads": str(torch.get_num_threads()),
        "weights": subject.weights_source,
        "inputs": subject.inputs_source,
    }
    for name in LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            found[name] = str(version)
    if autocast is not None:
        found["autocast"] = dtype_name(autocast)
    return found
