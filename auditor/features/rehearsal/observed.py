"""Observes a training step as its user wrote it: which loss scale each gradient carries, and the calls that do not fit."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler, OptState
from torch.nn.utils import clip_grad
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import Optimizer

from ...capture.source import kind_of, line_of, written_at
from ...emulation.regions import region_now
from ...errors import AuditorError
from ...isolation.tensors import plain_torch
from ...numerics.entries import entries, tensors_in
from .byhand import BY_HAND, is_scaled_by_hand
from .factors import divisors_of, factors_of, given_factor, terms_of
from .inner import LOST, Run, lost_without_scale
from .result import StepFinding
from .trials import EXPLAINED, OF_SCALE, Identities, Identity, are_changed, identity_of, leaves_of

NODES = 4_000
"""Maximum number of nodes of a gradient's graph that are searched for a scaled loss and for FP16."""
SEVERAL = -1
"""In place of a scaler's id: several scalers."""
UNLIMITED = 1e-3
"""A gradient norm's limit, divided by the loss scale, from which the user chose the limit for scaled gradients."""
REFUTABLE = (
    "backward-after-unscale",
    "clip-before-unscale",
    "inner-gradients-scaled",
    "loss-not-scaled",
    "update-with-scaled-gradients",
)
"""Kinds of findings that are wrong in a step whose update depends on no loss scale, by a trial: a loss may contain gradients
of a scaled one, as with cached gradients of representations."""
NO_UPDATE = "`scaler.update()` is missing, so that the loss scale never adapts: call it once in each step, after all `scaler.step()`"


@dataclass
class _Gradient:
    """The state of a parameter's gradient since it was last zero or None.

    state: "plain" (of a loss without a scale), "scaled", "unscaled" by `unscale_`, "used" by an update, or "by hand".
    identity: of the tensor and its version; if another, the user changed the gradient, and nothing is known.
    scaler: id of the scaler. fp16: whether FP16 operations are in the graph. kept: whether it was used before, and not
    set to zero. after_unscale, updated: lines of a `backward` after `unscale_`, and of an `update` before the step.
    factor: by which the user multiplied the loss, if the state is "by hand".
    """

    state: str
    identity: Identity
    line: str
    scaler: int | None = None
    fp16: bool = False
    kept: bool = False
    after_unscale: str = ""
    updated: str = ""
    factor: float = 1.0


@dataclass(frozen=True)
class _Undivided:
    """Gradients that an optimizer's `step` gets with the factor of the loss. text, line: of the finding. identities: of the
    gradients before."""

    text: str
    line: str
    identities: Identities


