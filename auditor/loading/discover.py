"""Finds the model in an imported module: by the symbol the user named, else by the first convention that fits."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..capture.source import installed
from ..errors import LoadError
from ..isolation.process import reseed
from ..records import Origin
from .importer import digest_of
from .target import Target, call, required

FACTORIES = ("get_model", "build_model", "create_model", "load_model")
SPEC_KEYS = ("model", "inputs", "eval_inputs", "name", "loss", "targets")
CONVENTIONS = (
    "define get_model(), a module-level `model`, or an nn.Module class that needs no arguments; "
    "or name the symbol, as in model.py:Net"
)


@dataclass(frozen=True)
class BuiltModel:
    """The model, how to make it again (None: nothing that can be written down does), and what `audit_spec()` gave.

    stored_low: of what its checkpoint held in FP16 or BF16, and the model now has in FP32, see Subject. notes: what there
    is to say of it. checkpoint: and of the weights that it came with.
    """

    model: nn.Module
    origin: Origin | None
    spec: Mapping[str, Any] = field(default_factory=dict)
    stored_low: Mapping[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    checkpoint: tuple[str, ...] = ()


def discover(module: ModuleType, target: Target, seed: int) -> BuiltModel:
    """Builds the target's model; what consumes random numbers starts from `seed`.

    Raises: LoadError(slug="no-model" | "ambiguous-model" | "no-symbol" | "needs-arguments" | "not-a-model" |
    "model-raises" | "bad-spec").
    """
    symbol = target.symbol or _conventional(module, target, seed)
    made, kind, spec = _find_symbol(module, target, symbol), "instance", dict[str, Any]()
    args, kwargs = tuple[Any, ...](), dict[str, Any]()
    if not isinstance(made, nn.Module):
        if not callable(made):
            what = f"{symbol} in {target.label} is a {type(made).__name__}"
            raise LoadError(f"{what}: name a model, a class or a function", "not-a-model")
        kind = "class" if inspect.isclass(made) else "factory"
        args, kwargs = target.args, dict(target.kwargs)
        if symbol == "Model" and not args and not kwargs and hasattr(module, "get_init_inputs"):
            args, kwargs = _init_inputs(module, target.label)
        made = _build(made, target, symbol, seed, *args, **kwargs)
        if symbol.rpartition(".")[2] == "audit_spec":
            kind, spec = "spec", _checked_spec(made, target.label)
            made = spec["model"]
    if not isinstance(made, nn.Module):
        what = f"{symbol}() in {target.label} returned a {type(made).__name__}"
        raise LoadError(f"{what}: return the nn.Module alone", "not-a-model")
    file = Path(target.path or getattr(module, "__file__", None) or "")
    # an installed module is found by its name wherever it is installed
    path = file if file.suffix == ".py" and not installed(str(file)) else None
    where, digest = (str(path), digest_of(path)) if path else (None, None)
    here = str(Path.cwd())
    origin = Origin(where, module.__name__, symbol, kind, args, kwargs, digest=digest, working_directory=here)
    return BuiltModel(made, origin, spec)


def _conventional(module: ModuleType, target: Target, seed: int) -> str:
    """The name of what the first convention that fits takes for the model."""
    for name in ("audit_spec", *FACTORIES):
        if _is_callable_here(module, name):
            return name
    if _is_model_class(getattr(module, "Model", None)) and hasattr(module, "get_init_inputs"):
        return "Model"
    if isinstance(getattr(module, "model", None), nn.Module):
        return "model"
    classes = {n: c for n, c in vars(module).items() if _is_model_class(c) and c.__module__ == module.__name__}
    if not classes:
        raise LoadError(f"no model found in {target.label}: {CONVENTIONS}", slug="no-model")
    names = [name for name, kind in classes.items() if not required(kind)] or list(classes)[-1:]
    if len(names) > 1:  # of these, one that no other one contains or derives from
        built = {name: _build(classes[name], target, name, seed) for name in names}
        parts = {name: {type(part) for part in model.modules()} for name, model in built.items()}
        kinds = {name: set[type]().union(*(parts[other] for other in names if other != name)) for name in names}
        names = [n for n in names if not any(issubclass(kind, classes[n]) for kind in kinds[n])] or names
    if len(names) > 1:
        options = " or ".join(f"{target.label}:{name}" for name in names)
        raise LoadError(f"{target.label} defines several models: name one, {options}", slug="ambiguous-model")
    return names[0]


def _find_symbol(module: ModuleType, target: Target, symbol: str) -> Any:
    with suppress(AttributeError):
        return attrgetter(symbol)(module)
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    own = {n for n, c in public.items() if _is_model_class(c) and c.__module__.partition(".")[0] != "torch"}
    models = [name for name, value in public.items() if name in own or isinstance(value, nn.Module)]
    functions = [n for n, f in public.items() if inspect.isfunction(f) and f.__module__ == module.__name__]
    names = {name.lower(): name for name in (*functions, *models)}
    close = difflib.get_close_matches(symbol.lower(), names, n=1)
    hint = f"did you mean {names[close[0]]}? It" if close else "it"
    listed = ", ".join([*models, *functions][:8]) or "none that builds a model"
    raise LoadError(f"{target.label} has no {symbol!r}: {hint} defines {listed}", slug="no-symbol")


def _init_inputs(module: ModuleType, where: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `get_init_inputs()` returns, read as `[args]` or `[[args], {kwargs}]`."""
    value = call(module.get_init_inputs, f"get_init_inputs() in {where}", "model-raises")
    if not isinstance(value, list | tuple):
        raise LoadError(f"get_init_inputs() in {where} must return a list of arguments", slug="bad-spec")
    if len(value) == 2 and isinstance(value[0], list | tuple) and isinstance(value[1], Mapping):
        return tuple(value[0]), dict(value[1])
    return tuple(value), {}


def _build(value: Callable[..., Any], target: Target, symbol: str, seed: int, /, *args: Any, **kwargs: Any) -> Any:
    what = f"{symbol}() in {target.label}"
    if not args and not kwargs and (names := required(value)):
        example = f"{target.script}:{symbol}({', '.join(f'{name}=...' for name in names)})"
        said = f"{what} needs arguments ({', '.join(names)}): give them as '{example}', or define get_model()"
        raise LoadError(said, slug="needs-arguments")
    reseed(seed)
    return call(value, what, "model-raises", *args, **kwargs)


def _checked_spec(spec: Any, where: str) -> dict[str, Any]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("model"), nn.Module) or "inputs" not in spec:
        raise LoadError(f"audit_spec() in {where} must return a dict with 'model' and 'inputs'", slug="bad-spec")
    if unknown := sorted(set(spec) - set(SPEC_KEYS)):
        known = ", ".join(SPEC_KEYS)
        raise LoadError(f"audit_spec() in {where} has unknown keys {unknown}: it may have {known}", slug="bad-spec")
    return dict(spec)


def _is_callable_here(module: ModuleType, name: str) -> bool:
    """Whether `name` is meant for us: the file's own, or imported but callable as it is (not timm's create_model)."""
    value = getattr(module, name, None)
    if not callable(value) or isinstance(value, nn.Module):
        return False
    return getattr(value, "__module__", None) == module.__name__ or not required(value)


def _is_model_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)
