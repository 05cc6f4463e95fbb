"""Collects example inputs from their sources, converts every form to batches, and generates missing inputs."""

from __future__ import annotations

import inspect
import itertools
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ..errors import LoadError, let_through
from ..isolation import in_eval
from ..isolation.process import reseed
from ..isolation.tensors import memory
from ..numerics.entries import extent, tensors_in
from ..numerics.formats import dtype_name
from ..records import Batch
from . import diffusion_inputs
from .kinds import image_sides, suggest_inputs
from .sentence_inputs import TEXTS, features_of
from .state import convert_errors
from .statedicts import read_tensors
from .target import arguments_of, blame, call, named_in, parse, required_arguments, user_code
from .texts import LINES, ROWS, read_texts, tokenize

_SHAPE = re.compile(r"(?:(?P<name>[A-Za-z_]\w*):)?(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\](?:<(?P<limit>\d+))?")
GRAMMAR = "write f.py:func, x.pt, x.safetensors, x.npz, prompts.txt, chats.jsonl, or shapes such as 'x:float32[1,3,224,224] ids:int64[1,16]<1000'"
FORMS = (
    "return a tensor, a tuple of positional arguments, a dict of keyword arguments, or a list of such tuples or dicts"
)
LIKE_INPUTS = re.compile(r"(?!_|get_eval|get_init)\w*(inputs?|prompts?)$")
SUFFIXES = (".pt", ".pth", ".safetensors", ".npz", LINES, ROWS)
MOST_BATCHES = 32
"""Maximum number of batches taken from an iterable such as a generator or DataLoader."""

LABELS = ("label", "labels", "target", "targets", "y")
"""Names of entries that are labels, if forward takes no argument of the name."""

LOADERS = (
    "batches",
    "get_batches",
    "train_loader",
    "train_dataloader",
    "trainloader",
    "dataloader",
    "data_loader",
    "loader",
    "val_loader",
    "valid_loader",
    "val_dataloader",
    "eval_loader",
    "test_loader",
    "test_dataloader",
    "testloader",
)
"""Names of batches in a user's file, of which an audit and a rehearsal use the first that is there."""
MOST_LABELS = 2
"""Maximum number of labels in a batch whose tensors are alike."""
LOADER_BATCHES = 4
"""Number of batches that an audit takes from one of LOADERS."""

BATCH, TOKENS = 2, 16
SAMPLES = 16_000
"""Samples in one second of audio, at the sampling rate of speech models."""
LENGTHS = (16, 8, 32, 64, 128)
SIDES = (32, 64, 28, 224, 8, 16, 96, 128, 256)


class NoNames(dict[str, Any]):
    """The empty keyword arguments of a batch that the user gave as one tensor, and not as a tuple of one tensor."""


class OfList(dict[str, Any]):
    """The empty keyword arguments of a batch that the user gave as a list: its entries may be batches of their own."""


@dataclass(frozen=True)
class Inputs:
    """Batches and their source. synthetic: whether the values were generated. notes: for the user."""

    batches: tuple[Batch, ...]
    source: str
    synthetic: bool = False
    notes: tuple[str, ...] = ()


def from_argument(text: str, model: nn.Module, seed: int) -> Inputs:
    """Inputs from the option `--inputs`.

    Raises: LoadError(slug="missing-inputs" | "bad-inputs" | "missing-weights" | "bad-weights" | "inputs-raise");
    for a Python file also the errors of `parse` and `import_target`.
    """
    source = f"--inputs {text}"
    matches = [_SHAPE.fullmatch(part) for part in text.split()]
    shapes = [match for match in matches if match]
    if shapes and len(shapes) == len(matches):
        reseed(seed)
        return Inputs((_from_shapes(text, shapes, model),), source, synthetic=True)
    path = Path(text)
    if path.suffix in SUFFIXES:
        return Inputs(_batches_in_file(path, model), source)
    if ".py" not in text and ":" not in text:
        raise LoadError(f"cannot read --inputs {text[:200]!r}: {GRAMMAR}", slug="bad-inputs")
    target = parse(text)
    target = replace(target, symbol=target.symbol or "get_inputs")
    with user_code(target, seed):
        function = named_in(target, GRAMMAR, "missing-inputs")
        what = f"{target.symbol}() in {target.label}"
        value = call(function, what, "inputs-raise") if callable(function) else function
        return Inputs(as_batches(_called_apart(tokenize(model, value), model), what), source)