class Observer:
    """Wraps the functions of torch that a training loop calls, in this process, and collects findings.

    is_active: whether the recipe that runs is the user's own. skipped: the optimizers that a scaler skipped in the
    current step. used_scalers: scalers that the step called, in any recipe. inner_line: of the last `autograd.grad` of a
    scaled loss, with a graph. tried_lines: those of such calls in steps that depend on no loss scale, by a trial;
    independent_steps: these steps. constant_line: of the last `scaler.update(new_scale)`. root_factors: by which the step
    multiplied its last loss, the last factor first. root_terms: (factors, node of its graph) of each term of that loss.
    scales_by_hand, scales_fp16_by_hand: whether a loss was multiplied by a loss scale without a GradScaler, and FP16
    operations led to it.
    """

    def __init__(self, is_active: Callable[[], bool], optimizers: Iterable[Optimizer], outermost: Any) -> None:
        self._is_active, self._optimizers, self._outermost = is_active, tuple(optimizers), outermost
        self.findings = dict[tuple[str, str], StepFinding]()
        self.skipped: set[int] = set()
        self.used_scalers = dict[int, GradScaler]()
        self._gradients = dict[torch.Tensor, _Gradient]()
        self._scaled = dict[Any, GradScaler]()  # by nodes of the step's graphs
        self._values = dict[float, tuple[float, str]]()  # of scaled losses: (scale, line)
        # For each pass since the last update: the numbers that divide the loss (1/x for a factor x), and only divisors.
        self._divided, self._divisors = list[list[float]](), list[list[float]]()
        self._unscaled_at = dict[tuple[int, int], tuple[int, str]]()  # {(scaler, optimizer): (step, line)}
        self._skips = dict[int, dict[int, tuple[str, int, str]]]()  # {scaler: {optimizer: (name, skipped, line)}}
        self._made = dict[int, tuple[int, str]]()  # {scaler made in a step: (step, line)}
        self._step, self._reads_scale, self._inner, self._depth = -1, False, "", 0
        self._stepped_at, self._has_update = "", False
        self._discarded = ""  # line of a `zero_grad` since the last update that discards gradients which no update used
        self._loaded_at = dict[int, int]()  # {scaler: step in which its state was loaded last}
        self._zeroed = dict[torch.Tensor, str]()  # line of `zero_grad` since the last backward pass
        self._scheduled = dict[int, str]()  # {optimizer: line of its schedule's step, before its own}
        self._stepped = set[int]()  # optimizers that were stepped, or skipped
        self.root_scale = 1.0  # of the loss on which the step called `backward` last
        self.inner_line, self.constant_line = "", ""
        self.tried_lines = set[str]()
        self.independent_steps = set[int]()
        self._is_measured = False
        self._undivided = dict[int, _Undivided]()  # by optimizer whose `step` runs, of losses scaled by hand
        self._has_closure = False  # whether the optimizer's `step` that runs has a closure
        self._lost: float | None = None  # part of the gradients of a loss without a scale that underflows, if measured
        self.root_factors: tuple[float, ...] = ()
        self.root_terms: list[tuple[tuple[float, ...], Any]] = []
        self.scales_by_hand, self.scales_fp16_by_hand = False, False
        self._taken = dict[torch.Tensor, tuple[torch.Tensor, _Gradient]]()  # gradients of this step by `autograd.grad`
        self._wrap()

    def begin_step(self, is_measured: bool) -> None:
        """Before each call of the user's step. is_measured: whether inner gradients are measured."""
        self._step += 1
        self._is_measured = is_measured
        self._reads_scale, self._inner = False, ""
        self._scheduled.clear()
        self.skipped.clear()
        self._scaled.clear()
        self._values.clear()
        self._taken.clear()

    def scale(self) -> float | None:
        """The smallest loss scale of the enabled scalers that the step calls; None without one."""
        enabled = [one for one in self.used_scalers.values() if one._enabled]
        return min((float(one._init_scale if one._scale is None else one._scale) for one in enabled), default=None)

    def returned(self, value: float) -> float:
        """The loss that the step returned, or another number, without the loss scale."""
        scale, line = self._values.get(value, (1.0, "")) if math.isfinite(value) and value else (1.0, "")
        if scale != 1:
            self._report(
                "scaled-loss",
                f"the step returns the loss times the loss scale, {scale:g}: return the loss itself",
                line,
            )
        return value / scale

    def rescale(self, factor: float) -> None:
        """Multiply gradients that still carry the loss scale, before a step at another loss scale."""
        with plain_torch():
            for p, one in self._gradients.items():
                if one.state == "scaled" and self._known(p) is not None and p.grad is not None:
                    p.grad.mul_(factor)

    def finish(self, is_complete: bool, tried: Iterable[StepFinding] = ()) -> list[StepFinding]:
        """The findings of the run. is_complete: whether no step raised. tried: findings of trial steps; those on the loss
        scale count only if no other finding explains them."""
        if is_complete and self._stepped_at and not self._has_update:
            self._report("no-update", NO_UPDATE, self._stepped_at)
        for optimizers in self._skips.values():
            name, number, line = max(optimizers.values(), key=lambda one: one[1])
            others = [one[0] for one in optimizers.values() if one[1] <= number / 4]
            if number > max((self._step + 1) / 2, 1) and others:
                said = f"one GradScaler for several optimizers: {number} steps of {name} overflow, and each halves the loss"
                said += f" scale of {' and '.join(others)} too: use one GradScaler for each"
                self._report("shared-scaler", said, line)
        for key, finding in [*self.findings.items()]:
            if finding.kind in REFUTABLE and finding.step in self.independent_steps:
                del self.findings[key]
        is_explained = not EXPLAINED.isdisjoint(kind for kind, _ in self.findings)
        for finding in tried:
            if not is_explained or finding.kind not in OF_SCALE:
                self.findings.setdefault((finding.kind, finding.line), finding)
        return [*self.findings.values()]

    def backward(self, original: Callable[..., Any], roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch.autograd's `backward` or `grad` as it is, and note the scale of the gradients that it adds to."""
        with plain_torch():
            scaler, is_fp16, factors = self._origin(roots)
            divisors = divisors_of(roots, self._scaled)
            factors = [*given_factor(gradients), *factors]
            terms = self._terms(roots, gradients)
            line = self.line()
        if scaler is None and kwargs["accumulate_grad"]:
            self.root_factors = tuple(1 / x for x in factors)
            self.root_terms = terms
            is_scale = is_scaled_by_hand(math.prod(self.root_factors), is_fp16)
            is_part = any(is_scaled_by_hand(math.prod(each), is_fp16) for each, _ in self.root_terms)
            self.scales_by_hand = self.scales_by_hand or is_scale or is_part
            self.scales_fp16_by_hand = self.scales_fp16_by_hand or (is_scale and is_fp16)
        self.root_scale = self._scale_of(scaler)
        if not kwargs["accumulate_grad"]:
            keeps_graph, creates_graph, inputs, *others = args
            is_inner = creates_graph or not self._are_trained(inputs)
            if scaler is None and is_fp16 and is_inner and self._is_measured:
                run = functools.partial(_gradients, original, roots, inputs, others, kwargs)
                self._measure_inner(run, gradients, line)
            if scaler is not None and creates_graph:
                self._inner = self.inner_line = line
            result = original(roots, gradients, keeps_graph, creates_graph, inputs, *others, **kwargs)
            if not creates_graph:
                self._note_taken(inputs, result, self._made_gradient(scaler, is_fp16, factors, line))
            return result
        region = region_now()
        if region.enabled and region.dtype in ("float16", "bfloat16"):
            said = "`backward` runs inside the autocast region, which also casts operations of the backward pass: leave the region first"
            self._report("backward-in-autocast", said, line)
        if self._inner and not self._reads_scale and self._inner not in self.tried_lines:
            said = "gradients from `autograd.grad`, such as those of a gradient penalty, are still multiplied by the loss scale: divide them by `scaler.get_scale()` first"
            self._report("inner-gradients-scaled", said, self._inner)
        self._inner = ""
        parameters = [p for one in self._optimizers for p in _parameters(one)]
        with plain_torch():
            nonzero = {p for p in parameters if p.grad is not None and bool(entries(p.grad).any())}
        kept = {p: known for p in nonzero if (known := self._known(p))}
        identities = {p: identity_of(p) for p in parameters if p.grad is not None}
        if self._is_measured and scaler is None and is_fp16 and math.prod(self.root_factors) < BY_HAND:
            self._measure_lost(original, roots, gradients)
        result = original(roots, gradients, *args, **kwargs)
        self._divided.append([x for x in factors if x > 1])
        self._divisors.append([*given_factor(gradients), *divisors])
        of_loss = self._made_gradient(scaler, is_fp16, factors, line)
        for p in parameters:
            identity = identity_of(p)
            if p.grad is None or identity == identities.get(p):
                continue
            self._zeroed.pop(p, None)
            is_fp32 = p.grad.dtype is torch.float32
            made = replace(of_loss, identity=identity, fp16=is_fp16 and is_fp32)
            if p in nonzero and p not in kept:  # the user changed it
                self._gradients.pop(p, None)
                continue
            if p in kept:
                before = kept[p]
                made.kept = before.kept or before.state == "used"
                made.after_unscale = line if before.state == "unscaled" else before.after_unscale
                is_same = before.state == "scaled" and before.scaler == made.scaler
                made.updated = before.updated if is_same else ""
                if before.state == made.state == "scaled" and before.scaler != made.scaler:
                    made.scaler = SEVERAL
                elif before.state == "plain" and made.state == "scaled":  # the earlier loss lacks its scale
                    made.state, made.line = before.state, before.line
            self._gradients[p] = made
        return result

    def _made_gradient(self, scaler: GradScaler | None, is_fp16: bool, factors: list[float], line: str) -> _Gradient:
        """The state of gradients of a loss."""
        factor = 1 / math.prod(factors)
        state = "plain"
        if scaler:
            state = "scaled"
        elif factor >= BY_HAND:
            state = "by hand"
        number = id(scaler) if scaler else None
        return _Gradient(state, (0, 0), line, number, is_fp16, factor=factor)

    def _note_taken(self, inputs: Any, gradients: Any, made: _Gradient) -> None:
        """Note gradients of trained parameters that `autograd.grad` returns, since the step may assign them to `p.grad`."""
        own = {id(p) for one in self._optimizers for p in _parameters(one)}
        for p, gradient in zip(inputs, gradients, strict=True):
            if id(p) in own and gradient is not None:
                identity = id(gradient), gradient._version
                is_fp32 = gradient.dtype is torch.float32
                self._taken[p] = gradient, replace(made, identity=identity, fp16=made.fp16 and is_fp32)

    def after_closure(self, optimizer: Optimizer) -> None:
        """After an optimizer's `step` that called a closure, perhaps several times: it used all gradients of these."""
        self._set_state(optimizer, "used")
        self._forget_passes()
        self._discarded = ""
        self._has_closure = False

    def before_update(self, optimizer: Optimizer, is_inner: bool = False, has_closure: bool = False) -> None:
        """At the beginning of an optimizer's `step`, also if a scaler calls it. is_inner: whether another optimizer's `step`
        calls it, as a wrapper of optimizers does. has_closure: whether it computes gradients by a closure."""
        self._has_closure = self._has_closure or has_closure  # until this optimizer's `step` ends
        states = {known.state: known for p in _parameters(optimizer) if (known := self._known(p))}
        name = type(optimizer).__name__
        direct = not self._depth
        if direct:
            self._check_order(optimizer)
        if direct and (known := states.get("scaled")):
            said = f"{name}.step() uses gradients that are still multiplied by the loss scale: call `scaler.step(optimizer)`"
            self._report("update-with-scaled-gradients", said)
        elif "used" in states and direct and not is_inner:
            self._report(
                "updated-twice",
                f"{name} updates the weights twice with the same gradients: call `step` once after each backward pass",
            )
        elif direct and (known := states.get("by hand")) and known.fp16:
            said = f"the loss is multiplied by {known.factor:g}, and {name}.step() uses its gradients as they are: divide them by it before, or use a GradScaler"
            identities = {p: identity_of(p) for p in _parameters(optimizer)}
            self._undivided[id(optimizer)] = _Undivided(said, self.line(), identities)
        elif direct and (known := states.get("plain")) and known.fp16:
            self._report_no_scaler(known.line)
        passes = len(self._divided)
        if passes > 1 and all(divisors.count(float(passes)) > 1 for divisors in self._divisors):
            said = f"the loss is divided twice by {passes}, the number of backward passes of an update: divide it once"
            line = next((known.line for known in states.values()), "")
            self._report("loss-divided-twice", said, line)
        elif passes > 1 and self._discarded and all(float(passes) in divisors for divisors in self._divided):
            said = f"`zero_grad` runs between the {passes} backward passes of an update, so that only the last counts, although the loss is divided by {passes}: call it once for each update"
            self._report("gradients-zeroed", said, self._discarded)
        self._forget_passes()
        self._discarded = ""
        self._set_state(optimizer, "used")

    def after_update(self, optimizer: Optimizer) -> None:
        """After an optimizer's `step`: report the factor of a loss in its gradients, unless it has divided them itself, as a
        wrapper of an optimizer may do."""
        one = self._undivided.pop(id(optimizer), None)
        if one is not None and not are_changed(one.identities):
            self._report("update-with-scaled-gradients", one.text, one.line)

    def _forget_passes(self) -> None:
        self._divided.clear()
        self._divisors.clear()

    def _report_no_scaler(self, line: str) -> None:
        """Report FP16 gradients of a loss without a scale, with the part of them that underflows."""
        advice = "train in BF16, since a GradScaler supports no closure" if self._has_closure else "use a GradScaler"
        lost = self._lost
        if lost is None:
            said = "FP16 gradients of a loss without a scale underflow if they are small"
        elif lost > LOST:
            said = f"FP16 gradients of a loss without a scale underflow: {lost:.0%} of their norm is lost"
        else:
            said = f"FP16 gradients of a loss without a scale underflow once they are small, though not yet: up to {lost:.2g} of their norm is lost"
        key = "no-scaler", line
        self._report("no-scaler", f"{said}: {advice}", line)
        if key in self.findings:
            self.findings[key] = replace(self.findings[key], text=f"{said}: {advice}")

    def _measure_lost(self, original: Callable[..., Any], roots: Any, gradients: Any) -> None:
        """Measure which part of the weights' gradients is lost without a loss scale, in the worst of the measured steps."""
        trained = {id(p) for one in self._optimizers for p in _parameters(one)}
        leaves = tuple(x for x in leaves_of(roots) if id(x) in trained)
        if not leaves or (self._lost is not None and self._lost > LOST):
            return
        how = {"allow_unreachable": True, "accumulate_grad": False}
        run = functools.partial(_gradients, original, roots, leaves, (), how)
        with suppress(AuditorError):
            self._lost = max(self._lost or 0.0, lost_without_scale(run, gradients))

    def _check_order(self, optimizer: Optimizer) -> None:
        """Before an update: whether gradients were zeroed after the backward pass, or a schedule was stepped too early."""
        self._stepped.add(id(optimizer))
        name = type(optimizer).__name__
        if line := self._scheduled.pop(id(optimizer), ""):
            said = f"the schedule's `step()` runs before the step of {name}, and skips the first learning rate: call it after"
            self._report("schedule-before-step", said, line)
        parameters = [p for p in _parameters(optimizer) if p.requires_grad]
        zeroed = next((self._zeroed[p] for p in parameters if p in self._zeroed), "")
        with plain_torch():
            is_zero = all(p.grad is None or not bool(entries(p.grad).any()) for p in parameters)
        if zeroed and is_zero:
            said = f"`zero_grad` runs between `backward` and the step of {name}, which gets no gradients: call it before `backward`"
            self._report("gradients-zeroed", said, zeroed)

    def _measure_inner(self, run: Run, gradients: Any, line: str) -> None:
        """Report gradients from `autograd.grad` of a loss without a scale if they underflow."""
        if ("inner-gradients-not-scaled", line) in self.findings:
            return
        with suppress(AuditorError):
            if lost_without_scale(run, gradients) > LOST:
                said = "gradients from `autograd.grad` of FP16 operations are computed without a loss scale, and underflow to zero: "
                said += "pass `scaler.scale(outputs)` to `autograd.grad`, and divide its result by `scaler.get_scale()`; or compute them in FP32"
                self._report("inner-gradients-not-scaled", said, line)

    def _are_trained(self, inputs: Any) -> bool:
        """Whether an optimizer has the inputs of `autograd.grad`, whose gradients the step then assigns to them."""
        own = {id(p) for one in self._optimizers for p in _parameters(one)}
        return all(id(x) in own for x in inputs)

    def _origin(self, roots: Any) -> tuple[GradScaler | None, bool, list[float]]:
        """The scaler of a loss; whether FP16 operations led to it; the numbers that divide it last (1/x for a factor x)."""
        nodes = [x.grad_fn for x in tensors_in(roots) if x.grad_fn is not None]
        factors = factors_of(nodes[0], self._scaled) if len(nodes) == 1 else []
        seen, scaler, is_fp16 = {*nodes}, None, False
        for node in nodes:  # grows
            scaler = scaler or self._scaled.get(node)
            is_fp16 = is_fp16 or any(x.dtype is torch.float16 for x in getattr(node, "_input_metadata", ()))
            if (scaler and is_fp16) or len(nodes) > NODES:
                break
            fresh = [one for one, _ in node.next_functions if one is not None and one not in seen]
            seen.update(fresh)
            nodes += dict.fromkeys(fresh)
        return scaler, is_fp16, factors

    def _terms(self, roots: Any, gradients: Any) -> list[tuple[tuple[float, ...], Any]]:
        """(factors, node of its graph) of each term of one loss."""
        nodes = [x.grad_fn for x in tensors_in(roots) if x.grad_fn is not None]
        if len(nodes) != 1:
            return []
        given = given_factor(gradients)
        terms = terms_of(nodes[0], self._scaled, reads_means=True)
        return [(tuple(1 / x for x in (*given, *divided_by)), node) for divided_by, node in terms]

    def _scale_of(self, scaler: GradScaler | None) -> float:
        return 1.0 if scaler is None or scaler._scale is None else float(scaler._scale)

    def _known(self, p: torch.Tensor) -> _Gradient | None:
        if p.grad is None:
            return None
        gradient, taken = self._taken.get(p, (None, None))
        if p.grad is gradient and taken is not None:
            self._gradients[p] = taken
            del self._taken[p]
        known = self._gradients.get(p)
        return known if known is not None and known.identity == identity_of(p) else None

    def _set_state(self, optimizer: Optimizer, state: str) -> None:
        for p in _parameters(optimizer):
            if p in self._gradients and p.grad is not None:
                self._gradients[p].state, self._gradients[p].identity = state, identity_of(p)

    def line(self) -> str:
        """The user's line that runs; "" without one."""
        written = written_at(self._outermost)
        if written is None:
            return ""
        is_library = kind_of(written.place.file) == "library"
        return line_of(written.caller if is_library and written.caller is not None else written.place)

    def _report(self, kind: str, text: str, line: str | None = None) -> None:
        if self._is_active():
            line = self.line() if line is None else line
            self.findings.setdefault((kind, line), StepFinding(kind, text, line, max(self._step, 0)))

    def _report_no_update(self, line: str) -> None:
        """Report an optimizer that was stepped, or whose gradients were unscaled, without `update()` afterwards."""
        if all(kind != "update-before-step" for kind, _ in self.findings):
            self._report("no-update", NO_UPDATE, line)

    # The functions of torch.

    def _wrap(self) -> None:
        for name in ("scale", "unscale_", "step", "update", "get_scale", "load_state_dict"):
            self._wrap_method(name, getattr(self, f"_on_{name.strip('_')}"))

        def new(kind: type[GradScaler], *args: Any, **kwargs: Any) -> GradScaler:
            scaler = object.__new__(kind)
            self._made[id(scaler)] = self._step, self.line()
            return scaler

        GradScaler.__new__ = staticmethod(new)  # type: ignore[method-assign, assignment]
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            _wrap_function(name, self._on_clip)
        for holder in (Optimizer, nn.Module):
            self._wrap_zero_grad(holder)
        for kind in _subclasses(LRScheduler):
            if "step" in vars(kind):
                self._wrap_schedule(kind)

    def _wrap_zero_grad(self, holder: Any) -> None:
        original = holder.zero_grad

        @functools.wraps(original)
        def run(one: Any, *args: Any, **kwargs: Any) -> Any:
            parameters = _parameters(one) if isinstance(one, Optimizer) else one.parameters()
            waiting = [p for p in parameters if self._is_active() and self._is_waiting(p)]
            if waiting:
                line = self.line()
                self._zeroed.update(dict.fromkeys(waiting, line))
                self._discarded = self._discarded or line
            return original(one, *args, **kwargs)

        holder.zero_grad = run

    def _wrap_schedule(self, kind: Any) -> None:
        original = vars(kind)["step"]

        @functools.wraps(original)
        def run(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            optimizer = getattr(schedule, "optimizer", None)
            is_initial = sys._getframe(1).f_code.co_name == "_initial_step"
            if self._is_active() and isinstance(optimizer, Optimizer) and not is_initial:
                is_early = id(optimizer) not in self._stepped or any(map(self._is_waiting, _parameters(optimizer)))
                if is_early:
                    self._scheduled.setdefault(id(optimizer), self.line())
                self._check_metric(schedule, *args, **kwargs)
            return original(schedule, *args, **kwargs)

        kind.step = run

    def _check_metric(self, schedule: Any, metrics: Any = None, *others: Any, **named: Any) -> None:
        """Report a schedule that compares scaled losses with each other, although the loss scale changes between them."""
        if not isinstance(schedule, ReduceLROnPlateau) or metrics is None:
            return
        with plain_torch():
            value = float(metrics)
        scale, _ = self._values.get(value, (1.0, ""))
        if scale != 1:
            said = f"the schedule compares losses that are multiplied by the loss scale, {scale:g}, which changes: give it the loss itself"
            self._report("decided-by-scaled-value", said)

    def _is_waiting(self, p: torch.Tensor) -> bool:
        """Whether no update has used the gradient yet."""
        known = self._known(p)
        return known is not None and known.state != "used"

    def _wrap_method(self, name: str, around: Callable[..., Any]) -> None:
        original = vars(GradScaler)[name]

        @functools.wraps(original)
        def run(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            call = functools.partial(original, scaler)
            if name not in ("get_scale", "load_state_dict"):
                self.used_scalers[id(scaler)] = scaler
            if not scaler._enabled or not self._is_active():
                return call(*args, **kwargs)
            return around(call, scaler, *args, **kwargs)

        setattr(GradScaler, name, run)

    def _on_get_scale(self, call: Callable[[], float], scaler: GradScaler) -> float:
        self._reads_scale = True
        return call()

    def _on_load_state_dict(self, call: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        before = self._loaded_at.get(id(scaler))
        if before is not None and before < self._step:
            said = "each step loads the state of the GradScaler, whose loss scale then never adapts: load it once, before the loop"
            self._report("scaler-recreated", said)
        self._loaded_at[id(scaler)] = self._step
        return call(*args, **kwargs)

    def _on_scale(self, call: Callable[..., Any], scaler: GradScaler, outputs: Any) -> Any:
        line = self.line()
        step, made = self._made.get(id(scaler), (-1, ""))
        if 0 < step == self._step and len({one for one, _ in self._made.values() if one >= 0}) > 1:
            said = (
                "each step creates its own GradScaler, whose loss scale never adapts: create it once, before the loop"
            )
            self._report("scaler-recreated", said, made)
        result = call(outputs)
        scale = self._scale_of(scaler)
        for x in tensors_in(result):
            if x.grad_fn is not None:
                self._scaled[x.grad_fn] = scaler
            if x.numel() == 1:
                with plain_torch():
                    self._values[float(x.detach())] = scale, line
        return result

    def _on_unscale(self, call: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer) -> Any:
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        step, line = self._unscaled_at.get((id(scaler), id(optimizer)), (self._step, ""))
        if stage is not OptState.READY and step < self._step:
            self._report_no_update(line)
        elif stage is OptState.UNSCALED:
            said = f"`unscale_` runs twice for {type(optimizer).__name__} in one step, first in {line}: call it once"
            self._report("unscale-twice", said)
        elif stage is OptState.STEPPED:
            self._report("unscale-after-step", "`unscale_` runs after `scaler.step()`: call it before")
        else:
            self._check_unscale(scaler, optimizer)
        self._unscaled_at[id(scaler), id(optimizer)] = self._step, self.line()
        result = call(optimizer)
        self._set_state(optimizer, "unscaled")
        return result

    def _check_unscale(self, scaler: GradScaler, optimizer: Optimizer) -> None:
        name, known = type(optimizer).__name__, [x for p in _parameters(optimizer) if (x := self._known(p))]
        half = sum(p.grad is not None and p.grad.dtype is torch.float16 for p in _parameters(optimizer))
        if half:
            said = f"{half} of the parameters of {name} are stored in FP16, whose gradients a GradScaler refuses:"
            self._report("fp16-parameters", f"{said} keep trained parameters in FP32, and use autocast")
        for one in known:
            if one.after_unscale:
                said = f"`backward` adds scaled gradients to gradients of {name} that are unscaled already: call `unscale_` after the last `backward`"
                self._report("backward-after-unscale", said, one.after_unscale)
            elif one.updated:
                said = f"`update()` runs between `backward` and `scaler.step()` of {name}, whose gradients still carry the old loss scale: call it once, after all `scaler.step()`"
                self._report("update-before-step", said, one.updated)
            elif one.state == "plain":
                said = f"the loss is not multiplied by the loss scale, but gradients of {name} are divided by it: call `scaler.scale(loss).backward()`"
                self._report("loss-not-scaled", said, one.line)
            elif one.state == "unscaled":
                self._report(
                    "unscale-twice",
                    f"gradients of {name} are divided by the loss scale twice: call `unscale_` once before each `scaler.step()`",
                )
            elif one.state == "used":
                self._report(
                    "updated-twice",
                    f"{name} updates the weights twice with the same gradients: call `step` once after each backward pass",
                )
            elif one.state == "scaled" and one.scaler != id(scaler):
                if one.scaler == SEVERAL:
                    said = f"gradients of {name} are sums of those of losses that several GradScalers scaled: call `zero_grad` between their backward passes, or use one GradScaler"
                else:
                    said = f"another GradScaler scaled the loss of {name}: use the same for `scale` and `step`"
                self._report("other-scaler", said)
            elif one.kept:
                said = f"gradients of {name} are added to gradients of the last update: call `zero_grad` once for each update"
                self._report("gradients-kept", said, one.line)

    def _on_step(self, call: Callable[..., Any], scaler: GradScaler, optimizer: Optimizer, *a: Any, **k: Any) -> Any:
        stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
        line = self.line()
        self._check_order(optimizer)
        if stage is OptState.STEPPED:
            self._report_no_update(line)
        self._stepped_at = self._stepped_at or line
        supports = getattr(optimizer, "_step_supports_amp_scaling", False)
        if stage is OptState.READY and (supports or scaler._scale is None):  # else `unscale_` checks
            self._check_unscale(scaler, optimizer)
        self._unscaled_at[id(scaler), id(optimizer)] = self._step, line
        self._depth += 1
        try:
            result = call(optimizer, *a, **k)
        finally:
            self._depth -= 1
        self._set_state(optimizer, "used")
        founds = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        is_skipped = any(float(x) for x in founds)
        name = type(optimizer).__name__
        same = sum(type(one) is type(optimizer) for one in self._optimizers) > 1
        if same:
            name = f"{name} ({line})"
        _, number, first = self._skips.setdefault(id(scaler), {}).get(id(optimizer), (name, 0, line))
        self._skips[id(scaler)][id(optimizer)] = name, number + is_skipped, first
        if is_skipped:
            self.skipped.add(id(optimizer))
            self._forget_passes()
        return result

    def _on_update(self, call: Callable[..., Any], scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
        self._has_update, line = True, self.line()
        if any(x is not None for x in (*args, *kwargs.values())):
            self.constant_line = line
        for p in self._gradients:
            known = self._known(p)
            if known is not None and known.state in ("scaled", "unscaled") and known.scaler == id(scaler):
                known.updated = line
        return call(*args, **kwargs)

    def _on_clip(self, call: Callable[..., Any], name: str, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._is_active():
            return call(parameters, *args, **kwargs)
        listed = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
        known = {p: one for p in listed if (one := self._known(p))}
        limit = float(args[0] if args else kwargs.get("max_norm", kwargs.get("clip_value", math.inf)))
        scaled = next((one for one in known.values() if one.state == "scaled"), None)
        is_clipped = math.isfinite(limit) and not _size(name, known) <= limit  # NaN is not within a limit either
        if scaled is not None and is_clipped:
            scale = self._scale_of(self.used_scalers.get(scaled.scaler or 0))
            if not (self._reads_scale and limit >= UNLIMITED * scale):
                said = f"`{name}` clips gradients that are still multiplied by the loss scale, {scale:g}, so that their limit is {limit / scale:.2g} instead of {limit:g}: call `scaler.unscale_(optimizer)` before the clipping"
                self._report("clip-before-unscale", said)
        elif any(one.state == "used" for one in known.values()) and math.isfinite(limit):
            self._report(
                "clip-after-step",
                f"`{name}` runs after the update, which used gradients without a limit: clip before `step`",
            )
        result = call(listed, *args, **kwargs)
        for p, one in known.items():
            one.identity = identity_of(p)
        return result


def _subclasses(kind: type[Any]) -> Iterator[type[Any]]:
    yield kind
    for subclass in kind.__subclasses__():
        yield from _subclasses(subclass)


def _parameters(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    return (p for group in optimizer.param_groups for p in group["params"])


def _size(name: str, parameters: Iterable[torch.Tensor]) -> float:
    """What a function that clips gradients limits: their norm, or the largest of their absolute values."""
    with plain_torch():
        gradients = [entries(p.grad).double() for p in parameters if p.grad is not None and p.grad.numel()]
        if name == "clip_grad_value_":
            return max((float(x.abs().max()) for x in gradients), default=0.0)
        return math.hypot(*(float(x.norm()) for x in gradients))


def _gradients(
    original: Callable[..., Any], roots: Any, inputs: Any, others: Any, kwargs: Any, gradients: Any
) -> Sequence[torch.Tensor | None]:
    """The gradients of the inputs, by torch.autograd's `grad`, which keeps the graph."""
    result: Sequence[torch.Tensor | None] = original(roots, gradients, True, False, inputs, *others, **kwargs)
    return result


def _wrap_function(name: str, around: Callable[..., Any]) -> None:
    """Wrap a function of torch.nn.utils for all who import it: torch's decorator keeps the function in a cell."""
    function = getattr(clip_grad, name)
    for cell in function.__closure__ or ():
        if callable(cell.cell_contents):
            cell.cell_contents = functools.partial(around, cell.cell_contents, name)
