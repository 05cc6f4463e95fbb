"""Writes tiny models with random weights as the libraries store them, one target for each:

    python examples/folders/write.py tiny
    python -m auditor tiny/net.pt2

Without a library, its folder is left out. Nothing is downloaded.
"""

from __future__ import annotations

import string
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

HUB = '''"""Entry points for torch.hub."""

from torch import nn

dependencies = ["torch"]


def mlp(width=16):
    """A classifier of 8 features."""
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 4))
'''

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Sizes of a tiny transformer, as the configs of transformers name them."""


def write_program(directory: Path) -> str:
    """An exported program, with the inputs of the export."""
    model = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)).eval()
    torch.export.save(torch.export.export(model, (torch.randn(4, 8),)), directory / "net.pt2")
    return f"{directory}/net.pt2"


def write_hub(directory: Path) -> str:
    """A repository with a hubconf.py."""
    folder = directory / "repository"
    folder.mkdir(exist_ok=True)
    (folder / "hubconf.py").write_text(HUB)
    return f"{folder}:mlp"


def write_component(directory: Path) -> str:
    """A component of diffusers: an autoencoder of images."""
    import diffusers

    model = diffusers.AutoencoderKL(
        block_out_channels=(8, 16),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        norm_num_groups=4,
        sample_size=16,
    )
    model.save_pretrained(directory / "autoencoder")
    return f"hf:{directory}/autoencoder"


def write_pipeline(directory: Path) -> str:
    """A pipeline of diffusers, which generates images of 8 x 8 pixels."""
    import diffusers

    unet = diffusers.UNet2DModel(
        sample_size=8,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDIMScheduler()).save_pretrained(directory / "pipeline")
    return f"hf:{directory}/pipeline"


def write_adapter(directory: Path) -> str:
    """A LoRA adapter of peft, and its base."""
    import peft
    import transformers

    base = directory / "base"
    config = transformers.LlamaConfig(vocab_size=64, max_position_embeddings=64, **SIZES)
    transformers.LlamaForCausalLM(config).save_pretrained(base)
    model = transformers.LlamaForCausalLM.from_pretrained(base)
    how = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"], r=4, init_lora_weights=False)
    peft.get_peft_model(model, how).save_pretrained(directory / "adapter")
    return f"hf:{directory}/adapter"


def write_sentences(directory: Path) -> str:
    """A model of sentence-transformers, with a vocabulary of letters."""
    import sentence_transformers
    import transformers
    from sentence_transformers.models import Normalize, Pooling, Transformer

    inside = directory / "transformer"
    inside.mkdir(exist_ok=True)
    pieces = [f"##{letter}" for letter in string.ascii_lowercase]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", ",", *string.ascii_lowercase, *pieces]
    (inside / "vocab.txt").write_text("\n".join(words))
    transformers.BertTokenizer(str(inside / "vocab.txt")).save_pretrained(inside)
    transformers.BertModel(transformers.BertConfig(vocab_size=len(words), **SIZES)).save_pretrained(inside)
    parts = [Transformer(str(inside)), Pooling(SIZES["hidden_size"], "mean"), Normalize()]
    model = sentence_transformers.SentenceTransformer(modules=parts, device="cpu")
    model.save_pretrained(str(directory / "sentences"))
    return f"hf:{directory}/sentences"


WRITERS: tuple[Callable[[Path], str], ...] = (
    write_program,
    write_hub,
    write_component,
    write_pipeline,
    write_adapter,
    write_sentences,
)


def write(directory: Path) -> list[str]:
    """Write every model whose library is installed; returns the targets."""
    directory.mkdir(parents=True, exist_ok=True)
    targets = []
    for writer in WRITERS:
        torch.manual_seed(0)
        try:
            targets.append(writer(directory))
        except ImportError as error:
            print(f"{writer.__name__}: left out, {error}", file=sys.stderr)
    return targets


if __name__ == "__main__":
    for target in write(Path(sys.argv[1])):
        print(f"python -m auditor {target}")
