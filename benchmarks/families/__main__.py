"""Audits one small model of every family, and writes results/models.md.

python -m benchmarks.families                      # all of them; some hours of one core
python -m benchmarks.families timm transformers:bert --rows ROWS --resume
python -m benchmarks.families --table ROWS         # results/families.json and results/models.md, from rows that are there
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch

from . import LIBRARIES, library
from .one import Row
from .pool import run_alone, warm
from .table import write


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.families")
    parser.add_argument("only", nargs="*", help="LIBRARY, or LIBRARY:MODEL")
    parser.add_argument("--rows", type=Path, default=Path("families.jsonl"), help="where a row is added as it is there")
    parser.add_argument("--resume", action="store_true", help="leave out what --rows has already")
    parser.add_argument("--outcome", nargs="*", help="only those that ended so in --rows")
    parser.add_argument("--nice", type=int, default=15, help="how far to give way to other work")
    parser.add_argument("--table", action="store_true", help="audit nothing: write the table from --rows")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.table:
        os.nice(options.nice)
        rows = known(options.rows)
        wanted = sorted(chosen(options.only or list(LIBRARIES)), key=lambda pair: zlib.crc32(":".join(pair).encode()))
        warm()
        for where, name in wanted:  # mixed, so that a run that was stopped is a sample
            row = rows.get((where, name))
            if row is not None and (options.resume or (options.outcome and row["outcome"] not in options.outcome)):
                continue
            found = run_alone(where, name)
            with options.rows.open("a") as file:
                file.write(json.dumps(found) + "\n")
            print(where, name, found["outcome"], found.get("reason", ""), file=sys.stderr, flush=True)
    if options.table or not options.only:
        write(list(known(options.rows).values()))


def known(file: Path) -> dict[tuple[str, str], Row]:
    """The last row of every model."""
    lines = file.read_text().splitlines() if file.exists() else []
    rows = [json.loads(line) for line in lines if line]
    return {(row["library"], row["model"]): row for row in rows}


def chosen(wanted: list[str]) -> Iterator[tuple[str, str]]:
    """(library, model) of each, libraries imported so that the forked processes need not."""
    for text in wanted:
        where, _, name = text.partition(":")
        with contextlib.redirect_stdout(sys.stderr):
            found = library(where)
        yield from [(where, name)] if name else [(where, each) for each in found.names()]


if __name__ == "__main__":
    main()
