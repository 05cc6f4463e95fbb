"""The user's code: files of the classes and functions that a model is made of, and of what they name."""

from __future__ import annotations

import hashlib
import inspect
import sys
import sysconfig
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from ..isolation.members import named_modules

_OURS = __name__.partition(".")[0]
_LIBRARY = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("stdlib", "platstdlib"))
_INSTALLED = ("site-packages", "dist-packages")


def code_of(model: nn.Module, others: Iterable[Any] = ()) -> list[tuple[str, str]]:
    """(name, digest) of every file; of what has none, as in a notebook, its compiled code. others: functions, or files."""
    found: dict[str, str] = {}
    waiting: list[Any] = [*others]
    for _, module in named_modules(model):
        waiting += [*type(module).__mro__, *(held for held in vars(module).values() if inspect.isroutine(held))]
    seen: set[int] = set()
    while waiting:
        item = waiting.pop()
        if id(item) in seen or item is None:
            continue
        seen.add(id(item))
        if isinstance(item, (str, Path)):
            _file(found, Path(item))
            waiting += (
                module for module in tuple(sys.modules.values()) if getattr(module, "__file__", None) == str(item)
            )
        elif isinstance(item, ModuleType):
            waiting += _module(found, item)
        else:
            waiting += _thing(found, item)
    return sorted(found.items())


def imported_since(before: Collection[str]) -> dict[str, str]:
    """Digests of the files that the user's own modules are in which are here now and were not before."""
    found: dict[str, str] = {}
    for name, module in tuple(sys.modules.items()):
        file = None if name in before else getattr(module, "__file__", None)
        if isinstance(file, str) and _is_users(name, Path(file).resolve()):
            _file(found, Path(file).resolve())
    return found


def digests(paths: Iterable[str]) -> dict[str, str]:
    """Of files as they are now; none of those that are gone."""
    found: dict[str, str] = {}
    for path in paths:
        _file(found, Path(path))
    return found


def _is_users(name: str, path: Path) -> bool:
    """Whether a module is neither torch's, nor of this package, nor installed, nor one of Python's own."""
    if name.partition(".")[0] in ("torch", _OURS) or any(part in _INSTALLED for part in path.parts):
        return False
    return not str(path).startswith(_LIBRARY)


def _thing(found: dict[str, str], item: Any) -> Iterator[Any]:
    """A class or function: the module it is defined in; of one without a file its own code."""
    name = str(getattr(item, "__module__", None) or "")
    package = name.partition(".")[0]
    if package in ("torch", "builtins", _OURS):
        return
    module = sys.modules.get(name)
    if module is not None and getattr(module, "__file__", None):
        yield module
        return
    for function in [item, *(vars(item).values() if isinstance(item, type) else ())]:
        function = inspect.unwrap(getattr(function, "__func__", function))
        if isinstance(function, FunctionType):
            code = function.__code__
            found[f"{name}.{function.__qualname__}"] = _compiled(code)
            yield code.co_filename
            known = function.__globals__
            yield from (held for held in (known.get(each) for each in code.co_names) if _followed(held))
            yield from (held for held in _closed_over(function) if _followed(held))


def _closed_over(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # it was not filled yet
            continue


def _module(found: dict[str, str], module: ModuleType) -> Iterator[Any]:
    """Its file; and, of the user's own, what it names from elsewhere. Of a library its version stands for the rest."""
    package = module.__name__.partition(".")[0]
    file = getattr(module, "__file__", None)
    if package in ("torch", _OURS) or not isinstance(file, str):
        return
    path = Path(file).resolve()
    installed = any(part in _INSTALLED for part in path.parts)
    if not installed and str(path).startswith(_LIBRARY):
        return
    if installed:
        version = getattr(sys.modules.get(package), "__version__", "")
        found[package] = str(version) if isinstance(version, str) else ""
    _file(found, path)
    if not installed:
        yield from (held for held in vars(module).values() if _followed(held))


def _followed(value: Any) -> bool:
    return isinstance(value, (ModuleType, type, FunctionType))


def _file(found: dict[str, str], path: Path) -> None:
    try:
        found[str(path)] = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:  # code without a file, as in a notebook
        return


def _compiled(code: CodeType) -> str:
    """Of what a function does, wherever it stands in a file."""
    held = [_compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    text = repr((code.co_code, code.co_names, code.co_varnames, code.co_freevars, held))
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()
