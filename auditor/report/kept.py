"""Says what a plan keeps in FP32 and why, in which format operations compute, and explains single layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from ..errors import AuditorError, suggest
from ..execution.policy import choice_from_scopes
from ..numerics.formats import FORMATS
from ..records import NodeReport, Plan, Reason
from ..records.audit import Audit
from ..records.paths import enclosing_paths, pattern, within
from .words import count, fold, label, list_paths, scope, shorten

_FORMATS = {row.storage: name for name, row in FORMATS.items() if row.native and row.storage}
"""{torch's name of a dtype: the name of its format}."""
INSIDE = 12
"""Maximum number of lines, per plan, about the FP32 parts of one module."""
SHAPES = 3
"""Maximum number of module patterns with reason `no-gain` that get a line each."""


def islands(plan: Plan) -> tuple[str, ...]:
    """A line for each FP32 island of a plan, with the reason, if known, then codes of rules that report the modules. An
    island is FP32 modules with the same kind of reason, or functions that stay FP32 in low-precision modules.

    Paths in an island differ only in block numbers (`blocks.*.norm`), except if over `SHAPES` patterns have the reason
    `no-gain`. For an exported program: its FP32 operations and outputs, grouped by operator and kind of reason.
    """
    lines = (*_program_islands(plan), *_module_islands(plan), *_function_islands(plan))
    return tuple(f"{name}: {why}" if why else name for name, why in lines)


def _program_islands(plan: Plan) -> Iterator[tuple[str, str]]:
    """(operations, reason) of an exported program."""
    kept_operations = plan.program.kept if plan.program else ()
    for kept in fold(kept_operations, lambda _: "", lambda one: (one.kind, one.op, one.only_output)):
        name = list_paths([one.name for one in kept], 2, "operation")
        yield name, _one_for_all([one.because for one in kept])


def _module_islands(plan: Plan) -> Iterator[tuple[str, str]]:
    """(modules, reason)."""
    pairs = [(path, reason) for reason in plan.reasons if reason.kind != "not-floating" for path in reason.modules]
    without_gain = {pattern(path) for path, reason in pairs if reason.kind == "no-gain"}
    many = len(without_gain) > SHAPES

    def path_of(pair: tuple[str, Reason]) -> str:
        """The path by whose pattern a module is grouped; "" puts it into one group with all others of its kind."""
        path, reason = pair
        return "" if many and reason.kind == "no-gain" else path

    for same in fold(pairs, path_of, lambda pair: pair[1].kind):
        paths = [path for path, _ in same]
        reasons = [reason for _, reason in same]
        name = list_paths(paths, 2).replace(scope(""), f"{scope('')} (without its submodules)")
        yield name, _with_rules(_one_for_all([reason.words for reason in reasons]), reasons)


def _function_islands(plan: Plan) -> Iterator[tuple[str, str]]:
    """(functions in modules, reason)."""
    modules = dict.fromkeys(path for path, _ in plan.exceptions)
    for keeping in fold(modules, str, lambda path: plan.scopes[path].exceptions):
        place = "the whole model" if keeping == [""] else list_paths(keeping, 2)
        functions = ", ".join(plan.scopes[keeping[0]].exceptions)
        reasons = [*plan.reasons_of(keeping[0])]
        yield f"{functions} in {place}", _with_rules(", ".join(reason.words for reason in reasons), reasons)


def _one_for_all(reasons: Sequence[str]) -> str:
    """The first of several reasons, with a remark if the other reasons differ."""
    same = len({re.sub(r"_\d+\b", "", reason) for reason in reasons}) == 1  # ignoring the numbers in node names
    return (
        reasons[0]
        if same
        else f"{reasons[0]}; {count(len(reasons) - 1, 'more place')} for similar reasons (all in plan.json)"
    )


def _with_rules(words: str, reasons: Iterable[Reason]) -> str:
    codes = ", ".join(dict.fromkeys(code for reason in reasons for code in reason.rules))
    return f"{words} ({codes})" if words and codes else words or codes


def dtype_label(dtype: str) -> str:
    """A dtype's display name: `float16` -> `FP16`; dtypes without a format keep torch's name: `int64`."""
    return label(_FORMATS[dtype]) if dtype in _FORMATS else dtype


def computed_in(report: NodeReport) -> str | None:
    """The format that an operation computes in under the recommended plan; None if unknown, or for integers."""
    return _FORMATS.get(report.planned.computed) if report.planned else None


def tally(reports: Iterable[NodeReport]) -> str:
    """Formats of several operations, in words: `FP16`, or `FP16 (3 operations) and FP32 (1 operation)`; "" if unknown."""
    result = Counter(label(name) for report in reports if (name := computed_in(report)) is not None)
    if len(result) < 2:
        return "".join(result)
    return " and ".join(f"{name} ({count(n, 'operation')})" for name, n in result.most_common())


def why_raised(plan: Plan) -> Callable[[NodeReport], str]:
    """Return a function that says why an operation is FP32 under a plan; "" if unknown or in low precision."""
    modules, precision_of = _modules(plan), choice_from_scopes(plan.scopes)
    operations = {name: reason.words for reason in plan.reasons for name in reason.operations}

    def why(report: NodeReport) -> str:
        node, ran = report.node, report.planned
        if ran is None or _FORMATS.get(ran.computed) != "fp32":
            return ""
        if precision_of(node.owner) == "fp32":
            return ", since ".join(filter(None, ("the module is in FP32", modules.get(node.owner))))
        reads = {_FORMATS[dtype] for dtype in ran.inputs if dtype in _FORMATS}
        if node.name in operations or len(reads) < 2 or "fp32" not in reads:
            return operations.get(node.name, "")
        # such as a batch norm with FP32 statistics
        return f"the inputs are {' and '.join(sorted(map(label, reads)))}, so torch computes in FP32, the wider format"

    return why


def explain_layer(audit: Audit, name: str) -> str:
    """The precision of a module or an operation under each plan, with the reasons; the recommended plan first.

    Raises: AuditorError(slug="no-such-layer").
    """
    owners = {report.node.name: report.node.owner for report in audit.nodes}
    paths = {*owners.values()}
    for plan in audit.plans.values():
        paths |= {*plan.scopes, *_modules(plan)}
    modules = {above for path in paths for above in enclosing_paths(path)}
    if name not in modules and name not in owners:
        lists = "module paths are in plan.json, names of operations in measurements.json"
        hint = suggest(name, [*modules, *owners], lists, cutoff=0.5)
        raise AuditorError(f"the model has no module or operation {name!r}: {hint}", slug="no-such-layer")
    owner = None if name in modules else owners[name]
    lines = [scope(name)]
    for title, plan in sorted(audit.plans.items(), key=lambda item: item[0] != audit.recommended):
        mark = " (recommended)" if title == audit.recommended else ""
        first, *inside = _explain(plan, name, owner, owners)
        lines.append(f"  {title}{mark}: {first}")
        lines += [f"    {line}" for line in shorten(sorted(inside), INSIDE)]
    return "\n".join(lines) + "\n"


def _modules(plan: Plan) -> dict[str, str]:
    """{path of an FP32 module: the reason, in words}."""
    return {path: reason.words for reason in plan.reasons for path in reason.modules}


def _explain(plan: Plan, name: str, owner: str | None, owners: Mapping[str, str]) -> list[str]:
    """One line with the precision of an operation of module `owner`. If `owner` is None: the precision of a module, and
    a line for each FP32 part in it with the reason; for the root, without its submodules."""
    modules = _modules(plan)
    operations = _words_of_operations(plan)
    path = name if owner is None else owner
    is_low = choice_from_scopes(plan.scopes)(path) != "fp32"
    why = modules.get(path, "contains only submodules, no operations")
    if owner is not None:
        as_its_module = f"FP32, like all of {scope(owner)}; {why}"
        if is_low:
            as_its_module = f"{label(plan.format)}, like {scope(owner)}"
        return [operations.get(name, as_its_module)]

    lines = [label(plan.format) if is_low else f"FP32; {why}"]
    for inner, reason in modules.items():
        if name and inner != name and within(inner, name):
            lines.append(f"{inner}: FP32; {reason}")
    discrete = {node for reason in plan.reasons if reason.kind == "not-floating" for node in reason.operations}
    with_submodules = plan.program is not None and name != ""
    for node, words in operations.items():
        if node not in owners or node in discrete:
            continue
        is_inside = with_submodules and within(owners[node], name)
        if owners[node] == name or is_inside:
            lines.append(f"{node}: {words}")
    return lines


def _words_of_operations(plan: Plan) -> dict[str, str]:
    """{operation that a plan explains by itself: its precision, with the reason}."""
    words = dict[str, str]()
    for reason in plan.reasons:
        for node in reason.operations:
            words[node] = f"not in low precision; {reason.words}"
    for kept in plan.program.kept if plan.program else ():
        if kept.node:
            what = "FP32 output" if kept.only_output else "FP32"
            words[kept.node] = f"{what}; {kept.because}"
    return words


def keep_alone(audit: Audit, owner: str) -> str | None:
    """Code that runs the model by the recommended plan's strategy in its format, with only one module in FP32. None for
    the root, for exported programs, and without a recommended plan."""
    plan = audit.plans.get(audit.recommended or "")
    if plan is None or plan.program is not None or not owner:
        return None
    scopes = {"": {"precision": plan.format}, owner: {"precision": "fp32"}}
    made = {"strategy": plan.strategy, "format": plan.format, "scopes": scopes}
    return f"import auditor\n\nmodel = auditor.apply(model, {made!r})\n"
