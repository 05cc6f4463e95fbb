"""Finds the operation of a training step that is the first to give Inf or NaN, from the gradients and the loss backwards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree

from ..capture.calls import Calls
from ..capture.source import line_of, written_at
from ..emulation.emulate import Emulation
from ..emulation.intercept import Handler
from ..emulation.regions import Region
from ..isolation.tensors import memory, plain_torch
from ..numerics.entries import all_finite, entries, tensors_in
from ..numerics.formats import format_of, is_low, label
from .replay import Step
from .step import FP32, LOSS, StepPrecision, TrainingStep, own_step, owner_of

NO_PASS = -1
"""Torch's id of the backward pass if none runs. Operations inside a pass are skipped, as hooks check the gradients."""
NODES = 64
"""Maximum number of autograd nodes of one operation that are watched."""
BACKWARD = "the backward pass of "
WEIGHT = "the weight's gradient in "


@dataclass(frozen=True)
class Origin:
    """Where Inf or NaN begin. words: the operation, with its line; "" for an Inf that the user wrote, as in a mask. module:
    its module, None for a tensor from before the step. format: of the result if that is FP16 or BF16. step: as counted
    by `Trail.begin_step`."""

    words: str
    module: str | None = None
    format: str = ""
    step: int = 0


MEANT = Origin("")


@dataclass
class _Call:
    """An operation that runs. source: where Inf or NaN in its inputs or results come from, None if they are finite."""

    op: Any
    words: str
    module: str
    source: Origin | None = None


@dataclass(frozen=True)
class NonFiniteTrace:
    """What a Trail heard in one step. culprit: where the Inf or NaN of the loss or of the gradients begin; None if both are
    finite, or nothing is known. events: every operation and gradient with Inf or NaN, in order."""

    culprit: Origin | None
    events: tuple[Origin, ...] = field(default=(), repr=False)


