"""Runs the user's step under one recipe in a forked process, where patches of torch and of the model need not be undone,
and measures it."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from ..artefact.applying import apply_plan
from ..emulation.emulate import Emulation, emulate, scaled_as_on_cuda
from ..emulation.intercept import intercept
from ..emulation.regions import clear_weight_casts, written_as_meant
from ..errors import AuditorError, LoadError
from ..isolation.members import without_wrappers
from ..isolation.process import disable_compilers, ieee, process_state, reseed, swap_attribute
from ..isolation.tensors import plain_torch
from ..loading.target import call
from ..numerics.casting import widen
from ..numerics.devices import NATIVE
from ..numerics.entries import all_finite, dense, over_tensors, tensors_in
from ..numerics.formats import dtype_of
from ..processes import supervise
from ..training.blame import NO_PASS, Trail, blame
from ..training.replay import gradient_error
from ..training.step import LOSS
from .batches import call_step
from .lowstate import LowState
from .observed import Observer
from .ranks import mean_gradient, shard
from .result import (
    AS_WRITTEN,
    FP32,
    REMEDIES,
    ROUNDINGS,
    SCALED,
    NonFiniteStep,
    ParameterSeries,
    Recipe,
    RecipeRun,
    StepFinding,
)
from .storage import Storage, stores_low
from .trials import TRIALS, Trace, Trial, compare_scales, judge_overflow, set_scales, trial_scale

LOOKS = 24
"""Maximum number of sampled steps, in which gradients are compared with FP32's and updates are measured."""
BLAMED = 4
"""Maximum number of non-finite steps that are run again to find the operation that causes Inf or NaN."""
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""
bad_step = partial(LoadError, slug="bad-step")
"""The error for a step that cannot be rehearsed, from its message."""


