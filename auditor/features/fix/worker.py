"""The process that runs edited sources: it never ran the user's code itself, and forks a process for every job."""

from __future__ import annotations

import ast
import math
import os
import pickle
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ...capture.source import kind_of, span_of
from ...emulation.emulate import Emulation, scaled_as_on_cuda
from ...emulation.intercept import intercept
from ...emulation.regions import Region
from ...errors import describe
from ...flow import run as run_audit
from ...isolation.isolated import switch
from ...isolation.process import ieee
from ...isolation.run_model import lowered_batch, run_model, stored_in
from ...loading.importer import import_source
from ...loading.state import materialise, upcast_model
from ...numerics.devices import is_native
from ...numerics.entries import over_tensors, tensors_in
from ...numerics.flops import FORMULAS
from ...numerics.formats import FORMATS, format_of, is_low
from ...numerics.metrics import output_error
from ...numerics.nodes import operation_of
from ...plan.costs import traffic_seconds
from ...processes import how_ended
from ...records import Audit, Batch, Plan, ScopeChoice, Span, Subject
from ...resources import table
from ...settings import Settings
from ...verify.loaders import in_hand
from ...verify.worker import build_model
from .overlay import serve
from .places import Sources
from .records import Baseline, Promotion, Run, Standing, Trial
from .steps import StepStanding, rehearse_step

PROMOTIONS, BESIDE = 6, 3
"""Maximum number of lines that a run names as points of promotion, and of low-precision variables for each."""


def main() -> None:
    """Read jobs from standard input and run each in a process of its own; its result is the job's file."""
    sys.dont_write_bytecode = True
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    jobs = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    while True:
        try:
            job = pickle.load(jobs)
        except EOFError:
            return
        if not hasattr(os, "fork"):
            run_job(job)
            return
        if (child := os.fork()) == 0:
            run_job(job)
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if not Path(job["file"]).exists():
            write(Path(job["file"]), f"the process {how_ended(code)}")


def run_job(job: Mapping[str, Any]) -> None:
    """Run one job and write its result; for an exception, a text that begins with the exception."""
    try:
        with serve(job["texts"]):
            result: Any = JOBS[job["kind"]](job)
    except BaseException as error:
        lines = traceback.format_exc().splitlines()
        result = f"{describe(error)}\n" + "\n".join(lines[-6:])
    write(Path(job["file"]), result)


def write(file: Path, result: Any) -> None:
    """Pickle a result; the file appears under its name only when it is complete."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_bytes(pickle.dumps(result))
    unfinished.replace(file)


def load_model(job: Mapping[str, Any]) -> nn.Module:
    """The model that the job's file builds or holds, from the edited source."""
    file, settings = Path(job["model"]), {"seed": job["seed"], "device": job["device"]}
    sys.path[:] = [*dict.fromkeys((*job["path"], *sys.path))]
    os.chdir(job["folder"])
    if file.suffix == ".py":
        sys.argv = [str(file)]  # the user's code must see no arguments
        return build_model(import_source("patched_model", file), settings)
    if job["script"]:
        sys.modules["__main__"] = import_source("__mp_main__", Path(job["script"]))
    model: nn.Module = torch.load(file, weights_only=False)
    switch(model, training=False)
    return model


def prepare(job: Mapping[str, Any]) -> tuple[nn.Module, dict[str, Any]]:
    """The model and the fields of its Subject: batches, held_out and more."""
    model = load_model(job)
    about: dict[str, Any] = torch.load(job["about"], weights_only=False)  # after the model's module: inputs may need it
    if is_native(job["device"]):
        move = partial(torch.Tensor.to, device=job["device"])
        about["batches"] = over_tensors(move, about["batches"])
        about["held_out"] = over_tensors(move, about["held_out"])
    materialise(model, about["batches"][0], job["seed"])
    return model, about


def baseline(job: Mapping[str, Any]) -> Baseline:
    """Run the source as it is, and save the reference outputs for later trials."""
    model, about = prepare(job)
    with upcast_model(Subject(model, **about)):
        return _run_as_it_is(model, about, job)


