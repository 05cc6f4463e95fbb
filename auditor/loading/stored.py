"""What a model stores in FP16 or BF16: the same values in FP32, for as long as it is audited, are its reference."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import LoadError
from ..isolation.members import raise_in_place, stored_low
from ..numerics.formats import is_low
from ..records import Subject
from .hooked import present

T = TypeVar("T")

_HELD = ("weights", "attributes")


def settled(subject: Subject, check: Callable[[Subject], Subject]) -> Subject:
    """The subject as it is audited, once `check` found that it runs so.

    What it stores low is raised with the inputs: parameters and buffers, and where that does not run, tensors that
    modules hold as plain attributes. Where that does not either, its forward casts to a dtype of its own: what is stored
    low then stays so, in the reference too. Raises: LoadError(slug="low-precision-model"), and what `check` raises.
    """
    refused: LoadError | None = None
    for which, candidate in _candidates(subject):
        try:
            with raised(candidate):
                checked = check(candidate)
        except LoadError as error:
            if error.slug != "forward-raises":
                raise
            refused = refused or error
            continue
        return _noted(checked, which, refused)
    assert refused is not None
    raise refused


@contextmanager
def raised(subject: Subject) -> Iterator[None]:
    """In the body the subject's model has its weights, and in FP32 what is to be raised; then it is as it was."""
    with present(subject.model), in_fp32(subject.model, subject.raised):
        yield


@contextmanager
def in_fp32(model: nn.Module, which: str = "weights") -> Iterator[None]:
    """In the body, what the model stores low is held in FP32; then it is bit for bit what it was, on its own memory.

    which: as Subject.raised.
    """
    tensors = stored_low(model, attributes=which == "attributes") if which in _HELD else []
    kept = [(x, x.data, x.grad if x.is_leaf else None) for x in tensors]
    for x, _, gradient in kept:
        if gradient is not None:
            x.grad = None  # of another dtype than the tensor will have
    raise_in_place(tensors)
    try:
        yield
    finally:
        for x, data, gradient in kept:
            if x.is_leaf:
                x.grad = None
            x.data = data
            if gradient is not None:
                x.grad = gradient


def _candidates(subject: Subject) -> Iterator[tuple[str, Subject]]:
    """What may be raised, in the order in which it is tried, and the subject so; at last, the subject as it is."""
    model = subject.model
    weights, everything = stored_low(model), stored_low(model, attributes=True)
    if not weights and subject.stored_low:  # its checkpoint is, and was raised while it was read
        yield "read", _with_inputs(subject, "weights")
        return
    if not weights:
        yield "none", subject
        if any(is_low(x.dtype) for x in _tensors((subject.batches, subject.held_out))):
            yield "inputs", _with_inputs(subject, "inputs")
        return
    subject = replace(subject, stored_low=_counted(model))
    yield "weights", _with_inputs(subject, "weights")
    if len(everything) > len(weights):
        yield "attributes", _with_inputs(subject, "attributes")
    yield "kept", replace(subject, raised="kept")


def _with_inputs(subject: Subject, which: str) -> Subject:
    return replace(subject, raised=which, batches=_widened(subject.batches), held_out=_widened(subject.held_out))


def _widened(tree: T) -> T:
    wide: T = pytree.tree_map_only(Tensor, lambda x: x.float() if is_low(x.dtype) else x, tree)
    return wide


def _tensors(tree: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def _counted(model: nn.Module) -> Mapping[str, int]:
    """{low dtype: how many numbers of the parameters are stored in it}."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        if is_low(parameter.dtype):
            found[_name(parameter.dtype)] += parameter.numel()
    return dict(found)


def _noted(subject: Subject, which: str, refused: LoadError | None) -> Subject:
    if which in ("none", "read"):
        return subject
    if which == "inputs":
        return _with_note(
            subject, "inputs came in FP16 or BF16, which the model does not run on: they are raised to FP32"
        )
    held = stored_low(subject.model, attributes=which == "attributes")
    dtypes = ", ".join(sorted({_name(x.dtype) for x in held}))
    others = [x for x in (*subject.model.parameters(), *subject.model.buffers()) if x.is_floating_point()]
    whole = all(is_low(x.dtype) for x in others)
    if which != "kept":
        more = sum(4 * x.numel() for x in held) / 2**20
        return _with_note(
            subject,
            f"the model is {'' if whole else 'partly '}stored in {dtypes}: the reference is the same values in FP32, held "
            f"for the audit alone ({more:.3g} MiB more); what {dtypes} had cost before is in no error",
        )
    if whole:
        raise LoadError(
            f"the model is stored in {dtypes} and does not run with the same values in FP32, so there is no reference: {refused}. "
            "Let its forward follow the dtype of its weights instead of casting by itself, or give the FP32 model",
            slug="low-precision-model",
        )
    return _with_note(
        subject,
        f"the model casts to {dtypes} by itself, so what it stores in {dtypes} stays as it is, in the reference and in "
        f"every plan: only the rest is audited",
    )


def _with_note(subject: Subject, note: str) -> Subject:
    return replace(subject, warnings=(*subject.warnings, note))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
