"""Builds the model that a TARGET names: from a module, by symbol or the first matching convention, or from timm
(`timm:NAME`) or Hugging Face (`hf:NAME_OR_PATH`). Nothing is ever downloaded."""

from __future__ import annotations

import ast
import copy
import importlib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import networkx as nx
from torch import Tensor, nn

from ..capture.source import is_installed
from ..errors import LoadError, origin_of, suggest
from ..isolation.members import enter_by, size_of
from ..isolation.process import reseed
from ..numerics.formats import dtype_name, is_low
from ..records import Origin
from .importer import digest_of, with_names
from .inputs import Inputs
from .nearby import hint_at_file
from .state import convert_errors
from .statedicts import few, read_checkpoint
from .target import HUB_FILE, Target, arguments_of, blame, call, required_arguments

T = TypeVar("T")

FACTORIES = ("get_model", "build_model", "create_model", "load_model")
SPEC_KEYS = ("model", "inputs", "eval_inputs", "name", "loss", "targets")
CHECKPOINT_NAMES = (
    "model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.bin",
)
CHECKPOINTS = [f"{name}{index}" for name in CHECKPOINT_NAMES for index in ("", ".index.json")]
"""Checkpoint file names of transformers and diffusers, in the order in which transformers looks for them."""
LACKS_CLASS = (
    "config.json names the class {}, which transformers does not have: only AutoModel's model, which has no head, is "
    "audited; to audit the whole model, write a model.py that builds it"
)
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin", "*.index.json")


@dataclass(frozen=True)
class BuiltModel:
    """The model, its origin (None if the model cannot be built again), and the result of `audit_spec()`.

    stored_low: {dtype: number of FP16 or BF16 weights of the checkpoint, which the model has in FP32}. notes: texts
    about the model. checkpoint: texts about the checkpoint's weights. inputs: the inputs that come with the model, if
    any.
    """

    model: nn.Module
    origin: Origin | None
    spec: Mapping[str, Any] = field(default_factory=dict)
    stored_low: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()
    inputs: Inputs | None = None


def discover(module: ModuleType, target: Target, seed: int) -> BuiltModel:
    """Build the target's model, with the random generators seeded with `seed`.

    Raises: LoadError(slug="no-model" | "ambiguous-model" | "no-symbol" | "needs-arguments" | "not-a-model" |
    "model-raises" | "bad-spec").
    """
    symbol = target.symbol or _entry_point(module, target) or _conventional(module, target, seed)
    if target.symbol:
        parts = _method_in(module, target.symbol)
        if parts:
            owner, method = parts
            built = discover(module, replace(target, symbol=owner), seed)
            return built_for_method(built, method, target)
    made = _find_symbol(module, target, symbol)
    kind = "instance"
    spec = dict[str, Any]()
    args = tuple[Any, ...]()
    kwargs = dict[str, Any]()
    if not isinstance(made, nn.Module):
        if not callable(made):
            what = f"{symbol} in {target.label} is a {type(made).__name__}"
            raise LoadError(f"{what}: name a model, a class or a function", "not-a-model")
        kind = "class" if inspect.isclass(made) else "factory"
        args = target.args
        kwargs = dict(target.kwargs)
        if symbol == "Model" and not args and not kwargs and hasattr(module, "get_init_inputs"):
            args, kwargs = _init_inputs(module, target)
        made = _build(made, target, symbol, seed, *_named(args, module, target), **_named(kwargs, module, target))
        if symbol.rpartition(".")[2] == "audit_spec":
            spec = _checked_spec(made, target)
            kind = "spec"
            made = made["model"]
    if not isinstance(made, nn.Module):
        returned = f"{symbol}() in {target.label} returned"
        if inspect.isclass(made):
            what = f"{returned} the class {made.__name__}: call it, and return the model"
        else:
            what = f"{returned} a {type(made).__name__}: return only the nn.Module"
        raise LoadError(what, "not-a-model")
    file = Path(target.path or getattr(module, "__file__", None) or "")
    # an installed module is imported by its name: its path differs between machines
    is_script = file.suffix == ".py" and not is_installed(str(file))
    origin = Origin(
        str(file) if is_script else None,
        module.__name__,
        symbol,
        kind,
        args,
        kwargs,
        digest=digest_of(file) if is_script else None,
        working_directory=str(Path.cwd()),
        words=target.words,
    )
    notes = _note_on_choice(module, target, symbol) if kind == "class" and not target.symbol else ()
    return BuiltModel(made, origin, spec, notes=notes)


