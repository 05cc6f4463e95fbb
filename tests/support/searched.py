"""Eight small models, on which searches for plans are compared with long random searches."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import benchmarks.subjects  # noqa: F401 - lets transformers see a torchvision without operators
from tests.support.replaying import Model
from tests.support.subjects import normal, seeded


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
