"""Predicted token flips, and the parts they come from, against what is counted: `python -m benchmarks.tokens`.

Three language models of characters, trained on Python's help topics: the transformer of examples/language, and a Llama and
a GRU that are trained here in a minute each. Each plan decodes 32 held-out prompts x 160 tokens. Parts are then tried one by
one in a run over FP32's text: only this part low, and all parts low but this one.
"""

from __future__ import annotations

import argparse
import os
import pydoc_data.topics
import re
import runpy
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import auditor
from auditor.criteria.criterion import Criterion
from auditor.criteria.values import value
from auditor.execution.execute import Executor, Replay, SubsetLowPrecision
from auditor.features.generation.stage import parts_of
from auditor.measure.alone import rounder
from auditor.measure.measure import Measurement
from auditor.numerics.casting import widen
from auditor.numerics.kernels import UnsupportedInFormat
from auditor.numerics.nodes import tensors_in
from benchmarks.harness import Row, report
from tests.support.subjects import measurement_of

PROMPTS, LENGTH, STEPS = 32, 24, 160
HERE = Path(__file__).resolve().parents[1]
KL, TOP = Criterion("", "kl", 0.0), Criterion("", "top1", 1.0)
BUDGETS = {"nothing kept": 0.1, "few flips": 0.002}
PLANS = {"model": "", "plan": "", "tokens": "", "kl": ".1e", "flips": ".2f", "low": ".2f", "high": ".2f"}
PLANS |= {"predicted": ".2f", "inside": "", "first": "", "expected": ""}
PARTS = {"model": "", "format": "", "part": "", "share": ".2f", "kl alone": ".1e", "flips alone": ".1f"}
PARTS |= {"kl without": ".1e", "flips without": ".1f"}