def _init_inputs(module: ModuleType, target: Target) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a class `Model` that `get_init_inputs()` returns: a list, or [[args], {kwargs}]."""
    what = f"get_init_inputs() in {target.label}"
    given = call(module.get_init_inputs, what, "model-raises")
    if not isinstance(given, list | tuple):
        raise LoadError(f"{what} must return a list of arguments", slug="bad-spec")
    if len(given) == 2 and isinstance(given[0], list | tuple) and isinstance(given[1], Mapping):
        return tuple(given[0]), dict(given[1])
    return tuple(given), {}


def _checked_spec(made: object, target: Target) -> dict[str, Any]:
    """The result of `audit_spec()`, a dict with `model` and `inputs`. Raises: LoadError(slug="bad-spec")."""
    what = f"audit_spec() in {target.label}"
    if not isinstance(made, Mapping) or not isinstance(made.get("model"), nn.Module) or "inputs" not in made:
        raise LoadError(f"{what} must return a dict with 'model' and 'inputs'", slug="bad-spec")
    unknown = sorted(set(made) - set(SPEC_KEYS))
    if unknown:
        raise LoadError(f"{what} has unknown keys {unknown}: use only {', '.join(SPEC_KEYS)}", "bad-spec")
    return dict(made)


def _method_in(module: ModuleType, symbol: str) -> tuple[str, str] | None:
    """(symbol of the model, method) if a symbol names a method of a model, a model class or a factory's model."""
    owner, _, name = symbol.rpartition(".")
    if not owner:
        return None
    try:
        value = attrgetter(owner)(module)
    except AttributeError:
        return None
    if inspect.isfunction(value):
        return None if hasattr(value, name) else (owner, name)
    kind = value if _is_model_class(value) else type(value)
    is_method = issubclass(kind, nn.Module) and inspect.isfunction(inspect.getattr_static(kind, name, None))
    return (owner, name) if is_method else None


def built_for_method(built: BuiltModel, method: str, target: Target) -> BuiltModel:
    """The model, whose calls run the method. Raises: LoadError(slug="no-symbol") if the model has no such method."""
    if not callable(getattr(built.model, method, None)):
        methods = [name for name in dir(type(built.model)) if not name.startswith("_") and not hasattr(nn.Module, name)]
        hint = suggest(method, methods) or f"it has {', '.join(methods[:8]) or 'only forward'}"
        message = f"{type(built.model).__name__} in {target.label} has no method {method!r}: {hint}"
        raise LoadError(message, slug="no-symbol")
    if method == "forward":
        return built
    model = copy.copy(built.model)  # the user's module keeps the model with its own forward
    enter_by(model, method)
    return replace(built, model=model, origin=replace(built.origin, method=method) if built.origin else None)


def _named(arguments: T, module: ModuleType, target: Target) -> T:
    """The target's arguments with the objects of its file that they name. Raises: LoadError(slug="no-symbol" |
    "model-raises")."""
    try:
        result: T = with_names(arguments, module)
        return result
    except AttributeError as error:
        name = str(error.name)
        hint = suggest(name, vars(module), "use a name that the file defines or imports")
        message = f"{target.label} has no {name!r}, which the arguments in {target.text!r} name: {hint}"
        raise LoadError(message, slug="no-symbol") from error
    except (Exception, SystemExit) as error:
        raise LoadError(f"an argument in {target.text!r} raised {blame(error)}", slug="model-raises") from error


def _entry_point(module: ModuleType, target: Target) -> str | None:
    """The only entry point of a hubconf.py: a function whose name has no leading underscore; None for other files.

    Raises: LoadError(slug="ambiguous-model" | "no-model").
    """
    if target.path is None or target.path.name != HUB_FILE:
        return None
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    functions = [name for name, value in public.items() if inspect.isfunction(value)]
    names = functions or [name for name, value in public.items() if _is_model_class(value)]
    if not names:
        message = f"{target.path} defines no entry point"
        raise LoadError(f"{message}: define a function that returns the model", slug="no-model")
    if len(names) > 1:
        options = " or ".join(f"{target.path.parent}:{name}" for name in names[:4])
        message = f"{target.path} defines {len(names)} entry points: name one, {options}"
        raise LoadError(message, slug="ambiguous-model")
    return names[0]


