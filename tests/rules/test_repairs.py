"""Every repair repairs: it holds in the rule's format where the original fails, and is the same function in FP32."""

import copy
import re
import textwrap
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import auditor
from auditor.numerics.formats import FORMATS, dtype_of
from auditor.records import Verdict
from auditor.report.words import SEVERITIES
from auditor.rulebook.findings import classify
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from auditor.rulebook.rule import Rule
from tests.rules.examples import example
from tests.support.capturing import Function, captured
from tests.support.replaying import Model

RULES = [
    rule
    for rule in load_rules()
    if rule.example and rule.example.fixed and rule.family not in ("settings", "casts", "quantization", "inputs")
]
BUDGET = 0.01
USES = ("cast", "autocast")
SLOW = pytest.mark.slow

BUDGETS = {
    "SFT006": 1e-3  # bits of small probabilities go one after the other
}
"""Where less than the budget of an audit is at stake in the example: what is."""

BEYOND = {"ACT001": (torch.tensor([6.0, 12.0]),)}
"""Rules that warn of inputs beyond those of their example: inputs on which what they warn of happens."""

ELSEWHERE = {
    "COL001": "sums over ranks fail with many of them",
    "CPL001": "only compiled code differs, which a slow test runs",
    "CPL002": "only compiled gradients differ, which a slow test runs",
}


def outputs(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(model(*inputs)) if isinstance(leaf, Tensor)]


def low(model: nn.Module, inputs: tuple[Tensor, ...], fmt: str, use: str) -> list[Tensor] | str:
    """The model's outputs as a GPU would give them, under autocast or cast as a whole; or why there are none."""
    dtype = dtype_of(fmt)
    model = copy.deepcopy(model)
    try:
        with auditor.emulate("cuda"):
            if use == "autocast":
                with torch.autocast("cuda", dtype=dtype):
                    return outputs(model, inputs)
            cast = tuple(x.to(dtype) if x.is_floating_point() else x for x in inputs)
            return outputs(model.to(dtype), cast)
    except (RuntimeError, TypeError) as error:
        return str(error)


def error(reference: list[Tensor], found: list[Tensor] | str) -> float:
    """The worst relative L2 error, or share of other results where they are discrete; infinite where there are none."""
    if isinstance(found, str):
        return float("inf")
    assert [x.shape for x in reference] == [x.shape for x in found]
    return max(_error(a, b) for a, b in zip(reference, found, strict=True))


def _error(a: Tensor, b: Tensor) -> float:
    if not a.is_floating_point():
        return float((a != b).float().mean())
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    gap = torch.where(same, 0.0, a - b).norm()
    size = torch.where(a.isfinite(), a, 0.0).norm()
    return float(gap / size) if gap.isfinite() and size else (float("inf") if gap else 0.0)


def formats(rule: Rule) -> list[str]:
    return [name for name in rule.formats if FORMATS[name].low]


def built(rule: Rule) -> tuple[nn.Module, nn.Module, tuple[Tensor, ...]]:
    """The example's model, the repaired one, and the inputs of both."""
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    return broken, fixed, BEYOND.get(rule.code, inputs)


@pytest.mark.parametrize("rule", [rule for rule in RULES if formats(rule)], ids=lambda rule: rule.code)
def test_the_repair_holds_where_the_original_fails(rule: Rule) -> None:
    broken, fixed, inputs = built(rule)
    budget = BUDGETS.get(rule.code, BUDGET)
    truth, meant = outputs(broken, inputs), outputs(fixed, inputs)
    cases = [(fmt, use) for fmt in formats(rule) for use in USES]
    fails = [case for case in cases if not error(truth, low(broken, inputs, *case)) <= budget]
    held = {case: error(meant, low(fixed, inputs, *case)) for case in fails}
    assert {case: found for case, found in held.items() if not found <= budget} == {}
    assert fails or rule.severity == "info" or rule.code in ELSEWHERE


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_in_fp32_the_repair_is_the_same_function_or_says_what_it_changes(rule: Rule) -> None:
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    found = error(outputs(broken, inputs), outputs(fixed, inputs))
    assert (found > 1e-3) == bool(rule.example.changes), found


