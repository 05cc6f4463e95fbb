"""Finds the model in an imported module: by the symbol the user named, else by the first convention that fits."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from ..errors import LoadError
from ..isolation.process import reseed
from ..records import Origin
from .importer import digest_of
from .sandbox import call
from .target import Target

FACTORIES = ("get_model", "build_model", "create_model", "load_model")
INSTALLED = frozenset(("site-packages", "dist-packages"))
"""Folders that packages are installed into."""

SPEC_KEYS = ("model", "inputs", "eval_inputs", "held_out", "name", "loss", "targets")
CONVENTIONS = (
    "define get_model(), a module-level `model`, or an nn.Module class that needs no arguments; "
    "or name the symbol, as in model.py:Net"
)


@dataclass(frozen=True)
class Found:
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


def discover(module: ModuleType, target: Target, seed: int) -> Found:
    """Builds the target's model; what consumes random numbers starts from `seed`.

    Raises: LoadError(slug="no-model" | "ambiguous-model" | "no-symbol" | "needs-arguments" | "not-a-model" |
    "model-raises" | "bad-spec").
    """
    if target.symbol:
        return _from_symbol(module, target, seed)
    for name in ("audit_spec", *FACTORIES):
        if _callable_here(module, name):
            return _from_callable(module, target, name, seed)
    if _is_model_class(getattr(module, "Model", None)) and hasattr(module, "get_init_inputs"):
        return _from_callable(module, target, "Model", seed)
    if isinstance(getattr(module, "model", None), nn.Module):
        return Found(module.model, _origin(target, module, "model", "instance"))
    return _only_class(module, target, seed)


def init_inputs(module: ModuleType, where: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `get_init_inputs()` returns, read as `[args]` or `[[args], {kwargs}]`; nothing if it is not there."""
    if not hasattr(module, "get_init_inputs"):
        return (), {}
    value = call(module.get_init_inputs, f"get_init_inputs() in {where}", "model-raises")
    if isinstance(value, Mapping):
        return (), dict(value)
    if not isinstance(value, list | tuple):
        raise LoadError(f"get_init_inputs() in {where} must return a list of arguments", slug="bad-spec")
    if len(value) == 2 and isinstance(value[0], list | tuple) and isinstance(value[1], Mapping):
        return tuple(value[0]), dict(value[1])
    return tuple(value), {}


def _from_symbol(module: ModuleType, target: Target, seed: int) -> Found:
    symbol = target.symbol or ""
    value: Any = module
    for part in symbol.split("."):
        if not hasattr(value, part):
            models, functions = _candidates(module)
            close = _close(part, models) or _close(part, functions) or _close(part, dir(value))
            listed = ", ".join([*models, *functions][:8])
            hint = f"did you mean {close}?{' It' if listed else ''}" if close else "it"
            what = f" defines {listed}" if listed else "" if close else " defines none that builds a model"
            raise LoadError(f"{target.label} has no {symbol!r}: {hint}{what}", slug="no-symbol")
        value = getattr(value, part)
    if isinstance(value, nn.Module):
        return Found(value, _origin(target, module, symbol, "instance"))
    if not callable(value):
        kind = type(value).__name__
        raise LoadError(f"{symbol} in {target.label} is a {kind}: name a model, a class or a function", "not-a-model")
    return _from_callable(module, target, symbol, seed, value)


def _from_callable(
    module: ModuleType, target: Target, symbol: str, seed: int, value: Callable[..., Any] | None = None
) -> Found:
    value = value or getattr(module, symbol)
    args, kwargs = target.args, dict(target.kwargs)
    if symbol == "Model" and not args and not kwargs:
        args, kwargs = init_inputs(module, target.label)
    result = _build(value, f"{symbol}() in {target.label}", target, symbol, seed, args, kwargs)
    if symbol.split(".")[-1] == "audit_spec":
        spec = _checked_spec(result, target.label)
        return Found(spec["model"], _origin(target, module, symbol, "spec"), spec)
    if not isinstance(result, nn.Module):
        kind = type(result).__name__
        raise LoadError(f"{symbol}() in {target.label} returned a {kind}: return the nn.Module alone", "not-a-model")
    kind = "class" if inspect.isclass(value) else "factory"
    return Found(result, _origin(target, module, symbol, kind, args, kwargs))


