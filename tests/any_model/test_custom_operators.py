"""Operators of the user's own, whatever they refuse or raise: such a node is FP32 with the reason, the rest is audited."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor import Audit
from tests.any_model.holding import drawn, held
from tests.support.replaying import Model
from tests.support.thinned import thinned


class Own(Exception):
    pass


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[str, Callable[[], BaseException]] = {
    "assertion": AssertionError,
    "lines": lambda: ValueError("first\nsecond\nthird"),
    "speechless": Speechless,
    "stop": StopIteration,
    "exit": lambda: SystemExit(3),
}


def refusing(name: str, raised: Callable[[], BaseException]) -> Any:
    """An operator that takes FP32 alone, without a derivative and without a kernel for fake tensors."""

    @torch.library.custom_op(f"any_model::refuses_{name}", mutates_args=())
    def operator(x: Tensor) -> Tensor:
        if x.dtype is not torch.float32:
            raise raised()
        return x.sin()

    return operator


REFUSING = {name: refusing(name, raised) for name, raised in RAISED.items()}


@torch.library.custom_op("any_model::writes", mutates_args=("out",))
def writes(x: Tensor, out: Tensor) -> Tensor:
    out.copy_(2 * x)
    return x.sum()


@torch.library.custom_op("any_model::derived", mutates_args=())
def derived(x: Tensor) -> Tensor:
    return x.tanh()


def _raise(*args: Any) -> Any:
    raise Own("no way back\nat all")


derived.register_autograd(_raise)


@torch.library.custom_op("any_model::set_up", mutates_args=())
def set_up(x: Tensor) -> Tensor:
    return x.tanh()


set_up.register_autograd(lambda ctx, g: g, setup_context=_raise)


@torch.library.custom_op("any_model::shrinks", mutates_args=())
def shrinks(x: Tensor) -> Tensor:
    return x.tanh() if x.dtype is torch.float32 else x.tanh()[:, :5]


@torch.library.custom_op("any_model::words", mutates_args=())
def words(x: Tensor) -> Tensor:
    return x.tanh() if x.dtype is torch.float32 else "words"  # type: ignore[return-value]


_LIBRARY = torch.library.Library("any_model_old", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define("doubled(Tensor(a!) x) -> Tensor(a!)")
_LIBRARY.impl("doubled", lambda x: x.mul_(2), "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.define("through_numpy(Tensor x) -> Tensor")
_LIBRARY.impl("through_numpy", lambda x: torch.from_numpy(x.detach().numpy().copy()), "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.define("maybe(Tensor x, *, Tensor? y=None) -> (Tensor, Tensor?)")
_LIBRARY.impl("maybe", lambda x, *, y=None: (x + 1, None), "CPU")  # type: ignore[no-untyped-call]
_LIBRARY.define("lists(Tensor[] xs) -> (Tensor, Tensor[])")
_LIBRARY.impl("lists", lambda xs: (xs[0] + 1, [x * 2 for x in xs]), "CPU")  # type: ignore[no-untyped-call]
OLD = torch.ops.any_model_old


def written(x: Tensor) -> Tensor:
    out = torch.empty_like(x)
    total = writes(x, out)
    return out + total


def audited(operator: Callable[[Tensor], Any]) -> Audit:
    """Of the operator between two layers."""

    def build() -> Model:
        parts = {"first": nn.Linear(16, 32), "last": nn.Linear(32, 8)}
        return Model(lambda m, x: m.last(operator(torch.relu(m.first(x)))), **parts)

    return held(drawn(build, 4, 16))


@pytest.mark.parametrize("name", thinned(RAISED, 2))
def test_what_refuses_half_stays_in_fp32_with_the_reason(name: str) -> None:
    audit = audited(REFUSING[name])
    (node,) = [report for report in audit.nodes if "refuses" in report.node.op]
    reasons = {error.unsupported for error in node.errors.values()}
    said = RAISED[name]()
    words = "" if name == "speechless" else str(said)
    assert reasons == {f"refuses_{name}: {words.splitlines()[0] if words else type(said).__name__}"}
    assert all(plan.is_verified and plan.low_precision_flops > 0.6 for plan in audit.plans.values())


@pytest.mark.parametrize(
    "operator",
    [
        written,
        derived,
        set_up,
        lambda x: OLD.doubled(1 * x),
        OLD.through_numpy,
        lambda x: OLD.maybe(x)[0],
        lambda x: OLD.lists([x, x.exp()])[1][1],
    ],
    ids=["writes", "backward", "setup", "doubled", "numpy", "maybe", "lists"],
)
def test_operators_of_every_form(operator: Callable[[Tensor], Any]) -> None:
    audit = audited(operator)
    assert audit.plans["autocast_fp16"].low_precision_flops == 1


@pytest.mark.parametrize("operator", [shrinks, words], ids=["another shape", "no tensor"])
def test_what_gives_something_else_in_half(operator: Callable[[Tensor], Any]) -> None:
    audit = audited(operator)
    (node,) = [report for report in audit.nodes if report.node.op.startswith("any_model.")]
    assert all(verdict.verdict == "unsafe" for verdict in node.verdicts.values())
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.6
