"""Records one run of a model for a comparison: fingerprints and rounding errors of every value, but no tensors.

Cost: the run, an FP64 replay, and its backward pass. If low precision flipped a decision, one more FP64 replay takes the
run's decisions.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx, nn

from ...capture.capture import assemble
from ...capture.functional import PinnedDraw
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
from .fingerprint import Fingerprint, deviation, distance, fingerprint, project, reordered, sketch
from .own import OwnBackward, run_backward
from .recording import (
    OWN_GRADIENT,
    OWN_GRADIENT_LOW,
    OWN_GRADIENT_STORED,
    Output,
    Recording,
    Value,
    limit_inner,
)
from .replay import InDouble, double_by_default

LIBRARIES = ("transformers", "timm", "torchvision", "diffusers", "numpy")
"""Libraries whose versions a recording names, if the model's code has imported them."""

UNIT = 2.0**-24
"""The rounding unit of FP32."""

SAMPLE = 4096
"""Number of entries that are looked at before all of them are."""

VARIED = 32
"""Minimum number of different entries of a tensor whose digits say how it was stored."""

LONGEST = 120
"""Maximum number of characters of a source line, and of the value of an argument."""


def record_run(
    subject: Subject, seed: int = 0, autocast: torch.dtype | None = None, gradients: bool = False
) -> Recording:
    """Run the model on its batches, and describe every value of the run.

    The run takes the model as it is stored, with its own autocast regions; without a GPU, half precision is emulated.
    autocast: dtype of an autocast region around the run. gradients: also of parameters, for a comparison. Sums are over all batches that run the same operations.
    Raises: CaptureError(slug="capture-failed") if the model does not run, or computes nothing.
    """
    recorded: Recording | None = None
    left_out = 0
    with _surroundings(subject, seed):
        for batch in subject.batches:
            one = _record_batch(subject, batch, seed, autocast, gradients)
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

    @cached_property
    def fits(self) -> Mapping[str, str]:
        """{placeholder: the low dtype in which it was stored before, or ""}."""
        names = (place.name for place in self.capture.placeholders)
        tensors = (tensors_in(x) for x in self.given)
        return {name: fitting_format(each[0]) if each else "" for name, each in zip(names, tensors, strict=True)}

    @cached_property
    def units(self) -> Mapping[str, float]:
        """{placeholder: the rounding unit of the dtype in which it is or was stored}."""
        units = dict[str, float]()
        for place, value in zip(self.capture.placeholders, self.given, strict=True):
            tensors = tensors_in(value)
            fitting = self.fits[place.name]
            unit = _unit_of(tensors[0]) if tensors else 0.0
            units[place.name] = torch.finfo(getattr(torch, fitting)).eps / 2 if fitting else unit
        return units

    @cached_property
    def stored_unit(self) -> float:
        """The largest rounding unit of the dtypes of parameters."""
        places = self.capture.placeholders
        return max((self.units[place.name] for place in places if place.kind == "parameter"), default=UNIT)


def _record_batch(
    subject: Subject, batch: Batch, seed: int, autocast: torch.dtype | None, gradients: bool
) -> Recording:
    run = _run(subject, batch, seed, autocast)
    with double_by_default():
        measured = _Measured(run, gradients)
        backward_failed = measured.replay()
        if measured.flips:
            measured.replay_with_decisions()
    if gradients and backward_failed is None:
        draws = any(isinstance(n.target, PinnedDraw) for n in run.capture.graph_module.graph.nodes)
        measured.compare_with_own(partial(run_backward, subject.model, batch, seed), draws)
    values = {n.name: measured.value_of(n) for n in run.capture.graph_module.graph.nodes if n.name in measured.prints}
    values = limit_inner(values)
    named = zip(run.outputs.names, run.capture.outputs, measured.outputs, run.outputs, strict=True)
    outputs = tuple(_output(*one) for one in named)
    return Recording(
        target=subject.target,
        environment=_environment(subject, autocast),
        values=values,
        outputs=outputs,
        not_compared=tuple(_not_compared(run, measured, values, backward_failed)),
        own_backwards=measured.own.functions,
    )