def _batches_in_file(path: Path, model: nn.Module) -> tuple[Batch, ...]:
    """The batches in a file of texts, tensors or arrays; a dict of tensors is one batch of named arguments."""
    if not path.is_file():
        raise LoadError(f"the inputs file {path} does not exist: check --inputs", slug="missing-inputs")
    with convert_errors(slug="bad-weights"):
        if path.suffix in (LINES, ROWS):
            return as_batches(_tokens_of_file(path, model), path.name)
        value: Any = _read_arrays(path) if path.suffix == ".npz" else read_tensors(path)
    if isinstance(value, Mapping) and all(isinstance(item, Tensor) for item in value.values()):
        return (bind_named(model, value, path.name),)
    return as_batches(value, path.name)


def _tokens_of_file(path: Path, model: nn.Module) -> Any:
    """The tokens of the texts or chats in a file. Raises: LoadError(slug="bad-inputs"), also for rows without them."""
    rows = read_texts(path)
    tokens = tokenize(model, rows)
    if tokens is rows:
        message = f"{path.name} has rows without a text: write strings, or objects with `messages`, `prompt` or `text`"
        raise LoadError(message, slug="bad-inputs")
    return tokens


def _read_arrays(path: Path) -> dict[str, Tensor]:
    """The arrays of a file of NumPy; float64, NumPy's default, becomes float32."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            tensors = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except (ValueError, TypeError, OSError, zipfile.BadZipFile) as error:
        message = f"{path.name} cannot be read ({error}): write plain arrays with np.savez"
        raise LoadError(message, slug="bad-inputs") from error
    return {name: x.float() if x.dtype == torch.float64 else x for name, x in tensors.items()}


def named_inputs(value: Any, what: str, model: nn.Module) -> tuple[Batch, ...]:
    """The batches of a value or a function of the user's file; texts and chats become token ids."""
    value = call(value, what, "inputs-raise") if callable(value) else value
    return as_batches(_called_apart(tokenize(model, value), model), what)


def _called_apart(value: Any, model: nn.Module) -> Any:
    """The value; but the parts of one tensor, if forward takes fewer arguments, as a list of calls."""
    parameters = arguments_of(model.forward)
    most = _positional(parameters)
    if _takes_any_number(parameters) or not most or not is_series(value, most):
        return value
    return [(x,) for x in value]


def from_loader(variables: Mapping[str, Any], model: nn.Module, label: str) -> tuple[Inputs | None, tuple[str, ...]]:
    """The first batches of a loader in the user's file, if the model runs on them without their labels; and a note if it
    does not. variables: of the file. label: its name."""
    for name in LOADERS:
        value = variables.get(name)
        if inspect.isroutine(value) and not required_arguments(value):
            value = call(value, f"{name}() in {label}", "inputs-raise")
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | type | nn.Module):
            continue
        is_call = _are_tensors(value) and _takes_any_number(arguments_of(model.forward))
        is_one = is_call or is_one_batch(value, len(required_arguments(model.forward)))
        items = [value] if is_one else [*itertools.islice(value, LOADER_BATCHES)]
        try:
            batches = tuple(_one_call(item, name) for item in items)
            (first, *_), _ = without_labels(model, batches)
            with in_eval(model), torch.no_grad():
                model(*first[0], **first[1])
        except Exception as error:  # the user's step may change its batches before the call
            let_through(error)
            why = str(error) if isinstance(error, LoadError) else blame(error)
            return None, (
                f"{label} defines {name}, whose batches are not what forward takes ({why}): define get_inputs().",
            )
        counted = "the only batch" if len(items) == 1 else f"the first {len(items)} batches"
        return Inputs(batches, f"{label}:{name}, {counted}"), ()
    return None, ()


