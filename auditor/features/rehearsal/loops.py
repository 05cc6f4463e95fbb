"""Training loops that exist: a step in the user's file, a LightningModule with its Trainer's arguments, and a Trainer of
transformers, as one function of a batch. Neither library is imported: their classes are known by their methods."""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ...errors import LoadError
from ...loading.target import required_arguments
from ...numerics.casting import widen
from ...numerics.entries import over_tensors
from .batches import Batches
from .layouts import methods_of, step_candidates

STEP_NAMES = ("step", "train_step", "training_step")
LIGHTNING = ("training_step", "configure_optimizers")
TRAINER = ("training_step", "create_optimizer_and_scheduler", "get_train_dataloader", "args")


TRAINER_ARGUMENTS = ("precision", "gradient_clip_val", "gradient_clip_algorithm", "accumulate_grad_batches")
"""Arguments of Lightning's Trainer that change a step."""
PRECISIONS = {"16": "16-mixed", "bf16": "bf16-mixed", "32": "32-true", "64": "64-true"}
"""Short forms of Lightning's precisions."""
DTYPES = {"16": torch.float16, "bf16": torch.bfloat16, "32": torch.float32, "64": torch.float64}


def as_step(value: Any, steps: int) -> tuple[Any, Batches]:
    """A step of a LightningModule or a Trainer, with the batches of its own loader, if any; another value as it is.

    value: also (LightningModule, its Trainer), or a dict of the Trainer's arguments in its place, which a machine without
    a GPU may refuse. steps: number of steps, for the schedule of a Trainer.
    """
    arguments: Any = None
    if isinstance(value, tuple) and len(value) == 2 and _is_lightning(value[0]):
        value, arguments = value
    if isinstance(value, type) and _is_lightning(value):
        if names := required_arguments(value):
            said = f"{value.__name__} needs arguments ({', '.join(names)})"
            example = f"{value.__name__}({', '.join(f'{name}=...' for name in names)})"
            raise LoadError(f"{said}: give them as '{example}', or name a LightningModule that exists", "bad-step")
        value = value()
    if _is_lightning(value):
        step = LightningStep(value, arguments)
        return step, step.batches()
    if _is_trainer(value):
        trained = TrainerStep(value, steps)
        return trained, trained.batches
    return value, None


def with_trainer(value: Any, module: ModuleType) -> Any:
    """A LightningModule, or its class, with the arguments of Lightning's Trainer in its file; another value as it is.

    The arguments are literals of the only call `Trainer(...)` in the file, which may be inside a function or below
    `if __name__ == "__main__"`; else those of a Trainer, or a dict, called `trainer`.
    """
    if not _is_lightning(value):
        return value
    written = _written_arguments(module)
    made = getattr(module, "trainer", None)
    arguments = written or (made if isinstance(made, Mapping) or hasattr(made, "accumulate_grad_batches") else None)
    return value if arguments is None else (value, arguments)


