"""Finds what the user's step trains, runs the step under each recipe in a forked process, and measures it."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import Optimizer

from ...emulation.intercept import Handler
from ...errors import AuditorError, LoadError
from ...isolation.members import is_plainly_low, without_wrappers
from ...isolation.process import reseed
from ...loading.target import call
from ...numerics.devices import NATIVE
from ...numerics.entries import all_finite, tensors_in
from ...training.blame import NonFiniteTrace, Trail, blame
from ...training.step import LOSS
from .byhand import judge_additions, judge_by_hand, judge_terms
from .forked import bad_step, call_forked
from .given import name_tensors, named_tensors
from .losing import Results, Sketching, find_origin, first_off_step
from .lowstate import LowState
from .measuring import in_fp32, move_by_last_bit, record_errors, record_rounding, record_update
from .owncasts import OwnCasts
from .result import AS_WRITTEN, FP32, SCALED, LossOrigin, NonFiniteStep, Recipe, RecipeRun, StepFinding
from .runner import StepRunner, parameters_of
from .storage import Storage, stores_low
from .trials import (
    APART,
    TRIALS,
    Trace,
    Trial,
    are_comparable,
    compare_scalers,
    compare_scales,
    judge_copies_kept,
    judge_overflow,
    set_scales,
    trial_scale,
)

LOOKS = 24
"""Maximum number of sampled steps, in which gradients are compared with FP32's and updates are measured."""
FIRST = 32
"""Maximum number of steps until the first update, since a step may accumulate gradients over its calls."""
BLAMED = 4
"""Maximum number of non-finite steps that are run again to find the operation that causes Inf or NaN."""
OUTERMOST = StepRunner._call_step.__code__
"""The function whose callers are not the step's code."""


@dataclass
class Search:
    """A run that searches for operations to blame. blamed: {step whose Inf or NaN is searched: the operation, its module}.
    off: the step at whose loss the error is searched, None without one; origin: where that error begins."""

    trail: Trail
    blamed: dict[int, tuple[str, str | None]]
    off: int | None
    origin: LossOrigin | None = None


def _root_of(modules: Iterable[nn.Module], trained: Mapping[Any, int]) -> nn.Module:
    """The module with all trained parameters, or a ModuleDict of several modules and a list of parameters in none."""
    left = {*trained}
    roots = dict[str, nn.Module]()
    # the largest modules first, since these contain the others
    for module in sorted(modules, key=lambda m: -sum(1 for _ in m.modules())):
        own = left.intersection(module.parameters())
        if own:
            roots[f"{type(module).__name__}{len(roots)}"] = module
            left -= own
    bare = [p for p in trained if p in left and isinstance(p, nn.Parameter)]
    if bare:
        roots[f"ParameterList{len(roots)}"] = nn.ParameterList(bare)
    if len(roots) > 1:
        return nn.ModuleDict(roots)
    return next(iter(roots.values()), nn.Module())


def _computing_path(path: str, modules: Mapping[str, nn.Module]) -> str:
    """The path of a module, or if it is a list or a dictionary of parameters, of the module around it. modules: {path:
    module}."""
    while path and isinstance(modules[path], nn.ParameterList | nn.ParameterDict):
        path = path.rpartition(".")[0]
    return path


