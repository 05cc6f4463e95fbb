"""Compares decoding under a plan, or in FP32 with a rounded cache, with decoding in FP32; summarizes differences."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...criteria.criterion import Criterion
from ...criteria.margins import WINDOW, count_replaced
from ...criteria.values import divergence
from ...isolation.run_model import Around, run_model
from ...numerics.casting import in_format, plain
from ...numerics.formats import FORMATS
from ...records.generation import StoredCache, TokenComparison
from .decode import Prompts, Store, decode

MAX_RUNS = 32
"""Maximum number of values in `kl_by_position`, each the mean over an interval of steps."""

INT8 = 127.0
WIDER = "bf16"
"""The format of the tensors of a cache that need more bits."""

STORED: dict[str, int] = {"bf16": 2, "fp8_e4m3": 1, "int8": 1}
"""{format of a stored cache: bytes per entry}. One-byte formats have a scale, see `CacheRounding`."""

OTHER_SCALES = (("fp8_e4m3", "head"), ("fp8_e4m3", "one"), ("int8", "head"))
"""Further (format, scale) of one-byte caches; the scale of `stored_caches` is per tensor, as in vLLM and TensorRT-LLM."""

Observe = Callable[[int, torch.Tensor, torch.Tensor], None]
"""A function that gets, in each step, its number and FP32's and the compared logits, [prompts, vocabulary]."""

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
        logits_by_step = list[torch.Tensor]()
        best = list[torch.return_types.topk]()  # by step: the chosen token and those with the next scores

        def follow(step: int, logits: torch.Tensor) -> torch.Tensor:
            logits_by_step.append(logits.cpu())
            count = min(1 + WINDOW, logits.shape[-1])
            top = self._scores(step, logits).topk(count, -1)
            best.append(top)
            return top.indices[:, 0]

        decode(model, prompts, self.steps, follow, seed=self.seed, around=around)
        torch.save(torch.stack(logits_by_step), file)
        tokens = torch.stack([top.indices[:, 0] for top in best], 1)  # [prompts, steps]
        scores = torch.stack([top.values for top in best], 1)
        ends = torch.tensor(prompts.ends, device=tokens.device, dtype=tokens.dtype)
        is_end = torch.isin(tokens, ends)
        ends_before = is_end.cumsum(1) - is_end.long()
        return ReferenceTokens(prompts, tokens, scores.double(), ends_before == 0, file)

    def compare(
        self,
        model: nn.Module,
        batches: Sequence[ReferenceTokens],
        around: Around,
        store: Store | None = None,
        observe: Observe | None = None,
    ) -> dict[str, Any]:
        """Feed FP32's tokens to a model, one by one ("cached") and all at once ("one_pass"). Returns, under each key, a
        tensor [4, steps, prompts] for each batch, see `_row`.

        store: rounds the cache after each step; with `store`, the pass over all tokens, which has no cache, is omitted.
        observe: called in each step of the decoding.
        """
        one_pass = [self._in_one_pass(model, one, around) for one in batches] if store is None else []
        cached = [self._cached_replay(model, one, around, store, observe) for one in batches]
        return {"cached": cached, "one_pass": one_pass}

    def _cached_replay(
        self, model: nn.Module, one: ReferenceTokens, around: Around, store: Store | None, observe: Observe | None
    ) -> torch.Tensor:
        expected, rows = torch.load(one.logits, mmap=True), list[torch.Tensor]()

        def follow(step: int, logits: torch.Tensor) -> torch.Tensor:
            if observe is not None:
                observe(step, expected[step], logits.cpu())
            rows.append(self._row(step, expected[step], logits.cpu(), one.tokens[:, step].cpu()))
            return one.tokens[:, step]

        decode(model, one.prompts, self.steps, follow, seed=self.seed, around=around, store=store)
        return torch.stack(rows, 1)

    def _in_one_pass(self, model: nn.Module, one: ReferenceTokens, around: Around) -> torch.Tensor:
        """Compare all steps of one forward pass over FP32's tokens: [4, steps, prompts]."""
        expected = torch.load(one.logits, mmap=True)  # [steps, prompts, vocabulary]
        inputs = one.prompts.forced_inputs(model, one.tokens)
        outputs = run_model(model, inputs, seed=self.seed, around=around)
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
        chosen_differs = self._scores(step, logits).argmax(-1) != tokens
        likeliest_differs = logits.argmax(-1) != expected.argmax(-1)
        change = _probability(logits, tokens) - _probability(expected, tokens)
        return torch.stack([kl, chosen_differs.double(), likeliest_differs.double(), change])


