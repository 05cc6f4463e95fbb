"""The features: what an audit can do beside its plans, and further commands, a folder each.

A folder has everything that one capability needs: `stage.py` with FEATURE, a subclass of Feature; `report.py` with PAGE,
a Page; `command.py` with VERBS of the command line; `facade.py` with what Python users hold. Each is optional. Nothing else in the package knows a feature by its
name, so that a feature is deleted with its folder and its line below.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

FEATURES = (
    "quantization",
    "programs",
    "generation",
    "score",
    "timing",
    "cpu",
    "repeats",
    "ledger",
    "training",
    "rehearsal",
    "watch",
    "compare",
    "fix",
)
"""Names of the folders, in the order in which audits run the features and reports show them."""


def parts(name: str) -> Iterator[tuple[str, ModuleType]]:
    """(feature, module) for each feature that has a module of this name: `stage`, `report` or `command`."""
    for feature in FEATURES:
        module = f"{__name__}.{feature}.{name}"
        if find_spec(module) is not None:
            yield feature, import_module(module)


def part(name: str) -> ModuleType:
    """The module of this name, which one feature alone has. Raises: ModuleNotFoundError if that feature was deleted."""
    for _, module in parts(name):
        return module
    raise ModuleNotFoundError(f"no feature has a module {name!r}")
