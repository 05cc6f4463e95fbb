"""Watches one step as written for changes of values in FP16 or BF16 that rounding discards, such as a running average of
the weights, for weights that change inside of an autocast region, and for regions without a low-precision operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from ...emulation.emulate import Emulation
from ...emulation.regions import Region, is_outdated
from ...isolation.tensors import memory, plain_torch, written_by
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.formats import is_low
from ...training.blame import NO_PASS
from .result import StepFinding

LOST = 0.2
"""Share of the changes of a value from which their loss is a problem."""
CONVERSIONS = (torch.ops.aten.to, torch.ops.aten._to_copy, torch.ops.aten.clone)
"""Operations that change no value in exact arithmetic."""


@dataclass
class _Twin:
    """A low-precision tensor that outlives the step, its entries before the step, and what they would be in FP32. line: of
    the operation that wrote to it last."""

    tensor: torch.Tensor
    before: torch.Tensor
    exact: torch.Tensor
    line: str


@dataclass(frozen=True)
class _Origin:
    """A low-precision tensor that existed before the step, from which the step computes another of the same shape."""

    storage: StorageWeakRef
    before: torch.Tensor
    dtype: torch.dtype


@dataclass(frozen=True)
class _Successor:
    """A low-precision tensor of the step that replaces its origin, if it outlives the step and the origin does not."""

    tensor: torch.Tensor
    origin: _Origin
    line: str


class LowState(Emulation):
    """Emulates a step, and computes its changes of low-precision tensors, outside modules and without gradients, in FP32 too.

    is_inside: whether a module or an optimizer's `step` is being called. line: returns the user's line that runs.
    """

    def __init__(self, is_inside: Callable[[], bool], line: Callable[[], str]) -> None:
        super().__init__()
        self._is_inside, self._line = is_inside, line
        self._made = dict[int, torch.Tensor]()  # tensors of this step, by storage
        self._exact = dict[int, torch.Tensor]()  # their values in FP32, where they differ; by id
        self._twins = dict[int, _Twin]()  # by storage
        self._origins = dict[int, _Origin]()  # of tensors of this step, by id
        self._successors: list[_Successor] = []
        self._outside: list[torch.Tensor] = []  # FP32 tensors that the step changes, whose ids have to stay theirs
        self._region_line, self._has_low = "", False
        self._outdated: tuple[str, str] | None = (
            None  # the first line that uses an outdated cast of a weight, and its dtype
        )

    def cast_arguments(
        self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments as autocast casts them; notes the first cast of a weight that has changed since."""
        new_args, new_kwargs = super().cast_arguments(op, args, kwargs, region)
        pairs = zip(tensors_in((args, kwargs)), tensors_in((new_args, new_kwargs)), strict=True)
        if self._outdated is None and any(is_outdated(before, after) for before, after in pairs if before is not after):
            self._outdated = self._line(), region.dtype
        return new_args, new_kwargs

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run an operation, and run it in FP32 too if it changes a low-precision tensor that outlives the step."""
        watched = self._is_watched(op, args, kwargs)
        exact = None
        if watched:
            with plain_torch():
                exact = self._run_exactly(op, args, kwargs)
        result = super().run_leaf_op(op, args, kwargs, region)
        with plain_torch():
            self._note(op, args, kwargs, result, exact)
            if region.enabled and region.dtype in ("float16", "bfloat16") and not self._has_low:
                self._region_line = self._region_line or self._line()
                self._has_low = any(is_low(x.dtype) for x in tensors_in(result))
        return result

    def _is_watched(self, op: Any, args: Any, kwargs: Any) -> bool:
        if not isinstance(op, torch._ops.OpOverload) or self._is_inside():
            return False
        if torch._C._current_graph_task_id() != NO_PASS:
            return False
        tensors = tensors_in((args, kwargs))
        needs_graph = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
        return not needs_graph and any(is_low(x.dtype) or id(x) in self._origins for x in tensors)

    def _run_exactly(self, op: Any, args: Any, kwargs: Any) -> Any:
        """The operation's result in FP32, None if it fails there. Creates twins of the tensors to which it writes."""
        for x in _written(op, args, kwargs):
            key = _key(x)
            if is_low(x.dtype) and key is not None and key not in self._made and key not in self._twins:
                before = x.detach().clone()
                self._twins[key] = _Twin(x, before, before.float(), "")
            elif not is_low(x.dtype) and id(x) not in self._exact:  # the operation must not change it twice
                self._outside.append(x)
                self._exact[id(x)] = x.detach().clone()
        if op.overloadpacket in CONVERSIONS:
            return self._exact_of(args[0]).clone()
        try:
            return op(*over_tensors(self._exact_of, args), **over_tensors(self._exact_of, kwargs))
        except (RuntimeError, TypeError):  # for example an operation that takes one dtype only
            return None

    def _exact_of(self, x: torch.Tensor) -> torch.Tensor:
        twin = self._twins.get(_key(x) or 0)
        if twin is not None and twin.tensor.shape == x.shape:
            return twin.exact
        known = self._exact.get(id(x))
        if known is not None:
            return known
        return x.detach().float() if is_low(x.dtype) else x.detach()

    def _note(self, op: Any, args: Any, kwargs: Any, result: Any, exact: Any) -> None:
        written = _written(op, args, kwargs)
        for x in written:
            if twin := self._twins.get(_key(x) or 0):
                twin.line = self._line()
        fresh = [x for x in tensors_in(result) if all(x is not one for one in written)]
        known = {_key(x) for x in tensors_in((args, kwargs))}  # a view of an older tensor is no new one
        made = {key: x for x in fresh if (key := _key(x)) is not None and key not in self._twins}
        self._made |= {key: x for key, x in made.items() if key not in known}
        values = tensors_in(exact)
        if len(values) == len(fresh):
            pairs = zip(fresh, values, strict=True)
            self._exact |= {id(x): y for x, y in pairs if x.shape == y.shape and y.is_floating_point()}
            self._note_origins(tensors_in((args, kwargs)), fresh)

    def _note_origins(self, inputs: list[torch.Tensor], results: list[torch.Tensor]) -> None:
        """Note results of an operation that are computed from a low-precision tensor of the same shape."""
        for result in results:
            known = (self._origin_of(x) for x in inputs if x.shape == result.shape)
            origin = next((one for one in known if one is not None), None)
            if origin is None or id(result) not in self._exact:
                continue
            self._origins[id(result)] = origin
            if result.dtype is origin.dtype:
                self._successors.append(_Successor(result, origin, self._line()))

    def _origin_of(self, x: torch.Tensor) -> _Origin | None:
        if id(x) in self._origins or not is_low(x.dtype) or _key(x) in self._made:
            return self._origins.get(id(x))
        storage = next(iter(memory(x)), None)
        if storage is None:
            return None
        return _Origin(_weak(storage), x.detach().clone(), x.dtype)

    def _replacements(self) -> Iterator[_Twin]:
        """The successors that replace their origins."""
        ends = list[tuple[StorageWeakRef, StorageWeakRef, _Twin]]()
        for one in self._successors:
            exact = self._exact[id(one.tensor)]
            twin = _Twin(one.tensor.detach().clone(), one.origin.before, exact.float(), one.line)
            ends += [(_weak(storage), one.origin.storage, twin) for storage in memory(one.tensor)]
        for held in (self._successors, self._origins, self._made, self._exact, self._outside):
            held.clear()
        for new, old, twin in ends:
            if _is_freed(old) and not _is_freed(new):
                yield twin

    def findings(self, step: int) -> Iterator[StepFinding]:
        """The findings of the step."""
        with plain_torch():
            counts = dict[tuple[str, str], list[int]]()
            for twin in (*self._twins.values(), *self._replacements()):
                changed = twin.exact != twin.before.float()
                lost = changed & (twin.tensor == twin.before)
                name = "FP16" if twin.tensor.dtype is torch.float16 else "BF16"
                count = counts.setdefault((twin.line, name), [0, 0])
                count[0] += int(changed.count_nonzero())
                count[1] += int(lost.count_nonzero())
        for (line, name), (changes, losses) in counts.items():
            if losses > LOST * changes:
                said = f"{losses / changes:.0%} of the changes of values that are stored in {name} are lost, since they are below half the spacing of {name} numbers: store such values, for example an average of the weights, in FP32"
                yield StepFinding("state-lost", said, line, step)
        if self._outdated is not None:
            line, dtype = self._outdated
            name = "FP16" if dtype == "float16" else "BF16"
            said = f"weights changed inside of the autocast region, which keeps their {name} casts from before until it ends: leave the region before weights change, and enter it again"
            yield StepFinding("outdated-weights", said, line, step)
        if self._region_line and not self._has_low:
            said = "the autocast region runs no operation in low precision: put the model's forward pass inside"
            yield StepFinding("nothing-low", said, self._region_line, step)


def _written(op: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    places = written_by(op) or ()
    return tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in places])


def _key(x: torch.Tensor) -> int | None:
    return next((storage._cdata for storage in memory(x)), None)


def _weak(storage: Any) -> StorageWeakRef:
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _is_freed(storage: StorageWeakRef) -> bool:
    return bool(storage.expired())  # type: ignore[no-untyped-call]
