"""Flips of every plan and the rank of operations by margins, against what is counted: `python -m benchmarks.margins`.

Ten models, for language, detection, segmentation, experts, codebooks and classes; weights are random or trained here in
seconds. Flips: of the largest entry of each row of the output, predicted and counted under each plan. Ranks: each operation runs
low alone, and the change of the margins near zero is compared with the audit's: predicted, or measured if the operation changes a
choice inside the model, such as an expert. A group's error is shared among its members as first order has it.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections.abc import Callable

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import auditor
from auditor.criteria import criteria_of
from auditor.criteria.measure import criteria_for
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.run_model import run_model
from auditor.measure.attribute import first_order
from auditor.measure.rerun import OutputMetric
from auditor.measure.uncertain import measure_uncertain
from benchmarks.harness import Row, report
from benchmarks.tokens import Gru, llama, text, trained
from tests.support.brute_force import OneLow, spearman
from tests.support.subjects import measurement_of
from tests.unit.measure.test_criteria import Gates, Pixels, Tokens, margins

ALLOWED, LEAST, ROWS = 0.02, 20, 2048
PLANS = {"model": "", "plan": "", "rows": "", "counted": "", "predicted": ".1f", "factor": ".2f"}
RANKS = {"model": "", "format": "", "operations": "", "spearman": ".3f"}


class First(nn.Module):
    """The first output of a model, or one by name."""

    def __init__(self, model: nn.Module, name: str = "logits", channels: bool = False) -> None:
        super().__init__()
        self.model, self.name, self.channels = model, name, channels

    def forward(self, *given: Tensor) -> Tensor:
        result = getattr(self.model(*given), self.name)
        return result.movedim(1, -1) if self.channels else result


class Experts(nn.Module):
    """A mixture of eight experts, each token by the two of largest score, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.route, self.head = nn.Linear(32, 64), nn.Linear(64, 8), nn.Linear(64, 100)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        best = self.route(x).softmax(-1).topk(2, -1)
        chosen = torch.zeros(*x.shape[:-1], 8, dtype=x.dtype, device=x.device).scatter(-1, best.indices, best.values)
        stacked = torch.stack([expert(x) for expert in self.experts], -2)
        return self.head(x + (chosen[..., None] * stacked).sum(-2))


class Codes(nn.Module):
    """Negative squared distances of encoded patches to a codebook of 256."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.GELU(), nn.Conv2d(32, 32, 1))
        self.book = nn.Parameter(torch.randn(256, 32) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.encode(x).flatten(2).transpose(1, 2)
        return 2 * z @ self.book.T - (z * z).sum(-1, keepdim=True) - (self.book * self.book).sum(-1)


class Anchors(nn.Module):
    """A detector: scores of 20 classes for 6 anchors at every place of a grid."""

    def __init__(self) -> None:
        super().__init__()
        widths = (3, 32, 64, 64)
        self.body = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, 2, 1), nn.GroupNorm(8, b), nn.SiLU())
                for a, b in itertools.pairwise(widths)
            )
        )
        self.head = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 6 * 20, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)).unflatten(1, (6, 20)).flatten(3).permute(0, 1, 3, 2)


def digits() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A perceptron, trained on three quarters of the digits; as input the rest, blurred so that some are hard."""
    data = load_digits()
    x, y = torch.tensor(data.data, dtype=torch.float32) / 16, torch.tensor(data.target)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(150):
        loss = nn.functional.cross_entropy(model(x[:1300]), y[:1300])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    pairs = torch.randint(1300, len(x), (2, 20_000))
    return model, (x[pairs].mean(0),)


def segmenter() -> tuple[nn.Module, tuple[Tensor, ...]]:
    import transformers

    widths = {"hidden_sizes": [16, 32, 40, 64], "decoder_hidden_size": 64, "depths": [1, 1, 1, 1], "num_labels": 20}
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(**widths))
    return First(model, channels=True), (torch.randn(8, 3, 128, 128),)


