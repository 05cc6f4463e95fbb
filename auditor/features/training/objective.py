"""Locates the loss of a training step: a function and its targets by conventional names, or the model's own output."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ...criteria.criterion import name_of
from ...errors import LoadError, let_through
from ...isolation import in_training, isolate
from ...loading import load
from ...loading.inputs import LABELS, NoNames, as_batches, reject_iterators
from ...loading.state import upcast_model
from ...loading.subject import from_object
from ...loading.target import Target, blame, call, named_in, parse
from ...numerics.entries import over_tensors
from ...records import Batch, Objective, Subject
from ...training.step import TrainingStep, step_batches

LOSS_NAMES = ("loss_fn", "get_loss", "criterion")
TARGET_NAMES = ("get_targets", "targets")
OWN_LOSS = "the model's own loss"
WHOLE_BATCH = "batch"
"""A loss function gets the whole batch if its only parameter after the outputs has this name."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def training_subject(
    model: nn.Module, example_inputs: Any, kwargs: dict[str, Any] | None, loss_fn: Callable[..., Any] | None
) -> Subject:
    """Make a Subject of the caller's model from batches that contain inputs and targets.

    Raises: LoadError(slug="bad-targets" | "no-loss" | "bad-loss" | "no-gradient"), and the errors of from_object.
    """
    batches = as_batches(() if example_inputs is None and kwargs else example_inputs, "example_inputs")
    inputs, targets = split(batches, loss_fn, model)
    subject = from_object(model, list(inputs), kwargs)
    source = f"loss_fn={name_of(loss_fn)}" if loss_fn is not None else OWN_LOSS
    return check_training(replace(subject, objective=Objective(loss_fn, targets, source)))


def split(
    batches: Sequence[Batch], loss_fn: Callable[..., Any] | None, model: nn.Module
) -> tuple[tuple[Batch, ...], tuple[Batch, ...]]:
    """Split each batch into inputs of the model and targets of the loss.

    The targets are the arguments of `loss_fn` after the outputs: the last positional entries of a batch, or the entries
    of a mapping with its parameters' names. A single parameter called `batch` gets the whole batch.
    """
    if loss_fn is None:
        return tuple(batches), tuple(((), {}) for _ in batches)
    names = _loss_arguments(loss_fn)
    pairs = [_split_one(batch, names, loss_fn, model) for batch in batches]
    return tuple(inputs for inputs, _ in pairs), tuple(targets for _, targets in pairs)


def check_training(subject: Subject) -> Subject:
    """Compute the loss of every batch once, in training mode; the model and the generators are restored.

    Raises: LoadError(slug="no-loss" | "bad-loss" | "no-gradient").
    """
    objective = subject.objective
    assert objective is not None
    step = TrainingStep(subject.model, objective.loss_fn)
    for batch in step_batches(subject):
        with upcast_model(subject), isolate(step, batch), in_training(subject.model), torch.enable_grad():
            try:
                loss = step(*over_tensors(torch.Tensor.clone, batch[0]))
            except Exception as error:
                let_through(error, memory=False)
                _, _, targets, named = batch[0]
                leaves = (*targets, *named.values())
                kinds = [f"{list(t.shape)}" if isinstance(t, torch.Tensor) else type(t).__name__ for t in leaves]
                given = f"targets {', '.join(kinds)}" if kinds else "no target"
                said = f"raised {blame(error)}: the loss is called with the model's outputs and {given}"
                raise LoadError(f"{objective.source} {said}", slug="bad-loss") from error
        _check_loss(loss, objective)
    return subject


