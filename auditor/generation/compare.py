"""Compares decoding under a plan, or in FP32 with a rounded cache, with decoding in FP32; summarizes differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..criteria.criterion import Criterion
from ..criteria.margins import WINDOW, count_replaced
from ..criteria.values import divergence
from ..isolation.answer import Around, answer
from ..numerics.casting import in_format, plain
from ..numerics.formats import FORMATS
from ..records.generation import StoredCache, TokenComparison
from .decode import Prompts, Store, decode

RUNS = 32
"""Maximum number of values in `kl_by_position`, each the mean over an interval of steps."""

INT8 = 127.0
STORED: dict[str, int] = {"bf16": 2, "fp8_e4m3": 1, "int8": 1}
"""{format of a stored cache: bytes per entry}. One-byte formats have a scale per tensor, as in vLLM and
TensorRT-LLM."""

NORMAL_95 = 0.98
"""Half of a standard normal's two-sided 95 % quantile, 1.96: the root of a Poisson count has standard deviation 1/2."""


@dataclass(frozen=True)
class ReferenceTokens:
    """FP32's continuation of prompts. tokens: [prompts, steps]. best: [prompts, steps, k], the k largest scores.

    counts: mask of tokens up to the first end token. logits: a file with FP32's logits, [steps, prompts, vocabulary].
    """

    prompts: Prompts
    tokens: torch.Tensor
    best: torch.Tensor
    counts: torch.Tensor
    logits: Path