def call_forked(work: Callable[[Callable[[str], None]], Any], hear: Callable[[str], object] = str) -> Any:
    """Call `work(tell)` in a forked process without output; return its value. hear: called with each message that `work`
    passes to `tell`. Raises: AuditorError if `work` raises, or its process is killed; CallbackError if `hear` raises."""

    def answer(tell: Callable[[Any], None]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # the user's step prints the same in every recipe
            os.dup2(null, stream)
        torch.set_num_threads(1)  # threads do not survive a fork
        try:
            tell(call(work, "the recipe", "bad-step", tell))
        except LoadError as error:
            tell(error)
        finally:
            os._exit(0)

    done = supervise(answer, hear=hear)
    if isinstance(done, LoadError):
        raise done
    return done


@dataclass
class _Ranks:
    """Gradients of one step, by the number of the backward pass: of this process, and of each other rank."""

    own: list[dict[str, Any]] = field(default_factory=list)
    others: list[list[dict[str, Any]]] = field(default_factory=list)


class Session:
    """The user's step, and its runs, each in a separate process. optimizers: {id: optimizer}, those that the first step
    calls. trained: {parameter: number of its group}. copied_dtypes: of parameters with gradients that no optimizer has, such
    as the FP16 copies of FP32 weights. root: the module with these parameters, or a container. own_regions:
    whether the step opens autocast regions. low_regions: the low-precision dtypes of these. scalers: the GradScalers
    that the first step calls, unless they are disabled. Raises: LoadError(slug="bad-step") for a step that cannot be rehearsed.

    batches: returns an iterator over (number of the batch, batch). seed: of the generators at the start of each run.
    """

    def __init__(self, step: Callable[..., Any], batches: Callable[[], Iterator[tuple[int, Any]]], seed: int) -> None:
        every = [one for one in gc.get_objects() if issubclass(type(one), nn.Module | Optimizer)]
        self.optimizers = {id(one): one for one in every if "param_groups" in vars(one)}
        self._step, self._batches, self._seed = step, batches, seed
        self._parameters = dict[nn.Parameter, str]()  # names of the trained parameters
        self._calls: list[nn.Module] = []  # the modules that are being called, innermost last
        self.own_regions, self.recipe, self._ranks = False, FP32, _Ranks()
        self._broken: str | None = None  # in a non-finite step: the operation to blame, "" if unknown
        self._has_loss, self._called = False, list[nn.Module]()
        self._trace: Trace | None = None  # of a trial step
        self.low_regions, self.scalers = set[torch.dtype](), list[GradScaler]()
        modules = [one for one in every if isinstance(one, nn.Module) and "_modules" in vars(one)]
        every_trained = nn.ParameterList(p for one in self.optimizers.values() for p in _parameters_of(one))
        low = [one for one in (*modules, every_trained) if stores_low(one)]  # of which the first step may call some
        self.root, self._storage = nn.Module(), Storage(low, ())
        used, self.own_regions, self.low_regions, scaler_ids, makes_scaler, with_gradients = call_forked(self._look)
        scalers = [one for one in gc.get_objects() if issubclass(type(one), GradScaler) and id(one) in scaler_ids]
        self.scalers = [one for one in scalers if one._enabled or self._is_switched_off(one)]
        self.has_scaler = bool(self.scalers) or makes_scaler
        if used.isdisjoint(self.optimizers):
            raise bad_step("the first step calls no optimizer's step(): give a function that runs one whole step")
        self.optimizers = {number: one for number, one in self.optimizers.items() if number in used}
        groups = ((n, group) for one in self.optimizers.values() for n, group in enumerate(one.param_groups))
        self.trained, roots = {p: n for n, group in groups for p in group["params"]}, dict[str, nn.Module]()
        left = {*self.trained}
        for module in sorted(modules, key=lambda m: -sum(1 for _ in m.modules())):
            if own := left.intersection(module.parameters()):
                roots[f"{type(module).__name__}{len(roots)}"] = module
                left -= own
        if bare := [p for p in self.trained if p in left and isinstance(p, nn.Parameter)]:
            roots[f"ParameterList{len(roots)}"] = nn.ParameterList(bare)
        self.root = nn.ModuleDict(roots) if len(roots) > 1 else next(iter(roots.values()), nn.Module())
        self._called = [one for one in modules if id(one) in used]
        graded = (p for one in self._called for p in one.parameters() if id(p) in with_gradients)
        self.copied_dtypes = {p.dtype for p in graded if p not in self.trained}
        self._storage = Storage((self.root, *self._called), self.trained)
        named = ((p, path) for path, p in self.root.named_parameters() if p in self.trained and p.numel())
        self._parameters = {p: without_wrappers(path) for p, path in named}
        if any(p.device.type in NATIVE for p in self.trained):
            raise bad_step("the model is on a GPU: move model and batches to the CPU, where a rehearsal emulates a GPU")

    def _look(self, tell: Callable[[str], None]) -> tuple[set[int], bool, set[torch.dtype], set[int], bool, set[int]]:
        """Run the first step; return ids of the optimizers and modules that it calls, whether it opens autocast regions,
        their low dtypes, ids of the GradScalers that it calls, whether it creates an enabled one, and ids of the
        parameters with a gradient."""
        known = {id(one) for one in gc.get_objects() if issubclass(type(one), GradScaler)}
        self.run(FP32, 1, tell)
        used = self._observer.used_scalers
        makes_scaler = any(vars(one)["_enabled"] for number, one in used.items() if number not in known)
        modules = (one for one in gc.get_objects() if issubclass(type(one), nn.Module) and id(one) in self._used)
        with_gradients = {id(p) for one in modules for p in one.parameters() if p.grad is not None}
        return self._used, self.own_regions, self.low_regions, {*used}, makes_scaler, with_gradients

    def _is_switched_off(self, scaler: GradScaler) -> bool:
        """Whether torch disabled a GradScaler for CUDA, since there is no GPU, while the step trains in FP16."""
        disabled = not scaler._enabled and scaler._device == "cuda" and "_init_scale" not in vars(scaler)
        return disabled and torch.float16 in self.low_regions

    def run(self, recipe: Recipe, steps: int, tell: Callable[[str], None]) -> RecipeRun:
        """Run up to `steps` steps: the run ends with the batches, and without a loss scale with the first non-finite
        step. As written, an exception or ruined weights end it too. tell: called with each step and its loss as text."""
        reseed(self._seed)
        self._prepare(recipe)
        as_written = recipe.name == AS_WRITTEN
        batches, result, samples = self._batches(), self.result, {i * (steps - 1) // (LOOKS - 1) for i in range(LOOKS)}
        fp32, scale, finite = dict[str, Any](), torch.tensor(recipe.scale or 1.0), torch.zeros((), dtype=torch.int32)
        tried = list[StepFinding]()
        for step in range(steps):
            number, batch = call(next, f"before step {step}, the batches", "bad-step", batches, (-1, None))
            if number < 0:
                break
            result.batches = max(result.batches, number + 1)
            # Whether the step is measured; {parameter: gradient, optimizer, group, weight, second moment} at its update.
            self._sampled, self._updates = step in samples, dict[nn.Parameter, tuple[Any, ...]]()
            exact: float | None = None
            if self._sampled and recipe != FP32:
                fp32 = {}
                with suppress(AuditorError):
                    fp32, exact = call_forked(partial(self._run_shadow, batch))
            if as_written and self._sampled and len(result.steps) < TRIALS:
                tried += self._try(batch, step)
            searches = len(result.skipped) + len(result.bad_losses) < BLAMED
            restart, where = self._save_state() if searches else process_state(), f"in step {step} (batch {number})"
            if as_written:
                self._observer.begin_step()
                result.scale = self._observer.scale()
            try:
                result.losses.append(call(self._call_step, f"{where}, the step", "bad-step", batch))
            except LoadError as error:
                if not as_written:
                    raise
                result.failure = str(error)
                break
            if self._updates:
                fp32 = self._measure(step, fp32)
                result.exact_losses.append(exact)
            if as_written and self._observer.skipped and self._broken is None:
                self._broken = ""
            has_bad_loss = self._broken is None and self._has_loss and not math.isfinite(result.losses[-1])
            if self._broken is not None or has_bad_loss:
                blamed = self._broken or "", None
                if not self._broken and searches:
                    with suppress(AuditorError):
                        blamed = call_forked(partial(self._search, batch, restart))
                if recipe == FP32 and self._broken is not None:
                    first = f", first at {blamed[0]}" if blamed[0] else ""
                    raise bad_step(f"gradients or weights turn Inf or NaN {where}{first}: fix the step first")
                bad = NonFiniteStep(step, number, result.scale, *blamed)
                (result.bad_losses if has_bad_loss else result.skipped).append(bad)
            tell(f"step {step}, loss {result.losses[-1]}")
            if as_written:
                is_ruined = self._broken is not None and not all(map(all_finite, self._parameters))
                if is_ruined or (result.skipped and self._observer.scale() is None):
                    break
            elif result.scale is not None:
                # GradScaler's defaults: growth factor, backoff factor, and number of finite steps until the scale grows.
                torch._amp_update_scale_(scale, finite, torch.tensor(float(self._broken is not None)), 2.0, 0.5, 2000)
                result.scale = float(scale)
            elif result.skipped:
                break
        if as_written:
            result.findings += self._observer.finish(result.failure is None, tried)
            result.scale = self._observer.scale()
        if not result.losses and result.failure is None:
            raise bad_step("batches is empty: give at least one batch")
        return result

    def _save_state(self) -> Callable[[], None]:
        """Save what the first operations of a step can change: generators, buffers, weights that an optimizer updates
        before another fails, loss scales. The returned function restores them."""
        restart = process_state()
        with plain_torch():
            tensors = [b for module in (self.root, *self._called) for b in module.buffers()]
            if len(self.optimizers) > 1 or self.recipe.name == AS_WRITTEN:
                tensors += self._parameters
            scales = [(one._scale, one._growth_tracker) for one in self.scalers if vars(one).get("_scale") is not None]
            tensors += [x for pair in scales for x in pair if x is not None]
            saved = [(x, x.detach().clone()) for x in dict.fromkeys(tensors)]

        def back() -> None:
            restart()
            with plain_torch():
                for x, before in saved:
                    x.copy_(before)

        return back

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
        recipe, parameters = self.result.recipe, {name: p for p, name in self._parameters.items() if p.grad is not None}
        own = {
            name: dense(p.grad.detach()) - before.get(name, 0.0) for name, p in parameters.items() if p.grad is not None
        }
        number = len(self._ranks.own)
        self._ranks.own.append({name: gradient.numpy() for name, gradient in own.items()})
        others = [gradients[number] for gradients in self._ranks.others if number < len(gradients)]
        formats = ("fp32", "fp32") if self.recipe == FP32 else (recipe.format, recipe.summed)
        for name, gradient in own.items() if others else ():
            every = [gradient, *(torch.as_tensor(each[name]) for each in others if name in each)]
            parameters[name].grad = before.get(name, 0.0) + mean_gradient(every, *formats)

    def _call_rank(self, batch: Any, handler: Emulation | None = None) -> float:
        """Call the user's step with a batch (as one argument, several, or none, as its signature requires), in FP32 or in
        emulated CUDA; the step's autocast regions get the recipe's dtype. Returns the step's loss; if it returns none,
        the sum of the losses on which it called `backward`."""
        recipe, dtype = self.recipe, dtype_of(self.recipe.format)
        self._losses, self._used = list[float](), set[int]()  # of `backward`; ids of the called optimizers and modules
        self._broken = None
        as_written = recipe.name == AS_WRITTEN
        regional = recipe.format != "fp32" and not recipe.stored and LOSS not in recipe.scopes and not as_written
        emulated = emulate("cuda") if recipe.format != "fp32" or as_written else written_as_meant()
        batch = self._storage.cast_batch(batch, recipe)
        with ieee(), disable_compilers(), scaled_as_on_cuda(), emulated if handler is None else intercept(handler):
            enter = vars(torch.autocast)["__enter__"]

            def enter_region(region: Any) -> Any:
                is_own = not self._calls or (len(self._calls) == 1 and not recipe.scopes and not _in_autocast())
                is_meant = getattr(region, "_meant", region._enabled)
                if is_own and is_meant and torch._C._current_graph_task_id() == NO_PASS:
                    self.own_regions = True
                    if region.fast_dtype in (torch.float16, torch.bfloat16):
                        self.low_regions.add(region.fast_dtype)
                    if not as_written:
                        region._enabled, region._meant, region.fast_dtype = regional, regional, dtype
                return enter(region)

            around = torch.autocast("cuda", dtype=dtype) if regional and not self.own_regions else nullcontext()
            with around, swap_attribute(torch.autocast, "__enter__", enter_region):
                value = call_step(self._step, batch)
                while self._running:  # a `step()` of an optimizer that raised, and the user's step caught the exception
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

    def _run_shadow(self, batch: Any, tell: object) -> tuple[dict[str, Any], float | None]:
        """FP32's gradients of this step, from the same state, as NumPy arrays, which a pipe can pass on; and its loss."""
        self._convert(FP32)
        loss = self._call_step(batch)
        gradients = {self._parameters[p]: gradient.numpy() for p, (gradient, *_) in self._updates.items()}
        return gradients, loss if self._has_loss else None

    def _try(self, batch: Any, step: int) -> list[StepFinding]:
        """The findings of trial steps from this state, each in a separate process; a trial that fails has none."""
        findings = list[StepFinding]()
        with suppress(AuditorError):
            findings += call_forked(partial(self._run_low_state, batch, step))
        if (scale := self._observer.scale()) is not None:
            scale = trial_scale(scale)
            with suppress(AuditorError):
                plain, scaled = (call_forked(partial(self._run_trial, batch, each, False)) for each in (1.0, scale))
                broken = call_forked(partial(self._run_trial, batch, scale, True))
                found = compare_scales(plain, scaled, scale, step) or judge_overflow(scaled, broken, step)
                findings += [found] if found is not None else []
        return findings

    def _run_low_state(self, batch: Any, step: int, tell: object) -> list[StepFinding]:
        """The findings of one step as written on values in low precision, see `LowState`."""
        watch = LowState(lambda: bool(self._calls or self._running), self._observer.line)
        self._call_step(batch, watch)
        return [*watch.findings(step)]

    def _run_trial(self, batch: Any, scale: float, breaks: bool, tell: object) -> Trial:
        """One step in FP32 with the user's GradScalers at a loss scale. breaks: whether gradients are made infinite."""
        self._convert(SCALED)
        scalers = self._observer.used_scalers
        if (before := self._observer.scale()) is not None:
            self._observer.rescale(scale / before)
        set_scales(scalers.values(), scale)
        self._trace = Trace(self._parameters, self.optimizers.values(), scalers.values(), self._observer.line, breaks)
        trial = self._trace.trial
        try:
            with self._trace:
                call(self._call_step, "the step", "bad-step", batch)
        except LoadError as error:
            self._trace.fail(error)
        trial.inner_line, trial.constant_line = self._observer.inner_line, self._observer.constant_line
        trial.gradients = {self._parameters[p]: gradient.numpy() for p, (gradient, *_) in self._updates.items()}
        trial.scales = [(scale, float(one._scale)) for one in scalers.values() if one._scale is not None]
        return trial

    def _search(self, batch: Any, restart: Callable[[], None], tell: object) -> tuple[str, str | None]:
        """The operation that makes a step non-finite, and its module, see `blame`. In an FP32 run, and if FP32 fails at
        the same weights too, the first operation with NaN."""
        firsts = dict[bool, Trail]()
        names = {module: without_wrappers(path) for path, module in self.root.named_modules()}

        def run(trail: Trail, is_low: bool) -> None:
            restart()
            firsts[is_low] = trail
            if not is_low:
                self._convert(FP32)
            self._call_step(batch, trail)

        words, module = blame(run, lambda: next((names[one] for one in reversed(self._calls) if one in names), LOSS))
        low, high = firsts[True].first_nan, firsts[False].first_nan
        if words or low is None or high is None:
            return words, module
        return low[0] if self.result.recipe == FP32 else f"{low[0]}, in FP32 at the same weights too", low[1]

    def _prepare(self, recipe: Recipe) -> None:
        """Convert the model and the optimizers as the recipe requires, and replace functions of torch."""
        series = {name: ParameterSeries(p.numel(), self.trained[p]) for p, name in self._parameters.items()}
        self.result = RecipeRun(recipe, parameters=series)
        self._convert(recipe)
        for name, optimizer in product(recipe.remedies, self.optimizers.values()):
            REMEDIES[name][1](optimizer)
        running = self._running = dict[int, Generator[Any]]()  # {number of `step()` calls around one: its `_update`}
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
        self._observer = Observer(is_active, self.optimizers.values(), Session._call_step.__code__)
        self._observer.used_scalers.update((id(one), one) for one in self.scalers)

    def _keeps_scalers(self) -> bool:
        return self.recipe.keeps_scalers

    def _convert(self, recipe: Recipe) -> None:
        """Switch this process to a recipe: convert weights, buffers and optimizer state now, and inputs of outermost
        modules in later steps; apply the recipe's scopes, or remove those of another recipe."""
        if recipe.name != AS_WRITTEN:
            before = {number: [p.dtype for p in _parameters_of(one)] for number, one in self.optimizers.items()}
            self._storage.convert(recipe)
            for number, optimizer in self.optimizers.items():
                if before[number] != [p.dtype for p in _parameters_of(optimizer)]:
                    with swap_attribute(
                        optimizer, "param_groups", optimizer.param_groups
                    ):  # to which the step may refer
                        optimizer.load_state_dict(
                            optimizer.state_dict()
                        )  # which casts the state to the weights' dtypes
        if recipe.scopes or self.recipe.scopes:
            # Each module in a container, which is itself not called, gets the scope of the root.
            parts = self.root if isinstance(self.root, nn.ModuleDict) else ()
            scopes = {**dict.fromkeys(("", *parts), recipe.scopes.get("", {"precision": "fp32"})), **recipe.scopes}
            scopes.pop(LOSS, None)
            apply_plan(self.root, {"strategy": "autocast", "format": recipe.format, "scopes": scopes})
        self.recipe, self.result.scale = recipe, recipe.scale

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
        if self._keeps_scalers():
            if self._trace is not None:
                self._trace.before_backward()
            result = self._observer.backward(original, roots, gradients, *args, **kwargs)
            if self._trace is not None and kwargs["accumulate_grad"]:
                self._trace.after_backward(roots)
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
                groups = (group for one in self.optimizers.values() for group in one.param_groups)  # maybe new ones
                for p in {p for group in groups for p in group["params"] if p.requires_grad and scale != 1}:
                    hooks.callback(p.register_hook(lambda x: x / scale).remove)  # type: ignore[no-untyped-call]
            result = original(roots, over_tensors(lambda x: x * scale, gradients), *args, **kwargs)
        if reduces:
            with plain_torch():
                self._reduce(before)
        if not self.own_regions:  # a user would leave the region around the forward pass
            clear_weight_casts()
        return over_tensors(lambda x: x / scale, result)

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Generator[tuple[Any, Any] | None]:
        """Runs around each `step()` of an optimizer, which begins at `yield`, with other arguments if it has a closure. If gradients are not finite, the optimizer
        gets no parameters, as a GradScaler skips it. In an FP32 step for comparison (`_run_shadow`), the last optimizer
        gets none either. After the update, the weights are checked."""
        kind = type(optimizer).__name__
        if id(optimizer) not in self.optimizers:
            advice = "create model and optimizers before the rehearsal, and call every optimizer in the first step"
            raise bad_step(f"the step creates its own {kind}, or calls it only in later steps: {advice}")
        if isinstance(optimizer, torch.optim.LBFGS):
            said = f"{kind} ({self._observer.line()}) calls its closure a number of times that rounding changes"
            raise bad_step(f"{said}: rehearse another optimizer")
        call_once = _with_closures_called(args, kwargs)
        self._used.add(id(optimizer))
        own = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        as_written = self._keeps_scalers()
        with nullcontext() if as_written else torch.autocast("cuda", enabled=False), ExitStack() as stack:
            with plain_torch():
                if self._trace is not None:
                    self._trace.before_update(optimizer)
                if as_written:
                    self._observer.before_update(optimizer)
                if not (is_finite := all(all_finite(p.grad) for _, p in own)):
                    self._broken = self._broken or ""
                for group, p in own if is_finite and self._sampled else ():
                    if p in self._parameters and p not in self._updates:  # else measured in an earlier update
                        before = p.detach().clone(), _second_moment(optimizer, p)
                        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales itself
                        gradient = dense(p.grad.detach()) / (1.0 if scale is None else scale)
                        self._updates[p] = gradient, optimizer, {**group}, *before
            is_skipped = not is_finite and not as_written  # as written, the user's scaler skips, or nobody does
            if is_skipped or (self.recipe is not self.result.recipe and self._used >= {*self.optimizers}):
                emptied = [{**group, "params": []} for group in optimizer.param_groups]
                stack.enter_context(swap_attribute(optimizer, "param_groups", emptied))
            if not self.recipe.stored:  # an update in FP32 needs no emulation, which takes longer
                stack.enter_context(plain_torch())
            yield call_once
        with plain_torch():
            if self._broken is None and not all(map(all_finite, self._parameters)):
                self._broken = f"the update of {kind}, from finite gradients"

    def _measure(self, step: int, fp32: dict[str, Any]) -> dict[str, Any]:
        """Record the gradient errors of a sampled step, of all parameters together and of each, and its updates, see
        ParameterSeries. Errors are undefined if FP32's gradients are unknown or zero; lost updates if a remedy updates
        weights in FP32, since the stored weight then does not show single updates; lost decay for optimizers outside
        torch, since it is unknown how their decay acts.

        fp32: {parameter: gradient} of an FP32 step with equal weights; in an FP32 run, of the last sampled step.
        Returns the last known gradient of every parameter.
        """
        run, of_two = self.result, math.sqrt(2) if self.recipe == FP32 else 1.0  # both batches' gradients scatter
        gradients = {self._parameters[p]: gradient for p, (gradient, *_) in self._updates.items()}
        in_fp32 = not {*run.recipe.remedies}.isdisjoint(ROUNDINGS)
        exact = {name: torch.as_tensor(fp32[name]) for name in gradients if name in fp32}
        run.steps.append(step)
        for name in ("", *gradients):  # all parameters together, and each
            known = {name: exact[name]} if name in exact else {} if name else exact
            error = gradient_error(known, gradients) / of_two if any(bool(x.any()) for x in known.values()) else None
            (run.parameters[name].error if name else run.errors).append(error)
        for p, (grad, optimizer, group, weight, moment) in self._updates.items():
            series, moved, now = run.parameters[self._parameters[p]], grad != 0, _second_moment(optimizer, p)
            series.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
            series.updates_lost.append(None if in_fp32 else _share(p == weight, moved))
            moving = None if moment is None else (grad.float() ** 2 - moment).abs_() > STUCK * moment.float()
            series.second_moment_stuck.append(None if moving is None or now is None else _share(now == moment, moving))
            series.second_moment_zero.append(None if now is None else _share(now == 0, moved))
            grad, weight = (grad.float(), weight.float()) if in_fp32 else (grad, weight)
            decay, rate = (float(group.get(key) or 0.0) for key in ("weight_decay", "lr"))
            is_decoupled = group.get("decoupled_weight_decay", type(optimizer).__name__ in DECOUPLED)
            start, factor = (weight, -rate * decay) if is_decoupled else (grad, decay)
            still = torch.add(start, weight, alpha=factor) == start
            decays = decay and rate and type(optimizer).__module__.startswith("torch.optim")
            series.decay_lost.append(_share(still, weight != 0) if decays else None)
        return fp32 | gradients


def _in_autocast() -> bool:
    """Whether an autocast region is open. If none is, one that the forward of an outermost module opens is the step's:
    accelerate, for example, wraps the forward of a prepared model."""
    return any(map(torch.is_autocast_enabled, ("cpu", "cuda")))


def _with_closures_called(args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    """The arguments of an optimizer's `step`, whose closure is called here, before gradients are read: the optimizer
    gets a closure that returns the same loss. None without a closure."""
    if not any(map(callable, (*args, *kwargs.values()))):
        return None

    def called(value: Any) -> Any:
        if not callable(value):
            return value
        with torch.enable_grad():
            loss = value()
        return lambda: loss

    return tuple(map(called, args)), {name: called(value) for name, value in kwargs.items()}


def _parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    """The parameters of all groups of an optimizer, in order."""
    return [p for group in optimizer.param_groups for p in group["params"] if isinstance(p, nn.Parameter)]


def _second_moment(optimizer: Optimizer, p: nn.Parameter) -> Any:
    """A copy of a parameter's second moment in the optimizer; None if there is none."""
    state = optimizer.state.get(p, {})
    return next((state[name].clone() for name in ("exp_avg_sq", "square_avg") if name in state), None)


def _share(flags: torch.Tensor, among: torch.Tensor) -> float | None:
    """The share of the entries in the mask `among` whose flag is set; None if the mask is empty."""
    whole = int(among.count_nonzero())
    return int((flags & among).count_nonzero()) / whole if whole else None
