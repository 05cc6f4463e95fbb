"""Runs the user's step under one recipe in a forked process, where patches of torch and of the model need not be undone,
and measures it."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..artefact.applying import apply_plan
from ..capture.emulation import emulate
from ..capture.intercept import intercept
from ..capture.regions import clear_weight_casts, written_as_meant
from ..errors import AuditorError, LoadError
from ..isolation.answer import lowered_batch
from ..isolation.members import without_wrappers
from ..isolation.process import disable_compilers, ieee, process_state, reseed, swap_attribute
from ..isolation.tensors import plain_torch
from ..loading.target import call, required_arguments
from ..numerics.casting import widen
from ..numerics.entries import all_finite, dense, over_tensors, tensors_in
from ..numerics.formats import dtype_of
from ..numerics.metrics import output_error
from ..processes import supervise
from ..training.blame import Trail, blame
from ..training.step import LOSS
from .remedies import REMEDIES, ROUNDINGS
from .result import FP32, NonFiniteStep, ParameterSeries, Recipe, RecipeRun

LOOKS = 24
"""Maximum number of sampled steps, in which gradients are compared with FP32's and updates are measured."""
BLAMED = 4
"""Maximum number of non-finite steps that are run again to find the operation that causes Inf or NaN."""
SCALING = (2.0, 0.5, 2000)
"""GradScaler's defaults: growth factor, backoff factor, and number of finite steps until the scale grows."""
SECOND_MOMENTS = ("exp_avg_sq", "square_avg")
DECOUPLED = ("Adafactor", "Muon")
"""Optimizers of torch whose weight decay multiplies the weights, although their parameter groups lack the flag
`decoupled_weight_decay`."""
STUCK = 0.01
"""Relative distance to the squared gradient below which a second moment need not change."""
_Autocast = torch.amp.autocast_mode.autocast


def bad_step(message: str) -> LoadError:
    """The error for a step that cannot be rehearsed."""
    return LoadError(message, slug="bad-step")


def call_forked(work: Callable[[Callable[[str], None]], Any], hear: Callable[[str], object] = str) -> Any:
    """Call `work(tell)` in a forked process without output; return its value. hear: called with each message that `work`
    passes to `tell`. Raises: AuditorError if `work` raises, or its process is killed; CallbackError if `hear` raises."""

    def answer(tell: Callable[[Any], None]) -> None:
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):  # the user's step prints the same in every recipe
            os.dup2(null, stream)
        torch.set_num_threads(1)  # threads do not survive a fork
        try:
            tell((call(work, "the recipe", "bad-step", tell),))
        except LoadError as error:
            tell((error,))
        finally:
            os._exit(0)

    (done,) = supervise(answer, hear=hear)
    if isinstance(done, LoadError):
        raise done
    return done


