"""Detects wrong loss scaling in the user's step, by trial runs at two loss scales and with a gradient that overflows.

In a correct loop the update does not depend on the loss scale, and an overflow only skips the update and reduces the scale.
Both hold whatever the step does with its gradients, so that clipping by hand needs no rule of its own. Each trial runs in
a process of its own, and leaves the run that is audited as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from traceback import walk_tb
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode

from ...capture.source import Place, kind_of, line_of
from ...isolation.tensors import memory, plain_torch, written_by
from ...numerics.entries import all_finite, entries, is_plain, tensors_in
from ...numerics.formats import is_low
from ...training.blame import NO_PASS
from .result import StepFinding
from .sketch import apart, sketch

Identity = tuple[int, int]
"""What changes with a tensor's gradient: its id, and its version."""
Identities = Mapping[torch.Tensor, Identity]
"""{parameter: identity of its gradient}."""

APART = 4.0
"""Factor between the loss scales of two GradScalers in the trial that tells them apart."""
TRIALS = 2
"""Number of sampled steps that are tried."""
LEAST_SCALE, USUAL_SCALE = 16.0, 65536.0
"""A smaller loss scale than the first is replaced by the second, GradScaler's default."""
SAME = 0.01
"""Largest relative difference of gradients that count as equal. A power of two as loss scale changes no digit of FP32."""
NEGLIGIBLE = 1e-6
"""A gradient whose norm is a smaller share of the norm of all gradients is not compared."""
EMPTYING = ("zero_", "_foreach_zero_")
UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
READ = "aten::_local_scalar_dense"
BACKWARD = "backward"
EXPLAINED = frozenset(
    {
        "backward-after-unscale",
        "clip-before-unscale",
        "fp16-parameters",
        "gradients-kept",
        "gradients-zeroed",
        "inner-gradients-scaled",
        "loss-not-scaled",
        "no-update",
        "other-scaler",
        "scaler-recreated",
        "unscale-after-step",
        "unscale-twice",
        "update-before-step",
        "update-not-skipped",
        "update-with-scaled-gradients",
        "updated-twice",
    }
)
"""Kinds of findings that explain why an update depends on the loss scale, or why an overflow is not skipped."""
OF_SCALE = EXPLAINED | {
    "change-before-unscale",
    "decided-by-scaled-value",
    "fails-on-overflow",
    "hook-on-scaled-gradients",
    "overflow-hidden",
    "overflow-not-counted",
    "update-depends-on-scale",
}
"""Kinds of findings of the trial steps here."""


@dataclass(frozen=True)
class Write:
    """A change of a gradient: by `backward`, or by an operation of the user. number: order among all writes of the step.
    norm: of the gradient afterwards. loss: on which `backward` ran. hook: line of user code inside the pass. sketch: of the
    gradient afterwards. backward_pass: number of the pass, for a write by `backward`."""

    number: int
    line: str
    operation: str
    norm: float
    loss: float = 0.0
    hook: str = ""
    sketch: tuple[float, ...] = ()
    backward_pass: int = -1


@dataclass(frozen=True)
class Term:
    """A term of a loss. factors: by which the step multiplies it, the last first. names: of the parameters in its graph."""

    factors: tuple[float, ...]
    names: frozenset[str]


@dataclass(frozen=True)
class Update:
    """A call of an optimizer's `step`.

    options: learning rates and other numbers of its groups. is_finite: whether all gradients were finite. is_skipped: whether the optimizer skips the update itself, as fused
    optimizers do once GradScaler has told them of an overflow.
    """

    optimizer: str
    line: str
    is_finite: bool
    is_skipped: bool
    options: tuple[float, ...] = ()


