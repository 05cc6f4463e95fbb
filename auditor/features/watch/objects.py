"""The user's model, optimizers and scalers for a replay: found in the imported file, and set to the capsule's state."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import LoadError
from ..rehearsal.loops import LightningStep, TrainerStep
from . import capsule as files
from .capsule import Capsule
from .recorder import Recorder
from .weights import fits, merge, plain_name


def with_all_ranks(folder: Path, capsule: Capsule) -> Capsule:
    """The capsule with whole weights: sharded ones are put together from the capsules of all ranks.

    Raises: LoadError(slug="bad-capsule") if the capsule of a rank is missing.
    """
    about = capsule.about
    if not about.sharded:
        return capsule
    parts = []
    for rank in range(about.world):
        beside = sorted(folder.resolve().parent.glob(f"step-{about.step:06d}-*-rank{rank}"))
        if not beside:
            said = f"{folder} has only a part of the weights, and no capsule of rank {rank} lies beside it"
            raise LoadError(f"{said}: copy the capsules of all {about.world} ranks", "bad-capsule")
        parts.append(files.read(beside[0]))
    return replace(capsule, weights=merge(parts))


def objects_of(capsule: Capsule, recorders: Sequence[Recorder], loop: Any) -> tuple[nn.Module, list[Any], list[Any]]:
    """(model, its optimizers, its scalers) of the user's file. loop: see `as_step`, or a model.

    Raises: LoadError(slug="bad-capsule") without the model.
    """
    same = recorders[capsule.about.order : capsule.about.order + 1]  # models alike may have recorders of their own
    for recorder in (*same, *reversed(recorders)):
        if fits(capsule, recorder.model):
            return recorder.model, list(recorder.optimizers), list(recorder.scalers)
    if recorders:
        raise LoadError(_misfit(capsule, [one.model for one in recorders]), "bad-capsule")
    own = loop
    if isinstance(loop, LightningStep):
        own = loop.module
    elif isinstance(loop, TrainerStep):
        own = loop.trainer.model
    if isinstance(own, nn.Module) and fits(capsule, own):
        return own, [], []
    every = [one for one in gc.get_objects() if issubclass(type(one), nn.Module) and "_modules" in vars(one)]
    fitting = [one for one in every if fits(capsule, one)]
    if not fitting:
        raise LoadError(_misfit(capsule, every), "bad-capsule")
    model = max(fitting, key=lambda one: sum(1 for _ in one.modules()))
    return model, [], []


def _misfit(capsule: Capsule, modules: list[nn.Module]) -> str:
    names = {*capsule.weights, *capsule.frozen}
    said = f"no model of the file has the capsule's {len(names)} weights"
    best = max(modules, key=lambda one: len(names & _names(one)), default=None)
    if best is not None and (missing := sorted(names - _names(best))):
        said += f" ({missing[0]} is missing in {type(best).__name__})"
    return f"{said}: build the model as in the training"


def _names(model: nn.Module) -> set[str]:
    try:
        return {plain_name(name) for name, _ in model.named_parameters()}
    except Exception:  # a module whose __init__ did not finish
        return set()


def optimizers_of(model: nn.Module) -> list[Any]:
    """The optimizers in memory that update a parameter of the model."""
    own = {id(p) for p in model.parameters()}
    result = list[Any]()
    for optimizer in gc.get_objects():
        is_optimizer = issubclass(type(optimizer), torch.optim.Optimizer)
        if not is_optimizer or "param_groups" not in vars(optimizer):  # whose constructor did not finish
            continue
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if not own.isdisjoint(updated):
            result.append(optimizer)
    return result


def set_optimizers(capsule: Capsule, optimizers: Sequence[Any]) -> None:
    """Set rates and other numbers of the parameter groups, and the state if the capsule has it."""
    for optimizer, groups, state in zip(optimizers, capsule.about.groups, capsule.states, strict=False):
        for group, values in zip(optimizer.param_groups, groups, strict=False):
            known = {key: x for key, x in values.items() if key in group and not torch.is_tensor(group[key])}
            group.update({key: tuple(x) if isinstance(x, list) else x for key, x in known.items()})
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        for number, values in (state or {}).items():
            if int(number) < len(parameters):
                optimizer.state[parameters[int(number)]] = dict(values)
