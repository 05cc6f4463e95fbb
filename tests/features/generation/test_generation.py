"""Prompts continued token by token: as transformers does it, as a step function does, and under plans."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.criteria import criteria_of
from auditor.errors import AuditorError
from auditor.features.generation.compare import (
    CacheRounding,
    Decoding,
    ReferenceTokens,
    cached_tensors,
    expected_flips,
    figures,
    recommend_cache,
    stored_caches,
)
from auditor.features.generation.decode import Prompts, prompts_of
from auditor.features.generation.stage import parts_of
from auditor.isolation.run_model import Around
from auditor.isolation.tensors import plain_torch
from auditor.records.generation import StoredCache, TokenComparison
from auditor.report.plans import advice
from tests.files.test_strangers import run
from tests.support.refusing import refused
from tests.support.replaying import Model
from tests.support.subjects import capture_of, normal, seeded
from tests.support.thinned import thinned

transformers = pytest.importorskip("transformers")

WORDS = 97
SIZES = {"layers": 2, "ffn_dim": 128, "attention_heads": 4}
IDS = torch.randint(5, WORDS, (8, 12), generator=torch.Generator().manual_seed(1))


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, initializer_range=0.3, **sizes)
    config.eos_token_id = config.pad_token_id = None
    return seeded(lambda: transformers.LlamaForCausalLM(config))


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=WORDS, decoder_start_token_id=0, initializer_factor=3.0, **sizes)
    config.eos_token_id = config.pad_token_id = None
    return seeded(lambda: transformers.T5ForConditionalGeneration(config))


def encoder_decoder(kind: str, **own: int | None) -> nn.Module:
    sizes = {f"{part}_{size}": n for part in ("encoder", "decoder") for size, n in SIZES.items()}
    ends = {"eos_token_id": None, "pad_token_id": None, "decoder_start_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, d_model=64, init_std=0.3, **sizes, **ends, **own)
    return seeded(lambda: getattr(transformers, f"{kind}ForConditionalGeneration")(config))


bart = partial(encoder_decoder, "Bart", forced_eos_token_id=None)
whisper = partial(encoder_decoder, "Whisper", bos_token_id=None, num_mel_bins=16, max_source_positions=32)


class Steps(nn.Module):
    """A recurrent model with a step function."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.cell = nn.Embedding(WORDS, 64), nn.GRU(64, 64, batch_first=True)
        self.head = nn.Linear(64, WORDS)
        with torch.no_grad():
            self.head.weight.mul_(8)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.cell(self.embed(ids))[0])

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        seen, state = self.cell(self.embed(tokens), state)
        return self.head(seen), state


