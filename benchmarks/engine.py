"""What recording a run costs, and a run as on a GPU: in forwards of the model, and per operation."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from auditor.capture.capture import capture
from auditor.emulation.emulate import emulate
from auditor.isolation import in_eval
from auditor.isolation.run_model import run_model
from auditor.loading import from_object
from benchmarks.harness import Row, forward_seconds, in_process_of_its_own, report, seconds
from benchmarks.subjects import MODELS, Built, build, gpt, vit

REPEATS = 3
FORMATS = ("fp16", "bf16")
COLUMNS = {
    "model": "",
    "operations": "d",
    "forward s": ".4f",
    "capture": ".1f",
    "capture ms/op": ".2f",
    "emulated run": ".1f",
    "emulated ms/op": ".2f",
}


class Steps(nn.Module):
    """Operations in a Python loop, on a value of a few entries: what an operation costs, and nothing else."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape [8] -> [8]."""
        for _ in range(self.count // 2):
            x = x * 1.0001 + 0.01
        return x


def _gru() -> Built:
    return nn.GRU(64, 64, 2, bidirectional=True), (torch.randn(1000, 4, 64),)


def _llama() -> Built:
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 24, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, use_cache=False, **sizes)
    return transformers.LlamaForCausalLM(config), (torch.randint(0, 256, (4, 64)),)


OTHERS: dict[str, Callable[[], Built]] = {
    "GRU, 2 layers, both ways, 1,000 steps": _gru,
    "ViT, 24 layers": partial(vit, 24),
    "GPT-2, 24 layers": partial(gpt, 24),
    "Llama, 24 layers, whose Python looks at dtypes": _llama,
    "3,000 operations in a loop": lambda: (Steps(3000), (torch.randn(8),)),
    "20,000 operations in a loop": lambda: (Steps(20_000), (torch.randn(8),)),
}


def measured(name: str) -> Row:
    """One model: the best of REPEATS captures and of as many emulated runs under FP16 autocast."""
    torch.manual_seed(0)
    model, args = build(name) if name in MODELS else OTHERS[name]()
    model.eval()
    subject = from_object(model, args)
    forward = forward_seconds(model, args)
    with in_eval(model):
        captured = capture(subject, FORMATS)
        recording = min(seconds(lambda: capture(subject, FORMATS)) for _ in range(REPEATS))
        running = min(seconds(lambda: run_model(model, (args, {}), around=_as_on_cuda)) for _ in range(REPEATS))
    operations = len(captured.nodes)
    return {
        "model": name,
        "operations": operations,
        "forward s": forward,
        "capture": recording / forward,
        "capture ms/op": 1000 * max(0.0, recording - 3 * forward) / operations,
        "emulated run": running / forward,
        "emulated ms/op": 1000 * max(0.0, running - 2 * forward) / operations,
    }


@contextmanager
def _as_on_cuda() -> Iterator[None]:
    with emulate("cuda"), torch.autocast("cuda", dtype=torch.float16):
        yield


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", help="all of them if left out", default=[*MODELS, *OTHERS])
    parser.add_argument("--one", help="one model, as JSON", metavar="MODEL")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measured(options.one)))
    else:
        rows = [in_process_of_its_own("benchmarks.engine", "--one", name) for name in options.models]
        report("engine", rows, COLUMNS)


if __name__ == "__main__":
    main()
