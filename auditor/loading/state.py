"""Decides which tensors become FP32 in an audit; loads offloaded weights, checkpoints and lazy layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import offload
from ..errors import LoadError, describe, let_through
from ..isolation.isolated import in_fp32
from ..isolation.members import modules_of, named_modules, named_tensors, size_of, stored_low
from ..isolation.process import reseed, swap_attribute
from ..numerics.casting import widen
from ..numerics.entries import entries, over_tensors
from ..numerics.formats import dtype_name, is_low
from ..records import Batch, Subject
from .statedicts import few, is_extra, load_state, read_checkpoint


def materialise(model: nn.Module, batch: Batch, seed: int) -> None:
    """Initialize lazy layers by a first call, with the same shapes and weights in every process."""
    if any(is_lazy(x) for _, x in named_tensors(model)):
        reseed(seed)
        args, kwargs = over_tensors(torch.clone, batch)
        with torch.no_grad():
            model(*args, **kwargs)


def settle_precision(subject: Subject, check: Callable[[Subject], Subject]) -> Subject:
    """Decide which low-precision tensors of the subject become FP32 for the audit; `check` runs the subject.

    First parameters, buffers and inputs become FP32; if the run fails, plain tensor attributes of modules too. If both
    runs fail, the forward presumably casts to a low dtype: all tensors keep their dtypes, also in the reference run.
    Raises: LoadError(slug="low-precision-model"), and the errors of `check`.
    """
    refused: LoadError | None = None
    for candidate in _candidates(subject):
        try:
            with upcast_model(candidate):
                checked = check(candidate)
        except LoadError as error:
            if error.slug != "forward-raises":
                raise
            refused = refused or error
            continue
        floats = [x for _, x in named_tensors(subject.model) if x.is_floating_point()]
        if candidate.upcast == "kept" and all(is_low(x.dtype) for x in floats):
            raise LoadError(
                "the model is stored in low precision and does not run when its weights are converted to "
                f"FP32, so there is no reference: {refused}. Let its forward use the dtype of its weights "
                "instead of fixed casts, or give the FP32 model",
                slug="low-precision-model",
            )
        return checked
    assert refused is not None
    raise refused


@contextmanager
def upcast_model(subject: Subject) -> Iterator[None]:
    """In the body, offloaded weights are loaded, and tensors are FP32 as `settle_precision` decided; then undo both."""
    with present(subject.model), in_fp32(subject.model, subject.upcast):
        yield


def _candidates(subject: Subject) -> Iterator[Subject]:
    """Variants of the subject to try, in order, with notes about the tensors that become FP32 or keep a low dtype."""
    model = subject.model
    low, everything = stored_low(model), stored_low(model, attributes=True)
    if not low and not subject.stored_low:
        yield subject
        given = pytree.tree_leaves((subject.batches, subject.held_out))
        if any(isinstance(x, Tensor) and is_low(x.dtype) for x in given):
            note = "inputs in FP16 or BF16, on which the model does not run, were converted to FP32"
            yield _widen(subject, "inputs", note)
        return
    counts = Counter(subject.stored_low)  # low-precision weights of the checkpoint, in FP32 in the model
    for parameter in model.parameters():
        if is_low(parameter.dtype):
            counts[dtype_name(parameter.dtype)] += parameter.numel()
    subject = replace(subject, stored_low=dict(counts))
    dtypes = ", ".join(sorted({*counts, *(dtype_name(x.dtype) for x in low)}))
    count, total = counts.total(), size_of(model)
    note = (
        f"the {'model' if low else 'checkpoint'} stores "
        f"{'all' if count == total else f'{count:,}'} of {total:,} weights in {dtypes}: the "
        f"reference uses these values in FP32, so errors exclude the earlier rounding to {dtypes}"
    )
    yield _widen(subject, "weights", note)
    if len(everything) > len(low) > 0:
        yield _widen(subject, "attributes", note)
    if low:
        note = (
            f"the model itself casts to {dtypes}, so its {dtypes} weights stay in {dtypes}, in the reference "
            "and in every plan; only the rest of the model is audited"
        )
        yield replace(subject, upcast="kept", warnings=(*subject.warnings, note))


def _widen(subject: Subject, which: str, note: str) -> Subject:
    batches, held_out = widen((subject.batches, subject.held_out))
    return replace(subject, upcast=which, batches=batches, held_out=held_out, warnings=(*subject.warnings, note))


def held_outside(model: nn.Module) -> set[str]:
    """Names of meta parameters and buffers whose values accelerate's hooks store."""
    names = set[str]()
    for path, module in named_modules(model):
        for hook in _hooks(module):
            if not hook.offload:
                continue
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                is_of_hook = hook.place_submodules or "." not in name
                if tensor.is_meta and is_of_hook:
                    names.add(f"{path}.{name}" if path else name)
    return names


