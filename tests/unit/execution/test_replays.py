"""Replays that reuse earlier results answer bit for bit what a replay from the start answers, and compute less."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor import offload
from auditor.execution import replays as module
from auditor.execution.execute import Executor
from auditor.execution.policy import Policy, choice_keeping
from auditor.execution.replays import Replays
from auditor.numerics.nodes import tensors_in
from auditor.records import Capture
from tests.support.replaying import Model, assert_same
from tests.support.subjects import capture_of, normal, seeded

DEPTH = 8


def chain() -> nn.Module:
    return seeded(lambda: nn.Sequential(*[nn.Linear(8, 8) for _ in range(DEPTH)]))


def branching(m: Any, x: Tensor) -> Tensor:
    """Values with several readers, a split, a discrete result, and operations of the root's own."""
    left, right = m.first(x).chunk(2, -1)
    picked = m.second(left).relu().argmax(-1, keepdim=True)
    weights = m.norm(right).softmax(-1)
    return m.last(torch.cat([weights, left], -1)) + weights.gather(-1, picked)


def branches() -> nn.Module:
    return seeded(
        lambda: Model(
            branching, first=nn.Linear(8, 8), second=nn.Linear(4, 4), norm=nn.LayerNorm(4), last=nn.Linear(8, 8)
        )
    )


def policy_keeping(capture: Capture, high: set[str], strategy: str, fmt: str = "bf16") -> Policy:
    return Policy(capture, strategy, choice_keeping(high, fmt), fmt)


def from_the_start(capture: Capture, inputs: list[Any], policy: Policy) -> Any:
    return Executor(capture.graph_module, policy).run(*inputs)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operations that were computed."""
    names, compute = list[str](), Policy.compute

    def noted(self: Policy, n: Any, value_of: Any) -> Any:
        if n.op != "output":
            names.append(n.name)
        return compute(self, n, value_of)

    monkeypatch.setattr(Policy, "compute", noted)
    return names


@pytest.mark.parametrize("room", [1 << 30, 200, 0])
@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("kind", [chain, branches])
def test_the_outputs_are_those_of_a_replay_from_the_start(
    kind: Any, strategy: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "KEPT_BYTES", room)
    model, x, rnd = kind(), normal(4, 8), random.Random(0)
    capture = capture_of(model, x)
    owners = sorted({node.owner for node in capture.nodes.values()} - {""})
    inputs, replays = [*capture.bind(model, ((x,), {}))], Replays()
    with torch.no_grad():
        for fmt in ("bf16", "fp16"):
            for _ in range(12):
                high = set(rnd.sample(owners, rnd.randrange(len(owners) + 1)))
                policy = policy_keeping(capture, high, strategy, fmt)
                expected = tensors_in(from_the_start(capture, inputs, policy))
                assert_same(tensors_in(replays.outputs("x", capture, inputs, policy)), expected)


def test_only_what_a_choice_changes_is_computed(computed: list[str]) -> None:
    model, x = chain(), normal(4, 8)
    capture = capture_of(model, x)
    inputs, replays = [*capture.bind(model, ((x,), {}))], Replays()

    def count(high: set[str]) -> int:
        computed.clear()
        replays.outputs("x", capture, inputs, policy_keeping(capture, high, "cast"))
        return len(computed)

    with torch.no_grad():
        assert count(set()) == DEPTH
        assert count(set()) == 0
        assert count({"7"}) == 1
        assert count({"6"}) == 2
        assert count({"3"}) == DEPTH - 3
        assert count({"6"}) == 2  # the choice in which all is low was used last, and is still known
        replays.forget()
        assert count(set()) == DEPTH


def test_results_of_other_inputs_are_not_reused() -> None:
    model, x, y = chain(), normal(4, 8), normal(4, 8, seed=1)
    capture, replays = capture_of(model, x), Replays()
    policy = policy_keeping(capture, {"3"}, "autocast")
    with torch.no_grad():
        for key, given in (("x", x), ("y", y), ("x", x)):
            inputs = [*capture.bind(model, ((given,), {}))]
            expected = tensors_in(from_the_start(capture, inputs, policy))
            assert_same(tensors_in(replays.outputs(key, capture, inputs, policy)), expected)


def test_nothing_is_kept_under_a_limit_on_memory(computed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), normal(4, 8)
    capture = capture_of(model, x)
    inputs, replays = [*capture.bind(model, ((x,), {}))], Replays()
    monkeypatch.setattr(offload, "now", object)
    with torch.no_grad():
        for _ in range(2):
            computed.clear()
            replays.outputs("x", capture, inputs, policy_keeping(capture, set(), "cast"))
            assert len(computed) == DEPTH


def test_a_replay_that_raises_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = chain(), normal(4, 8)
    capture = capture_of(model, x)
    inputs, replays = [*capture.bind(model, ((x,), {}))], Replays()
    low, mixed = (policy_keeping(capture, high, "autocast") for high in (set[str](), {"3"}))
    with torch.no_grad():
        expected = tensors_in(replays.outputs("x", capture, inputs, low))
        with monkeypatch.context() as patch:
            patch.setattr(Policy, "compute", None)
            with pytest.raises(TypeError):
                replays.outputs("x", capture, inputs, mixed)
        assert_same(tensors_in(replays.outputs("x", capture, inputs, low)), expected)


def test_equal_results_have_equal_bits_and_one_layout() -> None:
    policy = policy_keeping(capture_of(chain(), normal(4, 8)), set(), "cast")
    zeros, nans = torch.zeros(2, 2), torch.full((2, 2), torch.nan)
    assert policy.same(zeros, zeros.clone())
    assert policy.same(nans, nans.clone())
    assert policy.same((zeros, nans), (zeros.clone(), nans.clone()))
    assert not policy.same(zeros, -zeros)
    assert not policy.same(zeros, torch.zeros(2, 2).t())
    assert not policy.same(zeros, zeros.half())
    assert not policy.same((zeros, 1), (zeros, 2))
    assert not policy.same(zeros.to(torch.complex64), zeros.to(torch.complex64))
    assert not policy.same(zeros.to_sparse(), zeros.to_sparse())