def _output(name: str, value: str, wide: torch.Tensor, run: torch.Tensor) -> Output:
    """A row for one output, with sketches if its shape does not depend on rounding."""
    if wide.shape != run.shape or not wide.numel():
        return Output(name, value, (), ())
    return Output(name, value, *sketch(wide, run.to(wide.device)))


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
    return _Run(capture, capture.bind(model, batch), results, outputs, gradients)


class _Measured:
    """What FP64 replays say of a run. prints, live, gradients, errors, slack, flips: {node: ...}, see `Value`.

    outputs: the outputs in FP64. own: the model's own backward pass; own_gradients: parameters whose gradient is its.
    """

    def __init__(self, run: _Run, gradients: bool) -> None:
        self.run = run
        self.prints = dict[str, list[Fingerprint]]()
        self.live = dict[str, dict[int, Fingerprint]]()
        self.gradients = dict[str, dict[int, Fingerprint]]()
        self.errors = dict[str, float]()
        self.flips = dict[str, float]()
        self.slack = dict[str, float]()
        self.order_slack = dict[str, float]()
        self.outputs = list[torch.Tensor]()
        self.semantics = InDouble("all" if gradients else "values")
        self.own = OwnBackward()
        self.own_gradients = set[str]()
        self._units = dict[str, float]()
        self._dtypes = dict[str, torch.dtype]()
        self._deciding = find_deciding(run.capture)
        self._places = {place.name: place for place in run.capture.placeholders}
        self._given_by_name = dict(zip(self._places, run.given, strict=True))

    def replay(self) -> str | None:
        """Replay the run in FP64 and differentiate the outputs. Returns why the backward pass failed, if it did."""
        executor = Executor(self.run.capture.graph_module, self.semantics)
        with torch.enable_grad(), isolate(seed=0):
            for n, result in executor.steps(*self.run.given):
                tensors = tensors_in(result)
                if n.op == "output":
                    self.outputs = tensors
                elif tensors:
                    self._note(n, tensors)
                    self.semantics.note_inner(n, executor.value_of)
            try:
                self._differentiate()
            except Exception as error:
                let_through(error)
                self.live.clear()
                self.gradients.clear()
                return describe(error)
            finally:
                self.outputs = [x.detach() for x in self.outputs]
        return None

    def _note(self, n: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
        """Fingerprint a result, compare it with the run's, and listen for its gradient."""
        self._note_prints(n, tensors)
        own = tensors_in(self.run.actual.get(n.name)) or tensors_in(self._given(n))
        if len(own) == len(tensors):
            self._note_deviation(n, own, tensors)
            flips = max(map(changed_share, own, tensors)) if n.name in self._deciding else 0.0
            if flips:
                self.flips[n.name] = flips
        for index, x in enumerate(tensors):
            if x.requires_grad:
                listen = partial(self._note_gradient, n.name, index, x.detach())
                x.register_hook(listen)  # type: ignore[no-untyped-call]

    def _note_prints(self, n: fx.Node, tensors: Sequence[torch.Tensor]) -> None:
        """Fingerprint a result; a view has the sums of what it views."""
        source = self._viewed(n)
        if source is not None and self.prints[source][0].count == tensors[0].numel() and tensors[0].is_floating_point():
            same_order = row_of(n).entries == "same"
            self.prints[n.name] = [reordered(self.prints[source][0], tensors[0], same_order)]
        else:
            self.prints[n.name] = [fingerprint(x) for x in tensors]

    def _viewed(self, n: fx.Node) -> str | None:
        """The value whose entries a node has, all of them, in the same or another order; None for other nodes."""
        if n.op != "call_function" or row_of(n).entries not in ("same", "turned"):
            return None
        name = n.all_input_nodes[0].name
        return name if len(self.prints.get(name, ())) == 1 else None

    def _note_deviation(self, n: fx.Node, own: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Note the error of a result, and how far its fingerprint may move if stored tensors are rounded differently.

        The run's roundings are of the same size as those of stored tensors if both have the same unit; otherwise, they
        are scaled. Sums of independent roundings move by at least 2 / sqrt(entries) times the relative error.
        """
        print = self.prints[n.name][0]
        unit = max((self._units.get(source.name, 0.0) for source in n.all_input_nodes), default=0.0)
        unit = max(unit, *map(_unit_of, own), 0.0)
        self._units[n.name] = unit
        root = math.sqrt(max(print.count, 1))
        if n.op == "placeholder":
            unit = self.run.units[n.name]
            self.slack[n.name] = 4 * unit / root
            self.order_slack[n.name] = unit
            return
        source = self._viewed(n)
        if source is not None and own[0].dtype is self._dtypes.get(source) and source in self.errors:
            for known in (self.errors, self.slack, self.order_slack):
                known[n.name] = known.get(source, 0.0)
        else:
            deviations = list(map(deviation, own, tensors, self.prints[n.name]))
            error = max(one.error for one in deviations)
            self.errors[n.name] = error
            if unit and math.isfinite(error):
                scale = max(self.run.stored_unit, UNIT) / unit
                self.slack[n.name] = scale * max(deviations[0].sums, 2 * error / root)
                self.order_slack[n.name] = scale * max(deviations[0].order, error)
        self._dtypes[n.name] = own[0].dtype

    def _note_gradient(self, name: str, index: int, x: torch.Tensor, gradient: torch.Tensor) -> None:
        if self.semantics.gradients == "all":
            self.gradients.setdefault(name, {})[index] = fingerprint(gradient)
        given = entries(gradient)
        if int(given.count_nonzero()) < given.numel():
            self.live.setdefault(name, {})[index] = fingerprint(x, given != 0)

    def _differentiate(self) -> None:
        """Run the backward pass of a projection of all outputs; hooks note the gradients."""
        projected = [project(x) for x in self.outputs if x.requires_grad]
        if projected and self.semantics.leaves:
            real = [x.real for x in projected]
            torch.autograd.grad(torch.stack(real).sum(), self.semantics.leaves, allow_unused=True)

    def compare_with_own(self, run: Callable[[torch.dtype | None], OwnBackward], draws: bool) -> None:
        """Use the gradients of the model's own backward pass where the recorded operations have others.

        run: runs that pass in a dtype; in FP64 only if the gradients of the model as it is stored are others by more
        than rounding. draws: whether the run draws random numbers, which would be others in FP64.
        """
        self.own = run(None)
        tolerance = OWN_GRADIENT_STORED
        if not self._unlike(tolerance) and self.own.failure is None:
            return
        wide = OwnBackward(failure="not run") if draws else run(torch.float64)
        if wide.failure is None:
            self.own = wide
            tolerance = OWN_GRADIENT
        dtypes = {x.dtype for value in self.run.actual.values() for x in tensors_in(value)}
        if any(map(is_low, dtypes)):
            tolerance = OWN_GRADIENT_LOW
        for name, print in self._unlike(tolerance).items():
            self.gradients[name] = {0: print}
            self.own_gradients.add(name)

    def _unlike(self, tolerance: float) -> dict[str, Fingerprint]:
        """{parameter: its gradient in the model's own backward pass, if the recorded operations have another}."""
        found = {name: fingerprint(gradient) for name, gradient in self.own.gradients.items()}
        largest = max((print.second / max(print.count, 1) for print in found.values()), default=0.0)
        result = dict[str, Fingerprint]()
        for place in self.run.capture.placeholders:
            theirs = found.get(place.fqn or "")
            if place.kind != "parameter" or theirs is None:
                continue
            ours = self.gradients.get(place.name, {}).get(0) or _zero_like(theirs)
            is_zero = max(ours.second, theirs.second) / max(theirs.count, 1) <= tolerance**2 * largest
            if not is_zero and distance(ours, theirs, ordered=True) > tolerance:
                result[place.name] = theirs
        return result

    def replay_with_decisions(self) -> None:
        """Replay with the decisions of the run: the errors are then those of the continuous part."""
        held = {name: self.run.actual[name] for name in self._deciding if name in self.run.actual}
        semantics = InDouble(held=held)
        try:
            with torch.no_grad(), isolate(seed=0):
                for n, result in Executor(self.run.capture.graph_module, semantics).steps(*self.run.given):
                    own = tensors_in(self.run.actual.get(n.name))
                    wide = tensors_in(result)
                    if n.name in self.errors and len(own) == len(wide):
                        found = (deviation(x, y, fingerprint(y)) for x, y in zip(own, wide, strict=True))
                        self.errors[n.name] = max(one.error for one in found)
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
            "gradients": self._listed(self.gradients, n.name, len(prints)),
            "error": self.errors.get(n.name, 0.0),
            "flips": self.flips.get(n.name, 0.0),
            "slack": self.slack.get(n.name, 0.0),
            "order_slack": self.order_slack.get(n.name, 0.0),
        }
        if node is None:
            assert place is not None
            given = self._given(n)
            kind = "decision" if n.name.startswith("held_") else place.kind
            measured["fits"] = self.run.fits[n.name] if kind == "parameter" else ""
            trainable = isinstance(given, nn.Parameter) and given.requires_grad
            owner = place.fqn or (place.made.name if place.made is not None else "") or n.name
            source = place.made.source if place.made is not None else None
            measured["own_gradient"] = n.name in self.own_gradients
            return Value(n.name, kind, kind, owner, (), source=source, trainable=trainable, **measured)
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
        return self._given_by_name.get(n.name)

    def _listed(
        self, found: Mapping[str, Mapping[int, Fingerprint]], name: str, count: int
    ) -> tuple[Fingerprint | None, ...]:
        """Fingerprints of a node's results by position; () without any."""
        own = found.get(name)
        return tuple(map(own.get, range(count))) if own else ()


def _zero_like(print: Fingerprint) -> Fingerprint:
    """The fingerprint of zeros."""
    return Fingerprint(print.shape, print.count, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def fitting_format(x: torch.Tensor) -> str:
    """The low dtype in which an FP32 tensor was stored before, since it has all its entries; "" if there is none.

    Tensors of a few different numbers, such as ones, fit any dtype and say nothing.
    """
    if x.dtype is not torch.float32 or x.is_sparse or not x.numel():
        return ""
    sample = x.detach().reshape(-1)[:SAMPLE]
    if len(torch.unique(sample)) < VARIED:
        return ""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(sample.to(dtype).float(), sample) and torch.equal(x.detach().to(dtype).float(), x.detach()):
            return dtype_name(dtype)
    return ""


def _unit_of(x: torch.Tensor) -> float:
    """The rounding unit of a tensor's dtype; 0 for whole numbers and booleans."""
    return torch.finfo(x.dtype).eps / 2 if x.is_floating_point() else 0.0


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
    if not measured.gradients and measured.semantics.gradients != "all":
        yield "gradients: record both runs with --gradients to compare them"
    elif failed is not None:
        yield f"gradients: the backward pass in FP64 failed ({failed})"
    elif not run.gradients:
        yield "gradients: the model does not run with autograd on"
    if measured.own.failure is not None:
        named = ", ".join(measured.own.functions) or "code of the model's own"
        yield f"gradients by the backward of {named}: the model's own backward pass fails ({measured.own.failure})"
    lost = sorted({row_of(n).name for n in run.capture.graph_module.graph.nodes if n.name in measured.semantics.lost})
    if lost and measured.gradients:
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
    }
    for name in LIBRARIES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version:
            found[name] = str(version)
    if autocast is not None:
        found["autocast"] = dtype_name(autocast)
    return found
