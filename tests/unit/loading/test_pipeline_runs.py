"""Short runs of pipelines: what their call is given. The pipelines have the interface of diffusers', and need none."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import LoadError
from auditor.loading.doors import pipelines
from tests.support.refusing import refused


class Pipeline:
    """One denoiser, as diffusers calls it."""

    def __init__(self, unet: nn.Module) -> None:
        self.unet = unet
        self.components = {"unet": unet}

    @classmethod
    def from_pretrained(cls, folder: str, **options: Any) -> "Pipeline":
        torch.manual_seed(0)
        return cls(nn.Linear(3, 3))

    def denoise(self, image: Tensor, steps: int) -> None:
        for _ in range(steps):
            self.unet(image[..., 0, 0])


class FromNoise(Pipeline):
    def __call__(self, prompt: str, image: Tensor | None = None, num_inference_steps: int = 50) -> None:
        self.denoise(torch.zeros(1, 3, 1, 1) if image is None else image, num_inference_steps)


class ControlNet(Pipeline):
    def __call__(
        self, prompt: str, control_image: Any = None, num_inference_steps: int = 50, generator: Any = None
    ) -> None:
        self.denoise(torch.rand(1, 3, 1, 1, generator=generator), 1)
        if control_image is None:
            raise TypeError("control_image must be an image")
        self.denoise(control_image, num_inference_steps)


class Img2Img(Pipeline):
    def __call__(self, prompt: str, image: Tensor, strength: float = 0.3, num_inference_steps: int = 50) -> None:
        steps = int(num_inference_steps * strength)
        if steps < 1:
            raise ValueError(f"with strength {strength}, no step is left")
        self.denoise(image, steps)


class Inpaint(Pipeline):
    def __call__(self, prompt: str, image: Any = None, mask_image: Any = None, num_inference_steps: int = 50) -> None:
        self.denoise(image * mask_image, num_inference_steps)


class Broken(Pipeline):
    def __call__(self, prompt: str, image: Any = None) -> None:
        raise RuntimeError("has no tokenizer" if image is None else "has no tokenizer either way")


def run(kind: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, **given: Any) -> pipelines.PipelineRun:
    (folder / "model_index.json").write_text(json.dumps({"unet": ["torch", "Linear"]}))
    monkeypatch.setattr(pipelines, "pipeline_class", lambda folder: kind)
    monkeypatch.setattr(pipelines, "_runs", {})
    return pipelines.short_run(folder, 0, given)


def images(calls: pipelines.PipelineRun) -> list[Tensor]:
    return [args[0] for args, _ in calls.calls["unet"]["forward"]]


def test_a_pipeline_that_runs_without_an_image_gets_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [float(x.abs().max()) for x in images(run(FromNoise, tmp_path, monkeypatch))] == [0.0] * 3


@pytest.mark.parametrize("kind", [ControlNet, Img2Img, Inpaint])
def test_a_pipeline_that_needs_an_image_gets_one(
    kind: type[Pipeline], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(kind, tmp_path, monkeypatch)
    assert len(images(result)) == 3
    assert result.calls.keys() == {"unet"}
    again = images(run(kind, tmp_path, monkeypatch))
    assert all(torch.equal(one, other) for one, other in zip(images(result), again, strict=True))


def test_calls_before_the_image_was_missing_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, *others = images(run(ControlNet, tmp_path, monkeypatch, num_inference_steps=2))
    assert len(others) == 2
    assert torch.equal(first, torch.rand(1, 3, 1, 1, generator=torch.Generator().manual_seed(0))[..., 0, 0])


@pytest.mark.parametrize("strength", [0.3, 0.5, 0.8, 1.0])
def test_three_steps_run_whatever_the_strength(
    strength: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipelines, "MOST_CALLS", 99)
    assert len(images(run(Img2Img, tmp_path, monkeypatch, strength=strength))) == 3


def test_the_second_failure_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(LoadError, "model-raises", "has no tokenizer either way", "--inputs f.py:func"):
        run(Broken, tmp_path, monkeypatch)
