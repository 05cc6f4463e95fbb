"""Without inputs, the suggestion fits the model and can be pasted; images for image transformers are generated."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from auditor.errors import LoadError
from auditor.loading.inputs import from_argument, from_model
from auditor.loading.kinds import image_sides, suggest_inputs


class Needs(nn.Module):
    """A model that no generated input fits, around the layers."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)


class Images(Needs):
    def forward(self, image: Tensor, scale: Tensor) -> Tensor:
        return self.layers[0](image) * scale.mean()


class Text(Needs):
    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.layers[0](input_ids) * attention_mask[..., None]


class Audio(Needs):
    def forward(self, waveform: Tensor, lengths: Tensor) -> Tensor:
        return self.layers[0](waveform) + lengths.sum()


class Table(Needs):
    def forward(self, rows: Tensor, others: Tensor) -> Tensor:
        return self.layers[0](rows) + self.layers[0](others)


class Graph(Needs):
    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        sources, targets = edge_index
        hidden = self.layers[0](x)
        return torch.zeros_like(hidden).index_add(0, targets, hidden[sources])


class Diffusion(Needs):
    def forward(self, sample: Tensor, timestep: Tensor, *, guidance: float = 1.0) -> Tensor:
        return self.layers[0](sample) * timestep.float().mean() * guidance


class Series(Needs):
    def forward(self, series: Tensor, known: Tensor) -> Tensor:
        return self.layers[0](series)[0] + self.layers[0](known)[0]


KINDS: dict[str, tuple[nn.Module, str]] = {
    "image": (Images(nn.Conv2d(5, 4, 3)), "image:float32[1,5,224,224] scale:float32[1,5,224,224]"),
    "text": (Text(nn.Embedding(50, 4)), "input_ids:int64[1,16]<50 attention_mask:int64[1,16]<2"),
    "audio": (Audio(nn.Conv1d(1, 4, 10)), "waveform:float32[1,1,16000] lengths:int64[1]<16"),
    "table": (Table(nn.Linear(7, 4)), "rows:float32[8,7] others:float32[8,7]"),
    "graph": (Graph(nn.Linear(7, 4)), "x:float32[10,7] edge_index:int64[2,20]<10"),
    "diffusion": (Diffusion(nn.Conv2d(4, 4, 3)), "sample:float32[1,4,224,224] timestep:int64[1]<1000"),
    "series": (Series(nn.GRU(6, 4)), "series:float32[1,16,6] known:float32[1,16,6]"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_suggestion_fits_the_model_and_runs(kind: str) -> None:
    model, text = KINDS[kind]
    assert suggest_inputs(model) == text
    ((args, kwargs),) = from_argument(text, model, 0).batches
    model(*args, **kwargs)


def test_the_error_has_the_suggestion() -> None:
    model, text = KINDS["graph"]
    with pytest.raises(LoadError, match=re.escape(f"--inputs '{text}'")) as refused:
        from_model(model, 0)
    assert refused.value.slug == "no-inputs"


class Transformer(nn.Module):
    """A small image transformer: patches, positions and a class token. patches: "convolution" or "flattened"."""

    def __init__(self, side: int, patch: int, patches: str, channels: int = 3) -> None:
        super().__init__()
        self.patch, self.channels = patch, channels
        flat = channels * patch * patch
        layers: dict[str, Callable[[], nn.Module]] = {
            "convolution": lambda: nn.Conv2d(channels, 8, patch, patch),
            "flattened": lambda: nn.Sequential(nn.LayerNorm(flat), nn.Linear(flat, 8)),
        }
        self.embed = layers[patches]()
        self.pos_embedding = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, 8))
        self.cls = nn.Parameter(torch.randn(1, 1, 8))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        batch = len(images)
        if isinstance(self.embed, nn.Conv2d):
            tokens = self.embed(images).flatten(2).transpose(1, 2)
        else:
            p = self.patch
            blocks = images.unfold(2, p, p).unfold(3, p, p)  # [b, c, h, w, p, p]
            tokens = self.embed(blocks.permute(0, 2, 3, 1, 4, 5).reshape(batch, -1, self.channels * p * p))
        whole = torch.cat([self.cls.expand(batch, 1, 8), tokens], 1) + self.pos_embedding
        return self.head(whole.mean(1))


@pytest.mark.parametrize(
    ("side", "patch", "patches", "channels"),
    [(384, 16, "convolution", 3), (42, 14, "convolution", 4), (72, 8, "flattened", 3), (20, 4, "flattened", 1)],
)
def test_images_for_image_transformers_are_generated(side: int, patch: int, patches: str, channels: int) -> None:
    model: Any = Transformer(side, patch, patches, channels)
    ((args, _),) = from_model(model, 0).batches
    assert args[0].shape[1:] == (channels, side, side)


def test_sides_that_a_module_declares_come_first() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    model[0].img_size = (96, 96)  # type: ignore[assignment]
    assert list(image_sides(model)) == [96]
    assert suggest_inputs(model) == "input:float32[1,3,96,96]"


def test_a_convolutional_net_has_no_sides() -> None:
    assert list(image_sides(nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(3, 2)))) == []
