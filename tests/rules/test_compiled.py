"""What a compiler changes is foreseen on the recorded forward and backward graph: gradients of rounded extremes, and
comparisons with them. The slow test compiles each planted model, and sees the rounding that the compiler drops."""

import math
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from auditor.capture.capture import capture
from auditor.numerics.histogram import magnitudes_of
from auditor.records import Magnitudes, Subject
from auditor.rulebook.compiled import unrounded_gradients, unrounded_if_trained
from auditor.rulebook.findings import classify
from auditor.rulebook.gather import gather
from auditor.rulebook.load import load_rules
from tests.rules.examples import example
from tests.support.stepping import stepped

RULES = [rule for rule in load_rules() if rule.family == "compiled"]
INFINITY = float("inf")
SIZE = 64


class Net(nn.Module):
    """Two layers, and a formula of their parts."""

    def __init__(self, formula: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.formula = formula
        self.a, self.b = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
        self.norm, self.batch_norm = nn.LayerNorm(SIZE), nn.BatchNorm1d(SIZE)
        self.temperature = nn.Parameter(torch.tensor(4.0))
        self.register_buffer("quarter", torch.tensor(0.25))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, x)


def shifted(w: Tensor) -> Tensor:
    """A softmax by hand, whose maximum receives a gradient."""
    e = torch.exp(w - w.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)


def scaled_to_one(y: Tensor) -> Tensor:
    return y / (1 + y.abs().amax(-1, keepdim=True))


def with_shift_in_no_grad(m: Any, x: Tensor) -> Tensor:
    w = m.a(x) * 0.3
    with torch.no_grad():
        largest = w.amax(-1, keepdim=True)
    return torch.exp(w - largest)


def frozen(m: Any, x: Tensor) -> Tensor:
    y = x * 0.3
    return m.a(y / y.amax(-1, keepdim=True))


def spread(m: Any, x: Tensor) -> Tensor:
    y = m.a(x) * 0.3
    low, high = torch.aminmax(y, dim=-1, keepdim=True)
    return (y - low) / (high - low)


GRADIENTS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "scores, scaled after the product": lambda m, x: shifted(m.a(x) @ m.b(x).transpose(-1, -2) * SIZE**-0.3),
    "a scale before a relu": lambda m, x: scaled_to_one(torch.relu(m.a(x) * 0.3)),
    "a scale before a mask": lambda m, x: shifted((m.a(x) * 0.3).masked_fill(x > 1, -100.0)),
    "a scale before a reshape": lambda m, x: shifted((m.a(x) * 0.3).reshape(2, -1)),
    "a quotient": lambda m, x: shifted(m.a(x) / math.sqrt(SIZE + 1)),
    "a learned temperature": lambda m, x: shifted(m.a(x) * m.temperature),
    "a bias of its own": lambda m, x: scaled_to_one(x @ m.a.weight + m.a.bias),
    "a residual": lambda m, x: scaled_to_one(m.a(x) + x),
    "a tanh, and the maximum of all": lambda m, x: torch.tanh(m.a(x)) / torch.tanh(m.a(x)).max(),
    "the minimum of all": lambda m, x: torch.sigmoid(m.a(x)) / torch.sigmoid(m.a(x)).min(),
    "a minimum": lambda m, x: F.gelu(m.a(x)) - F.gelu(m.a(x)).amin(-1, keepdim=True),
    "both extremes": spread,
    "a norm of infinite order": lambda m, x: F.silu(m.a(x)) / torch.linalg.vector_norm(F.silu(m.a(x)), INFINITY),
    "the older norm": lambda m, x: F.silu(m.a(x)) / torch.norm(F.silu(m.a(x)), p=INFINITY, dim=-1, keepdim=True),
    "a layer norm": lambda m, x: scaled_to_one(m.norm(m.a(x))),
    "a batch norm": lambda m, x: scaled_to_one(m.batch_norm(m.a(x))),
    "a softmax": lambda m, x: torch.softmax(m.a(x), -1) / torch.softmax(m.a(x), -1).amax(-1, keepdim=True),
    "a gate": lambda m, x: scaled_to_one(F.silu(m.a(x)) * m.b(x)),
    "a mean, whose quotient is computed again": lambda m, x: m.a(x) / (1 + m.a(x).mean(-1).amax()),
    "a square": lambda m, x: m.a(x).square() / (1 + m.a(x).square().amax(-1, keepdim=True)),
    "dropout, in training": lambda m, x: scaled_to_one(F.dropout(m.a(x), 0.1, training=m.training)),
}
"""Models with a gradient that a compiler turns NaN."""


