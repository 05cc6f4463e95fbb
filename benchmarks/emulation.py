"""Whether a patched model under the emulation answers what its recording answers under the plan, and what an emulated run costs."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from auditor import emulate
from auditor.capture.capture import capture
from auditor.emulation.emulate import Emulation
from auditor.emulation.regions import Region
from auditor.loading import load
from auditor.records import Batch
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, report, seconds
from benchmarks.subjects import gpt
from tests.architectures.zoo import ZOO, specimen
from tests.corpus.catalogue import INFERENCE
from tests.corpus.traps import TRAPS
from tests.support.resisting import MODELS as RESISTING
from tests.support.small_models import MODELS as SMALL
from tests.support.subjects import FORMATS, subject_of
from tests.support.two_ways import difference, drawn, emulated_answer, everything, replayed_answer

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
STRATEGIES = ("autocast", "cast")
DRAWN = 2
CLOSE = 1e-6
REPEATS = 5

Named = Iterator[tuple[str, nn.Module, Batch]]

_CACHE = "a cache leaves modules in an object, past what converts their results; in the recording it passes there"
WHY = {
    "06_value_dependent": "the run takes the path that its low values ask for, and runs the head that only decides on it; "
    "the recording holds the recorded path",
    "deberta_v2": "the limit of a dtype that Python fills in is that of the scope it is read in; the recording knows all-low",
    **dict.fromkeys(("llama", "mixtral", "whisper", "mamba"), _CACHE),
}
"""Why the run is right where the two differ, by what the subject's name begins with."""


def toys() -> Named:
    for name, (kind, inputs) in SMALL.items():
        torch.manual_seed(0)
        yield name, kind().eval(), (inputs, {})
    for name, build in RESISTING.items():
        torch.manual_seed(0)
        model, batch = build()
        yield name, model.eval(), batch


def corpus() -> Named:
    for case in INFERENCE:
        for which in ("build", "twin"):
            model, inputs = getattr(case, which)()
            yield f"{case.name} ({which})", model.eval(), (tuple(inputs), {})
    for trap in TRAPS:
        model, inputs = trap.build()
        yield trap.name, model.eval(), (tuple(inputs), {})


def examples() -> Named:
    for file in sorted(EXAMPLES.glob("0*.py")):
        subject = load(str(file))
        yield file.stem, subject.model.eval(), subject.batches[0]


def architectures() -> Named:
    for name in ZOO:
        found = specimen(name)
        yield name, found.model, (found.args, found.kwargs)


SETS: dict[str, Callable[[], Named]] = {
    "toys": toys,
    "corpus": corpus,
    "examples": examples,
    "architectures": architectures,
}


def agreement(name: str) -> Row:
    """All models of a set under both strategies and formats: everything low, and with scopes that are drawn."""
    row: Row = {"set": name, "models": 0, "runs": 0, "equal": 0, "close": 0, "differ": 0, "differences": []}
    for model_name, model, batch in SETS[name]():
        row["models"] += 1
        captured, rnd = capture(subject_of(model, *batch[0], **batch[1]), FORMATS), random.Random(0)
        for strategy in STRATEGIES:
            for fmt in FORMATS:
                plans = [everything(captured, fmt), *(drawn(captured, strategy, fmt, rnd) for _ in range(DRAWN))]
                for place, labels in enumerate(plans):
                    run = emulated_answer(model, captured, batch, strategy, fmt, labels)
                    replay = replayed_answer(model, captured, batch, strategy, fmt, labels)
                    _count(row, f"{model_name}, {strategy}, {fmt}, {'drawn' if place else 'plain'}", run, replay)
    return row


def _count(row: Row, what: str, run: Any, replay: Any) -> None:
    distance = difference(run, replay)
    row["runs"] += 1
    row["equal" if distance == 0 else "close" if distance <= CLOSE else "differ"] += 1
    if not distance <= CLOSE:
        why = next((reason for name, reason in WHY.items() if what.startswith(name)), "not known")
        said = {"run": run if isinstance(run, str) else "", "replay": replay if isinstance(replay, str) else ""}
        row["differences"].append({"plan": what, "distance": str(distance), "why": why, **said})


class Loop(nn.Module):
    """Three thousand small operations."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(16) / 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(1000):
            x = torch.tanh(x @ self.weight + x)
        return x


def _timm(name: str) -> tuple[nn.Module, tuple[Any, ...]]:
    import timm

    return timm.create_model(name, pretrained=False).eval(), (torch.randn(4, 3, 224, 224),)


TIMED: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "ViT-S/16": lambda: _timm("vit_small_patch16_224"),
    "GPT-2, 6 layers": lambda: gpt(6, 384),
    "MobileNetV3-S": lambda: _timm("mobilenetv3_small_100"),
    "3,000 operations": lambda: (Loop().eval(), (torch.randn(4, 16),)),
}


class _Counting(Emulation):
    count = 0

    def whole(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], region: Region) -> Any:
        """See dispatch.Handler."""
        _Counting.count += 1
        return super().whole(op, args, kwargs, region)


def cost(name: str) -> Row:
    """An emulated forward in FP32, FP16 and BF16 beside a plain one."""
    torch.manual_seed(0)
    model, args = TIMED[name]()
    plain = forward_seconds(model, args)
    row: Row = {"model": name, "operations": _operations(model, args), "forward, ms": plain * 1e3}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        taken = _emulated_seconds(model, args, dtype)
        short = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}[dtype]
        row[f"{short}, forwards"] = taken / plain
        row[f"{short}, ms/op over 2"] = max(0.0, taken - 2 * plain) / row["operations"] * 1e3
    return row


def _operations(model: nn.Module, args: tuple[Any, ...]) -> int:
    from auditor.emulation.intercept import intercept

    with torch.no_grad(), intercept(_Counting()):
        model(*args)
    return _Counting.count


def _emulated_seconds(model: nn.Module, args: tuple[Any, ...], dtype: torch.dtype) -> float:
    def run() -> None:
        with torch.no_grad(), emulate("cuda"), torch.autocast("cuda", dtype, enabled=dtype is not torch.float32):
            model(*args)

    run()
    return sorted(seconds(run) for _ in range(REPEATS))[REPEATS // 2]


def main() -> None:
    rows = [in_process_of_its_own("benchmarks.emulation", "agreement", name) for name in SETS]
    columns = {"set": "", "models": "", "runs": "", "equal": "", "close": "", "differ": ""}
    report("emulation", rows, columns)
    for row in rows:
        for found in row["differences"]:
            print(f"- {found['plan']}: {found['distance']} {found['run']}{found['replay']}: {found['why']}")
    timed = [in_process_of_its_own("benchmarks.emulation", "cost", name) for name in TIMED]
    report("emulation_cost", timed, {key: "" if key in ("model", "operations") else ".2f" for key in timed[0]})


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps({"agreement": agreement, "cost": cost}[sys.argv[1]](sys.argv[2])))
    else:
        main()
