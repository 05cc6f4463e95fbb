"""Finds the operation at which Inf, NaN or underflow begin in a training step, and the cause."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from traceback import walk_stack
from types import CodeType
from typing import Any

import torch

from ...capture.source import Place, line_of
from ...emulation.regions import Region
from ...isolation.tensors import plain_torch
from ...numerics.entries import all_finite, entries, is_number, tensors_in
from ...numerics.formats import is_low
from ...training.blame import NO_PASS, Trail, describe_operation
from .causes import backward_cause, cause_of

NODES = 64
"""Number of autograd nodes of one operation that are watched."""
FLUSHED = 0.5
"""Share of an operation's gradients that becomes zero, from which it counts as underflow."""


@dataclass
class Origin:
    """An operation whose result, or whose gradient, is not finite although its arguments are.

    words: the operation with module and line; module: its path; cause: in words. is_meant: an infinity that the user's
    code writes, such as a mask's.
    """

    words: str
    module: str
    cause: str
    is_meant: bool = False


class OriginTrail(Trail):
    """A Trail that knows for each Inf or NaN where it came from.

    nan: the first operation with NaN, or whose gradient breaks. last: the origin of the last Inf or NaN of the forward
    pass, usually the loss's. flushed: operations whose gradients underflow, in order. causes: {operation: cause}.
    """

    def __init__(self, module: Callable[[], str], outermost: CodeType, given: Callable[[torch.Tensor], str]) -> None:
        super().__init__(module, outermost, given)
        self.nan: Origin | None = None
        self.last: Origin | None = None
        self.backward: Origin | None = None
        self.flushed: list[tuple[str, str]] = []
        self.causes: dict[str, str] = {}
        self._known: dict[int, tuple[torch.Tensor, Origin]] = {}  # by tensor, which is kept so that ids stay unique
        self._watched: set[Any] = set()  # autograd nodes
        self._functions: dict[CodeType, str] = {}  # the backward of each autograd.Function, and its name
        self._by_hand: Origin | None = None  # the first operation of such a backward that breaks

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        result = super().run_op(op, args, kwargs, region)
        if torch._C._current_graph_task_id() == NO_PASS:
            with plain_torch():
                self._trace(op, args, kwargs, result)
            self._watch_backward(op, args, kwargs, result)
        elif self._by_hand is None and self._functions:
            with plain_torch():
                self._trace_by_hand(op, args, kwargs, result)
        return result

    def _trace_by_hand(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the first operation of an autograd.Function's own backward that makes finite values Inf or NaN."""
        broken = [x for x in tensors_in(result) if is_number(x) and not all_finite(x)]
        if not broken:
            return
        frame = next((one for one, _ in walk_stack(None) if one.f_code in self._functions), None)
        inputs = [x for x in tensors_in((args, kwargs)) if is_number(x)]
        if frame is not None and all(map(all_finite, inputs)):
            name = getattr(op, "_opname", str(op))
            place = line_of(Place(frame.f_code.co_filename, frame.f_lineno))
            words = f"{name} in {self._functions[frame.f_code]}.backward ({place})"
            self._by_hand = Origin(words, self._module(), cause_of(op, args, inputs, broken))

    def _trace(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Note the origin of a result that is not finite."""
        broken = [x for x in tensors_in(result) if is_number(x) and not all_finite(x)]
        if not broken:
            return
        written = {id(x) for x in tensors_in(result)} - self._known.keys()  # an argument that is written in place
        inputs = [x for x in tensors_in((args, kwargs)) if is_number(x) and id(x) not in written]
        inherited = self._inherited(inputs)
        words, module = describe_operation(op, self._module(), self._outermost)
        has_nan = any(bool(entries(x).isnan().any()) for x in broken)
        origin = inherited
        if inherited is None or (inherited.is_meant and has_nan):
            is_meant = not has_nan and _writes_infinity(op, args, kwargs, inputs)
            origin = Origin(words, module, cause_of(op, args, inputs, broken), is_meant)
        assert origin is not None
        self.causes.setdefault(words, cause_of(op, args, inputs, broken))
        for x in broken:
            self._known[id(x)] = x, origin
        if not origin.is_meant:
            self.last = origin
            if has_nan and self.nan is None:
                self.nan = origin

    def _inherited(self, inputs: list[torch.Tensor]) -> Origin | None:
        """The origin of Inf or NaN in the arguments; of one that the user's code does not mean, if there is one. NaN of
        unknown origin, such as in a gradient, is that of the first NaN of the step."""
        broken = [x for x in inputs if not all_finite(x)]
        known = [self._known[id(x)][1] for x in broken if id(x) in self._known]
        unknown = [x for x in broken if id(x) not in self._known]
        if any(bool(entries(x).isnan().any()) for x in unknown) and self.nan is not None:
            known.append(self.nan)
        return next((one for one in known if not one.is_meant), known[0] if known else None)

    def _watch_backward(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Watch the autograd nodes between an operation's result and its arguments."""
        ends = {x.grad_fn for x in tensors_in((args, kwargs)) if x.grad_fn is not None}
        for node in ends - self._watched:
            self._watch_function(node)
        nodes = [x.grad_fn for x in tensors_in(result) if x.grad_fn is not None and x.grad_fn not in ends]
        if not nodes:
            return
        words, module = describe_operation(op, self._module(), self._outermost)
        name = getattr(op, "_opname", str(op))
        seen = set(nodes)
        for node in nodes:  # grows
            self._watched.add(node)
            node.register_hook(partial(self._hear_result, node, name, words, module))
            following = [one for one, _ in node.next_functions if one is not None]
            fresh = [one for one in following if one not in seen and one not in ends and "Accumulate" not in one.name()]
            if len(seen) < NODES:
                seen.update(fresh)
                nodes += fresh

    def _watch_function(self, node: Any) -> None:
        """Watch the node of a user's autograd.Function, whose own operations no autograd node shows."""
        self._watched.add(node)
        function = getattr(type(node), "_forward_cls", None)
        backward: Any = getattr(function, "backward", None)
        code = None if backward is None else getattr(inspect.unwrap(backward), "__code__", None)
        if function is not None and code is not None:
            self._functions[code] = function.__name__
            words = f"{function.__name__} ({line_of(Place(code.co_filename, code.co_firstlineno))})"
            node.register_hook(partial(self._hear_result, node, function.__name__, words, self._module()))

    def _hear_result(self, node: Any, name: str, words: str, module: str, inner: Any, outer: Any) -> None:
        """A node has computed the gradients `inner` of its arguments from the gradients `outer` of its results."""
        with plain_torch():
            given = [x for x in outer if x is not None and is_number(x)]
            made = [x for x in inner if x is not None and is_number(x)]
            if not all(map(all_finite, given)):
                return
            if all(map(all_finite, made)):
                self._note_underflow(words, module, given, made)
            elif self.backward is None:
                broken = next(x for x in made if not all_finite(x))
                cause = backward_cause(name, broken)
                self.backward = self._by_hand or Origin(f"the backward pass of {words}", module, cause)

    def _note_underflow(self, words: str, module: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        low = [x for x in made if is_low(x.dtype)]
        if low and given:
            before = min(_zeros(x) for x in given)
            after = max(_zeros(x) for x in low)
            if after - before > FLUSHED:
                self.flushed.append((f"the backward pass of {words}", module))

    def first(self, has_finite_loss: bool) -> Origin | None:
        """The origin to blame: of the loss if that is not finite, else of the gradients."""
        if not has_finite_loss and self.last is not None:
            return self.last
        return self.backward or self.nan or self.last


def _zeros(x: torch.Tensor) -> float:
    x = entries(x)
    return 1 - int(x.count_nonzero()) / x.numel() if x.numel() else 0.0


def _writes_infinity(op: Any, args: Any, kwargs: Any, inputs: list[torch.Tensor]) -> bool:
    """Whether the operation has an infinite number as argument, or a tensor with -Inf that nothing computed."""
    numbers = [x for x in (*_flat(args), *kwargs.values()) if isinstance(x, float)]
    if any(map(math.isinf, numbers)):
        return True
    return any(not all_finite(x) and not bool(entries(x).isnan().any()) for x in inputs)


def _flat(args: Any) -> list[Any]:
    result: list[Any] = []
    for x in args:
        result += _flat(x) if isinstance(x, list | tuple) else [x]
    return result