def _run_as_it_is(model: nn.Module, about: Mapping[str, Any], job: Mapping[str, Any]) -> Baseline:
    tracer = _KindTracer()
    with ieee():
        with tracer:
            run_model(model, about["batches"][0], seed=job["seed"])
        outputs = [run_model(model, batch, seed=job["seed"]) for batch in _all(about)]
        wide = [_in_float64(model, batch, job["seed"]) for batch in _all(about)]
    is_wide = all(x is not None for x in wide)
    reference = wide if is_wide else outputs
    torch.save({"reference": [list(x or ()) for x in reference], "fp32": [list(x) for x in outputs]}, job["reference"])
    trial = _try(model, about, job)
    return Baseline(trial, is_wide, tracer.kinds)


def trial(job: Mapping[str, Any]) -> Trial:
    """Run an edited source in FP32 and, whole, in low precision."""
    model, about = prepare(job)
    with upcast_model(Subject(model, **about)):
        return _try(model, about, job)


def _try(model: nn.Module, about: Mapping[str, Any], job: Mapping[str, Any]) -> Trial:
    """The results on the first batch: the gate, later, uses all inputs."""
    saved = torch.load(job["reference"], weights_only=False)
    batch, seed = about["batches"][0], job["seed"]
    expected = saved["fp32"][0]
    counting = Metering(lenient=True)
    with ieee():
        outputs = run_model(model, batch, seed=seed, around=partial(intercept, counting))
        apart = _largest_distance(saved["reference"][0], outputs)
        most = 1_000 + 3 * counting.seen
        runs: dict[str, Run] = {}
        for name in job["runs"]:
            runs[name] = _run_low(model, batch, expected, name, seed, most, about)
            if not is_better(runs[name], job.get("known", {}).get(name)):
                break  # the run that is worst so far is no better: the others need not run
    return Trial(runs, apart, counting.seconds)


def is_better(run: Run, known: Run | None) -> bool:
    """Whether a run has a smaller error than a known one, or raises later."""
    if known is None:
        return True
    if run.error is None:
        return False
    return known.error is None or run.error < known.error or run.error == 0.0


def gate(job: Mapping[str, Any]) -> Standing:
    """Compare an edited source with the reference on all inputs, and audit it."""
    model, about = prepare(job)
    saved = torch.load(job["reference"], weights_only=False)
    with ieee(), upcast_model(Subject(model, **about)):
        outputs = [run_model(model, batch, seed=job["seed"]) for batch in _all(about)]
    apart = max(map(_largest_distance, saved["reference"], outputs))
    subject = Subject(model, **about)  # without an origin, it is verified in this process, which is fresh
    audit = run_audit(subject, Settings(**job["settings"]))
    return replace(standing_of(audit), distance=apart)


def rehearse(job: Mapping[str, Any]) -> StepStanding:
    """Rehearse the training step of an edited source."""
    sys.path[:] = [*dict.fromkeys((*job["path"], *sys.path))]
    os.chdir(job["folder"])
    return rehearse_step(job)


JOBS: Mapping[str, Callable[[Mapping[str, Any]], Any]] = {
    "baseline": baseline,
    "trial": trial,
    "gate": gate,
    "rehearse": rehearse,
}


def standing_of(audit: Audit) -> Standing:
    """What an audit says of its source."""
    plan = audit.plan
    problems = {(one.rule, one.owner, one.op) for one in audit.findings if one.severity != "info"}
    failing = {name for name, run in audit.baselines.items() if not run.holds}
    return Standing(
        audit.recommended,
        plan.speedup if plan is not None else 1.0,
        plan.measured_error if plan is not None else None,
        frozenset(problems),
        frozenset(failing),
    )


def _all(about: Mapping[str, Any]) -> Sequence[Batch]:
    return (*about["batches"], *about["held_out"])