def _check_loss(loss: Any, objective: Objective) -> None:
    if loss is None:
        raise LoadError(
            "training needs a loss: give loss_fn (--loss F.py:NAME on the command line), define loss_fn(outputs, targets) in the model's file, or pass inputs "
            "for which the model returns a loss (`labels` for Hugging Face models)",
            slug="no-loss",
        )
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
        what = f"a tensor of shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        raise LoadError(
            f"{objective.source} returned {what}: a loss must be one floating-point number", slug="bad-loss"
        )
    if not bool(torch.isfinite(loss)):
        said = f"the loss ({objective.source}) is already {float(loss)} in FP32: fix the training step first"
        raise LoadError(said, slug="bad-loss")
    if not loss.requires_grad:
        raise LoadError(
            f"{objective.source} depends on no parameter that requires a gradient: unfreeze a parameter, or audit in mode "
            "inference",
            slug="no-gradient",
        )


def _loss_arguments(loss_fn: Callable[..., Any]) -> list[str] | None:
    """Names of the loss's arguments after the outputs; None if any number of arguments is accepted."""
    function = loss_fn.forward if isinstance(loss_fn, nn.Module) else loss_fn
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ["target"]  # torch's built-in losses have no signature, and take one target
    if any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return None
    return [p.name for p in parameters[1:] if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


def _split_one(
    batch: Batch, names: list[str] | None, loss_fn: Callable[..., Any], model: nn.Module
) -> tuple[Batch, Batch]:
    args, kwargs = batch
    if names == [WHOLE_BATCH]:
        is_one_tensor = isinstance(kwargs, NoNames)
        return batch, ((args[0] if is_one_tensor else kwargs or args,), {})
    if names is None:
        taken = sum(p.kind in _POSITIONAL for p in inspect.signature(model.forward).parameters.values())
        return (args[:taken], kwargs), (args[taken:], {})
    if names and all(name in kwargs for name in names):
        accepted = inspect.signature(model.forward).parameters
        own = {key: value for key, value in kwargs.items() if key not in names or key in accepted}
        return (args, own), ((), {name: kwargs[name] for name in names})
    if not args and len(names) == 1:  # the labels have another name than the loss's argument
        accepted = inspect.signature(model.forward).parameters
        labels = [name for name in LABELS if name in kwargs and name not in accepted]
        if len(labels) == 1:
            own = {key: value for key, value in kwargs.items() if key not in labels}
            return (args, own), ((kwargs[labels[0]],), {})
    count = len(names)
    if len(args) - count < (0 if kwargs else 1):
        raise LoadError(
            f"{name_of(loss_fn)} takes {', '.join(names)} after the outputs, and a batch has {len(args)} positional "
            f"entries: give the inputs followed by the targets, or a mapping with {', '.join(map(repr, names))}",
            slug="bad-targets",
        )
    return (args[: len(args) - count], kwargs), (args[len(args) - count :], {})


def load_training(
    target: str, *, inputs: str | None = None, weights: str | None = None, seed: int = 0, loss: str | None = None
) -> Subject:
    """Load a target as `load` does, with the loss and targets of a training step.

    loss: `file.py:name`, or a name in the target's file. By default the file's `loss_fn`, the result of its
    `get_loss()`, or its `criterion`; without these, the model's own loss. Targets: `get_targets()` or `targets` of the
    file, one entry per batch; without these, the last entries of every batch. `audit_spec()` may return both.
    Raises: LoadError as `load` does, or slug="missing-loss" | "no-loss" | "bad-loss" | "bad-targets" | "no-gradient".
    """
    return check_training(
        load(target, inputs=inputs, weights=weights, seed=seed, objective=partial(_with_objective, target, loss, seed))
    )


def _with_objective(
    target: str, loss: str | None, seed: int, module: ModuleType, spec: Mapping[str, Any], subject: Subject
) -> Subject:
    """Add the loss function and its targets to a Subject, and remove the targets from the Subject's batches."""
    parsed = parse(target)
    loss_fn, source = _loss(module, spec, parsed, loss, seed)
    targets = _targets(module, spec, parsed.label, loss_fn, len(subject.batches))
    if targets is None:
        batches, targets = split(subject.batches, loss_fn, subject.model)
        held_out = subject.held_out
        if any(args or named for args, named in targets):  # held-out batches then contain targets too
            held_out, _ = split(held_out, loss_fn, subject.model)
        subject = replace(subject, batches=batches, held_out=held_out)
    if len(targets) != len(subject.batches):
        raise LoadError(
            f"{parsed.label} has targets for {len(targets)} batches, and inputs for {len(subject.batches)}: "
            "give one entry of targets per batch of inputs",
            slug="bad-targets",
        )
    return replace(subject, objective=Objective(loss_fn, tuple(targets), source))


def _loss(
    module: ModuleType, spec: Mapping[str, Any], target: Target, text: str | None, seed: int
) -> tuple[Callable[..., Any] | None, str]:
    if text is not None:
        where = parse(text) if ":" in text else replace(target, symbol=text)
        value = named_in(where, "give --loss file.py:name of a loss function", "missing-loss", seed)
        return _callable(value, f"{where.symbol} in {where.label}"), f"--loss {text}"
    label = target.label
    if "loss" in spec:
        return _callable(spec["loss"], f"'loss' of audit_spec() in {label}"), f"{label}:audit_spec"
    for name in LOSS_NAMES:
        if hasattr(module, name):
            value = getattr(module, name)
            made = call(value, f"{name}() in {label}", "bad-loss") if name == "get_loss" else value
            return _callable(made, f"{name} in {label}"), f"{label}:{name}"
    return None, OWN_LOSS


def _callable(value: Any, what: str) -> Callable[..., Any]:
    if isinstance(value, type) or not callable(value):
        raise LoadError(
            f"{what} is of type {type(value).__name__}: a loss is called as loss(outputs, *targets)", "missing-loss"
        )
    function: Callable[..., Any] = value
    return function


def _targets(
    module: ModuleType, spec: Mapping[str, Any], label: str, loss_fn: Callable[..., Any] | None, batches: int
) -> Sequence[Batch] | None:
    """The targets of each batch from the target's file; None if it has none."""
    if "targets" in spec:
        return _targets_of(spec["targets"], f"'targets' of audit_spec() in {label}", loss_fn, batches)
    for name in TARGET_NAMES:
        if hasattr(module, name):
            value = getattr(module, name)
            return _targets_of(value, f"{name}{'()' if callable(value) else ''} in {label}", loss_fn, batches)
    return None


def _targets_of(value: Any, what: str, loss_fn: Callable[..., Any] | None, batches: int) -> Sequence[Batch]:
    """Targets in any form that `as_batches` accepts. A list also has one entry for each of several batches. If the loss
    takes one target, so has a tuple; and a list or a dict is that target: of a detector, for example, one dict for each
    image."""
    made = call(value, what, "inputs-raise") if callable(value) else value
    names = _loss_arguments(loss_fn) if loss_fn is not None else None
    takes_one = names is not None and len(names) == 1
    is_apart = isinstance(made, list) or (takes_one and isinstance(made, tuple))
    if is_apart and len(made) == batches > 1:
        return tuple(_one_target(item, names, what) for item in made)
    if takes_one and batches == 1 and isinstance(made, list | Mapping) and not any(isinstance(x, tuple) for x in made):
        is_one_entry = isinstance(made, list) and len(made) == 1
        return (_one_target(made[0] if is_one_entry else made, names, what),)
    return as_batches(made, what)


def _one_target(item: Any, names: list[str] | None, what: str) -> Batch:
    """The arguments of the loss after the outputs for one batch, which may be one list or dict."""
    is_named = isinstance(item, Mapping) and names is not None and set(names) <= set(item)
    if names is not None and len(names) == 1 and isinstance(item, list | Mapping) and not is_named:
        reject_iterators(item, what)
        return (item,), {}
    (batch,) = as_batches((item,) if isinstance(item, list) and names is None else item, what)[:1]
    return batch