def where_largest(y: Tensor) -> Tensor:
    return torch.where(y == y.amax(-1, keepdim=True), 9 * y, y)


COMPARISONS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "the largest of a row": lambda m, x: _chosen(m, x, lambda y: y == y.amax(-1, keepdim=True)),
    "the largest, by values": lambda m, x: _chosen(m, x, lambda y: y == y.max(-1, keepdim=True).values),
    "all but the largest": lambda m, x: _chosen(m, x, lambda y: y < y.amax(-1, keepdim=True)),
    "not below the largest": lambda m, x: _chosen(m, x, lambda y: y >= y.amax(-1, keepdim=True)),
    "the largest of all": lambda m, x: _chosen(m, x, lambda y: y == y.max()),
    "the smallest": lambda m, x: _chosen(m, x, lambda y: y.amin(-1, keepdim=True) == y),
    "the difference": lambda m, x: _chosen(m, x, lambda y: y - y.amax(-1, keepdim=True) == 0),
    "the ratio": lambda m, x: _chosen(m, x, lambda y: y / y.amax(-1, keepdim=True) == 1),
}
"""Models with a comparison that a compiler changes. Their extremes receive no gradient."""


def _chosen(m: Any, x: Tensor, choose: Callable[[Tensor], Tensor]) -> Tensor:
    y = m.a(x) * 0.3
    return torch.where(choose(y), 9 * y, y)


