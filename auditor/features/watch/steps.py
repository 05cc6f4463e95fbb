"""The capsule's calls as one step, which a rehearsal can run: of the user's step, LightningModule, Trainer or model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...errors import LoadError
from ...isolation.tensors import plain_torch
from ...numerics.entries import over_tensors
from ...training.step import own_loss
from ..rehearsal.loops import LightningStep, TrainerStep
from .capsule import Capsule
from .draws import PlayDraws
from .generators import own_generators, restore, restore_own
from .reads import places_read
from .variables import Variables

Arguments = Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]]
"""(args, kwargs) of each call."""


class CapsuleStep:
    """Runs the calls of a capsule, each from the recorded state of the generators, and with the recorded draws.

    Called with the arguments of all calls, which it copies, since a step may write to its batch. loop: the user's
    function, a LightningStep, a TrainerStep, or a model. has_backward: whether the last run called `backward`.
    """

    def __init__(self, capsule: Capsule, loop: Any, model: nn.Module) -> None:
        self._capsule = capsule
        self._run = _runner(capsule, loop, model)
        places = places_read(loop)
        self._own = own_generators(places, model)
        self._variables = Variables(places, model)
        self.has_backward: Callable[[], bool] = lambda: True
        self.optimizers: list[Any] = []

    def __call__(self, calls: Any) -> Any:
        """Run the step; returns its loss if no `backward` gave it. If the step raised in the training and does so here,
        its loss is NaN."""
        try:
            values = self._run(calls, self._before)
        except Exception as error:
            if not self._capsule.about.error.startswith(type(error).__name__):
                raise
            for optimizer in self.optimizers:  # without gradients, since a rehearsal knows a step by its update
                optimizer.zero_grad()
                optimizer.step()
            return math.nan
        losses = [float(x) for x in map(_loss_in, values) if x is not None]
        if not all(map(math.isfinite, losses)):  # of a call without `backward`, perhaps
            return math.nan
        return losses[-1] if losses and not self.has_backward() else None

    def _before(self, number: int) -> Any:
        """Before a call: set the generators. Returns a context in which the recorded draws replace the CPU's own."""
        call = self._capsule.calls[number]
        restore(call.generators)
        restore_own(self._own, call.generators.get("own", {}))
        self._variables.restore(call.variables)
        return PlayDraws(call.draws) if call.draws else nullcontext()


Before = Callable[[int], Any]


def _runner(capsule: Capsule, step: Any, model: nn.Module) -> Callable[[Arguments, Before], list[Any]]:
    """How to run the calls with a function, a LightningStep, a TrainerStep or a model; gives what each call returns."""
    if isinstance(step, LightningStep):
        return lambda calls, before: _at_once(_lightning_batch(step, calls), step, before)
    if isinstance(step, TrainerStep):
        return lambda calls, before: _at_once([_without_count(kwargs) for _, kwargs in _copies(calls)], step, before)
    if isinstance(step, nn.Module):
        return ModelStep(capsule, model)
    if not callable(step):
        raise LoadError(f"a value of type {type(step).__name__} is no training step: name a function", "bad-step")
    if not capsule.about.is_whole_step:
        said = "the capsule has the arguments of the model, since the step was not watched by `@recorder.step`"
        raise LoadError(f"{said}: name the model, a LightningModule or a Trainer instead of a step", "bad-step")
    return lambda calls, before: _one_by_one(step, calls, before)


def _one_by_one(step: Callable[..., Any], calls: Arguments, before: Before) -> list[Any]:
    values = []
    for number, (args, kwargs) in enumerate(_copies(calls)):
        with before(number):
            values.append(step(*args, **kwargs))
    return values


def _at_once(batch: Any, step: Callable[..., Any], before: Before) -> list[Any]:
    with before(0):
        return [step(batch)]


def _copies(calls: Arguments) -> Any:
    with plain_torch():
        return over_tensors(lambda x: x.clone(), list(calls))


def _lightning_batch(step: LightningStep, calls: Arguments) -> Any:
    batches = [args[0] for args, _ in _copies(calls)]
    return batches if step.count > 1 else batches[0]


def _without_count(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """A Trainer's batch from the arguments of its model: without the number of labels, which the Trainer adds."""
    return {name: x for name, x in inputs.items() if name != "num_items_in_batch"}


class ModelStep:
    """A step around a model that returns its loss: forward in the recorded autocast region, backward, and an update."""

    def __init__(self, capsule: Capsule, model: nn.Module) -> None:
        self._about = capsule.about
        self.model = model
        name = next(iter(self._about.optimizers), "SGD")
        kind = getattr(torch.optim, name, torch.optim.SGD)
        rate = next((group.get("lr") for groups in self._about.groups for group in groups), None)
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = kind(trained, lr=rate or 1e-3)
        self.scaler = None if self._about.scale is None else torch.amp.GradScaler("cpu", init_scale=self._about.scale)

    def __call__(self, calls: Arguments, before: Before) -> list[Any]:
        """Run the step; returns its loss in a list."""
        self.optimizer.zero_grad()
        self.model.train(self._about.is_training)
        total: Any = 0.0
        dtype = next(iter(self._about.autocast.values()), None)
        for number, (args, kwargs) in enumerate(_copies(calls)):
            with ExitStack() as stack:
                stack.enter_context(before(number))
                if dtype is not None:
                    stack.enter_context(torch.autocast("cuda", getattr(torch, dtype)))
                loss = own_loss(self.model(*args, **kwargs))
            if loss is None:
                said = "the model returns no loss, and its step was not watched: watch it with `@recorder.step`"
                raise LoadError(said, "bad-step")
            loss = loss / len(calls)
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
            total = total + loss.detach()
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return [total]


def _loss_in(value: Any) -> Any:
    """The first floating-point number in what a step returned."""
    for x in pytree.tree_leaves(value):
        if isinstance(x, float) or (isinstance(x, torch.Tensor) and x.numel() == 1 and x.is_floating_point()):
            return x
    return None