class Session(StepRunner):
    """The user's step, and its runs, each in a separate process. optimizers: those that the first step calls.
    copied_dtypes: of parameters with gradients that no optimizer has, such as the FP16 copies of FP32 weights. scalers:
    the GradScalers that the first step calls, unless they are disabled. Raises: LoadError(slug="bad-step") for a step
    that cannot be rehearsed.

    batches: returns an iterator over (number of the batch, batch). seed: of the generators at the start of each run.
    """

    def __init__(self, step: Callable[..., Any], batches: Callable[[], Iterator[tuple[int, Any]]], seed: int) -> None:
        every = [one for one in gc.get_objects() if issubclass(type(one), nn.Module | Optimizer | GradScaler)]
        super().__init__(step, {id(one): one for one in every if "param_groups" in vars(one)})
        self._batches = batches
        self._seed = seed
        self._called = list[nn.Module]()
        self._search_at: Search | None = None  # of a run that searches for the operations to blame
        # ids of all called optimizers and modules, in the run until the first update
        self._looked: set[int] | None = set()
        self._period = 1  # number of steps until the first update
        modules = [one for one in every if isinstance(one, nn.Module) and "_modules" in vars(one)]
        scalers = {id(one): one for one in every if isinstance(one, GradScaler)}

        # The steps until the first update run in a process of their own, and tell which of these objects they use.
        given = (p for one in self.optimizers.values() for p in parameters_of(one))
        every_trained = nn.ParameterList(p for p in given if isinstance(p, nn.Parameter))
        low = [one for one in (*modules, every_trained) if stores_low(one)]
        self._storage = Storage(low, (), self._variables())
        self._casts = OwnCasts(Handler(), torch.float32)
        looked = call_forked(partial(self._look, modules, set(scalers)))
        used, self.own_regions, self.low_regions, scaler_ids, makes_scaler, with_gradients, casts, self._period = looked
        self._looked = None
        if not casts:
            self._casts = None

        called_scalers = [one for number, one in scalers.items() if number in scaler_ids]
        self.scalers = [one for one in called_scalers if one._enabled or self._is_switched_off(one)]
        self.has_scaler = bool(self.scalers) or makes_scaler
        if used.isdisjoint(self.optimizers):
            said = f"the first {FIRST} steps call no optimizer's step(): give a function that runs one whole step"
            raise bad_step(said)
        self.optimizers = {number: one for number, one in self.optimizers.items() if number in used}
        trained = dict[Any, int]()  # {parameter: number of its group}
        for optimizer in self.optimizers.values():
            for number, group in enumerate(optimizer.param_groups):
                for p in group["params"]:
                    trained[p] = number
        self.trained = trained
        self.root = _root_of(modules, trained)
        self._called = [one for one in modules if id(one) in used]
        graded = (p for one in self._called for p in one.parameters() if id(p) in with_gradients)
        self.copied_dtypes = {p.dtype for p in graded if p not in trained}
        self._storage = Storage((self.root, *self._called), trained, self._variables())
        self._paths = {module: without_wrappers(path) for path, module in self.root.named_modules()}
        self._parameters, self._owners = self._name_parameters({*modules})
        if any(p.device.type in NATIVE for p in trained):
            raise bad_step("the model is on a GPU: move model and batches to the CPU, where a rehearsal emulates a GPU")

    def _name_parameters(self, modules: Set[nn.Module]) -> tuple[dict[torch.Tensor, str], dict[str, str]]:
        """{trained tensor: its name} and {name: path of the module that computes with it}. modules: the user's.

        A tensor that belongs to no module, such as an FP32 copy of an FP16 weight, has the name that the step gives it, or
        else that of its optimizer, and no path.
        """
        names, owners = dict[torch.Tensor, str](), dict[str, str]()
        at = {path: module for module, path in self._paths.items()}
        for path, module in at.items():
            own = module.named_parameters(recurse=False) if module in modules else ()
            for name, p in own:
                if p in self.trained and p not in names and p.numel():
                    names[p] = f"{path}.{name}" if path else name
                    owners[names[p]] = _computing_path(path, at)

        own_names = {id(x): name for name, x in named_tensors(self._step) if "param_groups" not in name}
        for number, optimizer in enumerate(self.optimizers.values()):
            for i, p in enumerate(parameters_of(optimizer)):
                if p in names or not p.numel():
                    continue
                name = own_names.get(id(p), "")
                is_free = bool(name) and name not in owners
                names[p] = name if is_free else f"{type(optimizer).__name__}{number}[{i}]"
        return names, owners

    def _variables(self) -> list[torch.Tensor]:
        """The step's own variables in FP16 or BF16."""
        return [x for _, x in named_tensors(self._step) if is_plainly_low(x) and x.is_leaf]

    def _look(
        self, modules: list[nn.Module], scalers: set[int], tell: Callable[[str], None]
    ) -> tuple[set[int], bool, set[torch.dtype], set[int], bool, set[int], bool, int]:
        """Run the steps until the first update; return ids of the optimizers and modules that they call, whether they open
        autocast regions, their low dtypes, ids of the GradScalers that they call, whether they create an enabled one, ids of
        the parameters with a gradient, whether they cast to FP16 or BF16 themselves, and their number. scalers: ids of
        those that exist before."""
        count = len(self.run(FP32, FIRST, tell).losses)
        looked = self._looked or set()
        used = self._observer.used_scalers
        makes_scaler = any(vars(one)["_enabled"] for number, one in used.items() if number not in scalers)
        called = (one for one in modules if id(one) in looked)
        with_gradients = {id(p) for one in called for p in one.parameters() if p.grad is not None}
        casts = self._casts is not None and self._casts.was_needed
        return looked, self.own_regions, self.low_regions, {*used}, makes_scaler, with_gradients, casts, count

    def run(self, recipe: Recipe, steps: int, tell: Callable[[str], None]) -> RecipeRun:
        """Run up to `steps` steps: the run ends with the batches, and without a loss scale with the first non-finite
        step. As written, an exception or ruined weights end it too. tell: called with each step and its loss as text.
        The operations to blame for a step that is not finite are searched by `explain`."""
        reseed(self._seed)
        self._prepare(recipe)
        as_written = recipe.name == AS_WRITTEN
        batches, result = self._batches(), self.result
        samples = self._samples(steps)
        fp32 = dict[str, Any]()
        scale = torch.tensor(recipe.scale or 1.0)
        finite = torch.zeros((), dtype=torch.int32)  # number of finite steps since the scale changed
        tried = list[StepFinding]()
        by_hand = list[Trial]()
        for step in range(steps):
            number, batch = call(next, f"before step {step}, the batches", "bad-step", batches, (-1, None))
            if number < 0:
                break
            result.batches = max(result.batches, number + 1)
            self._sampled = step in samples
            self._updates = {}
            exact: float | None = None
            moved = dict[str, Any]()
            if self._sampled and recipe != FP32:
                fp32 = {}
                with suppress(AuditorError):
                    fp32, exact = call_forked(partial(self._run_shadow, batch))
            elif self._sampled and step >= steps * 2 // 3:  # means are over the last third
                with suppress(AuditorError):
                    moved, _ = call_forked(partial(self._run_shadow, batch, is_moved=True))
            if as_written and self._sampled and len(result.steps) < TRIALS:
                tried += self._try(batch, step)
            if as_written and self._sampled and self._observer.scales_by_hand and len(by_hand) < TRIALS:
                tried += self._try_by_hand(batch, step, by_hand)
            if as_written:
                self._observer.begin_step(self._sampled)
                result.scale = self._observer.scale()
            if self._search_at is not None:
                self._search(self._search_at, step, batch)
            try:
                where = f"in step {step} (batch {number}), the step"
                result.losses.append(call(self._call_step, where, "bad-step", batch, self._handler()))
            except LoadError as error:
                if not as_written:
                    raise
                result.failure = str(error)
                break
            if self._updates:
                fp32 = self._measure(step, fp32, moved)
                result.exact_losses.append(exact)
            if as_written and self._observer.skipped and self._broken is None:
                self._broken = ""
            self._note_non_finite(step, number)
            tell(f"step {step}, loss {result.losses[-1]}")
            if self._looked is not None:
                self._looked |= self._used
                if not self._looked.isdisjoint(self.optimizers):
                    break
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

    def _samples(self, steps: int) -> set[int]:
        """The steps that are measured: those with an update, if gradients are accumulated over steps."""
        if self._search_at is not None:
            return set()
        every = (i * (steps - 1) // (LOOKS - 1) for i in range(LOOKS))
        of_update = (step - step % self._period + self._period - 1 for step in every)
        return {min(step, steps - 1) for step in of_update}

    def _note_non_finite(self, step: int, number: int) -> None:
        """Record a step whose gradients, weights or loss are not finite."""
        result = self.result
        if self._broken is not None:
            result.skipped.append(NonFiniteStep(step, number, result.scale, self._broken))
        elif self._has_loss and not math.isfinite(result.losses[-1]):
            result.bad_losses.append(NonFiniteStep(step, number, result.scale))

    def explain(self, run: RecipeRun) -> None:
        """Add the operations to blame to the first non-finite steps of a run, and to losses that are wrong, by a second
        run of the recipe from its start, which follows every Inf and NaN: all state of the process is then that before the
        step."""
        every = sorted((*run.skipped, *run.bad_losses), key=lambda each: each.step)
        unknown = [each.step for each in every[:BLAMED] if not each.where]
        off = first_off_step(run)
        if not unknown and off is None:
            return
        with suppress(AuditorError):
            blamed, run.loss_origin = call_forked(partial(self._follow, run.recipe, unknown, off))
            for steps in (run.skipped, run.bad_losses):
                for i, each in enumerate(steps):
                    if each.step in blamed:
                        where, module = blamed[each.step]
                        steps[i] = replace(each, where=where, module=module)

    def _follow(
        self, recipe: Recipe, steps: Sequence[int], off: int | None, tell: Callable[[str], None]
    ) -> tuple[dict[int, tuple[str, str | None]], LossOrigin | None]:
        """({step: the operation to blame, its module}, where the error of a loss begins), by running the recipe up to the
        last of the steps."""
        trail = Trail(self._module_now, OUTERMOST, self._name)
        search = self._search_at = Search(trail, dict.fromkeys(steps, ("", None)), off)
        searched = [*steps]
        if off is not None:
            searched.append(off)
        self.run(recipe, max(searched) + 1, tell)
        return search.blamed, search.origin

    def _handler(self) -> Trail | None:
        """What follows Inf and NaN through a step, if they are searched."""
        search = self._search_at
        return search.trail if search is not None and search.blamed else None

    def _search(self, search: Search, step: int, batch: Any) -> None:
        """Run the next step in processes of their own, if an operation of it is searched."""
        search.trail.begin_step(step)
        with suppress(AuditorError):
            if step in search.blamed:
                low = call_forked(partial(self._trace_step, search.trail, batch, True))
                high = NonFiniteTrace(None)
                if self.recipe != FP32:
                    high = call_forked(partial(self._trace_step, search.trail, batch, False))
                search.blamed[step] = blame(low, high)
            if step == search.off:
                results, exact = (call_forked(partial(self._sketch_step, batch, is_low)) for is_low in (True, False))
                search.origin = find_origin(results, exact)

    def _trace_step(self, trail: Trail, batch: Any, is_low: bool, tell: object) -> NonFiniteTrace:
        """Run the next step in the recipe or in FP32; returns its Inf and NaN."""
        if not is_low:
            self._convert(FP32)
        self._call_step(batch, trail)
        is_skipped = self._broken is not None or bool(self._observer.skipped)
        return trail.trace(self._loss_tensors, of_loss=not is_skipped)

    def _sketch_step(self, batch: Any, is_low: bool, tell: object) -> Results:
        """Run the next step in the recipe or in FP32; returns the results of its operations."""
        if not is_low:
            self._convert(FP32)
        sketching = Sketching(self._module_now, OUTERMOST)
        self._call_step(batch, sketching)
        return sketching.results(self._loss_tensors)

    def _module_now(self) -> str:
        """The path of the innermost module being called."""
        return next((self._paths[one] for one in reversed(self._calls) if one in self._paths), LOSS)

    def _name(self, x: torch.Tensor) -> str:
        """What the user calls a tensor from before the step; "" if unknown."""
        if any(x is one for one in tensors_in(self._batch)):
            return "the batch"
        return name_tensors(self._step, (self.root, *self._called)).get(id(x), "")

    def _measure(self, step: int, fp32: dict[str, Any], moved: Mapping[str, Any]) -> dict[str, Any]:
        """Measure a sampled step. fp32: see `record_errors`; moved: see `record_rounding`. Returns the last known gradient
        of every parameter."""
        gradients = {self._parameters[p]: update.gradient for p, update in self._updates.items()}
        record_errors(self.result, step, gradients, fp32)
        record_rounding(self.result, gradients, moved)
        for p, update in self._updates.items():
            series = self.result.parameters[self._parameters[p]]
            record_update(series, p, update, in_fp32(self.result))
        return fp32 | gradients

    def _run_shadow(self, batch: Any, tell: object, *, is_moved: bool = False) -> tuple[dict[str, Any], float | None]:
        """FP32's gradients of this step, from the same state, as NumPy arrays, which a pipe can pass on; and its loss.
        is_moved: from weights that differ in their last bit."""
        self._convert(replace(FP32))  # a recipe of its own also beside a run in FP32: it applies no update
        if is_moved:
            move_by_last_bit(self._parameters)
        loss = self._call_step(batch)
        gradients = {self._parameters[p]: update.gradient.numpy() for p, update in self._updates.items()}
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
                dependent = compare_scales(plain, scaled, scale, step)
                if dependent is None and are_comparable(plain, scaled) and self._has_several_scalers():
                    apart = call_forked(partial(self._run_trial, batch, scale, False, apart=APART))
                    dependent = compare_scalers(plain, apart, step)
                if dependent is None and are_comparable(plain, scaled):
                    self._observer.tried_lines.add(scaled.inner_line)
                    if scaled.gradients:
                        self._observer.independent_steps.add(step)
                found = self._copies_kept(scaled, step) or dependent or judge_overflow(scaled, broken, step)
                findings += [found] if found is not None else []
        return findings

    def _try_by_hand(self, batch: Any, step: int, trials: list[Trial]) -> list[StepFinding]:
        """The finding of the last two trials of a step that scales its loss by hand. trials: those before, which grow."""
        with suppress(AuditorError):
            trials.append(call_forked(partial(self._run_trial, batch, 1.0, False)))
        if len(trials) < TRIALS:
            return []
        first, second = trials[-TRIALS:]
        found = self._copies_kept(second, step)
        found = found or judge_by_hand(first, second, self._observer.scales_fp16_by_hand, step)
        found = found or judge_terms(first, second, step)
        if found is None:
            with suppress(AuditorError):
                added = call_forked(partial(self._run_trial, batch, 1.0, False, loss_factor=0.0))
                found = judge_additions(second, added, step)
        return [found] if found is not None else []

    def _copies_kept(self, trial: Trial, step: int) -> StepFinding | None:
        """The finding on gradients of copies that are never set to zero; none if several steps accumulate them."""
        return judge_copies_kept(trial, step) if self._period == 1 else None

    def _run_low_state(self, batch: Any, step: int, tell: object) -> list[StepFinding]:
        """The findings of one step as written on values in low precision, see `LowState`."""
        watch = LowState(lambda: bool(self._calls or self._running), self._observer.line)
        self._call_step(batch, watch)
        return [*watch.findings(step)]

    def _has_several_scalers(self) -> bool:
        """Whether each step begins without gradients and scales its losses by several GradScalers."""
        enabled = [one for one in self._observer.used_scalers.values() if one._enabled]
        return self._period == 1 and len(enabled) > 1

    def _run_trial(
        self, batch: Any, scale: float, breaks: bool, tell: object, *, loss_factor: float = 1.0, apart: float = 1.0
    ) -> Trial:
        """One step in FP32 with the user's GradScalers at a loss scale. breaks: whether gradients are made infinite.
        loss_factor: on each loss, in addition to the user's. apart: see `set_scales`."""
        self._convert(SCALED)
        self._loss_factor = loss_factor
        scalers = self._observer.used_scalers
        if (before := self._observer.scale()) is not None:
            self._observer.rescale(scale / before)
        set_scales(scalers.values(), scale, apart)
        self._trace = Trace(self._parameters, self.optimizers.values(), scalers.values(), self._observer.line, breaks)
        trial = self._trace.trial
        try:
            with self._trace:
                call(self._call_step, "the step", "bad-step", batch)
        except LoadError as error:
            self._trace.fail(error)
        trial.inner_line, trial.constant_line = self._observer.inner_line, self._observer.constant_line
        trial.gradients = {self._parameters[p]: update.gradient.numpy() for p, update in self._updates.items()}
        trial.changes = self._trace.changes()
        trial.weights = {
            self._parameters[p]: (float(update.weight.double().norm()), math.sqrt(p.numel()))
            for p, update in self._updates.items()
        }
        trial.scales = [(scale, float(one._scale)) for one in scalers.values() if one._scale is not None]
        return trial
