"""torchvision: the smallest model of every module, detectors with operators written in Python where the build has none."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import Built, Unbuilt

_LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
SIDES = (64, 128, 224, 299)
PROPOSALS = {"rpn_pre_nms_top_n_test": 64, "rpn_post_nms_top_n_test": 32, "box_detections_per_img": 16}
"""Of a detector in two steps, whose second one is run on each: a thousand as it ships."""


def names() -> list[str]:
    """Modules, those of `quantization` (as floats) among them."""
    return sorted(_models())


def build(name: str) -> Built:
    """The smallest model of the module, at the smallest side that it takes."""
    models, last = importlib.import_module("torchvision.models"), Exception()
    chosen = min(_models()[name], key=_parameters)
    for args, options in _attempts(name):
        try:
            torch.manual_seed(0)
            model = models.get_model(chosen, weights=None, **options).eval()
            with torch.no_grad():
                model(*args)
            return model, args, {}
        except Exception as error:  # the size does not fit; the next one may
            last = error
    raise Unbuilt(f"{chosen}: {last}") from last


def _models() -> dict[str, list[str]]:
    models, found = importlib.import_module("torchvision.models"), dict[str, list[str]]()
    for name in models.list_models():
        module = models.get_model_builder(name).__module__.removeprefix("torchvision.models.")
        found.setdefault(module, []).append(name)
    return found


def _attempts(name: str) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    kind, _, _ = name.partition(".")
    for side in SIDES:
        image = torch.randn(2, 3, side, side)
        if kind == "detection":
            images = [torch.rand(3, side, side) for _ in range(2)]
            sized = {"weights_backbone": None, "num_classes": 5, **(PROPOSALS if name.endswith("rcnn") else {})}
            yield (images,), {**sized, "min_size": side, "max_size": side}
            yield (images,), sized
        elif kind == "segmentation":
            yield (image,), {"weights_backbone": None, "num_classes": 5}
        elif kind == "optical_flow":
            yield (image, image.roll(2, -1)), {}
        elif kind == "video":
            yield (torch.randn(1, 3, 16, side, side),), {"num_classes": 10}
        else:
            yield (image,), {"num_classes": 10, "image_size": side}
            yield (image,), {"num_classes": 10, "init_weights": False}
            yield (image,), {"num_classes": 10}


def _parameters(name: str) -> float:
    models = importlib.import_module("torchvision.models")
    return min((weights.meta["num_params"] for weights in models.get_model_weights(name)), default=math.inf)


def _nms(boxes: Tensor, scores: Tensor, threshold: float) -> Tensor:
    """Greedy non-maximum suppression: indices of the boxes that are kept, best first."""
    order = scores.argsort(descending=True, stable=True)
    left, top, right, bottom = boxes[order].unbind(1)
    area = (right - left) * (bottom - top)
    width = (torch.minimum(right[:, None], right) - torch.maximum(left[:, None], left)).clamp(min=0)
    height = (torch.minimum(bottom[:, None], bottom) - torch.maximum(top[:, None], top)).clamp(min=0)
    shared = width * height
    near = (shared / (area[:, None] + area - shared) > threshold).cpu().numpy()
    kept, dropped = list[int](), np.zeros(len(near), dtype=bool)
    for i, others in enumerate(near):
        if not dropped[i]:
            kept.append(i)
            dropped |= others
    return order[torch.tensor(kept, dtype=torch.long, device=order.device)]


def _register() -> None:
    """Operators of torchvision in Python, where its own were compiled for another torch."""
    if hasattr(torch.ops.torchvision, "nms"):
        return
    extension, pooling = (importlib.import_module(f"torchvision.{m}") for m in ("extension", "ops.roi_align"))
    _LIBRARY.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARY.impl("nms", _nms, "CPU")
    _LIBRARY.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, SymInt pooled_height, SymInt pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    _LIBRARY.impl("roi_align", pooling._roi_align, "CompositeImplicitAutograd")
    extension._has_ops = lambda: True  # type: ignore[attr-defined]


_register()