def _probability(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The probability of each prompt's token: [prompts], from logits [prompts, vocabulary] and tokens [prompts]."""
    probabilities = logits.double().softmax(-1)
    return probabilities.gather(-1, tokens[:, None])[:, 0]


def cached_tensors(state: Any) -> Iterator[torch.Tensor]:
    """The floating-point tensors that one step passes to the next: keys and values of each layer, or the state of
    `step`."""
    for _, tensor in named_tensors_of(state):
        yield tensor


def named_tensors_of(state: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all `cached_tensors`: `layer 0 keys` in a cache of transformers, the place in another state."""
    if isinstance(state, torch.Tensor):
        shared = any(step == 0 and size > 1 for step, size in zip(state.stride(), state.shape, strict=True))
        if state.is_floating_point() and not shared:  # entries that share memory cannot be written
            yield name or "state", state
    elif isinstance(state, dict):
        for key, each in state.items():
            yield from named_tensors_of(each, f"{name} {key}".strip())
    elif isinstance(state, list | tuple):
        for index, each in enumerate(state):
            yield from named_tensors_of(each, f"{name or 'state'} {index}")
    elif hasattr(state, "layers"):
        for index, layer in enumerate(state.layers):
            for part in ("keys", "values"):
                yield from named_tensors_of(getattr(layer, part, None), f"{name} layer {index} {part}".strip())
    elif hasattr(state, "self_attention_cache"):
        yield from named_tensors_of(state.self_attention_cache, "decoder")
        yield from named_tensors_of(state.cross_attention_cache, "encoder")


class CacheRounding:
    """Rounds all tensors of a cache after each step, in place.

    A one-byte format has a scale, which is fixed once the cache holds the prompt: set by the largest entry then, per
    `tensor` or per `head` ([texts, heads, tokens, size]; other shapes have one scale), or `one`. Larger entries of later
    tokens saturate. only: names of the tensors in this format, if not all; the others are stored in BF16. entries_by_name:
    {tensor: entries of a text, after the last step}. sizes: bytes of the cache per text, after each step.
    entries, beyond: number of entries written in all steps in the format, and how many of these saturated.
    """

    def __init__(self, stored: str, texts: int, scale: str = "tensor", only: Container[str] | None = None) -> None:
        self.stored, self.texts, self.scale, self.only = stored, texts, scale, only
        self.sizes = list[float]()
        self.entries_by_name = dict[str, float]()
        self._scales = dict[int, torch.Tensor]()
        self._lengths = dict[int, int]()
        self.beyond = self.entries = 0

    def __call__(self, state: Any) -> None:
        bytes_now = 0.0
        for index, (name, x) in enumerate(named_tensors_of(state)):
            stored = self.stored if self.only is None or name in self.only else WIDER
            self.entries_by_name[name] = x.numel() / self.texts
            bytes_now += self.entries_by_name[name] * STORED[stored]
            if STORED[stored] > 1:
                x.copy_(plain(in_format(x, FORMATS[stored])))
            else:
                self._round_scaled(index, x)
        self.sizes.append(bytes_now)

    def _round_scaled(self, index: int, x: torch.Tensor) -> None:
        """Round a tensor in the one-byte format, in place. index: its position among the tensors of the cache."""
        largest = INT8 if self.stored == "int8" else FORMATS[self.stored].largest
        if index not in self._scales:
            self._scales[index] = self._scale_of(x, largest)
        scaled = (x / self._scales[index]).nan_to_num()
        self.beyond += int((scaled.abs() > largest * (1 + 1e-6)).sum())
        scaled = scaled.clamp(-largest, largest)
        rounded = scaled.round() if self.stored == "int8" else plain(in_format(scaled, FORMATS[self.stored]))
        stored = rounded * self._scales[index]
        self.entries += self._count_written(index, x, stored)
        x.copy_(stored)

    def _scale_of(self, x: torch.Tensor, largest: float) -> torch.Tensor:
        """The scale of a tensor that holds the prompt: a number or, per head, [1, heads, 1, 1]."""
        if self.scale == "one":
            return x.new_ones(())
        by_head = self.scale == "head" and x.dim() == 4
        most = x.abs().amax((0, 2, 3), keepdim=True) if by_head else x.abs().max()
        return most.clamp_min(torch.finfo(torch.float32).tiny) / largest

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
        after_prompt = self.sizes[0]
        steps = len(self.sizes) - 1
        growth = self.sizes[-1] - after_prompt
        per_token = growth / steps if steps else after_prompt / max(first, 1)
        fixed = max(after_prompt - first * per_token, 0.0)
        return fixed, per_token


def stored_cache(
    decoding: Decoding,
    model: nn.Module,
    batches: Sequence[ReferenceTokens],
    around: Around,
    stored: str,
    scale: str = "tensor",
    only: Container[str] | None = None,
    observe: Observe | None = None,
) -> StoredCache:
    """Compare the FP32 model with its cache in a format and in FP32. scale, only: as in `CacheRounding`."""
    rounding = [CacheRounding(stored, len(one.tokens), scale, only) for one in batches]
    rows = [decoding.compare(model, [one], around, how, observe) for one, how in zip(batches, rounding, strict=True)]
    comparison = figures(batches, {"cached": [row["cached"][0] for row in rows]})
    fixed, each = rounding[0].bytes_of(batches[0].prompts.ids.shape[1])
    beyond = sum(one.beyond for one in rounding) / max(sum(one.entries for one in rounding), 1)
    return StoredCache(stored, fixed, each, beyond, comparison, scale)


def stored_caches(
    decoding: Decoding, model: nn.Module, batches: Sequence[ReferenceTokens], around: Around
) -> tuple[StoredCache, ...]:
    """The FP32 model with its cache in each format of STORED; () if the model has no cache, or if no text has a second token:
    the first token depends on the prompt alone, not on the cache."""
    if not any(bool(one.counts[:, 1:].any()) for one in batches):
        return ()
    result = []
    for stored in STORED:
        cache = stored_cache(decoding, model, batches, around, stored)
        if not cache.fixed_bytes + cache.bytes_per_token:
            return ()
        result.append(cache)
    return tuple(result)


def scaled_caches(
    decoding: Decoding, model: nn.Module, batches: Sequence[ReferenceTokens], around: Around
) -> tuple[StoredCache, ...]:
    """The FP32 model with its cache in each format and scale of OTHER_SCALES."""
    return tuple(stored_cache(decoding, model, batches, around, *each) for each in OTHER_SCALES)


def recommend_cache(caches: Sequence[StoredCache], limits: Sequence[Criterion], *plan: TokenComparison) -> str | None:
    """The smallest cache that, with the plan if given, meets the limits on KL and top tokens; None if every cache
    violates a limit, or without limits."""
    for one in sorted(caches, key=lambda one: (one.fixed_bytes + one.bytes_per_token, one.generated.kl)):
        if are_met(limits, one.generated, *plan):
            return one.stored
    return None


def are_met(limits: Sequence[Criterion], *errors: TokenComparison) -> bool:
    """Whether the errors of a cache and of a plan together meet the limits on KL and top tokens; not without limits.

    The errors are added. For KL the sum is exact to leading order if both errors are independent; for top tokens the sum
    overestimates the change.
    """
    if not limits:
        return False
    divergences = [math.inf if error.kl is None else error.kl for error in errors]
    changed_tops = [1 - (error.same_top or 0.0) for error in errors]
    values = {"kl": math.fsum(divergences), "top1": 1 - math.fsum(changed_tops)}
    return all(limit.holds(values[limit.kind]) for limit in limits)


def figures(batches: Sequence[ReferenceTokens], compared: dict[str, Any] | str) -> TokenComparison:
    """Summarize results of `Decoding.compare`, or its failure; tokens after the first end token do not count."""
    if isinstance(compared, str):
        return TokenComparison(None, failure=compared)
    counts = torch.cat([one.counts.cpu() for one in batches]).T  # [steps, prompts]
    cached = torch.cat(compared["cached"], 2)  # [4, steps, prompts]
    kl, chosen, top, change = (x[counts] for x in cached)
    flips = float(chosen.sum())
    tokens = max(int(counts.sum()), 1)
    per_1000 = 1000 / tokens

    # The square root of a Poisson number is about normal, with a standard deviation of 1/2.
    root = math.sqrt(flips)
    flips_low = max(root - NORMAL_95, 0.0) ** 2
    flips_high = (root + NORMAL_95) ** 2

    flipped = cached[1].bool() & counts
    firsts = sorted(_first(steps_of_prompt) for steps_of_prompt in flipped.T)
    steps = counts.shape[0]
    number_of_runs = min(MAX_RUNS, steps)
    edges = [round(i * steps / number_of_runs) for i in range(number_of_runs + 1)]
    runs = [cached[0][a:b][counts[a:b]] for a, b in pairwise(edges)]

    one_pass_kl = None
    one_pass_flips = None
    if compared.get("one_pass"):
        one_pass = torch.cat(compared["one_pass"], 2)
        one_pass_kl = float(one_pass[0][counts].mean())
        one_pass_flips = float(one_pass[1][counts].sum()) * per_1000
    return TokenComparison(
        kl=float(kl.mean()),
        kl_99=float(kl.quantile(0.99)),
        kl_most=float(kl.max()),
        same_top=1 - float(top.mean()),
        rms_probability=float(change.square().mean().sqrt()),
        flips=flips * per_1000,
        flips_low=flips_low * per_1000,
        flips_high=flips_high * per_1000,
        first_flip=_whole(statistics.median_high(firsts)),
        first_flip_10=_whole(firsts[(len(firsts) - 1) // 10]),
        kl_by_position=tuple(float(run.mean()) for run in runs if run.numel()),
        one_pass_kl=one_pass_kl,
        one_pass_flips=one_pass_flips,
    )


def expected_flips(batches: Sequence[ReferenceTokens], change: float, sizes: torch.Tensor) -> tuple[float, int | None]:
    """Expected flips per 1,000 tokens, and the step at which half of the prompts are expected to have flipped (None: no
    step), if margins change by independent normal errors. sizes: [steps], standard deviations in units of `change`."""
    best = torch.cat([one.best for one in batches])  # [prompts, steps, best tokens]
    counts = torch.cat([one.counts for one in batches])  # [prompts, steps]: whether the token counts
    deviations = sizes.to(best).clamp_min(1e-9)
    in_deviations = (best / deviations[:, None]).flatten(0, 1)
    chances = count_replaced(in_deviations[:, :1], in_deviations[:, 1:], change).view(counts.shape) * counts

    tokens = max(int(counts.sum()), 1)
    flips = 1000 * float(chances.sum()) / tokens
    unchanged = (1 - chances).cumprod(1).mean(0)  # [steps]: share of prompts without a flip so far
    return flips, _whole(_first(unchanged <= 0.5))


def _first(flipped: torch.Tensor) -> float:
    """The number of the first true entry, from 1; inf if every entry is false."""
    return float(flipped.int().argmax()) + 1 if bool(flipped.any()) else math.inf


def _whole(steps: float) -> int | None:
    return int(steps) if math.isfinite(steps) else None
