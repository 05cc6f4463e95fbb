"""TARGET, the user's way to name a model: parsed, then imported as the user's own code would import it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from ..errors import LoadError
from .sandbox import blame

_SYMBOL = re.compile(r"(?P<where>.+?):(?P<symbol>[A-Za-z_][\w.]*(?:\(.*\))?)", re.DOTALL)
LONGEST = 4000
"""Characters that a path may have on the systems we know."""
_imported_files: dict[str, ModuleType] = {}
"""Modules this file put into `sys.modules`, which a later target of the same name may replace."""


@dataclass(frozen=True)
class Target:
    """A parsed TARGET: a file or the name of a module, and what to take from it.

    hub: "timm" or "hf" where a library's model is named instead; args then begin with that name.
    """

    text: str
    path: Path | None
    module: str
    symbol: str | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    hub: str = ""

    @property
    def label(self) -> str:
        """How messages call the place: the file's name or the module's."""
        if self.hub:
            return self.text
        return self.path.name if self.path else self.module

    @property
    def name(self) -> str:
        if self.hub:
            return Path(str(self.args[0])).name
        stem = self.path.stem if self.path else self.module
        return f"{stem}-{self.symbol}" if self.symbol else stem

    @property
    def folders(self) -> tuple[str, ...]:
        """What `sys.path` needs: the file's folder, or the one above its outermost package; else where we stand."""
        if self.path is None:
            return (str(Path.cwd()),)
        return (str(self.path.parents[self.module.count(".")]),)


def parse(text: str) -> Target:
    """Reads `path/to/model.py[:symbol]`, `package.module[:symbol]`, `timm:NAME` or `hf:NAME_OR_PATH`.

    A symbol, and a name of timm's, may carry literal arguments.
    Raises: LoadError(slug="missing-target" | "bad-target").
    """
    if len(text) > LONGEST:
        raise LoadError(f"a TARGET of {len(text)} characters is no path: write path/to/model.py[:symbol]", "bad-target")
    if text.startswith(("timm:", "hf:")):
        return _of_hub(text)
    match = _SYMBOL.fullmatch(text)
    where, symbol = (match["where"], match["symbol"]) if match else (text, None)
    name, args, kwargs = _split_call(symbol) if symbol else (None, (), {})
    if where.endswith(".py") or Path(where).exists() or "/" in where or "\\" in where:
        path = _existing_file(Path(where))
        return Target(text, path, _module_name(path), name, args, kwargs)
    if not all(part.isidentifier() for part in where.split(".")):
        raise LoadError(f"{text!r} is neither a file nor a module name: write path/to/model.py[:symbol]", "bad-target")
    return Target(text, None, where, name, args, kwargs)


def import_target(target: Target) -> ModuleType:
    """Imports the target's module; `if __name__ == "__main__"` blocks do not run.

    Raises: LoadError(slug="missing-target" | "syntax-error" | "missing-package" | "import-raises").
    """
    try:
        if target.path is None or "." in target.module:
            return importlib.import_module(target.module)
        return _import_file(target.path)
    except SyntaxError as error:
        place = f"{Path(error.filename or target.label).name}:{error.lineno}"
        raise LoadError(f"{place}: syntax error, {error.msg}: fix it and run again", slug="syntax-error") from error
    except ModuleNotFoundError as error:
        if error.name is None:  # a library that imports lazily wraps what stopped it, and names no module
            raise LoadError(f"importing {target.label} raised {blame(_root(error))}", slug="import-raises") from error
        if target.module == error.name or target.module.startswith(error.name + "."):
            hint = "give a path such as ./model.py, or run where the module can be imported"
            raise LoadError(f"no file and no module is called {target.module!r}: {hint}", "missing-target") from error
        hint = "install it in the environment that runs the audit"
        raise LoadError(f"{target.label} needs {error.name!r}, which is not here: {hint}", "missing-package") from error
    except (Exception, SystemExit) as error:
        raise LoadError(f"importing {target.label} raised {blame(error)}", slug="import-raises") from error


def _root(error: BaseException) -> BaseException:
    """What the error was raised for, and that one in turn."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _of_hub(text: str) -> Target:
    hub, _, name = text.partition(":")
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = {}
    if hub == "timm" and name.endswith(")"):
        name, bracket, inside = name.partition("(")
        _, args, kwargs = _split_call(f"create_model{bracket}{inside}")
    if not name.strip():
        raise LoadError(f"{text!r} names no model: write timm:resnet18 or hf:path/to/directory", slug="bad-target")
    return Target(text, None, "timm" if hub == "timm" else "transformers", None, (name, *args), kwargs, hub)


def _existing_file(path: Path) -> Path:
    if path.is_dir():
        scripts = sorted(p.name for p in path.glob("*.py"))[:3]
        example = f", for example {path / scripts[0]}" if scripts else ""
        raise LoadError(f"{path} is a directory: name the file that holds the model{example}", slug="directory-target")
    if not path.exists():
        raise LoadError(f"{path} does not exist: check the path (from {Path.cwd()})", slug="missing-target")
    if path.suffix != ".py":
        hint = "name the .py file that builds the model and pass weights with --weights"
        raise LoadError(f"{path} is not a Python file: {hint}", slug="bad-target")
    return path.resolve()


def _module_name(path: Path) -> str:
    """The file's stem, after the names of the packages it sits in."""
    parts = [path.stem]
    for folder in path.parents:
        if not (folder / "__init__.py").exists() or not folder.name.isidentifier():
            break
        parts.insert(0, folder.name)
    return ".".join(parts)


def _import_file(path: Path) -> ModuleType:
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and known is not _imported_files.get(name):
        name = f"_audited_{name}"  # a file called types.py must not push out Python's own
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = _imported_files[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name], _imported_files[name]
        raise
    return module


def _split_call(symbol: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """`Net(3, width=8)` -> ("Net", (3,), {"width": 8}); arguments are literals, nothing is evaluated."""
    if "(" not in symbol:
        return symbol, (), {}
    try:
        tree = ast.parse(symbol, mode="eval").body
        if not isinstance(tree, ast.Call) or any(keyword.arg is None for keyword in tree.keywords):
            raise ValueError
        args = tuple(ast.literal_eval(argument) for argument in tree.args)
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in tree.keywords}
    except (SyntaxError, ValueError) as error:
        hint = "write name(1, width=8) with plain numbers, strings, lists or dicts"
        raise LoadError(f"cannot read the arguments in {symbol!r}: {hint}", slug="bad-target") from error
    return ast.unparse(tree.func), args, kwargs