def language(make: Callable[[int], nn.Module]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A model of characters and 256 x 96 of those that it was not trained on."""
    model, _ = trained(make, steps=150)
    written, _ = text()
    held_out = written[-len(written) // 10 :]
    windows = held_out[: 256 * (len(held_out) // 256)].reshape(256, -1)[:, :96]
    return First(model) if hasattr(model, "config") else model, (windows,)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[Tensor, ...]]]] = {
    "Llama, trained": lambda: language(llama),
    "GRU, trained": lambda: language(Gru),
    "two blocks of attention": lambda: (Tokens(nn.Linear(32, 60)), (torch.randint(0, 60, (128, 64)),)),
    "anchors, detection": lambda: (Anchors(), (torch.randn(32, 3, 64, 64),)),
    "SegFormer, segmentation": segmenter,
    "convolutions, segmentation": lambda: (Pixels(nn.Linear(32, 20)), (torch.randn(64, 3, 32, 32),)),
    "mixture of experts": lambda: (Experts(), (torch.randn(64, 128, 32),)),
    "codebook": lambda: (Codes(), (torch.randn(128, 3, 32, 32),)),
    "gated layers": lambda: (Gates(nn.Linear(32, 40)), (torch.randn(256, 32, 12),)),
    "digits, trained": digits,
}


def plans_of(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Row]:
    """Flips of every plan that leaves something low, predicted and counted."""
    result = list[Row]()
    count = run_model(model, (inputs, {}))[0].flatten(0, -2).shape[0]
    audit = auditor.audit(model, inputs, criteria="output: top1 >= 0.5", device="cpu")
    for plan in audit.plans.values():
        one = plan.verification.criteria[0] if plan.verification and plan.verification.criteria else None
        if one is None or one.predicted is None or not isinstance(one.value, float):
            continue
        counted, predicted = round((1 - one.value) * count), (1 - one.predicted) * count
        factor = max(predicted / counted, counted / predicted) if counted >= LEAST and predicted else float("nan")
        values = (name, plan.name, count, counted, predicted, factor)
        result.append(dict(zip(PLANS, values, strict=True)))
    return result


def ranks_of(name: str, model: nn.Module, inputs: tuple[Tensor, ...]) -> list[Row]:
    """Rank correlation of the predicted and the counted change of margins, over operations that move the output."""
    each = run_model(model, (inputs, {}))[0].flatten(0, -2).shape[0] // len(inputs[0])
    few = tuple(x[: max(ROWS // each, 2)] for x in inputs)
    held = criteria_for(criteria_of(f"output: top1 >= {1 - ALLOWED}"), 0.01, run_model(model, (few, {})))
    measured = measurement_of(model, *few)
    output_metric = OutputMetric(1.0, held)
    first = first_order(measured, 0, output_metric)
    contributions, _ = measure_uncertain(measured, first, output_metric)
    reference = measured.outputs[0].detach().double()
    flat = [x.detach() if isinstance(x, Tensor) else x for x in measured.flat_inputs]
    result = list[Row]()
    for fmt in ("fp16", "bf16"):
        pairs = list[tuple[float, float]]()
        for node in measured.capture.nodes.values():
            with torch.no_grad():
                low = tensor_outputs(OneLow(measured.capture.graph_module, node.name, fmt).run(*flat))[0].double()
            if node.floating and float((low - reference).norm() / reference.norm()) > 1e-7:
                one = contributions[node.name][fmt]
                change, alone = one.isolated, first.contributions[node.name][fmt]
                if one.decided_by == "group" and alone.own:  # a bound, which the members share as first order has it
                    change = min(alone.isolated * one.own / alone.own, change)
                pairs.append((change, margins(reference, low, ALLOWED)))
        values = (name, fmt, len(pairs), spearman(*map(list, zip(*pairs, strict=True))))
        result.append(dict(zip(RANKS, values, strict=True)))
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    os.environ["OMP_NUM_THREADS"] = "1"
    plans, ranks = list[Row](), list[Row]()
    for name in parser.parse_args().models:
        torch.manual_seed(0)
        model, inputs = MODELS[name]()
        model.eval()
        plans += plans_of(name, model, inputs)
        report("margins_plans", plans, PLANS)
        ranks += ranks_of(name, model, inputs)
        report("margins_ranks", ranks, RANKS)


if __name__ == "__main__":
    main()