class Rereading(Steps):
    """Its state is the text so far, which every step reads again."""

    def step(self, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        text = tokens if state is None else torch.cat([state, tokens], 1)
        return self(text)[:, -1], text


def tokens_of(
    model: nn.Module,
    given: dict[str, Tensor] | tuple[Tensor, ...],
    folder: Path,
    temperature: float = 0.0,
    seed: int = 0,
) -> ReferenceTokens:
    batch = ((), given) if isinstance(given, dict) else (given, {})
    return Decoding(10, temperature, seed).reference(model, prompts_of(model, batch), folder / "logits.pt", nullcontext)


def test_a_causal_model_goes_on_as_transformers_has_it_wherever_the_padding_is(tmp_path: Path) -> None:
    model, mask = llama(), torch.ones_like(IDS)
    mask[3, 7:] = mask[5, 9:] = 0
    found = tokens_of(model, {"input_ids": IDS, "attention_mask": mask}, tmp_path).tokens
    for row, length in enumerate(mask.sum(1).tolist()):
        alone = model.generate(IDS[row : row + 1, :length], max_new_tokens=10, do_sample=False)
        assert found[row].tolist() == alone[0, length:].tolist()


SOUND = torch.randn(8, 16, 64, generator=torch.Generator().manual_seed(1))
ENCODED = {"input_ids": IDS, "attention_mask": (torch.arange(12) < torch.arange(5, 13)[:, None]).long()}


@pytest.mark.parametrize(
    ("make", "given"),
    thinned([(t5, ENCODED), (bart, ENCODED), (whisper, {"input_features": SOUND})], 2),
    ids=["t5", "bart", "whisper"],
)
def test_an_encoder_decoder_model_is_audited_on_what_transformers_generates(make, given, tmp_path: Path) -> None:
    model = make()
    found = tokens_of(model, given, tmp_path).tokens
    generate = transformers.GenerationMixin.generate  # whisper's own adds tokens for languages and tasks
    assert found.tolist() == generate(model, **given, max_new_tokens=10, do_sample=False)[:, 1:].tolist()
    given = given | {"decoder_input_ids": torch.zeros(8, 1, dtype=torch.long)}
    audit = auditor.audit(model, given, generate=10, formats="bf16", strategies="autocast", max_error=0.3)
    assert audit.generation.tokens == 80
    assert {one.stored for one in audit.generation.caches} == {"bf16", "fp8_e4m3", "int8"}
    for plan in audit.plans.values():
        assert plan.is_verified
        assert plan.generated.failure is None
        assert plan.generated.kl > 0
        assert plan.generated.one_pass_kl == pytest.approx(plan.generated.kl, rel=0.1)
        assert plan.generated.predicted_flips > 0


@pytest.mark.parametrize("kind", [Steps, Rereading])
def test_a_step_function_goes_on_as_its_whole_forward_does(tmp_path: Path, kind: type[nn.Module]) -> None:
    model, ids = kind().eval(), IDS
    found = tokens_of(model, (ids,), tmp_path)
    for step in range(10):
        with torch.no_grad():
            expected = model(ids)[:, -1].argmax(-1)
        assert found.tokens[:, step].tolist() == expected.tolist()
        ids = torch.cat([ids, expected[:, None]], 1)
    assert type(model) is kind


def test_what_is_drawn_goes_by_the_seed_alone(tmp_path: Path) -> None:
    first, again, other = (tokens_of(Steps().eval(), (IDS,), tmp_path, 1.0, seed).tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_nothing_counts_behind_the_end_of_a_text(tmp_path: Path) -> None:
    model = llama()
    free = tokens_of(model, {"input_ids": IDS}, tmp_path).tokens
    model.generation_config.eos_token_id = model.config.eos_token_id = int(free[2, 4])
    counts = tokens_of(model, {"input_ids": IDS}, tmp_path).counts
    first = (free[2] == free[2, 4]).int().argmax()
    assert counts[2].tolist() == [step <= first for step in range(10)]


def gpt2(kind: str = "LMHeadModel", **own: int) -> nn.Module:
    """A model with 14 positions."""
    config = transformers.GPT2Config(vocab_size=WORDS, n_embd=32, n_layer=1, n_head=2, n_positions=14, **own)
    config.bos_token_id = config.eos_token_id = None
    return seeded(lambda: getattr(transformers, f"GPT2{kind}")(config))


classifier = partial(gpt2, "ForSequenceClassification", pad_token_id=0)


def encoder() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return seeded(lambda: transformers.BertLMHeadModel(transformers.BertConfig(vocab_size=WORDS, **sizes)))


def plain() -> nn.Module:
    return Model(lambda m, x: m.linear(x), linear=nn.Linear(4, 4))


def stepping(step: Callable[..., Any]) -> nn.Module:
    """A model whose `step` is this function of the model and its arguments."""
    made = type("Stepping", (Steps,), {"step": step})
    return made()


@pytest.mark.parametrize(
    ("make", "given", "said"),
    [
        (lambda: stepping(lambda m, tokens: Steps.step(m, tokens, None)), (IDS,), "no step"),
        (lambda: stepping(lambda m, tokens, state: Steps.step(m, tokens, state)[0]), (IDS,), "must return two values"),
        (lambda: stepping(lambda m, tokens, state: (m(tokens)[..., :5], state)), (IDS,), "tokens, 5\\]"),
        (plain, (torch.ones(2, 4),), "no step"),
        (llama, {"input_ids": IDS[:, :1]}, "fewer than 2 tokens"),
        (Steps, (torch.ones(2, dtype=torch.long),), "contain no prompts"),
        (
            llama,
            {"input_ids": IDS, "attention_mask": torch.ones(8, 1, 12, 12)},
            "mask has the shape \\[8, 1, 12, 12\\]",
        ),
        (llama, {"input_ids": IDS, "past_key_values": transformers.DynamicCache()}, "contain past_key_values"),
        (lambda: llama().model, {"input_ids": IDS}, "LlamaModel returns no logits"),
        (classifier, {"input_ids": IDS}, "GPT2ForSequenceClassification returns no logits"),
        (encoder, {"input_ids": IDS}, "BertLMHeadModel returns no logits"),
        (
            gpt2,
            {"input_ids": IDS},
            "GPT2LMHeadModel raised IndexError: .* prompts of 12 tokens by 4: .* fewer positions",
        ),
    ],
)
def test_what_cannot_be_continued_is_said_in_one_line(make, given, said) -> None:
    with refused(AuditorError, "cannot-generate", match=said):
        auditor.audit(make().eval(), given, generate=4)


def test_a_decoder_reads_its_prompts_behind_their_padding_and_no_labels(tmp_path: Path) -> None:
    """The mask of the prompts grows with the tokens; labels are for a loss. Each prompt alone is continued alike."""
    model, mask = t5(), torch.ones(8, 4, dtype=torch.long)
    mask[3, 2:] = mask[5, :1] = 0
    prompts = {"decoder_input_ids": IDS[:, :4], "decoder_attention_mask": mask, "labels": IDS[:, :4]}
    found = tokens_of(model, ENCODED | prompts, tmp_path)
    assert found.tokens.shape == (8, 10)
    for row, kept in enumerate(mask.bool()):
        given = {name: x[row : row + 1] for name, x in ENCODED.items()}
        alone = tokens_of(model, given | {"decoder_input_ids": IDS[row : row + 1, :4][:, kept]}, tmp_path)
        assert found.tokens[row].tolist() == alone.tokens[0].tolist()
    again = tokens_of(model, ENCODED | prompts, tmp_path)
    for compared in Decoding(10, 0.0, 0).compare(model, [again], nullcontext).values():
        assert float(compared[0][0].mean()) < 1e-9


def test_a_decoder_without_a_start_token_needs_prompts() -> None:
    model = t5()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None
    with refused(AuditorError, "cannot-generate", match="no decoder_start_token_id"):
        prompts_of(model, ((), ENCODED))
    assert prompts_of(model, ((), ENCODED | {"decoder_input_ids": IDS})).ids.shape == IDS.shape


def test_a_cache_that_no_token_reads_is_not_judged(tmp_path: Path) -> None:
    """One token comes from the prompt alone; a text that ends at its first token has no other."""
    model, decoding = llama(), Decoding(1, 0.0, 0)
    prompts = prompts_of(model, ((), {"input_ids": IDS}))
    one = decoding.reference(model, prompts, tmp_path / "logits.pt", nullcontext)
    assert stored_caches(decoding, model, [one], nullcontext) == ()
    model.generation_config.eos_token_id = one.tokens.unique().tolist()
    ended = tokens_of(model, {"input_ids": IDS}, tmp_path)
    assert int(ended.counts.sum()) == len(IDS)
    assert stored_caches(Decoding(10, 0.0, 0), model, [ended], nullcontext) == ()


@pytest.mark.parametrize("strategies", [["autocast", "cast"], ["cast"]])
def test_a_plan_that_cannot_decode_is_not_recommended(strategies: list[str]) -> None:
    """The first state is in FP32, which a GRU in BF16 rejects; autocast casts it. `forward` runs under both plans."""

    def step(m: Any, tokens: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        return Steps.step(m, tokens, torch.zeros(1, len(tokens), 64) if state is None else state)

    options = {"formats": ["bf16"], "strategies": strategies, "generate": 4, "max_error": 0.5}
    audit = auditor.audit(stepping(step).eval(), IDS, **options)
    assert audit.plans["cast_bf16"].is_verified
    assert not audit.plans["cast_bf16"].holds
    assert audit.recommended == ("autocast_bf16" if "autocast" in strategies else None)
    if "autocast" not in strategies:
        assert "no plan within the limit of every criterion can generate tokens" in audit.recommendation
        assert "Generation fails under these plans" in advice(audit)


def test_a_temperature_is_for_tokens() -> None:
    with pytest.raises(AuditorError, match="temperature"):
        auditor.audit(plain(), torch.ones(2, 4), temperature=1.0)


def test_figures_by_hand() -> None:
    # two prompts, four steps; the second text ends after two. KL 1..4 and 10, 20; one flip at step 3, one at 1
    kl = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 99.0], [4.0, 99.0]])
    flips = torch.tensor([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 1.0]])
    rows = torch.stack([kl, flips, flips, 0.1 * kl])
    counts = torch.tensor([[True] * 4, [True, True, False, False]])
    ids = torch.ones(2, 3, dtype=torch.long)
    margins = torch.tensor([[1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 9.0, 9.0]]).double()
    best = torch.stack([margins, torch.zeros(2, 4).double()], -1)
    batch = ReferenceTokens(Prompts("step", ids, ids), torch.zeros(2, 4, dtype=torch.long), best, counts, Path())
    found = figures([batch], {"cached": [rows], "one_pass": [rows]})
    assert found.kl == pytest.approx((1 + 2 + 3 + 4 + 10 + 20) / 6)
    assert found.kl_most == 20.0
    assert found.flips == pytest.approx(1000 * 2 / 6)
    assert (found.first_flip_10, found.first_flip) == (1, 3)
    assert found.flips_low == pytest.approx(1000 * (math.sqrt(2) - 0.98) ** 2 / 6)
    assert found.kl_by_position == pytest.approx((5.5, 11.0, 3.0, 4.0))
    # Phi(-1) twice, Phi(-2) twice, Phi(-3), Phi(-4), over six tokens
    flips, first = expected_flips([batch], 1.0, torch.ones(4))
    assert flips == pytest.approx(1000 * (2 * 0.158655 + 2 * 0.022750 + 0.00135 + 0.00003) / 6, rel=1e-3)
    assert first is None
    # Phi(-1) twice, Phi(-0.02) twice: the unflipped share is 0.84 after one step, 0.84 x 0.51 after two
    flips, first = expected_flips([batch], 1.0, torch.tensor([1.0, 100.0, 0.1, 0.1]))
    assert flips == pytest.approx(1000 * (2 * 0.158655 + 2 * 0.492022) / 6, rel=1e-3)
    assert first == 2
    assert figures([batch], "it raised").failure == "it raised"