@dataclass
class Trial:
    """What a trial step did. gradients: {parameter: its gradient at the update}, as NumPy arrays. reads: (line, value) of
    numbers that Python read from tensors. broken: names of the parameters whose gradients were made infinite. failure: an
    exception in words, with its line. scales: loss scales before and after the step, of each GradScaler. is_low: whether the
    step's own casts run a part of the backward pass in FP16 or BF16, which rounds differently at another scale.
    moves: changes of weights by values that are made from gradients before `unscale_`; their norms are those of the
    change. inner_line, constant_line: see `Observer`. emptied_line: of the operation that set all gradients to zero.
    factors: those by which the step multiplies the loss of each backward pass, the last first. terms: of each of these
    losses. copies_norm: norm of the gradients of parameters that no optimizer has, such as FP16 copies of the weights.
    weights: {parameter: (norm, root of its number of entries)}, before the update. changes: {parameter: the change of the
    weight by the whole step}, as NumPy arrays. written_lines: {parameter: the last line that writes to it outside of
    optimizers}. kept_line: of the first `backward`, if it adds to gradients of such copies. is_changed_inside: whether an
    optimizer's `step` changes gradients itself."""

    gradients: dict[str, Any] = field(default_factory=dict)
    writes: dict[str, list[Write]] = field(default_factory=dict)
    reads: list[tuple[str, float]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    failure: str = ""
    failure_line: str = ""
    scales: list[tuple[float, float]] = field(default_factory=list)
    is_low: bool = False
    moves: dict[str, list[Write]] = field(default_factory=dict)
    inner_line: str = ""
    constant_line: str = ""
    emptied_line: str = ""
    factors: list[tuple[float, ...]] = field(default_factory=list)
    terms: list[list[Term]] = field(default_factory=list)
    copies_norm: float = 0.0
    weights: dict[str, tuple[float, float]] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)
    written_lines: dict[str, str] = field(default_factory=dict)
    kept_line: str = ""
    is_changed_inside: bool = False


@dataclass(frozen=True)
class _Difference:
    """A change of a gradient that depends on the loss scale. plain_factor, scaled_factor: by how much it multiplies the
    gradient's norm at loss scale 1, and at the other; NaN if unknown. plain_loss: at loss scale 1."""

    write: Write
    plain_factor: float = math.nan
    scaled_factor: float = math.nan
    plain_loss: float = 0.0


