"""Runs the user's step under one recipe, in a process whose torch it patches: each call of a module, `backward` and update
passes through here."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ...artefact.applying import apply_plan
from ...emulation.emulate import Emulation, emulate, scaled_as_on_cuda
from ...emulation.intercept import Handler, intercept
from ...emulation.regions import clear_weight_casts, written_as_meant
from ...isolation.process import disable_compilers, ieee, swap_attribute
from ...isolation.tensors import plain_torch
from ...numerics.casting import widen
from ...numerics.entries import all_finite, dense, entries, over_tensors, tensors_in
from ...numerics.formats import dtype_of
from ...training.blame import NO_PASS
from ...training.step import LOSS
from .batches import call_step
from .closures import Closure, RegionAround, has_closure, wrap_closures
from .forked import bad_step, call_forked
from .measuring import Update
from .observed import Observer
from .owncasts import OwnCasts
from .ranks import mean_gradient, shard
from .result import AS_WRITTEN, FP32, REMEDIES, ParameterSeries, Recipe, RecipeRun
from .storage import Storage
from .trials import Trace


@dataclass
class _Ranks:
    """Gradients of one step, by the number of the backward pass: of this process, and of each other rank."""

    own: list[dict[str, Any]] = field(default_factory=list)
    others: list[list[dict[str, Any]]] = field(default_factory=list)


class StepRunner:
    """The user's step, and what torch does in it.

    optimizers: {id: optimizer}. trained: {parameter: number of its group}. root: the module with these parameters, or a
    container. scalers: the user's GradScalers. own_regions: whether the step opens autocast regions. low_regions: the
    low-precision dtypes of these. recipe: the one under which this process runs now; result: of the run's recipe.
    calls_closures_once: whether an optimizer's first call of its closure is enough, as for a step whose gradients fail.
    """

    calls_closures_once = False

    def __init__(self, step: Callable[..., Any], optimizers: dict[int, Optimizer]) -> None:
        self._step, self.optimizers = step, optimizers
        self.trained = dict[Any, int]()
        self.root, self._storage = nn.Module(), Storage((), ())
        self.scalers = list[GradScaler]()
        self.own_regions, self.low_regions = False, set[torch.dtype]()
        self.recipe, self.result = FP32, RecipeRun(FP32)
        self._parameters = dict[torch.Tensor, str]()  # names of the trained parameters
        self._owners = dict[str, str]()  # {name of a parameter: path of the module that computes with it}
        self._calls: list[nn.Module] = []  # the modules that are being called, innermost last
        self._ranks = _Ranks()
        self._trace: Trace | None = None  # of a trial step
        self._loss_factor = 1.0  # of a trial step, on each loss
        # Gradients, with their versions, after the last `step` with a closure.
        self._seen = dict[torch.Tensor, tuple[torch.Tensor, int]]()
        self._casts: OwnCasts | None = None  # of the last step, if the user's step casts to FP16 or BF16 itself

        # Of one step:
        self._broken_inside = False  # whether gradients of a closure inside `step` were not finite
        self._broken: str | None = None  # in a non-finite step: the operation to blame, "" if unknown
        self._has_loss, self._losses = False, list[float]()
        self._loss_tensors: list[torch.Tensor] = []  # those returned, and those on which it called `backward`
        self._batch: Any = None
        self._used = set[int]()  # ids of the called optimizers and modules
        self._sampled = False  # whether the step is measured
        self._updates = dict[torch.Tensor, Update]()

    def _prepare(self, recipe: Recipe) -> None:
        """Convert the model and the optimizers as the recipe requires, and replace functions of torch."""
        series = {
            name: ParameterSeries(p.numel(), self.trained[p], self._owners.get(name, ""))
            for p, name in self._parameters.items()
        }
        self.result = RecipeRun(recipe, parameters=series)
        self._convert(recipe)
        for name, optimizer in product(recipe.remedies, self.optimizers.values()):
            REMEDIES[name][1](optimizer)
        # {depth: the `_update` around a `step()`}, since a `step()` may call another one
        running = self._running = dict[int, Generator[Any]]()
        register_optimizer_step_pre_hook(lambda *call: next(running.setdefault(len(running), self._update(*call))))
        register_optimizer_step_post_hook(lambda *call: next(running.popitem()[1], None))
        called = nn.Module.__call__
        nn.Module.__call__ = lambda module, *a, **k: self._call(called, module, *a, **k)  # type: ignore[method-assign]
        engine: Any = torch.autograd  # its `backward` and `grad` both call this function
        engine._engine_run_backward = partial(self._run_backward, engine._engine_run_backward)
        is_active = self._keeps_scalers
        # Unless the step runs as written, the user's scalers are disabled, since this session scales.
        enabled = property(
            lambda one: is_active() and vars(one)["_enabled"], lambda one, x: vars(one).update(_enabled=x)
        )
        if recipe.name == AS_WRITTEN:
            for scaler in filter(self._is_switched_off, self.scalers):
                with scaled_as_on_cuda():
                    GradScaler.__init__(scaler, "cuda")
        GradScaler._enabled = enabled  # type: ignore[assignment]
        self._observer = Observer(is_active, self.optimizers.values(), StepRunner._call_step.__code__)
        self._observer.used_scalers.update((id(one), one) for one in self.scalers)

    def _convert(self, recipe: Recipe) -> None:
        """Switch this process to a recipe.

        Weights, buffers and optimizer state are converted now, inputs of the outermost modules in each later step. The
        recipe's scopes replace those of the recipe before.
        """
        if recipe.name != AS_WRITTEN:
            before = {number: [p.dtype for p in parameters_of(one)] for number, one in self.optimizers.items()}
            self._storage.convert(recipe)
            for number, optimizer in self.optimizers.items():
                if before[number] != [p.dtype for p in parameters_of(optimizer)]:
                    # `load_state_dict` casts the state to the weights' dtypes. It also replaces the list
                    # `param_groups`, which is put back afterwards, since the step may refer to it.
                    with swap_attribute(optimizer, "param_groups", optimizer.param_groups):
                        optimizer.load_state_dict(optimizer.state_dict())
        if recipe.scopes or self.recipe.scopes:
            # Each module in a container, which is itself not called, gets the scope of the root.
            parts = self.root if isinstance(self.root, nn.ModuleDict) else ()
            scopes = {**dict.fromkeys(("", *parts), recipe.scopes.get("", {"precision": "fp32"})), **recipe.scopes}
            scopes.pop(LOSS, None)
            apply_plan(self.root, {"strategy": "autocast", "format": recipe.format, "scopes": scopes})
        self.recipe, self.result.scale = recipe, recipe.scale

    def _keeps_scalers(self) -> bool:
        return self.recipe.keeps_scalers

    def _is_switched_off(self, scaler: GradScaler) -> bool:
        """Whether torch disabled a GradScaler for CUDA, since there is no GPU, while the step trains in FP16."""
        disabled = not scaler._enabled and scaler._device == "cuda" and "_init_scale" not in vars(scaler)
        return disabled and torch.float16 in self.low_regions

    def _call_step(self, batch: Any, handler: Emulation | None = None) -> float:
        """Run the user's step on a batch, or on each rank's rows of the batch; returns the mean of the ranks' losses.

        The other ranks run in forked processes; their gradients are then added to this process's in `_run_backward`.
        """
        count = self.result.recipe.ranks
        if count == 1:
            return self._call_rank(batch, handler)
        others = [call_forked(partial(self._run_rank, shard(batch, rank, count))) for rank in range(1, count)]
        self._ranks = _Ranks(others=[gradients for _, gradients in others])
        loss = self._call_rank(shard(batch, 0, count), handler)
        return (loss + sum(loss for loss, _ in others)) / count

    def _run_rank(self, batch: Any, tell: object) -> tuple[float, list[dict[str, Any]]]:
        """The loss of another rank, and its gradients after each backward pass, as NumPy arrays."""
        self._ranks = _Ranks()
        return self._call_rank(batch), self._ranks.own

    def _reduce(self, before: dict[str, Any]) -> None:
        """Replace the gradients of a backward pass by their mean over all ranks; another rank records them instead.
        before: {parameter: its gradient before the pass}."""
        recipe = self.result.recipe
        parameters = dict[str, torch.Tensor]()
        own = dict[str, torch.Tensor]()  # what this pass has added to the gradients
        for p, name in self._parameters.items():
            if p.grad is not None:
                parameters[name] = p
                own[name] = dense(p.grad.detach()) - before.get(name, 0.0)
        number = len(self._ranks.own)  # of this pass in the step
        self._ranks.own.append({name: gradient.numpy() for name, gradient in own.items()})
        others = [gradients[number] for gradients in self._ranks.others if number < len(gradients)]
        if not others:
            return
        formats = ("fp32", "fp32") if self.recipe == FP32 else (recipe.format, recipe.summed)
        for name, gradient in own.items():
            every = [gradient, *(torch.as_tensor(each[name]) for each in others if name in each)]
            parameters[name].grad = before.get(name, 0.0) + mean_gradient(every, *formats)

    def _call_rank(self, batch: Any, handler: Handler | None = None) -> float:
        """Call the user's step with a batch (as one argument, several, or none, as its signature requires), in FP32 or in
        emulated CUDA; the step's autocast regions get the recipe's dtype. Returns the step's loss; if it returns none,
        the sum of the losses on which it called `backward`."""
        recipe = self.recipe
        dtype = dtype_of(recipe.format)
        self._losses = list[float]()  # of each `backward`
        self._loss_tensors = []
        self._used = set[int]()  # ids of the called optimizers and modules
        self._broken = None
        self._broken_inside = False
        as_written = recipe.name == AS_WRITTEN
        regional = recipe.format != "fp32" and not recipe.stored and LOSS not in recipe.scopes and not as_written
        emulated = emulate("cuda") if recipe.format != "fp32" or as_written else written_as_meant()
        handler = self._with_own_casts(handler)
        batch = self._batch = self._storage.cast_batch(batch, recipe)
        with ieee(), disable_compilers(), scaled_as_on_cuda(), emulated if handler is None else intercept(handler):
            enter = vars(torch.autocast)["__enter__"]

            def enter_region(region: Any) -> Any:
                is_own = not self._calls or (len(self._calls) == 1 and not recipe.scopes and not _in_autocast())
                is_own = is_own and not isinstance(region, RegionAround)
                is_meant = getattr(region, "_meant", region._enabled)
                if is_own and is_meant and torch._C._current_graph_task_id() == NO_PASS:
                    self.own_regions = True
                    if region.fast_dtype in (torch.float16, torch.bfloat16):
                        self.low_regions.add(region.fast_dtype)
                    if not as_written:
                        region._enabled = regional
                        region._meant = regional
                        region.fast_dtype = dtype
                return enter(region)

            around = torch.autocast("cuda", dtype=dtype) if regional and not self.own_regions else nullcontext()
            with around, swap_attribute(torch.autocast, "__enter__", enter_region):
                value = call_step(self._step, batch)
                self._loss_tensors = [x for x in (*tensors_in(value), *self._loss_tensors) if x.is_floating_point()]
                while self._running:  # an optimizer's `step()` raised, and the user's step caught the exception
                    self._running.popitem()[1].close()
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
            value = float(value.detach())
        if as_written and not isinstance(value, float):
            for x in pytree.tree_leaves(value):
                if isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point():
                    x = float(x.detach())
                if isinstance(x, float):
                    self._observer.returned(x)
        self._has_loss = isinstance(value, float) or bool(self._losses)
        if isinstance(value, float):
            return self._observer.returned(value) if as_written else value
        return sum(self._losses) if self._losses else math.nan

    def _with_own_casts(self, handler: Handler | None) -> Handler | None:
        """A handler of operations that gives the recipe's dtype to the casts of the step itself, if it has any."""
        recipe = self.recipe
        if self._casts is None or recipe.name == AS_WRITTEN:
            return handler
        if handler is None:
            handler = Handler() if recipe.format == "fp32" else Emulation()
        dtype = torch.float32 if recipe.scopes else dtype_of(recipe.format)
        self._casts = OwnCasts(handler, dtype)
        return self._casts

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        outermost = not self._calls
        self._used.add(id(module))
        args, kwargs = self._storage.cast_inputs(module, (args, kwargs), self.recipe, outermost)
        self._calls.append(module)
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._calls.pop()
        return widen(result) if outermost and LOSS in self.recipe.scopes else result

    def _run_backward(self, original: Callable[..., Any], roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch.autograd's `backward` or `grad` at the loss scale, outside autocast. gradients: of the roots.

        Inside a pass (activation checkpoints, custom Functions), the original is called unchanged.
        """
        if torch._C._current_graph_task_id() != NO_PASS:
            return original(roots, gradients, *args, **kwargs)
        if kwargs["accumulate_grad"]:
            self._loss_tensors += tensors_in(roots)
        if self._keeps_scalers():
            if self._trace is not None:
                self._trace.before_backward(roots)
            if self._loss_factor != 1:
                gradients = over_tensors(lambda x: x * self._loss_factor, gradients)
            result = self._observer.backward(original, roots, gradients, *args, **kwargs)
            if self._trace is not None and kwargs["accumulate_grad"]:
                self._trace.after_backward(roots, self._observer.root_factors, self._observer.root_terms)
            if kwargs["accumulate_grad"]:
                self.result.backward_passes += not self.result.losses
                losses_scale = self._observer.root_scale
                with plain_torch():
                    self._losses += [float(x.detach()) / losses_scale for x in tensors_in(roots) if x.numel() == 1]
            return result
        scale = torch.full((), self.result.scale or 1.0)
        reduces = kwargs["accumulate_grad"] and self.result.recipe.ranks > 1
        before = {
            n: dense(p.grad.detach()).clone() for p, n in self._parameters.items() if reduces and p.grad is not None
        }
        with torch.autocast("cuda", enabled=False), ExitStack() as hooks:
            if kwargs["accumulate_grad"]:
                self.result.backward_passes += not self.result.losses
                self._losses += [float(x.detach()) for x in tensors_in(roots) if x.numel() == 1]
                # read now, since the step may have added groups
                groups = (group for one in self.optimizers.values() for group in one.param_groups)
                for p in {p for group in groups for p in group["params"] if p.requires_grad and scale != 1}:
                    hooks.callback(p.register_hook(lambda x: x / scale).remove)  # type: ignore[no-untyped-call]
            result = original(roots, over_tensors(lambda x: x * scale, gradients), *args, **kwargs)
        if reduces:
            with plain_torch():
                self._reduce(before)
        if not self.own_regions:  # the region that a user would open around the forward pass has ended by now
            clear_weight_casts()
        return over_tensors(lambda x: x / scale, result)

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Generator[tuple[Any, Any] | None]:
        """Runs around each `step()` of an optimizer, which begins at `yield`; yields its arguments if it has a closure.

        If gradients are not finite, the optimizer gets no parameters, since a GradScaler would skip the update. In an
        FP32 step for comparison (`_run_shadow`), the last optimizer gets none either. Checks the weights afterwards.
        """
        kind = type(optimizer).__name__
        if id(optimizer) not in self.optimizers:
            advice = "create model and optimizers before the rehearsal, and call every optimizer in the first step"
            raise bad_step(f"the step creates its own {kind}, or calls it only in later steps: {advice}")
        is_compared = self.recipe is not self.result.recipe and self._used | {id(optimizer)} >= {*self.optimizers}
        given: tuple[Any, Any] | None = None
        is_called_inside = False
        if has_closure(args, kwargs):
            given, is_called_inside = self._given_closure(optimizer, args, kwargs, is_compared)
        self._used.add(id(optimizer))
        own = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        as_written = self._keeps_scalers()
        with nullcontext() if as_written else torch.autocast("cuda", enabled=False), ExitStack() as stack:
            with plain_torch():
                if self._trace is not None:
                    self._trace.before_update(optimizer)
                if as_written:
                    self._observer.before_update(optimizer, len(self._running) > 1, given is not None)
                if not (is_finite := all(all_finite(p.grad) for _, p in own)):
                    self._broken = self._broken or ""
                for group, p in own if is_finite and self._sampled else ():
                    if p in self._parameters and p not in self._updates:  # else measured in an earlier update
                        self._updates[p] = Update.begin(optimizer, group, p)
            is_skipped = not is_finite and not as_written  # in a step as written, only the user's GradScaler skips
            if is_skipped or (is_compared and not is_called_inside):
                emptied = [{**group, "params": []} for group in optimizer.param_groups]
                stack.enter_context(swap_attribute(optimizer, "param_groups", emptied))
            # An update in FP32 needs no emulation, which takes longer; a closure that runs inside of it does.
            if not (self.recipe.stored or is_called_inside):
                stack.enter_context(plain_torch())
            yield given
        with plain_torch():
            if self._trace is not None:
                self._trace.after_update(optimizer)
            if as_written:
                self._observer.after_update(optimizer)
            if self._broken is None and not all(map(all_finite, self._parameters)):
                self._broken = "" if self._broken_inside else f"the update of {kind}, from finite gradients"
            if given is not None:
                self._seen |= {p: (p.grad, p.grad._version) for p in parameters_of(optimizer) if p.grad is not None}
                if as_written:
                    self._observer.after_closure(optimizer)

    def _given_closure(
        self, optimizer: Optimizer, args: Any, kwargs: Any, is_compared: bool
    ) -> tuple[tuple[Any, Any], bool]:
        """The arguments of an optimizer's `step` with its closure wrapped, and whether the closure runs inside `step`.

        A closure that computes the gradients is called before `step`, so that these can be measured; `step` then gets its
        loss. is_compared: whether the update does not count, since only its gradients are compared.
        """
        kind, line = type(optimizer).__name__, self._observer.line()
        if isinstance(optimizer, torch.optim.LBFGS) and not self.calls_closures_once:
            self._refuse_reruns(kind, line)
        calls_once = self.calls_closures_once or is_compared
        before = partial(self._refuse_reruns, kind, line)
        after = partial(self._check_rerun, optimizer)
        wrap = partial(Closure, before=before, after=after, calls_once=calls_once)
        new_args, new_kwargs, closures = wrap_closures(args, kwargs, wrap)
        with plain_torch():
            has_gradients = not self.calls_closures_once and self._has_new_gradients(optimizer)
        for closure in closures if not has_gradients else ():
            closure.call_before_step()
        return (new_args, new_kwargs), has_gradients or not calls_once

    def _has_new_gradients(self, optimizer: Optimizer) -> bool:
        """Whether gradients were computed since the last `step` with a closure, as for the first half of SAM."""
        for p in parameters_of(optimizer):
            gradient, version = self._seen.get(p, (None, 0))
            is_seen = p.grad is gradient and gradient is not None and gradient._version == version
            if p.grad is not None and not is_seen and bool(entries(p.grad).any()):
                return True
        return False

    def _refuse_reruns(self, kind: str, line: str) -> None:
        """Raise if the recipe cannot be used with an optimizer that calls its closure inside `step`, after an update."""
        recipe = self.recipe
        called = f"{kind} ({line}) computes gradients inside `step`, by a closure"
        if recipe.scale is not None:
            raise bad_step(f"{called}, which a GradScaler does not support: train in BF16 or FP32")
        if recipe.remedies or recipe.ranks > 1:
            raise bad_step(f"{called}, so that this recipe cannot change each update")

    def _check_rerun(self, optimizer: Optimizer) -> None:
        """Note gradients of a closure inside `step` that are not finite; a line search may recover from them."""
        with plain_torch():
            finite = all(p.grad is None or all_finite(p.grad) for p in parameters_of(optimizer))
        self._broken_inside = self._broken_inside or not finite


def _in_autocast() -> bool:
    """Whether an autocast region is open.

    If none is, a region that the forward of an outermost module opens belongs to the step: accelerate, for example,
    wraps the forward of a prepared model.
    """
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of all groups of an optimizer, in order; plain tensors with gradients among them."""
    return [p for group in optimizer.param_groups for p in group["params"]]
