"""The public function `audit` for a live model; the command line uses `flow.run` directly."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

from torch import nn

from .asked import validate
from .features import part
from .flow import run
from .isolation.members import enter_by, method_of
from .loading import from_object
from .loading.target import guard_progress
from .offload import resident_limit
from .progress.shown import in_notebook, refresh_display, reporter
from .results import Audit
from .score import in_hand
from .settings import Settings, options_of


class _Signature(inspect.Signature):
    """A signature that `help()` shows in one line; editors and notebooks read its parameters."""

    def __str__(self) -> str:
        return self.format()

    def format(self, **how: Any) -> str:
        return "(model, example_inputs, **options) -> Audit"


def audit(model: nn.Module | Callable[..., Any], example_inputs: Any, **asked: Any) -> Audit:
    """Audit a model on example inputs; the audit leaves the model unchanged, bit for bit. Raises: AuditorError.

        audit = auditor.audit(model, inputs, formats="bf16", max_error=0.01)
        print(audit, audit.plan)  # verdict and evidence; the recommended plan
        audit.save("audits/net")  # report.html, patched_model.py and more
        model = auditor.apply(model, audit)

    model: an nn.Module, or one of its methods, such as `model.decode`, which the audit then calls instead of the model.
    example_inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or a list of such tuples or dicts
    (batches). The options, all keyword arguments:

    """
    if (bound := method_of(model)) is not None:
        with called_by(*bound) as owner:
            return _audit(owner, example_inputs, asked)
    return _audit(model, example_inputs, asked)


@contextmanager
def called_by(model: nn.Module, method: str) -> Iterator[nn.Module]:
    """In the `with` block, calls of the model run a method instead of `forward`."""
    own = {name: value for name, value in model.__dict__.items() if name == "forward"}
    if method != "forward":
        enter_by(model, method)
    try:
        yield model
    finally:
        model.__dict__.pop("forward", None)
        model.__dict__.update(own)


def _audit(model: Any, example_inputs: Any, asked: dict[str, Any]) -> Audit:
    settings = validate(Settings, asked)
    settings.rulebook, settings.where  # noqa: B018 - rejects invalid rules and a missing device before anything runs
    if settings.evaluate is not None:
        scoring = in_hand(settings.evaluate, better=settings.better, max_drop=settings.max_drop)
        settings = settings.model_copy(update={"scoring": scoring})
    progress = settings.progress
    shown = progress is True or (progress is None and in_notebook())
    own = nullcontext(guard_progress(progress) if callable(progress) else None)
    with refresh_display(reporter(settings=settings)) if shown else own as listener, resident_limit(settings.memory):
        if settings.training:
            with_loss = part("objective").training_subject
            subject = with_loss(model, example_inputs, settings.kwargs, settings.loss_fn)
        else:
            subject = from_object(model, example_inputs, settings.kwargs)
        return Audit.of(run(subject, settings.model_copy(update={"progress": listener})))


_asked = [
    inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=one.default, annotation=one.annotation)
    for name, one in Settings.model_fields.items()
    if name in options_of(Settings)
]
_own = [*inspect.signature(audit).parameters.values()][:2]
audit.__signature__ = _Signature([*_own, *_asked], return_annotation=Audit)  # type: ignore[attr-defined]
audit.__doc__ = f"{str(audit.__doc__).rstrip()}\n\n" + "".join(
    f"    {name}: {one.plain_help}.\n" for name, one in options_of(Settings).items()
)
