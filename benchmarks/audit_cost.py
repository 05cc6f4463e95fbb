"""What an audit costs in forwards of the model, as a user runs it and stage by stage, beside brute force; its memory beside a
training step's."""

from __future__ import annotations

import argparse
import compileall
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from auditor.capture.capture import capture
from auditor.flow import run
from auditor.isolation import in_eval
from auditor.loading import from_object, load
from auditor.measure.attribute import first_order
from auditor.measure.measure import Measurement, measure
from auditor.measure.uncertain import measure_uncertain
from auditor.records import Capture
from auditor.settings import Settings
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, peak_mib, report, seconds
from benchmarks.subjects import MODELS, SMALL, build
from tests.support.brute_force import true_isolated

FORMATS = ("fp16", "bf16")
ROOT = Path(__file__).resolve().parents[1]
SAMPLE = 5
"""Runs of brute force that are timed, spread over the graph; the rest would take as long each."""

COLUMNS = {
    "model": "",
    "nodes": "d",
    "forward s": ".3f",
    "audit x": ".1f",
    "audit s": ".1f",
    "wall s": ".1f",
    "beyond imports s": ".1f",
    "quick share": ".2f",
    "quick share beyond imports": ".2f",
    "measure x": ".1f",
    "attribute x": ".1f",
    "both x": ".1f",
    "brute force x": ".0f",
    "capture s": ".1f",
    "baseline s": ".1f",
    "plan s": ".1f",
    "follow s": ".1f",
    "peak MiB": ".0f",
    "training MiB": ".0f",
    "memory x": ".2f",
}


AS_USED = {
    "model": "",
    "forward s": ".4f",
    "audit s": ".2f",
    "audit x": ".1f",
    "wall s": ".2f",
    "beyond imports s": ".2f",
    "quick s": ".2f",
    "quick share": ".2f",
    "quick share beyond imports": ".2f",
    "load s": ".2f",
    "capture s": ".2f",
    "measure s": ".2f",
    "classify s": ".2f",
    "baseline s": ".2f",
    "plan s": ".2f",
    "follow s": ".2f",
    "command peak MiB": ".0f",
    "training MiB": ".0f",
    "memory x": ".2f",
}


