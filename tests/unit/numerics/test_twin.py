"""FP16's numbers under another name, and without torch's arithmetic: what rounding makes of it is held against FP16 itself."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from auditor.capture.capture import capture
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy
from auditor.execution.policy import plain as everywhere
from auditor.execution.resolve import resolve
from auditor.numerics.casting import carried_in, format_in, in_format, plain, round_tree
from auditor.numerics.formats import FORMATS, Format
from auditor.numerics.kernels import UnsupportedInFormat, run_op
from auditor.records import Capture, Subject
from tests.support.formats import ieee_format, temporary_format
from tests.support.small_models import MODELS
from tests.support.subjects import normal, seeded, subject_of

aten = torch.ops.aten
TWIN = ieee_format("e5m10", exponent_bits=5, mantissa=10)
STRATEGIES = ("autocast", "cast")
REFUSED = ("mixture", "cast")  # its router reads `x.float()` beside weights that a cast has lowered
RUN = [(name, strategy) for name in MODELS for strategy in STRATEGIES if (name, strategy) != REFUSED]


@pytest.fixture(autouse=True)
def twin() -> Iterator[Format]:
    with temporary_format(TWIN) as row:
        yield row


@cache
def subject(name: str) -> Subject:
    model, inputs = MODELS[name]
    return subject_of(seeded(model), *inputs)


@cache
def captured(name: str) -> Capture:
    return capture(subject(name), ("fp16", "e5m10"))


def run(name: str, strategy: str, fmt: str) -> dict[str, Any]:
    """What every operation gives when all is low."""
    found: dict[str, Any] = {}
    how = Policy(captured(name), strategy, everywhere(fmt), fmt)
    recorded = captured(name)
    interpreter = Executor(recorded.graph_module, how, lambda n, value: found.__setitem__(n.name, value))
    with torch.no_grad():
        interpreter.run(*captured(name).bind(subject(name).model, subject(name).batches[0]))
    return {node: value for node, value in found.items() if node in captured(name).nodes}


@pytest.mark.parametrize(("name", "strategy"), RUN)
def test_a_run_carries_what_was_resolved(name: str, strategy: str) -> None:
    how = Policy(captured(name), strategy, everywhere("e5m10"), "e5m10")
    dtypes = resolve(how).dtypes
    carried = {
        node: "" if (row := format_in(value)) is None else row.name
        for node, value in run(name, strategy, "e5m10").items()
        if isinstance(value, Tensor)
    }
    assert carried == {node: dtypes[node] for node in carried}


@pytest.mark.parametrize(("name", "strategy"), RUN)
def test_a_run_differs_from_fp16s_by_what_kernels_round_inside(name: str, strategy: str) -> None:
    ours, theirs = run(name, strategy, "e5m10"), run(name, strategy, "fp16")
    for node, value in ours.items():
        if isinstance(value, Tensor) and value.is_floating_point():
            torch.testing.assert_close(plain(value).float(), theirs[node].float(), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize(("fmt", "named"), [("fp16", "float16"), ("e5m10", "e5m10")])
def test_what_fp16_refuses_is_refused(fmt: str, named: str) -> None:
    with pytest.raises(
        UnsupportedInFormat, match=f"linear has inputs of different dtypes, ({named} and float32|float32 and {named})"
    ):
        run(*REFUSED, fmt)


def test_products_are_the_same_bit_for_bit() -> None:
    x, weight = normal(5, 70, seed=1), normal(3, 70, seed=2)
    for target, args in ((aten.linear.default, (x, weight)), (aten.mm.default, (x, weight.t()))):
        ours = run_op(target, round_tree(args, TWIN), {})
        theirs = run_op(target, round_tree(args, FORMATS["fp16"]), {})
        assert carried_in(ours) is TWIN
        assert torch.equal(plain(ours), theirs.float())


LOW, HIGH, SCALAR = "e5m10", "fp32", "scalar"
PROMOTED = [
    (aten.add.Tensor, (LOW, LOW), LOW),
    (aten.add.Tensor, (LOW, HIGH), HIGH),
    (aten.add.Tensor, (HIGH, LOW), HIGH),
    (aten.mul.Tensor, (LOW, SCALAR), LOW),
    (aten.mul.Tensor, (SCALAR, LOW), LOW),
    (aten.add.Tensor, (LOW, "fp16"), HIGH),  # two low formats have FP32 in common
    (aten.mm.default, (LOW, LOW), LOW),
    (aten.masked_fill.Tensor, (LOW, "mask", SCALAR), LOW),
    (aten._to_copy.default, (LOW,), LOW),
    (aten.exp.default, (LOW,), LOW),
]


@pytest.mark.parametrize(("target", "kinds", "expected"), PROMOTED)
def test_promotion_is_that_of_torch(target: Any, kinds: tuple[Any, ...], expected: str) -> None:
    def made(kind: Any, stand_in: bool) -> Any:
        x = {"mask": torch.eye(2, dtype=torch.bool), SCALAR: torch.tensor(2.0), HIGH: torch.ones(2, 2)}.get(kind)
        row = FORMATS["bf16" if stand_in and kind == LOW else kind] if x is None else None
        return in_format(torch.ones(2, 2), row) if row is not None else x

    args, native = (tuple(made(kind, stand_in) for kind in kinds) for stand_in in (False, True))
    found = format_in(run_op(target, args, {}))
    torchs = format_in(target(*native))
    assert found is FORMATS[expected]
    assert torchs is FORMATS["bf16" if expected == LOW else expected]