@dataclass(frozen=True)
class _Derived:
    """A value that is made from gradients. tensor: keeps its storage. line, operation: which made it. changes: what made it
    from one gradient, entry by entry, its own operation last; only without a GradScaler."""

    tensor: torch.Tensor
    line: str
    operation: str
    changes: tuple[Write, ...] = ()


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that records a trial step: the changes of gradients until `unscale_`, and the numbers that are read.

    parameters: {trained parameter: its name}. scalers: of the step. line: returns the user's line that runs. breaks:
    whether each backward pass makes a gradient of each of the `optimizers` infinite.
    """

    supports_higher_order_operators = True

    def __init__(
        self,
        parameters: Mapping[torch.Tensor, str],
        optimizers: Iterable[Optimizer],
        scalers: Iterable[GradScaler],
        line: Callable[[], str],
        breaks: bool = False,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trial = Trial(writes={name: [] for name in parameters.values()})
        self._parameters, self._optimizers, self._scalers = parameters, [*optimizers], scalers
        self._line, self._breaks = line, breaks
        self._storages = dict[torch.Tensor, int]()  # of gradients that are not divided by the scale yet
        self._derived = dict[int, _Derived]()  # by storage
        self._kept: list[torch.Tensor] = []  # every gradient of the step, so that no other storage gets its address
        self._weights = dict[torch.Tensor, torch.Tensor]()  # before the first change by hand
        self._emptied = dict[int, str]()  # {storage of a gradient: line that set it to zero}
        self._copies = dict[torch.Tensor, int]()  # {parameter that no optimizer has: storage of its gradient}
        self._count, self._hook, self._pass_line = 0, "", ""
        self._passes = 0
        self._is_by_hand = not [*scalers]
        self._before_update = dict[int, Identities]()  # {optimizer: identities of its gradients}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, since True would import the compiler, which takes a second."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        has_gradients = (self._storages or self._copies) and torch._C._current_graph_task_id() == NO_PASS
        if self._is_by_hand and has_gradients and written_by(func):
            with plain_torch():
                self._settle()  # a gradient that was replaced has to be noted before it is changed
        result = func(*args, **kwargs)
        with plain_torch():
            self._note(func, args, kwargs, result)
        return result

    def _note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        name = getattr(getattr(func, "_schema", None), "name", "")
        if torch._C._current_graph_task_id() != NO_PASS:
            self.trial.is_low |= any(is_low(x.dtype) for x in tensors_in(result))
            line = "" if self._hook else self._line()
            if line != self._pass_line:
                self._hook = self._hook or line
            return
        self._note_written_weights(func, args, kwargs)
        if name.rpartition("::")[2] in EMPTYING:
            self._emptied |= dict.fromkeys((key for x in tensors_in((args, kwargs)) for key in _keys(x)), self._line())
        if name == UNSCALE:
            self._settle()
            unscaled = {key for x in args[0] for key in _keys(x)}
            self._storages = {p: key for p, key in self._storages.items() if key not in unscaled}
        elif name == READ:
            scales = {key for one in self._scalers if one._scale is not None for key in _keys(one._scale)}
            if scales.isdisjoint(_keys(args[0])):
                self.trial.reads.append((self._line(), float(result)))
        elif self._storages or self._copies:
            self._note_derived(func, name.rpartition("::")[2], args, kwargs, result)

    def _note_written_weights(self, func: Any, args: Any, kwargs: Any) -> None:
        """Note an operation that writes to weights; those of optimizers do not pass through this mode."""
        changed = {key for x in _written(func, args, kwargs) for key in _keys(x)}
        for p in self._weights if changed else ():
            if not changed.isdisjoint(_keys(p)):
                self.trial.written_lines[self._parameters[p]] = self._line()

    def _note_derived(self, func: Any, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note an operation that reads gradients, or values made from them."""
        known = {*self._derived, *self._storages.values(), *self._copies.values()}
        if known.isdisjoint(key for x in tensors_in((args, kwargs)) for key in _keys(x)):
            return
        line = self._line()
        written = _written(func, args, kwargs)
        changed = {key for x in written for key in _keys(x)}
        for p, key in self._storages.items():
            if key in changed:
                self._add(p, line, name)
        for p, before in self._weights.items():
            if not changed.isdisjoint(_keys(p)):
                self._add_move(p, before, line, name)
        results = tensors_in(result) or written
        for i, x in enumerate(results):
            keys = [key for key in _keys(x) if key not in self._storages.values()]
            changes = self._changes_to(x, i, len(results), (args, kwargs), line, name) if keys else ()
            self._derived |= {key: _Derived(x, line, name, changes) for key in keys}

    def _add_move(self, p: torch.Tensor, before: torch.Tensor, line: str, operation: str) -> None:
        """Record a change of a weight by a value that is made from gradients."""
        norm = float((p.detach() - before).double().norm())
        self._count += 1
        moves = self.trial.moves.setdefault(self._parameters[p], [])
        moves.append(Write(self._count, line, operation, norm))

    def _changes_to(
        self, x: torch.Tensor, place: int, count: int, arguments: Any, line: str, operation: str
    ) -> tuple[Write, ...]:
        """What made a result of an operation from a gradient, entry by entry. place: of the result among `count` results."""
        if not self._is_by_hand:
            return ()
        args, kwargs = arguments
        lists = [each for each in args if isinstance(each, list | tuple) and len(each) == count]
        inputs = [each[place] for each in lists] or tensors_in((args, kwargs))
        of_gradients = {*self._storages.values(), *self._copies.values()}
        for source in inputs:
            keys = _keys(source) if isinstance(source, torch.Tensor) and source.numel() == x.numel() else []
            before = next((self._derived[key].changes for key in keys if key in self._derived), ())
            if before or not of_gradients.isdisjoint(keys):
                norm = float(entries(x.detach()).double().norm())
                return (*before, Write(0, line, operation, norm, sketch=tuple(sketch(x))))
        return ()

    def _settle(self) -> None:
        """Note gradients that the user replaced by other tensors."""
        for p, before in [*self._storages.items()]:
            key = next(iter(_keys(p.grad)), before) if p.grad is not None else before
            if key != before:
                self._keep(p)
                self._storages[p] = key
                self._add_replaced(p, key)
        for p in self._parameters if self._copies else ():
            key = next(iter(_keys(p.grad)), 0)
            if p not in self._storages and (key in self._derived or key in self._copies.values()):
                self._keep(p)
                self._storages[p] = key
                self._add_replaced(p, key)

    def _keep(self, p: torch.Tensor) -> None:
        """Keep the storage of a gradient until the trial ends."""
        if p.grad is not None:
            self._kept.append(p.grad.detach())

    def _add_replaced(self, p: torch.Tensor, key: int) -> None:
        """Record a gradient that the user replaced by another tensor, whose storage is `key`, and all that made that one."""
        made = self._derived.get(key)
        if made is None:
            self._add(p, self._line(), "an assignment")
            return
        for change in made.changes[:-1]:
            self._count += 1
            self.trial.writes[self._parameters[p]].append(replace(change, number=self._count))
        self._add(p, made.line, made.operation)

    def _add(self, p: torch.Tensor, line: str, operation: str, **about: Any) -> None:
        if p.grad is not None:
            norm = float(entries(p.grad).double().norm())
            self._count += 1
            write = Write(self._count, line, operation, norm, sketch=tuple(sketch(p.grad)), **about)
            self.trial.writes[self._parameters[p]].append(write)

    def before_backward(self, roots: Any) -> None:
        """Before a backward pass: note gradients that were replaced, and the line that starts the pass. roots: the tensors
        at which it begins."""
        with plain_torch():
            self._settle()
            self._hook, self._pass_line = "", self._line()
            if not self._passes and any(
                bool(entries(p.grad).any()) for p in self._copies_of(roots) if p.grad is not None
            ):
                self.trial.kept_line = self._pass_line
            self._passes += 1

    def after_backward(
        self, roots: Any, factors: Iterable[float], terms: Iterable[tuple[tuple[float, ...], Any]]
    ) -> None:
        """After a backward pass: record each parameter's gradient; a trial of an overflow first makes some of them infinite.

        roots: the tensors at which the pass began, usually the loss. factors: by which the step multiplied it. terms:
        (factors, node of its graph) of each term of the loss.
        """
        self.trial.factors.append(tuple(factors))
        self.trial.terms.append([Term(each, self._names_in(node)) for each, node in terms if self._is_by_hand])
        backward_pass = len(self.trial.factors) - 1
        with plain_torch():
            if self._note_copies(roots):
                return
            loss = sum(float(entries(x.detach()).double().sum()) for x in tensors_in(roots))
            for optimizer in self._optimizers if self._breaks else ():
                self._break(optimizer)
            for p in self._parameters:
                if keys := _keys(p.grad):
                    self._keep(p)
                    self._storages[p] = keys[0]
                    self._emptied.pop(keys[0], None)
                    if p not in self._weights:
                        self._weights[p] = p.detach().clone()
                    self._add(p, self._pass_line, BACKWARD, loss=loss, hook=self._hook, backward_pass=backward_pass)

    def _names_in(self, node: Any) -> frozenset[str]:
        """The names of the trained parameters in the graph of a node."""
        leaves = leaves_of_nodes([] if node is None else [node])
        return frozenset(self._parameters[p] for p in leaves if p in self._parameters)

    def _note_copies(self, roots: Any) -> bool:
        """Note the gradients of parameters that no optimizer has. Returns whether only such parameters got gradients."""
        leaves = self._copies_of(roots)
        if not leaves:
            return False
        for p in leaves:
            if keys := _keys(p.grad):
                self._keep(p)
                self._copies[p] = keys[0]
        norms = [float(entries(p.grad).double().norm()) for p in self._copies if p.grad is not None]
        self.trial.copies_norm = math.hypot(*norms)
        return True

    def _copies_of(self, roots: Any) -> list[torch.nn.Parameter]:
        """The parameters in the graphs of `roots`, if no optimizer has any of them; else none."""
        leaves = [p for p in leaves_of(roots) if isinstance(p, torch.nn.Parameter)]
        return [] if any(p in self._parameters for p in leaves) else leaves

    def changes(self) -> dict[str, Any]:
        """{parameter: the change of the weight since the first backward pass}, as NumPy arrays."""
        with plain_torch():
            return {self._parameters[p]: (p.detach() - before).numpy() for p, before in self._weights.items()}

    def _break(self, optimizer: Optimizer) -> None:
        """Make one entry of a gradient of the optimizer infinite."""
        for p in (p for group in optimizer.param_groups for p in group["params"]):
            if p in self._parameters and p.grad is not None and is_plain(p.grad):
                p.grad[(0,) * p.grad.dim()] = math.inf
                if self._parameters[p] not in self.trial.broken:
                    self.trial.broken.append(self._parameters[p])
                return

    def before_update(self, optimizer: Optimizer) -> None:
        """Record an update before it runs, whether a GradScaler or the user's code calls the optimizer."""
        self._settle()
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self._before_update[id(optimizer)] = {p: identity_of(p) for p in parameters}
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        found = getattr(optimizer, "found_inf", None)  # GradScaler sets it on fused optimizers
        is_skipped = found is not None and bool(found)
        is_finite = all(map(all_finite, gradients))
        options = (x for group in optimizer.param_groups for x in group.values())
        numbers = tuple(float(x) for x in options if isinstance(x, float | torch.Tensor))
        update = Update(type(optimizer).__name__, self._line(), is_finite, is_skipped, numbers)
        if gradients:
            self.trial.updates.append(update)
        lines = [self._emptied.get(key, "") for x in gradients for key in _keys(x)]
        if lines and all(lines) and not any(bool(entries(x).any()) for x in gradients):
            self.trial.emptied_line = lines[0]

    def after_update(self, optimizer: Optimizer) -> None:
        """Record whether an optimizer's `step` has changed gradients itself."""
        self.trial.is_changed_inside |= are_changed(self._before_update.pop(id(optimizer), {}))

    def fail(self, error: BaseException) -> None:
        """Note the exception that ended the step. error: with the user's exception as cause."""
        cause = error.__cause__ or error
        own = [Place(f.f_code.co_filename, n) for f, n in walk_tb(cause.__traceback__) if kind_of(f.f_code.co_filename)]
        said = f": {cause}" if str(cause) else ""
        self.trial.failure = f"{type(cause).__name__}{said}"
        self.trial.failure_line = line_of(own[-1]) if own else ""


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes to."""
    places = written_by(func) or ()
    return tensors_in([args[i] if i < len(args) else kwargs.get(key) for i, key in places])


def identity_of(p: torch.Tensor) -> Identity:
    """What changes whenever the gradient of `p` is changed or replaced."""
    return id(p.grad), -1 if p.grad is None else p.grad._version


def are_changed(identities: Identities) -> bool:
    """Whether gradients were changed since their identities were taken, and not only set to zero."""
    changed = (p.grad for p, identity in identities.items() if identity_of(p) != identity)
    return any(bool(entries(gradient).any()) for gradient in changed if gradient is not None)


def leaves_of(roots: Any) -> Iterator[torch.Tensor]:
    """The leaves of the graphs of `roots` that get a gradient."""
    return leaves_of_nodes([x.grad_fn for x in tensors_in(roots) if x.grad_fn is not None])


def leaves_of_nodes(nodes: list[Any]) -> Iterator[torch.Tensor]:
    """The leaves of the graphs that begin at some nodes."""
    nodes = [*nodes]
    seen = {*nodes}
    for node in nodes:  # grows
        if (leaf := getattr(node, "variable", None)) is not None:
            yield leaf
        fresh = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= fresh
        nodes += fresh


def trial_scale(scale: float) -> float:
    """The loss scale of a trial step: the step's own scale, rounded down to a power of two; 65536 if that is below 16 or infinite."""
    return 2.0 ** math.floor(math.log2(scale)) if LEAST_SCALE <= scale < math.inf else USUAL_SCALE


