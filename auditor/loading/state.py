"""What a model is switched to, given or held in for as long as it is audited; afterwards it is as it was."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree

from .. import offload
from ..errors import LoadError, first_line
from ..isolation.members import modules_of, named_modules, named_tensors, raise_in_place, size_of, stored_low
from ..isolation.process import reseed, swapped
from ..numerics.formats import is_low
from ..raised import let_through
from ..records import Batch, Subject

T = TypeVar("T")


@contextmanager
def in_eval(model: nn.Module) -> Iterator[None]:
    """`model.eval()` for the body; every module's own flag comes back. What runs write is `isolated`'s to put back."""
    flags = [(module, flag) for module in modules_of(model) if (flag := getattr(module, "training", None)) is not None]
    switch(model, training=False)
    try:
        yield
    finally:
        for module, flag in flags:
            _set(module, flag)


def switch(model: nn.Module, training: bool) -> None:
    """`model.train()` or `model.eval()`; where that raises, as of exported modules, the flags alone."""
    try:
        model.train() if training else model.eval()
    except Exception:
        for module in modules_of(model):
            _set(module, training)


def _set(module: nn.Module, flag: bool) -> None:
    """`module.training`, also of a module that takes no attributes; a frozen one has none."""
    if getattr(module, "training", None) in (None, flag):
        return
    try:
        module.training = flag
    except Exception:
        module.__dict__["training"] = flag


def materialise(model: nn.Module, batch: Batch, seed: int) -> None:
    """Lazy layers take their shape, and their first weights, from a first call: the same ones in every process."""
    if any(is_lazy(x) for _, x in named_tensors(model)):
        reseed(seed)
        args, kwargs = pytree.tree_map_only(Tensor, torch.clone, batch)
        with torch.no_grad():
            model(*args, **kwargs)


def settled(subject: Subject, check: Callable[[Subject], Subject]) -> Subject:
    """The subject as it is audited, once `check` found that it runs so.

    What it stores low is raised with the inputs: parameters and buffers, and where that does not run, tensors that
    modules hold as plain attributes. Where that does not either, its forward casts to a dtype of its own: what is stored
    low then stays so, in the reference too. Raises: LoadError(slug="low-precision-model"), and what `check` raises.
    """
    refused: LoadError | None = None
    for candidate in _candidates(subject):
        try:
            with raised(candidate):
                checked = check(candidate)
        except LoadError as error:
            if error.slug != "forward-raises":
                raise
            refused = refused or error
            continue
        if candidate.raised == "kept":
            _reject_wholly_low(candidate, refused)
        return checked
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
    tensors = stored_low(model, attributes=which == "attributes") if which in ("weights", "attributes") else []
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


def _candidates(subject: Subject) -> Iterator[Subject]:
    """The subject with what may be raised so, and a note of it, in the order in which it is tried; at last, as it is."""
    weights, everything = stored_low(subject.model), stored_low(subject.model, attributes=True)
    if not weights and subject.stored_low:  # its checkpoint is, and was raised while it was read
        yield _noted(_widened(subject, "weights"), _of_checkpoint(subject))
        return
    if not weights:
        yield subject
        if any(
            isinstance(x, Tensor) and is_low(x.dtype) for x in pytree.tree_leaves((subject.batches, subject.held_out))
        ):
            note = "inputs came in FP16 or BF16, which the model does not run on: they are raised to FP32"
            yield _noted(_widened(subject, "inputs"), note)
        return
    numbers = Counter[str]()
    for parameter in subject.model.parameters():
        if is_low(parameter.dtype):
            numbers[name_of(parameter.dtype)] += parameter.numel()
    subject = replace(subject, stored_low=dict(numbers))
    partly = "" if _is_low_throughout(subject.model) else "partly "
    tried = {"weights": weights, "attributes": everything} if len(everything) > len(weights) else {"weights": weights}
    for which, tensors in tried.items():
        dtypes, more = _dtypes(tensors), sum(4 * x.numel() for x in tensors) / 2**20
        yield _noted(
            _widened(subject, which),
            f"the model is {partly}stored in {dtypes}: the reference is the same values in FP32, held "
            f"for the audit alone ({more:.3g} MiB more); what {dtypes} had cost before is in no error",
        )
    dtypes = _dtypes(weights)
    yield _noted(
        replace(subject, raised="kept"),
        f"the model casts to {dtypes} by itself, so what it stores in {dtypes} stays as it is, in the reference and in "
        f"every plan: only the rest is audited",
    )


def _of_checkpoint(subject: Subject) -> str:
    total, dtypes = size_of(subject.model), ", ".join(sorted(subject.stored_low))
    count = sum(subject.stored_low.values())
    return (
        f"the checkpoint stores {'all' if count == total else f'{count:,}'} of the model's {total:,} numbers in {dtypes}: the "
        f"reference is the same values in FP32; what {dtypes} had cost before is in no error"
    )


def _widened(subject: Subject, which: str) -> Subject:
    def wide(tree: T) -> T:
        found: T = pytree.tree_map_only(Tensor, lambda x: x.float() if is_low(x.dtype) else x, tree)
        return found

    return replace(subject, raised=which, batches=wide(subject.batches), held_out=wide(subject.held_out))


def _noted(subject: Subject, note: str) -> Subject:
    return replace(subject, warnings=(*subject.warnings, note))


def _is_low_throughout(model: nn.Module) -> bool:
    return all(is_low(x.dtype) for _, x in named_tensors(model) if x.is_floating_point())


def _reject_wholly_low(subject: Subject, refused: LoadError | None) -> None:
    if _is_low_throughout(subject.model):
        raise LoadError(
            f"the model is stored in {_dtypes(stored_low(subject.model))} and does not run with the same values in FP32, so "
            f"there is no reference: {refused}. Let its forward follow the dtype of its weights instead of casting by "
            "itself, or give the FP32 model",
            slug="low-precision-model",
        )


def _dtypes(tensors: list[Tensor]) -> str:
    return ", ".join(sorted({name_of(x.dtype) for x in tensors}))


def name_of(dtype: torch.dtype) -> str:
    """As torch writes it, without `torch.`."""
    return str(dtype).removeprefix("torch.")


def held_outside(model: nn.Module) -> set[str]:
    """Names of the parameters and buffers without values that accelerate's hooks hold the values of."""
    return {
        f"{path}.{name}" if path else name
        for path, module in named_modules(model)
        for hook in _hooks(module)
        if hook.offload
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]
        if tensor.is_meta and (hook.place_submodules or "." not in name)
    }


