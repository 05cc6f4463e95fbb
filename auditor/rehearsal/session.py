"""Runs one recipe in a forked process, where patches of torch and of the user's model need not be undone."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim import optimizer as every_optimizer

from ..artefact.applying import apply_plan
from ..capture.emulation import Emulation, emulate
from ..capture.intercept import Handler, intercept
from ..capture.regions import written_as_meant
from ..errors import LoadError
from ..isolation.answer import lowered_batch
from ..isolation.members import without_wrappers
from ..isolation.process import disable_compilers, ieee, process_state, swap_attribute
from ..isolation.tensors import plain_torch
from ..loading.target import call, required_arguments
from ..numerics.casting import widen
from ..numerics.entries import all_finite
from ..numerics.formats import dtype_of
from ..training.step import LOSS
from ..trees import over_tensors
from .blame import Trail, first_to_blame
from .forked import call_forked
from .remedies import repair
from .result import FP32, NonFiniteStep, ParameterSeries, Recipe, RecipeRun
from .updates import Updates, shared_gradients

LOOKS = 24
"""Maximum number of sampled steps: in these, gradients are compared with FP32's and updates measured."""
BLAMED = 4
"""Maximum number of non-finite steps that are run again to locate the operation to blame."""
GROWTH, INTERVAL = 2.0, 2000
"""GradScaler's defaults: the scale is halved after a non-finite step, and doubled after this many finite ones."""
_Autocast = torch.amp.autocast_mode.autocast


@dataclass
class Scene:
    """What a step uses. optimizers: by their ids. root: the module with all their parameters. own_regions: whether the
    step opens autocast regions."""

    optimizers: dict[int, Optimizer]
    root: nn.Module = field(default_factory=nn.Module)
    own_regions: bool = False

    @property
    def group_numbers(self) -> dict[nn.Parameter, int]:
        """The optimizers' parameters, each with the number of its group."""
        groups = ((n, group) for one in self.optimizers.values() for n, group in enumerate(one.param_groups))
        return {p: n for n, group in groups for p in group["params"]}


def bad_step(message: str) -> LoadError:
    """The error for a step that cannot be rehearsed."""
    return LoadError(message, slug="bad-step")


def known_objects() -> tuple[list[nn.Module], dict[int, Optimizer]]:
    """All modules and optimizers of this process, except those whose constructor failed."""
    found = [one for one in gc.get_objects() if issubclass(type(one), nn.Module | Optimizer)]
    modules = [one for one in found if isinstance(one, nn.Module) and "_modules" in vars(one)]
    return modules, {id(one): one for one in found if "param_groups" in vars(one)}


def root_of(modules: list[nn.Module], parameters: Iterable[nn.Parameter]) -> nn.Module:
    """The outermost module that contains the parameters; if there are several, a container of all."""
    left, found = {*map(id, parameters)}, dict[str, nn.Module]()
    for module in sorted(modules, key=lambda m: -sum(1 for _ in m.modules())):
        if own := left & {id(p) for p in module.parameters()}:
            found[f"{type(module).__name__}{len(found)}"] = module
            left -= own
    return nn.ModuleDict(found) if len(found) > 1 else next(iter(found.values()), nn.Module())