@pytest.mark.parametrize(("temperature", "strategies"), thinned([(0.0, "autocast"), (1.0, "autocast,cast")]))
def test_flips_are_predicted_and_are_where_the_plan_leaves_fp32s_text(temperature: float, strategies: str) -> None:
    model, ids = llama(), torch.randint(5, WORDS, (24, 12), generator=torch.Generator().manual_seed(2))
    asked = {"generate": 48, "temperature": temperature, "formats": "bf16", "max_error": 0.2}
    audit = auditor.audit(model, {"input_ids": ids}, strategies=strategies, **asked)
    assert (audit.generation.prompts, audit.generation.tokens) == (24, 24 * 48)
    assert audit.criteria == ("logits: top1 >= 0.8",)
    for plan in audit.plans.values():
        found = plan.generated
        assert plan.is_verified
        assert 1 / 1.5 <= found.predicted_flips / found.flips <= 1.5
        assert found.flips_low <= found.flips <= found.flips_high
        assert sum(part.share for part in found.parts) == pytest.approx(1.0)
        assert {"head", "norms", "linear layers"} <= {part.part for part in found.parts}
        assert found.one_pass_kl == pytest.approx(found.kl, rel=0.05)  # a CPU that emulates: sums in another order


def test_a_weight_belongs_to_the_part_that_reads_it_and_frequencies_to_the_tables() -> None:
    def parts(model: nn.Module, x: Tensor, **given: bool) -> dict[str, str]:
        capture = capture_of(model, x, **given)
        of = parts_of(capture)
        return {one.fqn: of[one.name] for one in capture.placeholders}

    model = llama()
    found, block = parts(model, IDS, use_cache=False), "model.layers.0"
    assert found["model.rotary_emb.inv_freq"] == "rotary tables"
    assert found[f"{block}.self_attn.v_proj.weight"] == "keys and values"
    assert found[f"{block}.self_attn.q_proj.weight"] == found[f"{block}.mlp.up_proj.weight"] == "linear layers"
    assert found[f"{block}.input_layernorm.weight"] == "norms"
    assert (found["lm_head.weight"], found["model.embed_tokens.weight"]) == ("head", "linear layers")
    model.lm_head.weight = model.model.embed_tokens.weight
    assert parts(model, IDS, use_cache=False)["model.embed_tokens.weight"] == "head"
    waves = Model(lambda m, x: m.down(m.up(x).sin()), up=nn.Linear(4, 8), down=nn.Linear(8, 4))
    assert parts(waves, torch.randn(2, 4))["up.weight"] == "linear layers"  # sines that are no tables of positions


