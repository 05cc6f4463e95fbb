"""Every sentence that a rule prints: its numbers and words against a run of the model."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import auditor
from auditor.capture.emulation import Emulation
from auditor.capture.intercept import intercepted
from auditor.numerics.formats import label
from auditor.numerics.nodes import op_name, overload_named
from auditor.records import Capture, Finding
from auditor.rulebook.findings import classify
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule, facts_shown
from tests.corpus.case import Case as Failure
from tests.corpus.catalogue import CASES as CORPUS
from tests.rules.case import Case
from tests.rules.examples import example
from tests.rules.test_rules import CASES
from tests.support.capturing import Function, captured

LOW = {"fp16": torch.float16, "bf16": torch.bfloat16}


def tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def largest(tree: Any) -> float:
    """The largest finite magnitude among floating tensors."""
    sizes = [x.abs()[x.isfinite()].max() for x in tensors(tree) if x.is_floating_point() and x.isfinite().any()]
    return float(max(sizes, default=torch.tensor(math.nan)))


def cast(tree: Any, dtype: torch.dtype) -> Any:
    """Its floating tensors in a dtype."""
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


@dataclass(frozen=True)
class Call:
    """One operation of a run. fixed: ids of tensors that no input of the model reaches."""

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    fixed: frozenset[int] = frozenset()

    @property
    def out(self) -> Tensor:
        return tensors(self.result)[0]

    @property
    def activations(self) -> list[Tensor]:
        return [x for x in tensors((self.args, self.kwargs)) if id(x) not in self.fixed]


@dataclass
class Run:
    """The operations of a run, in order, by name."""

    calls: dict[str, list[Call]] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Call]:
        return (call for calls in self.calls.values() for call in calls)


class _Recording(Emulation):
    def __init__(self, fixed: set[int]) -> None:
        super().__init__(lenient=True)
        self.run, self._fixed = Run(), fixed

    def part(self, op: Any, args: Any, kwargs: Any, region: Any) -> Any:
        result = super().part(op, args, kwargs, region)
        if all(id(x) in self._fixed for x in tensors((args, kwargs))):
            self._fixed.update(id(x) for x in tensors(result))
        name = op_name(op)
        self.run.calls.setdefault(name, []).append(Call(name, args, kwargs, result, frozenset(self._fixed)))
        return result


def recorded(model: nn.Module, inputs: tuple[Tensor, ...], use: str = "", fmt: str = "bf16") -> Run:
    """A run as it is (""), under "autocast" or in a "cast" model, as far as it goes."""
    model = copy.deepcopy(model)
    if use == "cast":
        model, inputs = model.to(LOW[fmt]), cast(inputs, LOW[fmt])
    held = {id(x) for x in (*model.parameters(), *model.buffers())}
    recording = _Recording(held)
    with torch.no_grad(), intercepted(recording), _scope(use, LOW[fmt]):  # autocast for CUDA, made inside, is on
        try:
            model(*inputs)
        except (RuntimeError, ValueError):
            if not use:
                raise
    return recording.run


def _scope(use: str, dtype: torch.dtype) -> AbstractContextManager[Any]:
    return torch.autocast("cuda", dtype=dtype) if use == "autocast" else nullcontext()


def call_of(finding: Finding, capture: Capture, run: Run) -> Call | None:
    """The call that a finding is about: as many of its name come before it as in the graph. None where the run ended before."""
    same = [name for name, node in capture.nodes.items() if node.op == finding.op]
    calls = run.calls.get(finding.op, [])
    at = same.index(finding.node)
    return calls[at] if at < len(calls) else None


# What each field of a message must read, worked out from a run of the model itself.


class Seen:
    """A finding, the call it is about, and the runs around it: as it is, under autocast, and cast."""

    def __init__(self, finding: Finding, call: Call, run: Run, lowered: Mapping[str, Call | None]) -> None:
        self.finding, self.call, self.run, self.lowered = finding, call, run, lowered

    def argument(self, name: str) -> Any:
        """By the name that the operation's schema has for it."""
        schema = overload_named(self.call.op)._schema.arguments
        at = [item.name for item in schema].index(name)
        given = self.call.args[at] if at < len(self.call.args) else self.call.kwargs.get(name)
        return schema[at].default_value if given is None and schema[at].has_default_value() else given


def _literals(seen: Seen) -> list[float]:
    found = [*seen.call.args, *seen.call.kwargs.values()]
    return [float(item) for item in found if isinstance(item, (int, float)) and not isinstance(item, bool)]


