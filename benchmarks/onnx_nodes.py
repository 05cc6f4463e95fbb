"""ONNX files of ten and more stock models beside those of the plain exporter: nodes, casts, bytes, and errors in onnxruntime."""

from __future__ import annotations

import argparse
import copy
import io
import logging
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import onnx
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import auditor
from auditor.features.programs.onnxfile import with_onnx
from benchmarks import subjects  # noqa: F401  lets timm import a torchvision without compiled operators
from benchmarks.harness import RESULTS, Row, described, machine, report

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]

BUDGET = 0.01
"""Allowed relative L2 error."""

SMALL = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
SEQ2SEQ = {
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "d_model": 32,
    "vocab_size": 64,
    "use_cache": False,
}


def tokens(length: int = 12) -> Tensor:
    return torch.randint(3, 64, (2, length))


def pairs() -> dict[str, Tensor]:
    return {"input_ids": tokens(), "decoder_input_ids": tokens(6)}


def t5() -> Built:
    import transformers

    sizes = {"vocab_size": 64, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, use_cache=False)), (), pairs()


def bart() -> Built:
    import transformers

    config = transformers.BartConfig(**SEQ2SEQ, max_position_embeddings=64)
    return transformers.BartForConditionalGeneration(config), (), pairs()


def whisper() -> Built:
    import transformers

    places = {"max_source_positions": 30, "max_target_positions": 32, "num_mel_bins": 16}
    marks = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**SEQ2SEQ, **places, **marks)
    given = {"input_features": torch.randn(2, 16, 60), "decoder_input_ids": tokens(6)}
    return transformers.WhisperForConditionalGeneration(config), (), given


def llama() -> Built:
    import transformers

    config = transformers.LlamaConfig(**SMALL, vocab_size=64, num_key_value_heads=2, use_cache=False)
    return transformers.LlamaForCausalLM(config), (tokens(),), {}


def gpt2() -> Built:
    import transformers

    config = transformers.GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4, use_cache=False)
    return transformers.GPT2LMHeadModel(config), (tokens(),), {}


def bert() -> Built:
    import transformers

    return transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=64)), (tokens(),), {}


def vit() -> Built:
    import transformers

    config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
    return transformers.ViTForImageClassification(config), (torch.randn(2, 3, 32, 32),), {}


def swin() -> Built:
    import timm

    sizes = {"img_size": 56, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
    return timm.create_model("swin_tiny_patch4_window7_224", **sizes), (torch.randn(2, 3, 56, 56),), {}


def _timm(name: str) -> Callable[[], Built]:
    def make() -> Built:
        import timm

        return timm.create_model(name), (torch.randn(2, 3, 64, 64),), {}

    return make


class Backbone(nn.Module):
    """A detector's backbone: features of a ResNet, merged from coarse to fine as in a feature pyramid."""

    def __init__(self) -> None:
        super().__init__()
        import timm

        self.body = timm.create_model("resnet18", features_only=True, out_indices=(2, 3, 4))
        self.inner = nn.ModuleList(nn.Conv2d(width, 32, 1) for width in self.body.feature_info.channels())
        self.outer = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in self.inner)

    def forward(self, x: Tensor) -> list[Tensor]:
        """The merged features, from fine to coarse."""
        features = [inner(each) for inner, each in zip(self.inner, self.body(x), strict=True)]
        for finer, coarser in ((1, 2), (0, 1)):
            features[finer] = features[finer] + F.interpolate(features[coarser], scale_factor=2.0)
        return [outer(each) for outer, each in zip(self.outer, features, strict=True)]