@pytest.mark.slow
def test_up_to_its_first_flip_a_plan_writes_the_text_by_itself() -> None:
    model = llama()
    audit = auditor.audit(model, {"input_ids": IDS}, generate=40, formats="bf16", strategies="autocast", max_error=0.2)
    (plan,) = audit.plans.values()
    expected = model.generate(IDS, max_new_tokens=40, do_sample=False)[:, 12:]
    with auditor.emulate("cuda"):
        given = auditor.apply(model, plan).generate(IDS, max_new_tokens=40, do_sample=False)[:, 12:]
    firsts = [
        float((a != b).int().argmax()) + 1 if bool((a != b).any()) else math.inf
        for a, b in zip(expected, given, strict=True)
    ]
    assert plan.generated.first_flip_10 == min(firsts)
    assert plan.generated.first_flip == (None if (median := sorted(firsts)[4]) == math.inf else median)


def by_hand(model: nn.Module, tokens: Tensor, stored: str) -> float:
    """Mean KL over the tokens, each fed in turn, with the cache rounded after every step by scales of the prompt."""
    past, scales, total, steps = transformers.DynamicCache(), {}, 0.0, tokens.shape[1]
    with torch.no_grad():
        expected = model(torch.cat([IDS, tokens], 1)).logits[:, 11:-1].double().log_softmax(-1)
        for step in range(steps):
            fed = IDS if step == 0 else tokens[:, step - 1 : step]
            logits = model(fed, past_key_values=past, use_cache=True).logits[:, -1].double().log_softmax(-1)
            total += float((expected[:, step].exp() * (expected[:, step] - logits)).sum(-1).mean())
            for index, layer in enumerate(past.layers):
                for name in ("keys", "values"):
                    x = getattr(layer, name)
                    most = {"int8": 127.0, "fp8_e4m3": 448.0}.get(stored)
                    if most is None:
                        x.copy_(x.bfloat16())
                        continue
                    scale = scales.setdefault((index, name), x.abs().max() / most)
                    within = (x / scale).clamp(-most, most)
                    x.copy_((within.round() if stored == "int8" else within.to(torch.float8_e4m3fn).float()) * scale)
    return total / steps