def _conventional(module: ModuleType, target: Target, seed: int) -> str:
    """The name of the model in the module, by the first convention that matches."""
    for name in ("audit_spec", *FACTORIES):  # defined in the file, or imported and callable without arguments
        value = getattr(module, name, None)
        if not callable(value) or isinstance(value, nn.Module):
            continue
        is_own = getattr(value, "__module__", None) == module.__name__
        if is_own or not required_arguments(value):
            return name
    if _is_model_class(getattr(module, "Model", None)) and hasattr(module, "get_init_inputs"):
        return "Model"
    if isinstance(getattr(module, "model", None), nn.Module):
        return "model"
    classes = _own_classes(module)
    if not classes:
        raise _no_model(module, target)
    names = _meant(_outermost(module, classes), classes, target, seed)
    if len(names) > 1:
        options = " or ".join(f"{target.label}:{name}" for name in names)
        raise LoadError(f"{target.label} defines several models: name one, {options}", slug="ambiguous-model")
    return names[0]


def _own_classes(module: ModuleType) -> dict[str, Any]:
    """{name: class} of the model classes that the module itself defines."""
    of_module = ((name, value) for name, value in vars(module).items() if _is_model_class(value))
    return {name: value for name, value in of_module if value.__module__ == module.__name__}


def _note_on_choice(module: ModuleType, target: Target, chosen: str) -> tuple[str, ...]:
    """Which class was taken, if others could be meant."""
    others = [name for name in _outermost(module, _own_classes(module)) if name != chosen]
    if not others:
        return ()
    listed = f"{' and '.join(others[:3])}{' and others' if len(others) > 3 else ''}"
    hint = f"to audit another, name it, as in {target.label}:{others[0]}"
    return (f"Audited is {chosen}; {target.label} defines {listed}, too: {hint}.",)


def _no_model(module: ModuleType, target: Target) -> LoadError:
    """The error for a file that defines no model."""
    hint = (
        "define get_model(), `model`, or an nn.Module class without required arguments, or name "
        "the symbol, as in model.py:Net"
    )
    imported = _imported_classes(module)
    if imported:
        file = target.text.partition(" -- ")[0]
        hint = f"it imports {' and '.join(imported)}: name one, as in {file}:{imported[0]}"
    return LoadError(f"no model found in {target.label}: {hint}", slug="no-model")


def _meant(outermost: list[str], classes: Mapping[str, Any], target: Target, seed: int) -> list[str]:
    """Of the outermost classes, those that a person may mean: the classes that need no arguments, and of these the ones
    with parameters, or else with buffers. Classes without both, such as a loss, only count where there are no others."""
    if len(outermost) == 1:
        return outermost
    built = {
        name: _build(classes[name], target, name, seed) for name in outermost if not required_arguments(classes[name])
    }
    with_parameters = {name: model for name, model in built.items() if any(True for _ in model.parameters())}
    with_buffers = {name: model for name, model in built.items() if any(True for _ in model.buffers())}
    needing_arguments = [name for name in outermost if name not in built]
    if with_parameters or with_buffers or not needing_arguments:
        return _not_parts_of_others(with_parameters or with_buffers or built, classes)
    return needing_arguments


def _not_parts_of_others(built: Mapping[str, nn.Module], classes: Mapping[str, Any]) -> list[str]:
    """The classes that no other model contains or derives from; all if there is none. built: {class: instance}."""
    parts = {name: {type(part) for part in model.modules()} for name, model in built.items()}
    independent = list[str]()
    for name in built:
        of_others = set[type]().union(*(parts[other] for other in built if other != name))
        if not any(issubclass(kind, classes[name]) for kind in of_others):
            independent.append(name)
    return independent or list(built)