@contextmanager
def present(model: nn.Module) -> Iterator[None]:
    """In the body, weights that accelerate's hooks offload are loaded, and the hooks do not run; then undo both.

    Raises: LoadError(slug="meta-weights") if a hook cannot load its weights.
    """
    modules = modules_of(model) if held_outside(model) else []
    hooked = [module for module in modules if _hooks(module)]
    with ExitStack() as stack:
        for store in (store for module in modules for store in (module._parameters, module._buffers, vars(module))):
            stack.callback(store.update, dict(store))
            stack.callback(store.clear)  # is called before `update`
        for module in hooked:
            for hook in _hooks(module):
                if hook.offload:
                    stack.enter_context(swap_attribute(hook, "execution_device", torch.device("cpu")))
                    stack.callback(hook.post_forward, module, None)
                    try:
                        hook.pre_forward(module)
                    except Exception as error:
                        let_through(error)
                        raise LoadError(
                            f"a weight of {type(module).__name__} is offloaded and cannot be loaded by accelerate's hook "
                            f"({describe(error)}): load the weights first",
                            slug="meta-weights",
                        ) from error
                    offload.onto(module)
        for module in hooked:
            own = vars(module)
            del own["_hf_hook"], own["forward"]
            forward = own.pop("_old_forward")
            if getattr(forward, "__func__", None) is not type(module).forward:
                own["forward"] = forward
        yield


def _hooks(module: nn.Module) -> list[Any]:
    """The accelerate hooks that load a module's weights; empty if the module has other hooks, or is a GraphModule."""
    hook = vars(module).get("_hf_hook")
    if hook is None or isinstance(module, torch.fx.GraphModule):
        return []
    from accelerate.hooks import AlignDevicesHook

    hooks = list(getattr(hook, "hooks", (hook,)))
    return hooks if all(isinstance(one, AlignDevicesHook) for one in hooks) else []


def load_into(model: nn.Module, path: Path) -> list[str]:
    """Load the checkpoint at `path` into `model`; return notes about its contents.

    Raises: LoadError(slug="missing-weights" | "bad-weights" | "weights-mismatch").
    """
    with convert_errors(slug="bad-weights"):
        content = read_checkpoint(path)
    with convert_errors(slug="weights-mismatch"):
        state = load_state(model, content, path.name)
    own = model.state_dict()
    notes = _notes_on_dtypes(state, own, path.name)
    loaded = {id(value) for value in state.values()}
    beside = [name for name, value in content.items() if id(value) not in loaded]
    if beside:
        notes.append(f"{path.name} also contains {few(beside)}, which the model lacks: ignored")
    lacking = [name for name in own if is_extra(name) and name not in state]
    if lacking:
        notes.append(f"{path.name} lacks {few(lacking)}: they keep their initial values")
    return notes


def _notes_on_dtypes(state: Mapping[str, Any], own: Mapping[str, Tensor], file: str) -> list[str]:
    """A note on each pair of different dtypes in a file and in the model."""
    pairs = dict[tuple[torch.dtype, torch.dtype], None]()
    for name, value in state.items():
        if isinstance(value, Tensor) and name in own and value.is_floating_point():
            pairs[value.dtype, own[name].dtype] = None
    notes = list[str]()
    for stored, loaded in pairs:
        if stored is loaded:
            continue
        is_exact = torch.promote_types(stored, loaded) is loaded
        effect = "no value changed" if is_exact else "the values were rounded"
        notes.append(f"{file} stores weights in {dtype_name(stored)}, the model in {dtype_name(loaded)}: {effect}")
    return notes


@contextmanager
def convert_errors(slug: str) -> Iterator[None]:
    """Convert an error about a checkpoint in the body to a LoadError: "missing-weights" for a missing file,
    `slug` for any other error."""
    try:
        yield
    except FileNotFoundError as error:
        raise LoadError(str(error), slug="missing-weights") from error
    except ValueError as error:
        raise LoadError(str(error), slug) from error


def reject_non_finite(model: nn.Module) -> None:
    """Reject NaN in parameters and buffers, and Inf in parameters; buffers such as masks may contain Inf. Raises:
    LoadError(slug="nan-weights")."""
    for name, tensor in named_tensors(model):
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        if (limit := offload.now()) is not None:
            limit.ease()  # this pass reads faster than the watching thread frees
        stored = entries(tensor.detach())
        if stored.float().sum().isfinite():
            continue  # one pass; finding the entries takes ten times as long
        bad = ~stored.isfinite() if isinstance(tensor, nn.Parameter) else stored.isnan()
        if count := int(bad.sum()):
            hint = "give a checkpoint from before training diverged"
            raise LoadError(
                f"{name} contains {count} NaN or infinite values out of {tensor.numel()}: {hint}", "nan-weights"
            )
