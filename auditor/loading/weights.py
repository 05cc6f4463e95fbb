"""Checkpoints: read without running code, held against the model and fitted onto it, and a watch for whether any was read."""

from __future__ import annotations

import functools
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..errors import LoadError
from ..isolation.members import size_of
from ..isolation.process import swapped
from ..numerics.entries import entries
from ..numerics.formats import is_low
from . import statedicts
from .statedicts import few, read_tensors, shards_of

READERS = (
    ("torch", "load"),
    ("safetensors", "safe_open"),
    ("safetensors.torch", "load_file"),
    ("transformers.modeling_utils", "safe_open"),
)


class WeightWatch:
    """Notes what loads weights while the user's code runs. `phase` is "import", then "build"."""

    def __init__(self) -> None:
        self.phase = "import"
        self.restored = False
        self.trained = False
        self.phases_with_reads: set[str] = set()

    def loaded(self, kind: str) -> bool:
        """Whether a model of this kind of origin got its weights from somewhere.

        Restoring a state dict says so, and an optimiser's step; reading a file does only where the model itself was
        being made, since inputs are read from files too.
        """
        made_in = {"instance": "import", "factory": "build", "class": "build"}.get(kind)
        return self.restored or self.trained or made_in in self.phases_with_reads

    def stepped(self, *_: Any) -> None:
        """An optimiser has changed parameters."""
        self.trained = True


_active: WeightWatch | None = None


@contextmanager
def watching() -> Iterator[WeightWatch]:
    """Watches `load_state_dict` and the functions that read checkpoints; names the user imported keep working after."""
    global _active
    watch = WeightWatch()
    _active = watch
    try:
        with ExitStack() as stack:
            restore = _noted(nn.Module.load_state_dict, restores=True)
            stack.enter_context(swapped(nn.Module, "load_state_dict", restore))
            stack.callback(register_optimizer_step_post_hook(watch.stepped).remove)
            for module_name, name in READERS:
                module = sys.modules.get(module_name)
                if module is not None and name in vars(module):
                    stack.enter_context(swapped(module, name, _noted(getattr(module, name))))
            yield watch
    finally:
        _active = None


def _noted(function: Callable[..., Any], restores: bool = False) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _active is not None:
            _active.restored |= restores
            _active.phases_with_reads.add(_active.phase)
        return function(*args, **kwargs)

    return wrapper


def load_into(model: nn.Module, path: Path) -> list[str]:
    """Loads the checkpoint at `path` into `model`. What there is to say of what it holds.

    Raises: LoadError(slug="missing-weights" | "bad-weights" | "weights-mismatch").
    """
    if not path.is_file():
        raise LoadError(f"weights {path} do not exist: check --weights", slug="missing-weights")
    with refused():
        content = statedicts.read_checkpoint(path)
    with refused("weights-mismatch"):
        state = statedicts.load_state(model, content, path.name)
    return [*_rounding_notes(state, model, path.name), *_other_notes(content, state, model, path.name)]


def _rounding_notes(state: Mapping[str, Any], model: nn.Module, file: str) -> list[str]:
    """Weights that a model holds in another floating dtype than its checkpoint."""
    own, found = model.state_dict(), dict[tuple[torch.dtype, torch.dtype], None]()
    for name, value in state.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name in own:
            found[value.dtype, own[name].dtype] = None
    return [
        f"{file} holds weights in {_name(given)}, and the model in {_name(held)}: "
        + ("their values are exact" if torch.promote_types(given, held) is held else "they were rounded to it")
        for given, held in found
        if given is not held
    ]


def _other_notes(content: Mapping[str, Any], state: Mapping[str, Any], model: nn.Module, file: str) -> list[str]:
    """What only the checkpoint has, beside this model, and extra state that only the model has."""
    loaded = {id(value) for value in state.values()}
    beside = [name for name, value in content.items() if id(value) not in loaded]
    lacking = [name for name in model.state_dict() if statedicts.is_extra(name) and name not in state]
    notes = [f"{file} also holds {few(beside)}, which the model does not have: left out"] if beside else []
    return notes + ([f"{file} does not hold {few(lacking)}: the factory's are used"] if lacking else [])


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@contextmanager
def refused(slug: str = "bad-weights") -> Iterator[None]:
    """What the body says of a checkpoint becomes a LoadError."""
    try:
        yield
    except ValueError as error:
        raise LoadError(str(error), slug) from error


def reject_non_finite(model: nn.Module) -> None:
    """Raises: LoadError(slug="nan-weights"). Infinite buffers pass: attention masks hold them."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    for name, tensor in named:
        if not tensor.is_floating_point() or tensor.is_meta:
            continue
        held = entries(tensor.detach())
        if type(held) is Tensor and bool(held.sum().isfinite()):  # else the sum is not, and it takes no memory
            continue
        bad = ~held.isfinite() if isinstance(tensor, nn.Parameter) else held.isnan()
        if count := int(bad.sum()):
            hint = "restore a checkpoint from before training diverged"
            raise LoadError(f"{name} holds {count} NaN or infinite values of {tensor.numel()}: {hint}", "nan-weights")


SINGLE = ("model.safetensors", "pytorch_model.bin")
"""Names that transformers looks for, in its order; each may be an index of shards instead."""

INDEX = ".index.json"


def stored_by(folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint under their names, mapped: nothing of them is in memory. Empty where there is none.

    Raises: LoadError(slug="missing-weights" | "bad-weights").
    """
    with refused():
        return {name: value for file in _files(folder) for name, value in _tensors(file).items()}