class UNet(nn.Module):
    """Two levels of convolutions with batch norms, and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        widths = {"a": (3, 8), "b": (8, 16), "c": (16, 32), "d": (32, 16), "e": (24, 8)}
        self.blocks = nn.ModuleDict({name: self._block(*each) for name, each in widths.items()})
        self.up, self.head = nn.ConvTranspose2d(32, 16, 2, 2), nn.Conv2d(8, 2, 1)

    @staticmethod
    def _block(given: int, width: int) -> nn.Module:
        first = nn.Sequential(nn.Conv2d(given, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())
        return nn.Sequential(first, nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """A map of two classes."""
        fine = self.blocks["a"](x)
        middle = self.blocks["b"](F.max_pool2d(fine, 2))
        coarse = self.up(self.blocks["c"](F.max_pool2d(middle, 2)))
        middle = self.blocks["d"](torch.cat([coarse, middle], 1))
        larger = F.interpolate(middle, scale_factor=2.0, mode="bilinear")
        return self.head(self.blocks["e"](torch.cat([larger, fine], 1)))


MODELS: dict[str, Callable[[], Built]] = {
    "T5": t5,
    "BART": bart,
    "Whisper": whisper,
    "Llama": llama,
    "GPT-2": gpt2,
    "BERT": bert,
    "ViT": vit,
    "Swin": swin,
    "U-Net": lambda: (UNet(), (torch.randn(2, 3, 32, 32),), {}),
    "detector's backbone": lambda: (Backbone(), (torch.randn(2, 3, 64, 64),), {}),
    "ResNet-18": _timm("resnet18"),
    "MobileNetV3": _timm("mobilenetv3_small_100"),
}


def build(name: str) -> Built:
    """A model in eval mode and its arguments. No bias is zero, and no batch norm an identity, as after training."""
    torch.manual_seed(0)
    model, args, kwargs = MODELS[name]()
    for parameter in model.parameters():
        parameter.data += 0.01 * torch.randn_like(parameter)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0.0, 0.1)
            module.running_var.uniform_(0.8, 1.2)
    return model.eval(), args, kwargs


def measured(name: str) -> Row:
    """Both files of one model."""
    model, args, kwargs = build(name)
    row: Row = {"model": name, "plain": "fails", "plain KiB": "-"}
    try:
        made = torch.onnx.export(copy.deepcopy(model), args, kwargs=kwargs, dynamo=True, verbose=False)
        assert made is not None
        row |= {"plain": len(made.model.graph), "plain KiB": made.model_proto.ByteSize() // 1024}
    except Exception as error:
        row["failure"] = f"{type(error).__name__}: {str(error).strip().splitlines()[-1][:160]}"
    given = (args, kwargs) if kwargs else args
    audit = auditor.audit(model, given, strategies="graph", formats="fp16", device="cpu", max_error=BUDGET, quick=True)
    done = with_onnx(audit)
    plan, content = done.plans["graph_fp16"], done.programs["graph_fp16.onnx"]
    program, nodes = plan.program, onnx.load_from_string(content).graph.node
    assert program is not None
    assert program.onnx is not None
    casts = sum(node.op_type == "Cast" for node in nodes)
    row |= {"nodes": len(nodes) - casts, "casts": casts, "KiB": len(content) // 1024}
    row |= {"low": plan.low_precision_flops, "onnxruntime": program.onnx.error, "rounded": program.onnx.rounded_error}
    row["any batch size"] = "yes" if program.fixed is None else program.fixed
    row["fewer"] = "yes" if row["plain"] == "fails" or row["nodes"] <= row["plain"] else "no"
    return row


COLUMNS = {
    "model": "",
    "plain": "",
    "nodes": "",
    "casts": "",
    "plain KiB": "",
    "KiB": "",
    "low": ".0%",
    "onnxruntime": ".2g",
    "rounded": ".2g",
    "any batch size": "",
}

PAGE = """# ONNX files beside those of the plain exporter

Written by `python -m benchmarks.onnx_nodes`: {machine}.

Small models with random weights, each built from its library's configuration. *plain*: nodes in the file of
`torch.onnx.export(model, args)`, for one batch size and in FP32, in the same run. *nodes* and *casts*: nodes of the file of the plan
`graph_fp16`, without and with the type conversions that mixed precision needs; the file's inputs and outputs are FP32. *low*: share of the
FLOPs in FP16. *onnxruntime*: relative L2 error of the file in onnxruntime, which computes in FP32 where its CPU provider lacks an FP16
kernel. *rounded*: the same with every FP16 value rounded. {fewer} of {all} files have at most the nodes of the plain exporter's file, or the
plain exporter fails.

| {head} |
|{rule}
{body}
"""


def page(rows: list[Row]) -> str:
    """The results as Markdown."""
    lines = ["| " + " | ".join(format(row[key], spec) for key, spec in COLUMNS.items()) + " |" for row in rows]
    return PAGE.format(
        machine=described(machine()),
        fewer=sum(row["fewer"] == "yes" for row in rows),
        all=len(rows),
        head=" | ".join(COLUMNS),
        rule="---|" * len(COLUMNS),
        body="\n".join(lines),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", metavar="MODEL", help="these alone, and no results are written")
    options = parser.parse_args()
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models or MODELS:
        with redirect_stdout(io.StringIO()):
            rows.append(measured(name))
        print(rows[-1], file=sys.stderr, flush=True)
    if not options.models:
        report("onnx_nodes", rows, COLUMNS)
        (RESULTS / "onnx_nodes.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
