"""Caches with a format per layer: the recommended set against all sets, scales per head, and flags of vLLM."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor.artefact.cache_flags import vllm_flags, vllm_notes
from auditor.criteria import criteria_of
from auditor.features.generation.compare import (
    CacheRounding,
    Decoding,
    ReferenceTokens,
    named_tensors_of,
    scaled_caches,
    stored_cache,
    stored_caches,
)
from auditor.features.generation.decode import prompts_of
from auditor.features.generation.layers import groups_of, plan_cache
from auditor.features.generation.report import generation_lines
from auditor.records.generation import CachedTensor, CachePlan, StoredCache, TokenComparison
from auditor.reporters import html
from tests.support.subjects import normal, seeded

transformers = pytest.importorskip("transformers")

WORDS = 97
LAYERS = 3
IDS = torch.randint(5, WORDS, (4, 12), generator=torch.Generator().manual_seed(1))
STEPS = 10
NAMES = [f"layer {index} {part}" for index in range(LAYERS) for part in ("keys", "values")]


def llama() -> nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, num_key_value_heads=2, initializer_range=0.3, **sizes)
    config.eos_token_id = config.pad_token_id = None
    model = seeded(lambda: transformers.LlamaForCausalLM(config))
    with torch.no_grad():  # one head of the middle layer takes the range of its keys
        model.model.layers[1].self_attn.k_proj.weight[:16] *= 8
        model.model.layers[1].self_attn.q_proj.weight[:32] /= 8
    return model


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Decoding, list[ReferenceTokens]]:
    model, decoding = llama(), Decoding(STEPS, 0.0, 0)
    file = tmp_path_factory.mktemp("logits") / "logits.pt"
    one = decoding.reference(model, prompts_of(model, ((), {"input_ids": IDS})), file, nullcontext)
    return model, decoding, [one]


@pytest.fixture(scope="module")
def caches(made: tuple[nn.Module, Decoding, list[ReferenceTokens]]) -> tuple[StoredCache, ...]:
    return (*stored_caches(*made_of(made)), *scaled_caches(*made_of(made)))


def made_of(made: tuple[nn.Module, Decoding, list[ReferenceTokens]]) -> tuple:
    model, decoding, batches = made
    return decoding, model, batches, nullcontext


def by_hand(model: nn.Module, one: ReferenceTokens, small: frozenset[str], most: float, *, by_head: bool) -> float:
    """Mean KL with keys and values rounded after every step: those in `small` in one byte, the others in BF16."""
    past, scales, total = transformers.DynamicCache(), {}, 0.0
    with torch.no_grad():
        whole = torch.cat([IDS, one.tokens], 1)
        expected = model(whole).logits[:, IDS.shape[1] - 1 : -1].double().log_softmax(-1)
        for step in range(STEPS):
            fed = IDS if step == 0 else one.tokens[:, step - 1 : step]
            logits = model(fed, past_key_values=past, use_cache=True).logits[:, -1].double().log_softmax(-1)
            total += float((expected[:, step].exp() * (expected[:, step] - logits)).sum(-1).mean())
            for index, layer in enumerate(past.layers):
                for part in ("keys", "values"):
                    name, x = f"layer {index} {part}", getattr(layer, part)
                    if name not in small:
                        x.copy_(x.bfloat16())
                        continue
                    heads = range(x.shape[1]) if by_head else [slice(None)]
                    for head in heads:
                        scale = scales.setdefault((name, str(head)), x[:, head].abs().max() / most)
                        within = (x[:, head] / scale).clamp(-most, most)
                        rounded = within.round() if most == 127 else within.to(torch.float8_e4m3fn).float()
                        x[:, head] = rounded * scale
    return total / STEPS


@pytest.mark.parametrize(("stored", "most"), [("fp8_e4m3", 448.0), ("int8", 127.0)])
@pytest.mark.parametrize("scale", ["tensor", "head"])
def test_a_cache_with_a_format_per_layer_gives_what_a_loop_by_hand_gives(
    made: tuple[nn.Module, Decoding, list[ReferenceTokens]], stored: str, most: float, scale: str
) -> None:
    small = frozenset(NAMES[:3])
    cache = stored_cache(*made_of(made), stored, scale, small)
    expected = by_hand(made[0], made[2][0], small, most, by_head=scale == "head")
    assert cache.generated.kl == pytest.approx(expected, rel=1e-3)
    heads, size = 2, 16
    assert cache.bytes_per_token == heads * size * (3 * 1 + 3 * 2)


def test_a_scale_per_head_helps_where_one_head_is_large(caches: tuple[StoredCache, ...]) -> None:
    kl = {(one.stored, one.scale): one.generated.kl for one in caches}
    assert set(kl) == {
        ("bf16", "tensor"),
        *((x, s) for x in ("fp8_e4m3", "int8") for s in ("tensor", "head")),
        ("fp8_e4m3", "one"),
    }
    assert kl["int8", "head"] < 0.7 * kl["int8", "tensor"]


def every_set() -> Iterator[frozenset[str]]:
    for number in range(len(NAMES) + 1):
        yield from map(frozenset, combinations(NAMES, number))


@pytest.fixture(scope="module")
def exhaustive(
    made: tuple[nn.Module, Decoding, list[ReferenceTokens]], caches: tuple[StoredCache, ...]
) -> dict[frozenset[str], StoredCache]:
    """Every set of keys and values in one byte, in the format and scale with the smallest divergence."""
    base = min(caches[1:], key=lambda one: one.generated.kl)
    return {small: stored_cache(*made_of(made), base.stored, base.scale, small) for small in every_set()}


def small_of(plan: CachePlan) -> frozenset[str]:
    return frozenset(one.name for one in plan.tensors if one.stored == plan.stored)


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7, 0.9, 1.1])
def test_the_recommended_set_is_the_best_of_all_sets(
    made: tuple[nn.Module, Decoding, list[ReferenceTokens]],
    caches: tuple[StoredCache, ...],
    exhaustive: dict[frozenset[str], StoredCache],
    share: float,
) -> None:
    limit = share * exhaustive[frozenset(NAMES)].generated.kl
    plan = plan_cache(*made_of(made), caches, criteria_of({"logits": f"kl <= {limit:.17g}"}))
    within = {small: one for small, one in exhaustive.items() if one.generated.kl <= limit}
    if not within:
        assert plan is None
        return
    best = min(within, key=lambda small: (within[small].bytes_per_token, within[small].generated.kl))
    assert small_of(plan) == best
    assert plan.generated.kl == pytest.approx(exhaustive[best].generated.kl, rel=1e-6)
    assert plan.bits == pytest.approx(16 - 8 * len(best) / len(NAMES))
    assert plan.runs < len(exhaustive) / 2


def test_the_errors_of_the_plan_beside_it_are_added(
    made: tuple[nn.Module, Decoding, list[ReferenceTokens]], caches: tuple[StoredCache, ...]
) -> None:
    base = min(caches[1:], key=lambda one: one.generated.kl)
    limits = criteria_of({"logits": f"kl <= {base.generated.kl * 1.01:.17g}"})
    alone = plan_cache(*made_of(made), caches, limits)
    beside = plan_cache(*made_of(made), caches, limits, (base.generated,))
    assert (alone.kept, alone.runs) == ((), 0)
    assert beside is None or beside.kept
    assert plan_cache(*made_of(made), caches, ()) is None


def test_a_cache_that_changes_no_probability_at_all_is_the_nearest(
    made: tuple[nn.Module, Decoding, list[ReferenceTokens]], caches: tuple[StoredCache, ...]
) -> None:
    small = [index for index, one in enumerate(caches) if one.stored != "bf16"]
    for index in small:
        exact = [*caches]
        exact[index] = replace(caches[index], generated=replace(caches[index].generated, kl=0.0))
        plan = plan_cache(*made_of(made), exact, criteria_of({"logits": "kl <= 1e-9"}))
        assert (plan.stored, plan.scale) == (caches[index].stored, caches[index].scale)


def test_of_a_deep_model_neighbouring_layers_are_measured_together() -> None:
    entries = {f"layer {index} {part}": 64.0 for index in range(30) for part in ("keys", "values")}
    groups = groups_of(entries)
    assert len(groups) <= 16
    assert sorted(name for group in groups for name in group.names) == sorted(entries)
    assert groups[0].name == "layers 0 to 3 keys"
    assert groups[0].layers == (0, 1, 2, 3)


def test_tensors_of_other_states_are_named_by_their_place() -> None:
    state = (torch.ones(2, 3), {"memory": torch.ones(2), "ids": torch.ones(2, dtype=torch.long)})
    assert [name for name, _ in named_tensors_of(state)] == ["state 0", "state 1 memory"]
    rounding = CacheRounding("int8", 2, "head", {"state 0"})
    rounding(state)
    assert rounding.sizes == [6 / 2 * 1 + 2 / 2 * 2]


def keys_beyond() -> Tensor:
    return normal(1, 2, 4, 8) * 1000


def test_a_scale_fixed_at_one_saturates_beyond_the_largest_number(tmp_path: Path) -> None:
    keys = keys_beyond()
    expected = float((keys.abs() > 448 * (1 + 1e-6)).float().mean())
    rounding = CacheRounding("fp8_e4m3", 1, "one")
    rounding([keys])
    assert rounding.beyond / rounding.entries == pytest.approx(expected)
    assert float(keys.abs().max()) == 448


def plan_of(stored: str, scale: str, kept: set[str]) -> CachePlan:
    tensors = [CachedTensor(name, (int(name.split()[1]),), "bf16" if name in kept else stored) for name in NAMES]
    return CachePlan(stored, scale, tuple(tensors), 10.0, 0.0, 64.0, TokenComparison(1e-3))


def test_flags_of_vllm_skip_whole_layers_and_notes_say_so() -> None:
    plan = plan_of("fp8_e4m3", "head", {"layer 0 keys", "layer 2 keys", "layer 2 values"})
    assert vllm_flags(plan) == "--kv-cache-dtype fp8 --kv-cache-dtype-skip-layers 0 2"
    whole, scales = vllm_notes(plan)
    assert "keys and values of layer 0 stay in 16 bits" in whole
    assert 'strategy="attn_head"' in scales

    assert vllm_flags(plan_of("fp8_e4m3", "one", set())) == "--kv-cache-dtype fp8"
    assert vllm_notes(plan_of("fp8_e4m3", "one", set())) == ["vLLM's scales are 1 by default."]
    assert vllm_flags(plan_of("fp8_e4m3", "tensor", set(NAMES))) == ""
    assert vllm_flags(plan_of("int8", "tensor", set())) == ""
    (note,) = vllm_notes(plan_of("int8", "tensor", set()))
    assert "no INT8 cache with fixed scales" in note


def test_every_page_gives_the_cache_of_each_layer() -> None:
    asked = {"generate": 6, "formats": "bf16", "strategies": "autocast", "criteria": "logits: kl <= 0.003"}
    audit = auditor.audit(llama(), {"input_ids": IDS}, **asked)
    plan = audit.generation.cache_plan
    assert plan.kept
    assert plan.bits > 8
    assert {one.scale for one in audit.generation.scaled_caches} == {"head", "one"}
    said = " ".join(generation_lines(audit))
    assert f"has {', '.join(one.name for one in plan.kept)} in BF16 and all others in" in said
    page = html(audit)
    for one in plan.tensors:
        assert f">{one.name}<" in page
    written = audit.to_dict()["generation"]["cache_plan"]
    assert [one["name"] for one in written["tensors"]] == NAMES