def is_one_batch(value: Any, taken: int) -> bool:
    """Whether a value is one batch, and no series of batches: a tensor, a dict, or a tuple of tensors that is no series.
    taken: number of arguments of the function that gets a batch."""
    if isinstance(value, Tensor | Mapping):
        return True
    return _are_tensors(value) and not is_series(value, taken)


def is_series(value: Any, taken: int) -> bool:
    """Whether a tuple of tensors is a series of batches, such as `x.split(4)`, and not one batch with its labels.

    The tensors are more than the arguments `taken`, and alike but for their numbers of rows. They are different parts of one tensor,
    or of different lengths, or too many for labels.
    """
    if not _are_tensors(value) or len(value) <= max(taken, 1) or not are_alike(value):
        return False
    lengths = {len(x) for x in value}
    return _are_parts(value) or len(lengths) > 1 or len(value) > max(taken, 1) + MOST_LABELS


def are_alike(value: Sequence[Tensor]) -> bool:
    """Whether tensors have the same dtype and the same shape but for their numbers of rows."""
    kinds = {(x.dtype, x.shape[1:]) for x in value}
    return len(kinds) == 1 and all(x.dim() for x in value)


def _are_tensors(value: Any) -> bool:
    return isinstance(value, tuple) and bool(value) and all(isinstance(x, Tensor) for x in value)


def _are_parts(value: Sequence[Tensor]) -> bool:
    """Whether tensors are different parts of one tensor."""
    memories = {storage._cdata for x in value for storage in memory(x)}
    return len(memories) == 1 and len({x.storage_offset() for x in value}) == len(value)


def from_model(model: nn.Module, seed: int) -> Inputs:
    """The model's own `example_input_array`; without one, the first generated inputs on which the model runs.

    Raises: LoadError(slug="no-inputs" | "bad-inputs").
    """
    reseed(seed)
    if (value := getattr(model, "example_input_array", None)) is not None:
        return Inputs(as_batches(value, "model.example_input_array"), "model.example_input_array")
    error: Exception | None = None
    for batch, source in _guesses(model):
        try:
            with in_eval(model), torch.no_grad():
                model(*batch[0], **batch[1])
            return Inputs((batch,), source, synthetic=True)
        except Exception as raised:  # a wrong guess may fail in any way
            error = raised
    hint = f"define get_inputs() in the model's file, or pass --inputs '{suggest_inputs(model)}'"
    why = f" found for forward({', '.join(required_arguments(model.forward))})"
    why = f", and the model does not run on generated inputs ({blame(error)})" if error else why
    raise LoadError(f"no example inputs{why}: {hint}", slug="no-inputs") from error


def as_batches(value: Any, source: str, *, arrays: bool = False) -> tuple[Batch, ...]:
    """Convert example inputs of any form to batches.

    One call: a tensor, a tuple or list of positional arguments, a dict of keyword arguments, or the pair (tuple, dict).
    Several calls: a list of tuples or dicts, or the first MOST_BATCHES items of another iterable. A list of tensors is
    one call with several tensors, unless they are alike and forward takes only one, see `without_labels`. arrays: keep
    NumPy arrays instead of converting them to tensors. Raises: LoadError(slug="bad-inputs").
    """
    if not arrays:
        value = tree_map_only(np.ndarray, torch.from_numpy, value)
    if isinstance(value, list) and value and all(isinstance(item, tuple | Mapping) for item in value):
        return tuple(_one_call(item, source) for item in value)
    one = isinstance(value, Tensor | np.ndarray | tuple | list | Mapping)
    if not one and isinstance(value, Iterable) and not isinstance(value, str | bytes):
        batches = tuple(_one_call(item, source) for item in itertools.islice(value, MOST_BATCHES))
        if batches:
            return batches
    return (_one_call(value, source),)


