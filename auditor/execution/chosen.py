"""A choice of precisions: of every module, and of the functions that a low one keeps in FP32."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from ..paths import nearest, of_function
from ..records import ScopeChoice


@dataclass(frozen=True)
class Chosen:
    """Precision of any module path. keep: {module: functions that stay FP32 in it and in what it calls, where it is low}."""

    precision: Callable[[str], str]
    keep: Mapping[str, frozenset[str]] = field(default_factory=dict)

    def __call__(self, path: str) -> str:
        """The precision of a module, or of a function in it (see paths.function_in)."""
        found = of_function(path)
        if found is None:
            return self.precision(path)
        owner, name = found
        return "fp32" if name in self.keep.get(owner, ()) else self.precision(owner)


def kept_functions(precision_of: Callable[[str], str]) -> Mapping[str, frozenset[str]]:
    """{module: functions that a choice keeps in it}."""
    return precision_of.keep if isinstance(precision_of, Chosen) else {}


def labelled(precision: Mapping[str, str]) -> Chosen:
    """A choice by labels of modules and of functions in them; FP32 where there is none."""
    keep: dict[str, set[str]] = {}
    for path, label in precision.items():
        found = of_function(path) if label == "fp32" else None
        if found is not None and precision.get(found[0], "fp32") != "fp32":
            keep.setdefault(found[0], set()).add(found[1])
    return Chosen(lambda path: precision.get(path, "fp32"), {path: frozenset(names) for path, names in keep.items()})


def scoped(scopes: Mapping[str, ScopeChoice]) -> Chosen:
    """What a plan chooses: of a module that it does not list, as of the nearest above."""

    def precision(path: str) -> str:
        listed = nearest(path, scopes)
        return "fp32" if listed is None else scopes[listed].precision

    return Chosen(precision, {path: frozenset(choice.keep) for path, choice in scopes.items() if choice.keep})