def _written_arguments(module: ModuleType) -> dict[str, Any]:
    """The literal arguments of the only call `Trainer(...)` in a file that change a step."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return {}
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and _called(node) == "Trainer"]
    if len(calls) != 1:
        return {}
    keywords = {one.arg: one.value for one in calls[0].keywords if one.arg in TRAINER_ARGUMENTS}
    return {name: value.value for name, value in keywords.items() if name and isinstance(value, ast.Constant)}


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def find_step(module: ModuleType, label: str, script: str) -> str:
    """The name of the only training step in a file: a function called `step`, `train_step` or `training_step`; else the
    only function that runs one step (see `step_candidates`), LightningModule or Trainer, or such a method of an object.
    Raises: LoadError(slug="missing-target")."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {name: value for name, value in public.items() if getattr(value, "__module__", None) == module.__name__}
    functions = {name: value for name, value in own.items() if inspect.isfunction(inspect.unwrap(value))}
    if named := [name for name in STEP_NAMES if name in functions]:
        return named[0]
    loops = [name for name, value in public.items() if _is_trainer(value) or _is_lightning(value)]
    loops = [name for name in loops if name in own or not isinstance(public[name], type)]
    found, whole = step_candidates(functions)
    others = {name: value for name, value in public.items() if name not in loops and not inspect.isclass(value)}
    candidates = [*found, *loops, *methods_of(others, STEP_NAMES)]
    if len(candidates) == 1 and "(" not in candidates[0]:
        return candidates[0]
    if candidates:
        listed = " or ".join(f"{script}:{name}" for name in candidates)
        said = "has several training steps: name one"
        if len(candidates) == 1:
            said = "has a function that makes a step: name it with its call"
        raise LoadError(f"{label} {said}, {listed}", "missing-target")
    advice = "define step(batch), which runs forward, backward and the optimizer's step once"
    if whole:
        said = f"{whole[0]}() runs a whole training: move the body of its loop to a function"
        raise LoadError(f"{label} has no training step, {said}: {advice}", "missing-target")
    listed = f" (its functions: {', '.join(functions)})" if functions else ""
    raise LoadError(f"{label} has no training step{listed}: {advice}", "missing-target")


