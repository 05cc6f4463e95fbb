"""Plans in pipelines of diffusers."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from auditor.snippets import snippet, snippets
from tests.support.patching import scope
from tests.support.snippets import document, pasted

LOW = {"": scope("fp16")}
PLANS = {"autocast_fp16": LOW, "cast_fp16": LOW}


def audit_of(target: str) -> dict[str, Any]:
    content = document(PLANS, "autocast_fp16")
    content["subject"]["target"] = target
    return content


@pytest.mark.parametrize(
    ("target", "folder", "component"),
    [
        ("hf:models/sd/unet", "models/sd", "unet"),
        ("hf:sd/vae:decode", "sd", "vae"),
        ("hf:org/name/transformer@main", "org/name", "transformer"),
        ("diffusers.models.autoencoders.autoencoder_kl:AutoencoderKL", "path/to/pipeline", "vae"),
    ],
)
def test_the_component_is_the_audited_one(target: str, folder: str, component: str) -> None:
    code = snippet(audit_of(target), "diffusers")
    assert f"from_pretrained({folder!r}" in code
    assert f"patched_model.apply(pipe.{component}, plan='autocast_fp16')" in code
    assert "diffusers" in snippets(audit_of(target))


def test_a_component_of_any_name_is_known_by_the_run_of_its_pipeline() -> None:
    content = audit_of("hf:audio/projection_model")
    assert "diffusers" not in snippets(content)
    content["subject"]["inputs_source"] = "2 calls in a run of StableAudioPipeline, 3 steps"
    code = snippet(content, "diffusers")
    assert "patched_model.apply(pipe.projection_model, plan='autocast_fp16')" in code
    assert "pipe.projection_model.register_forward_hook(in_fp32)" in code
    assert "diffusers" in snippets(content)


def test_a_component_outside_of_the_working_directory_is_known_by_its_name() -> None:
    content = audit_of("hf:vae:decode")
    content["subject"]["inputs_source"] = "1 call in a run of FluxPipeline, 3 steps, prompt 'a horse'"
    code = snippet(content, "diffusers")
    assert "from_pretrained('path/to/pipeline'" in code
    assert "patched_model.apply(pipe.vae, plan='autocast_fp16')" in code


def test_a_text_encoder_keeps_its_weights_in_fp32() -> None:
    content = audit_of("hf:sd/text_encoder_2")
    said = snippet(content, "diffusers", "cast_fp16")
    assert all(line.startswith("#") for line in said.splitlines())
    assert "--plan autocast_fp16" in said
    assert "register_forward_hook" not in snippet(content, "diffusers", "autocast_fp16")


def test_other_models_get_it_only_if_asked_for() -> None:
    content = audit_of("model.py:Net")
    assert "diffusers" not in snippets(content)
    assert "pipe.unet" in snippet(content, "diffusers")


@pytest.mark.parametrize("plan", PLANS)
def test_the_code_runs_in_a_pipeline(plan: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )
    original = diffusers.DDPMPipeline(unet, diffusers.DDIMScheduler())
    original.save_pretrained(tmp_path)
    code = snippet(audit_of(f"hf:{tmp_path}/unet"), "diffusers", plan)
    pipe = pasted(code, monkeypatch, unet, PLANS)["pipe"]
    ran = list[torch.dtype]()
    pipe.unet.conv_out.register_forward_hook(lambda module, inputs, output: ran.append(output.dtype))
    how: dict[str, Any] = {"num_inference_steps": 2, "output_type": "np"}
    images = pipe(generator=torch.Generator().manual_seed(0), **how).images
    expected = original(generator=torch.Generator().manual_seed(0), **how).images
    assert ran == [torch.float16] * 2
    assert pipe.unet(torch.zeros(1, 3, 8, 8), 1).sample.dtype is torch.float32
    assert abs(images - expected).max() < 0.05
    assert (images != expected).any()


class Pipe:
    """A pipeline of an autoencoder and a vocoder, as that of AudioLDM."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.vae, self.vocoder = Decoder(), nn.Linear(4, 2)

    @classmethod
    def from_pretrained(cls, folder: str, torch_dtype: torch.dtype) -> "Pipe":
        return cls()

    def __call__(self, latents: torch.Tensor) -> torch.Tensor:
        (spectrogram,) = self.vae.decode(latents)
        return self.vocoder(spectrogram)


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(4, 4)

    def decode(self, latents: torch.Tensor) -> tuple[torch.Tensor]:
        return (self.decoder(latents),)


@pytest.mark.parametrize("plan", PLANS)
def test_what_reads_the_results_of_decode_continues_in_fp32(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", SimpleNamespace(DiffusionPipeline=Pipe))
    latents = torch.ones(1, 4)
    expected = Pipe()(latents)
    code = snippet(audit_of("hf:audio/vae"), "diffusers", plan)
    pipe = pasted(code, monkeypatch, Decoder(), PLANS)["pipe"]
    ran = list[torch.dtype]()
    pipe.vae.decoder.register_forward_hook(lambda module, inputs, output: ran.append(output.dtype))
    result = pipe(latents)
    assert ran == [torch.float16]
    assert result.dtype is torch.float32
    assert torch.allclose(result, expected, atol=0.01)
    assert not torch.equal(result, expected)