class Session:
    """The user's step, and its runs, each in a separate process. optimizers: {id: optimizer}. root: the module with all
    parameters. own_regions: whether the step opens autocast regions. used: the optimizers that the last step called.
    """

    def __init__(self, step: Callable[..., Any]) -> None:
        every = [one for one in gc.get_objects() if issubclass(type(one), nn.Module | Optimizer)]
        self.optimizers = {id(one): one for one in every if "param_groups" in vars(one)}
        self.root, self.own_regions, self.used = nn.Module(), False, set[int]()
        self._step, self._modules = step, [m for m in every if isinstance(m, nn.Module) and "_modules" in vars(m)]
        self._calls: list[str] = []  # names of the modules that are being called, innermost last
        self._in_pass = self._casts_inputs = False
        self._losses, self.recipe = list[float](), FP32
        self._sampled, self._gradients = False, dict[str, Any]()  # whether a step is measured, and its gradients
        self._broken: str | None = None  # in a non-finite step: the operation to blame, "" if unknown

    def narrow(self) -> None:
        """Keep the optimizers that the last step used. The root is the module with their parameters, or a list of
        several."""
        self.optimizers = {number: one for number, one in self.optimizers.items() if number in self.used}
        left, roots = {*self.group_numbers}, dict[str, nn.Module]()
        for module in sorted(self._modules, key=lambda m: -sum(1 for _ in m.modules())):
            if own := left.intersection(module.parameters()):
                roots[f"{type(module).__name__}{len(roots)}"] = module
                left -= own
        if bare := [p for p in self.group_numbers if p in left and isinstance(p, nn.Parameter)]:
            roots[f"ParameterList{len(roots)}"] = nn.ParameterList(bare)
        self.root = nn.ModuleDict(roots) if len(roots) > 1 else next(iter(roots.values()), nn.Module())

    @property
    def group_numbers(self) -> dict[nn.Parameter, int]:
        """The optimizers' parameters, each with the number of its group."""
        groups = ((n, group) for one in self.optimizers.values() for n, group in enumerate(one.param_groups))
        return {p: n for n, group in groups for p in group["params"]}

    def run(
        self, recipe: Recipe, batches: Iterator[tuple[int, Any]], steps: int, seed: int, tell: Callable[[str], None]
    ) -> tuple[RecipeRun, set[int], bool]:
        """Run up to `steps` steps: the run ends with the batches, and without a loss scale with the first non-finite
        step. Returns the results, `used` and `own_regions`."""
        reseed(seed)
        self._prepare(recipe)
        result, samples = self.result, {i * (steps - 1) // (LOOKS - 1) for i in range(LOOKS)}
        fp32, scale, finite = dict[str, Any](), torch.tensor(recipe.scale or 1.0), torch.zeros((), dtype=torch.int32)
        for step in range(steps):
            number, batch = call(next, f"before step {step}, the batches", "bad-step", batches, (-1, None))
            if number < 0:
                break
            result.batches = max(result.batches, number + 1)
            self._sampled, self._gradients = step in samples, {}
            if self._sampled and recipe.format != "fp32":
                fp32 = {}
                with suppress(AuditorError):
                    fp32 = call_forked(partial(self._run_shadow, batch))
            restart = process_state()
            where = f"in step {step} (batch {number}), the step"
            result.losses.append(call(self._call_step, where, "bad-step", batch))
            if self._sampled:
                fp32 = measure_gradients(result, step, self._gradients, fp32)
            if self._broken is not None:
                blamed = self._broken, None
                if not self._broken and len(result.skipped) < BLAMED:
                    with suppress(AuditorError):
                        blamed = call_forked(partial(self._search, batch, restart))
                result.skipped.append(NonFiniteStep(step, number, result.scale, *blamed))
            tell(f"step {step}, loss {result.losses[-1]}")
            if result.scale is None and result.skipped:
                break
            if result.scale is not None:
                torch._amp_update_scale_(scale, finite, torch.tensor(float(self._broken is not None)), *SCALING)
                result.scale = float(scale)
        return result, self.used, self.own_regions

    def _call_step(self, batch: Any, handler: Trail | None = None) -> float:
        """Call the user's step with a batch (as one argument, several, or none, as its signature requires), in FP32 or in
        emulated CUDA; the step's autocast regions get the recipe's dtype. Returns the step's loss; if it returns none,
        the sum of the losses on which it called `backward`."""
        recipe, dtype, names = self.recipe, dtype_of(self.recipe.format), required_arguments(self._step)
        self._losses, self._broken, self.used = [], None, set()
        regional = recipe.format != "fp32" and not recipe.stored and not recipe.loss_in_fp32
        emulated = written_as_meant() if recipe.format == "fp32" else emulate("cuda")
        with ieee(), disable_compilers(), emulated if handler is None else intercept(handler):
            enter = vars(_Autocast)["__enter__"]

            def enter_region(region: Any) -> Any:
                if not self._calls and not self._in_pass and getattr(region, "_meant", region._enabled):
                    self.own_regions = True
                    region._enabled = region._meant = regional
                    region.fast_dtype = dtype if regional else region.fast_dtype
                return enter(region)

            around = torch.autocast("cuda", dtype=dtype) if regional and not self.own_regions else nullcontext()
            with around, swap_attribute(_Autocast, "__enter__", enter_region):
                value = self._step(*(batch if len(names) > 1 else [batch][: len(names)]))
        if isinstance(value, torch.Tensor) and value.numel() == 1 and value.is_floating_point():
            value = float(value.detach())
        return value if isinstance(value, float) else sum(self._losses) if self._losses else math.nan

    def _run_shadow(self, batch: Any, tell: object) -> dict[str, Any]:
        """FP32's gradients of this step, from the same state, as NumPy arrays, which a pipe can pass on."""
        self._convert(FP32)
        self._call_step(batch)
        return {name: gradient.numpy() for name, gradient in self._gradients.items()}

    def _search(self, batch: Any, restart: Callable[[], None], tell: object) -> tuple[str, str | None]:
        """The operation that makes a step non-finite, and its module, see `blame`."""

        def run(trail: Trail, is_low: bool) -> None:
            restart()
            for p in self.group_numbers:
                p.grad = None
            if not is_low:
                self._convert(FP32)
            self._call_step(batch, trail)

        return blame(run, lambda: (self._calls or [LOSS])[-1], Session._call_step.__code__)

    def _prepare(self, recipe: Recipe) -> None:
        """Convert the model and the optimizers as the recipe requires, and replace functions of torch."""
        trained = self.group_numbers
        self._names = {id(module): without_wrappers(path) for path, module in self.root.named_modules()}
        parameters = ((without_wrappers(path), p) for path, p in self.root.named_parameters())
        self._parameters = {p: name for name, p in parameters if p in trained and p.numel()}
        series = {name: ParameterSeries(p.numel(), trained[p]) for p, name in self._parameters.items()}
        self.result = RecipeRun(recipe, parameters=series)
        self._convert(recipe)
        for name, optimizer in product(recipe.remedies, self.optimizers.values()):
            REMEDIES[name][1](optimizer)
        updates: list[Iterator[None]] = []  # that have begun

        def begin(*update: Any) -> None:
            updates.append(self._update(*update))
            next(updates[-1])

        register_optimizer_step_pre_hook(begin)
        register_optimizer_step_post_hook(lambda *_: next(updates.pop(), None))
        called = nn.Module.__call__
        nn.Module.__call__ = lambda module, *a, **k: self._call(called, module, *a, **k)  # type: ignore[method-assign]
        engine: Any = torch.autograd  # its `backward` and `grad` both call this function
        engine._engine_run_backward = partial(self._run_backward, engine._engine_run_backward)
        # The user's scalers are disabled, since this session scales.
        torch.amp.grad_scaler.GradScaler._enabled = property(lambda self: False, lambda self, value: None)  # type: ignore

    def _convert(self, recipe: Recipe) -> None:
        """Switch this process to a recipe: convert weights, buffers and optimizer state now, and inputs of outermost
        modules in later steps; apply the recipe's scopes, or remove those of another recipe."""
        scopes = recipe.scopes or ({"": {"precision": "fp32"}} if self.recipe.scopes else {})
        self.recipe, self.result.scale = recipe, recipe.scale
        dtype = dtype_of(recipe.format) if recipe.stored else torch.float32
        if recipe.name != "as_written" and any(p.dtype is not dtype for p in self._parameters):
            self._casts_inputs = True
            # `root.to` would make complex tensors real.
            self.root._apply(lambda x: x.to(dtype) if x.is_floating_point() else x)  # type: ignore[no-untyped-call]
            for optimizer in self.optimizers.values():
                groups = optimizer.param_groups
                optimizer.load_state_dict(optimizer.state_dict())  # which casts the state to the dtypes of the weights
                optimizer.param_groups = groups  # to which the step may refer
        if scopes:
            # Each module in a container, which is itself not called, gets the scope of the root.
            parts = self.root if isinstance(self.root, nn.ModuleDict) and "" in scopes else ()
            scopes = {**dict.fromkeys(parts, scopes.get("")), **scopes}
            apply_plan(self.root, {"strategy": "autocast", "format": recipe.format, "scopes": scopes})

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

    def _run_backward(self, original: Callable[..., Any], roots: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
        """Run torch.autograd's `backward` or `grad` at the loss scale, outside autocast. gradients: of the roots.

        Gradients of earlier passes are scaled too; a power of two changes no digits. Inside a pass (activation
        checkpoints, custom Functions), the original is called unchanged.
        """
        if self._in_pass:
            return original(roots, gradients, *args, **kwargs)
        if kwargs["accumulate_grad"]:
            self.result.backward_passes += not self.result.losses
            self._losses += [float(x.detach()) for x in tensors_in(roots) if x.numel() == 1]
        scale, self._in_pass = torch.full((), self.result.scale or 1.0), True
        with torch.autocast("cuda", enabled=False):
            self._multiply_gradients(scale)
            result = original(roots, over_tensors(lambda x: x * scale, gradients), *args, **kwargs)
            self._multiply_gradients(1 / scale)
        self._in_pass = False
        if not self.own_regions:  # a user would leave the region around the forward pass
            clear_weight_casts()
        return over_tensors(lambda x: x / scale, result)

    def _multiply_gradients(self, factor: torch.Tensor) -> None:
        with plain_torch():
            for p in self.group_numbers if factor != 1 else ():
                if p.grad is not None:
                    p.grad.mul_(factor)

    def _update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Iterator[None]:
        """Yield once, for one `step()` of an optimizer. If gradients are not finite, the optimizer gets none, as with a
        GradScaler. In an FP32 step for comparison (`_run_shadow`), the last optimizer gets none either."""
        run, kind = self.result, type(optimizer).__name__
        if id(optimizer) not in self.optimizers:
            advice = "create model and optimizers before the rehearsal, and call every optimizer in the first step"
            raise bad_step(f"the step creates its own {kind}, or calls it only in later steps: {advice}")
        if any(map(callable, (*args, *kwargs.values()))):
            advice = "which may run the model repeatedly: rehearse another optimizer"
            raise bad_step(f"{kind}.step gets a closure, {advice}")
        self.used.add(id(optimizer))
        is_last, in_fp32 = self.used == {*self.optimizers}, not {*run.recipe.remedies}.isdisjoint(ROUNDINGS)
        own = [(group, p) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        with torch.autocast("cuda", enabled=False), ExitStack() as stack:
            with plain_torch():
                finite = all(all_finite(p.grad) for _, p in own)
                for group, p in own if finite and self._sampled else ():
                    name = self._parameters.get(p)
                    if name is not None and name not in self._gradients:  # else measured in an earlier update
                        self._gradients[name] = dense(p.grad.detach()).to(torch.float32, copy=True).flatten()
                        stack.enter_context(measure_update(run.parameters[name], optimizer, group, p, in_fp32))
                for _, p in own if not finite or (self.recipe is not run.recipe and is_last) else ():
                    stack.callback(setattr, p, "grad", p.grad)
                    p.grad = None
            # An update in FP32 needs no emulation, which takes longer.
            with nullcontext() if self.recipe.stored else plain_torch():
                yield
        with plain_torch():
            if not finite:
                self._broken = self._broken or ""
            elif self._broken is None and not all(map(all_finite, self._parameters)):
                self._broken = f"the update of {kind}, from finite gradients"


@contextmanager
def measure_update(
    series: ParameterSeries, optimizer: Optimizer, group: Mapping[str, Any], p: nn.Parameter, in_fp32: bool
) -> Iterator[None]:
    """Compare a parameter before and after the `with` block, in which the optimizer updates it. in_fp32: whether a
    remedy updates the parameter in FP32; the stored weight then does not show single updates. How weight decay acts is
    unknown for optimizers outside torch."""
    grad, before, kind = dense(p.grad.detach()), p.detach().clone(), type(optimizer)  # type: ignore[union-attr]
    moved, moment, moving = grad != 0, _second_moment(optimizer, p), grad
    series.zero_gradient.append(1 - int(moved.count_nonzero()) / p.numel())
    decay, rate, exact = group.get("weight_decay") or 0.0, group.get("lr", 0.0), before.float() if in_fp32 else before
    if group.get("decoupled_weight_decay", kind.__name__ in DECOUPLED):
        still = exact * (1 - float(rate) * float(decay)) == exact
    else:
        still = grad + float(decay) * exact.to(grad.dtype) == grad
    decays = bool(decay and rate and kind.__module__.startswith("torch.optim"))
    series.decay_lost.append(_share(still, before != 0) if decays else None)
    if moment is not None:
        moment, moving = moment.clone(), (grad.float() ** 2 - moment).abs_() > STUCK * moment.float()
    yield
    with plain_torch():
        now = _second_moment(optimizer, p)
        series.updates_lost.append(None if in_fp32 else _share(p == before, moved))
        series.second_moment_stuck.append(None if moment is None or now is None else _share(now == moment, moving))
        series.second_moment_zero.append(None if now is None else _share(now == 0, moved))


def measure_gradients(run: RecipeRun, step: int, gradients: dict[str, Any], fp32: dict[str, Any]) -> dict[str, Any]:
    """Record the relative L2 errors of a step's gradients: of all parameters together, and of each; None if FP32's are
    unknown or zero. gradients: {parameter: its gradient in FP32, flat}. fp32: the same of an FP32 step with equal
    weights; in an FP32 run, of the last sampled step. Returns the last known gradient of every parameter."""
    of_two = math.sqrt(2) if run.recipe.format == "fp32" else 1.0  # both batches' gradients scatter

    def error(names: list[str]) -> float | None:
        known = {name: torch.as_tensor(fp32[name]) for name in names if name in fp32}
        exact = output_error([*known.values()], [gradients[name] for name in known]) / of_two
        return exact if any(bool(x.any()) for x in known.values()) else None

    if gradients:
        run.steps.append(step)
        run.errors.append(error([*gradients]))
    for name in gradients:
        run.parameters[name].error.append(error([name]))
    return fp32 | gradients


def _second_moment(optimizer: Optimizer, p: nn.Parameter) -> torch.Tensor | None:
    return next((v for k, v in optimizer.state.get(p, {}).items() if k in SECOND_MOMENTS), None)


def _share(flags: torch.Tensor, among: torch.Tensor) -> float | None:
    """The share of the entries in the mask `among` whose flag is set; None if the mask is empty."""
    whole = int(among.count_nonzero())
    return int((flags & among).count_nonzero()) / whole if whole else None