def without_labels(model: nn.Module, batches: tuple[Batch, ...]) -> tuple[tuple[Batch, ...], tuple[str, ...]]:
    """Remove labels that forward does not take. Returns the batches, and a note if something was removed.

    A list of tensors that are alike holds no labels, but a batch in each, if forward takes only one argument. Labels are
    the positional arguments beyond those of forward, as in a DataLoader of (x, label) pairs, and entries called such as
    `labels` that are no argument of forward, as in a dict of x and labels.
    """
    parameters = arguments_of(model.forward)
    if not parameters:
        return batches, ()
    kinds = {p.kind for p in parameters.values()}
    most = _positional(parameters)
    if most == 1 and len(batches) == 1 and _lists_batches(batches[0]) and not _takes_any_number(parameters):
        tensors = batches[0][0]
        count = len(tensors)
        note = f"The {count} tensors of the list are {count} batches, since forward takes only one argument."
        return tuple(((x,), {}) for x in tensors), (note,)
    has_labels = [len(args) > most > 0 and _are_labels(args, most) for args, _ in batches]
    if batches and all(has_labels) and not _takes_any_number(parameters):
        taken = "one argument" if most == 1 else f"{most} arguments"
        extra = "entry of each batch is" if len(batches[0][0]) == most + 1 else "entries of each batch are"
        note = f"The last {extra} taken for labels and left out, since forward takes only {taken}."
        return tuple((args[:most], kwargs) for args, kwargs in batches), (note,)
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return batches, ()
    left = [name for name in LABELS if name not in parameters and any(name in kwargs for _, kwargs in batches)]
    notes = list[str]()
    if left:
        listed = " and ".join(f"`{name}`" for name in left)
        notes.append(f"{listed} of each batch: taken for labels and left out, since forward takes no such argument.")
        batches = tuple((args, {n: x for n, x in kwargs.items() if n not in left}) for args, kwargs in batches)
    names = {tuple(kwargs) for args, kwargs in batches if not args}
    only = next(iter(names), ()) if len(names) == 1 else ()
    if len(only) == 1 and only[0] not in parameters and len(required_arguments(model.forward)) == 1:
        notes.append(f"`{only[0]}` of each batch is passed as forward's only argument.")
        batches = tuple(((*args, *kwargs.values()), {}) for args, kwargs in batches)
    return batches, tuple(notes)


def _lists_batches(batch: Batch) -> bool:
    """Whether a batch is a list of several tensors that are alike."""
    args, kwargs = batch
    is_list = isinstance(kwargs, OfList) and all(isinstance(x, Tensor) for x in args)
    return is_list and len(args) > 1 and are_alike(args)


def _positional(parameters: Mapping[str, inspect.Parameter]) -> int:
    """The number of arguments that may be given by position, each with a name."""
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters.values())


def _takes_any_number(parameters: Mapping[str, inspect.Parameter]) -> bool:
    return any(p.kind is p.VAR_POSITIONAL for p in parameters.values())


def _are_labels(args: Sequence[Any], most: int) -> bool:
    """Whether all arguments after the first `most` may be labels of the first argument."""
    return all(may_end_in_labels((args[0], one)) for one in args[most:])


def may_end_in_labels(args: Sequence[Any]) -> bool:
    """Whether the last of several arguments has an entry for each entry of the first: tensors of as many rows, or a list
    of as many targets, such as a detector's dicts."""
    if len(args) < 2:
        return False
    first, last = args[0], args[-1]
    is_rows = isinstance(first, Tensor) and first.dim() > 0
    if not is_rows and not isinstance(first, list | tuple):
        return False
    if isinstance(last, list | tuple):
        return len(last) == len(first) > 0
    labels = tensors_in(last)
    return is_rows and bool(labels) and all(x.dim() > 0 and len(x) == len(first) for x in labels)


