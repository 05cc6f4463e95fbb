"""An operation that raises, at every call of an audit in turn: the audit ends, the rest of it is intact, nothing is swallowed."""

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.errors import AuditorError
from auditor.records import Audit
from tests.any_model.holding import drawn, held, tensors_of
from tests.support.refusing import refused
from tests.support.replaying import Model, assert_same, linear
from tests.support.subjects import normal

X = normal(4, 8)


class Broken(Exception):
    """A class that nobody knows."""


class Ended(BaseException):
    """No Exception: nothing that handles errors may keep it."""


@dataclass
class Faults:
    """When the operation raises, and what it saw. stages: of every call, in order."""

    at: int | None = None
    error: BaseException | None = None
    when: Callable[[Tensor], bool] = lambda x: False
    backwards: bool = False
    stages: list[str] = field(default_factory=list)
    stage: str = "load"

    def called(self, x: Tensor) -> None:
        self.stages.append(self.stage)
        if self.error is not None and (len(self.stages) == self.at or self.when(x)):
            raise self.error

    def heard(self, stage: str, *_: Any) -> None:
        self.stage = stage


_now = [Faults()]


@torch.library.custom_op("faults::tanh", mutates_args=())
def tanh(x: Tensor) -> Tensor:
    _now[0].called(x)
    return x.tanh()


def _backward(ctx: Any, gradient: Tensor) -> Tensor:
    faults = _now[0]
    if faults.backwards and faults.error is not None:
        raise faults.error
    (y,) = ctx.saved_tensors
    return gradient * (1 - y * y)


tanh.register_autograd(_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))


def net() -> nn.Module:
    """Flagged nodes that lie together, so that regions are run too."""
    return Model(lambda m, x: m.last(tanh(m.first(x))), first=linear(8, 8), last=linear(8, 8, seed=1))


@pytest.fixture(autouse=True)
def _no_faults_left() -> Iterator[None]:
    yield
    _now[0] = Faults()


def audited(faults: Faults, **options: Any) -> Audit:
    """The audit under faults; model and inputs are then what they were, however it ends."""
    _now[0] = faults
    model, x = net().eval(), X.clone()
    before = copy.deepcopy(model)
    asked = {"formats": ("fp16",), "strategies": ("autocast",), **options}
    try:
        return auditor.audit(model, x, device="cpu", progress=faults.heard, **asked)
    finally:
        assert_same([*tensors_of(model), x], [*tensors_of(before), X])


def verdicts(audit: Audit) -> dict[str, str]:
    return {report.node.name: report.verdicts["fp16"].verdict for report in audit.nodes}


def reasons(audit: Audit) -> str:
    return " ".join(report.verdicts["fp16"].reason for report in audit.nodes if "tanh" in report.node.op)


def at_every_call(**options: Any) -> Counter[tuple[str, str]]:
    """{(stage of the call, how the audit ended)}; where it ends well, all other nodes are judged as without the fault."""
    sound = Faults()
    expected, found = verdicts(audited(sound, **options)), Counter[tuple[str, str]]()
    for call in range(1, len(sound.stages) + 1):
        faults = Faults(at=call, error=Broken("in a word"))
        try:
            audit = audited(faults, **options)
        except AuditorError as error:
            if "in a word" not in str(error):
                raise
            found[sound.stages[call - 1], error.slug] += 1
            continue
        assert {**verdicts(audit), "tanh": ""} == {**expected, "tanh": ""}
        told = "in a word" in reasons(audit)
        found[sound.stages[call - 1], "told" if told else "ended"] += 1
    return found


IN_FP32 = {
    ("load", "forward-raises"): 1,
    ("capture", "capture-failed"): 2,  # the run that is recorded, and the graph held against it
}
"""Calls at which the FP32 model itself raises, and nothing is left to hold a low run against."""


def test_a_call_that_raises_ends_no_audit_that_can_go_on() -> None:
    found = at_every_call(max_error=1e-4)
    assert {stage for stage, _ in found} >= {"load", "capture", "measure", "baseline", "plan"}
    assert {key for key in found if key[1] not in ("told", "ended")} <= IN_FP32.keys()
    assert found["measure", "told"]
    assert {key: found[key] for key in IN_FP32} == IN_FP32


