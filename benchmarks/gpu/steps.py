"""The steps, in the order in which they say most: each is a list of rows, made one by one, so that it can be cut short and go on."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import re
import subprocess
import sys
import unittest
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from benchmarks.gpu.machine import ROOT

Row = dict[str, Any]
Items = Iterator[tuple[str, Callable[[], Row]]]


@dataclass(frozen=True)
class Asked:
    """device: what runs natively. small: a few small rows of every step, to try the command out. cases: files to audit, beside those of the repository."""

    device: str
    small: bool = False
    cases: str = ""


@dataclass(frozen=True)
class Step:
    """limit: seconds. items: names of its rows, and what makes each. environment: set for its process."""

    name: str
    question: str
    limit: int
    items: Callable[[Asked], Items]
    environment: Mapping[str, str] = field(default_factory=dict)


UNIT = ("capture", "execution", "isolation", "measure", "numerics", "training")


def tests(asked: Asked) -> Items:
    """Tests of the rooms that compute, with the GPU at hand, and those that need one."""
    groups = {room: [f"tests/unit/{room}"] for room in UNIT} | {"gpu": ["tests/gpu", "-m", "gpu"]}
    if asked.small:
        groups = {"nodes": ["tests/unit/numerics/test_nodes.py"]}
    for name, arguments in groups.items():
        yield name, lambda arguments=arguments: _pytest(arguments)  # type: ignore[misc]


def _pytest(arguments: list[str]) -> Row:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line", "-rf", *arguments]
    if "-m" not in arguments:
        command += ["-m", "not slow"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    counts = {
        word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", done.stdout[-400:])
    }
    failures = [line[:300] for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    said = {} if counts else {"said": (done.stdout + done.stderr)[-400:]}
    return {"code": done.returncode, **counts, "failures": failures[:50], **said}


FEW = 8


def published(asked: Asked) -> Items:
    """Results of other GPUs that were published, natively and emulated."""
    from tests.emulation.published import ROWS

    for row in ROWS[:FEW] if asked.small else ROWS:
        yield row.id, lambda row=row: _published(row, asked.device)  # type: ignore[misc]


def _published(row: Any, device: str) -> Row:
    from tests.emulation.published import Raised, agree, emulated_result, matches, native_result, short

    native = native_result(row, device)
    emulated = emulated_result(row)
    native_text = f"raises {native.message[:160]}" if isinstance(native, Raised) else short(native)  # type: ignore[attr-defined]
    return {
        "native": native_text,
        "emulated": short(emulated),
        "published": short(row.printed),
        "native equals emulated": agree(row, native, emulated),
        "native equals published": matches(row, native),
    }


def examples(asked: Asked) -> Items:
    """Every example, natively and emulated."""
    from benchmarks.gpu.both import compared, example

    names = sorted(path.name for path in (ROOT / "examples").glob("0*.py"))
    for name in names[-1:] if asked.small else names:
        yield name, lambda name=name: compared(example(name), asked.device, **_less(asked))  # type: ignore[misc]
    for path in sorted(Path(asked.cases).glob("*.py")) if asked.cases else ():
        yield path.name, lambda path=path: _case_file(path, asked)  # type: ignore[misc]


def one_thread(asked: Asked) -> Items:
    """One example with one thread, which is what torchrun sets."""
    from benchmarks.gpu.both import compared, example

    name = "07_vae_decoder.py" if asked.small else "04_digits_resnet.py"
    yield name, lambda: {"threads": torch.get_num_threads(), **compared(example(name), asked.device, **_less(asked))}


def _case_file(path: Path, asked: Asked) -> Row:
    from auditor.loading import load
    from benchmarks.gpu.both import compared

    return compared(load(str(path)), asked.device, **_less(asked))


def _less(asked: Asked) -> Row:
    return {"formats": ("fp16",), "strategies": ("autocast",)} if asked.small else {}


def ratios(asked: Asked) -> Items:
    """Emulated over native local error, operation by operation."""
    from benchmarks.attribution import MODELS, specimen
    from tests.pretend_gpu.models import MODELS as TINY
    from tests.pretend_gpu.models import made

    if asked.small:
        for name in list(TINY)[:2]:
            yield name, lambda name=name: _ratio(*made(name), {}, asked.device)  # type: ignore[misc]
        return
    for name in MODELS:

        def row(name: str = name) -> Row:
            chosen = specimen(name)
            return _ratio(chosen.model, chosen.args, chosen.kwargs, asked.device)

        yield name, row


def _ratio(model: nn.Module, args: tuple[Any, ...], kwargs: Row, device: str) -> Row:
    from auditor.capture.capture import capture
    from auditor.isolation.process import ieee
    from auditor.measure.measure import measure
    from auditor.records import NodeError, Subject
    from benchmarks.gpu.both import ratios_of, spread

    def errors(where: str) -> dict[str, dict[str, NodeError]]:
        twin = copy.deepcopy(model).to(where)
        batch = pytree.tree_map_only(torch.Tensor, lambda x: x.to(where), (args, kwargs))
        with ieee():
            captured = capture(Subject(twin, (batch,), "model", "model", "benchmark", "benchmark"), ("fp16", "bf16"))
            found = measure(captured, twin, batch, ("fp16", "bf16")).errors
        return {fmt: {node: by_format[fmt] for node, by_format in found.items()} for fmt in ("fp16", "bf16")}

    ours, theirs = errors("cpu"), errors(device)
    return {"ratios": {fmt: spread(ratios_of(ours[fmt], theirs[fmt])) for fmt in ours}}


def corpus(asked: Asked) -> Items:
    """Whether the known failures happen on the device, and their twins hold there."""
    from tests.corpus.catalogue import CASES, DTYPES, plainly

    def held(case: Any, build: Any, fmt: str) -> bool | str:
        model, inputs = build()
        reference = plainly(model, inputs, "fp32", case.mode)
        there = pytree.tree_map_only(torch.Tensor, lambda x: x.to(asked.device), inputs)
        try:
            low = plainly(model.to(asked.device), there, fmt, case.mode)
        except (RuntimeError, NotImplementedError) as error:
            return f"raises {str(error).splitlines()[0][:160]}"
        return bool(case.distance(reference, [x.cpu() for x in low]) <= case.tolerance)

    for case in CASES[:4] if asked.small else CASES:
        for fmt in (fmt for fmt in case.formats if fmt in DTYPES):

            def row(case: Any = case, fmt: str = fmt) -> Row:
                return {"holds": held(case, case.build, fmt), "twin holds": held(case, case.twin, fmt)}

            yield f"{case.name} in {fmt}", row


def architectures(asked: Asked) -> Items:
    """Public architectures, natively and emulated."""
    from benchmarks.gpu.both import compared
    from tests.architectures.zoo import ZOO
    from tests.pretend_gpu.models import architecture
    from tests.support.subjects import subject_of

    for name in ["unet"] if asked.small else [*ZOO, "convnext", "unet"]:

        def row(name: str = name) -> Row:
            chosen = architecture(name)
            return compared(subject_of(chosen.model, *chosen.args, **chosen.kwargs), asked.device, **_less(asked))

        yield name, row


def operations(asked: Asked) -> Items:
    """Every operation of OpInfo in both formats: does the device refuse what the emulation refuses?"""
    op_db = _op_db()
    some = [op for op in op_db if op.name in ("add", "exp", "cdist", "softmax", "nn.functional.linear")]
    for op in some if asked.small else op_db:
        for fmt, dtype in (("fp16", torch.float16), ("bf16", torch.bfloat16)):
            name = f"{op.name} {op.variant_test_name}".strip()
            yield f"{name} in {fmt}", lambda op=op, dtype=dtype: _operation(op, dtype, asked.device)  # type: ignore[misc]


def _op_db() -> list[Any]:
    """PyTorch's own table of operations; the package of its tests that it imports has no part in that."""
    if importlib.util.find_spec("expecttest") is None:
        stub: Any = ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.common_methods_invocations import op_db

    return list(op_db)


