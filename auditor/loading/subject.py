"""Builds a Subject from a TARGET or a live model, and runs the model's first forward in FP32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

from .. import offload
from ..errors import LoadError, describe, let_through
from ..isolation import in_eval
from ..isolation.isolated import in_fp32, switch
from ..isolation.members import is_wrapped, named_tensors, unwrap_model, wrapper_of
from ..isolation.outputs import NamedTensors
from ..isolation.process import flags, reseed, under
from ..isolation.run_model import run_model
from ..numerics.entries import entries, is_number, tensors_in
from ..records import Batch, Origin, Subject
from . import inputs, state
from .discover import BuiltModel, discover
from .doors import build, needed_packages
from .placement import with_moved_inputs
from .state import held_outside, materialise, present, settle_precision
from .target import Target, blame, import_target, parse, user_code
from .texts import tokenize
from .watch import Watch, ledger_of, watch_weights

RANDOM_WEIGHTS = (
    "weights are RANDOM, since no checkpoint was loaded; results may differ for trained ones (pass --weights)"
)
SYNTHETIC_INPUTS = (
    "inputs were generated; value ranges and errors may differ on real data (define get_inputs() or pass --inputs)"
)
ZEROS = (
    "All outputs are zero in FP32, for example because the last layer is initialized to zero, so errors are "
    "meaningless. Audit trained weights."
)

Finder = Callable[[ModuleType, Mapping[str, Any], Subject], Subject]
"""Adds the loss and targets of a training step: (target's module, result of `audit_spec()`, Subject) -> Subject."""


def cautions(subject: Subject) -> tuple[str, ...]:
    """The subject's warnings, with a warning for random weights and a warning for generated inputs, if any."""
    random = (RANDOM_WEIGHTS,) if subject.random_weights else ()
    synthetic = (SYNTHETIC_INPUTS,) if subject.synthetic_inputs else ()
    return (*subject.warnings, *random, *synthetic)


def load(
    target: str,
    *,
    inputs: str | None = None,
    weights: str | None = None,
    seed: int = 0,
    objective: Finder | None = None,
) -> Subject:
    """Build the model that TARGET names, with inputs and weights, and run every batch in FP32.

    objective: adds a training step's loss and targets, before the run in FP32. Raises: LoadError, whose slug names the
    problem.
    """
    parsed = parse(target)
    if parsed.hub:
        needed_packages(parsed)  # imports them now, so that watch_weights can wrap their readers
    as_set = flags()
    with user_code(parsed, seed):
        with under(as_set):
            result = replace(_load(parsed, inputs, weights, seed, objective), flags=flags())
        return settle_precision(result, check)


def from_object(model: nn.Module, example_inputs: Any, kwargs: dict[str, Any] | None = None) -> Subject:
    """Build a Subject from the caller's model, which is neither moved nor changed.

    example_inputs: texts, or any form that `inputs.as_batches` accepts; None if `kwargs` suffices. kwargs: keyword
    arguments of every call.
    """
    if not isinstance(model, nn.Module):
        raise LoadError(f"expected an nn.Module, got a {type(model).__name__}{_instead_of(model)}", slug="not-a-model")
    given = () if example_inputs is None and kwargs else example_inputs
    inputs.reject_iterators(kwargs, "kwargs")

    def subject(arrays: bool) -> Subject:
        batches = inputs.as_batches(given, "example_inputs", arrays=arrays)
        calls = tuple((args, {**own, **kwargs}) for args, own in batches) if kwargs else batches
        calls, labels = inputs.without_labels(model, calls)
        calls = _with_plain_names(calls)
        kind = type(model)
        target = f"{kind.__module__}:{kind.__qualname__}"
        made = Subject(
            model, calls, kind.__name__, target, "example_inputs", "a live nn.Module", warnings=(*notes, *labels)
        )
        return replace(made, stored=ledger_of(model, Watch(subject.__code__))[0])

    model, notes = _unwrap(model)
    _reject_unfit(model)
    given = tokenize(model, given)
    try:
        return settle_precision(subject(arrays=False), check)
    except LoadError:
        if any(isinstance(leaf, np.ndarray) for leaf in tree_leaves((example_inputs, kwargs))):
            with suppress(LoadError):  # the model may convert arrays itself
                return settle_precision(subject(arrays=True), check)
        raise


def _instead_of(value: Any) -> str:
    """What to pass instead of something that is no model, after a colon; "" if unknown."""
    if isinstance(value, str):
        return f": run `python -m auditor {value}`, or pass the model itself"
    if isinstance(value, torch.export.ExportedProgram):
        return ": pass `program.module()`, or save the program and run `python -m auditor FILE.pt2`"
    parts = getattr(value, "components", None)
    names = [name for name, part in parts.items() if isinstance(part, nn.Module)] if isinstance(parts, dict) else []
    if not names:
        return ""
    listed = ", ".join(names)
    return (
        f" of several models ({listed}): pass one, as in auditor.audit(pipe.{names[0]}, inputs), or write "
        "pipe.save_pretrained(DIRECTORY) and run `python -m auditor hf:DIRECTORY`, which audits each on its calls"
    )


def check(subject: Subject) -> Subject:
    """Run every batch in FP32 and return the subject; the model and the random generators are then restored.

    Raises: LoadError(slug="bad-surroundings" | "nan-weights" | "forward-raises" | "tensor-class" | "nan-output").
    """
    around = next((f"torch.autocast({name!r})" for name in ("cpu", "cuda") if torch.is_autocast_enabled(name)), "")
    around = around or ("torch.device('meta')" if torch.get_default_device().type == "meta" else "")
    if around:  # inside these modes, the model would run in other dtypes or without data
        raise LoadError(f"the audit was called inside {around}: call auditor.audit outside of it", "bad-surroundings")
    _reject_classes(subject.name, (x for _, x in named_tensors(subject.model)))
    state.reject_non_finite(subject.model)
    with under({}), in_eval(subject.model):
        subject, answers = _run(subject)
        leaves = [leaf for answer in answers for leaf in answer]
        _reject_classes(subject.name, (*leaves, *tensors_in(subject.batches)))
        if any(is_number(leaf) and bool(entries(leaf).isnan().any()) for leaf in leaves):
            hint = "there is no reference to compare with. Give inputs with finite results, or fix the model first"
            raise LoadError(f"{subject.name} returns NaN in FP32 already: {hint}", slug="nan-output")
    numbers = [entries(leaf) for leaf in leaves if is_number(leaf)]
    if any(x.numel() for x in numbers) and not any(bool(x.count_nonzero()) for x in numbers):
        return replace(subject, warnings=(*subject.warnings, ZEROS))
    return subject


def _reject_classes(name: str, tensors: Iterable[Tensor]) -> None:
    """Reject tensors whose class restricts operations, so that they cannot be compared. Raises: LoadError."""
    for leaf in (x for x in tensors if type(x) not in (Tensor, nn.Parameter)):
        try:
            bool((entries(leaf) if is_number(leaf) else leaf).isnan().any())
        except Exception as error:
            let_through(error)
            raise LoadError(
                f"{name} takes, returns or stores a {type(leaf).__name__}, a tensor class that rejects operations "
                f"needed for comparison ({describe(error)}): use plain tensors",
                slug="tensor-class",
            ) from error


def _run(subject: Subject) -> tuple[Subject, list[NamedTensors]]:
    """The subject and the outputs of its batches; inputs are moved to the model's GPU if the model fails otherwise.
    Raises: LoadError."""
    try:
        return subject, [_forward(subject, batch) for batch in subject.batches + subject.held_out]
    except LoadError:
        for other in with_moved_inputs(subject):
            with suppress(LoadError):
                return other, [_forward(other, batch) for batch in other.batches + other.held_out]
        raise


def _load(
    target: Target, inputs_text: str | None, weights_text: str | None, seed: int, objective: Finder | None = None
) -> Subject:
    with watch_weights(_load.__code__) as watch:
        module = ModuleType(target.module) if target.hub else import_target(target)
        read_on_import = "read" in watch.seen
        watch.seen.discard("read")
        result = build(target, seed, inputs_text) if target.hub else discover(module, target, seed)
        seen = frozenset(watch.seen)
        model, notes = _unwrap(result.model)
        notes += result.notes
        if not weights_text:
            notes += result.checkpoint
        _reject_unfit(model, lazy=True)
        if weights_text:
            notes += tuple(state.load_into(model, Path(weights_text)))
    offload.onto(model)
    watch.read_files(model)
    stored, casts = ledger_of(model, watch)
    switch(model, training=False)
    with present(model), in_fp32(model):
        given, held_out = _find_inputs(module, target, result, model, inputs_text, seed)
    notes += given.notes
    if given.synthetic and not inputs_text:
        for name in filter(inputs.LIKE_INPUTS.match, vars(module)):
            notes += (f"{target.label} defines {name}, which is not read: rename it to get_inputs",)
    materialise(model, inputs.without_labels(model, given.batches)[0][0], seed)
    has_loaded = _has_read_weights(result.origin, seen, read_on_import) or bool(seen & {"restored", "trained"})
    has_weights = has_loaded or not list(model.parameters())
    origin = result.origin
    if weights_text and origin:
        origin = replace(origin, weights=str(Path(weights_text).resolve()))
    subject = Subject(
        model=model,
        batches=given.batches,
        name=str(result.spec.get("name", target.name)),
        target=target.text,
        inputs_source=given.source,
        weights_source=_weights_source(result.origin, weights_text, seen, seed, has_weights),
        held_out=held_out,
        origin=origin,
        synthetic_inputs=given.synthetic,
        random_weights=not (weights_text or has_weights),
        warnings=notes,
        stored_low={} if weights_text else result.stored_low,
        stored=stored,
        casts=casts,
    )
    if objective is not None:  # takes the labels that its loss needs
        subject = objective(module, result.spec, subject)
    return _without_labels(subject)


def _has_read_weights(origin: Origin | None, seen: Collection[str], read_on_import: bool) -> bool:
    """Whether the model's weights may come from a file. A file may contain inputs: only files that are read while the
    model is built count. seen: events while the model was built."""
    kind = origin.kind if origin else ""
    if kind == "instance":  # built on import
        return read_on_import
    return kind != "spec" and "read" in seen


def _weights_source(
    origin: Origin | None, weights_text: str | None, seen: Collection[str], seed: int, has_weights: bool
) -> str:
    """Where the weights come from, in words."""
    if weights_text:
        return f"--weights {weights_text}"
    if origin is None or not has_weights:
        return f"random initialization, seed {seed}"
    if origin.kind == "program":
        return f"stored in {Path(str(origin.folder)).name}"
    how = "trained" if "trained" in seen else "loaded"
    return f"{how} by {origin.symbol}"


def _without_labels(subject: Subject) -> Subject:
    """The subject without labels that forward does not take, and with a note if there were some."""
    batches, notes = inputs.without_labels(subject.model, subject.batches)
    held_out, _ = inputs.without_labels(subject.model, subject.held_out)
    return replace(
        subject,
        batches=_with_plain_names(batches),
        held_out=_with_plain_names(held_out),
        warnings=(*subject.warnings, *notes),
    )


def _with_plain_names(batches: tuple[Batch, ...]) -> tuple[Batch, ...]:
    """The batches, with dicts of keyword arguments that no longer tell how the user gave them: torch.export knows no others."""
    return tuple((args, dict(named)) for args, named in batches)


def _find_inputs(
    module: ModuleType, target: Target, built: BuiltModel, model: nn.Module, text: str | None, seed: int
) -> tuple[inputs.Inputs, tuple[Batch, ...]]:
    """The calibration and held-out inputs; an explicit `--inputs` replaces only the calibration inputs."""
    if built.inputs is not None:
        return built.inputs, ()
    spec = built.spec
    reseed(seed)
    held_out = spec.get("eval_inputs") if spec else getattr(module, "get_eval_inputs", None)
    what = "audit_spec()" if spec else f"get_eval_inputs() in {target.label}"
    unseen = () if held_out is None else inputs.named_inputs(held_out, what, model)
    if text:
        return inputs.from_argument(text, model, seed), unseen
    if spec:
        batches = inputs.named_inputs(spec["inputs"], "audit_spec()", model)
        return inputs.Inputs(batches, f"{target.label}:audit_spec"), unseen
    reseed(seed)
    for name in ("get_inputs", "example_inputs"):  # a value or a function
        if (value := getattr(module, name, None)) is not None:
            what = f"{name}{'()' if callable(value) else ''} in {target.label}"
            batches = inputs.named_inputs(value, what, model)
            return inputs.Inputs(batches, f"{target.label}:{name}"), unseen
    if getattr(model, "example_input_array", None) is None:
        loaded, notes = inputs.from_loader(vars(module), model, target.label)
        if loaded is not None:
            return loaded, unseen
        return replace(inputs.from_model(model, seed), notes=notes), unseen
    return inputs.from_model(model, seed), unseen


def _unwrap(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """The model inside wrappers, with notes about the wrappers and about accelerate's hooks."""
    inner, notes = unwrap_model(model), list[str]()
    if inner is not model:
        kind = "torch.compile" if wrapper_of(model) == "_orig_mod" else type(model).__name__
        notes.append(
            f"The model is wrapped in {kind}: the audit covers the {type(inner).__name__} inside, "
            "uncompiled and in one process. Plans can be applied with or without the wrapper."
        )
    if count := len(held_outside(inner)):
        where = "lie in mapped files" if offload.now() is not None else "are in memory"
        notes.append(
            f"accelerate offloads {count} of the model's tensors: they {where} during the audit, "
            "without accelerate's hooks; plans can be applied with the hooks"
        )
    return inner, tuple(notes)


def _reject_unfit(model: nn.Module, lazy: bool = False) -> None:
    """Reject models that torch cannot traverse, that are already patched, or that are uninitialized.

    lazy: whether lazy layers are allowed; in a live model, the caller must initialize them by a first call.
    """
    try:
        list(model.modules())
    except TypeError as error:
        raise LoadError(
            f"torch cannot list the modules of this model ({error}): a class with __eq__ also needs __hash__",
            slug="unhashable-module",
        ) from error
    if (path := next((path for path, module in model.named_modules() if is_wrapped(module)), None)) is not None:
        raise LoadError(
            f"a plan has already patched this {type(model).__name__}{f', at {path!r}' if path else ''}: give the original model",
            slug="patched-model",
        )
    elsewhere = held_outside(model)
    for name, tensor in named_tensors(model):
        if is_lazy(tensor):
            if not lazy:
                hint = "call the model once, or load its weights, before the audit"
                raise LoadError(f"the weight {name} has no shape yet: {hint}", slug="lazy-weights")
        elif tensor.is_meta and isinstance(tensor, nn.Parameter) and name not in elsewhere:
            raise LoadError(
                f"the weight {name} is on the meta device, without values: load the weights first", slug="meta-weights"
            )


def _forward(subject: Subject, batch: Batch) -> NamedTensors:
    try:
        return run_model(subject.model, batch)
    except (Exception, SystemExit) as error:
        let_through(error, memory=False)
        shapes = ", ".join(inputs.shapes_of(batch)) or "no tensor"
        args = batch[0]
        several = len(args) > 1 and not batch[1] and all(isinstance(x, Tensor) for x in args)
        listed = ". A list of tensors is one call; several batches are written [(t1,), (t2,)]" if several else ""
        source = "the held-out inputs" if any(batch is one for one in subject.held_out) else subject.inputs_source
        labels = (
            ". If the last tensor holds labels, give the other inputs only" if inputs.may_end_in_labels(args) else ""
        )
        hint = f"check number, shapes and dtypes of the inputs{listed}{labels}"
        raise LoadError(
            f"{subject.name} raised {blame(error)} on inputs {shapes} from {source}: {hint}",
            slug="forward-raises",
        ) from error