def _imported_classes(module: ModuleType) -> list[str]:
    """Names of at most three model classes that the file imports from other files of the user."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    classes = [name for name, value in public.items() if _is_model_class(value) and not _is_of_library(value)]
    return classes[:3]


def _is_of_library(kind: type) -> bool:
    file = getattr(sys.modules.get(kind.__module__), "__file__", None)
    return file is None or is_installed(file)


def _outermost(module: ModuleType, classes: Mapping[str, type]) -> list[str]:
    """The names of the model classes that no other model class of the module uses, by name in its source or through
    functions and variables of the module. All names if the source is unknown, or if each class uses another."""
    try:
        tree = ast.parse(inspect.getsource(module))
    except (OSError, TypeError, SyntaxError):
        return list(classes)
    uses = nx.DiGraph()
    uses.add_nodes_from(classes)
    for statement in tree.body:
        defined = _defined_by(statement)
        read = {part.id for part in ast.walk(statement) if isinstance(part, ast.Name)}
        uses.add_edges_from((name, other) for name in defined for other in read - {name})
    inside = {part for name in classes for part in nx.descendants(uses, name)}
    return [name for name in classes if name not in inside] or list(classes)


def _defined_by(statement: ast.stmt) -> list[str]:
    """The names that a statement of a module defines: of a class, a function or variables."""
    match statement:
        case ast.ClassDef() | ast.FunctionDef():
            return [statement.name]
        case ast.Assign():
            return [part.id for target in statement.targets for part in ast.walk(target) if isinstance(part, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def _find_symbol(module: ModuleType, target: Target, symbol: str) -> Any:
    with suppress(AttributeError):
        return attrgetter(symbol)(module)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    models = [name for name, value in public.items() if isinstance(value, nn.Module) or _is_own_model_class(value)]
    functions = [
        name for name, value in public.items() if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    defined = ", ".join([*models, *functions][:8]) or "none that builds a model"
    hint = suggest(symbol, (*functions, *models))
    rest = f"{hint} It defines {defined}" if hint else f"it defines {defined}"
    raise LoadError(f"{target.label} has no {symbol!r}: {rest}", slug="no-symbol")


def _is_own_model_class(value: Any) -> bool:
    """Whether a value is a model's class that is not one of torch's layers."""
    return _is_model_class(value) and value.__module__.partition(".")[0] != "torch"


def _build(value: Callable[..., Any], target: Target, symbol: str, seed: int, /, *args: Any, **kwargs: Any) -> Any:
    what = f"{symbol}() in {target.label}"
    if not args and not kwargs and (names := required_arguments(value)):
        values = ", ".join(f"{name}={_example_value(value, name)}" for name in names)
        example = f"{target.place}:{symbol}({values})"
        message = f"{what} needs arguments ({', '.join(names)}): give them as '{example}', or define get_model()"
        raise LoadError(message, slug="needs-arguments")
    reseed(seed)
    try:
        return call(value, what, "model-raises", *args, **kwargs)
    except LoadError as error:
        if hint := hint_at_file(origin_of(error), target.path):
            raise LoadError(f"{error}{hint}", "model-raises") from error.__cause__
        raise


def _example_value(function: Callable[..., Any], name: str) -> str:
    """How an error writes a required argument: a call of the class that annotates it if that needs no arguments, such as
    a configuration with defaults; else three dots."""
    kind = arguments_of(function)[name].annotation
    if kind is inspect.Parameter.empty:
        return "..."
    if isinstance(kind, str):
        constructor = inspect.unwrap(function.__init__) if inspect.isclass(function) else inspect.unwrap(function)
        kind = getattr(constructor, "__globals__", {}).get(kind)
    is_own = inspect.isclass(kind) and kind.__module__ not in ("builtins", "typing") and not _is_of_library(kind)
    if not is_own or required_arguments(kind):
        return "..."
    return f"{kind.__name__}()"


def _is_model_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def from_timm(target: Target, seed: int) -> BuiltModel:
    """Build the model of a `timm:` target in FP32. Raises: LoadError(slug="no-symbol" | "model-raises")."""
    timm = importlib.import_module("timm")
    name = str(target.args[0])
    if not timm.is_model(name):
        hint = suggest(name, timm.list_models(), "timm.list_models() lists all models", most=3)
        raise LoadError(f"timm knows no model {name!r}: {hint}", slug="no-symbol")
    reseed(seed)
    model = call(timm.create_model, f"timm.create_model({name!r})", "model-raises", *target.args, **target.kwargs)
    return BuiltModel(model, Origin(None, "timm", "create_model", "factory", target.args, dict(target.kwargs)))


def from_transformers(target: Target, folder: Path, seed: int) -> BuiltModel:
    """Build the model of an `hf:` target in FP32. folder: where its files are.

    Raises: LoadError(slug="no-symbol" | "model-raises" | "quantized-model" | "remote-code" | "missing-weights" |
    "bad-weights" | "weights-mismatch").
    """
    transformers = importlib.import_module("transformers")
    reseed(seed)
    config = _config(transformers, folder)
    notes = tuple[str, ...]()
    wanted = str((getattr(config, "architectures", None) or ["AutoModel"])[0])
    kind = wanted
    named = getattr(transformers, wanted, None)
    if wanted != "AutoModel" and not (isinstance(named, type) and issubclass(named, nn.Module)):
        kind = "AutoModel"
        notes = (LACKS_CLASS.format(wanted),)
    maker = getattr(transformers, kind)
    stored = load_checkpoint(folder)
    if not any(next(folder.glob(pattern), None) for pattern in WEIGHT_FILES):
        make = maker.from_config if kind == "AutoModel" else maker
        model = call(make, f"{kind} from {folder.name}", "model-raises", config)
        return BuiltModel(model.float(), None, notes=notes)
    arguments = {"dtype": "float32", "local_files_only": True}
    asked = {**arguments, "output_loading_info": True, "ignore_mismatched_sizes": True}
    symbol = f"{kind}.from_pretrained"
    transformers.utils.logging.set_verbosity_error()  # the notes list missing and ignored weights instead
    transformers.utils.logging.disable_progress_bar()
    model, info = call(maker.from_pretrained, f"{symbol} on {folder.name}", "model-raises", str(folder), **asked)
    notes_on_weights = tuple(differences(model, info, folder.name))
    stored_low = _count_low(stored, set(info.get("unexpected_keys", ())))
    stored_low = {name: min(count, size_of(model)) for name, count in stored_low.items()}
    origin = Origin(None, "transformers", symbol, "factory", (), arguments, folder=str(folder))
    if not Path(target.args[0]).is_dir():
        name, _, revision = str(target.args[0]).partition("@")
        if revision:
            arguments["revision"] = revision
        origin = replace(origin, init_args=(name,), folder=None)
    return BuiltModel(model, origin, stored_low=stored_low, notes=notes, checkpoint=notes_on_weights)


def _count_low(stored: Mapping[str, Tensor], ignored: Collection[str]) -> dict[str, int]:
    """{dtype: number of weights} of the low-precision tensors of a checkpoint; tied weights count once."""
    used = {x.data_ptr(): x for name, x in stored.items() if name not in ignored}
    result = Counter[str]()
    for value in used.values():
        if is_low(value.dtype):
            result[dtype_name(value.dtype)] += value.numel()
    return dict(result)


def _config(transformers: Any, folder: Path) -> Any:
    """Read config.json; code in the directory is never run.

    Raises: LoadError(slug="remote-code" | "model-raises" | "quantized-model").
    """
    what, read = f"reading {folder / 'config.json'}", transformers.AutoConfig.from_pretrained
    try:
        config = call(read, what, "model-raises", str(folder), trust_remote_code=False)
    except LoadError as error:
        if "custom code" not in str(error):
            raise
        raise LoadError(
            f"{folder} contains its own model code, which an hf: target never runs: read that code, then audit a "
            "model.py whose get_model() calls from_pretrained(..., trust_remote_code=True)",
            slug="remote-code",
        ) from error
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        settings = quantized if isinstance(quantized, Mapping) else vars(quantized)
        method = settings.get("quant_method", "a method of its own")
        raise LoadError(
            f"the checkpoint in {folder} is quantized ({getattr(method, 'value', method)}), so there are no FP32 "
            "values to compare with: give the original checkpoint, or save it dequantized (`model.dequantize()`, then "
            "`save_pretrained`, with no quantization_config in config.json)",
            slug="quantized-model",
        )
    return config


def load_checkpoint(folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint, memory-mapped; {} for a folder without a checkpoint.

    Raises: LoadError(slug="missing-weights" | "bad-weights").
    """
    file = next((folder / name for name in CHECKPOINTS if (folder / name).is_file()), None)
    with convert_errors(slug="bad-weights"):
        return {} if file is None else read_checkpoint(file)


