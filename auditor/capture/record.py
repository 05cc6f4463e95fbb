"""Records one real run of a model as a torch.fx graph of ATen operations."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ..emulation.intercept import Handler, intercept
from ..emulation.regions import Region, entered_at
from ..isolation.draws import Draw, draw_of, drew, may_draw
from ..isolation.members import named_modules
from ..isolation.outputs import NamedTensors, tensor_outputs
from ..numerics.entries import over_tensors
from ..numerics.nodes import mutates, operation_of, tensors_in, to_device
from ..records import Batch, Call
from .builder import Builder, Mark, Observer, Recording, ends, named_inputs
from .calls import Calls, Functions
from .functional import (
    PinnedDraw,
    WritesOnCopies,
    as_cast,
    is_no_cast,
    positional,
    promotes,
    shape_from,
    twin_of,
    with_defaults,
    written_arguments,
)
from .made import made_of
from .source import written_at
from .values import Values
from .views import ALIAS, View, shares_memory

_aten = torch.ops.aten
_FP32 = Region(True, "float32")


def record(
    model: nn.Module,
    batch: Batch,
    *,
    handler: Handler | None = None,
    around: Region | None = _FP32,
    observer: Observer | None = None,
) -> tuple[Recording, NamedTensors]:
    """Run the model once on a batch and record its operations; also returns the model's output tensors.

    handler: runs the operations, by default as torch does. around: the autocast region of the run. A float32 region
    casts nothing, but shows which regions the user's code disables. observer: is called with each operation and its
    result. The batch's tensors are copied; the caller must restore the model's tensors.
    """
    recording, calls = Recording(), Calls(model)
    recorder = _Recorder(recording, calls, handler or Handler(), around, observer)
    args, kwargs = recorder.begin(model, batch)
    with ExitStack() as stack:
        stack.enter_context(calls.watch(recorder.note_returned))
        dtype = getattr(torch, around.dtype) if around is not None else None
        stack.enter_context(intercept(recorder, calls.depth, dtype))
        stack.enter_context(recorder.functions)
        outputs = tensor_outputs(model(*args, **kwargs))
        answer = outputs.each(lambda x: x.detach().clone())
    recorder.builder.close([recorder.values.node_of(x) for x in outputs])
    recording.elsewhere, recording.asked = calls.elsewhere, recorder.functions.asked
    return recording, answer


class _Recorder(Handler):
    """Runs every operation and adds it to the recording."""

    def __init__(
        self,
        recording: Recording,
        calls: Calls,
        handler: Handler,
        around: Region | None,
        observer: Observer | None,
    ) -> None:
        self.recording, self.calls, self.handler = recording, calls, handler
        self.functions = Functions(calls, self.notice_reads)
        self.around = around or Region(False, "")
        self.builder = Builder(recording, Mark(calls.open, None, None, 0), observer)
        self._emit = self.builder.emit
        self.values = Values(self._emit, self._constant)
        self.kept: list[torch.Tensor] = []

    def _constant(self, x: torch.Tensor, kind: str = "constant") -> fx.Node:
        """Add a placeholder for a tensor that the recorded operations did not make, and note where it was made."""
        node = self.builder.constant(x, kind)
        made = made_of(x, record.__code__) if x.is_floating_point() else None
        if made is not None:
            self.recording.made[node.name] = made
        return node

    def begin(self, model: nn.Module, batch: Batch) -> Batch:
        """Add placeholders for the model's state and the batch's tensors; returns the copied batch."""
        for path, module in named_modules(model):
            for kind, store in (("parameter", module._parameters), ("buffer", module._buffers)):
                for name, tensor in store.items():
                    if tensor is not None and not self.values.knows(tensor):
                        node = self.builder.state(kind, f"{path}.{name}".lstrip("."), tensor)
                        self.values.bind(tensor, node)
        copies: dict[int, torch.Tensor] = {}
        names = named_inputs(model, batch)

        def copy_once(x: torch.Tensor) -> torch.Tensor:
            if id(x) not in copies:
                copies[id(x)] = x.detach().clone().requires_grad_(x.requires_grad)
                self.values.bind(copies[id(x)], self.builder.input(names[id(x)], copies[id(x)]))
            return copies[id(x)]

        result = over_tensors(copy_once, batch)
        self.kept = list(copies.values())
        return result

    def note_returned(self, call: Call, result: Any) -> None:
        """Note the tensors that a module call returned: a plan casts returned tensors, but not attributes of the
        module."""
        with torch._C.DisableTorchFunction():  # the calls below are not the model's
            for x in tensors_in(result):
                while torch._C._functorch.is_functorch_wrapped_tensor(x):
                    x = torch._C._functorch.get_unwrapped(x)
                if self.values.knows(x):
                    self.recording.returned.setdefault(self.values.node_of(x).name, []).append(call.key)

    def notice_reads(self, *given: torch.Tensor) -> None:
        """Note that Python reads the values of the tensors `given`, or that a shape depends on these values."""
        nodes = [self.values.node_of(x) for x in given]
        self.recording.reads |= any(node in self.builder.fed for node in nodes)
        self.builder.read.update(dict.fromkeys(nodes))

    def run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._record_operation(op, args, kwargs, region, self.handler.run_op)

    def cast_arguments(self, op: Any, args: Any, kwargs: Any, region: Region) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return self.handler.cast_arguments(op, args, kwargs, region)

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        return self._record_operation(op, args, kwargs, region, self.handler.run_leaf_op)

    def _record_operation(self, op: Any, args: Any, kwargs: Any, region: Region, run: Callable[..., Any]) -> Any:
        self.recording.operations += 1
        if not isinstance(op, torch._ops.OpOverload):
            return run(op, args, kwargs, region)
        if operation_of(op).reads:
            self.notice_reads(*tensors_in((args, kwargs)))
            return run(op, args, kwargs, region)
        args, kwargs = positional(op, args, kwargs)
        given = tensors_in((args, kwargs))
        writes = mutates(op)
        self.builder.mark = self._mark(op, region, writes)
        node_arguments, must_store = self._arguments(op, args, kwargs)
        draw = None
        if may_draw(op) or op.namespace != "aten":
            draw = draw_of(args, kwargs)
        result = run(op, args, kwargs, region)
        if draw is not None and not drew(draw, kwargs):
            draw = None
        if writes:
            self._record_write(op, args, kwargs, node_arguments, result, draw)
            return result
        result, renamed = _apart_from(given, result)
        if must_store:
            for _, x in _places_of(result):
                self.values.bind(x, self._constant(x, "held"))
        else:
            self._record_result(op, given, node_arguments, result, draw, renamed)
        return result

    def _mark(self, op: Any, region: Region, writes: bool) -> Mark:
        """Where the model's code calls an operation."""
        return Mark(
            self.calls.open,
            written_at(record.__code__),
            region if region != self.around else None,
            max(1, entered_at()),
            operation_of(op).name if writes else None,
            None if writes else self.functions.open,
        )

    def _arguments(self, op: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, Any], bool]:
        """The arguments with nodes in place of tensors, and whether the result must be stored as a constant.

        Values that determine a result's shape become constants if rounding could change them. Tensors of unknown origin
        become constants.
        """
        choosing = shape_from(op, args)
        chosen = {id(x) for x in choosing if self.values.node_of(x) not in self.builder.exact}
        if choosing:
            self.notice_reads(*choosing)
        floating = any(id(x) in chosen and (x.is_floating_point() or x.is_complex()) for x in choosing)

        def node(x: torch.Tensor) -> fx.Node:
            own = self.values.node_of(x)
            if id(x) in chosen and not floating:
                return self._constant(x, "held")
            return self._emit(_aten.detach.default, (own,), {}, x) if ends(own, x) else own

        tree: tuple[Any, Any] = over_tensors(node, (args, kwargs))
        ragged = [x for x in tensors_in(args) if x.is_nested and x.layout is torch.jagged]
        if ragged:
            tree = pytree.tree_map_only(torch.SymInt, lambda size: self._ragged_size(size, ragged), tree)
        return tree, floating

    def _ragged_size(self, size: torch.SymInt, ragged: list[torch.Tensor]) -> Any:
        """The length of a ragged dimension as a node, since torch's symbol for it differs in a replay."""
        sizes: list[tuple[torch.Tensor, int, Any]] = [(x, dim, x.size(dim)) for x in ragged for dim in range(x.dim())]
        for x, dim, own in sizes:
            if isinstance(own, torch.SymInt) and own == size:
                return self._emit(_aten.sym_size.int, (self.values.node_of(x), dim), {}, None)
        return size

    def _record_result(
        self, op: Any, given: list[torch.Tensor], before: tuple[Any, Any], result: Any, draw: Any, renamed: set[int]
    ) -> None:
        """Add an operation that writes nothing. before: its arguments with nodes in place of tensors; renamed: see
        `_apart_from`."""
        if operation_of(op).identity and isinstance(result, torch.Tensor):
            self.values.same(result, given[0])
            return
        args, kwargs = before
        is_unchanged = op.namespace == "aten" and isinstance(result, torch.Tensor) and id(result) in renamed
        if is_unchanged and is_no_cast(op, given, *before):
            self.values.same(result, given[0])  # dropout in eval mode, or contiguous() without effect
            return
        if operation_of(op).writes_statistics and args[5] and args[3] is not None:
            self._by_batch(op, given, args, result)
            return
        target, args, kwargs = as_cast(op, given, args, kwargs)
        if draw is not None:
            target = PinnedDraw(op, draw)
            kwargs = _without_generator(kwargs)
        places = list(_places_of(result))
        if not places and op.namespace != "aten":  # a number or a bool
            self.notice_reads(*given)
        node = self._emit_moved(op, given, before, (target, args, kwargs), result)
        for path, x in places:
            own = self._item(node, path, result)
            source = next((y for y in given if shares_memory(x, y)), None)
            if source is None:
                self.values.bind(x, own)
                continue
            view = None
            if id(x) in renamed:
                view = ALIAS
            elif source is given[0] and isinstance(args[0], fx.Node) and len(path) < 2:
                index = path[0] if path else None
                view = View(op, tuple(args[1:]), kwargs, index)
            self.values.bind_view(x, own, source, view)

    def _emit_moved(
        self,
        op: Any,
        given: list[torch.Tensor],
        before: tuple[Any, Any],
        call: tuple[Any, Any, Any],
        result: Any,
    ) -> fx.Node:
        """Add the call (target, args, kwargs) of an operation. A cast to another device becomes the cast, if it casts,
        and the move."""
        target, args, kwargs = call
        is_moved = target is _aten.to.dtype and given and result.device != given[0].device
        if not is_moved:
            return self._emit(target, args, kwargs, result)
        node = args[0] if is_no_cast(op, given, *before) else self._emit(target, args, kwargs, result)
        return self._emit(to_device, (node, result.device), {}, result)

    def _item(self, node: fx.Node, path: tuple[int, ...], result: Any) -> fx.Node:
        """The node of one tensor of a result. node: the operation; path: the tensor's position in the result."""
        for index in path:
            result = result[index]
            node = self._emit(operator.getitem, (node, index), {}, result)
        return node

    def _by_batch(self, op: Any, given: list[torch.Tensor], args: Any, result: torch.Tensor) -> None:
        """Record a batch norm in training mode, which writes running statistics that its schema does not declare."""
        by_node = {self.values.node_of(x): x for x in given}
        running = [by_node[args[3]], by_node[args[4]]]  # mean and variance
        if op is not _aten.batch_norm.default:
            # The result depends only on the batch's statistics.
            without_running = (*args[:3], None, None, *args[5:])
            self.values.bind(result, self._emit(op, without_running, {}, result))
            self._record_on_copies(op, (3, 4), args, {}, running, None, None)
            return
        of_channels = torch.empty(given[0].shape[1], device="meta")
        functional = _aten._native_batch_norm_legit_functional.default
        outputs = (result, of_channels, of_channels, *running)
        node = self._emit(functional, tuple(args[:8]), {}, outputs)
        self.values.bind(result, self._emit(operator.getitem, (node, 0), {}, result))
        for index, x in enumerate(running, 3):
            self.values.write(x, self._emit(operator.getitem, (node, index), {}, x))

    def _record_write(
        self, op: Any, args: Any, kwargs: Any, before: tuple[Any, Any], result: Any, draw: Draw | None
    ) -> None:
        """Add an operation that writes to its arguments, as its functional twin. before: its arguments with nodes in place
        of tensors."""
        row = operation_of(op)
        if row.writes_nothing:
            return
        changed = _changed_arguments(op, args, kwargs)
        written = tensors_in(changed)
        if row.replaces_memory:
            for x in written:
                self.values.update_storage(x)
            return
        node_args, node_kwargs = before
        twin = twin_of(op)
        if row.view == "always":  # such as `unsqueeze_`
            target = twin or _aten.as_strided.default
            node = self._emit(target, node_args, node_kwargs, written[0])
            view = View(target, tuple(args[1:]), kwargs)
            self.values.bind_view(written[0], node, written[0], view)
            return
        if draw is not None:
            node_kwargs = _without_generator(node_kwargs)
        if twin is None:
            self._record_on_copies(op, written_arguments(op), node_args, node_kwargs, written, result, draw)
            return
        target = twin if draw is None else PinnedDraw(twin, draw)
        outs = {argument.name for argument in op._schema.arguments if argument.is_out}
        node_args = with_defaults(op, node_args)
        node_kwargs = {name: value for name, value in node_kwargs.items() if name not in outs}
        value = result if isinstance(result, (torch.Tensor, tuple, list)) else changed[0]
        node = self._emit(target, node_args, node_kwargs, value)
        if len(written) == 1 and isinstance(result, torch.Tensor):  # `_foreach_` operations return lists
            self._write_from(op, node, written[0], tensors_in((args, kwargs)))
            return
        for index, x in enumerate(written):
            self._write_from(op, self._emit(operator.getitem, (node, index), {}, x), x, [x])

    def _write_from(self, op: Any, node: fx.Node, x: torch.Tensor, given: list[torch.Tensor]) -> None:
        """Let a written tensor have the value of a node, in the tensor's own dtype. given: tensors that the operation
        promotes to one dtype."""
        if promotes(op, x, given):
            node = self._emit(_aten.to.dtype, (node, x.dtype), {}, x)
        self.values.write(x, node)

    def _record_on_copies(
        self,
        op: Any,
        places: tuple[int | str, ...],
        args: Any,
        kwargs: Any,
        written: list[torch.Tensor],
        result: Any,
        draw: Draw | None,
    ) -> None:
        target: Any = WritesOnCopies(op, places)
        node = self._emit(PinnedDraw(target, draw) if draw is not None else target, args, kwargs, (result, written))
        copies = self._emit(operator.getitem, (node, 1), {}, written)
        for index, x in enumerate(written):
            self.values.write(x, self._emit(operator.getitem, (copies, index), {}, x))
        known = {id(x) for x in written}
        for path, x in _places_of(result):
            if id(x) not in known:
                self.values.bind(x, self._item(node, (0, *path), (result, written)))


