"""Folders of diffusers, component and pipeline, as `save_pretrained` writes them."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.cli import main
from auditor.errors import LoadError
from auditor.loading import load
from tests.support.refusing import refused

COMPONENT = {"_class_name": "UNet2DConditionModel"}


def test_a_component_without_diffusers_says_what_to_install(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "config.json").write_text(json.dumps(COMPONENT))
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with refused(LoadError, "missing-package", "`pip install diffusers`"):
        load("hf:.")


@pytest.mark.parametrize("text", ["{", "[]", "null", ""])
@pytest.mark.parametrize("file", ["config.json", "model_index.json"])
def test_a_corrupt_file_is_one_line(text: str, file: str, here: Path) -> None:
    pytest.importorskip("diffusers")
    (here / file).write_text(text)
    with refused(LoadError, "model-raises", file):
        load("hf:.")


def test_a_lora_of_a_pipeline_says_what_to_write(here: Path) -> None:
    pytest.importorskip("huggingface_hub")
    (here / "pytorch_lora_weights.safetensors").write_bytes(b"")
    with refused(LoadError, "missing-target", "load_lora_weights"):
        load("hf:.")


def unet(diffusers: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(8, 16),
        layers_per_block=1,
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=12,
        attention_head_dim=4,
        **options,
    )


def autoencoder(diffusers: Any) -> Any:
    torch.manual_seed(0)
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline whose U-Net is conditioned on numbers of classes, without a text encoder."""
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    transformer = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=1,
        sample_size=8,
        num_embeds_ada_norm=1000,
    )
    pipeline = diffusers.DiTPipeline(transformer, autoencoder(diffusers), diffusers.DDIMScheduler())
    result = tmp_path_factory.mktemp("pipelines") / "dit"
    pipeline.save_pretrained(result)
    return result


