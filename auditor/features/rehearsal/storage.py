"""The dtypes in which each recipe stores the user's tensors, one by one, and takes inputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ...isolation.members import OWN, is_plainly_low
from ...numerics.entries import over_tensors
from ...numerics.formats import dtype_of, is_low
from .result import AS_WRITTEN, Recipe

CONVERTED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
"""Dtypes of tensors that a recipe converts. Quantized weights (FP8, integers) keep their dtypes."""


class Storage:
    """Converts modules to a recipe. In FP32, every tensor becomes FP32.

    Under autocast, trained parameters become FP32. Frozen tensors that the user stores in FP16 or BF16 beside FP32
    parameters, such as the base of adapters or an encoder, are stored in the recipe's format. If the user trains
    FP16 or BF16 parameters, every tensor becomes FP32, as for autocast. With a plan or FP32 modules, too.
    modules: those to convert, each with all its parts. trained: the trained parameters. variables: further tensors in
    FP16 or BF16, of the step and of no module, such as a memory bank; they count as frozen.
    """

    def __init__(
        self, modules: Iterable[nn.Module], trained: Collection[Any], variables: Iterable[torch.Tensor] = ()
    ) -> None:
        self._modules = list({id(one): one for module in modules for one in _parts(module)}.values())
        self._owners, self._low, joined = set[int](), dict[int, torch.Tensor](), set[int]()
        known = {id(p) for p in trained}
        for module in self._modules:
            tensors = list(_own_tensors(module))
            low = {id(x): x for x in tensors if is_plainly_low(x)}
            self._low |= low
            if low:
                self._owners.add(id(module))
            if any(id(x) in known for x in tensors):  # its buffers have to fit its parameters
                joined |= {number for number, x in low.items() if not isinstance(x, nn.Parameter)}
        self._variables = [x for x in variables if id(x) not in self._low and id(x) not in known]
        self._low |= {id(x): x for x in self._variables}
        self._frozen = {} if known & self._low.keys() else {n: x for n, x in self._low.items() if n not in joined}

    def convert(self, recipe: Recipe) -> None:
        """Convert the tensors of all modules to the dtypes that they have in the recipe."""
        for module in self._modules:
            for x in _own_tensors(module):
                is_kept = x.dtype not in CONVERTED or nn.parameter.is_lazy(x)
                if not is_kept and (is_plainly_low(x) or _is_member(module, x)):
                    _convert(module, x, self._dtype(x, recipe))
        for x in self._variables:
            _set_dtype(x, self._dtype(x, recipe))

    def cast_batch(self, batch: Any, recipe: Recipe) -> Any:
        """The batch, whose FP16 and BF16 tensors get the dtype that such tensors have in the recipe."""
        if recipe.name == AS_WRITTEN or not (self._low or recipe.format == "fp32"):
            return batch
        dtype = self._dtype(next(iter(self._frozen.values()), None), recipe)
        return over_tensors(lambda x: x.to(dtype) if is_low(x.dtype) else x, batch)

    def cast_inputs(self, module: nn.Module, inputs: Any, recipe: Recipe, outermost: bool) -> Any:
        """Inputs of a module in the recipe's dtypes: of an outermost module, and outside autocast of each module
        that the user stores in FP16 or BF16, since the code around it may convert its inputs to that dtype."""
        if recipe.name == AS_WRITTEN:
            return inputs
        if outermost and recipe.stored:
            wanted = next((p.dtype for p in module.parameters() if p.dtype in CONVERTED), None)
            return inputs if wanted is None else over_tensors(lambda x: _as_floats(x, wanted), inputs)
        is_inner = id(module) in self._owners and not any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return self.cast_batch(inputs, recipe) if outermost or is_inner else inputs

    def _dtype(self, x: torch.Tensor | None, recipe: Recipe) -> torch.dtype:
        """The dtype of a tensor in the recipe."""
        keeps_low = recipe.stored or (x is not None and id(x) in self._frozen and not recipe.scopes)
        return dtype_of(recipe.format) if keeps_low else torch.float32


def stores_low(module: nn.Module) -> bool:
    """Whether the user stores a tensor of the module itself in FP16 or BF16."""
    return any(map(is_plainly_low, _own_tensors(module)))


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    return module.modules() if "_modules" in vars(module) else iter(())


def _own_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Parameters, buffers and other tensor attributes of a module, without those of its parts."""
    for store in (module._parameters, module._buffers):
        yield from (x for _, x in store.items() if x is not None)
    yield from _attributes(module)


def _attributes(module: nn.Module) -> Iterator[torch.Tensor]:
    leaves = pytree.tree_leaves([value for name, value in vars(module).items() if name not in OWN])
    return (x for x in leaves if isinstance(x, torch.Tensor))


def _as_floats(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _is_member(module: nn.Module, x: torch.Tensor) -> bool:
    """Whether the tensor is a parameter or a buffer: other attributes stay as they are, unless they are low."""
    members = (y for store in (module._parameters, module._buffers) for _, y in store.items())
    return any(x is y for y in members)


def _convert(module: nn.Module, x: torch.Tensor, dtype: torch.dtype) -> None:
    """Convert a tensor in place, so that optimizers still refer to it; a wrapper, of quantized weights, is replaced."""
    if x.dtype is dtype:
        return
    if hasattr(type(x), "__tensor_flatten__"):
        name = next(name for name, y in module._parameters.items() if y is x)
        module._parameters[name] = nn.Parameter(x.detach().to(dtype), x.requires_grad)
        return
    _set_dtype(x, dtype)


def _set_dtype(x: torch.Tensor, dtype: torch.dtype) -> None:
    gradient = x.grad if x.is_leaf else None
    if gradient is not None:
        x.grad = None
    with torch.inference_mode(x.is_inference()):
        x.data = x.data.to(dtype)
    if gradient is not None:
        x.grad = gradient.to(dtype)
