"""What the wrapped scopes of a patched model cost: its forward beside that of the model under plain torch.autocast."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import auditor
from benchmarks.harness import Row, in_process_of_its_own, report, seconds
from benchmarks.subjects import build, gpt

ROUNDS = 15
DEPTHS = (2, 8)
MODELS = (*(f"gpt_{layers}" for layers in DEPTHS), "vit_base_patch16_224")
ON_A_GPU = 16
"""Times the batch is repeated on a GPU: at batch 4 it would wait for Python, with wrappers and without."""
COLUMNS = {
    "model": "",
    "scopes": "d",
    "plain autocast ms": ".2f",
    "root / plain": ".3f",
    "wrapped norms / plain": ".3f",
    "norms in FP32 / plain": ".3f",
}
FUNCTIONS = 100
"""Functions that the price of keeping some is averaged over, in each call."""
PASSES = 2000
"""Calls that the price of one wrapper is averaged over."""


def plan_with(scopes: list[str], precision: str) -> dict[str, Any]:
    """An autocast plan in BF16, the named modules with a wrapper of their own."""
    table: dict[str, Any] = {"": {"precision": "bf16"}} | {path: {"precision": precision} for path in scopes}
    return {"strategy": "autocast", "format": "bf16", "scopes": table}


def on_the_gpu(action: Callable[[], object]) -> float:
    """Seconds until the GPU has done all that one call asked of it."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def medians(forwards: list[Any], device: str) -> list[float]:
    """Median seconds of each, taken in turns so that a busy moment hits all alike."""
    clock = on_the_gpu if device == "cuda" else seconds
    rounds = [[clock(forward) for forward in forwards] for _ in range(ROUNDS + 2)]
    return [statistics.median(column) for column in zip(*rounds[2:], strict=True)]


def subject(name: str, device: str) -> tuple[nn.Module, tuple[Any, ...]]:
    model, args = gpt(int(name.partition("_")[2])) if name.startswith("gpt_") else build(name)
    if device == "cuda":
        args = tuple(x.repeat(ON_A_GPU, *[1] * (x.dim() - 1)).cuda() for x in args)
    return model.to(device), args


def overhead(name: str, device: str) -> Row:
    model, args = subject(name, device)
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    plans = (plan_with([], "bf16"), plan_with(norms, "bf16"), plan_with(norms, "fp32"))
    models = [auditor.apply(copy.deepcopy(model), plan) for plan in plans]

    def plain() -> None:
        with torch.no_grad(), torch.autocast(device, torch.bfloat16):
            model(*args)

    def patched(which: nn.Module) -> Callable[[], None]:
        def forward() -> None:
            with torch.no_grad():
                which(*args)

        return forward

    usual, root, same, raised = medians([plain, *map(patched, models)], device)
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "batch": len(args[0]),
        "scopes": 1 + len(norms),
        "plain autocast ms": 1000 * usual,
        "root / plain": root / usual,
        "wrapped norms / plain": same / usual,
        "norms in FP32 / plain": raised / usual,
    }


class Through(nn.Module):
    """Nothing but the call of a module."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def microseconds_per_wrapper() -> dict[str, float]:
    """Processor time that one wrapper adds to a call of a module that does nothing, on a tensor on the CPU."""
    x, found = torch.zeros(4), {}
    for strategy in ("autocast", "cast"):
        for precision in ("bf16", "fp32"):
            model = nn.Sequential(Through())
            table = {"": {"precision": "bf16"}, "0": {"precision": precision}}
            auditor.apply(model, {"strategy": strategy, "format": "bf16", "scopes": table})
            found[f"{strategy} {precision}"] = round(1e6 * (per_call(model[0], x) - per_call(Through(), x)), 1)
    return found


class Signs(nn.Module):
    """Many calls of one function that costs next to nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(FUNCTIONS):
            x = x.neg()
        return x


def microseconds_per_function() -> dict[str, float]:
    """Processor time that a scope that keeps functions in FP32 adds to each function that it calls: another, or a kept one."""
    x, found = torch.zeros(4), {}
    scopes: dict[str, dict[str, Any]] = {
        "none": {"precision": "bf16"},
        "another": {"precision": "bf16", "keep": ["pow"]},
        "kept": {"precision": "bf16", "keep": ["neg"]},
    }
    for strategy in ("autocast", "cast"):
        for kind, scope in scopes.items():
            model = auditor.apply(Signs(), {"strategy": strategy, "format": "bf16", "scopes": {"": scope}})
            found[f"{strategy} {kind}"] = 1e6 * per_call(model, x, PASSES // FUNCTIONS) / FUNCTIONS
        for kind in ("another", "kept"):
            found[f"{strategy} {kind}"] = round(found[f"{strategy} {kind}"] - found[f"{strategy} none"], 1)
        del found[f"{strategy} none"]
    return found


def per_call(module: nn.Module, x: torch.Tensor, passes: int = PASSES) -> float:
    def calls() -> None:
        for _ in range(passes):
            module(x)

    with torch.no_grad():
        return statistics.median(seconds(calls) for _ in range(5)) / passes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--measure", metavar="MODEL", help="one model, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(overhead(options.measure, options.device)))
        return
    where = ("--device", options.device)
    rows = [in_process_of_its_own("benchmarks.wrapper_overhead", *where, "--measure", name) for name in MODELS]
    single, functions = microseconds_per_wrapper(), microseconds_per_function()
    name = "wrapper_overhead" if options.device == "cpu" else "wrapper_overhead_cuda"
    report(name, rows, COLUMNS, {"microseconds_per_wrapper": single, "microseconds_per_function": functions})
    print("\none wrapper, µs: " + ", ".join(f"{kind} {price}" for kind, price in single.items()))
    print("a function in a scope that keeps some, µs: " + ", ".join(f"{kind} {us}" for kind, us in functions.items()))


if __name__ == "__main__":
    main()
