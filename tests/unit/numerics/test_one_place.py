"""What an operation is stands in auditor/numerics alone: no other module keeps a list of operations."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import auditor

PACKAGE = Path(auditor.__file__).parent
NAMES = {name.partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
PACKETS = {name.removeprefix("aten::") for name in NAMES if name.startswith("aten::")} | {"getitem"}


MOST = 0.75


def is_packet(text: str) -> bool:
    """Whether a string is an operation's name: `add`, `add_`, `aten.add`, `aten.add.Tensor`."""
    return text.removeprefix("aten.").partition(".")[0] in PACKETS


def lists_in(code: str) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Line and names of every display, string of words or regular expression that is a list of operations."""
    tree = ast.parse(code)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Set, ast.Tuple, ast.List)):
            yield from _display(node.lineno, node.elts)
        elif isinstance(node, ast.Dict):
            yield from _display(node.lineno, [key for key in node.keys if key is not None])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = tuple(word for word in re.split(r"[\s|]+", node.value) if word)
            if _are_packets(words):
                yield node.lineno, words


def _are_packets(texts: tuple[str, ...]) -> bool:
    """Whether these are names of operations, two at least: most of them, since one may be misspelt, or older."""
    names = [text for text in texts if is_packet(text)]
    return len(names) > 1 and len(names) >= MOST * len(texts)


def _display(line: int, items: list[ast.expr]) -> Iterator[tuple[int, tuple[str, ...]]]:
    texts = tuple(item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str))
    if _are_packets(texts):
        yield line, texts
    overloads = tuple(ast.unparse(item) for item in items)
    if len(items) > 1 and all(re.fullmatch(r"(torch\.ops\.)?_?aten(\.\w+){1,2}", text) for text in overloads):
        yield line, overloads


MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent.name not in ("numerics", "criteria"))
"""All but the room of the table, and one that knows no operations: "min" and "mean" are ways to join numbers there."""


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_lists_operations(path: Path) -> None:
    found = list(lists_in(path.read_text()))
    assert not found, f"{path.name}: make it a column of auditor/numerics/operations.toml"


@pytest.mark.parametrize(
    "code",
    [
        'KINKS = frozenset({"relu", "abs"})',
        'KINKS = frozenset("relu relu_ clamp".split())',
        'if name in ("aten.sin", "aten.cos"): pass',
        'AT_ZERO = {"div": 1, "log": 0}',
        'PHASES = frozenset({*SUMS, "aten.outer", "aten.cat"})',
        '"igamma igammac special_gammainc zeta".split()',
        "NOTHING = frozenset({_aten.detach.default, _aten.alias.default})",
        "WRITTEN_AS = {torch.ops.aten._softmax.default: 1, torch.ops.aten._log_softmax.default: 2}",
        're.compile("zeros_like|ones_like")',
    ],
)
def test_a_list_is_seen(code: str) -> None:
    assert list(lists_in(code))


@pytest.mark.parametrize(
    "code",
    [
        '"""add mul div"""',
        'x = {"mean", "of", "something"}',
        'if row.packet == "sum": pass',
        "emit(_aten.detach.default, (own,))",
        'x = ("real", value)',
    ],
)
def test_what_is_no_list_is_not(code: str) -> None:
    assert not list(lists_in(code))
