"""One tensor: where its entries lie, its flags, hooks and gradient; the entries themselves are the storages' affair."""

from __future__ import annotations

from typing import Any

import torch

from .storages import Role, Storages, memory

_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


class TensorState:
    """What `tensor` was at the start."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.grad = tensor.grad if tensor.is_leaf or tensor.retains_grad else None
        self._leaf, self._requires_grad = tensor.is_leaf, tensor.requires_grad
        # A wrapper has no entries of its own, and its parts are found among its attributes.
        self._wraps = type(tensor).__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
        self._place = _place(tensor)
        self._alias = None if self._wraps else _alias(tensor)
        self._copy: torch.Tensor | None = None
        self._hooks = {name: _hooks_of(tensor, name) for name in _HOOKS}

    def watch(self, storages: Storages, role: Role) -> None:
        """Hand the memory to `storages`; entries that lie nowhere torch can say are copied here."""
        if not storages.add(memory(self.tensor), role) and not self._wraps and not self.tensor.is_meta:
            self._copy = _copy(self.tensor)

    def restore(self) -> None:
        """The old entries in the old shape, a leaf again, with the old flag and hooks."""
        if self._alias is not None and self.moved:
            self.tensor.data = self._alias
        if self._copy is not None:
            self.tensor.copy_(self._copy)
        if self._leaf and not self.tensor.is_leaf:
            self._cut_off()
        if self.tensor.requires_grad != self._requires_grad:
            self.tensor.requires_grad_(self._requires_grad)
        for name, hooks in self._hooks.items():
            if _hooks_of(self.tensor, name) != hooks:
                self._put_hooks(name, hooks)

    @property
    def moved(self) -> bool:
        """Whether its entries lie elsewhere now, by an assignment to `data`; True where torch cannot say."""
        return not self._wraps and (self._place is None or _place(self.tensor) != self._place)

    @property
    def regraded(self) -> bool:
        """Whether it has another gradient now, or one where it had none."""
        return self._leaf and self.tensor.grad is not self.grad

    def restore_gradient(self) -> None:
        """The same gradient, or none."""
        if self.regraded:
            self.tensor.grad = self.grad

    def _cut_off(self) -> None:
        """Torch doesn't detach views in place: such a tensor changes places with a new view of the same base."""
        base = self.tensor._base
        if base is None:
            self.tensor.detach_()
            return
        if not base.is_leaf:
            base.detach_()
        # Not torch.utils.swap_tensors, which refuses a tensor that anything refers to weakly: such references stay true.
        torch._C._swap_tensor_impl(self.tensor, self._viewed(base))

    def _viewed(self, base: torch.Tensor) -> torch.Tensor:
        assert self._place is not None and self._alias is not None
        _, _, shape, stride, offset = self._place
        # A view made without gradients may not be written with them.
        with torch.enable_grad():
            view = base.as_strided(shape, stride, offset)
        return view if _place(view) == self._place else self._alias

    def _put_hooks(self, name: str, hooks: dict[Any, Any]) -> None:
        held = getattr(self.tensor, name)
        if held is None or not hooks:
            setattr(self.tensor, name, hooks or None)
        else:
            held.clear()
            held.update(hooks)


def _hooks_of(tensor: torch.Tensor, name: str) -> dict[Any, Any]:
    return dict(getattr(tensor, name, None) or {})


def _alias(tensor: torch.Tensor) -> torch.Tensor | None:
    """The same entries in another object, which shares nothing else with the tensor.

    None for what a transform of torch.func passes around: it can't be given other entries.
    """
    if tensor.layout == torch.strided and not tensor.is_nested and _place(tensor) is None:
        return None
    return tensor.data


def _place(tensor: torch.Tensor) -> tuple[Any, ...] | None:
    """Where the entries lie and how they are read; None for those without strides, whose place nobody can tell."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return None
    try:
        where = tensor.untyped_storage()._cdata
        return where, tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset()
    except (RuntimeError, NotImplementedError):
        return None


def _copy(tensor: torch.Tensor) -> torch.Tensor | None:
    try:
        return tensor.clone()
    except (RuntimeError, NotImplementedError):
        return None