def set_scales(scalers: Iterable[GradScaler], scale: float, apart: float = 1.0) -> None:
    """Set the loss scale of every GradScaler, also of one that has not scaled a loss yet. apart: factor between the scale of
    each and that of the next."""
    for scaler in scalers:
        scaler._init_scale = scale
        if scaler._scale is not None:
            scaler._scale.fill_(scale)
        scale /= apart


def compare_scales(plain: Trial, scaled: Trial, scale: float, step: int) -> StepFinding | None:
    """A finding if the update depends on the loss scale. plain, scaled: the step at loss scale 1, and at `scale`."""
    if plain.emptied_line:
        said = "all gradients are set to zero between `backward` and the step of the optimizer: do it before `backward`"
        return StepFinding("gradients-zeroed", said, plain.emptied_line, step)
    names = [*_differing(plain.gradients, scaled.gradients)]
    if not (names or plain.failure or scaled.failure) and _options_differ(plain, scaled):
        line = _first_other_read(plain, scaled) or scaled.updates[0].line
        said = f"the learning rate, or another option of the optimizer, depends on a value that is still multiplied by the loss scale, {scale:g}: call `scaler.unscale_(optimizer)` before that"
        return StepFinding("decided-by-scaled-value", said, line, step)
    if not are_comparable(plain, scaled):
        return None
    if not (names or scaled.failure):
        return _weights_depend(plain, scaled, scale, step)
    both = [name for name in names if name in plain.gradients and name in scaled.gradients]
    factors = [_norm(scaled.gradients[name]) / (_norm(plain.gradients[name]) or math.nan) for name in both]
    if both and both == names and all(_is_near(factor, scale) for factor in factors) and scaled.updates:
        update = scaled.updates[0]
        said = f"{update.optimizer}.step() uses gradients that are still multiplied by the loss scale: divide them by it first"
        return StepFinding("update-with-scaled-gradients", said, update.line, step)
    firsts = [first for name in names if (first := _first_difference(plain, scaled, name, scale)) is not None]
    first = min(firsts, key=lambda each: each.write.number, default=None)
    move = _first_move(plain, scaled)
    if move is not None and (first is None or move.number < first.write.number):
        said = f"`{move.operation}` changes weights by gradients that are still multiplied by the loss scale, {scale:g}: divide them by `scaler.get_scale()` before"
        return StepFinding("update-with-scaled-gradients", said, move.line, step)
    if first is not None:
        return _of_write(first, scaled.inner_line, scale, step)
    if both != names and (line := _first_other_read(plain, scaled)):
        said = f"whether the weights are updated depends on a value that is still multiplied by the loss scale, {scale:g}: call `scaler.unscale_(optimizer)` before that, or use the loss itself"
        return StepFinding("decided-by-scaled-value", said, line, step)
    line = next((update.line for update in (*scaled.updates, *plain.updates)), "")
    said = "the update depends on the loss scale, although the loss and its gradients should be divided by it again"
    return StepFinding("update-depends-on-scale", said, line, step)