def test_a_cache_in_fewer_bits_gives_what_a_loop_by_hand_gives() -> None:
    model = llama()
    asked = {"generate": 12, "formats": "bf16", "strategies": "autocast", "max_error": 0.3}
    made = auditor.audit(model, {"input_ids": IDS}, **asked).generation
    tokens = model.generate(IDS, max_new_tokens=12, do_sample=False)[:, 12:]
    caches = {one.stored: one for one in made.caches}
    assert list(caches) == ["bf16", "fp8_e4m3", "int8"]
    for stored, found in caches.items():
        assert found.generated.kl == pytest.approx(by_hand(model, tokens, stored), rel=1e-3, abs=1e-9)
        entry = 2 if stored == "bf16" else 1
        assert (found.fixed_bytes, found.bytes_per_token) == (
            0,
            2 * 2 * 2 * 16 * entry,
        )  # layers, K and V, heads, their size
    kl = {stored: found.generated.kl for stored, found in caches.items()}
    assert 1e-9 < kl["bf16"] < min(kl["fp8_e4m3"], kl["int8"])
    assert caches["bf16"].saturated == 0 < caches["int8"].saturated


def grown_by_hand(keys: Tensor, prompt: int) -> float:
    """Share of keys [texts, tokens, size] that exceed the largest key of the prompt; each key is written once."""
    limit = keys[:, :prompt].abs().max()
    return float((keys.abs() > limit * (1 + 1e-6)).float().mean())


