"""Imports a user's module in the audit and the verification process; `patched_model.py` contains a copy of the code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_digests: dict[str, str] = {}  # {module: digest of its file}, for files that were imported here


NAME = "<name>"
"""Key of a dict that stands for an object of the model's file, see `with_names`."""


@contextlib.contextmanager
def as_script(argv: Sequence[str], folders: Sequence[str]) -> Iterator[None]:
    """Run the body with the `sys.argv` and `sys.path` of the user's own script.

    folders: the first precedes `sys.path`, as a script's folder does; the others follow it. After the body, all folders
    are at the end of `sys.path`, since a forward may import modules.
    """
    before, sys.argv = sys.argv, [*argv]
    sys.path[:] = [folders[0], *sys.path, *folders[1:]] if folders else sys.path
    try:
        yield
    finally:
        sys.argv = before
        if folders and folders[0] in sys.path:
            sys.path.remove(folders[0])
        sys.path.extend(folder for folder in dict.fromkeys(folders) if folder not in sys.path)


def import_source(name: str, path: Path | None) -> ModuleType:
    """Import the user's module once, so that its classes are the same as in the user's program.

    name: as in an `import` statement. path: the module's file; None to search for the name. A file outside packages
    gets another name if a loaded or standard module has its name. Raises: ImportError if a package of this name was
    imported from elsewhere; and the exceptions that the module raises.
    """
    if path is None:
        return importlib.import_module(name)
    digest, modules = digest_of(path), list(sys.modules.items())
    known = next((module for own, module in modules if own != "__main__" and _is_of(module, path)), None)
    if known is not None and _digests.get(known.__name__, digest) == digest:
        return known
    if "." in name or path.name == "__init__.py":
        _import_dotted_folders(name, path)
        if "." not in path.stem:
            module = importlib.import_module(name)
            if not _is_of(module, path):
                where = getattr(module, "__file__", None) or "elsewhere"
                raise ImportError(f"{name} was imported from {where}, not from {path}: use a fresh Python process")
            return module
        importlib.import_module(name.rpartition(".")[0])
    if known is not None:
        name = known.__name__  # its file has changed since that import
    elif name in sys.modules or name in sys.stdlib_module_names:
        name = f"{name}_{digest[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # so that its classes can be pickled
    _digests[name] = digest
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _digests[name]
        raise
    return module


def name_of(text: str) -> str:
    """The name of a file or folder as part of a module's name, in which a dot would separate packages."""
    return text.replace(".", "_")


def _import_dotted_folders(name: str, path: Path) -> None:
    """Import the packages around a module whose folders have a dot in their names, as `net-1.0`: no `import` finds them
    under `name_of` their names."""
    packages = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for depth in range(1, len(packages) + 1):
        package = ".".join(packages[:depth])
        folder = path.parents[len(packages) - depth]
        if "." not in folder.name or package in sys.modules:
            continue
        init = folder / "__init__.py"
        spec = importlib.util.spec_from_loader(package, None, is_package=True)
        if init.is_file():
            spec = importlib.util.spec_from_file_location(package, init)
        assert spec is not None
        spec.submodule_search_locations = [str(folder)]
        module = importlib.util.module_from_spec(spec)
        sys.modules[package] = module
        if spec.loader is not None:
            spec.loader.exec_module(module)


def with_names(value: Any, module: Any) -> Any:
    """An argument of a TARGET with the objects that it names: in lists, tuples and dicts, {NAME: "Config"} stands for
    `module.Config`, and with "args" and "kwargs" for what a call of it returns. Raises: AttributeError for an unknown
    name; and the exceptions of the call."""
    if isinstance(value, (list, tuple)):
        return type(value)(with_names(item, module) for item in value)
    if not isinstance(value, dict):
        return value
    if NAME not in value:
        return {key: with_names(item, module) for key, item in value.items()}
    named = module
    for part in value[NAME].split("."):
        named = getattr(named, part)
    if "args" not in value:
        return named
    return named(*with_names(value["args"], module), **with_names(value["kwargs"], module))


def root_of(name: str, path: Path) -> str:
    """The folder that contains the module's outermost package, or the module itself if it is in no package."""
    return str(path.parents[name.count(".") + (path.name == "__init__.py")])


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _is_of(module: ModuleType, path: Path) -> bool:
    file = getattr(module, "__file__", None)
    with contextlib.suppress(OSError):
        return isinstance(file, str) and file.endswith(path.name) and path.samefile(file)
    return False