def compare_scalers(plain: Trial, apart: Trial, step: int) -> StepFinding | None:
    """A finding if the update of an optimizer depends on the loss scale of another GradScaler, though on none if all have the
    same. plain, apart: the step with all loss scales at 1, and with a different one for each GradScaler."""
    if apart.failure or not [*_differing(plain.gradients, apart.gradients)]:
        return None
    if apart.inner_line:
        said = "gradients from `autograd.grad`, such as those of a gradient penalty, are multiplied by the loss scale of one GradScaler, and divided by that of another: use `get_scale()` of the same"
        return StepFinding("inner-gradients-scaled", said, apart.inner_line, step)
    line = next((update.line for update in apart.updates), "")
    said = "an update depends on the loss scale of another GradScaler than that which scales its loss: use the same for `scale`, `get_scale` and `step`"
    return StepFinding("other-scaler", said, line, step)


def _weights_depend(plain: Trial, scaled: Trial, scale: float, step: int) -> StepFinding | None:
    """A finding if the step changes weights itself, by values that depend on the loss scale, beside the updates."""
    names = [name for name in _differing(plain.changes, scaled.changes) if name in scaled.written_lines]
    # weights that are moved and put back, as by SAM, differ by rounding
    names = [name for name in names if _differs_from_rounding(plain, scaled, name)]
    if not names:
        return None
    said = f"the weights are changed by values that depend on the loss scale, {scale:g}, although the gradients of the update do not: divide gradients by it once"
    return StepFinding("update-depends-on-scale", said, scaled.written_lines[names[0]], step)


