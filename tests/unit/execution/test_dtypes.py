"""The dtypes that an audit reports, against those that other modes see in a run of the patched model."""

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import auditor
from auditor.artefact.applying import apply_plan
from auditor.artefact.base import plan_table
from auditor.capture.capture import capture
from auditor.execution.beside import under_plan
from auditor.execution.execute import Executor, Replay
from auditor.execution.policy import Policy
from auditor.numerics.nodes import tensors_in
from auditor.records import Batch, Capture, Dtypes, Plan
from tests.support.capturing import Function
from tests.support.replaying import Model
from tests.support.small_models import MODELS
from tests.support.subjects import FORMATS, capture_of, normal, seeded, subject_of
from tests.support.two_ways import drawn, everything, plan_of

Seen = list[tuple[str, tuple[str, ...], str]]
"""(operation, dtypes of what it reads, dtype of its result), in execution order."""

MOVES = set(
    "to _to_copy float chunk getitem transpose permute t expand slice select unsqueeze view reshape detach".split()
)
"""Casts, which the patched model has more of, and what torch's modes know under other names, or do not see."""


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CALLS = {"truediv": "div", "interpolate": "upsample_nearest2d", "norm": "linalg_vector_norm"}


class Calls(TorchFunctionMode):
    """What the model's author calls, seen above autograd, autocast and the emulation."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Seen = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.strip("_")
        name = name[1:] if name[:1] == "r" and name[1:] in ("mul", "add", "sub", "div", "truediv") else name
        if name not in ("get", "set") and tensors_in(result):
            read = tuple(sorted({name_of(x.dtype) for x in tensors_in((args, kwargs or {}))}))
            self.seen.append((CALLS.get(name, name), read, name_of(tensors_in(result)[0].dtype)))
        return result


@contextmanager
def on_a_gpu() -> Iterator[None]:
    with auditor.emulate("cuda"), torch.no_grad():
        yield


def run_under(mode: Any, model: nn.Module, batch: Batch, plan: Plan, around: Callable[[], Any]) -> Seen | None:
    """What a mode sees of the patched model; None where that refuses to run."""
    patched = apply_plan(copy.deepcopy(model), plan_table(plan))
    try:
        with around(), mode:
            patched(*batch[0], **batch[1])
    except RuntimeError:
        return None
    return computing(mode.seen)


def computing(seen: Seen) -> Seen:
    return [entry for entry in seen if entry[0] not in MOVES]


def reported(capture: Capture, model: nn.Module, batch: Batch, plan: Plan) -> Seen | None:
    dtypes = under_plan(capture, model, batch, plan).dtypes
    if not dtypes:
        return None
    assert set(dtypes) == set(capture.nodes)
    rows = ((node.op.removeprefix("aten.").split(".")[0], dtypes[name]) for name, node in capture.nodes.items())
    return computing([(op.strip("_"), tuple(sorted(found.inputs)), found.output) for op, found in rows])


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("name", MODELS)
def test_every_operation_is_what_a_mode_sees_in_the_emulated_run_of_the_patched_model(name: str, strategy: str) -> None:
    model, batch = seeded(MODELS[name][0]), (MODELS[name][1], {})
    capture = capture_of(model, *batch[0])
    rnd, ran = random.Random(f"{name} {strategy}"), 0
    labels = [("bf16", everything(capture, "bf16")), *((f, drawn(capture, strategy, f, rnd)) for f in ("fp16", "bf16"))]
    for plan in (plan_of(capture, strategy, fmt, chosen) for fmt, chosen in labels):
        seen = run_under(Calls(), model, batch, plan, on_a_gpu)
        assert reported(capture, model, batch, plan) == seen, plan.scopes
        ran += seen is not None
    assert ran


def dtypes_of(function: Callable[..., Any], strategy: str, *inputs: Tensor) -> dict[str, Dtypes]:
    """With everything in FP16."""
    model = Function(function)
    capture = capture_of(model, *inputs)
    return dict(
        under_plan(capture, model, (inputs, {}), plan_of(capture, strategy, "fp16", everything(capture, "fp16"))).dtypes
    )


def test_a_dtype_argument_decides_what_is_computed_in() -> None:
    found = dtypes_of(lambda x: x.cumsum(-1, dtype=torch.float32), "cast", normal(2, 4))
    assert found == {"cumsum": Dtypes(("float16",), "float32", "float32")}


def test_a_tensor_without_dimensions_gives_way_and_a_truth_does_not_compute() -> None:
    found = dtypes_of(lambda x, s: ((x @ x) * s, (x @ x) > s), "autocast", normal(2, 2), torch.tensor(2.0))
    assert found["mul"] == Dtypes(("float16", "float32"), "float16", "float16")
    assert found["gt"] == Dtypes(("float16", "float32"), "float16", "bool")


# A run that begins from another one gives what it gives from the start, to the bit, and runs what differs alone.


def block() -> nn.Module:
    parts = {"norm": nn.LayerNorm(8), "up": nn.Linear(8, 16), "down": nn.Linear(16, 8)}
    return Model(lambda m, x: x + m.down(torch.softmax(m.up(m.norm(x)), -1)), **parts)


def asking(x: Tensor) -> Tensor:
    """Adds what it chooses by whether autocast is on: nothing else tells its runs apart."""
    low = torch.is_autocast_enabled() and torch.get_autocast_dtype("cuda") is not torch.float32
    return x + (1e-1 if low else 1e-6)


def net() -> nn.Module:
    """Blocks, and a branch that none of them reaches."""

    def forward(m: Any, x: Tensor) -> Tensor:
        side = m.side(x).sum(-1, keepdim=True)
        x = m.asking(x)
        for block in m.blocks:
            x = block(x)
        return m.head(x) + side

    return Model(
        forward,
        blocks=nn.ModuleList(block() for _ in range(4)),
        side=nn.Linear(8, 8),
        head=nn.Linear(8, 4),
        asking=Function(asking),
    )


def under(found: Capture, strategy: str, format: str, kept_wide: set[str]) -> Policy:
    return Policy(found, strategy, lambda owner: "fp32" if owner in kept_wide else format, format)


def begun(found: Capture, flat: list[Any], policy: Policy) -> tuple[Any, Replay]:
    """What a run gives, and the run for others to begin from."""
    values: dict[str, Any] = {}
    result = Executor(found.graph_module, policy, lambda n, value: values.update({n.name: value})).run(*flat)
    return result, Replay(values, policy)


def owners_of(found: Capture, flat: list[Any], policy: Policy, before: Replay) -> set[str]:
    """Modules of the operations that a run computes which begins from another one."""
    ran: set[str] = set()
    Executor(found.graph_module, policy, lambda n, _: ran.add(n.name), before).run(*flat)
    return {node.owner for name, node in found.nodes.items() if name in ran}


@pytest.mark.parametrize("strategy", ["autocast", "cast"])
@pytest.mark.parametrize("format", FORMATS)
def test_any_two_policies_one_from_the_other(strategy: str, format: str) -> None:
    model, x = seeded(net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = found.bind(model, ((x,), {}))
    owners, rnd = sorted({node.owner for node in found.nodes.values()}), random.Random(0)
    with torch.no_grad():
        for number in range(6):
            first, second = ({owner for owner in owners if rnd.random() < 0.4} for _ in range(2))
            if not number:  # two that differ in what the module asks alone
                first, second = second | {"asking"}, second - {"asking"}
            _, before = begun(found, flat, under(found, strategy, format, first))
            policy = under(found, strategy, format, second)
            again = Executor(found.graph_module, policy, before=before).run(*flat)
            (whole,) = Executor(found.graph_module, policy).run(*flat)
            assert again[0].dtype == whole.dtype
            assert torch.equal(again[0], whole)


def test_only_what_differs_is_run() -> None:
    model, x = seeded(net), normal(3, 8)
    found = capture(subject_of(model, x), FORMATS)
    flat = found.bind(model, ((x,), {}))
    same, late = (under(found, "autocast", "bf16", kept_wide) for kept_wide in (set[str](), {"blocks.3.up"}))
    with torch.no_grad():
        (whole,), before = begun(found, flat, under(found, "autocast", "bf16", set()))
        (result,) = Executor(found.graph_module, same, before=before).run(*flat)
        assert torch.equal(result, whole)
        assert owners_of(found, flat, same, before) == set()
        owners = owners_of(found, flat, late, before)
    assert "blocks.3.up" in owners
    assert not owners & {"side", "blocks.0.up", "blocks.2.down", "blocks.3.norm"}