@dataclass(frozen=True)
class Decoding:
    """How tokens are chosen. seed: the seed of the sampling noise and of the model's random numbers."""

    steps: int
    temperature: float
    seed: int

    def reference(self, model: nn.Module, prompts: Prompts, file: Path, around: Around) -> ReferenceTokens:
        """Generate tokens with the FP32 model; write its logits to the file."""
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
        return ReferenceTokens(prompts, given, scores.double(), (ended.cumsum(1) - ended.long()) == 0, file)

    def compare(
        self, model: nn.Module, batches: Sequence[ReferenceTokens], around: Around, store: Store | None = None
    ) -> dict[str, Any]:
        """Feed FP32's tokens to a model, one by one ("cached") and all at once ("one_pass"). Returns, under each key, a
        tensor [4, steps, prompts] for each batch, see `_row`.

        store: rounds the cache after each step; with `store`, the pass over all tokens, which has no cache, is omitted.
        """
        one_pass = [self._in_one_pass(model, one, around) for one in batches] if store is None else []
        return {"cached": [self._cached_replay(model, one, around, store) for one in batches], "one_pass": one_pass}

    def _cached_replay(
        self, model: nn.Module, one: ReferenceTokens, around: Around, store: Store | None
    ) -> torch.Tensor:
        expected, rows = torch.load(one.logits, mmap=True), list[torch.Tensor]()

        def follow(step: int, logits: torch.Tensor) -> torch.Tensor:
            rows.append(self._row(step, expected[step], logits.cpu(), one.tokens[:, step].cpu()))
            return one.tokens[:, step]

        decode(model, one.prompts, self.steps, follow, seed=self.seed, around=around, store=store)
        return torch.stack(rows, 1)

    def _in_one_pass(self, model: nn.Module, one: ReferenceTokens, around: Around) -> torch.Tensor:
        """Compare all steps of one forward pass over FP32's tokens: [4, steps, prompts]."""
        expected = torch.load(one.logits, mmap=True)  # [steps, prompts, vocabulary]
        inputs = one.prompts.forced_inputs(model, one.tokens)
        outputs = answer(model, inputs, seed=self.seed, around=around)
        logits = outputs[0].float()[:, -self.steps :]  # [prompts, steps, vocabulary]
        by_step = logits.transpose(0, 1).cpu()
        tokens = one.tokens.cpu()
        rows = [self._row(step, expected[step], by_step[step], tokens[:, step]) for step in range(self.steps)]
        return torch.stack(rows, 1)

    def _scores(self, step: int, logits: torch.Tensor) -> torch.Tensor:
        """Scores of the tokens, the largest of which is chosen: logits, plus Gumbel noise at a temperature above 0. The
        noise depends only on seed and step, so all models get equal noise. Scores have the unit of the logits."""
        if not self.temperature:
            return logits
        generator = torch.Generator().manual_seed(self.seed + step)
        uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).to(logits.device)
        return logits.double() - self.temperature * (-uniform.log()).log()

    def _row(self, step: int, expected: torch.Tensor, logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compare one step, as [4, prompts]: KL divergence from FP32; 1 if the chosen token differs; 1 if the likeliest
        differs; change of the probability of FP32's token."""
        kl, _ = divergence(expected.double(), logits.double())
        chosen = self._scores(step, logits).argmax(-1) != tokens
        ours, theirs = (x.double().softmax(-1).gather(-1, tokens[:, None])[:, 0] for x in (expected, logits))
        top = logits.argmax(-1) != expected.argmax(-1)
        return torch.stack([kl, chosen.double(), top.double(), theirs - ours])


def cached_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors that one step passes to the next: keys and values of each layer, or the state of
    `step`."""
    if isinstance(state, torch.Tensor):
        shared = any(step == 0 and size > 1 for step, size in zip(state.stride(), state.shape, strict=True))
        yield from [state] * (state.is_floating_point() and not shared)  # entries that share memory cannot be written
    elif isinstance(state, dict):
        yield from cached_tensors([*state.values()])
    elif isinstance(state, list | tuple):
        for each in state:
            yield from cached_tensors(each)
    elif hasattr(state, "layers"):
        yield from cached_tensors([getattr(layer, name, None) for layer in state.layers for name in ("keys", "values")])
    elif hasattr(state, "self_attention_cache"):
        yield from cached_tensors([state.self_attention_cache, state.cross_attention_cache])


class CacheRounding:
    """Rounds all tensors of a cache after each step, in place.

    In one-byte formats, each tensor's scale is fixed once the cache holds the prompt, by the largest entry then; larger
    entries of later tokens saturate. sizes: number of cached entries per text, after each step. entries, beyond: number
    of entries written in all steps, and how many of these saturated.
    """

    def __init__(self, stored: str, texts: int) -> None:
        self.stored, self.texts, self.sizes = stored, texts, list[float]()
        self._scales: list[torch.Tensor] = []
        self._lengths = dict[int, int]()
        self.beyond = self.entries = 0

    def __call__(self, state: Any) -> None:
        tensors = [*cached_tensors(state)]
        self.sizes.append(sum(x.numel() for x in tensors) / self.texts)
        largest = INT8 if self.stored == "int8" else FORMATS[self.stored].largest
        if STORED[self.stored] == 1 and not self._scales:
            self._scales = [x.abs().max().clamp_min(torch.finfo(torch.float32).tiny) / largest for x in tensors]
        for index, x in enumerate(tensors):
            if STORED[self.stored] > 1:
                x.copy_(plain(in_format(x, FORMATS[self.stored])))
                continue
            scaled = (x / self._scales[index]).nan_to_num()
            self.beyond += int((scaled.abs() > largest * (1 + 1e-6)).sum())
            scaled = scaled.clamp(-largest, largest)
            rounded = scaled.round() if self.stored == "int8" else plain(in_format(scaled, FORMATS[self.stored]))
            stored = rounded * self._scales[index]
            self.entries += self._count_written(index, x, stored)
            x.copy_(stored)

    def _count_written(self, index: int, x: torch.Tensor, stored: torch.Tensor) -> int:
        """Number of a tensor's entries that are new since the last step: those by which it grew. In a tensor that keeps
        its size, entries of earlier steps are already rounded, and slots that are not written yet are zero."""
        before = self._lengths.get(index, 0)
        self._lengths[index] = x.numel()
        if before and x.numel() > before:
            return x.numel() - before
        if before:
            return int((stored != x).sum())
        return int(x.count_nonzero())

    def bytes_of(self, first: int) -> tuple[float, float]:
        """Cache bytes of a text that do not depend on its length, and bytes per token. first: length of the prompt."""
        steps = len(self.sizes) - 1
        each = (self.sizes[-1] - self.sizes[0]) / steps if steps else self.sizes[0] / max(first, 1)
        width = STORED[self.stored]
        return max(self.sizes[0] - first * each, 0.0) * width, each * width


def stored_caches(
    decoding: Decoding, model: nn.Module, batches: Sequence[ReferenceTokens], around: Around
) -> tuple[StoredCache, ...]:
    """Compare the FP32 model with its cache in each format of STORED and in FP32; () if the model has no cache."""
    result = []
    for stored in STORED:
        rounding = [CacheRounding(stored, len(one.tokens)) for one in batches]
        rows = [decoding.compare(model, [one], around, how) for one, how in zip(batches, rounding, strict=True)]
        if not rounding[0].sizes[-1]:
            return ()
        found = figures(batches, {"cached": [row["cached"][0] for row in rows]})
        fixed, each = rounding[0].bytes_of(batches[0].prompts.ids.shape[1])
        beyond = sum(one.beyond for one in rounding) / max(sum(one.entries for one in rounding), 1)
        result.append(StoredCache(stored, fixed, each, beyond, found))
    return tuple(result)


def recommend_cache(caches: Sequence[StoredCache], limits: Sequence[Criterion], *plan: TokenComparison) -> str | None:
    """The smallest cache that, with the plan if given, meets the limits on KL and top tokens; None if every cache
    violates a limit, or without limits.

    The errors of cache and plan are added. For KL the sum is exact to leading order if both errors are independent; for
    top tokens the sum overestimates the change.
    """
    for one in sorted(caches, key=lambda one: (one.fixed_bytes + one.bytes_per_token, one.generated.kl)):
        both = (one.generated, *plan)
        values = {"kl": math.fsum(math.inf if x.kl is None else x.kl for x in both)}
        values["top1"] = 1 - math.fsum(1 - (x.same_top or 0.0) for x in both)
        if limits and all(limit.holds(values[limit.kind]) for limit in limits):
            return one.stored
    return None


def figures(batches: Sequence[ReferenceTokens], found: dict[str, Any] | str) -> TokenComparison:
    """Summarize results of `Decoding.compare`, or its failure; tokens after the first end token do not count."""
    if isinstance(found, str):
        return TokenComparison(None, failure=found)
    counts = torch.cat([one.counts.cpu() for one in batches]).T  # [steps, prompts]
    cached = torch.cat(found["cached"], 2)
    one_pass = torch.cat(found["one_pass"], 2) if found.get("one_pass") else None
    kl, chosen, top, change = (x[counts] for x in cached)
    flips, tokens = float(chosen.sum()), max(int(counts.sum()), 1)
    scale, root = 1000 / tokens, math.sqrt(flips)
    firsts = sorted(_first(column) for column in (cached[1].bool() & counts).T)
    steps = counts.shape[0]
    edges = [round(i * steps / min(RUNS, steps)) for i in range(min(RUNS, steps) + 1)]
    runs = [cached[0][a:b][counts[a:b]] for a, b in pairwise(edges)]
    return TokenComparison(
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
        one_pass_kl=None if one_pass is None else float(one_pass[0][counts].mean()),
        one_pass_flips=None if one_pass is None else float(one_pass[1][counts].sum()) * scale,
    )


def expected_flips(batches: Sequence[ReferenceTokens], change: float, sizes: torch.Tensor) -> tuple[float, int | None]:
    """Expected flips per 1,000 tokens, and the step at which half of the prompts are expected to have flipped (None: no
    step), if margins change by independent normal errors. sizes: [steps], standard deviations in units of `change`."""
    best = torch.cat([one.best for one in batches]) / sizes.to(batches[0].best).clamp_min(1e-9)[:, None]
    counts = torch.cat([one.counts for one in batches])
    rows = best.flatten(0, 1)
    chances = count_replaced(rows[:, :1], rows[:, 1:], change).view(counts.shape) * counts
    first = _first((1 - chances).cumprod(1).mean(0) <= 0.5)
    return 1000 * float(chances.sum()) / max(int(counts.sum()), 1), _whole(first)


def _first(flipped: torch.Tensor) -> float:
    """The number of the first true entry, from 1; inf if every entry is false."""
    return float(flipped.int().argmax()) + 1 if bool(flipped.any()) else math.inf


def _whole(steps: float) -> int | None:
    return int(steps) if math.isfinite(steps) else None
