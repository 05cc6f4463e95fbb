"""The search for 16-bit plans against a long random search on eight small models, in predicted time at the budget."""

import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import benchmarks.subjects  # noqa: F401 - lets transformers see a torchvision without operators
from auditor.plan.modules import Modules
from auditor.plan.plans import Planner
from auditor.plan.search import MARGIN, Candidate
from tests.support.planning import bench_of
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded

pytestmark = pytest.mark.slow

RUNS = 100
"""Replays of one random search; the audit's own search has at most a tenth of them."""

IDLE = 25
"""Changes in a row without an improvement, after which the random search starts again."""


def spread(model: nn.Module, by: float) -> nn.Module:
    """The model with every weight multiplied by a factor of its own, so that modules differ in how much they add."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(torch.exp(by * torch.randn((), generator=generator)))
    return model


def tokens() -> Tensor:
    return torch.randint(0, 256, (2, 24), generator=torch.Generator().manual_seed(2))


def of_transformers(name: str, by: float, **sizes: int) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=256, use_cache=False, **sizes)
    config.bos_token_id = config.eos_token_id = config.pad_token_id = None
    kind = {"Gemma3Text": "Gemma3ForCausalLM", "GPT2": "GPT2LMHeadModel", "Llama": "LlamaForCausalLM"}[name]
    return spread(seeded(lambda: getattr(transformers, kind)(config)), by)


def gemma() -> tuple[nn.Module, Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 8}
    return of_transformers("Gemma3Text", 0.6, **sizes), tokens()


def gpt2() -> tuple[nn.Module, Tensor]:
    return of_transformers("GPT2", 0.5, n_positions=64, n_embd=64, n_layer=3, n_head=4), tokens()


def llama() -> tuple[nn.Module, Tensor]:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    return of_transformers("Llama", 0.5, **sizes), tokens()


def vit() -> tuple[nn.Module, Tensor]:
    timm = pytest.importorskip("timm")
    sizes = {"img_size": 64, "depth": 3, "embed_dim": 48, "num_classes": 10}
    return spread(seeded(lambda: timm.create_model("vit_tiny_patch16_224", **sizes)), 0.5), normal(4, 3, 64, 64)


def mobile() -> tuple[nn.Module, Tensor]:
    def block(inputs: int, outputs: int, stride: int = 1, groups: int = 1) -> nn.Module:
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, groups=groups, bias=False)
        return nn.Sequential(convolution, nn.BatchNorm2d(outputs), nn.ReLU6())

    def build() -> nn.Module:
        blocks = [block(3, 16, 2), block(16, 16, 1, 16), block(16, 32), block(32, 32, 2, 32), block(32, 64)]
        return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    return spread(seeded(build), 0.5), normal(4, 3, 32, 32)


def unet() -> tuple[nn.Module, Tensor]:
    def block(inputs: int, outputs: int) -> nn.Module:
        first = [nn.Conv2d(inputs, outputs, 3, 1, 1), nn.GroupNorm(4, outputs), nn.SiLU()]
        return nn.Sequential(*first, nn.Conv2d(outputs, outputs, 3, 1, 1), nn.GroupNorm(4, outputs), nn.SiLU())

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        wide = m.down(x)
        deep = m.up(m.inner(F.max_pool2d(wide, 2)))
        return m.out(m.last(torch.cat([deep, wide], 1)))

    def build() -> nn.Module:
        parts = {"down": block(3, 16), "inner": block(16, 32), "up": nn.ConvTranspose2d(32, 16, 2, 2)}
        return Model(forward, **parts, last=block(32, 16), out=nn.Conv2d(16, 1, 1))

    return spread(seeded(build), 0.5), normal(2, 3, 32, 32)


def recurrent() -> tuple[nn.Module, Tensor]:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        return m.head(m.norm(m.layers(m.embed(x))[0]))

    def build() -> nn.Module:
        parts = {"embed": nn.Embedding(256, 48), "layers": nn.GRU(48, 64, 2, batch_first=True)}
        return Model(forward, **parts, norm=nn.LayerNorm(64), head=nn.Linear(64, 64))

    return spread(seeded(build), 0.3), tokens()


def residual() -> tuple[nn.Module, Tensor]:
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        x = m.first(x)
        for block in m.blocks:
            x = x + block(x)
        return m.last(x)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))

    def build() -> nn.Module:
        blocks = nn.ModuleList(block() for _ in range(8))
        return Model(forward, first=nn.Linear(32, 64), blocks=blocks, last=nn.Linear(64, 8))

    return spread(seeded(build), 1.0), normal(64, 32)


MODELS = (gemma, gpt2, llama, vit, mobile, unet, recurrent, residual)


def best_by_chance(space: Modules, limit: float, *starts: Candidate) -> Candidate:
    """The cheapest choice of many climbs, each of which moves random modules while replays stay within the limit."""
    draw = random.Random(0)
    groups = space.problem.energy.groups
    known = [space.nothing, *starts]
    left = RUNS
    while left > 0:
        at = draw.choice(known)
        if draw.random() < 0.5:
            at = space.problem.cheapest(limit * 10 ** draw.uniform(-1, 1))
        if not space.error(at) <= limit:
            at = space.nothing
        idle = 0
        while left > 0 and idle < IDLE:
            idle += 1
            lowered = frozenset[str]().union(*draw.sample(groups, min(draw.choice((1, 2, 4)), len(groups))))
            raised = draw.choice(groups) if draw.random() < 0.2 else frozenset[str]()
            other = space.problem.evaluate(at.high - lowered | raised)
            if not other.feasible or other.price >= at.price:
                continue
            left -= other.high not in space.log
            if space.error(other) <= limit:
                at, idle = other, 0
        left -= 1  # a climb costs a run, whatever it finds, so that the search ends
        known = sorted([*known, at], key=lambda point: point.price)[:8]
    return known[0]


@pytest.mark.parametrize("budget", [0.01, 0.003])
@pytest.mark.parametrize("build", MODELS)
def test_no_long_random_search_is_a_fifth_faster(build: Callable[[], tuple[nn.Module, Tensor]], budget: float) -> None:
    model, x = build()
    planner = Planner(bench_of(model.eval(), x, formats=("bf16",), max_error=budget))
    limit = MARGIN * budget
    made = planner.make(dict.fromkeys(planner.spaces, limit))
    for name, space in planner.spaces.items():
        own = made[name]
        assert own == space.nothing or space.error(own) <= budget  # all low may use the whole budget
        best = best_by_chance(space, limit, own)
        print(f"{build.__name__}, {budget}, {name}: {own.seconds / best.seconds - 1:.1%}")
        assert own.seconds <= 1.2 * best.seconds, name