def _only_class(module: ModuleType, target: Target, seed: int) -> Found:
    classes = {n: c for n, c in vars(module).items() if _is_model_class(c) and c.__module__ == module.__name__}
    if not classes:
        raise LoadError(f"no model found in {target.label}: {CONVENTIONS}", slug="no-model")
    names = [name for name, cls in classes.items() if not _missing_arguments(cls)]
    if not names:
        name, cls = list(classes.items())[-1]
        raise LoadError(_needs_arguments(f"every model class in {target.label}", target, name, cls), "needs-arguments")
    built = {name: _build(classes[name], f"{name}() in {target.label}", target, name, seed, (), {}) for name in names}
    roots = [name for name in names if not _used_by_others(name, classes, built)]
    if len(roots) != 1:
        options = " or ".join(f"{target.label}:{name}" for name in roots or names)
        raise LoadError(f"{target.label} defines several models: name one, {options}", slug="ambiguous-model")
    return Found(built[roots[0]], _origin(target, module, roots[0], "class"))


def _used_by_others(name: str, classes: Mapping[str, type], built: Mapping[str, nn.Module]) -> bool:
    """Whether another model of the file contains this class or derives from it."""
    cls = classes[name]
    derived = any(issubclass(classes[other], cls) for other in built if classes[other] is not cls)
    return derived or any(
        isinstance(part, cls)
        for other, model in built.items()
        if other != name
        for path, part in model.named_modules()
        if path
    )


def _build(
    value: Callable[..., Any], what: str, target: Target, symbol: str, seed: int, args: Any, kwargs: Mapping[str, Any]
) -> Any:
    if not args and not kwargs and _missing_arguments(value):
        raise LoadError(_needs_arguments(what, target, symbol, value), slug="needs-arguments")
    reseed(seed)
    return call(value, what, "model-raises", *args, **kwargs)


def _missing_arguments(value: Callable[..., Any]) -> list[str]:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


def _needs_arguments(what: str, target: Target, symbol: str, value: Callable[..., Any]) -> str:
    names = _missing_arguments(value)
    example = f"{target.path or target.module}:{symbol}({', '.join(f'{name}=...' for name in names)})"
    return f"{what} needs arguments ({', '.join(names)}): give them as '{example}', or define get_model()"


def _checked_spec(spec: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(spec, Mapping) or not isinstance(spec.get("model"), nn.Module) or "inputs" not in spec:
        raise LoadError(f"audit_spec() in {where} must return a dict with 'model' and 'inputs'", slug="bad-spec")
    if unknown := sorted(set(spec) - set(SPEC_KEYS)):
        known = ", ".join(SPEC_KEYS)
        raise LoadError(f"audit_spec() in {where} has unknown keys {unknown}: it may have {known}", slug="bad-spec")
    return spec


def _callable_here(module: ModuleType, name: str) -> bool:
    """Whether `name` is meant for us: the file's own, or imported but callable as it is (not timm's create_model)."""
    value = getattr(module, name, None)
    if not callable(value) or isinstance(value, nn.Module):
        return False
    return getattr(value, "__module__", None) == module.__name__ or not _missing_arguments(value)


def _is_model_class(value: Any) -> bool:
    return inspect.isclass(value) and issubclass(value, nn.Module)


def _candidates(module: ModuleType) -> tuple[list[str], list[str]]:
    """Names of models and their classes, wherever they come from but torch; and of the module's own functions, factories first."""

    def is_model(value: Any) -> bool:
        own = _is_model_class(value) and value.__module__.partition(".")[0] != "torch"
        return own or isinstance(value, nn.Module)

    def is_own_function(value: Any) -> bool:
        return inspect.isfunction(value) and value.__module__ == module.__name__

    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    functions = [name for name, value in public.items() if is_own_function(value)]
    return [name for name, value in public.items() if is_model(value)], sorted(
        functions, key=lambda n: n not in FACTORIES
    )


def _close(name: str, known: Iterable[str]) -> str:
    """The known name that is nearly this one, whatever its capitals; "" where there is none."""
    names = {other.lower(): other for other in known if not other.startswith("_")}
    return next((names[close] for close in difflib.get_close_matches(name.lower(), names, n=1)), "")


def _origin(
    target: Target, module: ModuleType, symbol: str, kind: str, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Origin:
    """How the model is made again. An installed module is found by its name wherever it is installed."""
    file = Path(target.path or getattr(module, "__file__", None) or "")
    path = file if file.suffix == ".py" and INSTALLED.isdisjoint(file.parts) else None
    return Origin(
        str(path) if path else None,
        module.__name__,
        symbol,
        kind,
        tuple(args),
        dict(kwargs or {}),
        digest=digest_of(path) if path else None,
        working_directory=str(Path.cwd()),
    )
