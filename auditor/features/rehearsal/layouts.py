"""Which functions of a training file run one step: by their source, as `backward` and `step` are called in it."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

WHOLE = re.compile(r"main|train|fit|run|.*(epoch|loop|training)s?$")
"""Names of functions that run many steps, if they call `backward` in a loop."""
DIFFERENTIATES = ("backward", "manual_backward")
"""Methods that compute gradients; `autograd.grad` too."""


@dataclass
class Source:
    """What a function's source calls. methods: names of called methods; functions: names of called functions. returned:
    whether it returns a function of its own; loops: whether it differentiates in a loop."""

    methods: set[str] = field(default_factory=set)
    functions: set[str] = field(default_factory=set)
    returned: bool = False
    loops: bool = False


def step_candidates(functions: Mapping[str, Callable[..., Any]]) -> tuple[list[str], list[str]]:
    """(names of functions that run one step, names of those that run a whole training).

    One step: the function calls `backward` and an optimizer's `step`, itself or in functions of the file that it calls,
    none of which does both. A function that returns such a function is a candidate with `()`. Without any, the functions
    that call `backward` are candidates.
    """
    sources = {name: source for name, function in functions.items() if (source := _read(function)) is not None}
    whole = [name for name, one in sources.items() if one.loops and WHOLE.fullmatch(name)]
    both = [name for name in sources if _reaches(name, sources, _differentiates) and _reaches(name, sources, _updates)]
    innermost = [name for name in both if not sources[name].functions.intersection({*both} - {name})]
    if not innermost:
        innermost = [name for name, one in sources.items() if _differentiates(one)]
    found = [f"{name}()" if sources[name].returned else name for name in innermost if name not in whole]
    return found, whole


def methods_of(values: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[str]:
    """The methods called `names` of objects in a file, as `trainer.step`, if they compute gradients."""
    for variable, value in values.items():
        for name in names:
            method = getattr(type(value), name, None)
            source = _read(method) if inspect.isfunction(method) else None
            if source is not None and _differentiates(source):
                yield f"{variable}.{name}"


def _differentiates(source: Source) -> bool:
    return not source.methods.isdisjoint(DIFFERENTIATES) or "autograd.grad" in source.methods


def _updates(source: Source) -> bool:
    return "step" in source.methods


def _reaches(name: str, sources: Mapping[str, Source], has: Callable[[Source], bool]) -> bool:
    """Whether a function, or one that it calls, has a property."""
    waiting, seen = [name], set[str]()
    while waiting:
        one = waiting.pop()
        if one in seen or one not in sources:
            continue
        seen.add(one)
        if has(sources[one]):
            return True
        waiting += sources[one].functions
    return False


def _read(function: Callable[..., Any]) -> Source | None:
    try:
        (tree, *_) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    source = Source()
    nested = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef) and one is not tree}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _note_call(node, source)
        if isinstance(node, ast.Return) and isinstance(node.value, ast.Name):
            source.returned = source.returned or node.value.id in nested
        if isinstance(node, ast.For | ast.While):
            source.loops = source.loops or any(_is_backward(one) for one in ast.walk(node))
    source.functions -= nested
    return source


def _note_call(node: ast.Call, source: Source) -> None:
    called = node.func
    if isinstance(called, ast.Name):
        source.functions.add(called.id)
    elif isinstance(called, ast.Attribute):
        source.methods.add(called.attr)
        if ast.unparse(called).endswith("autograd.grad"):
            source.methods.add("autograd.grad")


def _is_backward(node: ast.AST) -> bool:
    is_method = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    return is_method and isinstance(node, ast.Call) and getattr(node.func, "attr", "") in DIFFERENTIATES