def core(name: str) -> Row:
    """Capture, measure and attribute, with a forward timed before and after them in the same process."""
    model, args = build(name)
    subject = from_object(model, args)
    before = forward_seconds(model, args)
    loaded = peak_mib()
    row: Row = {"model": name, "loaded MiB": loaded}
    with in_eval(model):
        captures: list[Capture] = []
        measured: list[Measurement] = []
        row["capture s"] = seconds(lambda: captures.append(capture(subject, FORMATS)))
        (captured,) = captures
        row["measure s"] = seconds(lambda: measured.append(measure(captured, model, subject.batches[0], FORMATS)))
        row["attribute s"] = seconds(lambda: measure_uncertain(measured[0], first_order(measured[0])))
    row["peak MiB"] = peak_mib()
    row["forward s"] = (before + forward_seconds(model, args)) / 2
    floating = [node.name for node in captured.nodes.values() if node.floating]
    sample = floating[:: max(1, len(floating) // SAMPLE)]
    once = statistics.mean(seconds(lambda name=name: true_isolated(measured[0], name, "bf16")) for name in sample)
    row["brute force s"] = once * len(floating) * len(FORMATS)
    row["nodes"] = len(captured.nodes)
    return row


def spent() -> float:
    """Processor seconds of this process and of those it started that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


@dataclass
class StageClock:
    """A progress callback that adds up the processor time between the first words of two stages."""

    by_stage: dict[str, float] = field(default_factory=dict)
    stage: str = "load"
    since: float = field(default_factory=spent)

    def __call__(self, stage: str, detail: str, done: int, total: int) -> None:
        now = spent()
        self.by_stage[self.stage] = self.by_stage.get(self.stage, 0.0) + now - self.since
        self.stage, self.since = stage, now


SOURCE = """{imports}
from benchmarks.subjects import arguments, build
def get_model(): return build({name!r})[0]
def example_inputs(): return arguments({name!r})
"""


IMPORTS = {
    "gpt2": "from transformers import GPT2Config, GPT2LMHeadModel",
    "tiny_bert": "from transformers import BertConfig, BertModel",
    "tiny_albert": "from transformers import AlbertConfig, AlbertModel",
    **dict.fromkeys(
        ("resnet50", "vit_base_patch16_224", "convnext_tiny", "mobilenetv3_small_100", "resnet18"), "import timm"
    ),
}
"""What a user's file of such a model begins with."""

STUBS = ROOT / "tests" / "stubs"
"""Lets timm and transformers import a torchvision without compiled operators."""


@contextmanager
def model_file(name: str) -> Iterator[Path]:
    """The model as a user has it: a file."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.py")
        file.write_text(SOURCE.format(name=name, imports=IMPORTS.get(name, "import torch")), encoding="utf-8")
        yield file


def whole(name: str) -> Row:
    """All stages of an audit of a file, which also makes, patches and verifies four plans in a process of its own."""
    with model_file(name) as file:
        subject, clock = load(str(file)), StageClock()
        audit = run(subject, Settings(command="", device="cpu", progress=clock))
        clock("end", "", 0, 0)
    return {"seconds": clock.by_stage, "recommended": audit.recommended, "peak MiB": peak_mib()}


def command(name: str) -> Row:
    """`python -m auditor FILE` from start to finish, all its processes and the peak of the largest, stages in wall time; beside it
    `--quick`, twice what importing torch takes, and forwards before and after."""
    model, args = build(name)
    compileall.compile_dir(ROOT / "auditor", quiet=1)  # as pip leaves a package that it installs
    forwards = [forward_seconds(model, args)]
    since = time.monotonic()
    whole, stages = _command(name)
    wall = time.monotonic() - since
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    quick, _ = _command(name, "--quick")
    forwards.append(forward_seconds(model, args))
    started = spent()
    for _ in range(2):
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
    imports, forward = spent() - started, statistics.mean(forwards)
    return {
        "forward s": forward,
        "audit s": whole,
        "audit x": whole / forward,
        "wall s": wall,
        "beyond imports s": whole - imports,
        "quick s": quick,
        "quick share": quick / whole,
        "quick share beyond imports": (quick - imports) / (whole - imports),
        "stages": stages,
        "command peak MiB": peak,
    }


def _command(name: str, *options: str) -> tuple[float, dict[str, float]]:
    """Processor seconds of an audit of a file, and the seconds that each of its stages took."""
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(STUBS), os.environ.get("PYTHONPATH", "")]),
    }
    started = spent()
    with model_file(name) as file:
        words = [sys.executable, "-m", "auditor", str(file), "--device", "cpu", "-q", "--fail-on", "never", *options]
        out = file.parent / "out"
        done = subprocess.run([*words, "--out", str(out)], env=environment, capture_output=True, text=True, check=False)
        taken = spent() - started
        if done.returncode:
            raise SystemExit(done.stderr[-4000:])
        plan = json.loads((out / "plan.json").read_text(encoding="utf-8"))
    return taken, plan["environment"]["seconds"]


def training(name: str) -> Row:
    """One step of plain SGD, the least that training can take."""
    model, args = build(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step() -> None:
        outputs = model(*args)
        outputs = outputs if isinstance(outputs, torch.Tensor) else outputs[0]
        outputs.float().square().mean().backward()
        optimizer.step()

    loaded = peak_mib()
    return {"loaded MiB": loaded, "step s": seconds(step), "peak MiB": peak_mib()}


def combined(name: str) -> Row:
    """The measurements of one model, each from a process of its own."""
    row, everything, step, called = (
        in_process_of_its_own("benchmarks.audit_cost", "--measure", kind, name) for kind in MEASUREMENTS
    )
    forward = row["forward s"]
    stages = {f"{stage} s": elapsed for stage, elapsed in everything["seconds"].items()}
    return {
        **stages,
        **row,
        **called,
        "measure x": row["measure s"] / forward,
        "attribute x": row["attribute s"] / forward,
        "both x": (row["measure s"] + row["attribute s"]) / forward,
        "brute force x": row["brute force s"] / forward,
        "whole": everything,
        "training": step,
        "training MiB": step["peak MiB"],
        "memory x": row["peak MiB"] / step["peak MiB"],
        "memory x above the model": (row["peak MiB"] - row["loaded MiB"]) / (step["peak MiB"] - step["loaded MiB"]),
    }


def as_used(name: str) -> Row:
    """The command beside one step of training, each from a process of its own."""
    called, step = (
        in_process_of_its_own("benchmarks.audit_cost", "--measure", kind, name) for kind in ("command", "training")
    )
    stages = {f"{stage} s": elapsed for stage, elapsed in called["stages"].items()}
    memory = called["command peak MiB"] / step["peak MiB"]
    return {"model": name, **stages, **called, "training MiB": step["peak MiB"], "memory x": memory}


MEASUREMENTS = {"core": core, "whole": whole, "training": training, "command": command}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them if left out", default=[*MODELS, *SMALL])
    parser.add_argument("--measure", choices=MEASUREMENTS, help="one measurement of one model, as JSON")
    parser.add_argument("--as-used", action="store_true", help="only the whole command, beside a step of training")
    options = parser.parse_args()
    if options.as_used:
        report("audit_cost_whole", [as_used(name) for name in options.models], AS_USED)
    elif options.measure:
        print(json.dumps(MEASUREMENTS[options.measure](options.models[0])))
    else:
        report("audit_cost", [combined(name) for name in options.models], COLUMNS)


if __name__ == "__main__":
    main()
