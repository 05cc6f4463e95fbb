"""Runs one recipe in a forked process; its patches of torch and of the user's model are never undone."""

from __future__ import annotations

import math
import mmap
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as every_module
from torch.optim import Optimizer
from torch.optim import optimizer as every_optimizer

from ..artefact.applying import apply_plan
from ..capture.emulation import Emulation, emulate, scaled_as_on_cuda
from ..capture.intercept import Handler, intercept
from ..capture.regions import written_as_meant
from ..isolation.process import disable_compilers, ieee, process_state, swap_attribute
from ..isolation.tensors import plain_torch
from ..loading.target import blame
from ..numerics.casting import widen
from ..numerics.formats import dtype_of
from ..trees import over_tensors
from .blame import Trail, first_to_blame
from .remedies import repair
from .result import NonFiniteStep, ParameterSeries, Recipe, RecipeRun
from .scene import Scene, bad_step, call_step
from .updates import Updates

BLAMED = 4
"""Maximum number of steps that are run again to locate the operation to blame."""
GROWTH, INTERVAL = 2.0, 2000
"""GradScaler's defaults: the scale is halved after a non-finite step, and doubled after this many finite ones."""
_Autocast = torch.amp.autocast_mode.autocast


class _SearchEnded(BaseException):
    """Ends the user's step in a process that searches for the operation to blame."""