SAMPLES = 3


def _operation(op: Any, dtype: torch.dtype, device: str) -> Row:
    """What the device and its emulation do with the first samples that FP32 takes: None where they run, else what is said."""
    import auditor

    wide = [sample for _, sample in zip(range(SAMPLES), op.sample_inputs("cpu", torch.float32), strict=False)]
    natively, emulated = [], []
    for sample in wide:
        low = sample.transform(lambda x: x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x)
        there = low.transform(lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
        natively.append(_said(lambda there=there: op(there.input, *there.args, **there.kwargs)))  # type: ignore[misc]
        with auditor.emulate():
            emulated.append(_said(lambda low=low: op(low.input, *low.args, **low.kwargs)))  # type: ignore[misc]
    agree = [(a is None) == (b is None) for a, b in zip(natively, emulated, strict=True)]
    listed = dtype in op.dtypesIfCUDA
    apart = next(((a, b) for a, b, same in zip(natively, emulated, agree, strict=True) if not same), None)
    return {"samples": len(wide), "agree": all(agree), "listed by OpInfo": listed, "native, emulated": apart}


def _said(call: Callable[[], object]) -> str | None:
    try:
        with torch.no_grad():
            call()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:160] if str(error) else ''}"
    return None


def speed(asked: Asked) -> Items:
    """Measured time and memory of every plan, beside the predicted speed-up."""
    from auditor.flow import run
    from benchmarks.gpu.both import example, options

    names = sorted(path.name for path in (ROOT / "examples").glob("0*.py"))
    for name in names[-1:] if asked.small else names:

        def row(name: str = name) -> Row:
            audit = run(example(name), options(asked.device, measure_time=True, **_less(asked)))
            timing = getattr(audit, "timing", None)
            plans = {
                key: {"predicted": plan.predicted_speedup, "measured": _plain(getattr(plan, "timed", None))}
                for key, plan in audit.plans.items()
            }
            return {"timing": _plain(timing), "plans": plans}

        yield name, row


def _plain(record: Any) -> Any:
    return dataclasses.asdict(record) if dataclasses.is_dataclass(record) and not isinstance(record, type) else record


STEPS = (
    Step("tests", "Do the tests of what computes pass with a GPU at hand?", 240, tests),
    Step("published", "Does the GPU print what others published, and what the emulation gives?", 120, published),
    Step("examples", "Does every example come to the same natively?", 360, examples),
    Step("one_thread", "And with one thread?", 120, one_thread, {"OMP_NUM_THREADS": "1"}),
    Step("ratios", "How near are emulated errors to native ones?", 180, ratios),
    Step(
        "ratios_without_tf32",
        "The same where the driver itself is kept from TF32.",
        180,
        ratios,
        {"NVIDIA_TF32_OVERRIDE": "0"},
    ),
    Step("corpus", "Do the known failures happen for real?", 180, corpus),
    Step("architectures", "Do architectures come to the same natively?", 360, architectures),
    Step("operations", "Does the GPU refuse what the tables say?", 300, operations),
    Step("speed", "How fast are the plans, and how much memory do they take?", 420, speed),
)

BY_NAME = {step.name: step for step in STEPS}