@pytest.mark.parametrize("kind", ["grows", "has slots", "is overwritten"])
@pytest.mark.parametrize("stored", ["int8", "fp8_e4m3"])
def test_every_entry_of_a_cache_counts_once(kind: str, stored: str) -> None:
    """Keys that grow with the position: 8 tokens of a prompt, and 40 more."""
    prompt, total = 8, 48
    keys = normal(2, total, 16, seed=3) * 1.05 ** torch.arange(total)[:, None]
    rounding, cache = CacheRounding(stored, 2), torch.zeros(2, total if kind == "has slots" else 0, 16)
    for first, last in [(0, prompt), *((i, i + 1) for i in range(prompt, total))]:
        if kind == "grows":
            cache = torch.cat([cache, keys[:, first:last]], 1)
        elif kind == "has slots":
            cache[:, first:last] = keys[:, first:last]
        else:
            cache = keys[:, first:last].clone()
        rounding([cache])
    assert rounding.entries == pytest.approx(keys.numel(), rel=0.02)  # an entry may be representable as it is
    expected = grown_by_hand(keys, prompt)
    assert expected > 0.03
    assert rounding.beyond / rounding.entries == pytest.approx(expected, rel=0.02)


def test_the_recommended_cache_is_the_smallest_that_meets_the_limits_beside_the_plan() -> None:
    plan = TokenComparison(0.004, same_top=0.98)
    found = {"bf16": (2, 0.0, 1.0), "fp8_e4m3": (1, 0.003, 0.99), "int8": (1, 0.002, 0.985)}
    caches = [StoredCache(x, 0.0, size, 0.0, TokenComparison(kl, same_top=top)) for x, (size, kl, top) in found.items()]
    for text, alone, beside in [
        ("kl <= 0.1", "int8", "int8"),  # of two of one size, the more accurate
        ("kl <= 0.0055", "int8", "bf16"),  # 0.004 + 0.002 exceeds the limit
        ("kl <= 0.001", "bf16", None),
        ("top1 >= 0.97", "int8", "fp8_e4m3"),  # 1 - 0.02 - 0.015 violates the limit, 1 - 0.02 - 0.01 does not
        ("kl <= 0.0055; top1 >= 0.99", "fp8_e4m3", None),
    ]:
        limits = criteria_of({"logits": text})
        assert (recommend_cache(caches, limits), recommend_cache(caches, limits, plan)) == (alone, beside)
        assert recommend_cache(caches, limits, TokenComparison(None, failure="no")) is None
    assert recommend_cache(caches, (), plan) is None