def _files(folder: Path) -> list[Path]:
    for name in SINGLE:
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}{INDEX}"
        if index.is_file():
            shards = [folder / shard for shard in shards_of(index)]
            lost = [shard.name for shard in shards if not shard.is_file()]
            if lost:
                raise LoadError(
                    f"{index.name} names {few(lost)} in {folder}, which is not there: complete the directory",
                    slug="missing-weights",
                )
            return shards
    return []


def _tensors(file: Path) -> dict[str, Tensor]:
    content = read_tensors(file, mapped=True)
    if not isinstance(content, Mapping) or not all(isinstance(value, Tensor) for value in content.values()):
        raise LoadError(f"{file.name} holds no state dict: save model.state_dict()", slug="bad-weights")
    return dict(content)


def refuse_quantised(config: Any, where: Path) -> None:
    """Raises: LoadError(slug="quantised-model")."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return
    told = found if isinstance(found, Mapping) else getattr(found, "__dict__", {})
    method = told.get("quant_method", "a method of its own")
    raise LoadError(
        f"the checkpoint in {where} is quantised ({getattr(method, 'value', method)}), so it has no FP32 values to compare "
        "with: give the checkpoint that it was made from, or save it dequantised (`model.dequantize()`, then "
        "`save_pretrained`, with no quantization_config in config.json)",
        slug="quantised-model",
    )


def fitted(model: nn.Module, info: Mapping[str, Any], where: str) -> list[str]:
    """What to say of names that only the model, or only the checkpoint, has. info: as transformers tells it.

    Raises: LoadError(slug="weights-mismatch") where shapes differ, or nothing of the checkpoint is the model's.
    """
    wrong = sorted(info.get("mismatched_keys", ()))
    if wrong:
        name, given, own = wrong[0]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise LoadError(
            f"the checkpoint in {where} does not fit its config.json: {name} is {list(given)} there and {list(own)} in "
            f"{type(model).__name__}{more}: give the config that was saved with it",
            slug="weights-mismatch",
        )
    missing, left = sorted(info.get("missing_keys", ())), sorted(info.get("unexpected_keys", ()))
    own = dict(model.named_parameters(remove_duplicate=False))
    lacking = {id(own[name]) for name in missing if name in own}
    if own and lacking == {id(parameter) for parameter in own.values()}:
        raise LoadError(
            f"the checkpoint in {where} holds nothing of {type(model).__name__}: it has {few(left) or 'no tensor'}, and the "
            f"model {few(missing)}: check `architectures` in config.json",
            slug="weights-mismatch",
        )
    notes = []
    if missing:
        notes.append(
            f"{_tensors_of(missing)} of the model {_are(missing)} not in the checkpoint and RANDOM: {few(missing)}; "
            "what is said of them, and of all that follows them, is of no trained model"
        )
    if left:
        notes.append(f"{_tensors_of(left)} of the checkpoint {_are(left)} not the model's and left out: {few(left)}")
    return notes


def _tensors_of(names: Collection[str]) -> str:
    return f"{len(names)} tensor" + "s" * (len(names) > 1)


def _are(names: Collection[str]) -> str:
    return "is" if len(names) == 1 else "are"


def counted(model: nn.Module, stored: Mapping[str, Tensor]) -> dict[torch.dtype, int]:
    """{dtype other than FP32: how many numbers of the model's parameters the checkpoint stores in it}.

    Where it names them in another way than the model, all that it stores counts, as far as the model has as many.
    """
    own = dict(model.named_parameters(remove_duplicate=False))
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found: Counter[torch.dtype] = Counter()
    seen: set[int] = set()
    for name, value in stored.items():
        parameter = next((own[n] for n in (name, prefix + name, name.removeprefix(prefix)) if n in own), None)
        if parameter is not None and id(parameter) not in seen:
            seen.add(id(parameter))
            found[value.dtype] += parameter.numel()
    if not seen:
        for value in stored.values():
            found[value.dtype] += value.numel()
    total = size_of(model)
    return {dtype: min(count, total) for dtype, count in found.items() if count and dtype is not torch.float32}


def low_of(counts: Mapping[torch.dtype, int]) -> dict[str, int]:
    """Those in FP16 and BF16, as Subject.stored_low has them."""
    return {name_of(dtype): count for dtype, count in counts.items() if is_low(dtype)}


def told(model: nn.Module, counts: Mapping[torch.dtype, int]) -> list[str]:
    """What to say of what the checkpoint does not store in FP32."""
    total = size_of(model)
    return [
        f"the checkpoint stores {'all' if count == total else f'{count:,}'} of the model's {total:,} numbers in "
        f"{name_of(dtype)}: the reference is "
        + (
            f"the same values in FP32; what {name_of(dtype)} had cost before is in no error"
            if dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
            else "their values in FP32, as transformers loads them"
        )
        for dtype, count in counts.items()
    ]


def name_of(dtype: torch.dtype) -> str:
    """As torch writes it, without `torch.`."""
    return str(dtype).removeprefix("torch.")