def test_one_that_refuses_gradients_is_measured_without() -> None:
    refusing = Faults(error=Broken("in a word"), when=lambda x: torch.is_grad_enabled() or x.requires_grad)
    found, expected = audited(refusing, max_error=0.1), audited(Faults(), max_error=0.1)
    assert set(verdicts(found)) == set(verdicts(expected))
    assert {name: plan.measured_error for name, plan in found.plans.items()}


def test_a_derivative_that_raises_is_done_without() -> None:
    found, expected = audited(Faults(error=Broken("in a word"), backwards=True)), audited(Faults())
    assert verdicts(found).keys() == verdicts(expected).keys()
    said = {n: p.measured_error for n, p in expected.plans.items()}
    assert {n: p.measured_error for n, p in found.plans.items()} == said


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("in a word"), MemoryError("in a word")])
def test_want_of_memory_ends_the_audit_but_for_a_plan(error: Exception) -> None:
    sound = Faults()
    audited(sound)
    runs_again = len(sound.stages) - sound.stages[::-1].index("measure")  # the last run of that stage
    for call in (sound.stages.index("measure") + 2, runs_again, sound.stages.index("follow") + 1):
        with refused(AuditorError, "out-of-memory", match=f"out of memory in the stage '{sound.stages[call - 1]}'"):
            audited(Faults(at=call, error=error))


def test_no_verdict_where_the_only_plan_s_model_is_out_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    running = __import__("auditor.verify.running", fromlist=["run_model"])

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("in a word")

    monkeypatch.setattr(running, "run_model", full)
    with refused(AuditorError, "no-verdict", match="out of memory, OutOfMemoryError: in a word"):
        audited(Faults())


@pytest.mark.parametrize("error", [KeyboardInterrupt(), Ended(), TimeoutError("in a word")])
def test_what_is_not_about_the_operation_passes_every_stage(error: BaseException) -> None:
    sound = Faults()
    audited(sound)
    for call in sorted({sound.stages.index(stage) + 1 for stage in sound.stages}):
        with pytest.raises(type(error)) as raised:
            audited(Faults(at=call, error=error))
        assert raised.value is error


# Operators of the user's own, whatever they refuse or raise: such a node is FP32 with the reason, the rest is
# audited.


class Speechless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


RAISED: dict[str, Callable[[], BaseException]] = {
    "assertion": AssertionError,
    "runtime": lambda: RuntimeError("in a word"),
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
    raise Broken("no way back\nat all")


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


def audited_with(operator: Callable[[Tensor], Any]) -> Audit:
    """Of the operator between two layers."""

    def build() -> Model:
        parts = {"first": nn.Linear(16, 32), "last": nn.Linear(32, 8)}
        return Model(lambda m, x: m.last(operator(torch.relu(m.first(x)))), **parts)

    return held(drawn(build, 4, 16))


@pytest.mark.parametrize("name", RAISED)
def test_what_refuses_half_stays_in_fp32_with_the_reason(name: str) -> None:
    audit = audited_with(REFUSING[name])
    (node,) = [report for report in audit.nodes if "refuses" in report.node.op]
    raised = RAISED[name]()
    words = "" if name == "speechless" else str(raised)
    said = f"refuses_{name}: {words.splitlines()[0] if words else type(raised).__name__}"
    assert {error.unsupported for error in node.errors.values()} == {said}
    assert all(verdict.verdict == "unsafe" and said in verdict.reason for verdict in node.verdicts.values())
    assert {report.verdicts["fp16"].verdict for report in audit.nodes} > {"unsafe"}
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
    audit = audited_with(operator)
    assert audit.plans["autocast_fp16"].low_precision_flops == 1


@pytest.mark.parametrize("operator", [shrinks, words], ids=["another shape", "no tensor"])
def test_what_gives_something_else_in_half(operator: Callable[[Tensor], Any]) -> None:
    audit = audited_with(operator)
    (node,) = [report for report in audit.nodes if report.node.op.startswith("any_model.")]
    assert all(verdict.verdict == "unsafe" for verdict in node.verdicts.values())
    assert audit.plans["autocast_fp16"].low_precision_flops > 0.6
