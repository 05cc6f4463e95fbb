"""Observes how a model gets its weights: the files read, state dicts, conversions, and tensors created in low precision."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from operator import call
from os import PathLike
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary, WeakIdRef

from ..capture.places import portable_path
from ..capture.source import Place, kind_of, written_at
from ..isolation.members import modules_of, named_modules, named_tensors, without_wrappers
from ..isolation.process import swap_attribute
from ..numerics.entries import is_plain
from ..numerics.formats import FORMATS, dtype_name, is_low, significant_bits
from ..numerics.metrics import loss_of, runs
from ..records.ledger import LedgerRow, Loss, SilentCast
from . import statedicts

KEEP_LISTS = {
    "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16),
    "_keep_in_fp32_modules": (torch.float16,),
}
"""{attribute of a transformers class that lists name parts of modules to keep in FP32: dtypes of a model for which the
list applies}."""


ADDED = ("base_layer", "parametrizations")
"""Parts of module paths that PEFT and torch add to a layer that had its weight before."""


class Event(NamedTuple):
    """A cast of a tensor at a line of code. module: the module that was converted, if any."""

    place: Place | None
    before: torch.dtype
    after: torch.dtype
    loss: Loss | None = None
    module: nn.Module | None = None


@dataclass
class Watch:
    """How a model's tensors were created, loaded and converted by the code that the function `outermost` called.

    seen: "restored" from a state dict, "read" from a file, "trained" by an optimizer. checkpoint: {tensor: the widest
    dtype in which it was loaded, and the line}. rounded, converted, created: {tensor: its cast on loading, by a call
    such as `module.to(dtype)`, or at creation}. default: {low-precision default dtype: the author's line that set it}.
    """

    outermost: CodeType
    seen: set[str] = field(default_factory=set)
    files: dict[Path, Place | None] = field(default_factory=dict)
    checkpoint: MutableMapping[Tensor, tuple[torch.dtype, Place | None]] = field(default_factory=WeakIdKeyDictionary)
    rounded: MutableMapping[Tensor, Event] = field(default_factory=WeakIdKeyDictionary)
    converted: MutableMapping[Tensor, Event] = field(default_factory=WeakIdKeyDictionary)
    created: MutableMapping[Tensor, Event] = field(default_factory=WeakIdKeyDictionary)
    default: dict[torch.dtype, Place] = field(default_factory=dict)

    def here(self) -> Place | None:
        """The author's line that runs or that called the running library; the library's line if no author's line did."""
        written = written_at(self.outermost)
        within_library = written is not None and kind_of(written.place.file) == "library"
        return None if written is None else (within_library and written.caller) or written.place

    def compare(self, own: Mapping[str, Tensor], given: Mapping[str, Any], place: Place | None, now: bool) -> None:
        """Compare tensors of the model with the entries of the checkpoint that they were loaded from. now: whether the
        tensors were just loaded, before any conversion."""
        for name, x in own.items():
            y = given.get(name)
            if not isinstance(y, Tensor) or x.shape != y.shape:
                continue
            if not _is_comparable(x) or not _is_comparable(y):
                continue
            dtype, read_at = self.checkpoint.get(x, (y.dtype, place))
            widest = max(dtype, y.dtype, key=significant_bits)
            self.checkpoint[x] = (widest, read_at)
            after = _rounded_to(y, x)
            is_asked = not now and x in self.converted and self.converted[x].after is after
            if after is not y.dtype and x not in self.rounded and not is_asked:
                self.rounded[x] = Event(read_at, y.dtype, after, loss_of(y, x.to(y.device)))

    def read_files(self, model: nn.Module) -> None:
        """Compare the model's tensors with the files that were read, to detect rounding on loading."""
        prefixes = ("", *statedicts.PREFIXES, f"{getattr(type(model), 'base_model_prefix', '')}.")
        named = dict(named_tensors(model))
        also = {n: x for name, x in named.items() for p in prefixes for n in (f"{p}{name}", name.removeprefix(p))}
        for path, place in self.files.items():
            with suppress(ValueError, OSError):
                stored = statedicts.read_checkpoint(path)
                self.compare({**also, **named}, stored, place, now=False)
                self.compare_renamed(named, stored, place)

    def compare_renamed(self, named: Mapping[str, Tensor], stored: Mapping[str, Any], place: Place | None) -> None:
        """Find the entries of tensors whose modules got other names after loading, as in a model with an adapter.

        An entry counts if its name is the end of the tensor's, and if both have equal values.
        """
        inner = {name.partition(".")[2]: y for name, y in stored.items()}
        by_name = {**inner, **stored}
        for name, x in named.items():
            if x in self.checkpoint or not _is_comparable(x):
                continue
            y = next((by_name[end] for end in _ends_of(name) if end in by_name), None)
            if not isinstance(y, Tensor) or not _is_comparable(y) or x.shape != y.shape:
                continue
            if _is_equal(y, x, x.dtype):
                self.checkpoint[x] = y.dtype, place

    def on_read(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs in place of a function that reads a file: records the file, and calls the function."""
        self.seen.add("read")
        file = next(iter((*args, *kwargs.values())), None)
        if isinstance(file, str | PathLike):
            self.files.setdefault(Path(file), self.here())
        return original(*args, **kwargs)

    def on_restore(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of `load_state_dict`, and compares the loaded tensors with the state dict."""
        self.seen.add("restored")
        result = original(module, *args, **kwargs)
        self.compare(dict(named_tensors(module)), args[0] if args else kwargs["state_dict"], self.here(), now=True)
        return result

    def on_convert(self, original: Callable[..., Any], module: nn.Module, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of `Module._apply` (called by `to`, `half`, `bfloat16`), and records casts to fewer bits."""
        place, before, casts = self.here(), dict(named_tensors(module)), dict[Any, Event]()

        def convert(x: Tensor) -> Tensor:
            y: Tensor = fn(x)
            if _is_comparable(x) and _is_comparable(y) and significant_bits(y.dtype) < significant_bits(x.dtype):
                casts[x] = Event(place, x.dtype, y.dtype, loss_of(x, y.to(x.device)), module)
            return y

        with swap_attribute(nn.Module, "_apply", original):  # for the modules inside
            result = original(module, convert, *args, **kwargs)
        self.converted.update((y, casts[x]) for name, y in named_tensors(module) if (x := before.get(name)) in casts)
        return result

    def on_create(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Runs in place of `register_parameter` and `register_buffer`, and records low-precision tensors."""
        name = str(kwargs.get("name", args[0] if args else ""))
        for x in (*args, *kwargs.values()):
            if not isinstance(x, Tensor) or x in self.created:
                continue
            is_low_precision = x.dtype.is_floating_point and x.dtype.itemsize < 4
            if is_low_precision or "scale" in name:
                place = None
                if torch.get_default_dtype() is x.dtype:
                    place = self.default.get(x.dtype)
                self.created[x] = Event(place or self.here(), torch.float32, x.dtype)
        return original(module, *args, **kwargs)

    def on_default(self, original: Callable[..., Any], d: torch.dtype) -> Any:
        """Runs in place of `torch.set_default_dtype`, and records low-precision defaults that the author sets."""
        written = written_at(self.outermost)
        if is_low(d) and written is not None and kind_of(written.place.file) == "own":
            self.default[d] = written.place
        return original(d)


def _ends_of(name: str) -> list[str]:
    """The ends of a tensor's name, longest first, without what wrappers, adapters and parametrizations add to it."""
    parts = without_wrappers(name).split(".")
    if "parametrizations" in parts:
        parts = parts[:-1]  # `original`, `original0`: a tensor of the parametrization
    parts = [part for part in parts if part not in ADDED]
    return [".".join(parts[start:]) for start in range(len(parts))]


def _is_comparable(x: Tensor) -> bool:
    wrapped = is_lazy(x) or hasattr(type(x), "__tensor_flatten__")
    return not wrapped and is_plain(x) and not x.is_meta and significant_bits(x.dtype) > 0


def _is_equal(x: Tensor, y: Tensor, via: torch.dtype) -> bool:
    """Whether tensors of any dtypes have the same values after `x` is rounded to a dtype."""
    return all(torch.equal(a.to(via).double(), b.double()) for a, b in runs(x.detach(), y.detach().to(x.device)))


@contextmanager
def watch_weights(outermost: CodeType) -> Iterator[Watch]:
    """While the context is open, record how tensors of modules are created, loaded and converted.

    outermost: as in Watch.
    """
    watch = Watch(outermost)
    library = sys.modules.get("transformers.modeling_utils")  # has its own reference to the reader if imported before
    calls: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch, "load", watch.on_read),
        (torch.jit, "load", watch.on_read),
        (safetensors, "safe_open", watch.on_read),
        (safetensors.torch, "load_file", watch.on_read),
        *([(library, "safe_open", watch.on_read)] if hasattr(library, "safe_open") else []),
        (nn.Module, "load_state_dict", watch.on_restore),
        (nn.Module, "_apply", watch.on_convert),
        (nn.Module, "register_parameter", watch.on_create),
        (nn.Module, "register_buffer", watch.on_create),
        (torch, "set_default_dtype", watch.on_default),
    ]
    with ExitStack() as stack:
        stack.callback(register_optimizer_step_post_hook(lambda *_: watch.seen.add("trained")).remove)
        # torch refuses to swap a tensor to which there are weak references, so those of the watch are hidden from it
        get, own = weakref.getweakrefs, WeakIdRef
        stack.enter_context(swap_attribute(weakref, "getweakrefs", lambda x: [r for r in get(x) if type(r) is not own]))
        for holder, name, handler in calls:
            stack.enter_context(swap_attribute(holder, name, _through(handler, getattr(holder, name))))
        yield watch


def _through(handler: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    known = weakref.WeakMethod(handler)  # other modules may keep the result, for example by `from torch import load`
    return functools.wraps(original)(lambda *args, **kwargs: (known() or call)(original, *args, **kwargs))


def ledger_of(model: nn.Module, watch: Watch) -> tuple[tuple[LedgerRow, ...], tuple[SilentCast, ...]]:
    """The model's parameters and buffers as loaded, and the casts to fewer bits that nobody asked for; casts of one
    line and kind are merged, with the largest loss."""
    weights = _Weights(model, watch)
    rows = list[LedgerRow]()
    groups = dict[Any, dict[str, Loss | None]]()  # {(kind, line, dtypes before and after): {weight: its loss}}
    for x, (name, *_) in weights.names.items():
        read = watch.checkpoint.get(x, (None,))[0]
        requested = weights.requested_dtype(x)
        rows.append(
            LedgerRow(
                name,
                "parameter" if isinstance(x, nn.Parameter) else "buffer",
                dtype_name(x.dtype),
                checkpoint=dtype_name(read) if read else None,
                author=dtype_name(requested) if requested else None,
                module=name.rpartition(".")[0],
            )
        )
        for how, event in weights.silent_casts(x):
            key = (how, event.place, event.before, event.after)
            groups.setdefault(key, {})[name] = event.loss
    casts = list[SilentCast]()
    for (how, place, before, after), losses in groups.items():
        source = None
        if place and kind_of(place.file) == "own":
            source = f"{portable_path(place.file)}:{place.line}"
        known = (loss for loss in losses.values() if loss)
        largest = max(known, key=lambda loss: loss.error, default=None)
        casts.append(SilentCast(how, (*losses,), dtype_name(before), dtype_name(after), largest, source))
    return tuple(rows), tuple(casts)


def _rounded_to(stored: Tensor, loaded: Tensor) -> torch.dtype:
    """The dtype with the most significant bits to which a stored tensor was rounded, if it was; else its own dtype."""
    rows = sorted(FORMATS.values(), key=lambda row: -row.mantissa)
    for row in rows:
        is_narrower = row.mantissa < significant_bits(stored.dtype)
        if row.dtype and is_narrower and _is_equal(stored, loaded, row.dtype):
            return row.dtype
    return stored.dtype


def _parts_kept_in_fp32(model: nn.Module, dtypes: Collection[torch.dtype]) -> set[str]:
    """Parts of module paths that the author keeps in FP32, if the model has weights of the dtypes that this is about."""
    listed = set[str]()
    for key, kept_dtypes in KEEP_LISTS.items():
        if any(dtype in kept_dtypes for dtype in dtypes):
            parts = vars(model).get(key) or getattr(type(model), key, None)
            listed.update(parts or ())
    return listed


class _Weights:
    """Parameters and buffers of a model, and the dtypes that the author's code and the checkpoint chose for them.

    kept: the tensors in the author's list of FP32 modules. uniform: the dtype of all other parameters, if they share
    one. sources: the dtypes of parameters in the checkpoint.
    """

    def __init__(self, model: nn.Module, watch: Watch) -> None:
        self.watch = watch
        self.modules = dict(named_modules(model))
        self.names = dict[Tensor, list[str]]()
        for name, x in named_tensors(model):
            self.names.setdefault(x, []).append(name)
        listed = _parts_kept_in_fp32(model, {x.dtype for x in self.names})
        self.kept = set[Tensor]()  # the weights of modules that the author keeps in FP32
        for x, names in self.names.items():
            parts = [name.split(".") for name in names]
            if listed.intersection(*parts):  # by all names of the weight
                self.kept.add(x)
        parameters = [x for x in self.names if isinstance(x, nn.Parameter)]
        dtypes = {x.dtype for x in parameters if x not in self.kept and significant_bits(x.dtype)}
        self.uniform = dtypes.pop() if len(dtypes) == 1 else None
        self.sources = {watch.checkpoint[x][0] for x in parameters if x in watch.checkpoint}

    def requested_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype that the author's code or lists request for a tensor; None if they request none."""
        if x in self.kept:
            return torch.float32
        casts = (self.watch.converted.get(x), self.watch.created.get(x))
        is_asked = any(cast is not None and cast.after is x.dtype for cast in casts)
        return x.dtype if is_asked else None

    def silent_casts(self, x: Tensor) -> Iterator[tuple[str, Event]]:
        """The casts of a tensor that nobody asked for, with their kinds.

        Casts of all parameters of a one-dtype checkpoint, or of a module, are not yielded: the author asked for them.
        """
        watch = self.watch
        may_be_one_of_all = isinstance(x, nn.Parameter) and x not in self.kept
        rounded = watch.rounded.get(x)
        converted = watch.converted.get(x)
        created = watch.created.get(x)
        if rounded is not None:
            is_asked = may_be_one_of_all and self.uniform is rounded.after and len(self.sources) <= 1
            if not is_asked:
                yield "loading", rounded
        elif converted is not None and converted.module is not None:
            is_current = x.dtype is converted.after
            of_module = self._owners(x).issubset(modules_of(converted.module))
            is_asked = may_be_one_of_all and is_current and of_module
            if not is_asked and converted.loss is not None and _is_equal(x, x, converted.after):
                yield "conversion", converted
        elif created is not None and is_low(x.dtype):
            is_stored_so = watch.checkpoint.get(x, (None,))[0] is x.dtype
            by_default = created.place in watch.default.values()
            if not is_stored_so and (by_default or self.uniform is not x.dtype):
                yield "creation", created
        if created is not None and x not in watch.checkpoint:
            short = self._scaled_dtype(x)
            if short is not None:
                yield "scale", created._replace(after=short)

    def _owners(self, x: Tensor) -> set[nn.Module]:
        """The modules that have a tensor."""
        return {self.modules[name.rpartition(".")[0]] for name in self.names[x]}

    def _scaled_dtype(self, x: Tensor) -> torch.dtype | None:
        """The dtype of the 8-bit weights beside a scale whose entries are all 1; None for any other tensor."""
        path, _, name = self.names[x][0].rpartition(".")
        if "scale" not in name:
            return None
        dtypes = [tensor.dtype for _, tensor in named_tensors(self.modules[path])]
        short = next((dtype for dtype in dtypes if dtype.itemsize == 1 and dtype is not torch.bool), None)
        if short is None or not _is_comparable(x) or not bool((x == 1).all()):
            return None
        return short