def _apart_from(given: Iterable[torch.Tensor], result: Any) -> tuple[Any, set[int]]:
    """The result with separate names for tensors in `given`, and the ids of these: a cast without effect returns its
    input, but its result needs a node of its own."""
    known = {id(x) for x in given}
    renamed = set[int]()

    def rename(x: torch.Tensor) -> torch.Tensor:
        if id(x) in known:
            with suppress(RuntimeError, NotImplementedError):  # some layouts have no views
                x = _aten.alias.default(x)
            renamed.add(id(x))
        return x

    return over_tensors(rename, result), renamed


def _changed_arguments(op: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that an operation writes."""
    changed = list[Any]()
    for place in written_arguments(op):
        is_positional = isinstance(place, int) and place < len(args)
        changed.append(args[place] if is_positional else kwargs.get(str(place)))
    return changed


def _places_of(result: Any, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """The tensors in an operation's result, with their positions."""
    if isinstance(result, torch.Tensor):
        yield path, result
    elif isinstance(result, (tuple, list)):
        for index, item in enumerate(result):
            yield from _places_of(item, (*path, index))


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Remove the generator from the arguments: the recorded Draw stores its state. `generator=None` is kept: some
    overloads require this argument."""
    return {key: value for key, value in kwargs.items() if key != "generator" or value is None}
