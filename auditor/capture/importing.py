"""A module that may be imported for the first time while functions are replaced, and must not see that."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType


class Importing(MetaPathFinder):
    """Between begin() and end(), the first import of the module called `name` is made inside of `around()`."""

    def __init__(self, name: str, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._name, self._around = name, around

    def begin(self) -> None:
        """Nothing where the module was imported before."""
        if self._name not in sys.modules:
            sys.meta_path.insert(0, self)

    def end(self) -> None:
        """Leave imports to Python again."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Where the module lies, with a loader that runs it inside of `around()`."""
        if name != self._name:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Around(spec.loader, self._around)
        return spec


class _Around(Loader):
    def __init__(self, loader: Loader, around: Callable[[], AbstractContextManager[None]]) -> None:
        self._loader, self._around = loader, around

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        with self._around():
            self._loader.exec_module(module)