CLEAN: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a layer": lambda m, x: shifted(m.a(x)),
    "a product": lambda m, x: shifted(m.a(x) @ m.b(x).transpose(-1, -2)),
    "a power of two": lambda m, x: shifted(m.a(x) @ m.b(x).transpose(-1, -2) * 0.25),
    "a quotient by a power of two": lambda m, x: shifted(m.a(x) / 8),
    "a root that is a power of two": lambda m, x: shifted(m.a(x) / math.sqrt(SIZE)),
    "a buffer that is a power of two": lambda m, x: shifted(m.a(x) * m.quarter),
    "a computed root": lambda m, x: shifted(m.a(x) / torch.sqrt(torch.tensor(64.0))),
    "a mask that is added": lambda m, x: shifted(
        m.a(x) * 0.5 + torch.zeros(SIZE).index_fill(0, torch.tensor([3]), -1e4)
    ),
    "a mask that multiplies": lambda m, x: scaled_to_one(m.a(x) * (x > 0)),
    "a mask after a layer": lambda m, x: shifted(m.a(x).masked_fill(x > 1, -100.0)),
    "a relu": lambda m, x: scaled_to_one(torch.relu(m.a(x))),
    "a clamp": lambda m, x: scaled_to_one(m.a(x).clamp(-2, 2)),
    "a sign": lambda m, x: scaled_to_one(-m.a(x)),
    "parts of layers": lambda m, x: scaled_to_one(torch.cat([m.a(x), m.b(x)], -1)[:, 3:]),
    "parts that are stored": lambda m, x: scaled_to_one(torch.cat([m.a(x) * 0.3, m.b(x) * 0.3], -1)),
    "the larger of two layers": lambda m, x: scaled_to_one(torch.maximum(m.a(x), m.b(x))),
    "detached": lambda m, x: torch.exp(m.a(x) * 0.3 - (m.a(x) * 0.3).amax(-1, keepdim=True).detach()),
    "detached before": lambda m, x: torch.exp(m.a(x) * 0.3 - (m.a(x) * 0.3).detach().amax(-1, keepdim=True)),
    "without gradients": with_shift_in_no_grad,
    "frozen": frozen,
    "by position": lambda m, x: torch.exp(m.a(x) * 0.3 - (m.a(x) * 0.3).max(-1, keepdim=True).values),
    "by sorting": lambda m, x: (m.a(x) * 0.3).sort(-1).values,
    "the first of several": lambda m, x: (m.a(x) * 0.3).topk(4, -1).values,
    "in FP32": lambda m, x: shifted(m.a(x).float() * 0.3),
    "a library's softmax": lambda m, x: torch.softmax(m.a(x) * 0.3, -1),
    "a smooth maximum": lambda m, x: m.a(x) * 0.3 - torch.logsumexp(m.a(x) * 0.3, -1, keepdim=True),
    "a Euclidean norm": lambda m, x: F.normalize(m.a(x) * 0.3, dim=-1),
    "a sum": lambda m, x: m.a(x) / m.a(x).sum(-1, keepdim=True).amax(),
    "an input": lambda m, x: m.a(x) / x.abs().amax(-1, keepdim=True),
    "a table": lambda m, x: m.a(x) / m.b.weight.abs().amax(),
    "dropout of half": lambda m, x: scaled_to_one(F.dropout(m.a(x), 0.5, training=m.training)),
    "dropout after the maximum": lambda m, x: F.dropout(scaled_to_one(m.a(x)), 0.1, training=m.training),
    "pooled": lambda m, x: F.max_pool1d(torch.sigmoid(m.a(x)), 4),
    "peaks": lambda m, x: _chosen(m, x, lambda y: F.max_pool1d(y, 3, 1, 1) == y),
    "the best four": lambda m, x: _chosen(m, x, lambda y: y >= y.topk(4, -1).values[..., -1:]),
    "above the mean": lambda m, x: _chosen(m, x, lambda y: y > y.mean(-1, keepdim=True)),
    "above a number": lambda m, x: _chosen(m, x, lambda y: y > 0.05),  # a few entries flip
    "above another's maximum": lambda m, x: _chosen(m, x, lambda y: y > m.b(x).amax(-1, keepdim=True)),
    "the largest of a layer": lambda m, x: where_largest(m.a(x)),
    "the largest of a doubled layer": lambda m, x: where_largest(2 * m.a(x)),
    "equal positions": lambda m, x: _chosen(m, x, lambda y: torch.arange(SIZE) == y.argmax(-1, keepdim=True)),
    "a norm of a layer": lambda m, x: m.a(x) / torch.linalg.vector_norm(m.a(x), INFINITY, -1, keepdim=True),
}
"""Models that a compiler leaves as they are: 40 and more, like the planted ones in every other respect."""


def found_in(formula: Callable[[Any, Tensor], Tensor]) -> list[str]:
    """Codes of this family on the model, in training."""
    torch.manual_seed(0)
    return codes_of(Net(formula), torch.randn(128, SIZE))


def codes_of(model: nn.Module, x: Tensor) -> list[str]:
    step = stepped(model, x, torch.ones_like(model.eval()(x)))
    audited = capture(Subject(model.eval(), (((x,), {}),), "toy", "toy.py", "toy", "toy"), ("fp16", "bf16"))
    ranges = dict(_ranges(step.env))
    gradients = unrounded_gradients(audited, step.capture, step.gradients.keys(), ranges.get, "bf16")
    with torch.no_grad():
        facts = gather(audited, ranges, gradients=gradients)
    return sorted({found.rule for found in classify(audited, facts, RULES)})


def _ranges(values: dict[str, Any]) -> Iterator[tuple[str, Magnitudes]]:
    for name, value in values.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            yield name, magnitudes_of(value.detach())


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_gradient_of_a_rounded_extreme_is_foreseen(name: str) -> None:
    assert found_in(GRADIENTS[name]) == ["CPL002"]


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_comparison_with_a_rounded_extreme_is_foreseen(name: str) -> None:
    assert found_in(COMPARISONS[name]) == ["CPL001"]


@pytest.mark.parametrize("name", CLEAN)
def test_what_a_compiler_does_not_change_is_left_alone(name: str) -> None:
    assert found_in(CLEAN[name]) == []