class Trail(Emulation):
    """Follows Inf and NaN through a step, forwards and backwards.

    An operation is an origin if its inputs are finite and its result is not, or if it makes NaN of an Inf that the user
    wrote (a mask's, for example). module: returns the name of the innermost module being called. outermost: the function
    whose callers are not the step's code. given: names a tensor from before the step, "" if unknown.
    """

    def __init__(
        self,
        module: Callable[[], str],
        outermost: CodeType,
        given: Callable[[torch.Tensor], str] = lambda x: "",
    ) -> None:
        super().__init__()
        self._module, self._outermost, self._given = module, outermost, given
        self._events: list[Origin] = []
        self._first_gradient: Origin | None = None
        self._read: Origin | None = None  # of the last non-finite number that Python read
        self._call: _Call | None = None  # whose arguments were cast
        self._origins = dict[int, tuple[torch.Tensor, Origin]]()  # {id: (non-finite tensor, its origin)}
        self._stored = dict[int, tuple[StorageWeakRef, Origin]]()  # by storage, for views and later steps
        self._nodes = set[Any]()  # of autograd, that are watched
        self._step = 0

    def begin_step(self, step: int) -> None:
        """Before a further step, whose Inf and NaN may begin in an earlier one."""
        self._step = step
        self._events.clear()
        self._nodes.clear()
        self._origins.clear()
        self._first_gradient = self._read = self._call = None
        self._stored = {key: one for key, one in self._stored.items() if not one[0].expired()}  # type: ignore[no-untyped-call]

    def trace(self, losses: Iterable[torch.Tensor] = (), of_loss: bool = False) -> NonFiniteTrace:
        """The Inf and NaN of the step. losses: tensors that the step returned, or on which it called `backward`. of_loss:
        whether the loss is not finite, and all gradients are."""
        with plain_torch():
            found = [self._origin_of(x.detach()) for x in losses if not all_finite(x.detach())]
        of_losses = next((one for one in (*found, self._read) if one is not None and one.words), None)
        ranked = (of_losses, self._first_gradient) if of_loss else (self._first_gradient, of_losses)
        culprit = next((one for one in ranked if one is not None), None)
        if culprit is not None and culprit.step != self._step:
            culprit = replace(culprit, words=f"{culprit.words} in step {culprit.step}")
        return NonFiniteTrace(culprit, tuple(self._events))

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if torch._C._current_graph_task_id() != NO_PASS:
            return super().cast_arguments(op, args, kwargs, region)
        call = self._call = self._describe(op)
        given = tensors_in((args, kwargs))
        for x in given:
            if x.requires_grad:
                stage = WEIGHT if x.is_leaf else BACKWARD
                x.register_hook(partial(self._hear_gradient, stage, call))  # type: ignore[no-untyped-call]
        cast = super().cast_arguments(op, args, kwargs, region)
        with plain_torch():
            for before, after in zip(given, tensors_in(cast), strict=True):
                if after is not before and not all_finite(after.detach()):
                    self._note_cast(call, before.detach(), after.detach())
        return cast

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        if torch._C._current_graph_task_id() != NO_PASS:
            return super().run_leaf_op(op, args, kwargs, region)
        is_known = self._call is not None and self._call.op is op
        call = self._call if is_known and self._call is not None else self._describe(op)
        self._call = None
        inputs = tensors_in((args, kwargs))
        known_nodes = {x.grad_fn for x in inputs}
        with plain_torch():
            bad = [(x, bool(entries(x.detach()).isnan().any())) for x in inputs if _is_broken(x)]
        result = super().run_leaf_op(op, args, kwargs, region)
        with plain_torch():
            self._note(call, bad, (args, kwargs), result)
        self._watch_nodes(call, known_nodes, result)
        return result

    def _describe(self, op: Any) -> _Call:
        return _Call(op, *describe_operation(op, self._module(), self._outermost))

    def _note(self, call: _Call, bad: list[tuple[torch.Tensor, bool]], given: Any, result: Any) -> None:
        """Note what an operation made of its inputs. bad: inputs that are not finite, and whether they have NaN."""
        results = [x for x in tensors_in(result) if _is_broken(x)]
        if bad or results:
            has_nan = any(bool(entries(x.detach()).isnan().any()) for x in results)
            call.source = self._source(call, bad, given, results, has_nan)
        for x in results:
            assert call.source is not None
            self._events.append(Origin(call.words, call.module))
            self._keep(x, call.source)
        if bad and isinstance(result, int | float):  # Python reads a number
            self._read = call.source

    def _source(
        self, call: _Call, bad: list[tuple[torch.Tensor, bool]], given: Any, results: list[torch.Tensor], has_nan: bool
    ) -> Origin:
        for x, _ in bad:
            origin = self._origin_of(x, call.words)
            if origin.words:
                return origin
        low = next((format_of(x.dtype) for x in results if is_low(x.dtype)), None)
        own = Origin(call.words, call.module, low.name if low is not None else "", self._step)
        if not bad:
            return MEANT if not has_nan and any(map(_is_infinite, pytree.tree_leaves(given))) else own
        if not has_nan or any(is_nan for _, is_nan in bad):
            return MEANT
        name = next((name for x, _ in bad if id(x) not in self._origins and (name := self._given(x))), "")
        return replace(own, words=f"{call.words}, from Inf in {name}" if name else call.words)

    def _origin_of(self, x: torch.Tensor, reader: str = "") -> Origin:
        """Where the Inf or NaN of a tensor begin. MEANT for an Inf in FP32 that was there before the step. reader: the
        operation that reads it."""
        if id(x) in self._origins:
            return self._origins[id(x)][1]
        for storage in memory(x):
            if storage._cdata in self._stored:
                return self._stored[storage._cdata][1]
        if self._first_gradient is not None:  # a gradient, or made from one inside a backward pass
            return self._first_gradient
        if not is_low(x.dtype) and not bool(entries(x).isnan().any()):
            return MEANT
        what = "NaN" if bool(entries(x).isnan().any()) else "Inf"
        low = format_of(x.dtype)
        stored = f" in {label(low.name)}" if is_low(x.dtype) and low is not None else ""
        read = f", first read by {reader}" if reader else ""
        words = f"{self._given(x) or 'a tensor'}{stored}, which has {what} before the step{read}"
        return Origin(words, None, "", self._step)

    def _keep(self, x: torch.Tensor, origin: Origin) -> None:
        self._origins[id(x)] = x, origin
        for storage in memory(x):
            weak = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            self._stored[storage._cdata] = weak, origin

    def _note_cast(self, call: _Call, before: torch.Tensor, after: torch.Tensor) -> None:
        """Note an argument that autocast's conversion makes infinite."""
        if not all_finite(before):
            self._keep(after, self._origin_of(before, call.words))
            return
        low = format_of(after.dtype)
        name = label(low.name) if low is not None else "low precision"
        words = f"{call.words}, whose input is beyond the range of {name}"
        self._keep(after, Origin(words, call.module, low.name if low is not None else "", self._step))

    def _watch_nodes(self, call: _Call, known: set[Any], result: Any) -> None:
        """Watch the autograd nodes of an operation: a gradient of a tensor is the sum over all that use the tensor, those
        of a node are its own. known: nodes of the operation's inputs."""
        waiting = [x.grad_fn for x in tensors_in(result)]
        count = 0
        while waiting and count < NODES:
            node = waiting.pop()
            if node is None or node in known or node in self._nodes or _is_leaf(node):
                continue
            count += 1
            self._nodes.add(node)
            following = [one for one, _ in node.next_functions]
            are_weights = [one is not None and _leads_to_leaf(one, known) for one in following]
            node.register_hook(partial(self._hear_node, are_weights, call))
            waiting += following

    def _hear_node(self, are_weights: list[bool], call: _Call, gradients: Any, outer: Any) -> None:
        with plain_torch():
            bad = [i for i, x in enumerate(gradients) if isinstance(x, torch.Tensor) and not all_finite(x)]
            if bad:
                is_weight = all(i < len(are_weights) and are_weights[i] for i in bad)
                self._note_gradient(WEIGHT if is_weight else BACKWARD, call)

    def _hear_gradient(self, stage: str, call: _Call, gradient: torch.Tensor) -> None:
        with plain_torch():
            if not all_finite(gradient):
                self._note_gradient(stage, call)

    def _note_gradient(self, stage: str, call: _Call) -> None:
        own = Origin(f"{stage}{call.words}", call.module, "", self._step)
        self._events.append(own)
        if self._first_gradient is None:
            is_given = call.source is not None and bool(call.source.words)
            self._first_gradient = call.source if is_given else own