LAST = {"LOS002": "a loss", "LOS003": "a loss"}
"""Rules whose advice is to return FP32: nothing low reads it."""


class Followed(nn.Module):
    """A model with a layer behind it: in a model that is cast, that layer's weight is low, and takes nothing else."""

    def __init__(self, model: nn.Module, outputs: list[Tensor]) -> None:
        super().__init__()
        self.model = model
        sizes = [x.shape[-1] for x in outputs if x.is_floating_point() and x.dim()]
        self.readers = nn.ModuleList(nn.Linear(size, 2, bias=False) for size in sizes)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        leaves = [leaf for leaf in pytree.tree_leaves(self.model(*inputs)) if isinstance(leaf, Tensor)]
        readers = iter(self.readers)
        return [next(readers)(x) if x.is_floating_point() and x.dim() else x for x in leaves]


@pytest.mark.parametrize("rule", [rule for rule in RULES if formats(rule)], ids=lambda rule: rule.code)
def test_the_repair_runs_in_a_larger_model_under_either_strategy(rule: Rule) -> None:
    _, fixed, inputs = built(rule)
    model = fixed if rule.code in LAST else Followed(fixed, outputs(fixed, inputs))
    found = {(fmt, use): low(model, inputs, fmt, use) for fmt in formats(rule) for use in USES}
    assert {case: said for case, said in found.items() if isinstance(said, str)} == {}


def code_of(advice: str) -> list[str]:
    """The lines of code in an advice, which is one block, without what is said beside them."""
    blocks = re.findall(r"(?m)(?:^    .*\n?)+", advice + "\n")
    assert len(blocks) <= 1, blocks
    lines = textwrap.dedent("".join(blocks)).splitlines()
    return [line.partition("  #")[0].rstrip() for line in lines]


OUTSIDE = {"NRM005": "its advice is a cast of the whole model, which a test below runs"}


@pytest.mark.parametrize("rule", [rule for rule in RULES if code_of(rule.advice)], ids=lambda rule: rule.code)
def test_the_repaired_example_is_the_advice_applied(rule: Rule) -> None:
    code, lines = code_of(rule.advice), rule.example.fixed.splitlines()
    indents = {len(line) - len(line.lstrip()) for line in lines}
    applied = [[" " * by + line for line in code] for by in indents]
    there = any(lines[i : i + len(code)] == block for block in applied for i in range(len(lines)))
    assert there != (rule.code in OUTSIDE)


def test_the_cast_that_spares_batch_norms_keeps_their_statistics() -> None:
    (rule,) = (rule for rule in RULES if rule.code == "NRM005")
    norm, inputs = example(rule)
    model = nn.Sequential(norm, nn.Linear(8, 8)).eval()
    truth = outputs(model, inputs)
    exec("\n".join(code_of(rule.advice)), {"model": model, "torch": torch})
    assert error(truth, low_as_it_is(model, inputs)) <= BUDGET
    assert (model[0].weight.dtype, model[1].weight.dtype) == (torch.float32, torch.float16)