def shapes_of(batch: Batch) -> tuple[str, ...]:
    """Dtype and shape of every input tensor, such as `float32[2, 3]`."""
    shapes = [(x, extent(x) if x.is_nested else x.shape) for x in tensors_in(batch)]
    return tuple(f"{dtype_name(x.dtype)}{list(shape)}" for x, shape in shapes)


def _one_call(value: Any, source: str) -> Batch:
    if isinstance(value, Tensor | np.ndarray):
        return (value,), NoNames()
    if isinstance(value, Mapping | tuple | list):
        reject_iterators(value, source)
    match value:
        case Mapping():
            return (), {str(name): item for name, item in value.items()}
        case (tuple(), dict()) if isinstance(value, tuple):
            return value[0], dict(value[1])
        case list():
            return tuple(value), OfList()
        case tuple():
            return value, {}
    what = "nothing" if value is None else f"a {type(value).__name__}"
    raise LoadError(f"got {what} from {source}: {FORMS}", slug="bad-inputs")


def reject_iterators(arguments: Any, source: str) -> None:
    """Reject an iterator, which the first of several calls would consume. Raises: LoadError(slug="bad-inputs")."""
    if any(isinstance(leaf, Iterator) for leaf in tree_leaves(arguments)):
        raise LoadError(
            f"{source} contains an iterator, which is empty after the first of several calls: give a list of its items",
            slug="bad-inputs",
        )


def bind_named(model: nn.Module, tensors: Mapping[str, Any], source: str) -> Batch:
    """Match named tensors with arguments of `forward`. The names "0", "1" ..., or a single unknown name: by position.

    Raises: LoadError(slug="bad-inputs").
    """
    parameters = arguments_of(model.forward)
    variadic = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    names = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if set(tensors) <= set(names) or variadic:
        return (), dict(tensors)
    keys = [key.removeprefix("arr_") for key in tensors]
    if all(key.isdecimal() for key in keys):
        return tuple(value for _, value in sorted(zip(map(int, keys), tensors.values(), strict=True))), {}
    if len(tensors) == 1:
        return tuple(tensors.values()), {}
    raise LoadError(
        f"{source} names {', '.join(tensors)}, but forward takes {', '.join(names) or 'nothing'}: use the names of forward's arguments",
        slug="bad-inputs",
    )


def _from_shapes(text: str, shapes: list[re.Match[str]], model: nn.Module) -> Batch:
    try:
        values = [_values(match, model) for match in shapes]
    except (RuntimeError, ValueError, OverflowError) as error:  # out of memory, or a limit below 1
        reason = str(error).partition("\n")[0]
        raise LoadError(f"cannot generate --inputs {text!r}: {reason}", slug="bad-inputs") from error
    names = [match["name"] for match in shapes]
    if not any(names):
        return tuple(values), {}
    if not all(names):
        raise LoadError(f"--inputs {text!r} names only some shapes: name all or none", slug="bad-inputs")
    return bind_named(model, dict(zip(names, values, strict=True)), "--inputs")


def _values(match: re.Match[str], model: nn.Module) -> Tensor:
    """Generate values: normal floats; integers below the limit or the embedding's size; ones for bools and masks."""
    dtype: Any = getattr(torch, match["dtype"], None)
    if not isinstance(dtype, torch.dtype):
        raise LoadError(
            f"{match['dtype']!r} is not a dtype of torch: write float32, int64, bool ...", slug="bad-inputs"
        )
    shape = tuple(int(size) for size in match["shape"].split(",") if size)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, dtype=torch.float32 if dtype.is_floating_point else dtype).to(dtype)
    if not match["limit"] and (dtype == torch.bool or "mask" in (match["name"] or "")):
        return torch.ones(shape, dtype=dtype)
    rows = next((part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)), 2)
    return torch.randint(int(match["limit"] or rows), shape).to(dtype)


