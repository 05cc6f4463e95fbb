"""Runs the model with any of its layers quantized, on any of its inputs."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from .. import offload
from ..capture.intercept import Handler, intercept
from ..capture.regions import Region
from ..criteria.margins import Form
from ..criteria.measure import Criteria, names_of
from ..isolation.answer import answer
from ..isolation.members import named_tensors
from ..numerics.entries import entries, finite, is_number
from ..numerics.nodes import op_name
from ..numerics.schemes import SCHEMES
from ..records import Batch
from .attribute import forms_of
from .probes import signs
from .quantized import Roles, for_layer, quantize_input, quantize_weight, roles_of
from .rerun import Yardstick

_TORCHAO = (nn.Linear, nn.Embedding)

STORED = 1 << 27
"""Elements of quantized weights that are kept for the next run; further weights are quantized again in each run."""

SKETCH = 4096
"""Length to which a change of the outputs is folded."""

Spans = dict[str, tuple[float, float]]
"""{layer: smallest and largest value of its input} on the calibration inputs."""


def key_of(parameter: str) -> str:
    """The name of a layer, by that of its weight: the module's path, unless the parameter is not called `weight`."""
    return "" if parameter == "weight" else parameter.removesuffix(".weight")


def change_of(reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], by: Yardstick) -> torch.Tensor:
    """The change of the outputs, [criteria, SKETCH]: the largest norm of a row is the error, and rows of several changes add
    up as long as these are small.

    A row is A'd of a criterion with the form d'AA'd, see margins.py; with other measures, there is one row, along d. Long
    rows are summed up with random signs, which preserves norms and inner products in the mean, with a relative standard
    deviation of sqrt(2 / SKETCH) of the squares. Source: Charikar et al., Finding Frequent Items in Data Streams (2002).
    """
    moved = [finite(entries(y) - entries(x)) if is_number(x) else None for x, y in zip(reference, outputs, strict=True)]
    rows, criteria = list[torch.Tensor](), by.distance if isinstance(by.distance, Criteria) else None
    for criterion in criteria.all(names_of(reference, criteria.names)) if criteria is not None else ():
        assert criteria is not None
        places = criteria.output_indices(criterion, names_of(reference, criteria.names))
        forms = forms_of(criterion, criteria, [reference[i] for i in places])
        if forms is None:
            rows = []
            break
        pairs = zip(forms, (d for i in places if (d := moved[i]) is not None), strict=False)
        rows.append(torch.cat([_transposed(form, d).flatten() for form, d in pairs]))
    made = torch.stack([_fold(row) for row in rows or [torch.cat([d.flatten() for d in moved if d is not None])]])
    error, largest = by(reference, outputs)[0] * by.unit, float(made.norm(dim=1).max())
    return made * (error / largest if largest and error < math.inf else 0.0)


def _transposed(form: Form, d: torch.Tensor) -> torch.Tensor:
    """A'd, from the function that multiplies by A."""
    at = torch.zeros_like(d, requires_grad=True)
    with torch.enable_grad():
        (result,) = torch.autograd.grad((form(at) * d).sum(), at)
    return result


def _fold(row: torch.Tensor) -> torch.Tensor:
    """Sums of every SKETCH-th entry, with random signs that depend on the number of entries only."""
    if len(row) > SKETCH:
        row = row * signs(row.new_zeros(len(row)), torch.Generator().manual_seed(0))
    return nn.functional.pad(row.float(), (0, -len(row) % SKETCH)).view(-1, SKETCH).sum(0).cpu()