class LightningStep:
    """One update of a LightningModule, as Lightning's loop runs it: for each micro-batch `training_step` in the region of
    the precision, and `backward`; then clipping, and the optimizers' and the schedules' `step`. With manual optimization,
    `training_step` calls these itself.

    trainer: Lightning's Trainer, or a dict of its arguments: precision, gradient_clip_val, gradient_clip_algorithm,
    accumulate_grad_batches. With a precision such as "16-true", a converted copy of the module is trained.
    Raises: LoadError(slug="bad-step") for an unknown precision.
    """

    def __init__(self, module: Any, trainer: Any = None) -> None:
        arguments = _arguments_of(trainer)
        given = str(arguments.get("precision") or "32-true")
        precision = PRECISIONS.get(given, given)
        width, _, kind = precision.partition("-")
        if width not in DTYPES or kind not in ("mixed", "true"):
            known = ", ".join(f"{one}-mixed or {one}-true" for one in ("16", "bf16"))
            raise LoadError(f"a rehearsal does not know the precision {given!r} of Lightning: give {known}", "bad-step")
        self._region = DTYPES[width] if kind == "mixed" else None
        self._casts = precision in ("16-true", "bf16-true", "64-true")
        if self._casts:
            module = copy.deepcopy(module).to(DTYPES[width])
        self.module, self._numbers = module, itertools.count()
        self.scaler = GradScaler("cpu") if precision == "16-mixed" else None
        self._limit = arguments.get("gradient_clip_val")
        self._algorithm = str(arguments.get("gradient_clip_algorithm") or "norm").rpartition(".")[2].lower()
        self.count = int(arguments.get("accumulate_grad_batches") or 1)
        self.optimizers, schedules = _configured(module.configure_optimizers())
        self.schedulers = [one["scheduler"] for one in schedules]
        # by default, Lightning steps a schedule after each epoch, which a rehearsal does not know
        self._of_steps = [one["scheduler"] for one in schedules if one.get("interval") == "step"]

    def batches(self) -> Batches:
        """The batches of the module's own loader, if any: lists of micro-batches if gradients are accumulated."""
        loader = getattr(self.module, "train_dataloader", None)
        if not callable(loader) or _is_of_lightning(loader):
            return None
        return self.grouped(loader) if self.count > 1 else loader

    def grouped(self, batches: Any) -> Callable[[], Iterator[list[Any]]]:
        """The micro-batches of each update, from batches as a Trainer gets them."""

        def groups() -> Iterator[list[Any]]:
            made = iter(batches() if callable(batches) else batches)
            while micro_batches := list(itertools.islice(made, self.count)):
                yield micro_batches

        return groups

    def __call__(self, batch: Any) -> Any:
        """Run one update; returns the loss, or None if `training_step` returns none.

        batch: a list of micro-batches if gradients are accumulated.
        """
        self.module.train()
        is_automatic = getattr(self.module, "automatic_optimization", True)
        self._attach()
        if not is_automatic:
            return self._training_step(batch)
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        losses = [self._training_step(one) for one in (batch if self.count > 1 else [batch])]
        losses = [loss / self.count for loss in losses if loss is not None]
        for loss in losses:
            self._backward(loss)
        for optimizer in self.optimizers if losses else ():
            self._update(optimizer, clips=True)
        for scheduler in self._of_steps if losses else ():
            scheduler.step()
        return sum(loss.detach() for loss in losses) if losses else None

    def _training_step(self, batch: Any) -> Any:
        """The loss of one micro-batch, None without one."""
        region = nullcontext() if self._region is None else torch.autocast("cuda", self._region)
        if self._casts:
            dtype = next((p.dtype for p in self.module.parameters() if p.is_floating_point()), torch.float32)
            batch = over_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, batch)
        arguments = (batch, next(self._numbers))
        with region:
            value = self.module.training_step(*arguments[: max(len(required_arguments(self.module.training_step)), 1)])
        return value.get("loss") if isinstance(value, Mapping) else value

    def _backward(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        scaled = loss if self.scaler is None else self.scaler.scale(loss)
        with torch.autocast("cuda", enabled=False):  # Lightning keeps its region open in manual optimization
            scaled.backward(*args, **kwargs)

    def _update(self, optimizer: Any, clips: bool = False) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if clips:
            self._configure_clipping(optimizer)
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()

    def _configure_clipping(self, optimizer: Any) -> None:
        """Clip as the Trainer's arguments ask, or as the module's own `configure_gradient_clipping` does."""
        own = getattr(self.module, "configure_gradient_clipping", None)
        if own is None or _is_of_lightning(own):
            self._clip(optimizer, self._limit, self._algorithm)
        else:
            own(optimizer, gradient_clip_val=self._limit, gradient_clip_algorithm=self._algorithm)

    def _clip(self, optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: Any = None) -> None:
        limit = self._limit if gradient_clip_val is None else gradient_clip_val
        algorithm = str(gradient_clip_algorithm or self._algorithm).rpartition(".")[2].lower()
        if limit is None or limit <= 0:
            return
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        clip = nn.utils.clip_grad_value_ if algorithm == "value" else nn.utils.clip_grad_norm_
        clip(parameters, float(limit))

    def _attach(self) -> None:
        """Give the module the methods that need a Trainer; this runs in the process of a recipe."""
        optimizers = [_ManualOptimizer(one, self._update) for one in self.optimizers]
        methods: dict[str, Any] = {"clip_gradients": self._clip}
        if not getattr(self.module, "automatic_optimization", True):
            methods |= {
                "optimizers": lambda *args, **kwargs: _one_or_all(optimizers),
                "lr_schedulers": lambda: _one_or_all(self.schedulers) if self.schedulers else None,
                "manual_backward": self._backward,
            }
        vars(self.module).update(methods)


class _ManualOptimizer:
    """The optimizer that Lightning's `self.optimizers()` returns: `step` goes through the GradScaler if there is one."""

    def __init__(self, optimizer: Any, update: Callable[[Any], None]) -> None:
        self.optimizer, self._update = optimizer, update

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        """Update the weights, through the GradScaler if there is one."""
        self._update(self.optimizer)


class TrainerStep:
    """One update of a Trainer of transformers, with its loss, optimizer, schedule, accumulation, clipping and precision. A
    copy of the Trainer is used: the caller's has no optimizer afterwards, if it had none.

    `fp16` and `bf16` of its arguments act as on a GPU: accelerate runs the model's forward under autocast.
    """

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = copy.copy(trainer)
        self.trainer.create_optimizer_and_scheduler(num_training_steps=steps)
        asked = (dtype for name, dtype in _OF_ARGUMENTS.items() if getattr(trainer.args, name, False))
        self._region = next(asked, None)
        self.scaler: Any = None
        if self._region is torch.float16 and hasattr(trainer, "accelerator"):
            self.scaler = GradScaler("cpu")
            self.trainer.accelerator = copy.copy(trainer.accelerator)
            self.trainer.accelerator.scaler = self.scaler

    def batches(self) -> Iterator[list[Any]]:
        """The micro-batches of each update."""
        loader = iter(self.trainer.get_train_dataloader())
        count = max(int(self.trainer.args.gradient_accumulation_steps), 1)
        while micro_batches := list(itertools.islice(loader, count)):
            yield micro_batches

    def __call__(self, micro_batches: list[Any]) -> Any:
        """Run one update; returns its loss."""
        trainer, count = self.trainer, len(micro_batches)
        model, arguments = trainer.model, tuple[Any, ...]()
        trainer.current_gradient_accumulation_steps = count
        if len(inspect.signature(trainer.training_step).parameters) > 2:  # the number of labels, for the loss's mean
            micro_batches, number = trainer.get_batch_samples(iter(micro_batches), count, trainer.args.device)
            arguments = (number,)
        with nullcontext() if self._region is None else _low_forward(model, self._region):
            losses = [trainer.training_step(model, inputs, *arguments) for inputs in micro_batches]
        if self.scaler is not None:
            self.scaler.unscale_(trainer.optimizer)
        if (limit := trainer.args.max_grad_norm) is not None and limit > 0:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        if self.scaler is None:
            trainer.optimizer.step()
        else:
            self.scaler.step(trainer.optimizer)
            self.scaler.update()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        return sum(losses)


@contextmanager
def _low_forward(model: nn.Module, dtype: torch.dtype) -> Iterator[None]:
    """In the `with` block, the model's forward runs under autocast and returns FP32, as accelerate prepares it."""
    forward = model.forward

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cuda", dtype):
            outputs = forward(*args, **kwargs)
        return widen(outputs)

    model.forward = run
    try:
        yield
    finally:
        del model.forward


_OF_ARGUMENTS = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""Dtypes of a Trainer's autocast region, by the argument that asks for it."""


def _arguments_of(trainer: Any) -> dict[str, Any]:
    """The arguments of Lightning's Trainer that change a step, from the Trainer or a dict."""
    if trainer is None or isinstance(trainer, Mapping):
        return dict(trainer or {})
    return {name: getattr(trainer, name, None) for name in TRAINER_ARGUMENTS}


def _is_of_lightning(method: Any) -> bool:
    return getattr(method, "__module__", "").partition(".")[0] in ("lightning", "pytorch_lightning")


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _is_lightning(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, nn.Module) and all(callable(getattr(kind, name, None)) for name in LIGHTNING)


def _is_trainer(value: Any) -> bool:
    return not isinstance(value, type | ModuleType) and all(hasattr(value, name) for name in TRAINER)


def _configured(value: Any) -> tuple[list[Any], list[Mapping[str, Any]]]:
    """The optimizers, and the settings of the schedules, in every form that `configure_optimizers` may return."""
    if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(part, tuple | list) for part in value):
        optimizers, schedules = value
    elif isinstance(value, Mapping):
        optimizers, schedules = [value["optimizer"]], [value.get("lr_scheduler")]
    elif isinstance(value, tuple | list):
        entries = [one if isinstance(one, Mapping) else {"optimizer": one} for one in value]
        optimizers = [one["optimizer"] for one in entries]
        schedules = [one.get("lr_scheduler") for one in entries]
    else:
        optimizers, schedules = [] if value is None else [value], []
    settings = [one if isinstance(one, Mapping) else {"scheduler": one} for one in schedules if one is not None]
    return list(optimizers), settings
