"""Processor seconds of an audit by `top1`, and of one by relative L2: `python -m benchmarks.top1_cost DIRECTORY`.

DIRECTORY: a causal language model of transformers with its tokenizer, such as examples/language/smollm2.py writes. Both
audits read six texts of 55 tokens, from Python's help topics, in one format under one strategy.
"""

from __future__ import annotations

import argparse
import pydoc_data.topics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.audit_cost import spent
from benchmarks.harness import Row, report

TEXTS, TOKENS = 6, 55
CRITERIA = {"relative L2": [], "top1": ["--criterion", "logits: top1 >= 0.99"]}
COLUMNS = {"audit by": "", "cpu s": ".0f", "wall s": ".0f", "ratio": ".2f"}


def write_inputs(directory: str, file: Path) -> None:
    """Write the first tokens of the longest help topics."""
    from transformers import AutoTokenizer

    read = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    topics = sorted(pydoc_data.topics.topics.values(), key=len)[-TEXTS:]
    torch.save({"input_ids": torch.tensor([read(text)["input_ids"][:TOKENS] for text in topics])}, file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", metavar="DIRECTORY")
    directory, rows = parser.parse_args().directory, list[Row]()
    for name, criterion in CRITERIA.items():
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(directory, file := Path(folder, "inputs.pt"))
            options = ["--inputs", str(file), "--formats", "bf16", "--strategies", "autocast", "--out", folder]
            before, since = spent(), time.monotonic()
            command = [sys.executable, "-m", "auditor", f"hf:{Path(directory).resolve()}", *options, *criterion]
            subprocess.run([*command, "--fail-on", "never"], check=True, stdout=subprocess.DEVNULL)
            row = {"audit by": name, "cpu s": spent() - before, "wall s": time.monotonic() - since}
        rows.append(row | {"ratio": row["cpu s"] / (rows or [row])[0]["cpu s"]})
    report("top1_cost", rows, COLUMNS)


if __name__ == "__main__":
    main()