def differences(model: nn.Module, info: Mapping[str, Any], where: str) -> Iterator[str]:
    """Notes about weights that only the model, or only the checkpoint, has. info: what transformers reports.

    Raises: LoadError(slug="weights-mismatch") if shapes differ, or no weight of the checkpoint fits.
    """
    kind = type(model).__name__
    if wrong := sorted(info.get("mismatched_keys", ())):
        name, given, own = wrong[0]
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise LoadError(
            f"the checkpoint in {where} does not fit its config.json, since {name} has the shape {list(given)} in the checkpoint "
            f"and {list(own)} in {kind}{more}: give the config.json that was saved with the checkpoint",
            slug="weights-mismatch",
        )
    missing, left = sorted(info.get("missing_keys", ())), sorted(info.get("unexpected_keys", ()))
    own = dict(model.named_parameters(remove_duplicate=False))
    if {id(own[name]) for name in missing if name in own} == set(map(id, own.values())):
        raise LoadError(
            f"the checkpoint in {where} has no weight of {kind} (the checkpoint has {few(left)}, the model "
            f"{few(missing)}): check `architectures` in config.json",
            slug="weights-mismatch",
        )
    if missing:
        yield (
            f"weights missing from the checkpoint are RANDOM ({len(missing)}: {few(missing)}): "
            "results for them, and for all operations after them, do not describe a trained model"
        )
    if left:
        yield f"weights of the checkpoint that the model lacks are ignored ({len(left)}: {few(left)})"