class Gru(nn.Module):
    """A recurrent language model with a step function. Token ids [n, t] -> logits [n, t, vocabulary]."""

    def __init__(self, vocabulary: int, width: int = 128) -> None:
        super().__init__()
        self.embed, self.gru = nn.Embedding(vocabulary, width), nn.GRU(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.step(tokens, None)[0]

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        hidden, state = self.gru(self.embed(tokens), state)
        return self.head(hidden), state


def llama(vocabulary: int, width: int = 128, layers: int = 4) -> nn.Module:
    import transformers

    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=11 * width // 4,
            num_hidden_layers=layers,
            num_attention_heads=4,
            max_position_embeddings=256,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def logits_of(result: Any) -> Tensor:
    logits: Tensor = getattr(result, "logits", result)
    return logits


def text(token: str = "(?s:.)") -> tuple[Tensor, int]:
    """All help topics as token ids [length], and the number of different tokens. token: regular expression, by default
    one character."""
    written = re.findall(token, "".join(text for _, text in sorted(pydoc_data.topics.topics.items())))
    places = {c: i for i, c in enumerate(sorted(set(written)))}
    return torch.tensor([places[c] for c in written]), len(places)


def trained(make: Callable[[int], nn.Module], steps: int = 500, **split: str) -> tuple[nn.Module, Tensor]:
    """The model after some steps of Adam on nine tenths of the text, and prompts [32, 24] from the rest. split: see
    `text`."""
    torch.manual_seed(0)
    ids, vocabulary = text(**split)
    learned, held_out = ids[: -len(ids) // 10], ids[-len(ids) // 10 :]
    model, places = make(vocabulary), torch.arange(97)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3)
    for _ in range(steps):
        batch = learned[torch.randint(len(learned) - 97, (32, 1)) + places]
        logits = logits_of(model(batch[:, :-1]))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    print(f"{type(model).__name__}: loss {loss.item():.2f}", flush=True)
    starts = torch.arange(PROMPTS)[:, None] * (len(held_out) // PROMPTS)
    return model.eval(), held_out[starts + torch.arange(LENGTH)]


def characters() -> tuple[nn.Module, Tensor]:
    written = runpy.run_path(str(HERE / "examples" / "language" / "characters.py"))
    return written["get_model"](), torch.cat([tokens for (tokens,) in written["get_eval_inputs"]()])[:PROMPTS]


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "transformer": characters,
    "Llama": lambda: trained(partial(llama, width=64, layers=2), steps=300),
    "GRU": lambda: trained(Gru),
}


def continued(model: nn.Module, ids: Tensor) -> Tensor:
    """Prompts and FP32's continuation, without the last token."""
    with torch.no_grad():
        for _ in range(STEPS):
            ids = torch.cat([ids, logits_of(model(ids))[:, -1].argmax(-1, keepdim=True)], 1)
    return ids[:, :-1]


class Tried:
    """Runs of one measured model with some parts in a format and the rest in FP32, compared on the generated tokens.

    A part's rounding includes that of the weights that it reads.
    """

    def __init__(self, measured: Measurement, format: str) -> None:
        self.measured, self.format, self.of = measured, format, parts_of(measured.capture)
        self._reference = self._decoded(measured.outputs)

    def __call__(self, parts: Collection[str]) -> tuple[float, float]:
        """KL, and flips per 1,000 tokens, with these parts low."""
        capture = self.measured.capture
        inside = {name for name in capture.nodes if self.of[name] in parts}
        low = SubsetLowPrecision(capture, inside, self.format, rounder(capture, self.format))
        executor = Executor(capture.graph_module, low, before=Replay(self.measured.values))
        with torch.no_grad():
            *_, (_, last) = executor.steps(*self.measured.flat_inputs)
        found = self._decoded(tensors_in(widen(last)))
        return value(KL, self._reference, found), 1000 * (1 - value(TOP, self._reference, found))

    @staticmethod
    def _decoded(outputs: Any) -> Tensor:
        return tensors_in(outputs)[0].detach()[:, LENGTH - 1 :]


def plans_of(
    name: str, model: nn.Module, ids: Tensor, budget: str, options: dict[str, str]
) -> tuple[list[Row], dict[str, dict[str, float]]]:
    """Every plan's flips, predicted and counted; {format: {part: share}} of casts."""
    rows, shares = list[Row](), dict[str, dict[str, float]]()
    inputs = {"input_ids": ids} if name == "Llama" else ids
    audit = auditor.audit(model, inputs, generate=STEPS, max_error=BUDGETS[budget], **options)
    assert audit.generation is not None
    for plan in audit.plans.values():
        if (found := plan.generated) is None or found.flips is None or plan.name == "fp32":
            continue
        inside = found.flips_low <= (found.predicted_flips or 0.0) <= found.flips_high  # type: ignore[operator]
        flips = {"flips": found.flips, "low": found.flips_low, "high": found.flips_high}
        row = {"model": name, "plan": f"{plan.name}, {budget}", "tokens": audit.generation.tokens, "kl": found.kl}
        row |= flips | {"predicted": found.predicted_flips, "inside": "yes" if inside else "no"}
        rows.append(row | {"first": found.first_flip or "none", "expected": found.predicted_first_flip or "none"})
        if plan.strategy == "cast":
            shares[plan.format] = {one.part: one.share for one in found.parts}
    return rows, shares


def parts_tried(name: str, model: nn.Module, ids: Tensor, shares: dict[str, dict[str, float]]) -> list[Row]:
    """What each part does alone, and what is left without it; the first row of a format has all parts."""
    whole = continued(model, ids)
    measured = measurement_of(model, input_ids=whole) if name == "Llama" else measurement_of(model, whole)
    rows = list[Row]()
    for format, stated in shares.items():
        tried = Tried(measured, format)
        every = {tried.of[name] for name in measured.capture.nodes}
        try:
            kl, flips = tried(every)
        except UnsupportedInFormat:  # the plan keeps an operation in FP32, such as a mask's constant that FP16 lacks
            continue
        about = {"model": name, "format": format}
        rows.append(about | dict(zip(PARTS, (name, format, "all", 1.0, kl, flips, 0.0, 0.0), strict=True)))
        for part in sorted(every, key=lambda part: -stated.get(part, 0.0)):
            alone, without = tried({part}), tried(every - {part})
            values = name, format, part, stated.get(part, 0.0), *alone, *without
            rows.append(dict(zip(PARTS, values, strict=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--quick", action="store_true", help="only BF16 with cast weights, and nothing kept in FP32")
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    given = parser.parse_args()
    options = {"formats": "bf16", "strategies": "cast"} if given.quick else {}
    for name in given.models:
        plans, (model, ids) = list[Row](), MODELS[name]()
        for budget in [*BUDGETS][: 1 if given.quick else None]:
            found, shares = plans_of(name, model, ids, budget, options)
            plans += found
            report(f"tokens_{name.lower()}_plans", plans, PLANS)
            if budget == "nothing kept":
                report(f"tokens_{name.lower()}_parts", parts_tried(name, model, ids, shares), PARTS)


if __name__ == "__main__":
    main()
