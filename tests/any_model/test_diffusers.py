"""A small Stable Diffusion pipeline, which enters its autoencoder through `decode`, and whose decoder overflows FP16."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import auditor
from tests.support.subjects import normal

diffusers = pytest.importorskip("diffusers")
pytest.importorskip("transformers")

HALF = torch.float16
SIZES = {"block_out_channels": (32, 64), "in_channels": 3, "out_channels": 3, "latent_channels": 4, "sample_size": 32}
BLOCKS = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
both = pytest.mark.parametrize("strategy", ["autocast", "cast"])


def autoencoder() -> Any:
    """The first convolution of the decoder returns values beyond 65,504, which the norm after it divides again."""
    torch.manual_seed(0)
    model = diffusers.AutoencoderKL(**SIZES, **BLOCKS).eval()
    with torch.no_grad():
        for parameter in model.decoder.conv_in.parameters():
            parameter.mul_(2.0**19)
    return model


def pipeline(autoencoder: Any) -> Any:
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=16,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    ).eval()
    result = diffusers.StableDiffusionPipeline(
        vae=autoencoder,
        unet=unet,
        scheduler=diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
        text_encoder=None,
        tokenizer=None,
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    result.set_progress_bar_config(disable=True)
    return result


def image(pipe: Any) -> Tensor:
    """[1, 3, 32, 32], entries from 0 to 1; as a GPU computes it."""
    text = normal(1, 4, 32).to(pipe.unet.dtype)
    given = {"prompt_embeds": text, "negative_prompt_embeds": torch.zeros_like(text), "num_inference_steps": 2}
    with torch.no_grad(), auditor.emulate("cuda"):
        result = pipe(**given, generator=torch.Generator().manual_seed(0), output_type="pt", height=32, width=32)
    return result.images.float().nan_to_num(0)  # NaN is shown black


@contextmanager
def convolutions(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, torch.dtype]]:
    """{path of a convolution: the dtype in which it computes}, filled while the block runs."""
    paths = {module: path for path, module in model.named_modules()}
    seen: dict[str, torch.dtype] = {}
    own = nn.Conv2d._conv_forward

    def noted(module: nn.Conv2d, *args: Any) -> Tensor:
        result = own(module, *args)
        if module in paths:
            seen[paths[module]] = result.dtype
        return result

    with monkeypatch.context() as patch:
        patch.setattr(nn.Conv2d, "_conv_forward", noted)
        yield seen


@both
def test_a_pipeline_runs_its_autoencoder_as_planned(strategy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = image(pipeline(autoencoder()))
    assert expected.std() > 0.01

    broken = pipeline(autoencoder())
    broken.vae.register_to_config(force_upcast=False)
    assert image(broken.to(HALF)).max() == 0  # all black

    model = autoencoder()
    audit = auditor.audit(model.decode, normal(1, 4, 16, 16), formats=["fp16"], strategies=[strategy])
    with pytest.warns(UserWarning, match="did not run 'encoder") if strategy == "autocast" else _nothing():
        auditor.apply(model, audit, f"{strategy}_fp16")
    with convolutions(model, monkeypatch) as seen:
        result = image(pipeline(model))
    assert (result - expected).norm() / expected.norm() < 0.01

    rows = [row for row in audit.ledger if row.kind == "operation" and "conv" in row.op]
    planned = {row.module: getattr(torch, str(row.executed)) for row in rows}
    assert seen == planned
    assert {HALF, torch.float32} == set(seen.values())


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def upcast(model: Any) -> None:
    """As pipelines of SDXL do around the decoder."""
    model.to(dtype=torch.float32)
    model.post_quant_conv.to(HALF)
    model.decoder.conv_in.to(HALF)


@both
def test_force_upcast_leaves_the_plan_intact(strategy: str) -> None:
    model, latent = autoencoder(), normal(1, 4, 16, 16)
    audit = auditor.audit(model, normal(1, 3, 32, 32), formats=["fp16"], strategies=[strategy])
    auditor.apply(model, audit, f"{strategy}_fp16")
    with torch.no_grad(), auditor.emulate("cuda"):
        expected = model.decode(latent).sample
        with pytest.warns(UserWarning, match=r"\.to\(torch\.(float32|float16)\) \(test_diffusers.py:"):
            upcast(model)
        assert torch.equal(model.decode(latent).sample, expected)