def _differs_from_rounding(plain: Trial, scaled: Trial, name: str) -> bool:
    """Whether the two changes of a weight differ by more than FP32 rounds it."""
    weight_norm, _ = scaled.weights.get(name, (0.0, 0.0))
    return name in plain.changes and _norm(scaled.changes[name] - plain.changes[name]) > NEGLIGIBLE * weight_norm


def judge_copies_kept(trial: Trial, step: int) -> StepFinding | None:
    """A finding if `backward` adds to gradients that the model's copies have from the step before, and the update uses them."""
    is_used = any(writes and writes[0].operation != BACKWARD for writes in trial.writes.values())
    if trial.failure or not (trial.kept_line and trial.copies_norm and is_used):
        return None
    said = "gradients of the model, whose weights are copies of those of the optimizer, are added to gradients of the last update: set them to zero, since the optimizer's `zero_grad` does not"
    return StepFinding("gradients-kept", said, trial.kept_line, step)


def are_comparable(plain: Trial, scaled: Trial) -> bool:
    """Whether differences between two trials at different loss scales are due to the scale."""
    return not (plain.failure or plain.is_low)


def judge_overflow(usual: Trial, broken: Trial, step: int) -> StepFinding | None:
    """A finding if the step does not survive an overflow. usual, broken: the step without and with infinite gradients."""
    if usual.failure or not usual.updates:
        return None
    if broken.failure:
        said = (
            f"the step raises if gradients overflow, as they do until GradScaler has found its scale ({broken.failure})"
        )
        return StepFinding("fails-on-overflow", f"{said}: let `scaler.step` skip the update", broken.failure_line, step)
    for update in broken.updates:
        if update.is_skipped:
            continue
        hidden = next(_hiding_writes(broken), None) if update.is_finite else None
        if hidden is not None:
            said = f"`{hidden.operation}` replaces gradients that overflow, so that GradScaler neither skips the update nor reduces the loss scale: leave them as they are"
            return StepFinding("overflow-hidden", said, hidden.line, step)
        if not update.is_finite:
            said = f"{update.optimizer}.step() is not skipped if gradients overflow: call `scaler.step(optimizer)`"
            return StepFinding("update-not-skipped", said, update.line, step)
    if not broken.updates and all(after >= before for before, after in broken.scales):
        if broken.constant_line:
            said = "`update` with a number sets the loss scale in each step, so that it stays too large if gradients overflow: call `scaler.update()` without it"
            return StepFinding("overflow-not-counted", said, broken.constant_line, step)
        line = broken.reads[-1][0] if broken.reads else usual.updates[0].line
        said = "if gradients overflow, the step ends without `scaler.step()` and `scaler.update()`, so that the loss scale stays too large for ever: call both, since `scaler.step` skips the update"
        return StepFinding("overflow-not-counted", said, line, step)
    return None


