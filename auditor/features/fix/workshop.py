"""Asks the worker process for trials and audits of edited sources."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from ...errors import AuditorError, describe
from ...numerics.entries import over_tensors
from ...numerics.formats import runs
from ...plan.context import emit_plans
from ...processes import HERE, Process, wait_until
from ...records import Subject
from ...records.folder import OWN
from ...settings import Settings, options_of
from ...stages import beat
from ...verify.artefact import hand
from .records import Baseline, Run, Standing, Trial

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv.pop())
from auditor.processes import end_with
end_with(int(sys.argv.pop()))
from auditor.features.fix.worker import main
main()
"""
"""Code of the worker process: `python -m` would put the working directory in sys.path."""

LIMIT = 600.0
"""Seconds after which a trial or an audit of an edited source counts as failed."""

LEFT_OUT = ("model", "origin", "objective", "given", "casts", "stored", "flags")
"""Fields of a Subject that an edited source does not share, or does not need."""

NOT_REPEATED = (
    "evaluate",
    "max_drop",
    "better",
    "scoring",
    "generate",
    "temperature",
    "measure_time",
    "mode",
    "progress",
)
"""Options of an audit that an audit of an edited source does not repeat: they measure more, and decide nothing here."""


@dataclass
class Workshop:
    """Runs edited sources of one audited model in processes that never imported the source as it was.

    trials, audits: number of each so far.
    """

    folder: Path
    shared: Mapping[str, Any]
    trials: int = 0
    audits: int = 0
    _process: Process | None = None
    _jobs: int = 0
    _known: dict[Any, Any] = field(default_factory=dict)

    def baseline(self) -> Baseline:
        """The results of the source as it is. Raises: AuditorError(slug="not-rebuilt") if it cannot be run."""
        result = self.ask("baseline", {})
        if isinstance(result, str):
            why = result.partition("\n")[0]
            said = f"a fresh process could not build and run the model: {why}"
            raise AuditorError(f"{said}: give a file or a function that builds it", "not-rebuilt")
        return result  # type: ignore[no-any-return]

    def trial(self, texts: Mapping[str, str], known: Mapping[str, Run] = MappingProxyType({})) -> Trial:
        """The results of an edited source in FP32 and in low precision.

        known: runs to improve, the worst first; the trial ends with the first run if that is no better.
        """
        self.trials += 1
        order = [*known, *(name for name in self.shared["runs"] if name not in known)]
        result = self.ask("trial", texts, {"runs": order, "known": dict(list(known.items())[:1])})
        return Trial(crash=result) if isinstance(result, str) else result

    def audit(self, texts: Mapping[str, str]) -> Standing:
        """What an audit of an edited source says, and how far its outputs are from the reference on all inputs."""
        self.audits += 1
        result = self.ask("gate", texts)
        if isinstance(result, str):
            return Standing(None, 0.0, None, frozenset(), frozenset(), crash=result)
        return result  # type: ignore[no-any-return]

    def ask(self, kind: str, texts: Mapping[str, str], further: Mapping[str, Any] = MappingProxyType({})) -> Any:
        """The worker's result for a job; a text if it failed. Equal jobs run once. further: more entries of the job."""
        key = (kind, tuple(sorted(texts.items())), str(further))
        if key in self._known:
            return self._known[key]
        self._jobs += 1
        file = self.folder / f"{self._jobs}.pickle"
        if self._process is None or self._process.poll() is not None:
            self._process = start()
        process = self._process
        hand(process, {**self.shared, **further, "kind": kind, "texts": dict(texts), "file": str(file)})

        def is_done() -> bool:
            beat()
            return file.exists() or process.poll() is not None

        wait_until(is_done, LIMIT)
        if not file.exists():
            words = "".join(process.last_words()[-1:])
            self.close()
            return words or f"no result within {LIMIT:g} seconds"
        result = pickle.loads(file.read_bytes())
        file.unlink()
        self._known[key] = result
        return result

    def close(self) -> None:
        """End the worker process and what it started."""
        if self._process is not None:
            self._process.end()
        self._process = None


@contextmanager
def open_workshop(subject: Subject, settings: Settings) -> Iterator[Workshop]:
    """Yield a Workshop for an audited subject. Raises: AuditorError(slug="not-rebuilt") if the model or its inputs
    cannot be used in another process."""
    with tempfile.TemporaryDirectory(prefix=OWN, ignore_cleanup_errors=True) as name:
        folder = Path(name)
        workshop = Workshop(folder, shared_by_jobs(subject, settings, folder))
        try:
            yield workshop
        finally:
            workshop.close()


@contextmanager
def open_for_step(shared: Mapping[str, Any]) -> Iterator[Workshop]:
    """Yield a Workshop whose jobs share the entries of `shared`, besides the path and the working directory."""
    with tempfile.TemporaryDirectory(prefix=OWN, ignore_cleanup_errors=True) as name:
        workshop = Workshop(Path(name), {**shared, **_surroundings()})
        try:
            yield workshop
        finally:
            workshop.close()


def _surroundings() -> dict[str, Any]:
    """Where this process finds modules and files."""
    return {"path": [str(Path(place).absolute()) for place in sys.path], "folder": str(Path.cwd())}


def shared_by_jobs(subject: Subject, settings: Settings, folder: Path) -> dict[str, Any]:
    """The parts of a job that are the same for all edited sources of a subject; writes the files that they name."""
    kept = [one.name for one in fields(subject) if one.name not in LEFT_OUT]
    about = {name: over_tensors(torch.Tensor.cpu, getattr(subject, name)) for name in ("batches", "held_out")}
    about |= {name: getattr(subject, name) for name in kept if name not in about}
    options = {name: getattr(settings, name) for name in options_of(Settings) if name not in NOT_REPEATED}
    options |= {"strategies": settings.scope_strategies}
    try:
        if subject.origin is not None:
            model = emit_plans(subject, {}, folder)
        else:
            model = folder / "model.pt"
            torch.save(subject.model, model)
        torch.save(about, folder / "about.pt")
        pickle.dumps(options)
    except Exception as error:
        said = f"the model, its inputs or an option cannot be passed to another process ({describe(error)})"
        raise AuditorError(f"{said}: audit a file or a function that builds the model", "not-rebuilt") from error
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    is_of_script = any(type(module).__module__ == "__main__" for module in subject.model.modules())
    return {
        "model": str(model),
        "about": str(folder / "about.pt"),
        "reference": str(folder / "reference.pt"),
        "script": str(script) if script and is_of_script else "",
        **_surroundings(),
        "seed": settings.seed,
        "device": settings.where,
        "runs": [
            f"{strategy}_{fmt}" for strategy in settings.scope_strategies for fmt in settings.formats if runs(fmt)
        ],
        "settings": options,
    }


def start() -> Process:
    """Start a worker process with the environment of this one."""
    words = json.dumps([HERE, *(place for place in sys.path if place != HERE)])
    flags = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]
    return Process([sys.executable, *flags, "-c", BOOT, str(os.getpid()), words], stdin=subprocess.PIPE)
