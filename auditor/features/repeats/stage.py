"""Groups the errors under a plan by the calls of repeated modules: sampler steps, decoder layers, batches."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ...records import Batch, Capture, Plan, Subject
from ...records.repeats import RepeatedCalls
from ..feature import Feature, Followed

LEAST = 3
"""Number of equal layers in a list from which their errors are shown."""

MOST = 4
"""Maximum number of lists or modules, those with the most calls first."""

_INDEXED = re.compile(r"(?P<list>.*?)\.?(?P<index>\d+)")


class Repeats(Feature):
    """Groups the errors under the recommended plan by repeated calls."""

    def fields(self, followed: Followed) -> dict[str, Any]:
        """The errors of each group."""
        planning = followed.planning
        repeats = repeated_errors(planning.capture, planning.subject, followed.plan, followed.replay.errors)
        return {"repeats": repeats}


FEATURE = Repeats


def repeated_errors(
    capture: Capture, subject: Subject, plan: Plan | None, errors: Mapping[str, float]
) -> tuple[RepeatedCalls, ...]:
    """The errors under a plan of the model's batches, of modules called several times, and of layers in lists.

    errors: {operation: relative L2 error of its result under the plan}, on the first batch.
    """
    result = list[RepeatedCalls]()
    if plan is not None and plan.verification is not None:
        result += _of_batches(subject, plan.verification.by_batch)
    by_call = _errors_of_calls(capture.first, errors)
    series = [*_of_calls(by_call), *_of_layers(by_call, subject.model)]
    result += sorted(series, key=lambda one: -len(one.names))[:MOST]
    return tuple(result)


def _errors_of_calls(capture: Capture, errors: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """{path of a module: {key of a call: the largest error of the tensors that the call returned}}, in order."""
    result = dict[str, dict[str, float]]()
    for node in capture.nodes.values():
        if node.name not in errors:
            continue
        paths = {call.key: call.path for call in node.calls}
        for key in node.returned:
            if paths.get(key):  # the root has an empty path
                calls = result.setdefault(paths[key], {})
                calls[key] = max(calls.get(key, 0.0), _size(errors[node.name]))
    return result


def _size(error: float) -> float:
    return math.inf if math.isnan(error) else error


def _of_calls(by_call: Mapping[str, Mapping[str, float]]) -> Iterator[RepeatedCalls]:
    """Modules that were called several times, without the modules inside them."""
    repeated = {path for path, calls in by_call.items() if len(calls) > 1}
    for path in sorted(repeated):
        if any(above in repeated for above in _above(path)):
            continue
        errors = by_call[path].values()
        names = tuple(f"call {number}" for number in range(1, len(errors) + 1))
        yield RepeatedCalls("calls", path, names, tuple(map(_finite, errors)))


def _of_layers(by_call: Mapping[str, Mapping[str, float]], model: nn.Module) -> Iterator[RepeatedCalls]:
    """Lists of at least LEAST equal modules that were called, without the lists inside their modules."""
    lists = dict[str, list[str]]()
    for path in by_call:
        if (match := _INDEXED.fullmatch(path)) is not None:
            lists.setdefault(match["list"], []).append(path)
    equal = {name: paths for name, paths in lists.items() if len(paths) >= LEAST and _are_equal(paths, model)}
    for name, paths in equal.items():
        if any(above in equal for above in _above(name)):
            continue
        errors = (max(by_call[path].values()) for path in paths)
        yield RepeatedCalls("layers", name, tuple(paths), tuple(map(_finite, errors)))


def _are_equal(paths: Sequence[str], model: nn.Module) -> bool:
    """Whether modules are of one class that torch does not define, so that a Sequential of activations is no list."""
    try:
        kinds = {type(model.get_submodule(path)) for path in paths}
    except AttributeError:
        return False
    return len(kinds) == 1 and not next(iter(kinds)).__module__.startswith("torch.nn.modules")


def _above(path: str) -> Iterator[str]:
    """The paths of all modules around a module, the nearest first."""
    while "." in path:
        path = path.rpartition(".")[0]
        yield path


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None


def _of_batches(subject: Subject, errors: Sequence[float | None]) -> Iterator[RepeatedCalls]:
    batches = subject.held_out or subject.batches
    if len(errors) > 1 and len(errors) == len(batches):
        yield RepeatedCalls("batches", "", tuple(batch_names(batches, subject.model)), tuple(errors))


def batch_names(batches: Sequence[Batch], model: nn.Module) -> Iterator[str]:
    """Names such as `batch 1 (timestep 999)`: the batch's number, and the value of the first input that is a single
    number and differs between batches, if there is one."""
    numbers = [_numbers(batch, model) for batch in batches]
    varying = None
    for name in numbers[0]:
        values = {of_batch.get(name) for of_batch in numbers}
        if None not in values and len(values) > 1:
            varying = name
            break
    for number, of_batch in enumerate(numbers, start=1):
        if varying is None:
            yield f"batch {number}"
        else:
            yield f"batch {number} ({varying} {of_batch[varying]:g})"


def _numbers(batch: Batch, model: nn.Module) -> dict[str, float]:
    """{argument of forward: its value} for numbers, and for tensors whose entries are all one number."""
    args, kwargs = batch
    parameters = list(inspect.signature(model.forward).parameters)
    named: dict[str, Any] = {**dict(zip(parameters, args, strict=False)), **kwargs}
    result = dict[str, float]()
    for name, value in named.items():
        if isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            result[name] = float(value)
        elif isinstance(value, torch.Tensor) and value.numel() and value.dim() <= 1 and not value.is_complex():
            first = value.flatten()[0]
            if bool((value == first).all()):
                result[name] = float(first)
    return result