def foreseen_without_a_step(formula: Callable[[Any, Tensor], Tensor]) -> list[str]:
    """Codes of this family on the model, as an audit without a training step finds them."""
    torch.manual_seed(0)
    model = Net(formula).eval()
    subject = Subject(model, (((torch.randn(128, SIZE),), {}),), "toy", "toy.py", "toy", "toy")
    audited = capture(subject, ("fp16", "bf16"))
    with torch.no_grad():
        run = Interpreter(audited.graph_module)
        ranges = dict(_ranges(run.values_on(*audited.bind(model, subject.batches[0]))))
        gradients = unrounded_if_trained(audited, subject, ranges, "bf16", seed=0)
        facts = gather(audited, ranges, gradients=gradients)
    assert all(parameter.grad is None for parameter in model.parameters())
    return sorted({found.rule for found in classify(audited, facts, RULES)})


class Interpreter(torch.fx.Interpreter):
    """Keeps every value of a graph's run."""

    def values_on(self, *inputs: Any) -> dict[str, Any]:
        self.kept = dict[str, Any]()
        self.run(*inputs)
        return self.kept

    def run_node(self, n: torch.fx.Node) -> Any:
        self.kept[n.name] = super().run_node(n)
        return self.kept[n.name]


@pytest.mark.parametrize("name", [name for name in GRADIENTS if "dropout" not in name])
def test_an_audit_without_a_training_step_foresees_the_gradient(name: str) -> None:
    assert foreseen_without_a_step(GRADIENTS[name]) == ["CPL002"]


@pytest.mark.parametrize("name", CLEAN)
def test_an_audit_without_a_training_step_leaves_the_others_alone(name: str) -> None:
    assert foreseen_without_a_step(CLEAN[name]) == []


def test_a_frozen_model_has_no_gradient_to_foresee() -> None:
    assert foreseen_without_a_step(lambda m, x: shifted(m.requires_grad_(False).a(x) * 0.3)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_the_examples_fire_in_training_and_their_repairs_do_not(rule: Any) -> None:
    assert codes_of(*_example(rule, fixed=False)) == [rule.code]
    assert codes_of(*_example(rule, fixed=True)) == []


class Rounded:
    """A model's outputs and gradients in BF16, in one list."""

    def __init__(self, formula: Callable[[Any, Tensor], Tensor], *, compiled: bool) -> None:
        torch.manual_seed(0)
        model, x = Net(formula).bfloat16(), torch.randn(128, SIZE).bfloat16()
        torch._dynamo.reset()
        run = torch.compile(model) if compiled else model
        output = run(x)
        output.float().square().mean().backward()
        self.output = output.detach().float()
        self.gradients = [p.grad.float() for p in model.parameters() if p.grad is not None]

    @property
    def is_finite(self) -> bool:
        return all(bool(torch.isfinite(gradient).all()) for gradient in self.gradients)


needs_a_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


STORED = ("a learned temperature", "the older norm", "both extremes", "the difference")
"""Models of which torch 2.13 happens to store the values: what it stores is not foreseen."""


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("name", [name for name in GRADIENTS if name not in STORED])
def test_a_compiler_turns_the_planted_gradients_nan(name: str) -> None:
    assert Rounded(GRADIENTS[name], compiled=False).is_finite
    assert not Rounded(GRADIENTS[name], compiled=True).is_finite


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("name", [name for name in COMPARISONS if name not in STORED])
def test_a_compiler_changes_the_planted_comparisons(name: str) -> None:
    eager, compiled = (Rounded(COMPARISONS[name], compiled=each).output for each in (False, True))
    assert float((eager - compiled).norm() / eager.norm()) > 0.1


@pytest.mark.slow
@needs_a_compiler
@pytest.mark.parametrize("name", CLEAN)
def test_a_compiler_leaves_the_others_as_they_are(name: str) -> None:
    eager, compiled = (Rounded(CLEAN[name], compiled=each) for each in (False, True))
    assert eager.is_finite == compiled.is_finite
    if "dropout" not in name:  # compiled code draws other random numbers
        assert float((eager.output - compiled.output).norm() / eager.output.norm()) < 0.1


def _example(rule: Any, *, fixed: bool) -> tuple[nn.Module, Tensor]:
    model, (x,) = example(rule, fixed=fixed)
    return model, x
