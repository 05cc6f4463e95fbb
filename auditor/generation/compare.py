"""Every step of a plan's decoding held against FP32's, and what all of them come to."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..criteria.margins import WINDOW, replaced
from ..isolation.answer import Around, answer
from ..records.generation import Generated, Generation
from .decode import Prompts, decode, scores

RUNS = 32
"""Equal runs of steps, at most, that the divergence is averaged over."""

NORMAL_95 = 0.98
"""Half of the 95 % quantile of a standard normal: the root of a Poisson count scatters by a half, whatever the count."""


@dataclass(frozen=True)
class Continued:
    """One batch of prompts, as FP32 goes on with them. tokens: [prompts, steps]. best: [prompts, steps, some], the largest scores.

    counts: those up to the end of a text. logits: the file that holds FP32's, [steps, prompts, vocabulary].
    """

    prompts: Prompts
    tokens: torch.Tensor
    best: torch.Tensor
    counts: torch.Tensor
    logits: Path


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. seed: of the noise, and of what the model draws."""

    steps: int
    temperature: float
    seed: int

    def reference(self, model: nn.Module, prompts: Prompts, file: Path, around: Around) -> Continued:
        """What the model itself goes on with; its logits are written to the file."""
        seen, best = list[torch.Tensor](), list[torch.return_types.topk]()

        def follow(step: int, logits: torch.Tensor) -> torch.Tensor:
            seen.append(logits.cpu())
            best.append(self._scores(step, logits).topk(min(1 + WINDOW, logits.shape[-1]), -1))
            return best[-1].indices[:, 0]

        decode(model, prompts, self.steps, follow, seed=self.seed, around=around)
        torch.save(torch.stack(seen), file)
        given = torch.stack([one.indices[:, 0] for one in best], 1)
        scores = torch.stack([one.values for one in best], 1)
        ended = torch.isin(given, torch.tensor(prompts.ends, device=given.device, dtype=given.dtype))
        return Continued(prompts, given, scores.double(), (ended.cumsum(1) - ended.long()) == 0, file)

    def compare(self, model: nn.Module, batches: Sequence[Continued], around: Around) -> dict[str, Any]:
        """{`cached` and `one_pass`: [KL, choice, change of the probability of FP32's token], each [steps, prompts]}, by batch."""
        result: dict[str, list[torch.Tensor]] = {"cached": [], "one_pass": []}
        for one in batches:
            expected, rows = torch.load(one.logits, mmap=True), list[torch.Tensor]()

            def follow(
                step: int,
                logits: torch.Tensor,
                one: Continued = one,
                expected: torch.Tensor = expected,
                rows: list[torch.Tensor] = rows,
            ) -> torch.Tensor:
                rows.append(self._row(step, expected[step], logits.cpu(), one.tokens[:, step].cpu()))
                return one.tokens[:, step]

            decode(model, one.prompts, self.steps, follow, seed=self.seed, around=around)
            result["cached"].append(torch.stack(rows, 1))
            answered = answer(model, one.prompts.forced(model, one.tokens), seed=self.seed, around=around)
            logits = answered[0].float()[:, -self.steps :].transpose(0, 1).cpu()
            each = [self._row(t, expected[t], logits[t], one.tokens[:, t].cpu()) for t in range(self.steps)]
            result["one_pass"].append(torch.stack(each, 1))
        return result

    def _scores(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        return scores(logits, step, self.temperature, self.seed)

    def _row(self, step: int, expected: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """[4, prompts]: KL, whether the choice and the likeliest token are others, change of the probability of FP32's token."""
        p, q = expected.double().log_softmax(-1), logits.double().log_softmax(-1)
        gap = torch.where(p > -math.inf, p - q, torch.zeros_like(p))
        kl = (p.exp() * (torch.expm1(-gap) + gap)).sum(-1)  # as criteria/values.py has it
        chosen = self._scores(step, logits).argmax(-1) != tokens
        change = (q.exp() - p.exp()).gather(-1, tokens[:, None])[:, 0]
        top = logits.argmax(-1) != expected.argmax(-1)
        return torch.stack([kl, chosen.double(), top.double(), change])


def made(decoding: Decoding, batches: Sequence[Continued]) -> Generation:
    """What FP32 went on with."""
    counted = sum(int(one.counts.sum()) for one in batches)
    return Generation(sum(len(one.tokens) for one in batches), decoding.steps, counted, decoding.temperature)


def figures(batches: Sequence[Continued], found: dict[str, Any] | str) -> Generated:
    """What the steps of all batches come to; only tokens up to the end of a text count."""
    if isinstance(found, str):
        return Generated(None, failure=found)
    counts = torch.cat([one.counts.cpu() for one in batches]).T  # [steps, prompts]
    cached, one_pass = (torch.cat(found[name], 2) for name in ("cached", "one_pass"))
    kl, chosen, top, change = (x[counts] for x in cached)
    flips, tokens = float(chosen.sum()), max(int(counts.sum()), 1)
    scale, root = 1000 / tokens, math.sqrt(flips)
    firsts = sorted(_first(column) for column in (cached[1].bool() & counts).T)
    steps = counts.shape[0]
    edges = [round(i * steps / min(RUNS, steps)) for i in range(min(RUNS, steps) + 1)]
    runs = [cached[0][a:b][counts[a:b]] for a, b in pairwise(edges)]
    return Generated(
        kl=float(kl.mean()),
        kl_99=float(kl.quantile(0.99)),
        kl_most=float(kl.max()),
        same_top=1 - float(top.mean()),
        rms_probability=float(change.square().mean().sqrt()),
        flips=flips * scale,
        flips_low=max(root - NORMAL_95, 0.0) ** 2 * scale,
        flips_high=(root + NORMAL_95) ** 2 * scale,
        first_flip=_whole(statistics.median_high(firsts)),
        first_flip_10=_whole(firsts[(len(firsts) - 1) // 10]),
        kl_by_position=tuple(float(run.mean()) for run in runs if run.numel()),
        one_pass_kl=float(one_pass[0][counts].mean()),
        one_pass_flips=float(one_pass[1][counts].sum()) * scale,
    )


def expected_flips(batches: Sequence[Continued], change: float) -> float:
    """In 1,000 tokens, where the margins of their choice change by a normal error of this standard deviation."""
    best = torch.cat([one.best[one.counts] for one in batches])
    return 1000 * replaced(best[:, :1], best[:, 1:], change) / max(len(best), 1)


def _first(flipped: torch.Tensor) -> float:
    """The number of the first step that flips, from 1 on; inf where none does."""
    return float(flipped.int().argmax()) + 1 if bool(flipped.any()) else math.inf


def _whole(steps: float) -> int | None:
    return int(steps) if math.isfinite(steps) else None
