"""Training loops that exist: a step in the user's file, a LightningModule, and a Trainer of transformers, as one function
of a batch. Neither library is imported: their classes are known by their methods."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ..errors import LoadError
from ..loading.target import required_arguments
from .batches import Batches

STEP_NAMES = ("step", "train_step", "training_step")
LIGHTNING = ("training_step", "configure_optimizers")
TRAINER = ("training_step", "create_optimizer_and_scheduler", "get_train_dataloader", "args")


def as_step(value: Any, steps: int) -> tuple[Any, Batches]:
    """A step of a LightningModule or a Trainer, with the batches of its own loader, if any; another value as it is.

    steps: number of steps, for the schedule of a Trainer.
    """
    if isinstance(value, type) and _is_lightning(value):
        if names := required_arguments(value):
            said = f"{value.__name__} needs arguments ({', '.join(names)})"
            example = f"{value.__name__}({', '.join(f'{name}=...' for name in names)})"
            raise LoadError(f"{said}: give them as '{example}', or name a LightningModule that exists", "bad-step")
        value = value()
    if _is_lightning(value):
        loader = getattr(value, "train_dataloader", None)
        is_own = callable(loader) and not getattr(loader, "__module__", "").startswith(
            ("lightning", "pytorch_lightning")
        )
        return LightningStep(value), loader if is_own else None
    if _is_trainer(value):
        step = TrainerStep(value, steps)
        return step, step.batches
    return value, None


def find_step(module: ModuleType, label: str, script: str) -> str:
    """The name of the only training step in a file: a function called `step`, `train_step` or `training_step`; else the
    only function that calls `backward`, LightningModule or Trainer. Raises: LoadError(slug="missing-target")."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {name: value for name, value in public.items() if getattr(value, "__module__", None) == module.__name__}
    functions = {name: value for name, value in own.items() if inspect.isfunction(inspect.unwrap(value))}
    if named := [name for name in STEP_NAMES if name in functions]:
        return named[0]
    loops = [name for name, value in public.items() if _is_trainer(value) or _is_lightning(value)]
    loops = [name for name in loops if name in own or not isinstance(public[name], type)]
    candidates = [*filter(lambda name: _calls_backward(functions[name]), functions), *loops]
    if len(candidates) == 1:
        return candidates[0]
    if candidates:
        listed = " or ".join(f"{script}:{name}" for name in candidates)
        raise LoadError(f"{label} has several training steps: name one, {listed}", "missing-target")
    listed = f" (its functions: {', '.join(functions)})" if functions else ""
    advice = "define step(batch), which runs forward, backward and the optimizer's step once"
    raise LoadError(f"{label} has no training step{listed}: {advice}", "missing-target")


class LightningStep:
    """One step of a LightningModule, as Lightning's loop runs it: `training_step`, `backward`, the optimizers' and the
    schedulers' `step`. With manual optimization, `training_step` alone. The options of Lightning's Trainer, such as
    clipping and accumulation, are not known."""

    def __init__(self, module: Any) -> None:
        self.module, self._numbers = module, itertools.count()
        self.optimizers, schedules = _configured(module.configure_optimizers())
        self.schedulers = [one["scheduler"] for one in schedules]
        # by default, Lightning steps a schedule after each epoch, which a rehearsal does not know
        self._of_steps = [one["scheduler"] for one in schedules if one.get("interval") == "step"]

    def __call__(self, batch: Any) -> Any:
        """Run one step; returns the loss, or None if `training_step` returns none."""
        self.module.train()
        is_automatic = getattr(self.module, "automatic_optimization", True)
        if not is_automatic:
            self._attach()
        arguments = (batch, next(self._numbers))
        value = self.module.training_step(*arguments[: max(len(required_arguments(self.module.training_step)), 1)])
        loss = value.get("loss") if isinstance(value, Mapping) else value
        if is_automatic and loss is not None:
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            for scheduler in self._of_steps:
                scheduler.step()
        return loss.detach() if isinstance(loss, torch.Tensor) else loss

    def _attach(self) -> None:
        """Give the module the methods that need a Trainer; this runs in the process of a recipe."""
        methods = {
            "optimizers": lambda *args, **kwargs: _one_or_all(self.optimizers),
            "lr_schedulers": lambda: _one_or_all(self.schedulers) if self.schedulers else None,
            "manual_backward": lambda loss, *args, **kwargs: loss.backward(*args, **kwargs),
        }
        vars(self.module).update(methods)


class TrainerStep:
    """One update of a Trainer of transformers, with its loss, optimizer, schedule, accumulation and clipping. A copy of
    the Trainer is used: the caller's has no optimizer afterwards, if it had none."""

    def __init__(self, trainer: Any, steps: int) -> None:
        self.trainer = copy.copy(trainer)
        self.trainer.create_optimizer_and_scheduler(num_training_steps=steps)

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
        losses = [trainer.training_step(model, inputs, *arguments) for inputs in micro_batches]
        if (limit := trainer.args.max_grad_norm) is not None and limit > 0:
            nn.utils.clip_grad_norm_(model.parameters(), limit)
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        trainer.optimizer.zero_grad()
        return sum(losses)


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _is_lightning(value: Any) -> bool:
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, nn.Module) and all(callable(getattr(kind, name, None)) for name in LIGHTNING)


def _is_trainer(value: Any) -> bool:
    return not isinstance(value, type | ModuleType) and all(hasattr(value, name) for name in TRAINER)


def _calls_backward(function: Callable[..., Any]) -> bool:
    try:
        return "backward(" in inspect.getsource(function)
    except (OSError, TypeError):
        return False


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
