"""Batches in the forms in which users have them, and the call of the step with one of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ...errors import LoadError
from ...loading.inputs import are_alike, is_one_batch
from ...loading.target import required_arguments

Batches = Iterable[Any] | Callable[[], Iterable[Any]] | None


def number_batches(batches: Batches, step: Callable[..., Any]) -> Iterator[tuple[int, Any]]:
    """Yield (number, batch), and repeat the batches until a pass has none: an iterator has one pass with batches."""
    number = 0
    while number >= 0:
        number = -1
        made: Any = batches() if callable(batches) else batches
        for number, batch in enumerate([made] if _is_one_batch(made, step) else made):
            yield number, batch


def call_step(step: Callable[..., Any], batch: Any) -> Any:
    """Call the step with a batch: without arguments, with the batch, or with its entries, as the signature requires.

    A dict gives its entries by name to a step with several arguments or with `**`. Raises: LoadError(slug="bad-step")
    if the batch lacks an argument.
    """
    required, parameters = required_arguments(step), _parameters(step)
    is_named = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if isinstance(batch, Mapping) and (len(required) > 1 or [*batch] == required or (is_named and not required)):
        return step(**_named_arguments(batch, required, parameters))
    if len(required) > 1:
        if isinstance(batch, Tensor) or not isinstance(batch, Iterable):
            said = f"the step takes {', '.join(required)}, and a batch is a {type(batch).__name__}"
            raise LoadError(f"{said}: give tuples or dicts with these entries", "bad-step")
        return step(*batch)
    if required:
        return step(batch)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters) and batch is not None:
        return step(*batch) if isinstance(batch, tuple | list) else step(batch)
    return step()


def _is_one_batch(value: Any, step: Callable[..., Any]) -> bool:
    """Whether the value is one batch and no series of batches: nothing, a tensor, a dict, or a tuple of tensors. For a
    step that takes one argument, tensors that are alike are a series."""
    if value is None:
        return True
    taken = len(required_arguments(step))
    is_one = is_one_batch(value, taken)
    if isinstance(value, tuple) and is_one and taken < 2:
        return not are_alike(value)
    return is_one


def _named_arguments(
    batch: Mapping[str, Any], required: list[str], parameters: list[inspect.Parameter]
) -> dict[str, Any]:
    """The entries of a dict that the step takes. Raises: LoadError(slug="bad-step")."""
    if lacking := [name for name in required if name not in batch]:
        said = f"the step takes {', '.join(required)}, and a batch has {', '.join(map(str, batch))}"
        raise LoadError(f"{said}: rename {', '.join(lacking)}, or take the whole dict as one argument", "bad-step")
    taken = None if any(p.kind is p.VAR_KEYWORD for p in parameters) else {p.name for p in parameters}
    return {name: x for name, x in batch.items() if taken is None or name in taken}


def _parameters(step: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):
        return []