def test_the_losses_of_a_plan_and_of_a_cache_add_up(tmp_path: Path) -> None:
    ids = torch.randint(5, WORDS, (24, 12), generator=torch.Generator().manual_seed(2))
    model, decoding = llama(), Decoding(24, 0.0, 0)
    one = decoding.reference(model, prompts_of(model, ((), {"input_ids": ids})), tmp_path / "logits.pt", nullcontext)

    @contextmanager
    def in_bf16() -> Iterator[None]:
        with auditor.emulate("cuda"), torch.autocast("cuda", torch.bfloat16):
            yield

    class Plainly(CacheRounding):
        def __call__(self, state: object) -> None:
            with plain_torch():
                super().__call__(state)

    def compared(around: Around, stored: str | None) -> TokenComparison:
        store = Plainly(stored, len(ids)) if stored else lambda _: None
        return figures([one], {"cached": decoding.compare(model, [one], around, store)["cached"]})

    plan = compared(in_bf16, None)
    for stored in ("fp8_e4m3", "int8"):
        cache, both = compared(nullcontext, stored), compared(in_bf16, stored)
        assert both.kl == pytest.approx(plan.kl + cache.kl, rel=0.15)
        assert both.flips <= plan.flips + cache.flips


class Odd:
    """A cache of layers of which one has no keys, as the linear attention of hybrid models."""

    def __init__(self) -> None:
        self.layers = [SimpleNamespace(conv_states=torch.ones(2, 3)), SimpleNamespace(keys=torch.ones(2), values=None)]


def test_what_cannot_be_stored_in_fewer_bits_is_left_as_it_is() -> None:
    shared = torch.full((1, 3), 1.001).expand(4, 3)
    written, ids = torch.full((4, 3), 1.001), torch.ones(4, dtype=torch.long)
    assert [x.shape for x in cached_tensors(Odd())] == [(2,)]
    CacheRounding("bf16", 4)([shared, {"a": (written, ids)}, None])
    assert (float(shared[0, 0]), float(written[0, 0])) == (pytest.approx(1.001), 1.0)


@pytest.mark.parametrize(("kind", "stored"), [(Steps, 3), (Rereading, 0)])
def test_what_a_step_function_hands_on_is_its_cache(kind: type[nn.Module], stored: int) -> None:
    """A recurrent state takes the same for any text; a text that is read again has nothing to round.

    What is found is the same each time, and at a temperature too.
    """
    asked = {"generate": 6, "formats": "bf16", "strategies": "autocast", "max_error": 0.5, "temperature": 1.0}
    audit, again = (auditor.audit(kind().eval(), (IDS,), **asked) for _ in range(2))
    assert {n: p.generated for n, p in again.plans.items()} == {n: p.generated for n, p in audit.plans.items()}
    caches = audit.generation.caches
    assert len(caches) == stored
    assert [(one.fixed_bytes, one.bytes_per_token) for one in caches] == [(64 * n, 0) for n in (2, 1, 1)[:stored]]


def test_the_command_takes_text_and_verifies_in_a_fresh_process(here: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {f"w{i}": i for i in range(WORDS)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w0").save_pretrained(here / "model")
    llama().save_pretrained(here / "model")
    (here / "prompts.txt").write_text("w7 w8 w9 w10\n\nw20 w21\n")
    words = ["--inputs", "prompts.txt", "--generate", "16", "--max-error", "0.3", "--out", "found"]
    code, said, errors = run(f"hf:{here / 'model'}", *words, "--formats", "bf16", "--strategies", "autocast")
    assert code in (0, 1), errors
    plan = json.loads((here / "found" / "plan.json").read_text())
    assert len(plan["generation"].pop("caches")) == 3
    assert plan["generation"].pop("recommended_cache") in ("fp8_e4m3", "int8")
    assert {one["scale"] for one in plan["generation"].pop("scaled_caches")} == {"head", "one"}
    assert len(plan["generation"].pop("cache_plan")["tensors"]) == 4  # keys and values of two layers
    assert plan["generation"] == {"prompts": 2, "steps": 16, "tokens": 32, "temperature": 0.0}
    found = plan["plans"]["autocast_bf16"]["generated"]
    assert found["failure"] is None
    assert found["kl"] > 0
    assert "BF16 under autocast: KL" in said
    page = (here / "found" / "report.html").read_text()
    assert "The FP32 model continued 2 prompts by 16 tokens each" in page
    assert "is the smallest format within the limits if the model runs in BF16 under autocast. A cache in" in page
    assert "Divergence by position" in page
