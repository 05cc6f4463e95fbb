"""The checkpoint of a Hugging Face directory: what it stores, known before a value is read, and whether it fits the model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import LoadError
from ..formats.table import is_low
from ..isolation.members import size_of
from .statedicts import few, read_tensors, shards_of
from .weights import refused

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