class Session:
    """The user's step under one recipe, run once. used: ids of the optimizers that the last step called."""

    def __init__(self, recipe: Recipe, scene: Scene, step: Callable[..., Any]) -> None:
        self.recipe, self.scene, self.result = recipe, scene, RecipeRun(recipe, scale=recipe.scale)
        self.used = set[int]()
        self._step, self._root = step, scene.root
        self._parameters: dict[str, nn.Parameter] = {}
        self._names: dict[int, str] = {}
        self._calls: list[str] = []
        self._unscaled, self._pass, self._casts_inputs = set[nn.Parameter](), "", False
        self._updates: Updates | None = None
        self._losses: list[float] = []
        self._open: list[ExitStack] = []  # contexts of the optimizer updates that are running
        self._broken: str | None = None  # in a non-finite step: what is to blame, "" if it must be searched for

    def run(self, batches: Iterator[tuple[int, Any]], steps: int, tell: Callable[[int], None]) -> RecipeRun:
        """Run `steps` steps, or fewer: the run ends with a step that raises, or is not finite without a loss scale."""
        self._prepare()
        result, samples = self.result, {i * (steps - 1) // (LOOKS - 1) for i in range(LOOKS)}
        fp32, finite = shared_gradients(self._parameters), 0
        for step, (number, batch) in zip(range(steps), batches, strict=False):
            result.batches = max(result.batches, number + 1)
            self._updates = updates = Updates(self._parameters, result, fp32) if step in samples else None
            if updates is not None and self.recipe.format != "fp32":
                self._run_shadow(batch, fp32)
            restart = process_state()
            try:
                value = call(self._call_step, "the step", "bad-step", batch)
            except LoadError as error:
                result.failure = f"step {step}: {error}"
                break
            result.losses.append(_loss_of(value, self._losses))
            if updates is not None:
                updates.finish(step)
            finite += 1
            if self._broken is not None:
                known = self._broken or len(result.skipped) >= BLAMED
                where = (self._broken, None) if known else self._search(batch, restart)
                result.skipped.append(NonFiniteStep(step, number, result.scale, *where))
                finite = 0
            tell(step + 1)
            if result.scale is None and result.skipped:
                break
            if result.scale is not None and finite % INTERVAL == 0:
                result.scale *= GROWTH if finite else 1 / GROWTH
        return result

    def _call_step(self, batch: Any, handler: Handler | None = None) -> Any:
        """Call the user's step with a batch: as one argument, several, or none, as its signature requires."""
        names = required_arguments(self._step)
        self._losses, self._broken, self.used = [], None, set()
        with self._around(handler):
            return self._step(*(batch if len(names) > 1 else [batch][: len(names)]))

    # Steps that run again in forked processes

    def _run_shadow(self, batch: Any, fp32: Mapping[str, torch.Tensor]) -> None:
        """Write FP32's gradients of this step, from the same state, to `fp32`; NaN if the step fails in FP32."""

        def work(send: Any) -> None:
            self._become_fp32()
            self._call_step(batch)

        for gradient in fp32.values():
            gradient.fill_(math.nan)
        call_forked(work)

    def _search(self, batch: Any, restart: Callable[[], None]) -> tuple[str, str | None]:
        """The operation to blame for a step, and its module: the first that is non-finite only in low precision."""

        def work(send: Any) -> tuple[str, str]:
            trails = [Trail(one, self._calls, Session._call_step.__code__) for one in (Emulation(), Handler())]
            for trail in trails:
                restart()
                for p in self._parameters.values():
                    p.grad = None
                self._call_step(batch, trail)
                self._become_fp32()
            return first_to_blame(*trails)

        where, module = call_forked(work)[0] or ("", "")
        return where, module if where else None

    def _become_fp32(self) -> None:
        """Run the next steps in FP32, for the rest of this process."""
        if self.recipe.scopes:
            self._apply({"": {"precision": "fp32"}})
        self.recipe, self.result.scale = FP32, None
        self._store(torch.float32)

    # Changes to the user's model

    def _prepare(self) -> None:
        """Convert the model and the optimizers as the recipe requires, and replace functions of torch."""
        recipe, trained = self.recipe, self.scene.group_numbers
        self._names = {id(module): without_wrappers(path) for path, module in self._root.named_modules()}
        for path, p in self._root.named_parameters():
            if p in trained and p.numel():
                name = without_wrappers(path)
                self._parameters[name], self.result.parameters[name] = p, ParameterSeries(p.numel(), trained[p])
        if recipe.name != "as_written":
            self._store(dtype_of(recipe.format) if recipe.stored else torch.float32)
        for optimizer in self.scene.optimizers.values():
            for name in recipe.remedies:
                repair(name, optimizer)
            for group in optimizer.param_groups if recipe.eps is not None else ():
                group["eps"] = recipe.eps
        if recipe.scopes:
            self._apply(recipe.scopes)
        self._patch()

    def _store(self, dtype: torch.dtype) -> None:
        """Convert weights, buffers and optimizer state to a dtype, and from now on the inputs of outermost modules."""
        if all(p.dtype is dtype for p in self._parameters.values()):
            return
        self._casts_inputs = True
        self._root.to(dtype)
        for optimizer in self.scene.optimizers.values():
            optimizer.load_state_dict(optimizer.state_dict())  # which casts the state to the dtypes of the weights

    def _apply(self, scopes: Mapping[str, Any]) -> None:
        """Apply the scopes of a plan; the scope of the root is also that of each module in a container."""
        parts = self._root if isinstance(self._root, nn.ModuleDict) and "" in scopes else ()
        scopes = {**dict.fromkeys(parts, scopes.get("")), **scopes}
        apply_plan(self._root, {"strategy": "autocast", "format": self.recipe.format, "scopes": scopes})

    # Replacements of torch functions

    def _patch(self) -> None:
        every_optimizer.register_optimizer_step_pre_hook(self._before_update)
        every_optimizer.register_optimizer_step_post_hook(self._after_update)
        called, backward, grad = nn.Module.__call__, torch.autograd.backward, torch.autograd.grad
        nn.Module.__call__ = lambda module, *a, **k: self._call(called, module, *a, **k)  # type: ignore[method-assign]
        torch.autograd.backward = lambda *a, **k: self._backward(backward, *a, **k)
        torch.autograd.grad = lambda outputs, *a, **k: self._grad(grad, outputs, *a, **k)
        # The user's scalers are disabled, since this session scales.
        torch.amp.grad_scaler.GradScaler._enabled = property(lambda self: False, lambda self, value: None)  # type: ignore

    @contextmanager
    def _around(self, handler: Handler | None) -> Iterator[None]:
        """Context for one step: FP32, or emulated CUDA; autocast regions of the step get the recipe's dtype."""
        low, dtype = self.recipe.format != "fp32", dtype_of(self.recipe.format)
        regional = low and not self.recipe.stored and not self.recipe.loss_in_fp32
        emulated = emulate("cuda") if low else written_as_meant()
        with ieee(), disable_compilers(), emulated if handler is None else intercept(handler):
            enter = vars(_Autocast)["__enter__"]

            def enter_region(region: Any) -> Any:
                if not self._calls and not self._pass and getattr(region, "_meant", region._enabled):
                    self.scene.own_regions = True
                    region._enabled = region._meant = regional
                    region.fast_dtype = dtype if regional else region.fast_dtype
                return enter(region)

            around = torch.autocast("cuda", dtype=dtype) if regional and not self.scene.own_regions else nullcontext()
            with around, swap_attribute(_Autocast, "__enter__", enter_region):
                yield

    def _call(self, original: Callable[..., Any], module: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        outermost = not self._calls
        if outermost and self._casts_inputs:
            wanted = next((p.dtype for p in module.parameters() if p.is_floating_point()), None)
            args, kwargs = lowered_batch((args, kwargs), wanted) if wanted else (args, kwargs)
        self._calls.append(self._names.get(id(module), LOSS if outermost else self._calls[-1]))
        try:
            result = original(module, *args, **kwargs)
        finally:
            self._calls.pop()
        return widen(result) if outermost and self.recipe.loss_in_fp32 else result

    def _backward(self, original: Callable[..., None], tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self._pass:  # of an activation checkpoint, inside another pass
            return original(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        self.result.backward_passes += not self.result.losses
        self._losses += [float(x.detach()) for x in roots if x.numel() == 1]
        for p in self._parameters.values() if self.result.scale is not None else ():
            if p.requires_grad and p not in self._unscaled:
                self._unscaled.add(p)
                p.register_hook(self._unscale)  # type: ignore[no-untyped-call]
        with self._in_pass("backward"):
            return original([x * self._factor for x in roots], *args, **kwargs)

    def _grad(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._in_pass("grad"):
            scaled = over_tensors(lambda x: x * self._factor, outputs)
            return over_tensors(lambda g: g / self._factor, original(scaled, *args, **kwargs))

    @contextmanager
    def _in_pass(self, kind: str) -> Iterator[None]:
        """Context for a backward pass, which runs outside autocast. kind: backward | grad."""
        before, self._pass = self._pass, kind
        with torch.autocast("cuda", enabled=False):
            yield
        self._pass = before

    def _unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient / self._factor if self._pass == "backward" else gradient

    @property
    def _factor(self) -> torch.Tensor:
        return torch.full((), self.result.scale or 1.0)

    def _before_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        kind = type(optimizer).__name__
        if id(optimizer) not in self.scene.optimizers:
            advice = "create model and optimizers before, and call every optimizer in the first step"
            raise bad_step(f"the step creates its own {kind}, or calls it only in later steps: {advice}")
        if any(callable(one) for one in (*args, *kwargs.values())):
            raise bad_step(
                f"{kind}.step gets a closure, which may run the model repeatedly: rehearse another optimizer"
            )
        self.used.add(id(optimizer))
        self._open.append(ExitStack())
        self._open[-1].enter_context(torch.autocast("cuda", enabled=False))
        shadow, is_last = self.recipe is not self.result.recipe, self.used == {*self.scene.optimizers}
        own = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with plain_torch():
            finite = all(all_finite(p.grad) for p in own)
            if not finite:
                self._broken = self._broken or ""
            elif self._updates is not None:
                self._updates.begin(optimizer, shadow)
            for p in own if not finite or (shadow and is_last) else ():  # the update is skipped, as GradScaler does
                self._open[-1].callback(setattr, p, "grad", p.grad)
                p.grad = None
        if not self.recipe.stored:
            self._open[-1].enter_context(plain_torch())  # an update in FP32 needs no emulation, which takes longer

    def _after_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._open.pop().close()
        with plain_torch():
            if self._updates is not None:
                self._updates.end(optimizer)
            if self._broken is None and not self.result.skipped and not all(map(all_finite, self._parameters.values())):
                self._broken = f"the update of {type(optimizer).__name__}, from finite gradients"


def _loss_of(value: Any, losses: list[float]) -> float:
    """The loss that a step returns, otherwise the sum of those on which it called `backward`."""
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
        value = float(value.detach())
    return value if isinstance(value, float) else sum(losses) if losses else math.nan