def _sizes(seen: Seen) -> tuple[int, int, int]:
    """(m, n, k) of a product, and of a convolution as one."""
    call = seen.call
    if "conv" in call.op:
        weight, out = seen.argument("weight"), call.out
        return out.numel() // out.shape[1], weight.shape[0] // seen.argument("groups"), weight[0].numel()
    if "linear" in call.op:
        weight = seen.argument("weight")
        return call.args[0].numel() // call.args[0].shape[-1], weight.shape[0], weight.shape[1]
    if "einsum" in call.op:
        k = next(x for x in tensors(call.args)).shape[-1]
        return call.out.shape[-2], call.out.shape[-1], k
    a, b = tensors(call.args)[:2]
    return (a.numel() // a.shape[-1] if b.dim() <= 2 else a.shape[-2]), b.shape[-1], a.shape[-1]


def _tiled(seen: Seen) -> list[int]:
    if "conv" in seen.call.op:
        return list(seen.argument("weight").shape[:2])
    return [*_sizes(seen)[1:]]


def _up(width: int) -> int:
    return -(-width // 8) * 8


def _reduced(seen: Seen) -> int:
    call = seen.call
    if "attention" in call.op:
        return int(call.args[1].shape[-2])
    if "loss" in call.op or "cross_entropy" in call.op:
        of_classes = "cross_entropy_loss" in call.op or "nll" in call.op
        return int(tensors(call.args)[1 if of_classes else 0].numel())
    x = call.args[0]
    if call.out.shape == x.shape and x.dim():
        return int(x.shape[call.args[1] if isinstance(call.args[1], int) else call.args[1][0]])
    return int(x.numel() // call.out.numel())


def _spacing(seen: Seen) -> str:
    exponent = math.floor(math.log2(largest(seen.call.out)))
    spec = _spec(seen, "spacing")
    return " and ".join(
        f"{format(torch.finfo(LOW[fmt]).eps * 2.0**exponent, spec)} in {label(fmt)}" for fmt in seen.finding.formats
    )


def _spec(seen: Seen, name: str) -> str:
    found = re.search(rf"{{{name}:([^}}]*)}}", TEMPLATES[seen.finding.rule])
    return found[1] if found else ""


TEMPLATES: dict[str, str] = {}
"""{code: message of the rule}, filled by the test."""


def _additions(seen: Seen) -> list[tuple[Tensor, Tensor]]:
    """(value, update) of each addition back from the last, the larger term being what is added to."""
    made = {id(call.out): call for call in seen.run}
    found, call = [], seen.call
    while call.op == "aten.add.Tensor" and len(tensors(call.args)) == 2:
        update, value = sorted(tensors(call.args), key=largest)
        found.append((value, update))
        before = made.get(id(value))
        while before is not None and len(tensors(before.args)) == 1 and ".mul" in before.op:
            before = made.get(id(before.args[0]))
        if before is None:
            break
        call = before
    return found


def _absorbed(seen: Seen) -> str:
    steps, spec, words = _additions(seen), _spec(seen, "absorbed"), []
    for fmt in seen.finding.formats:
        apart = [torch.finfo(LOW[fmt]).eps * 2.0 ** math.floor(math.log2(largest(value))) for value, _ in steps]
        lost = sum(largest(update) for (_, update), gap in zip(steps, apart, strict=True) if largest(update) <= gap / 2)
        words.append(f"{format(lost / apart[0], spec)} in {label(fmt)}")
    return " and ".join(words)


def _low_where(seen: Seen) -> str:
    """By the dtypes that the operation has in a run under autocast, and in one of the model cast."""
    low = {use: call is not None and call.out.dtype in LOW.values() for use, call in seen.lowered.items()}
    return {
        (True, True): "under autocast and in a cast model",
        (True, False): "under autocast (not in a cast model)",
        (False, True): "in a cast model (not under autocast)",
        (False, False): "unknown",
    }[low["autocast"], low["cast"]]


def _divisor(seen: Seen) -> float:
    of = seen.call.args[1 if ".div." in seen.call.op else 0].abs()
    return float(of[of > 0].min())


def _steps(seen: Seen) -> int:
    call = seen.call
    if "cell" in call.op:
        weight = next(item for item in call.args[2:] if isinstance(item, Tensor))
        return sum(
            weight.data_ptr() in {x.data_ptr() for x in tensors(other.args)} for other in seen.run.calls[call.op]
        )
    return int(call.args[0].shape[1 if call.args[-1] is True else 0])


def _readers(seen: Seen) -> int:
    """Operations that read the table's memory and give memory of their own."""
    table = tensors(seen.call.args)[0].untyped_storage().data_ptr()

    def reads(call: Call) -> bool:
        held = {x.untyped_storage().data_ptr() for x in tensors((call.args, call.kwargs))}
        return table in held and call.out.untyped_storage().data_ptr() != table

    return sum(reads(call) for call in seen.run)


FIELDS: Mapping[str, Callable[[Seen], Any]] = {
    "output_max_abs": lambda seen: largest(seen.call.out),
    "input_max_abs": lambda seen: largest(seen.call.activations),
    "divisor_min_abs": _divisor,
    "operation": lambda seen: seen.call.op.split(".")[1],
    "formats": lambda seen: " and ".join(label(name) for name in seen.finding.formats),
    "gemm_m": lambda seen: _sizes(seen)[0],
    "gemm_n": lambda seen: _sizes(seen)[1],
    "gemm_k": lambda seen: _sizes(seen)[2],
    "misaligned": lambda seen: " and ".join(dict.fromkeys(str(width) for width in _tiled(seen) if width % 8)),
    "gemm_padding": lambda seen: math.prod(_up(width) / width for width in _tiled(seen)) - 1,
    "reduction_length": _reduced,
    "sequence_length": _steps,
    "constant_largest": lambda seen: max(_literals(seen), key=abs),
    "constant_gap_to_one": lambda seen: min(abs(1 - c) for c in _literals(seen) if c != 1),
    "eps": lambda seen: min(
        c for c in [*_literals(seen), *([seen.argument("eps")] if "cosine" in seen.call.op else [])] if c > 0
    ),
    "headroom_bits.fp16": lambda seen: math.log2(65504 / largest(seen.call.out)),
    "cancelled_bits": lambda seen: math.log2(largest(seen.call.activations) / largest(seen.call.out)),
    "buffer_max_abs": lambda seen: max(largest(x) for x in tensors(seen.call.args) if id(x) in seen.call.fixed),
    "weight_uses": _readers,
    "additions": lambda seen: len(_additions(seen)),
    "absorbed": _absorbed,
    "spacing": _spacing,
    "low_where": _low_where,
}
"""{field of a message: what it must be}."""


def reading(seen: Seen) -> str:
    """The message as it must read."""
    text = TEMPLATES[seen.finding.rule]
    for fmt, clause in re.findall(r"\[(\w+): ([^]]*)\]", text):
        text = text.replace(f"[{fmt}: {clause}]", clause if fmt in seen.finding.formats else "")

    def shown(found: re.Match[str]) -> str:
        value = FIELDS[found[1]](seen)
        return value if isinstance(value, str) else format(value, found[2] or "")

    return re.sub(r"{([\w.]+)(?::([^}]*))?}", shown, text)


# Every sentence that a rule prints: its numbers and words against a run of the model.


RULES = load_rules()
TEMPLATES.update({rule.code: rule.message for rule in RULES})
PRINTED = [rule for rule in RULES if rule.family not in ("measured", "settings")]
"""What the others print comes from verdicts and from pyproject.toml, and is held against those."""


def found(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Seen]:
    """Every finding on a model, with the calls it speaks of."""
    toy = captured(model, *inputs)
    run = recorded(model, inputs)
    low = {use: recorded(model, inputs, use) for use in ("autocast", "cast")}
    every = []
    for finding in classify(toy.capture, toy.facts, PRINTED):
        call = call_of(finding, toy.capture, run)
        assert call is not None, finding.op
        every.append(Seen(finding, call, run, {use: call_of(finding, toy.capture, low[use]) for use in low}))
    return every


@pytest.mark.parametrize("rule", PRINTED, ids=lambda rule: rule.code)
def test_its_numbers_and_words_are_those_of_a_run_of_its_example(rule: Rule) -> None:
    every = found(*example(rule))
    assert rule.code in {seen.finding.rule for seen in every}
    for seen in every:
        assert seen.finding.message == reading(seen)


def test_what_the_measurement_finds_is_its_verdict_and_its_number_that_of_a_run() -> None:
    x = torch.linspace(1000, 3000, 16)
    audit = auditor.audit(Function(torch.cos), (x,), formats=("fp16", "bf16", "fp8_e4m3"))
    found = {finding.formats: finding for finding in audit.findings if finding.rule.startswith("MSR")}
    assert {formats: finding.rule for formats, finding in found.items()} == {
        ("fp16",): "MSR001",
        ("bf16",): "MSR002",
        ("fp8_e4m3",): "MSR003",
    }
    (report,) = audit.nodes
    for (fmt,), finding in found.items():
        verdict = report.verdicts[fmt]
        assert verdict.verdict == "unsafe"
        assert finding.message == f"the measurement finds cos unsafe in {label(fmt)}: {verdict.reason}"
    for fmt, dtype in LOW.items():
        moved = float((x.to(dtype).cos().float() - x.cos()).norm() / x.cos().norm())
        assert f" {moved:.2g}" in found[(fmt,)].message


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.fires], ids=lambda case: case.name)
def test_they_are_on_every_other_model_of_these_tests(case: Case) -> None:
    for seen in found(case.model().eval(), case.inputs):
        assert seen.finding.message == reading(seen)


def test_every_field_of_every_message_has_a_way_to_be_checked() -> None:
    shown = {name for rule in PRINTED for name in facts_shown(rule.message)}
    assert shown <= set(FIELDS)
    assert set(FIELDS) <= shown, "these are checked, and shown nowhere"


@pytest.mark.slow
@pytest.mark.parametrize("case", CORPUS, ids=lambda case: case.name)
def test_they_are_on_the_failures_that_users_met(case: Failure) -> None:
    for build in (case.build, case.twin):
        model, inputs = build()
        for seen in found(model.eval(), inputs):
            assert seen.finding.message == reading(seen)
