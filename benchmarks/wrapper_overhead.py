"""What the wrapped scopes of a patched model cost: its forward beside that of the model under plain torch.autocast."""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from typing import Any

import torch
from torch import nn

import auditor
from benchmarks.harness import Row, in_process_of_its_own, report, seconds
from benchmarks.subjects import build, gpt

ROUNDS = 15
DEPTHS = (2, 8)
MODELS = (*(f"gpt_{layers}" for layers in DEPTHS), "vit_base_patch16_224")
COLUMNS = {
    "model": "",
    "scopes": "d",
    "plain autocast ms": ".2f",
    "no scope but the root ms": ".2f",
    "norms in FP32 ms": ".2f",
    "root / plain": ".3f",
    "norms / plain": ".3f",
}


def plan_with(islands: list[str]) -> dict[str, Any]:
    """An autocast plan in BF16, the named modules in FP32."""
    scopes: dict[str, Any] = {"": {"precision": "bf16"}} | {path: {"precision": "fp32"} for path in islands}
    return {"strategy": "autocast", "format": "bf16", "scopes": scopes}


def medians(forwards: list[Any]) -> list[float]:
    """Median seconds of each, taken in turns so that a busy moment hits all alike."""
    rounds = [[seconds(forward) for forward in forwards] for _ in range(ROUNDS + 2)]
    return [statistics.median(column) for column in zip(*rounds[2:], strict=True)]


def overhead(name: str) -> Row:
    model, args = gpt(int(name.partition("_")[2])) if name.startswith("gpt_") else build(name)
    norms = [path for path, module in model.named_modules() if isinstance(module, nn.LayerNorm)]
    rooted = auditor.apply(copy.deepcopy(model), plan_with([]))
    islands = auditor.apply(copy.deepcopy(model), plan_with(norms))

    def plain() -> None:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            model(*args)

    def patched(which: nn.Module) -> None:
        with torch.no_grad():
            which(*args)

    usual, root, raised = medians([plain, lambda: patched(rooted), lambda: patched(islands)])
    return {
        "model": name,
        "scopes": 1 + len(norms),
        "plain autocast ms": 1000 * usual,
        "no scope but the root ms": 1000 * root,
        "norms in FP32 ms": 1000 * raised,
        "root / plain": root / usual,
        "norms / plain": raised / usual,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", metavar="MODEL", help="one model, as JSON")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(overhead(options.measure)))
    else:
        rows = [in_process_of_its_own("benchmarks.wrapper_overhead", "--measure", name) for name in MODELS]
        report("wrapper_overhead", rows, COLUMNS)


if __name__ == "__main__":
    main()