def _guesses(model: Any) -> Iterator[tuple[Batch, str]]:
    """Inputs to try, with their source: of the sizes that timm or a config declares; `dummy_inputs`; images of the sizes
    that an image transformer takes; one tensor in each shape that suits the first layer with weights."""
    declared: Mapping[str, Callable[[], Any]] = {
        "generated in the size that timm declares": lambda: torch.randn(BATCH, *model.pretrained_cfg["input_size"]),
        "generated in the sizes of the config": lambda: _of_hugging_face(model),
        "generated from two texts": lambda: features_of(model, TEXTS),
        "model.dummy_inputs": lambda: model.dummy_inputs,
    }
    for source, make in declared.items():
        try:
            batch = as_batches(make(), source)[0]
        except Exception:  # not declared, or not completely
            continue
        yield batch, source
    if diffusion_inputs.is_of_diffusers(model):
        for batch in diffusion_inputs.batches_of(model):
            yield batch, "generated in the sizes of the config"
    if len(required_arguments(model.forward)) < 2:
        for side in dict.fromkeys(image_sides(model)):
            for channels in _channels(model):
                tensor = torch.randn(BATCH, channels, side, side, dtype=torch.float32)
                yield ((tensor,), {}), f"generated as images of {side} by {side}, which its patches add up to"
    layers = [(name, part) for name, part in model.named_modules() if _shapes(part)]
    for name, layer in layers[:1] if len(required_arguments(model.forward)) < 2 else ():
        rows = layer.num_embeddings if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None
        for shape in _shapes(layer):
            # in FP32, whatever default dtype the user's file has set
            tensor = torch.randint(rows, shape) if rows else torch.randn(shape, dtype=torch.float32)
            yield ((tensor,), {}), f"generated for {name or 'the root'} ({type(layer).__name__})"


def _channels(model: nn.Module) -> tuple[int, ...]:
    """The number of channels of a model's images, or those to try."""
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    return (first.in_channels,) if first is not None else (3, 1)


def _of_hugging_face(model: Any) -> dict[str, Tensor]:
    """Inputs of a Hugging Face model, by name. Raises: AttributeError or TypeError if its config lacks a size."""
    config = model.config

    def tokens() -> Tensor:
        """Random token ids, without the first few ids, which often mean padding or end of text."""
        size, longest = config.vocab_size, getattr(config, "max_position_embeddings", None) or TOKENS
        return torch.randint(min(4, size - 1), size, (BATCH, min(TOKENS, int(longest))))

    match name := model.main_input_name:
        case "input_ids":
            value = tokens()
        case "pixel_values":
            part = getattr(config, "vision_config", config)
            size = getattr(part, "image_size", 224)
            sides = size if isinstance(size, list | tuple) else (size, size)
            value = torch.randn(BATCH, getattr(part, "num_channels", 3), *sides)
        case "input_features":
            value = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
        case "input_values":
            value = torch.randn(BATCH, SAMPLES)
        case _:
            raise AttributeError(name)
    return {name: value, **({"decoder_input_ids": tokens()} if getattr(config, "is_encoder_decoder", False) else {})}


def _shapes(layer: Any) -> list[tuple[int, ...]]:
    """Input shapes to try for a layer with weights, in order; [] for other modules."""
    match layer:
        case nn.modules.conv._ConvNd():
            sides = ([8 * n for n in LENGTHS], SIDES, (16, 8, 32))[len(layer.kernel_size) - 1]
            return [(BATCH, layer.in_channels, *[n] * len(layer.kernel_size)) for n in sides]
        case nn.BatchNorm2d():
            return [(BATCH, layer.num_features, n, n) for n in SIDES]
        case nn.Embedding() | nn.EmbeddingBag():
            return [(BATCH, n) for n in LENGTHS]
        case nn.LayerNorm() | nn.RMSNorm():
            features = tuple(layer.normalized_shape)
        case nn.RNNBase() | nn.RNNCellBase():
            features = (layer.input_size,)
        case nn.MultiheadAttention():
            features = (layer.embed_dim,)
        case nn.Linear():
            features = (layer.in_features,)
        case _:
            return []
    return [(BATCH, *features), (BATCH, TOKENS, *features)]  # rows, then sequences: such layers take both