def told_of_hooks(model: nn.Module) -> tuple[str, ...]:
    """What to say of a model whose weights they hold."""
    count = len(held_outside(model))
    where = "lie in mapped files" if offload.now() is not None else "are in memory"
    said = (
        f"accelerate's hooks hold {count} of the model's tensors: they {where} for the audit, and the hooks do not run; "
        "plans are for the model with its hooks too"
    )
    return (said,) if count else ()


@contextmanager
def present(model: nn.Module) -> Iterator[None]:
    """In the body the model has the weights that accelerate's hooks hold, and is called past them; then it is as it was.

    Raises: LoadError(slug="meta-weights") where a hook has no value.
    """
    hooked = [module for module in modules_of(model) if _hooks(module)] if held_outside(model) else []
    with ExitStack() as stack:
        for module in modules_of(model) if hooked else ():
            for store in (module._parameters, module._buffers):
                stack.callback(_put_back, store, dict(store))
        for module in hooked:
            for hook in _hooks(module):
                if hook.offload:
                    stack.enter_context(swapped(hook, "execution_device", torch.device("cpu")))
                    stack.callback(hook.post_forward, module, None)
                    _fill(module, hook)
        for module in hooked:
            own = vars(module)
            stack.callback(_put_back, own, dict(own))
            del own["_hf_hook"], own["forward"]
            forward = own.pop("_old_forward")
            if getattr(forward, "__func__", None) is not type(module).forward:
                own["forward"] = forward
        yield


def _fill(module: nn.Module, hook: Any) -> None:
    try:
        hook.pre_forward(module)
    except Exception as error:
        let_through(error)
        raise LoadError(
            f"a weight of a {type(module).__name__} is offloaded, and its hook cannot load it "
            f"({type(error).__name__}: {first_line(error)[:160]}): load the weights first",
            slug="meta-weights",
        ) from error
    if (limit := offload.now()) is not None:
        offload.onto(module, limit.arena, limit.large)


def _hooks(module: nn.Module) -> list[Any]:
    """accelerate's, that bring weights to where they are used; none where another is among them, or of a traced module."""
    hook = vars(module).get("_hf_hook")
    if hook is None or isinstance(module, torch.fx.GraphModule):
        return []
    from accelerate.hooks import AlignDevicesHook

    hooks = list(getattr(hook, "hooks", (hook,)))
    return hooks if all(isinstance(one, AlignDevicesHook) for one in hooks) else []


def _put_back(store: dict[str, Any], content: dict[str, Any]) -> None:
    store.clear()
    store.update(content)
