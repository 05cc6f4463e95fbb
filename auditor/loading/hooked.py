"""A model in hand whose weights accelerate's hooks hold: they are put into it for as long as it is audited."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .. import offload
from ..errors import LoadError, first_line
from ..isolation.members import modules_of, named_modules
from ..raised import let_through

HOOK, CALLED = "_hf_hook", "_old_forward"
"""Where accelerate keeps a module's hook, and the forward that the hook surrounds."""


def held_outside(model: nn.Module) -> set[str]:
    """Names of the parameters and buffers without values that hooks hold the values of."""
    found = set()
    for path, module in named_modules(model):
        for loader in _loaders(module):
            for name, _, _, _ in _empty(module, loader):
                found.add(f"{path}.{name}" if path else name)
    return found


def told(model: nn.Module) -> tuple[str, ...]:
    """What to say of such a model."""
    count = len(held_outside(model))
    if not count:
        return ()
    limited = offload.now() is not None
    where = "lie in mapped files" if limited else "are in memory"
    return (
        f"accelerate's hooks hold {count} of the model's tensors: they {where} for the audit, and the hooks do not run; "
        "plans are for the model with its hooks too",
    )


@contextmanager
def present(model: nn.Module) -> Iterator[None]:
    """In the body the model has the weights that hooks hold, and is called past the hooks; then it is as it was.

    Raises: LoadError(slug="meta-weights") where a hook has no value.
    """
    kept: list[tuple[dict[str, Any], dict[str, Any]]] = []
    try:
        for module in modules_of(model):
            if any(_empty(module, loader) for loader in _loaders(module)):
                for part in module.modules():
                    kept += [(store, dict(store)) for store in (part._parameters, part._buffers)]
        hooked = [module for module in modules_of(model) if _loaders(module)] if kept else []
        for module in hooked:
            _fill(module)
        for module in hooked:
            kept.append((vars(module), dict(vars(module))))
            _unhook(module)
        yield
    finally:
        for store, content in reversed(kept):
            if list(store) != list(content) or any(store[key] is not value for key, value in content.items()):
                store.clear()
                store.update(content)


def _loaders(module: nn.Module) -> list[Any]:
    """The hooks of a module that accelerate placed to align devices; none where another is among them.

    Nor of a traced module, whose class they wrap.
    """
    if isinstance(module, torch.fx.GraphModule):
        return []
    hook = vars(module).get(HOOK)
    hooks = [] if hook is None else list(getattr(hook, "hooks", (hook,)))
    return hooks if all(hasattr(each, "weights_map") and hasattr(each, "execution_device") for each in hooks) else []


def _empty(module: nn.Module, loader: Any) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    """What a hook fills: its name for it, the module that has it, the name there, and the tensor without values."""
    if not loader.offload or loader.weights_map is None:
        return []
    parts = named_modules(module) if loader.place_submodules else [("", module)]
    return [
        (f"{path}.{key}" if path else key, part, key, tensor)
        for path, part in parts
        for store in (part._parameters, part._buffers)
        for key, tensor in store.items()
        if tensor is not None and tensor.is_meta
    ]


def _fill(module: nn.Module) -> None:
    for loader in _loaders(module):
        for name, part, key, empty in _empty(module, loader):
            try:
                value = loader.weights_map[name].to(empty.dtype)
            except Exception as error:
                let_through(error)
                raise LoadError(
                    f"{name} of a {type(module).__name__} is offloaded, and its hook cannot load it "
                    f"({type(error).__name__}: {first_line(error)[:160]}): load the weights first",
                    slug="meta-weights",
                ) from error
            if isinstance(empty, nn.Parameter):
                part._parameters[key] = nn.Parameter(value, requires_grad=empty.requires_grad)
            else:
                part._buffers[key] = value
        offload.onto(module)


def _unhook(module: nn.Module) -> None:
    own = vars(module)
    forward = own.pop(CALLED, None)
    own.pop(HOOK)
    own.pop("forward", None)
    if forward is not None and getattr(forward, "__func__", None) is not type(module).forward:
        own["forward"] = forward