def _of_write(first: _Difference, inner_line: str, scale: float, step: int) -> StepFinding:
    """The finding on the first change of a gradient that is not in proportion to the loss scale. inner_line: of an
    `autograd.grad` of a scaled loss, "" without one."""
    write = first.write
    is_loss_scaled = _is_near(write.loss, scale * first.plain_loss)
    if write.operation == BACKWARD and inner_line and not is_loss_scaled:
        said = "the loss contains gradients from `autograd.grad`, such as those of a gradient penalty, that are still multiplied by the loss scale: divide them by `scaler.get_scale()` first"
        return StepFinding("inner-gradients-scaled", said, inner_line, step)
    if write.operation == BACKWARD and write.hook:
        said = f"a hook or an own backward pass does not change gradients in proportion to the loss scale, {scale:g}: do it after `scaler.unscale_(optimizer)`"
        return StepFinding("hook-on-scaled-gradients", said, write.hook, step)
    if write.operation == BACKWARD:
        said = "only a part of the loss is multiplied by the loss scale: add up the losses first, then call `scaler.scale(loss).backward()`"
        return StepFinding("loss-not-scaled", said, write.line, step)
    if _is_near(first.plain_factor, 1.0) and _is_near(first.scaled_factor, 1 / scale):
        said = f"`{write.operation}` divides gradients by the loss scale, and `scaler.step` divides them again: use `scaler.unscale_(optimizer)` instead"
        return StepFinding("unscale-twice", said, write.line, step)
    said = f"`{write.operation}` changes gradients that are still multiplied by the loss scale, {scale:g}, and not in proportion to them: call `scaler.unscale_(optimizer)` before it"
    return StepFinding("change-before-unscale", said, write.line, step)


