"""Rewrites expressions by the `[[fix]]` tables of rules: patterns with holes, matched on the syntax tree of the source.

A pattern is a Python expression with holes such as `{x}`. Patterns and sources are compared in one form, in which
`torch.exp(x)` and `x.exp()`, `x * x` and `x ** 2`, `dim=-1` and `-1` are the same, and a local variable that is assigned
once stands for its value.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...rulebook.rule import Rule, RuleFix
from .candidates import DISPLAY, Candidate, Proposer
from .source import ATOMS, Edits, Source

HOLE = re.compile(r"\{(\*?)(\w+)(?::(\w+))?\}")
"""A hole of a pattern: `{x}` any expression, `{*how}` the remaining arguments, `{c:huge}` with a condition."""
_MARK, _REST = "_hole_", "_rest_"
_OPERATORS = {
    ast.Add: "add",
    ast.Sub: "sub",
    ast.Mult: "mul",
    ast.Div: "div",
    ast.Pow: "pow",
    ast.MatMult: "matmul",
}
_ALIASES = {
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "mm": "matmul",
    "bmm": "matmul",
    "absolute": "abs",
}
_COMMUTES = frozenset({"add", "mul"})
_REDUCTIONS = frozenset(
    "sum mean var std amax amin max logsumexp softmax log_softmax prod cumsum norm vector_norm argmax".split()
)
"""Functions whose argument after the tensor is `dim`, and the next `keepdim`."""
_LIBRARIES = frozenset(
    {"torch", "F", "nn.functional", "torch.nn.functional", "functional", "torch.special", "torch.linalg", "math"}
)
LARGEST = 65504.0
"""The largest number of FP16."""
TINY = 1e-4
"""Numbers below this may vanish in FP16."""

_UPDATES = ("{w} + {b} @ {a}", "{w} + {s:scalar} * ({b} @ {a})")
"""A weight plus a low-rank update, as in LoRA."""


def _two_products(update: str) -> Iterator[RuleFix]:
    """Rewritings of products with a weight plus an update to two products: digits of a small update are lost where the sum
    is rounded. `{x:name}` stands for a variable, since the rewritten text reads it twice."""
    b = "({b} * {s})" if "{s" in update else "{b}"
    linear = "torch.nn.functional.linear"
    both = f"{linear}({{x}}, {{w}}, {{*bias}}) + {linear}({linear}({{x}}, {{a}}), {b})"
    yield RuleFix((f"{linear}({{x:name}}, {update}, {{*bias}})",), (both,))
    yield RuleFix((f"({update}) @ {{x:name}}",), (f"{{w}} @ {{x}} + {b} @ ({{a}} @ {{x}})",))
    yield RuleFix((f"{{x:name}} @ ({update})",), (f"{{x}} @ {{w}} + ({{x}} @ {b}) @ {{a}}",))
    transposed = f"{{x}} @ {{w}}.t() + ({{x}} @ {{a}}.t()) @ {b}.t()"
    yield RuleFix((f"{{x:name}} @ ({update}).t()",), (transposed,))


MERGED = tuple(fix for update in _UPDATES for fix in _two_products(update))
"""Rewritings that answer a measured problem, without a rule that names it."""


@dataclass(frozen=True)
class Form:
    """An expression as an operation of others. head: the operation, or the text of a part that is not taken apart."""

    head: str
    parts: tuple[Form, ...] = ()
    keywords: tuple[tuple[str, Form], ...] = ()
    node: ast.expr | None = None

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[Any, ...]:
        """What decides whether two forms are equal: not where they stand."""
        return self.head, self.parts, self.keywords


def form_of(node: ast.expr) -> Form:
    """The form of an expression."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _settled(Form(_OPERATORS[type(node.op)], (form_of(node.left), form_of(node.right)), (), node))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        if isinstance(node.operand, ast.Constant):
            return Form(f"-{node.operand.value!r}", (), (), node)
        return Form("neg", (form_of(node.operand),), (), node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
        return _form_of_call(node)
    if isinstance(node, ast.Starred):
        return form_of(node.value)
    if isinstance(node, ast.Attribute) and node.attr in ("T", "mT"):
        return Form("t", (form_of(node.value),), (), node)
    if isinstance(node, ast.Constant):
        return Form(repr(node.value), (), (), node)
    return Form(ast.unparse(node), (), (), node)


def _form_of_call(node: ast.Call) -> Form:
    function = node.func
    parts = [form_of(one) for one in node.args]
    if isinstance(function, ast.Attribute):
        name = function.attr
        if ast.unparse(function.value) not in _LIBRARIES:
            if ast.unparse(function.value) == "self":
                return Form(ast.unparse(node), (), (), node)  # a module of the user's
            parts = [form_of(function.value), *parts]
    else:
        name = function.id if isinstance(function, ast.Name) else ""
    keywords = {one.arg: form_of(one.value) for one in node.keywords if one.arg}
    name = _ALIASES.get(name, name)
    if name in _REDUCTIONS:
        dim = keywords.pop("dim", keywords.pop("axis", None))
        if dim is not None and len(parts) == 1:
            parts.append(dim)
        if len(parts) == 3 and not parts[2].head.startswith(_REST):
            keywords["keepdim"] = parts.pop()
    return _settled(Form(name, tuple(parts), tuple(sorted(keywords.items(), key=lambda pair: pair[0])), node))


def _settled(form: Form) -> Form:
    """A form in which squares, roots and quotients are written in one way."""
    two = Form("2")
    if form.head == "square":
        return replace(form, head="pow", parts=(*form.parts, two))
    if form.head == "mul" and len(form.parts) == 2 and form.parts[0] == form.parts[1]:
        return replace(form, head="pow", parts=(form.parts[0], two))
    if form.head == "pow" and len(form.parts) == 2 and form.parts[1].head == "2.0":
        return replace(form, parts=(form.parts[0], two))
    if form.head == "pow" and len(form.parts) == 2 and form.parts[1].head == "0.5":
        return replace(form, head="sqrt", parts=form.parts[:1])
    return form


@dataclass(frozen=True)
class Pattern:
    """A parsed pattern. conditions: {hole: what its expression must be}."""

    form: Form
    conditions: Mapping[str, str]


@cache
def pattern_of(text: str) -> Pattern:
    """Parse a pattern. Raises: SyntaxError."""
    conditions = {name: condition for _, name, condition in HOLE.findall(text) if condition}
    python = HOLE.sub(lambda hole: f"*{_REST}{hole[2]}" if hole[1] else f"{_MARK}{hole[2]}", text)
    return Pattern(form_of(ast.parse(python, mode="eval").body), conditions)


class Rewriter:
    """Rewrites the expressions of one file by rules."""

    def __init__(self, source: Source, proposer: Proposer) -> None:
        self._source, self._proposer = source, proposer

    def candidates(self, around: ast.AST, rules: Sequence[Rule]) -> Iterator[Candidate]:
        """The candidates of rules in the function around a node: all places of a rule together, then one by one."""
        for rule in rules:
            title = f"rewrite: {rule.name.replace('-', ' ')} ({rule.code})"
            yield from self._of_fixes(around, rule.fixes, title, rule.advice)

    def without_rule(self, around: ast.AST) -> Iterator[Candidate]:
        """The candidates in the function around a node that no rule names: two products instead of a merged weight."""
        yield from self._of_fixes(around, MERGED, "rewrite: two products instead of a merged weight")

    def _of_fixes(self, around: ast.AST, fixes: Sequence[RuleFix], title: str, advice: str = "") -> Iterator[Candidate]:
        function = self._source.function_of(around)
        if function is None:
            return
        expressions = [node for node in ast.walk(function) if isinstance(node, ast.expr)]
        nodes = [node for node in expressions if not isinstance(node, ast.Name) and not self._source.is_formatted(node)]
        for fix in fixes:
            for template in fix.replace:
                rewrites = self._rewrites(nodes, fix, template)
                found = [Candidate(title, fix.safety, (edits,), advice) for edits in rewrites]
                if len(found) > 1:
                    parts = tuple(part for one in found for part in one.parts)
                    yield Candidate(title, fix.safety, parts, advice)
                yield from found

    def _rewrites(self, nodes: Sequence[ast.expr], fix: RuleFix, template: str) -> list[Edits]:
        """The edits of each match of a fix, without matches inside of other matches."""
        result: list[Edits] = []
        taken: list[tuple[int, int]] = []
        for node in nodes:
            start, end = self._source.bounds(node)
            if any(first <= start and end <= last for first, last in taken):
                continue
            form = form_of(node)
            for text in fix.match:
                pattern = pattern_of(text)
                holes: dict[str, Form | tuple[Form, ...]] = {}
                if form.head != pattern.form.head or not self._matches(pattern.form, form, holes, node):
                    continue
                if all(self._satisfies(holes[name], condition) for name, condition in pattern.conditions.items()):
                    written = self._written(template, holes, node)
                    if written is not None:
                        unread = self._unread_without(node, written)
                        result.append((self._source.replacement(node, written), *unread))
                        taken.append((start, end))
                    break
        return result

    def _unread_without(self, node: ast.expr, written: str) -> Edits:
        """The edits that delete assignments which no code reads after an expression is rewritten: `e = torch.exp(x)` of
        `e / e.sum()`. Those with a comment, or with calls of the user's functions, stay."""
        function = self._source.function_of(node)
        read = {name.id for name in ast.walk(ast.parse(written)) if isinstance(name, ast.Name)}
        gone: list[ast.AST] = [node]
        edits: list[Edits] = []
        names = [one for one in ast.walk(function) if isinstance(one, ast.Name)] if function is not None else []
        for statement in self._source.preceding(self._source.statement_of(node)):
            if not self._source.stands_alone(statement) or not _only_computes(statement):
                continue
            own = [name for name in names if name.id == ast.unparse(statement.targets[0])]  # type: ignore[attr-defined]
            others = [name for name in own if not any(self._source.contains(one, name) for one in (*gone, statement))]
            is_read_in = [name for name in own if any(self._source.contains(one, name) for one in gone)]
            if is_read_in and not others and not read.intersection(name.id for name in own):
                gone.append(statement)
                edits.append(self._source.deletion(statement))
        return tuple(edit for each in edits for edit in each)

    def _matches(self, pattern: Form, form: Form, holes: dict[str, Form | tuple[Form, ...]], root: ast.expr) -> bool:
        """Whether a form matches; holes: receives the forms in the holes."""
        if pattern.head.startswith(_MARK):
            name = pattern.head.removeprefix(_MARK)
            known = holes.setdefault(name, form)
            return known == form or (
                isinstance(known, Form) and self._inlined(known, root) == self._inlined(form, root)
            )
        if pattern.head != form.head:
            inner = self._definition(form, root)
            return inner is not None and self._matches(pattern, inner, holes, root)
        if not pattern.parts and not pattern.keywords:
            return not form.parts
        orders = [form.parts]
        if pattern.head in _COMMUTES and len(form.parts) == 2:
            orders.append(form.parts[::-1])
        for order in orders:
            tried = dict(holes)
            if self._match_parts(pattern, order, dict(form.keywords), tried, root):
                holes.clear()
                holes.update(tried)
                return True
        return False

    def _match_parts(
        self,
        pattern: Form,
        parts: tuple[Form, ...],
        keywords: dict[str, Form],
        holes: dict[str, Form | tuple[Form, ...]],
        root: ast.expr,
    ) -> bool:
        wanted = [one for one in pattern.parts if not one.head.startswith(_REST)]
        rest = [one for one in pattern.parts if one.head.startswith(_REST)]
        if len(parts) < len(wanted) or (len(parts) > len(wanted) and not rest):
            return False
        for one, part in zip(wanted, parts, strict=False):
            if not self._matches(one, part, holes, root):
                return False
        for name, one in pattern.keywords:
            if name not in keywords or not self._matches(one, keywords.pop(name), holes, root):
                return False
        if not rest:
            return not keywords
        left = (*parts[len(wanted) :], *(Form(f"{name}=", (one,)) for name, one in keywords.items()))
        known = holes.setdefault(rest[0].head.removeprefix(_REST), left)
        return known == left

    def _definition(self, form: Form, root: ast.expr) -> Form | None:
        """The form of the value of a local variable that is assigned once, before the expression `root`."""
        node = form.node
        function = self._source.function_of(root)
        if not isinstance(node, ast.Name) or function is None:
            return None
        stores = [
            one
            for one in ast.walk(function)
            if isinstance(one, ast.Name) and one.id == node.id and isinstance(one.ctx, ast.Store)
        ]
        if len(stores) != 1 or stores[0].lineno >= root.lineno:
            return None
        statement = self._source.parent(stores[0])
        if isinstance(statement, ast.Assign) and statement.targets == [stores[0]]:
            return self._if_unchanged(statement, stores[0], root, function)
        return None

    def _if_unchanged(self, statement: ast.Assign, target: ast.Name, root: ast.expr, function: ast.AST) -> Form | None:
        """The form of an assigned value, if neither it nor a variable that it reads changes between its statement and
        `root`."""
        read = {one.id for one in ast.walk(statement.value) if isinstance(one, ast.Name)} | {target.id}
        for one in ast.walk(function):
            name = _changed_name(one)
            if name is None or name is target or name.id not in read:
                continue
            if statement.lineno <= name.lineno < root.lineno:
                return None
        return form_of(statement.value)

    def _inlined(self, form: Form, root: ast.expr) -> Form:
        """A form with local variables that are assigned once replaced by their values."""
        inner = self._definition(form, root)
        if inner is not None:
            return self._inlined(inner, root)
        parts = tuple(self._inlined(one, root) for one in form.parts)
        return _settled(
            replace(form, parts=parts, keywords=tuple((n, self._inlined(one, root)) for n, one in form.keywords))
        )

    def _satisfies(self, form: Form | tuple[Form, ...], condition: str) -> bool:
        """Whether an expression is `huge` (a number beyond FP16), `tiny`, a `number`, a `scalar` (no tensor), or `name`."""
        if not isinstance(form, Form) or form.node is None:
            return False
        if condition == "scalar":
            return not any(self._proposer.names.leaves(form.node))
        if condition == "name":
            return isinstance(form.node, ast.Name | ast.Attribute)
        value = number_of(form.node)
        if value is None:
            return False
        if condition == "huge":
            return abs(value) > LARGEST and math.isfinite(value)
        return condition == "number" or (condition == "tiny" and 0 < value < TINY)

    def _written(self, template: str, holes: Mapping[str, Form | tuple[Form, ...]], root: ast.expr) -> str | None:
        """The replacement with the source's text in its holes; None if a hole has no text."""
        dtype = self._proposer.dtype_near(root)
        if "{dtype}" in template and dtype is None:
            return None
        missing: list[str] = []

        def text(hole: re.Match[str]) -> str:
            star, name = hole[1], hole[2]
            if name == "dtype":
                return str(dtype)
            value = holes.get(name, ())
            if star:
                return ", ".join(map(self._argument, value if isinstance(value, tuple) else (value,)))
            if not isinstance(value, Form) or value.node is None:
                missing.append(name)
                return ""
            before, after = template[: hole.start()].rstrip(), template[hole.end() :].lstrip()
            is_argument = before.endswith(("(", ",", "=")) and after.startswith((")", ","))
            own = self._source.segment(value.node)
            is_closed = isinstance(value.node, ATOMS) and "\n" not in own
            return own if is_argument or is_closed else f"({own})"

        result = re.sub(r",\s*\)", ")", HOLE.sub(text, template))
        if missing:
            return None
        around = self._source.parent(root)
        is_operand = isinstance(around, ast.BinOp | ast.UnaryOp | ast.Compare | ast.Attribute)
        return f"({result})" if is_operand and not isinstance(ast.parse(result, mode="eval").body, ATOMS) else result

    def _argument(self, form: Form) -> str:
        if form.head.endswith("=") and form.node is None:
            return form.head + self._argument(form.parts[0])
        return self._source.segment(form.node) if form.node is not None else form.head


def _only_computes(statement: ast.stmt) -> bool:
    """Whether a statement assigns one variable a value of tensors' and torch's own functions, which change nothing."""
    if not isinstance(statement, ast.Assign) or not all(isinstance(one, ast.Name) for one in statement.targets):
        return False
    calls = [node.func for node in ast.walk(statement.value) if isinstance(node, ast.Call)]
    methods = [one for one in calls if isinstance(one, ast.Attribute) and not one.attr.endswith("_")]
    is_own = any(ast.unparse(one).startswith("self.") for one in calls)
    has_walrus = any(isinstance(node, ast.NamedExpr) for node in ast.walk(statement.value))
    return len(statement.targets) == 1 and len(methods) == len(calls) and not is_own and not has_walrus


def _changed_name(node: ast.AST) -> ast.Name | None:
    """The variable that a node assigns or changes in place: `x` of `x = y`, `x[0] = y` and `x.add_(y)`."""
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node
    base: ast.expr | None = None
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        base = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_"):
        base = node.func.value
    return base if isinstance(base, ast.Name) else None


def number_of(node: ast.expr) -> float | None:
    """The value of a number in the source, such as `-1e9`; None for everything else."""
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError):
        return None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def is_display(candidate: Candidate) -> bool:
    """Whether a candidate is only shown, since it changes what the model computes."""
    return candidate.safety == DISPLAY
