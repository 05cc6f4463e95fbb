"""The text of a Python file with the place of every expression, and edits of it that compose."""

from __future__ import annotations

import ast
import difflib
import os
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ...capture.places import repository_of
from ...records import Span

BOM = "\ufeff"
"""The mark with which some editors begin a file in UTF-8."""
ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.Constant)
"""Expressions to which an attribute can be appended without parentheses."""
NAMED = (ast.Name, ast.Attribute, ast.Subscript)
"""Expressions that name a value: `x`, `self.block.weight`, `batch["x"]`."""
SIMPLE = (ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return)
"""Statements that a fix may change."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
Scope = Function | ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


class Edit(NamedTuple):
    """Replaces the bytes from `start` to `end` of a file by a text; an insertion if both are equal."""

    file: str
    start: int
    end: int
    text: str


Edits = tuple[Edit, ...]


class Source:
    """A Python file as text and as a syntax tree. Offsets and columns are in UTF-8 bytes, as in `ast`."""

    def __init__(self, file: str, text: str) -> None:
        """Raises: SyntaxError if the text is no Python."""
        self.file = file
        self.text = text
        self.tree = ast.parse(text.removeprefix(BOM))
        self._bytes = text.encode()
        lengths = (len(line) for line in self._bytes.splitlines(keepends=True))
        self._starts = [0, *accumulate(lengths)]
        if text.startswith(BOM):
            self._starts[0] = len(BOM.encode())
        self._parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @classmethod
    def read(cls, file: str) -> Source:
        """The Source of a file. Raises: OSError, UnicodeDecodeError, SyntaxError; ValueError for another encoding."""
        with Path(file).open("rb") as opened:
            encoding, _ = tokenize.detect_encoding(opened.readline)
        with Path(file).open(encoding="utf-8", newline="") as opened:  # line ends stay as they are
            text = opened.read()
        if not encoding.startswith("utf-8") and not text.isascii():
            raise ValueError(f"{file} is written in {encoding}")
        return cls(file, text)

    @cached_property
    def _expressions(self) -> Mapping[tuple[int, ...], list[ast.expr]]:
        """{place: the expressions there, the outermost first}."""
        result: dict[tuple[int, ...], list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            if isinstance(node, ast.expr) and not self.is_formatted(node):
                result.setdefault(place_of(node), []).append(node)
        return result

    @cached_property
    def _calls_over_lines(self) -> Mapping[tuple[int, ...], list[ast.expr]]:
        """{place: the call there}, of methods that stand on a later line than their receiver: Python gives such a call the
        place from the method's name on."""
        result: dict[tuple[int, ...], list[ast.expr]] = {}
        for nodes in self._expressions.values():
            for node in nodes:
                function = node.func if isinstance(node, ast.Call) else None
                if isinstance(function, ast.Attribute) and function.end_lineno != function.lineno:
                    line, column, end_line, end_column = place_of(node)
                    name = len(function.attr.encode())
                    begin = (function.end_lineno or line, (function.end_col_offset or column) - name)
                    result[(*begin, end_line, end_column)] = [node]
        return result

    def is_formatted(self, node: ast.AST) -> bool:
        """Whether a node is part of a formatted string, where Python 3.11 does not tell its place."""
        current: ast.AST | None = node
        while current is not None and not isinstance(current, ast.stmt | ast.JoinedStr):
            current = self._parents.get(current)
        return isinstance(current, ast.JoinedStr)

    def expression_at(self, span: Span) -> ast.expr | None:
        """The expression that occupies a place; None if the place is of another node, such as a statement.

        A place of an assignment to `x[index]` is that of its target, and of `x += y` the whole statement: both give the
        assigned value.
        """
        known = self._expressions.get(tuple(span[1:])) or self._calls_over_lines.get(tuple(span[1:]))
        if known is None:
            for node in ast.walk(self.tree):
                if isinstance(node, SIMPLE) and place_of(node) == tuple(span[1:]):
                    return node.value
            return None
        found = known[0]
        if isinstance(getattr(found, "ctx", None), ast.Store):
            return getattr(self.statement_of(found), "value", None)
        return found

    def smallest_around(self, start: int, end: int) -> ast.expr | None:
        """The smallest expression in a function whose text contains the bytes from `start` to `end`."""
        best: tuple[int, ast.expr] | None = None
        for place, nodes in self._expressions.items():
            first, last = self.offset(*place[:2]), self.offset(*place[2:])
            contains = first <= start and end <= last and self.function_of(nodes[0]) is not None
            if contains and (best is None or last - first < best[0]):
                best = last - first, nodes[0]
        return best[1] if best is not None else None

    def offset(self, line: int, column: int) -> int:
        """Number of bytes before a place."""
        return self._starts[line - 1] + column

    def place_of_offset(self, offset: int) -> tuple[int, int]:
        """(line, column) of an offset in bytes, both from 1, the column in characters."""
        before = self._bytes[:offset].decode()
        return before.count("\n") + 1, len(before) - before.rfind("\n")

    def bounds(self, node: ast.AST) -> tuple[int, int]:
        """Offsets of the start and the end of a node's text."""
        line, column, end_line, end_column = place_of(node)
        return self.offset(line, column), self.offset(end_line, end_column)

    def segment(self, node: ast.AST) -> str:
        """The text of a node."""
        start, end = self.bounds(node)
        return self._bytes[start:end].decode()

    def parent(self, node: ast.AST) -> ast.AST | None:
        """The node that contains a node; None for the whole file."""
        return self._parents.get(node)

    def statement_of(self, node: ast.AST) -> ast.stmt:
        """The innermost statement around an expression."""
        current: ast.AST = node
        while not isinstance(current, ast.stmt):
            current = self._parents[current]
        return current

    def function_of(self, node: ast.AST) -> Function | None:
        """The innermost function around a node, possibly a lambda; None outside functions."""
        current: ast.AST | None = node
        while current is not None and not isinstance(current, (*FUNCTIONS, ast.Lambda)):
            current = self._parents.get(current)
        return current

    def scopes_of(self, node: ast.AST) -> Iterator[Scope]:
        """The functions, lambdas and comprehensions around a node, the innermost first: each has names of its own."""
        current: ast.AST | None = node
        while current is not None:
            if isinstance(current, (*FUNCTIONS, ast.Lambda, *COMPREHENSIONS)):
                yield current
            current = self._parents.get(current)

    def long_names_in(self, line: int) -> list[ast.expr]:
        """The names with several parts, such as `self.block.weight` and `batch["x"]`, that a function, lambda or
        comprehension reads, by the line at which it begins."""
        return self._long_names.get(line, [])

    @cached_property
    def _long_names(self) -> Mapping[int, list[ast.expr]]:
        by_text: dict[tuple[int, str], ast.expr] = {}
        for node in ast.walk(self.tree):
            if not isinstance(node, ast.Attribute | ast.Subscript) or not _is_long_name(node):
                continue
            scope = next(self.scopes_of(node), None)
            if scope is not None:
                by_text.setdefault((first_line(scope), ast.unparse(node)), node)
        result: dict[int, list[ast.expr]] = {}
        for (line, _), node in by_text.items():
            result.setdefault(line, []).append(node)
        return result

    def around(self, node: ast.expr) -> list[ast.expr]:
        """The expressions around an expression in the same function, lambda or comprehension, the innermost first."""
        result: list[ast.expr] = []
        current = self._parents.get(node)
        while isinstance(current, ast.expr | ast.keyword) and not isinstance(current, (ast.Lambda, *COMPREHENSIONS)):
            if isinstance(current, ast.expr):
                result.append(current)
            current = self._parents.get(current)
        return result

    def following(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements after a statement, in the same block."""
        block = self._block(statement)
        return block[block.index(statement) + 1 :] if statement in block else []

    def preceding(self, statement: ast.stmt) -> list[ast.stmt]:
        """The statements before a statement, in the same block, the nearest first."""
        block = self._block(statement)
        return block[: block.index(statement)][::-1] if statement in block else []

    def statement_at(self, line: int) -> ast.stmt | None:
        """The innermost statement in a function that covers a line; None outside functions."""
        found = [one for one in ast.walk(self.tree) if isinstance(one, ast.stmt)]
        around = [one for one in found if one.lineno <= line <= (one.end_lineno or 0) and self.function_of(one)]
        inner = [one for one in around if not isinstance(one, FUNCTIONS)]
        return min(inner, key=lambda one: (one.end_lineno or 0) - one.lineno, default=None)

    def line_insertion(self, statement: ast.stmt, text: str, *, below: bool = False) -> Edit:
        """Insert a line before a statement, or below it, with its indentation."""
        indent = self.indentation(statement) if self.begins_line(statement) else ""
        if not below:
            if not self.begins_line(statement):
                return self.insertion(self.bounds(statement)[0], f"{text}; ")
            return self.insertion(self.offset(statement.lineno, 0), f"{indent}{text}{self.newline}")
        if not self.begins_line(statement) or not self.ends_line(statement):
            return self.insertion(self.bounds(statement)[1], f"; {text}")
        end = self._end_of_line(statement)
        if not self._bytes[:end].endswith(b"\n"):  # the last line of a file
            return self.insertion(end, f"{self.newline}{indent}{text}")
        return self.insertion(end, f"{indent}{text}{self.newline}")

    @cached_property
    def newline(self) -> str:
        """How the lines of the file end."""
        return "\r\n" if b"\r\n" in self._bytes else "\n"

    def _end_of_line(self, statement: ast.stmt) -> int:
        """Offset of the line below a statement; of the end of the file for its last line."""
        return self._starts[statement.end_lineno or 0]

    def deletion(self, statement: ast.stmt) -> Edits:
        """Delete a statement with its line; `pass` remains of the only statement of a block, or beside other statements."""
        is_alone = self.begins_line(statement) and self.ends_line(statement)
        if len(self._block(statement)) < 2 or not is_alone:
            return (self.replacement(statement, "pass"),)
        start = self.offset(statement.lineno, 0)
        return (Edit(self.file, start, self._end_of_line(statement), ""),)

    def _block(self, statement: ast.stmt) -> list[ast.stmt]:
        around = self._parents[statement]
        for name in ("body", "orelse", "finalbody"):
            block = getattr(around, name, None)
            if isinstance(block, list) and statement in block:
                return block
        return []

    def insertion(self, offset: int, text: str) -> Edit:
        """Insert a text."""
        return Edit(self.file, offset, offset, text)

    def after(self, node: ast.expr, text: str) -> Edits:
        """Append a text such as `.float()` to an expression, in parentheses if need be."""
        start, end = self.bounds(node)
        if isinstance(node, ATOMS) and not isinstance(getattr(node, "value", None), int | float):
            return (self.insertion(end, text),)
        return self.insertion(start, "("), self.insertion(end, f"){text}")

    def replacement(self, node: ast.AST, text: str) -> Edit:
        """Replace the text of a node."""
        return Edit(self.file, *self.bounds(node), text)

    def indentation(self, statement: ast.stmt) -> str:
        """The white space before a statement that begins its line; "" for a statement after another one."""
        line = self._bytes[self._starts[statement.lineno - 1] :][: statement.col_offset].decode()
        return "" if line.strip() else line

    def begins_line(self, statement: ast.stmt) -> bool:
        """Whether nothing but white space precedes a statement in its line."""
        before = self._bytes[self._starts[statement.lineno - 1] :][: statement.col_offset]
        return not before.strip()

    def is_blank(self, line: int) -> bool:
        """Whether a line has nothing but white space."""
        return not self._bytes[self._starts[line - 1] : self._starts[line]].strip()

    def ends_line(self, statement: ast.stmt) -> bool:
        """Whether no other statement follows a statement in its line."""
        after = self._bytes[self.bounds(statement)[1] : self._end_of_line(statement)].decode().strip()
        return not after or after.startswith("#")

    def stands_alone(self, statement: ast.stmt) -> bool:
        """Whether nothing else stands in a statement's lines, comments included."""
        _, end = self.bounds(statement)
        after = self._bytes[end : self._end_of_line(statement)]
        return self.begins_line(statement) and not after.strip() and b"#" not in self.segment(statement).encode()

    def contains(self, around: ast.AST, node: ast.AST) -> bool:
        """Whether a node's text is part of another node's."""
        first, last = self.bounds(around)
        start, end = self.bounds(node)
        return first <= start and end <= last

    def last_bracket(self, start: int, end: int) -> int:
        """Offset after the last bracket that closes between two offsets, where no expression begins; `start` without one."""
        result, is_comment = start, False
        for offset in range(start, end):
            character = self._bytes[offset : offset + 1]
            if character == b"#":
                is_comment = True
            elif character in (b"\n", b"\r"):
                is_comment = False
            elif character == b")" and not is_comment:
                result = offset + 1
        return result

    def apply(self, edits: Iterable[Edit]) -> str:
        """The text after edits of this file. Insertions at one place keep their order.

        Raises: ValueError if two edits clash.
        """
        own = [edit for edit in dict.fromkeys(edits) if edit.file == self.file]
        if any(clash((one,), own[:number]) for number, one in enumerate(own)):
            raise ValueError("two edits change the same text")
        result = self._bytes
        ordered = sorted(enumerate(own), key=lambda pair: (pair[1].start, pair[1].end, pair[0]))
        for _, edit in reversed(ordered):
            result = result[: edit.start] + edit.text.encode() + result[edit.end :]
        return result.decode()


def place_of(node: ast.AST) -> tuple[int, int, int, int]:
    """(line, column, end line, end column) of a node, as in a Span."""
    return node.lineno, node.col_offset, node.end_lineno or 0, node.end_col_offset or 0  # type: ignore[attr-defined]


def clash(first: Iterable[Edit], second: Collection[Edit]) -> bool:
    """Whether edits of two groups change the same text in two ways. Equal edits are made once, and do not clash."""
    for one in first:
        for other in second:
            if one.file != other.file or one == other:
                continue
            if one.start < other.end and other.start < one.end:
                return True
            is_same_place = one[:3] == other[:3]
            if is_same_place and one.text.startswith(".") and other.text.startswith("."):
                return True  # two casts of one value
    return False


def expression_before(source: Source, edits: Collection[Edit], span: Span) -> ast.expr | None:
    """The expression of the original source at a place of the edited source; None if it is in no function."""
    edited = Source(source.file, source.apply(edits))
    start = original_offset(edited.offset(span.line, span.column), edits)
    end = original_offset(edited.offset(span.end_line, span.end_column), edits)
    return source.smallest_around(start, end)


def original_offset(offset: int, edits: Iterable[Edit]) -> int:
    """The offset in the original source of an offset in the edited one."""
    for edit in sorted(edits):
        length = len(edit.text.encode())
        if offset >= edit.start + length:
            offset -= length - (edit.end - edit.start)
        elif offset > edit.start:
            offset = edit.start
    return offset


def edited_texts(sources: Mapping[str, Source], edits: Iterable[Edit]) -> dict[str, str]:
    """{file: its text after the edits}, for each file that has edits. Raises: ValueError if two edits clash."""
    by_file: dict[str, list[Edit]] = {}
    for edit in edits:
        by_file.setdefault(edit.file, []).append(edit)
    return {file: sources[file].apply(own) for file, own in by_file.items()}


def base_of(files: Iterable[str]) -> Path:
    """The folder in which a patch of files applies: their repository; without one, the working directory if it contains
    all of them, and else the folder that they share."""
    folders = [Path(file).absolute().parent for file in files]
    repositories = {repository_of(folder) for folder in folders}
    if len(repositories) == 1 and (repository := next(iter(repositories))) is not None:
        return repository
    if all(folder.is_relative_to(Path.cwd()) for folder in folders):
        return Path.cwd()
    return Path(os.path.commonpath(folders))


def unified_diff(sources: Mapping[str, Source], edits: Iterable[Edit]) -> str:
    """The edits as a patch that `git apply` and `patch -p1` take in the folder `base_of(files)`."""
    parts: list[str] = []
    texts = edited_texts(sources, edits)
    base = base_of(texts) if texts else Path()
    for file, text in sorted(texts.items()):
        name = Path(file).absolute().relative_to(base).as_posix()
        if " " in name:
            name = f"{name}\t"  # a tab ends the name
        lines = difflib.unified_diff(_lines(sources[file].text), _lines(text), f"a/{name}", f"b/{name}")
        parts.extend(_with_end(line) for line in lines)
    return "".join(parts)


def _lines(text: str) -> list[str]:
    """The lines of a text with their ends, as `patch` counts them: `splitlines` also splits at form feeds."""
    parts = text.split("\n")
    return [f"{part}\n" for part in parts[:-1]] + ([parts[-1]] if parts[-1] else [])


def _with_end(line: str) -> str:
    return line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def walk_own(node: ast.AST) -> Iterator[ast.AST]:
    """A node and the nodes in it, without the bodies of nested functions and comprehensions, whose names are others, and
    without formatted strings, whose places Python 3.11 does not tell."""
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, (*FUNCTIONS, ast.Lambda, *COMPREHENSIONS, ast.JoinedStr)):
            yield from walk_own(child)


def _is_long_name(node: ast.AST) -> bool:
    """Whether an expression is a variable with attributes and constant indices, none of which calls a function."""
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and _is_long_name(node.value)
    if isinstance(node, ast.Attribute):
        return _is_long_name(node.value)
    return isinstance(node, ast.Name)


def first_line(scope: Scope) -> int:
    """The line at which Python says that a function, lambda or comprehension begins: that of its first decorator."""
    decorators = getattr(scope, "decorator_list", ())
    return min([scope.lineno, *(one.lineno for one in decorators)])