def _largest_distance(reference: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> float:
    """The largest error of any output, each by itself; inf if their numbers or shapes differ."""
    if len(reference) != len(outputs):
        return math.inf
    try:
        return max((output_error([r], [x.cpu()]) for r, x in zip(reference, outputs, strict=True)), default=0.0)
    except Exception:
        return math.inf


def _in_float64(model: nn.Module, batch: Batch, seed: int) -> list[torch.Tensor] | None:
    """The outputs of the model computed in FP64; None if its code needs FP32."""
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        with stored_in(model, torch.float64):
            return [x.cpu() for x in run_model(model, lowered_batch(batch, torch.float64), seed=seed)]
    except Exception:
        return None
    finally:
        torch.set_default_dtype(default)


def _run_low(
    model: nn.Module,
    batch: Batch,
    expected: Sequence[torch.Tensor],
    name: str,
    seed: int,
    most: int,
    about: Mapping[str, Any],
) -> Run:
    """The model with everything in low precision. name: strategy and format, such as `cast_fp16`."""
    strategy, _, fmt = name.partition("_")
    plan = Plan(name, strategy, fmt, {"": ScopeChoice(fmt)}, upcast=about["upcast"], stored_low=about["stored_low"])
    meter = Metering(most=most)
    tracer = _PromotionTracer()

    @contextmanager
    def around() -> Iterator[None]:
        with intercept(meter), scaled_as_on_cuda():
            yield

    try:
        with in_hand(model, {name: plan}, name) as patched, tracer:
            outputs = run_model(patched, batch, seed=seed, around=around)
        error = output_error(expected, [x.cpu() for x in outputs])
    except Exception as raised:
        return Run(None, meter.seconds, describe(raised), _raised_in(raised), tracer.found, meter.seen)
    return Run(math.inf if math.isnan(error) else error, meter.seconds, "", (), tracer.found, meter.seen)


def _raised_in(error: BaseException) -> tuple[Span, ...]:
    """The user's expressions in the traceback of an error, the innermost first."""
    spans = []
    at = error.__traceback__
    while at is not None:
        code = at.tb_frame.f_code
        if kind_of(code.co_filename) == "own" and (span := span_of(code, at.tb_lasti)) is not None:
            spans.append(span)
        at = at.tb_next
    return tuple(reversed(spans))


class Metering(Emulation):
    """Emulates a GPU, and predicts the time of every operation in the dtypes in which it ran. seconds: their sum."""

    seconds = 0.0
    device = "A100"

    def run_leaf_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """Run an operation, and add its predicted time."""
        result = super().run_leaf_op(op, args, kwargs, region)
        if isinstance(op, torch._ops.OpOverload):
            self.seconds += self._predict(op, args, kwargs, result)
        return result

    def _predict(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> float:
        row = operation_of(op)
        results = tensors_in(result)
        if row.view == "always" or not results:
            return 0.0
        read = () if row.asks_shape else tensors_in((args, kwargs))
        tensors = [x for x in (*read, *results) if x.is_floating_point()]
        moved = sum(x.numel() * x.itemsize for x in tensors)
        formula = FORMULAS.get(row.flops)
        if formula is None:
            return traffic_seconds(moved, self.device)
        try:
            flops = formula(results[0], *args)
        except Exception:  # an overload that the formula does not know
            flops = 0
        peaks = table("plan/devices")[self.device]
        known = format_of(results[0].dtype)
        speed = FORMATS[known.name].speed if known is not None else None
        peak = peaks.get(speed or "", peaks["fp32"])
        return max(flops / (peak * 1e12), traffic_seconds(moved, self.device))


class _KindTracer:
    """In the `with` block, notes what the names in the user's functions stand for."""

    def __init__(self) -> None:
        self.kinds: dict[tuple[str, int, str], str] = {}
        self._sources = Sources()

    def __enter__(self) -> _KindTracer:
        sys.settrace(self._call)
        return self

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if kind_of(frame.f_code.co_filename) != "own":
            return None
        self._look(frame)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        self._look(frame)
        return self._line

    def _look(self, frame: FrameType) -> None:
        code = frame.f_code
        shared = {name: frame.f_globals.get(name) for name in code.co_names}
        tensors = {name: value for name, value in shared.items() if isinstance(value, torch.Tensor)}
        for name, value in (tensors | frame.f_locals).items():
            key = (code.co_filename, code.co_firstlineno, name)
            if isinstance(value, torch.Tensor):
                self.kinds[key] = _kind_of_tensor(value)
            elif isinstance(value, nn.Module) and key not in self.kinds:
                self.kinds[key] = _kind_of_module(value)
                for path, part in _attributes(value):
                    self.kinds[(*key[:2], f"{name}.{path}")] = _kind_of(part)
        self._look_at_long_names(frame)

    def _look_at_long_names(self, frame: FrameType) -> None:
        """Note what names with several parts stand for, such as `self.block.weight` and `batch["x"]`."""
        code = frame.f_code
        source = self._sources.of(code.co_filename)
        for node in source.long_names_in(code.co_firstlineno) if source is not None else ():
            key = (code.co_filename, code.co_firstlineno, ast.unparse(node))
            if key not in self.kinds and (kind := _kind_of(_value_of(node, frame))):
                self.kinds[key] = kind


def _value_of(node: ast.expr, frame: FrameType) -> Any:
    """The value of a name with several parts, without running code of the user's; None if that would be needed."""
    if isinstance(node, ast.Name):
        return frame.f_locals.get(node.id, frame.f_globals.get(node.id))
    if isinstance(node, ast.Attribute):
        around = _value_of(node.value, frame)
        if isinstance(around, nn.Module):
            parts = (around._parameters, around._buffers, around._modules, vars(around))
            return next((each[node.attr] for each in parts if node.attr in each), None)
        return getattr(around, "__dict__", {}).get(node.attr)
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        around, index = _value_of(node.value, frame), node.slice.value
        if isinstance(around, dict):
            return dict.get(around, index)  # a dict of the user's may compute what it lacks
        is_list = isinstance(around, list | tuple | nn.ModuleList | nn.Sequential)
        if is_list and isinstance(index, int) and index < len(around):
            return around[index]
    return None


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """(name, value) of a module's tensors and modules, and dotted names of those of its modules."""
    tensors = {**module._parameters, **module._buffers, **vars(module)}
    yield from ((name, value) for name, value in tensors.items() if isinstance(value, torch.Tensor))
    for name, child in module._modules.items():
        if child is not None:
            yield name, child
            own = islice(((key, x) for key, x in child.named_parameters(recurse=False)), 4)
            yield from ((f"{name}.{key}", x) for key, x in own)


def _kind_of(value: Any) -> str:
    """The kind of a tensor or module; "" for everything else."""
    if isinstance(value, torch.Tensor):
        return _kind_of_tensor(value)
    return _kind_of_module(value) if isinstance(value, nn.Module) else ""


def _kind_of_tensor(value: torch.Tensor) -> str:
    return "float" if value.is_floating_point() else "int"


def _kind_of_module(value: nn.Module) -> str:
    return "layer" if isinstance(getattr(value, "weight", None), torch.Tensor) else "module"


class _PromotionTracer:
    """Notes the lines of the user's functions after which a variable is FP32 while another is in low precision."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, int], Promotion] = {}
        self._before: dict[int, tuple[dict[str, torch.dtype], int]] = {}

    @property
    def found(self) -> tuple[Promotion, ...]:
        """These lines, in the order in which they ran."""
        return tuple(self._found.values())[:PROMOTIONS]

    def __enter__(self) -> None:
        sys.settrace(self._call)

    def __exit__(self, *raised: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if kind_of(frame.f_code.co_filename) != "own":
            return None
        self._before[id(frame)] = (_dtypes_in(frame), frame.f_lineno)
        return self._line

    def _line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event not in ("line", "return"):
            return self._line
        known, line = self._before.get(id(frame), ({}, frame.f_lineno))
        dtypes = _dtypes_in(frame)
        returned = {}
        if event == "return" and isinstance(argument, torch.Tensor) and argument.is_floating_point():
            returned = {"return": argument.dtype}
        low = tuple(name for name, dtype in dtypes.items() if is_low(dtype))
        wide = [
            name for name, dtype in (dtypes | returned).items() if dtype == torch.float32 and known.get(name) != dtype
        ]
        if wide and low:
            place = (frame.f_code.co_filename, line)
            self._found.setdefault(place, Promotion(*place, low[::-1][:BESIDE]))
        self._before[id(frame)] = (dtypes, frame.f_lineno)
        return self._line


def _dtypes_in(frame: FrameType) -> dict[str, torch.dtype]:
    """{variable: its dtype} of the floating-point tensors in a frame."""
    values = {name: value for name, value in frame.f_locals.items() if isinstance(value, torch.Tensor)}
    return {name: value.dtype for name, value in values.items() if value.is_floating_point()}