def low_as_it_is(model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with auditor.emulate("cuda"):
        return outputs(model, tuple(x.half() for x in inputs))


FINEST = {"MSR001": ("fp16", 0.01), "MSR002": ("bf16", 0.01), "MSR003": ("fp8_e4m3", 0.05)}
"""Measured rules: a format that each speaks of, and a budget that allows the rounding of one tensor to it."""


class Advised(nn.Module):
    """A module, or a function in one, that is run as an advice says: the pasted lines compute y."""

    def __init__(self, module: nn.Module, advice: str, until_small: Callable[[Tensor], Tensor] = torch.clone) -> None:
        super().__init__()
        self.module, self.code, self.until_small = module, "\n".join(code_of(advice)), until_small

    def forward(self, x: Tensor) -> Tensor:
        space: dict[str, Any] = {"torch": torch, "x": x, "until_small": self.until_small}
        space["module" if "module(" in self.code else "operation"] = self.module
        exec(self.code, space)
        return space["y"]


MODULES = {
    "linear": (lambda: large(nn.Linear(8, 8)), torch.log1p),  # results of 8 * 20000
    "convolution": (lambda: large(nn.Conv1d(4, 4, 3, padding=1)), lambda y: y * 2.0**-16),
    "norm": (lambda: large(nn.LayerNorm(8)), lambda y: y.abs().log1p()),
    "root": (lambda: Function(lambda x: x.add(40000.0) * 2), torch.sqrt),
    "count": (lambda: Function(lambda x: x.cumsum(-1) * 4096), lambda y: y / 8192),
    "index": (lambda: Function(lambda x: x.index_add(0, torch.tensor([0, 0, 0]), 60000 * x[:3])), torch.log1p),
}
"""Modules, and functions that no module runs: results beyond FP16, and what makes them small again."""


def large(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.constant_(parameter, 20000.0)
    return module


@pytest.mark.parametrize("code", ["MSR001", "MSR002", "ACT002"])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", MODULES)
def test_the_advice_on_a_module_or_a_function_keeps_fp32_until_values_are_small(code: str, use: str, kind: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    dtype, (make, until_small) = dtype_of(rule.formats[0]), MODULES[kind]
    module, x = make(), 1 + torch.arange(32.0).reshape(4, 8) % 4
    is_function = isinstance(module, Function)
    if not is_function and code == "ACT002":
        return  # its advice on layers names their weight
    texts = [rule.advice, *(other.advice for other in rule.other_advice)]
    *_, advice = (text for text in texts if ("operation(" in text) == is_function and "self." not in text)
    truth = until_small(module(x))
    with auditor.emulate("cuda"), torch.no_grad():
        if use == "cast":
            module, x = module.to(dtype).float(), x.to(dtype)
        with torch.autocast("cuda", dtype=dtype, enabled=use == "autocast"):
            y = Advised(module, advice, until_small)(x)
    assert y.dtype is x.dtype
    assert error([truth], [y]) <= BUDGET


class Mixed(nn.Module):
    """Operations of a module of torch's, of a module with its own forward, and of code that belongs to neither."""

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return F.linear(x, self.weight) - 1

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scaled = nn.Linear(8, 8), Mixed.Scaled(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return (self.scaled(self.linear(x)) * 2).index_add(0, torch.tensor([0]), x[:1])


def test_a_remedy_names_a_module_only_where_torch_runs_the_operation_in_one() -> None:
    toy = captured(Mixed(), torch.randn(4, 8))
    unsafe = {name: {fmt: Verdict("unsafe", "it is") for fmt in ("fp16", "bf16")} for name in toy.capture.nodes}
    found = classify(toy.capture, gather(toy.capture, toy.ranges, unsafe), load_rules())
    for one in (one for one in found if one.rule in ("MSR001", "MSR002")):
        assert ("module(" in one.advice) == (one.owner == "linear"), one.op
        assert ("operation(" in one.advice) == (one.owner != "linear"), one.op
    assert {one.owner for one in found if one.rule == "MSR001"} == {"", "linear", "scaled"}
    of_parts = ("self.stem", "self.head", "self.norm", "self.wo", "self.gate", "module(")
    assert not [one.rule for one in found if one.owner != "linear" and any(part in one.advice for part in of_parts)]


# What an audit says, before the advice is followed and after.


def trained(model: nn.Module) -> nn.Module:
    """A model with a weight before it, whose gradient goes through all of it."""
    weight = nn.Parameter(torch.ones(()))
    return Model(lambda m, *inputs: m.model(*(m.weight * x for x in inputs)), model=model, weight=weight)


def says(model: nn.Module, inputs: tuple[Tensor, ...], **asked: Any) -> list[tuple[int, str]]:
    """Rule and severity of all findings of an audit; 0 is an error."""
    return [(SEVERITIES.index(one.severity), one.rule) for one in auditor.audit(model, inputs, **asked).findings]


def assert_less(code: str, before: list[tuple[int, str]], after: list[tuple[int, str]]) -> None:
    """The rule is silent, fewer findings are as severe as its own was, and no severity has more than before."""
    own = min(severity for severity, rule in before if rule == code)
    counts = [[sum(s <= most for s, _ in said) for most in range(len(SEVERITIES))] for said in (before, after)]
    assert code not in {rule for _, rule in after}, after
    assert counts[1][own] < counts[0][own], (before, after)
    assert all(now <= then for then, now in zip(*counts, strict=True)), (before, after)


ONLY_CAST = ("DTY002", "DTY003", "DTY004")
"""Rules about dtypes that autocast makes one."""

REPAIRED = [(rule, use) for rule, use in product(RULES, USES) if use == "cast" or rule.code not in ONLY_CAST]

QUICK = {rule.family: (rule.code, USES[len(rule.family) % 2]) for rule in RULES}
"""Of each family the rule and the strategy that the quick suite audits."""


@pytest.mark.parametrize(
    ("rule", "use"),
    [
        pytest.param(rule, use, id=f"{rule.code}-{use}", marks=() if (rule.code, use) in QUICK.values() else SLOW)
        for rule, use in REPAIRED
    ],
)
def test_the_audit_of_a_repaired_example_has_less_to_say(rule: Rule, use: str) -> None:
    (broken, inputs), (fixed, _) = example(rule), example(rule, fixed=True)
    asked: dict[str, Any] = {"formats": formats(rule) or ("fp16", "bf16"), "strategies": use}
    if rule.family in ("training", "compiled"):
        broken, fixed = trained(broken), trained(fixed)
        asked |= {"mode": "training", "loss_fn": lambda outputs: outputs.float().sum()}
    before, after = (says(model, inputs, **asked) for model in (broken, fixed))
    assert_less(rule.code, before, after)


@pytest.mark.parametrize("code", FINEST)
@pytest.mark.parametrize("use", USES)
def test_the_audit_has_less_to_say_where_the_advice_of_a_measured_rule_is_followed(code: str, use: str) -> None:
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    fmt, budget = FINEST[code]
    module, inputs = example(rule)
    before, after = (
        says(model, inputs, formats=fmt, strategies=use, max_error=budget)
        for model in (module, Advised(module, rule.advice))
    )
    assert_less(code, before, after)


# Notes whose advice is code for a model, and that have no repaired example, since they go on saying what they say.


def pasted(code: str, **space: Any) -> dict[str, Any]:
    """What an advice's lines leave behind."""
    (rule,) = (rule for rule in load_rules() if rule.code == code)
    exec("\n".join(code_of(rule.advice)), {"torch": torch}, space)
    return space


def test_a_table_kept_in_fp32_feeds_a_model_that_is_cast() -> None:
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(16, 8), head=nn.Linear(8, 8)))
    tokens = torch.tensor([[1, 2, 3, 0]])
    truth = outputs(model, (tokens,))
    pasted("BND003", model=model)
    assert (model.embed.weight.dtype, model.head.weight.dtype) == (torch.float32, torch.float16)
    with auditor.emulate("cuda"):
        assert error(truth, outputs(model, (tokens,))) <= BUDGET


def test_a_gradient_that_is_shrunk_leaves_the_forward_pass_as_it_is() -> None:
    holder, tokens = nn.Module(), torch.tensor([1, 2])
    holder.embed = nn.Embedding(16, 8)
    h = pasted("TRN003", self=holder, tokens=tokens)["h"]
    assert torch.allclose(h, holder.embed(tokens))
    h.sum().backward()
    assert torch.allclose(holder.embed.weight.grad[1], torch.tensor(0.1))


def test_frequencies_that_are_assigned_again_are_those_of_transformers() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralRotaryEmbedding

    for size, base in ((16, 1e4), (64, 1e4), (96, 5e5), (128, 1e6)):
        rope = {"rope_type": "default", "rope_theta": base}
        config = MixtralConfig(hidden_size=4 * size, num_attention_heads=4, rope_parameters=rope)
        pasted_here = pasted("POS007", base=base, size=size, x=torch.ones(1))
        assert torch.equal(pasted_here["frequencies"], MixtralRotaryEmbedding(config).inv_freq)


def test_the_switch_for_tf32_is_one_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    pasted("HWR002")
    assert torch.backends.cudnn.allow_tf32 is False
