"""The loss and the targets of a TARGET on the command line, by the names that people give them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

from ..errors import LoadError
from ..loading import load
from ..loading.inputs import named_inputs
from ..loading.sandbox import call
from ..loading.target import named_in, parse
from ..records import Batch, Objective, Subject
from .objective import OWN_LOSS, checked, split

LOSS_NAMES = ("loss_fn", "get_loss", "criterion")
TARGET_NAMES = ("get_targets", "targets")


def load_training(
    target: str, *, inputs: str | None = None, weights: str | None = None, seed: int = 0, loss: str | None = None
) -> Subject:
    """As `load`, with the loss and targets of a training step.

    loss: `file.py:name`, or a name in the target's file. Without it, the file's `loss_fn`, what its `get_loss()` returns,
    or its `criterion`; else the model's own loss. Targets: `get_targets()` or `targets` of the file, one entry per batch
    of inputs; else the last entries of every batch. `audit_spec()` may have `loss` and `targets`.
    Raises: LoadError, those of `load` and slug="missing-loss" | "no-loss" | "bad-loss" | "bad-targets" | "no-gradient".
    """
    return checked(load(target, inputs=inputs, weights=weights, seed=seed, objective=_Finder(target, loss, seed)))


@dataclass(frozen=True)
class _Finder:
    target: str
    loss: str | None
    seed: int

    def __call__(self, module: ModuleType, spec: Mapping[str, Any], subject: Subject) -> Subject:
        """The subject with its objective; targets are taken out of its batches where they are in there."""
        label = parse(self.target).label
        loss_fn, source = self._loss(module, spec, label)
        targets = _targets(module, spec, label)
        if targets is None:
            batches, targets = split(subject.batches, loss_fn, subject.model)
            held_out = subject.held_out
            if any(args or named for args, named in targets):  # held-out batches then hold targets too
                held_out, _ = split(held_out, loss_fn, subject.model)
            subject = replace(subject, batches=batches, held_out=held_out)
        if len(targets) != len(subject.batches):
            raise LoadError(
                f"{label} has targets for {len(targets)} batches and inputs for {len(subject.batches)}: give one entry "
                "of targets per batch of inputs",
                slug="bad-targets",
            )
        return replace(subject, objective=Objective(loss_fn, tuple(targets), source))

    def _loss(self, module: ModuleType, spec: Mapping[str, Any], label: str) -> tuple[Callable[..., Any] | None, str]:
        if self.loss is not None:
            return self._named(self.loss, module, label), f"--loss {self.loss}"
        if "loss" in spec:
            return _callable(spec["loss"], f"'loss' of audit_spec() in {label}"), f"{label}:audit_spec"
        for name in LOSS_NAMES:
            if hasattr(module, name):
                value = getattr(module, name)
                made = call(value, f"{name}() in {label}", "bad-loss") if name == "get_loss" else value
                return _callable(made, f"{name} in {label}"), f"{label}:{name}"
        return None, OWN_LOSS

    def _named(self, text: str, module: ModuleType, label: str) -> Callable[..., Any]:
        advice, slug = "give --loss file.py:name of a loss function", "missing-loss"
        if ":" not in text:
            if not hasattr(module, text):
                raise LoadError(f"{label} has no {text!r}: {advice}", slug=slug)
            return _callable(getattr(module, text), f"{text} in {label}")
        target = parse(text)
        return _callable(named_in(target, advice, slug, self.seed), f"{target.symbol} in {target.label}")


def _callable(value: Any, what: str) -> Callable[..., Any]:
    if isinstance(value, type) or not callable(value):
        raise LoadError(
            f"{what} is of type {type(value).__name__}: a loss is called as loss(outputs, *targets)",
            slug="missing-loss",
        )
    function: Callable[..., Any] = value
    return function


def _targets(module: ModuleType, spec: Mapping[str, Any], label: str) -> Sequence[Batch] | None:
    if "targets" in spec:
        return named_inputs(spec["targets"], f"'targets' of audit_spec() in {label}")
    for name in TARGET_NAMES:
        if hasattr(module, name):
            value = getattr(module, name)
            return named_inputs(value, f"{name}{'()' if callable(value) else ''} in {label}")
    return None