class QuantizedModel:
    """The user's model with quantized layers. spans: ranges of layers' inputs, for calibrated scales."""

    def __init__(self, model: nn.Module, spans: Spans | None = None) -> None:
        self.model, self.spans = model, spans or {}
        self.keys: dict[int, str] = {}
        for name, tensor in named_tensors(model):
            self.keys.setdefault(_storage(tensor), key_of(name))
        self._weights: dict[tuple[Any, ...], torch.Tensor] = {}
        self._room = 0 if offload.now() is not None else STORED

    @contextmanager
    def under(self, schemes: Mapping[str, str]) -> Iterator[None]:
        """In the body, layers compute under their schemes. schemes: {layer: scheme, or "" to not quantize it}."""
        with intercept(_Layers(self, partial(self._quantize, schemes))):
            yield

    def outputs(self, schemes: Mapping[str, str], batch: Batch, seed: int, by: str = "emulation") -> list[torch.Tensor]:
        """The model's outputs with these layers quantized. by: `emulation`, or `torchao`, see `runs_in_torchao`."""
        around = partial(self.under, schemes) if by == "emulation" else partial(self._in_torchao, schemes)
        return answer(self.model, batch, seed=seed, around=around)

    def runs_in_torchao(self, schemes: Mapping[str, str]) -> bool:
        """Whether torchao quantizes all of these layers, with kernels for a CPU."""
        used = {key: scheme for key, scheme in schemes.items() if scheme}
        modules = dict(self.model.named_modules())
        fits = all(SCHEMES[scheme].on_cpu and type(modules.get(key)) in _TORCHAO for key, scheme in used.items())
        return bool(used) and fits and find_spec("torchao") is not None

    @contextmanager
    def _in_torchao(self, schemes: Mapping[str, str]) -> Iterator[None]:
        """In the body, torchao has quantized the layers; `answer` restores the model."""
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # about libraries for GPUs that torchao does not find
        try:
            import torchao.quantization as torchao
        finally:
            logging.disable(before)
        known = {"torch": torch, **vars(torchao)}
        configs = {scheme: eval(SCHEMES[scheme].source, known) for scheme in {*schemes.values()} - {""}}
        by_layer = {key: configs[scheme] for key, scheme in schemes.items() if scheme}
        torchao.quantize_(self.model, torchao.FqnToConfig(by_layer), filter_fn=None)
        yield

    def calibrate(self, batches: Sequence[Batch], seed: int) -> None:
        """Set `spans` to the range of each layer's input over the batches."""

        def see(key: str, roles: Roles, args: list[Any]) -> None:
            if roles.given is not None:
                low, high = (float(x) for x in finite(args[roles.given]).float().aminmax())
                least, most = self.spans.get(key, (low, high))
                self.spans[key] = min(low, least), max(high, most)

        for batch in batches:
            answer(self.model, batch, seed=seed, around=partial(intercept, _Layers(self, see)))

    def _quantize(self, schemes: Mapping[str, str], key: str, roles: Roles, args: list[Any]) -> None:
        if not (scheme := schemes.get(key)):
            return
        row, weight = SCHEMES[scheme], args[roles.weight]
        at = (scheme, _storage(weight), weight.storage_offset(), weight.shape, weight.stride())
        if (made := self._weights.get(at)) is None:
            made = quantize_weight(weight, roles.summed, row.weight)[2].to(weight.dtype)
            if made.numel() <= self._room:
                self._weights[at], self._room = made, self._room - made.numel()
        args[roles.weight] = made
        if roles.given is not None and row.activation is not None:
            by, given = for_layer(row.activation, roles.spatial), args[roles.given]
            span = self.spans[key] if by.calibrated else None
            args[roles.given] = quantize_input(given, roles.spatial, by, span)[2].to(given.dtype)


class _Layers(Handler):
    """Passes the arguments of every layer, as a list that may be changed, to a function."""

    def __init__(self, of: QuantizedModel, change: Any) -> None:
        self.of, self.change = of, change

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run one operation, with its arguments changed if it is a layer."""
        return self.part(op, args, kwargs, region)

    def part(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run one operation, with its arguments changed if it is a layer."""
        roles = roles_of(op_name(op), args, lambda x: x.shape)
        if roles is not None and (key := self.of.keys.get(_storage(args[roles.weight]))) is not None:
            changed = list(args)
            self.change(key, roles, changed)
            args = tuple(changed)
        return op(*args, **kwargs)


def _storage(x: torch.Tensor) -> int:
    """Address of a tensor's memory, which its views share; its id if it has no memory of its own."""
    try:
        return x.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return id(x)