def test_a_component_gets_inputs_that_fit(here: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    unet(diffusers).save_pretrained(here)
    subject = load("hf:.")
    shapes = {name: tuple(x.shape) for name, x in subject.batches[0][1].items()}
    assert shapes == {"sample": (2, 4, 8, 8), "timestep": (2,), "encoder_hidden_states": (2, 16, 12)}
    assert subject.synthetic_inputs
    assert not subject.random_weights
    assert subject.origin is not None
    assert (subject.origin.module, subject.origin.symbol) == ("diffusers", "UNet2DConditionModel.from_pretrained")


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "SDXL": (
        "UNet2DConditionModel",
        {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "cross_attention_dim": 12,
            "attention_head_dim": (2, 4),
            "transformer_layers_per_block": 1,
            "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
            "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": 4,
            "projection_class_embeddings_input_dim": 32,
        },
    ),
    "SD3": (
        "SD3Transformer2DModel",
        {
            "sample_size": 8,
            "patch_size": 2,
            "in_channels": 4,
            "num_layers": 1,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_projection_dim": 16,
            "joint_attention_dim": 12,
            "pooled_projection_dim": 20,
            "out_channels": 4,
        },
    ),
    "Flux": (
        "FluxTransformer2DModel",
        {
            "patch_size": 1,
            "in_channels": 4,
            "num_layers": 1,
            "num_single_layers": 1,
            "attention_head_dim": 16,
            "num_attention_heads": 2,
            "joint_attention_dim": 12,
            "pooled_projection_dim": 20,
            "axes_dims_rope": (4, 4, 8),
            "guidance_embeds": True,
        },
    ),
    "PixArt": (
        "PixArtTransformer2DModel",
        {
            "sample_size": 8,
            "num_layers": 1,
            "patch_size": 2,
            "attention_head_dim": 8,
            "num_attention_heads": 2,
            "caption_channels": 12,
            "cross_attention_dim": 16,
            "in_channels": 4,
            "out_channels": 8,
            "use_additional_conditions": False,
        },
    ),
    "Wan": (
        "WanTransformer3DModel",
        {
            "patch_size": (1, 2, 2),
            "num_attention_heads": 2,
            "attention_head_dim": 12,
            "in_channels": 4,
            "out_channels": 4,
            "text_dim": 12,
            "freq_dim": 16,
            "ffn_dim": 16,
            "num_layers": 1,
        },
    ),
    "UNet2D": (
        "UNet2DModel",
        {
            "sample_size": 8,
            "block_out_channels": (8, 16),
            "norm_num_groups": 4,
            "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
            "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
        },
    ),
    "VQ": (
        "VQModel",
        {"block_out_channels": (8,), "norm_num_groups": 4, "sample_size": 16, "num_vq_embeddings": 8},
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_generated_inputs_of_public_architectures(name: str, here: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    kind, config = MODELS[name]
    getattr(diffusers, kind)(**config).save_config(here)
    subject = load("hf:.")
    assert type(subject.model).__name__ == kind
    assert subject.random_weights
    assert subject.inputs_source == "generated in the sizes of the config"


def test_the_decoder_of_an_autoencoder_alone(here: Path) -> None:
    autoencoder(pytest.importorskip("diffusers")).save_pretrained(here / "vae")
    subject = load("hf:vae:decode")
    assert subject.batches[0][1]["z"].shape[1] == 4
    assert subject.origin is not None
    assert subject.origin.method == "decode"


def test_a_component_in_half_precision_only(here: Path) -> None:
    diffusers = pytest.importorskip("diffusers")
    autoencoder(diffusers).half().save_pretrained(here, variant="fp16")
    subject = load("hf:.")
    assert subject.origin is not None
    assert subject.origin.init_kwargs["variant"] == "fp16"
    assert set(subject.stored_low) == {"float16"}


def test_a_component_of_a_pipeline_gets_the_calls_of_a_short_run(folder: Path) -> None:
    subject = load(f"hf:{folder / 'transformer'}")
    assert len(subject.batches) == 3
    times = [int(kwargs["timestep"].flatten()[0]) for _, kwargs in subject.batches]
    assert times == sorted(times, reverse=True)
    assert len(set(times)) == 3
    assert subject.inputs_source == "3 calls in a run of DiTPipeline, 3 steps"
    assert not subject.synthetic_inputs


def test_a_component_that_is_called_by_a_method(folder: Path) -> None:
    subject = load(f"hf:{folder / 'vae'}")
    assert subject.origin is not None
    assert subject.origin.method == "decode"
    (latents,), _ = subject.batches[0]
    assert latents.shape == (1, 4, 8, 8)


def test_a_method_that_the_run_does_not_call_gets_generated_inputs(folder: Path) -> None:
    subject = load(f"hf:{folder / 'vae'}:encode")
    assert subject.synthetic_inputs
    assert any("does not call `encode` of vae" in warning for warning in subject.warnings)


def test_arguments_of_the_pipeline(folder: Path, here: Path) -> None:
    (here / "calls.py").write_text("def arguments():\n    return {'class_labels': [1, 2], 'num_inference_steps': 2}\n")
    subject = load(f"hf:{folder / 'transformer'}", inputs="calls.py:arguments")
    assert [kwargs["timestep"].shape for _, kwargs in subject.batches] == [(4,), (4,)]
    assert "2 steps" in subject.inputs_source


def test_a_pipeline_names_its_components(folder: Path) -> None:
    with refused(LoadError, "ambiguous-model", "dit/transformer", "dit/vae"):
        load(f"hf:{folder}")


def test_every_component_of_a_pipeline_is_audited(folder: Path, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--quick", "-q", "--out", "out", "--formats", "bf16", "--fail-on", "never"]
    assert main([f"hf:{folder}", *words]) == 0
    assert sorted(path.name for path in Path("out").iterdir()) == ["transformer", "vae"]
    said = capsys.readouterr().out
    assert "snippet out/transformer --for diffusers" in said


@pytest.mark.parametrize("missing", ["vae/config.json", "vae/diffusion_pytorch_model.safetensors", "scheduler"])
def test_an_incomplete_pipeline_is_one_line(missing: str, folder: Path, here: Path) -> None:
    shutil.copytree(folder, here / "dit")
    path = here / "dit" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with refused(LoadError, "model-raises", "loading DiTPipeline from dit raised"):
        load("hf:dit/transformer")


@pytest.mark.parametrize("name", ["_class_name", "vae"])
def test_code_of_a_pipeline_is_never_run(name: str, folder: Path, here: Path) -> None:
    shutil.copytree(folder, here / "dit")
    for place in ("", "vae"):
        (here / "dit" / place / "own.py").write_text("raise SystemExit('the code was run')\n")
    index = here / "dit" / "model_index.json"
    index.write_text(json.dumps({**json.loads(index.read_text()), name: ["own", "Own"]}))
    with refused(LoadError, "remote-code", "its own pipeline code"):
        load("hf:dit/transformer")


def test_a_class_that_diffusers_lacks(here: Path) -> None:
    pytest.importorskip("diffusers")
    (here / "config.json").write_text('{"_class_name": "Absent2DModel"}')
    with refused(LoadError, "model-raises", "which is no model of diffusers"):
        load("hf:.")