def describe_operation(op: Any, module: str, outermost: CodeType) -> tuple[str, str]:
    """(the operation that runs now in words, with its module and the user's line; the module). outermost: see Trail."""
    name = getattr(op, "_opname", None) or getattr(op, "__name__", op)
    written = written_at(outermost)
    place = f" ({line_of(written.place)})" if written is not None else ""
    inside = f" in {module}" if module not in ("", LOSS) else ""
    return f"{name}{inside}{place}", module


def _is_broken(x: torch.Tensor) -> bool:
    return x.is_floating_point() and not all_finite(x.detach())


def _is_infinite(x: Any) -> bool:
    return isinstance(x, float) and not math.isfinite(x)


def _is_leaf(node: Any) -> bool:
    """Whether an autograd node adds to the gradient of a leaf."""
    return hasattr(node, "variable")


def _leads_to_leaf(node: Any, known: set[Any]) -> bool:
    """Whether a gradient passes only conversions and views before it reaches a leaf."""
    for _ in range(NODES):
        if _is_leaf(node):
            return True
        following = [one for one, _ in node.next_functions if one is not None]
        is_other = node in known and not node.name().startswith("ToCopy")
        if is_other or len(following) != 1:
            return False
        node = following[0]
    return False


def blame(low: NonFiniteTrace, high: NonFiniteTrace) -> tuple[str, str | None]:
    """The operation, in words, at which Inf or NaN begin in low precision, and its module; ("", None) without one. low,
    high: of the step in low precision, and in FP32 at the same weights."""
    if low.culprit is not None:
        is_shared = high.culprit is not None and high.culprit.words == low.culprit.words
        return f"{low.culprit.words}{_how_in_fp32(high.culprit) if is_shared else ''}", low.culprit.module
    known = Counter((one.words, one.module) for one in high.events)
    for event in low.events:
        one = event.words, event.module
        if not known[one]:
            return one
        known[one] -= 1
    return "", None


def _how_in_fp32(culprit: Origin | None) -> str:
    if culprit is not None and culprit.format:
        return f", in {label(culprit.format)} by the step's own cast"
    return ", in FP32 at the same weights too"


class _Hidden(Handler):
    """Passes each operation on to a handler in a closure, where isolation does not restore what it noted."""

    def __init__(self, handler: Handler) -> None:
        self._get: Callable[[], Handler] = lambda: handler

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._get().run_op(op, args, kwargs, region)

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self._get().cast_arguments(op, args, kwargs, region)

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._get().run_leaf_op(op, args, kwargs, region)


def overflow_of(step: Step, low: StepPrecision, scale: float) -> tuple[str, str | None]:
    """The first operation that gives Inf or NaN in a step at a loss scale, but not in FP32; ("", None) without one."""
    calls = Calls(TrainingStep(step.subject.model, None))
    traces = list[NonFiniteTrace]()

    with calls.watch(lambda call, result: None):
        for precision in (low, FP32):
            trail = Trail(lambda: owner_of(calls.open[-1].path), overflow_of.__code__)
            own_step(step, replace(precision, handler=_Hidden(trail)), scale)
            traces.append(trail.trace())  # now, since hooks of the weights stay, and add to it in the next run
    low_trace, high_trace = traces
    if low_trace.culprit is not None and high_trace.culprit == low_trace.culprit:
        return "", None
    return blame(low_trace, high_trace)