class Session:
    """The user's step under one recipe; `run` may be called once."""

    def __init__(self, recipe: Recipe, scene: Scene, step: Callable[..., Any]) -> None:
        self.recipe, self.scene, self.step = recipe, scene, step
        self.result = RecipeRun(recipe)
        self.scale, self._good = recipe.scale, 0
        self._calls: list[str] = []
        self._names: dict[int, str] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self._losses: list[float] = []
        self._broken = self._sampling = self._searching = False
        self._number = self._batch = -1
        self._shadow: dict[str, torch.Tensor] = {}
        self._region: ExitStack | None = None
        self._state: Callable[[], None] = lambda: None
        self._answer = -1

    # Replacements of torch functions

    def _patch(self) -> None:
        every_module.register_module_forward_pre_hook(self._enter_module)
        every_module.register_module_forward_hook(self._leave_module, always_call=True)
        every_optimizer.register_optimizer_step_pre_hook(self._before_update)
        every_optimizer.register_optimizer_step_post_hook(self._after_update)
        backward, grad = torch.autograd.backward, torch.autograd.grad
        torch.autograd.backward = lambda *a, **k: self._backward(backward, *a, **k)
        torch.autograd.grad = lambda outputs, *a, **k: self._grad(grad, outputs, *a, **k)
        scaler = torch.amp.grad_scaler.GradScaler  # the user's scaler does nothing: this session scales
        scaler.scale = lambda self, outputs: outputs  # type: ignore[method-assign]
        scaler.unscale_ = lambda self, optimizer: None  # type: ignore[method-assign]
        scaler.step = lambda self, optimizer, *a, **k: optimizer.step(*a, **k)  # type: ignore[method-assign]
        scaler.update = lambda self, *a, **k: None  # type: ignore[method-assign]

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if not self._calls and id(module) not in self.scene.modules:
            self.scene.modules[id(module)] = module
        self._calls.append(self._names.get(id(module), self._calls[-1] if self._calls else ""))

    def _leave_module(self, module: nn.Module, args: Any, result: Any) -> None:
        self._calls.pop()

    @contextmanager
    def _around(self, recipe: Recipe, handler: Handler | None = None) -> Iterator[None]:
        """Context for one step: FP32, or emulated CUDA; regions that the step opens get the recipe's dtype."""
        low = recipe.format != "fp32"
        emulated: AbstractContextManager[None] = emulate("cuda") if low else written_as_meant()
        with ExitStack() as stack:
            for one in (ieee(), disable_compilers(), emulated if handler is None else intercept(handler)):
                stack.enter_context(one)
            if handler is not None:
                stack.enter_context(scaled_as_on_cuda())
            enter = vars(_Autocast)["__enter__"]
            regional = low and not recipe.stored

            def enter_region(region: Any) -> Any:
                if not self._calls and not hasattr(region, "_ours") and getattr(region, "_meant", region._enabled):
                    self.scene.own_regions = True
                    region._enabled = region._meant = regional
                    region.fast_dtype = dtype_of(recipe.format) if regional else region.fast_dtype
                return enter(region)

            stack.enter_context(swap_attribute(_Autocast, "__enter__", enter_region))
            if regional and not self.scene.own_regions and not recipe.loss_in_fp32:
                stack.enter_context(_region(True, dtype_of(recipe.format)))
            yield

    def _outside(self) -> AbstractContextManager[Any]:
        """Context for backward passes and optimizers: outside autocast."""
        return _region(False) if self.recipe.format != "fp32" else nullcontext()

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.scene.backward_passes += 1
        self._losses += [float(x.detach()) for x in roots if x.numel() == 1]
        with self._outside():
            if self.scale is None:
                return original(roots, *args, **kwargs)
            before = {p: p.grad for p in self.parameters.values()}
            for p in before:
                p.grad = None
            original([x * self._factor for x in roots], *args, **kwargs)
        with plain_torch():  # unscaled at once, which is exact: the scale is a power of two
            for p, old in before.items():
                new = None if p.grad is None else p.grad / self._factor
                p.grad = old if new is None else new if old is None else old + new
        return None

    def _grad(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._outside():
            if self.scale is None:
                return original(outputs, *args, **kwargs)
            scaled = over_tensors(lambda x: x * self._factor, outputs)
            return over_tensors(lambda g: g / self._factor, original(scaled, *args, **kwargs))

    @property
    def _factor(self) -> torch.Tensor:
        return torch.full((), self.scale or 1.0)

    # Changes to the user's model

    def prepare(self) -> None:
        """Convert the model and the optimizers as the recipe requires."""
        self._patch()
        roots, trained = self.scene.roots, self.scene.group_numbers
        for prefix, root in roots.items():
            for path, module in root.named_modules():
                self._names.setdefault(id(module), prefix + _strip_wrappers(path))
            own = {prefix + _strip_wrappers(path): p for path, p in root.named_parameters() if p in trained}
            self.parameters |= own
            self.result.parameters |= {name: ParameterSeries(p.numel(), trained[p]) for name, p in own.items()}
        self._hooks = {
            o: (copy(o._optimizer_step_pre_hooks), copy(o._optimizer_step_post_hooks))
            for o in self.scene.optimizers.values()
        }
        if self.recipe.name != "as_written":
            self._store(dtype_of(self.recipe.format) if self.recipe.stored else torch.float32)
        for optimizer in self.scene.optimizers.values():
            for name in self.recipe.remedies:
                repair(name, optimizer)
            for group in optimizer.param_groups if self.recipe.eps is not None else ():
                group["eps"] = self.recipe.eps
        if self.recipe.scopes or self.recipe.loss_in_fp32:
            self._keep(dict(self.recipe.scopes), roots)
        sizes = [p.numel() for p in self.parameters.values()]
        # shared with forked processes
        shared: Any = torch.frombuffer(mmap.mmap(-1, 4 * max(sum(sizes), 1)), dtype=torch.float32)
        self._shadow = dict(zip(self.parameters, shared.split(sizes), strict=False))
        self._updates = Updates(self.result, self.parameters, self._shadow)

    def _store(self, dtype: torch.dtype) -> None:
        """Convert weights, buffers, optimizer state and the model's inputs to a dtype."""
        if all(p.dtype is dtype for p in self.parameters.values()):
            return
        for root in self.scene.roots.values():
            root.to(dtype)
        for optimizer in self.scene.optimizers.values():
            for state in optimizer.state.values():
                state |= {
                    k: x.to(dtype)
                    for k, x in state.items()
                    if isinstance(x, torch.Tensor) and x.dim() and x.is_floating_point()
                }

        def cast(module: nn.Module, args: Any, kwargs: Any) -> Any:
            wanted = next((p.dtype for p in module.parameters() if p.is_floating_point()), dtype)
            return over_tensors(lambda x: x.to(wanted) if x.is_floating_point() else x, (args, kwargs))

        for module in self.scene.modules.values():
            module.register_forward_pre_hook(cast, prepend=True, with_kwargs=True)

    def _keep(self, scopes: dict[str, str], roots: Mapping[str, nn.Module]) -> None:
        for prefix, root in roots.items():
            own = {path.removeprefix(prefix): kind for path, kind in scopes.items() if path.startswith(prefix)}
            known = {_strip_wrappers(path): path for path, _ in root.named_modules()}
            how = {known[path]: {"precision": kind, "output": "cast"} for path, kind in own.items() if path in known}
            whole = {"": {"precision": self.recipe.format, "output": "cast"}}
            apply_plan(root, {"strategy": "autocast", "format": self.recipe.format, "scopes": {**whole, **how}})
        for module in self.scene.modules.values() if self.recipe.loss_in_fp32 else ():
            module.register_forward_hook(lambda module, args, result: widen(result))

    # The steps

    def look(self, batch: Any) -> tuple[list[int], list[str], bool, int]:
        """Run one step in FP32. Returns the ids of the known objects that it uses, the classes of optimizers that it
        creates, whether it opens autocast regions, and the number of its backward passes."""
        self._patch()
        with self._around(self.recipe):
            call_step(self.step, batch)
        ids = [*self.scene.modules, *self.scene.optimizers]
        used = [one for one in ids if one in self.scene.known]
        unknown = [type(o).__name__ for i, o in self.scene.optimizers.items() if i not in self.scene.known]
        return used, unknown, self.scene.own_regions, self.scene.backward_passes

    def run(
        self, batches: Iterator[tuple[int, Any]], steps: int, samples: Collection[int], tell: Callable[[int], None]
    ) -> RecipeRun:
        """Run `steps` steps; returns the results, also if a step fails."""
        result = self.result
        result.backward_passes = self.scene.backward_passes
        try:
            for self._number, (self._batch, batch) in zip(range(steps), batches, strict=False):
                self._sampling, result.batches = self._number in samples, max(result.batches, self._batch + 1)
                if self._sampling and self.recipe.name != "fp32":
                    self._run_shadow(batch)
                self._losses, self._broken, self._state = [], False, process_state()
                began = time.process_time()
                try:
                    with self._around(self.recipe):
                        value = call_step(self.step, batch)
                except _SearchEnded:
                    self._tell_blame(batch)
                result.seconds += time.process_time() - began
                self._end_step(value)
                tell(self._number + 1)
        except (Exception, SystemExit) as error:
            result.failure = f"step {self._number}: {blame(error)}"
        result.finite_weights = all(bool(p.isfinite().all()) for p in self.parameters.values())
        result.scale = self.scale
        return result

    def _end_step(self, value: Any) -> None:
        """Record the loss, and update the loss scale as GradScaler does."""
        is_loss = isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point()
        given = value if isinstance(value, float) else float(value.detach()) if is_loss else None
        self.result.losses.append(given if given is not None else sum(self._losses) if self._losses else math.nan)
        if self.scale is not None:
            self._good = 0 if self._broken else self._good + 1
            self.scale *= 1 / GROWTH if self._broken else GROWTH if self._good == INTERVAL else 1
            self._good %= INTERVAL

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.scene.optimizers.setdefault(id(optimizer), optimizer)
        if any(callable(one) for one in (*args, *kwargs.values())):
            kind = type(optimizer).__name__
            raise bad_step(
                f"{kind}.step gets a closure, which may run the model repeatedly: rehearse another optimizer"
            )
        self._region = ExitStack()
        self._region.enter_context(self._outside())
        with plain_torch():
            own = self._parameters_of(optimizer)
            if self._searching:
                raise _SearchEnded
            if not all(bool(p.grad.isfinite().all()) for p in own.values() if p.grad is not None):
                self._not_finite(list(own.values()))
            elif self._sampling:
                self._updates.begin(optimizer, own)

    def _parameters_of(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.parameters.items() if id(p) in held}

    def _not_finite(self, parameters: list[nn.Parameter]) -> None:
        """Handle a step with non-finite gradients: with a loss scale it is skipped, as by GradScaler; otherwise it is
        applied."""
        known = self.result.skipped
        if not self._broken:
            self._broken = True
            where, module = self._search() if len(known) < BLAMED else ("", None)
            known.append(NonFiniteStep(self._number, self._batch, self.scale, where, module))
        if self.scale is not None:
            for p in parameters:
                p.grad = None

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._region is not None:
            self._region.close()
        with plain_torch():
            if self._sampling:
                self._updates.end(self._number, optimizer)
            if not self.result.skipped and not all(bool(p.isfinite().all()) for p in self.parameters.values()):
                where = f"the update of {type(optimizer).__name__}, from finite gradients"
                self.result.skipped.append(NonFiniteStep(self._number, self._batch, self.scale, where))

    def _run_shadow(self, batch: Any) -> None:
        """Compute FP32's gradients of this step from the same state, in a forked process."""
        for mine in self._shadow.values():
            mine.fill_(math.nan)
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            return
        try:
            self._become_fp32()
            with self._around(self.recipe):
                call_step(self.step, batch)
        finally:
            os._exit(0)

    def _become_fp32(self) -> None:
        """Switch this forked process to FP32, and record the gradients in shared memory."""
        low, self.recipe, self.scale, self._sampling = self.recipe, Recipe("fp32", "FP32"), None, False
        for optimizer, (before, after) in self._hooks.items():
            optimizer.__dict__.update(_optimizer_step_pre_hooks=before, _optimizer_step_post_hooks=after)
        if low.stored or low.name == "as_written":
            self._store(torch.float32)

        def keep(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            for name, p in self._parameters_of(optimizer).items():
                if p.grad is not None and not bool(self._shadow[name].isfinite().all()):
                    self._shadow[name].copy_(p.grad.detach().flatten())

        every_optimizer.register_optimizer_step_pre_hook(keep)

    def _search(self) -> tuple[str, str | None]:
        """Search for the operation to blame in a forked process, which aborts the step and runs it again."""
        there, here = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(there)
            self._answer = here
            raise _SearchEnded
        os.close(here)
        with os.fdopen(there) as answer:
            where, _, module = answer.read().partition("\n")
        os.waitpid(child, 0)
        return where, module if where else None

    def _tell_blame(self, batch: Any) -> None:
        """Run the step again, low and in FP32; report the first operation that is non-finite only in low precision."""
        self._searching = True
        try:
            low = self._trail(batch, Emulation())
            self._become_fp32()
            os.write(self._answer, "\n".join(first_to_blame(low, self._trail(batch, Handler()))).encode())
        finally:
            os._exit(0)

    def _trail(self, batch: Any, handler: Handler) -> Trail:
        trail = Trail(handler, self._calls, call_step.__code__)
        self._state()
        self._calls.clear()
        for p in self.parameters.values():
            p.grad = None
        with suppress(_SearchEnded), self._around(self.recipe, trail):
            call_step(self.step, batch)
        return trail


def _region(enabled: bool, dtype: torch.dtype | None = None) -> Any:
    region: Any = torch.autocast("cuda", dtype=dtype, enabled=enabled)
    region._ours = True
    return region


def _strip_wrappers(path: str) -> str:
    """A name without the components that torch.compile and DistributedDataParallel add."""
    return ".".join(part for part in path.split(".") if part not in ("_orig_mod", "module"))
