"""Proposes edits of the user's source at one expression: FP32 from there on, or operands of one dtype."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ...records import Span
from .records import Kinds, Promotion
from .source import COMPREHENSIONS, FUNCTIONS, NAMED, SIMPLE, Edit, Edits, Source, first_line, place_of, walk_own

SAFE, UNSAFE, DISPLAY = "safe", "unsafe", "display"
"""Applicability: edits that only convert dtypes; edits that change the algebra; changes that give other results."""

REGION = 6
"""Maximum number of statements that a region in FP32 covers."""

MOST_PARTS = 4
"""Maximum number of arguments of a call whose dtypes are compared."""

SMALL = 3e4
"""Values below this are small again after a region in FP32."""
FP32 = "torch.float32"
_ABOUT = frozenset({"shape", "dtype", "device", "ndim", "size", "dim", "numel", "stride", "is_cuda", "requires_grad"})
"""Attributes of a tensor that do not depend on its values."""
_LIKE = frozenset({"zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like"})
_NEW = frozenset({"new_zeros", "new_ones", "new_empty", "new_full", "new_tensor"})
_MADE = frozenset({"zeros", "ones", "empty", "full", "arange", "linspace", "tensor", "eye", "hann_window"})
_CASTS = frozenset({"float", "to", "type", "half", "bfloat16", "type_as"})
_PRODUCTS = frozenset({"matmul", "bmm", "mm", "einsum", "linear", "baddbmm", "addmm", "conv1d", "conv2d", "conv3d"})
_WRITES = frozenset(
    "index_add index_copy index_put scatter scatter_add scatter_reduce masked_scatter copy put index_reduce".split()
)
"""Methods that write their tensor arguments into the tensor they belong to, without a conversion."""


@dataclass(frozen=True)
class Candidate:
    """A change to try. parts: groups of edits, each of which could be left out by itself."""

    title: str
    safety: str
    parts: tuple[Edits, ...]
    advice: str = ""

    @property
    def edits(self) -> Edits:
        """All edits, each once."""
        return tuple(dict.fromkeys(edit for part in self.parts for edit in part))


class Names:
    """What the names in one function of a file stand for, as a run has shown."""

    def __init__(self, source: Source, kinds: Kinds) -> None:
        self._source, self._kinds = source, kinds

    def kind(self, node: ast.AST) -> str:
        """`float` or `int` for a tensor, `layer` or `module`; "" for everything else."""
        if not isinstance(node, NAMED):
            return ""
        name = ast.unparse(node)
        for scope in self._source.scopes_of(node):
            kind = self._kinds.get((self._source.file, first_line(scope), name))
            if kind is not None:
                return kind
            if isinstance(scope, FUNCTIONS):
                break
        return ""

    def leaves(self, node: ast.AST) -> Iterator[ast.expr]:
        """The floating-point tensors that an expression reads: variables, attributes, parts of them such as `x[:, t]`, results
        of modules, and new tensors with the dtype of another tensor; not those of which only the shape is read."""
        if isinstance(node, ast.Attribute) and node.attr in _ABOUT:
            return
        if isinstance(node, ast.Call):
            name = called_name(node)
            if self.kind(node.func) in ("layer", "module") or name in _NEW | _LIKE:
                yield node
                return
            if isinstance(node.func, ast.Attribute) and node.func.attr in _ABOUT:
                return
        if isinstance(node, NAMED):
            if isinstance(node.ctx, ast.Load) and self.is_tensor(node):
                yield node
                return
            if isinstance(node, ast.Name):
                return
        if isinstance(node, (ast.Lambda, ast.JoinedStr, *COMPREHENSIONS)):
            return
        for child in ast.iter_child_nodes(node):
            yield from self.leaves(child)

    def is_tensor(self, node: ast.AST) -> bool:
        """Whether an expression names a floating-point tensor, or a part of one, such as `x[:, t]`."""
        return self.kind(self.whole(node)) == "float"

    def whole(self, node: ast.AST) -> ast.AST:
        """The named tensor of a part of it: `x` of `x[:, t]`; the expression itself for everything else."""
        while isinstance(node, ast.Subscript) and not self.kind(node):
            node = node.value
        return node

    def arguments(self, node: ast.AST) -> list[str]:
        """The parameters of the function around a node that are floating-point tensors."""
        function = self._source.function_of(node)
        if function is None:
            return []
        first = first_line(function)
        given = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
        return [one.arg for one in given if self._kinds.get((self._source.file, first, one.arg)) == "float"]

    def weight(self, node: ast.AST) -> str | None:
        """The text of a weight of `self` in the function around a node; None if there is none."""
        function = self._source.function_of(node)
        if function is None:
            return None
        first = first_line(function)
        for (file, line, name), kind in self._kinds.items():
            if (file, line, kind) == (self._source.file, first, "float") and name.startswith("self."):
                return name
        return None


def called_name(node: ast.AST) -> str:
    """The last part of the name of a called function: `exp` of `torch.exp(x)` and of `x.exp()`; "" for no call."""
    if not isinstance(node, ast.Call):
        return ""
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


class Proposer:
    """Proposes candidates for expressions of one file."""

    def __init__(self, source: Source, kinds: Kinds, sizes: Mapping[Span, float] = MappingProxyType({})) -> None:
        """sizes: {expression: the largest magnitude of its value}."""
        self.source, self.names, self.sizes = source, Names(source, kinds), sizes

    def dtype_near(self, node: ast.expr) -> str | None:
        """The text of the dtype of a tensor that an expression, or its function, reads; None if there is none."""
        return self._dtype_of_leaf(node, [])

    # FP32 from here on

    def in_fp32(self, expression: ast.expr, last: int | None = None) -> Iterator[Candidate]:
        """Compute an expression in FP32, and what follows until the value is small again, then cast back.

        last: number of following statements after which no operation has a problem any more; None if unknown.
        """
        statement = self.source.statement_of(expression)
        around = self.source.around(expression)
        whole = around[-1] if around else expression
        raised = self._upcasts(expression)
        if raised:
            yield from self._within(expression, around[:-1], raised)
        for target in dict.fromkeys((expression, whole)):
            raised = self._upcasts(target)
            if not raised:
                continue
            if isinstance(statement, SIMPLE) and statement.value is whole:
                yield from self._regions(target, statement, raised, last)
            else:
                yield from self._alone(target, raised)

    def _within(
        self, expression: ast.expr, around: Sequence[ast.expr], raised: tuple[Edits, ...]
    ) -> Iterator[Candidate]:
        """Compute an expression in FP32, and cast an expression around it back: those with small values come first."""
        dtype = self._dtype_of_leaf(expression, [])
        if dtype is None:
            return
        results = [node for node in around if isinstance(node, ast.Call | ast.BinOp)]
        for one in sorted(results, key=self._is_large):
            back = self.source.after(one, f".to({dtype})")
            yield Candidate("compute in FP32, then cast back", SAFE, (*raised, back))

    def _alone(self, target: ast.expr, raised: tuple[Edits, ...]) -> Iterator[Candidate]:
        """Compute an expression in FP32 where no statements can follow: in a lambda, a comprehension, or a condition."""
        dtype = self._dtype_of_leaf(target, [])
        if dtype is not None:
            back = self.source.after(target, f".to({dtype})")
            yield Candidate("compute in FP32, then cast back", SAFE, (*raised, back))
        yield Candidate("compute in FP32", SAFE, raised)

    def _is_large(self, node: ast.expr) -> bool:
        """Whether an expression has values near the end of FP16's range, or unknown ones."""
        size = self.sizes.get(Span(self.source.file, *place_of(node)))
        return size is None or not 1e-3 < size < SMALL

    def _regions(
        self, target: ast.expr, statement: ast.stmt, raised: tuple[Edits, ...], last: int | None
    ) -> Iterator[Candidate]:
        value = getattr(statement, "value", target)
        after = [one for one in self.source.following(statement)[: REGION - 1] if isinstance(one, SIMPLE)]
        ends = [statement, *after]
        order = sorted(range(len(ends)), key=lambda number: (number < (last or 0), number))
        for number in order:
            end = ends[number]
            back = self._cast_back(target, ends[: number + 1], end)
            if back is not None and (end is not statement or not isinstance(end, ast.Return) or value is not target):
                words = "compute in FP32, then cast back"
                if number:
                    words = f"compute {number + 1} statements in FP32, then cast back"
                yield Candidate(words, SAFE, (*raised, back))
            if number and (part := self._cast_back_of_part(target, ends[: number + 1])) is not None:
                yield Candidate(words, SAFE, (*raised, part))
            if number == 0:
                yield Candidate("compute in FP32", SAFE, raised)
                if target is not value and (own := self._dtype_of_leaf(target, [])) is not None:
                    yield Candidate(
                        "compute in FP32, then cast back", SAFE, (*raised, self.source.after(target, f".to({own})"))
                    )
        yield from self._without_autocast(target, ends, raised)

    def _upcasts(self, expression: ast.expr) -> tuple[Edits, ...]:
        """Edits, one group for each, after which an expression reads FP32 values."""
        parts: list[Edits] = []
        for node in walk_own(expression):
            if narrowed := self._widen_dtype(node):
                parts.append(narrowed)
        for leaf in self.names.leaves(expression):
            name = called_name(leaf)
            if isinstance(leaf, ast.Call) and name in _NEW | _LIKE:
                if not any(keyword.arg == "dtype" for keyword in leaf.keywords):
                    parts.append((self._with_keyword(leaf, f"dtype={FP32}"),))
            elif not self._is_in_fp32(leaf):
                parts.append(self.source.after(leaf, ".float()"))
        return tuple(dict.fromkeys(parts))

    def _is_in_fp32(self, leaf: ast.expr) -> bool:
        """Whether a leaf is converted to FP32 where it is read."""
        attribute = self.source.parent(leaf)
        call = self.source.parent(attribute) if attribute is not None else None
        return isinstance(attribute, ast.Attribute) and isinstance(call, ast.Call) and attribute.attr in _CASTS

    def _widen_dtype(self, node: ast.AST) -> Edits:
        """The edit that makes a conversion to another tensor's dtype, as in `.to(x.dtype)`, one to FP32."""
        if not isinstance(node, ast.Call):
            return ()
        values = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
        for value in values:
            if isinstance(value, ast.Attribute) and value.attr == "dtype":
                return (self.source.replacement(value, FP32),)
        return ()

    def _with_keyword(self, call: ast.Call, text: str) -> Edit:
        """Append a keyword argument to a call."""
        given = [*call.args, *call.keywords]
        _, end = self.source.bounds(call)
        if not given:
            return self.source.insertion(end - 1, text)
        last = max(self.source.bounds(one)[1] for one in given)
        return self.source.insertion(self.source.last_bracket(last, end - 1), f", {text}")

    def _cast_back(self, target: ast.expr, region: Sequence[ast.stmt], end: ast.stmt) -> Edits | None:
        """The edits that convert the value of a statement to the dtype in which the region's values came."""
        dtype = self._dtype_of_leaf(target, region)
        value = getattr(end, "value", None)
        if dtype is None or value is None:
            return None
        if isinstance(value, ast.Tuple):
            floats = [one for one in value.elts if any(self.names.leaves(one))]
            return tuple(edit for one in floats for edit in self.source.after(one, f".to({dtype})")) or None
        return self.source.after(value, f".to({dtype})")

    def _cast_back_of_part(self, target: ast.expr, region: Sequence[ast.stmt]) -> Edits | None:
        """The edits that convert only the operand of the region's last value in which the values in FP32 are: a factor
        such as a norm is often small, where the product with other values is large, and slow."""
        dtype = self._dtype_of_leaf(target, region)
        assigned = _assigned(region[:-1])
        node = getattr(region[-1], "value", None)
        while dtype is not None and isinstance(node, ast.BinOp):
            sides = [side for side in (node.left, node.right) if any(_reads(side, name) for name in assigned)]
            if len(sides) != 1:
                break
            other = node.right if sides[0] is node.left else node.left
            if any(self.names.leaves(other)):
                return self.source.after(sides[0], f".to({dtype})")
            node = sides[0]  # the other operand is a number
        return None

    def _dtype_of_leaf(self, target: ast.expr, region: Sequence[ast.stmt]) -> str | None:
        """The text of a dtype that is low if the model is: of a tensor that the region reads and does not assign."""
        assigned = _assigned(region[:-1])
        for leaf in self.names.leaves(target):
            text = self._dtype_text(leaf)
            if text is not None and re.split(r"[.\[]", text)[0] not in assigned:
                return text
        others = [name for name in self.names.arguments(target) if name not in assigned]
        if others:
            return f"{others[0]}.dtype"
        weight = self.names.weight(target)
        return f"{weight}.dtype" if weight else None

    def _without_autocast(
        self, target: ast.expr, ends: Sequence[ast.stmt], raised: tuple[Edits, ...]
    ) -> Iterator[Candidate]:
        """The statements in an autocast region that is disabled, since autocast would convert the operands of products."""
        reads = [leaf for leaf in self.names.leaves(target) if isinstance(leaf, NAMED)]
        if not reads or not self._has_product(ends[0]):
            return
        device = f"{self.source.segment(self.names.whole(reads[0]))}.device.type"
        for number in range(min(len(ends), 2)):
            region = ends[: number + 1]
            disabled = self._indented(region, f"with torch.autocast({device}, enabled=False):")
            if disabled is None:
                return
            words = "compute in FP32, with autocast disabled"
            back = self._cast_back(target, region, region[-1])
            if back is not None:
                yield Candidate(f"{words}, then cast back", SAFE, (*raised, disabled, back))
            yield Candidate(words, SAFE, (*raised, disabled))

    def _has_product(self, statement: ast.stmt) -> bool:
        for node in ast.walk(statement):
            if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
                return True
            if called_name(node) in _PRODUCTS:
                return True
        return False

    def _indented(self, statements: Sequence[ast.stmt], header: str) -> Edits | None:
        """The edits that put statements under a `with`; None if a string over several lines would change."""
        first, last = statements[0], statements[-1]
        if not all(self.source.begins_line(one) for one in statements):
            return None
        strings = [
            node for one in statements for node in ast.walk(one) if isinstance(node, ast.Constant | ast.JoinedStr)
        ]
        if any(node.lineno != node.end_lineno for node in strings):
            return None
        indent = self.source.indentation(first)
        step = "\t" if indent.startswith("\t") else "    "
        begin = self.source.offset(first.lineno, 0)
        edits = [self.source.insertion(begin, f"{indent}{header}{self.source.newline}")]
        for line in range(first.lineno, (last.end_lineno or last.lineno) + 1):
            if not self.source.is_blank(line):
                edits.append(self.source.insertion(self.source.offset(line, 0), step))
        return tuple(edits)

    # operands of one dtype

    def of_one_dtype(self, expression: ast.expr) -> Iterator[Candidate]:
        """Convert operands of an expression that raised, so that all have one dtype."""
        for node in walk_own(expression):
            if isinstance(node, ast.Call):
                yield from self._in_call(node)
            if isinstance(node, ast.BinOp):
                yield from self._converted(node.left, node.right)
                yield from self._converted(node.right, node.left)
        statement = self.source.statement_of(expression)
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Subscript):
            yield from self._converted(statement.value, statement.targets[0].value)
        yield from self.without_upcast(expression)

    def _in_call(self, node: ast.Call) -> Iterator[Candidate]:
        tensors = self._tensor_arguments(node)
        receiver = node.func.value if isinstance(node.func, ast.Attribute) else None
        if self.names.kind(node.func) == "layer" and node.args:
            text = f"{self.source.segment(node.func)}.weight.dtype"
            yield self._cast("convert the input to the weight's dtype", [node.args[0]], text)
        if receiver is not None and called_name(node).rstrip("_") in _WRITES:
            yield from self._all_converted(tensors, receiver)
        if tensors:
            yield from self._all_converted(tensors[1:], tensors[0])
        for one in tensors[:MOST_PARTS]:
            for other in tensors[:MOST_PARTS]:
                if one is not other:
                    yield from self._converted(one, other)
        if receiver is not None and tensors and self.names.kind(node.func) == "":
            yield from self._all_converted(tensors, receiver)

    def _tensor_arguments(self, node: ast.Call) -> list[ast.expr]:
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        return [one for one in given if any(self.names.leaves(one)) or self._makes_tensor(one)]

    def _makes_tensor(self, node: ast.expr) -> bool:
        return any(called_name(one) in _MADE | _LIKE | _NEW for one in ast.walk(node))

    def _converted(self, node: ast.expr, other: ast.expr) -> Iterator[Candidate]:
        yield from self._all_converted([node], other)

    def _all_converted(self, nodes: Sequence[ast.expr], other: ast.expr) -> Iterator[Candidate]:
        text = self._dtype_text(other)
        nodes = [node for node in nodes if not isinstance(node, ast.Constant | ast.Starred)]
        if text is not None and nodes:
            yield self._cast(f"convert to {text}", nodes, text)

    def _cast(self, title: str, nodes: Sequence[ast.expr], dtype: str) -> Candidate:
        return Candidate(title, SAFE, tuple(self._to(node, dtype) for node in nodes))

    def _to(self, node: ast.expr, dtype: str) -> Edits:
        """Convert an expression to a dtype: an argument more for `x.to(y.device)`."""
        if isinstance(node, ast.Call) and called_name(node) == "to" and not node.keywords:
            to_device = [isinstance(one, ast.Attribute) and one.attr == "device" for one in node.args]
            if to_device == [True]:
                return (self._with_keyword(node, dtype),)
        return self.source.after(node, f".to({dtype})")

    def _dtype_text(self, node: ast.expr) -> str | None:
        """Text of the dtype of an expression that is not computed again for it; None if it would be."""
        if isinstance(node, ast.Call):
            name = called_name(node)
            if name in _LIKE and node.args:
                return self._dtype_text(node.args[0])
            if isinstance(node.func, ast.Attribute) and (name in _NEW or name not in _CASTS):
                if self.names.kind(node.func) == "layer":
                    return f"{self.source.segment(node.func)}.weight.dtype"
                return self._dtype_text(node.func.value) if name in _NEW | _KEEPS_DTYPE else None
            return None
        if isinstance(node, ast.Subscript):
            if self.names.kind(node) == "float":  # an entry of a dict or list
                return f"{self.source.segment(node)}.dtype"
            return self._dtype_text(node.value)
        if isinstance(node, ast.Name | ast.Attribute) and self.names.kind(node) in ("float", ""):
            if isinstance(node, ast.Name) and node.id in ("torch", "F", "nn", "self", "np", "math"):
                return None
            return f"{self.source.segment(node)}.dtype"
        return None

    def without_upcast(self, expression: ast.AST, low: Sequence[str] = ()) -> Iterator[Candidate]:
        """Replace the author's own conversions to FP32 by conversions to the dtype of another tensor.

        low: variables that were in low precision there.
        """
        names = list(dict.fromkeys((*low, *self.names.arguments(expression))))
        for node in walk_own(expression):
            if not isinstance(node, ast.Call):
                continue
            if is_upcast(node) and isinstance(node.func, ast.Attribute):
                _, start = self.source.bounds(node.func.value)
                _, end = self.source.bounds(node)
                others = [name for name in names if not _reads(node.func.value, name)]
                for name in others[:2]:
                    edit = Edit(self.source.file, start, end, f".to({name}.dtype)")
                    yield Candidate(f"convert to {name}.dtype instead of FP32", SAFE, ((edit,),))
                if self._is_float(node.func.value):
                    yield Candidate(
                        "leave out the conversion to FP32", SAFE, ((Edit(self.source.file, start, end, ""),),)
                    )
            elif called_name(node) in _MADE and not any(one.arg == "dtype" for one in node.keywords):
                for name in names[:2]:
                    yield Candidate(
                        f"create the tensor in {name}.dtype",
                        SAFE,
                        ((self._with_keyword(node, f"dtype={name}.dtype"),),),
                    )
            else:
                yield from self._fp32_keyword(node, names)

    def _others_converted(self, value: ast.expr, low: Sequence[str]) -> Iterator[Candidate]:
        """Convert the tensors of an expression that are not in low precision to the dtype of one that is."""
        leaves = [leaf for leaf in self.names.leaves(value) if isinstance(leaf, NAMED)]
        named = {leaf: self.source.segment(self.names.whole(leaf)) for leaf in leaves}
        wide = [leaf for leaf in leaves if named[leaf] not in low]
        if wide and len(wide) < len(leaves):
            (name, *_) = [named[leaf] for leaf in leaves if leaf not in wide]
            yield self._cast(f"convert to {name}.dtype", wide, f"{name}.dtype")

    def _fp32_keyword(self, node: ast.Call, names: Sequence[str]) -> Iterator[Candidate]:
        for keyword in node.keywords:
            if keyword.arg == "dtype" and ast.unparse(keyword.value) in (FP32, "torch.float"):
                for name in names[:2]:
                    edit = self.source.replacement(keyword.value, f"{name}.dtype")
                    yield Candidate(f"create the tensor in {name}.dtype", SAFE, ((edit,),))

    def _is_float(self, node: ast.expr) -> bool:
        return any(self.names.leaves(node))

    def at_promotion(self, promotion: Promotion) -> Iterator[Candidate]:
        """Convert the value of the statement of a line, which promotes low-precision values to FP32, back."""
        line, beside = promotion.line, promotion.beside
        for node in ast.walk(self.source.tree):
            value = self._value_in_function(node)
            if value is None or not node.lineno <= line <= (node.end_lineno or 0):  # type: ignore[attr-defined]
                continue
            assigned = _assigned([node])
            low = [name for name in beside if name not in assigned or _reads(value, name)]
            yield from self.without_upcast(value, low)
            yield from self._others_converted(value, low)
            texts: list[str | None] = [f"{name}.dtype" for name in (*low, *self.names.arguments(value))]
            texts += [self._dtype_text(leaf) for leaf in self.names.leaves(value)]
            if (weight := self.names.weight(value)) is not None:
                texts.append(f"{weight}.dtype")
            for text in list(dict.fromkeys(text for text in texts if text is not None))[:3]:
                yield self._cast(f"convert to {text}", [value], text)

    def _value_in_function(self, node: ast.AST) -> ast.expr | None:
        """The value of a statement in a function, or of a lambda; None for everything else."""
        if isinstance(node, ast.Lambda):
            return node.body
        if not isinstance(node, SIMPLE) or self.source.function_of(node) is None:
            return None
        return None if isinstance(node.value, ast.Lambda) else node.value


_KEEPS_DTYPE = frozenset(
    "clone detach contiguous view reshape transpose permute flatten unsqueeze squeeze expand float_power "
    "repeat t narrow unbind chunk".split()
)
"""Methods whose result has the dtype of their tensor, so that this tensor tells it."""


def is_upcast(node: ast.Call) -> bool:
    """Whether a call is a conversion to FP32: `x.float()`, `x.to(torch.float32)`, `x.type(torch.float32)`."""
    name = called_name(node)
    if name == "float":
        return isinstance(node.func, ast.Attribute) and not node.args and not node.keywords
    given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == "dtype")]
    return name in ("to", "type") and len(given) == 1 and ast.unparse(given[0]) in (FP32, "torch.float")


def _assigned(nodes: Sequence[ast.AST]) -> set[str]:
    """The variables that nodes assign."""
    names = [one for node in nodes for one in ast.walk(node) if isinstance(one, ast.Name)]
    return {one.id for one in names if isinstance(one.ctx, ast.Store)}


def _reads(node: ast.AST, name: str) -> bool:
    return any(isinstance(one, ast.Name) and one.id == name for one in ast.walk(node))
