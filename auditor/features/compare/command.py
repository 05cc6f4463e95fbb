"""The verbs `record` and `compare`. Importing this file does not import torch."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

from ...asked import LEVELS
from ...command.output import say
from ...command.verb import TextOrJson, Verb, WithTarget
from ...errors import AuditorError
from ...progress.shown import Display
from ...records import folder
from ...report import blocks
from ...settings import Flag, Option

RECORDING = ".json"

Autocast = Annotated[str | None, Option(choices=lambda: ("bf16", "fp16"))]


class Record(WithTarget):
    """Record one run of a model for `compare`: fingerprints and rounding errors of every operation, but no tensors."""

    takes = ("target", "file", "inputs", "weights", "autocast", "gradients", "timeout", "seed", "quiet")
    examples = (
        ("record model.py --out a.json", "in one environment; then `compare` it with another recording"),
        ("record model.py:Net --inputs data.pt --out a.json", "on given inputs"),
    )
    file: Annotated[Path, Option("the path of a file", "FILE", flag="--out", path="path")]
    """the recording, a JSON file of less than 1 kB for each operation"""
    autocast: Autocast = None
    """run the model inside an autocast region of this format, with CUDA's lists"""
    gradients: Flag = False
    """also record gradients of all parameters, in FP64"""

    def run(self, progress: Display) -> None:
        """Record the model's run and write the file."""
        from ...loading import load
        from ...numerics.formats import dtype_of
        from .record import record_run
        from .recording import to_json

        folder.check_directory(self.file.parent)
        subject = load(self.target, inputs=self.inputs, weights=self.weights, seed=self.seed)
        progress("record", self.target, 0, 0)
        dtype = dtype_of(self.autocast) if self.autocast else None
        recording = record_run(subject, self.seed, dtype, self.gradients)
        folder.write(self.file.parent, {self.file.name: to_json(recording)})
        progress.close()
        values = f"{len(recording.values):,} values, {self.file.stat().st_size:,} bytes"
        notes = "".join(f"Note     not compared later: {note}\n" for note in recording.not_compared)
        say(f"Recorded {self.file}: {values}\n{notes}")


class Compare(Verb):
    """Compare two runs of a model: the same function, or where they first differ. Each of A and B is a recording that
    `record` wrote, or a TARGET, which is recorded now."""

    takes = (
        "first",
        "second",
        "inputs",
        "weights",
        "autocast",
        "gradients",
        "html",
        "format",
        "fail_on",
        "timeout",
        "seed",
    )
    examples = (
        ("compare a.json b.json", "two recordings, perhaps of two machines or versions"),
        ("compare original.py port.py --html compare.html", "two implementations, also as a page"),
        ("compare a.json model.py --fail-on warning", "exit with code 1 also if one run only rounds more"),
    )
    first: Annotated[str, Option(shown="A", path="place")]
    """a recording (.json), or a TARGET to record now"""
    second: Annotated[str, Option(shown="B", path="place")]
    """the run to compare with A: a recording or a TARGET"""
    autocast: Autocast = None
    """record TARGETs inside an autocast region of this format"""
    gradients: Flag = False
    """record TARGETs with gradients, and compare these too"""
    html: Annotated[Path | None, Option("the path of a file", "FILE", path="path")] = None
    """also write the comparison to this HTML file"""
    format: TextOrJson = "text"
    fail_on: Annotated[str, Option(choices=lambda: LEVELS)] = "error"
    """exit with code 1 for this verdict or a worse one: `error`, outputs or gradients differ; `warning`, one run rounds
    more; `info`, stored tensors are rounded differently"""

    def run(self, progress: Display) -> int:
        """Record targets, compare both runs, and print the result. Raises: AuditorError."""
        from . import page, recording
        from .compare import SEVERITY, compare

        files = self.first, self.second
        with tempfile.TemporaryDirectory(prefix=folder.OWN) as scratch:
            paths = [
                self._recorded(file, Path(scratch, f"{side}.json")) for side, file in zip("ab", files, strict=True)
            ]
            if None in paths:
                return 2
            a, b = (recording.read(path) for path in paths if path is not None)
        found = compare(a, b)
        if self.html:
            folder.write(self.html.parent, {self.html.name: page.render(found, files)})
        if self.format == "json":
            say(json.dumps(page.to_data(found, files), indent=1) + "\n")
        else:
            say(blocks.to_terminal(page.overview(found, files)))
            say(f"Report   {self.html}\n" if self.html else "")
        if self.fail_on == "never":
            return 0
        return int(LEVELS.index(SEVERITY[found.verdict]) <= LEVELS.index(self.fail_on))

    def _recorded(self, given: str, scratch: Path) -> Path | None:
        """The recording's file; for a target, a new file, written by a process of its own: both targets may import
        modules of the same names. None if that process failed, which it has explained on stderr."""
        if given.endswith(RECORDING):
            return Path(given)
        if Path(given, "plan.json").is_file():
            message = f"{given} is an audit, not a run: `diff` compares audits, and `compare` recordings or targets"
            raise AuditorError(message, "bad-recording")
        options = {"--inputs": self.inputs, "--weights": self.weights, "--autocast": self.autocast}
        options |= {"--seed": str(self.seed), "--timeout": str(self.timeout) if self.timeout else None}
        given_flags = ["--gradients"] * self.gradients
        words = [word for flag, value in options.items() if value is not None for word in (flag, value)]
        command = [
            sys.executable,
            "-m",
            "auditor",
            "record",
            given,
            "--out",
            str(scratch),
            "--quiet",
            *given_flags,
            *words,
        ]
        done = subprocess.run(command, stdout=subprocess.DEVNULL)
        return scratch if done.returncode == 0 else None


VERBS = (Record, Compare)
