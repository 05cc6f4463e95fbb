"""Makes a capsule of a step: reads the state of the training, the process and the recorder."""

from __future__ import annotations

import logging
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from .before import Called, Group
from .capsule import About, Call, Capsule
from .encoding import local
from .generators import is_on_gpu, restore, state_of_process
from .reads import is_users
from .signals import Signal, Trigger
from .watched import Watched, other_parameters, parameters_of
from .weights import plain_name, state_of_model

logger = logging.getLogger("auditor.watch")

WITH_STATE = ("updates-lost", "asked")
"""Kinds of capsules that contain the states of the optimizers."""


def capsule_of(
    watched: Watched,
    group: Group,
    earlier: Iterable[Sequence[Called]],
    trigger: Trigger,
    seen: Sequence[Signal],
    about: dict[str, Any],
) -> Capsule:
    """The capsule of a step. group: of the present step. earlier: calls of the steps before. seen: the last signals.
    about: the entries of `About` that the recorder knows."""
    weights, frozen, sharded = state_of_model(watched.model, watched.frozen)
    keeps_state = trigger.kind in WITH_STATE
    modules = list(watched.model.named_modules())
    said = About(
        kind=trigger.kind,
        text=trigger.text,
        updated=tuple(group.updated),
        scalers=tuple(one.state_dict() for one in watched.scalers),
        optimizers=tuple(type(one).__name__ for one in watched.optimizers),
        groups=tuple(_groups(one) for one in watched.optimizers),
        autocast=dict(group.autocast),
        is_training=watched.model.training,
        evaluated=tuple(plain_name(path) for path, one in modules if not one.training),
        trained=tuple(plain_name(name) for name, p in watched.model.named_parameters() if p.requires_grad),
        changed=tuple(number for number, call in enumerate(group.calls) if call.is_written()),
        sharded=sharded,
        code=watched.code,
        update=line_of_update(),
        versions=_versions(),
        flags=_flags(),
        command=tuple(sys.argv),
        signals=tuple(asdict(one) for one in seen),
        **about,
    )
    buffers = {place: one.before() for place, one in watched.buffers.items()}
    return Capsule(
        about=said,
        weights=weights,
        buffers=buffers.pop("", {}),
        frozen=frozen,
        states=tuple(_state_of(one) if keeps_state else None for one in watched.optimizers),
        calls=tuple(_call(one, watched, group) for one in group.calls),
        previous=tuple([one.batch for one in calls if not one.is_written()] for calls in earlier),
        beside={place: _beside(watched, place, buffers) for place in watched.beside},
        others={name: _on_host(p) for name, p in other_parameters(watched).items()},
    )


def _call(call: Called, watched: Watched, group: Group) -> Call:
    draws = tuple(_drawn(call, watched, group))
    return Call(call.batch, call.generators, draws, call.variables)


def _beside(watched: Watched, place: str, buffers: Mapping[str, dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Parameters and buffers of another module that the step reads."""
    values = dict(buffers.get(place, {}))
    if watched.is_saved(place):
        values |= {plain_name(name): _on_host(p) for name, p in watched.beside[place].named_parameters()}
    return values


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU; of a sharded tensor this rank's part."""
    return local(x).detach().cpu().clone()


def _drawn(call: Called, watched: Watched, group: Group) -> list[Any]:
    """The random numbers of a call's forward passes, which run again without gradients, in the same state.

    A sharded model is not run again, since that would communicate.
    """
    if not call.inputs or watched.is_sharded:
        return []
    from .draws import RecordDraws  # imports more of the auditor, which a training without a trigger need not

    here = state_of_process()
    live = [(x, x.clone()) for x in watched.model.buffers()]
    recorded = RecordDraws()
    try:
        for buffers in watched.buffers.values():
            buffers.put_back()
        _restore_all(call.generators)
        with ExitStack() as regions:
            for device, dtype in group.autocast.items():
                regions.enter_context(torch.autocast(device, getattr(torch, dtype)))
            for model, args, kwargs in call.inputs:
                with recorded:
                    model.forward(*args, **kwargs)
    except Exception as error:  # such as too little memory
        logger.warning("random numbers of the forward pass were not recorded (%s)", error)
        return []
    finally:
        _restore_all(here)
        for x, value in live:
            x.copy_(value)
    return recorded.draws


def _restore_all(state: dict[str, Any]) -> None:
    restore(state)
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    """The parameter groups without parameters: rates as they are at this step."""
    plain = (bool, int, float, str, type(None), tuple, list)
    result = []
    for group in optimizer.param_groups:
        given = {key: float(x) if torch.is_tensor(x) and x.numel() == 1 else x for key, x in group.items()}
        result.append({key: x for key, x in given.items() if key != "params" and isinstance(x, plain)})
    return result


def _state_of(optimizer: Any) -> dict[str, Any]:
    """The optimizer's state by the numbers of its parameters; of sharded ones this rank's parts."""
    parameters = enumerate(parameters_of(optimizer))
    return {str(i): dict(optimizer.state[p]) for i, p in parameters if p in optimizer.state}


def rank_of_process() -> tuple[int, int]:
    """This process's rank and the number of processes."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1


def line_of_update() -> str:
    """The innermost line of the user's code that is running."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_users(file):
            return f"{file.rpartition('/')[2]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def _versions() -> dict[str, str]:
    from ... import __version__

    device = torch.cuda.get_device_name() if is_on_gpu() else "cpu"
    return {
        "auditor": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cuda": str(torch.version.cuda),
        "device": device,
        "system": platform.platform(),
    }


def _flags() -> dict[str, Any]:
    """torch's precision flags, see isolation/process.py."""
    from ...isolation.process import flags

    return flags()