def _first_difference(plain: Trial, scaled: Trial, name: str, scale: float) -> _Difference | None:
    """The first write of a gradient after which the two steps' norms are not in the ratio of the loss scales."""
    in_plain, in_scaled = plain.writes.get(name, []), scaled.writes.get(name, [])
    for i, write in enumerate(in_scaled):
        if i >= len(in_plain) or in_plain[i].line != write.line:
            return _unless_backward(write)
        before = in_plain[i]
        if _have_a_ratio(before, write) and not _is_near(write.norm / before.norm, scale):
            return _Difference(write, _factor(in_plain, i), _factor(in_scaled, i), before.loss)
    for before, write in zip(in_plain, in_scaled, strict=False):  # a change of small entries keeps the norm
        unscaled = [x / scale for x in write.sketch]
        if _have_a_ratio(before, write) and apart([*before.sketch], unscaled) > SAME:
            return _Difference(write, plain_loss=before.loss)
    only_in_plain = in_plain[len(in_scaled) :]
    return _unless_backward(only_in_plain[0]) if only_in_plain else None


def _have_a_ratio(plain: Write, scaled: Write) -> bool:
    """Whether the ratio of two norms means something."""
    return math.isfinite(scaled.norm) and plain.norm != 0


def _unless_backward(write: Write) -> _Difference | None:
    """The difference of a write that only one of two steps has; none for a backward pass, which does not change gradients."""
    return None if write.operation == BACKWARD else _Difference(write)


def _options_differ(plain: Trial, scaled: Trial) -> bool:
    """Whether an optimizer has other options at the other loss scale."""
    for one, other in zip(plain.updates, scaled.updates, strict=False):
        if len(one.options) == len(other.options):
            pairs = zip(one.options, other.options, strict=True)
            if any(not _is_near(y, x) for x, y in pairs if x != y):
                return True
    return False


def _first_move(plain: Trial, scaled: Trial) -> Write | None:
    """The first change of weights by hand that depends on the loss scale."""
    differing = list[Write]()
    for name, writes in scaled.moves.items():
        for one, other in zip(plain.moves.get(name, ()), writes, strict=False):
            if not _is_near(other.norm, one.norm):
                differing.append(other)
                break
    return min(differing, key=lambda each: each.number, default=None)


def _factor(writes: list[Write], i: int) -> float:
    """The factor by which write number `i` multiplies a gradient's norm; NaN for the first write."""
    return writes[i].norm / writes[i - 1].norm if i and writes[i - 1].norm else math.nan


def _first_other_read(plain: Trial, scaled: Trial) -> str:
    """The first line that reads another number at the other loss scale."""
    for (_, one), (line, other) in zip(plain.reads, scaled.reads, strict=False):
        if one != other and not _is_near(other, one):
            return line
    return ""


def _hiding_writes(trial: Trial) -> Iterator[Write]:
    """Writes that replace an infinite gradient by a finite one."""
    for name in trial.broken:
        was_finite = True
        for write in trial.writes[name]:
            is_finite = math.isfinite(write.norm)
            if is_finite and not was_finite and write.norm:
                yield write
            was_finite = is_finite


def _differing(plain: Mapping[str, Any], scaled: Mapping[str, Any]) -> Iterator[str]:
    """Names of parameters whose gradients differ, or that only one of two steps updates."""
    least = NEGLIGIBLE * math.sqrt(sum(_norm(x) ** 2 for x in plain.values()))
    for name in {**plain, **scaled}:
        if (
            name not in plain
            or name not in scaled
            or not _norm(scaled[name] - plain[name]) <= max(SAME * _norm(plain[name]), least)
        ):
            yield name


def _norm(x: Any) -> float:
    return float(entries(torch.as_tensor(x)).double().norm())


def _is_near(x: float, y: float) -> bool:
    return abs(x - y) <= SAME * abs(y)


def _keys(x: torch.Tensor | None) -> list[int]:
    return [] if x is None else [storage._cdata for storage in memory(x)]
