"""How many of sixty problems `fix` repairs, and how much of a person's gain it reaches: `python -m benchmarks.fixes`.

Each problem (`tests/features/fix/problems.py`) is audited and fixed in a process of its own. A diff is judged again with plain torch: the
reference is the original source in FP64, the candidates are the original and the fixed source in FP16 and BF16 under the
emulation, by `.to(dtype)` and by autocast. Names as arguments select problems; `--json FILE` saves the rows.
"""

from __future__ import annotations

import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from auditor import emulate, flow
from auditor.features.fix.overlay import serve
from auditor.features.fix.search import find_fixes
from auditor.loading import load
from auditor.numerics.formats import dtype_of
from auditor.numerics.metrics import output_error
from auditor.records import Audit
from auditor.settings import Settings
from tests.features.fix.problems import PROBLEMS, Problem

WORSE = 1.1
"""A fixed source is worse if its error exceeds the budget and this multiple of the original's."""


@dataclass(frozen=True)
class Row:
    """The result for one problem. best: predicted speed-up of a person's fix; None without one. repair: predicted by the
    first audit for the repaired model; None without a prediction. worse: runs in which the fixed source is worse."""

    name: str
    kind: str
    project: bool
    accepted: bool
    before: float
    after: float
    best: float | None
    repair: float | None
    titles: tuple[str, ...]
    worse: tuple[str, ...]
    trials: int
    audits: int
    seconds: float
    patch: str
    rejected: tuple[str, ...]


def measure(problem: Problem) -> Row:
    """Audit and fix one problem, in this process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / ".git").mkdir()
        (folder / "own").mkdir()
        (folder / "person").mkdir()
        file = problem.write(folder / "own")
        settings = Settings(formats=problem.formats)
        audit = audited(file, settings)
        began = time.monotonic()
        fixes = find_fixes(audit, settings)
        seconds = time.monotonic() - began
        texts = {one.file: one.after for one in fixes.texts}
        worse = compared(file, texts, problem, audit.max_error) if texts else ()
        best = None
        if problem.fixed:
            own_modules = [name for name in sys.modules if name.startswith(problem.name)]
            for module in own_modules:
                del sys.modules[module]
            sys.path[:] = [place for place in sys.path if not place.startswith(str(folder))]
            best = speed_of(audited(problem.write(folder / "person", fixed=True), settings))
        repair = max((one.speedup for one in audit.repairs), default=None)
        return Row(
            problem.name,
            problem.kind,
            problem.project,
            bool(fixes.fixes),
            fixes.speedup_before,
            fixes.speedup_after,
            best,
            repair,
            tuple(fix.title for fix in fixes.fixes),
            worse,
            fixes.trials,
            fixes.audits,
            seconds,
            fixes.patch,
            fixes.rejected,
        )


def audited(file: Path, settings: Settings) -> Audit:
    """The audit of a file."""
    return flow.run(load(str(file)), settings)


def speed_of(audit: Audit) -> float:
    """Predicted speed-up of the recommended plan."""
    return audit.plan.speedup if audit.plan is not None else 1.0


def compared(file: Path, texts: dict[str, str], problem: Problem, budget: float) -> tuple[str, ...]:
    """The runs in low precision in which the edited source is worse than the original, by plain torch."""
    dtypes = [dtype_of(name) for name in problem.formats]
    original, edited = errors(file, {}, dtypes), errors(file, texts, dtypes)
    worse = []
    for name, before in original.items():
        after = edited[name]
        if after > max(budget, WORSE * before) and not (math.isinf(after) and math.isinf(before)):
            worse.append(f"{name}: {after:.2g} instead of {before:.2g}")
    return tuple(worse)


def errors(file: Path, texts: dict[str, str], dtypes: list[torch.dtype]) -> dict[str, float]:
    """{run: its error against the original source in FP64}; inf for a run that raises."""
    result: dict[str, float] = {}
    for number in (1, 2):
        expected = outputs(file, {}, number, torch.float64, "to")
        if expected is None:
            expected = outputs(file, {}, number, torch.float32, "to")
        assert expected is not None
        for dtype in dtypes:
            for how in ("to", "autocast"):
                found = outputs(file, texts, number, dtype, how)
                error = math.inf if found is None else output_error(expected, found)
                name = f"{how} {dtype}"
                result[name] = max(result.get(name, 0.0), math.inf if math.isnan(error) else error)
    return result


def outputs(file: Path, texts: dict[str, str], number: int, dtype: torch.dtype, how: str) -> list[torch.Tensor] | None:
    """The outputs of the file's model on one batch; None if it raises."""
    own = [name for name in sys.modules if name.startswith(file.stem)]
    for name in own:
        del sys.modules[name]
    sys.path.insert(0, str(file.parent))
    try:
        with serve(texts), torch.no_grad():
            spec = importlib.util.spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
            model = module.get_model()
            batch: Any = module.get_inputs()[0] if number == 1 else module.get_eval_inputs()[0]
            with emulate("cuda"):
                if how == "autocast":
                    with torch.autocast("cuda", dtype=dtype):
                        return [model(*batch).double()]
                given = [x.to(dtype) if x.is_floating_point() else x for x in batch]
                default = torch.get_default_dtype()
                if dtype == torch.float64:
                    torch.set_default_dtype(dtype)
                try:
                    return [model.to(dtype)(*given).double()]
                finally:
                    torch.set_default_dtype(default)
    except (RuntimeError, TypeError, ValueError):
        return None
    finally:
        sys.path.remove(str(file.parent))


def main(words: list[str]) -> None:
    """Measure the named problems, or all, each in a process of its own; print a row for each, and the counts."""
    saved = words[words.index("--json") + 1] if "--json" in words else None
    names = [word for word in words if word not in ("--json", saved, "--here")]
    by_name = {one.name: one for one in PROBLEMS}
    chosen = [by_name[name] for name in names or by_name]
    if "--here" in words:
        print(json.dumps(asdict(measure(chosen[0]))))
        return
    rows = []
    for problem in chosen:
        command = [sys.executable, "-m", "benchmarks.fixes", problem.name, "--here"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{problem.name}: failed, {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        row = Row(**json.loads(done.stdout.splitlines()[-1]))
        rows.append(row)
        print(said(row), flush=True)
        if saved:
            Path(saved).write_text(json.dumps([asdict(one) for one in rows], indent=1))
    print(counted(rows))


def said(row: Row) -> str:
    """One row as text."""
    best = f", a person's {row.best:.2f}x" if row.best is not None else ""
    repair = f", repair predicted at {row.repair:.2f}x" if row.repair is not None else ""
    what = "; ".join(row.titles) or "; ".join(row.rejected) or "no fix"
    bad = f" WORSE: {', '.join(row.worse)}" if row.worse else ""
    effort = f"{row.trials} trials, {row.audits} audits, {row.seconds:.0f} s"
    return f"{row.name}: {row.before:.2f}x to {row.after:.2f}x{best}{repair}; {effort}; {what}{bad}"


def counted(rows: list[Row]) -> str:
    """The counts over all rows."""
    accepted = [row for row in rows if row.accepted]
    worse = [row for row in accepted if row.worse]
    gains = [gain_reached(row) for row in rows if row.best is not None and row.best > 1.01 * row.before]
    near = sum(gain >= 0.8 for gain in gains)
    mean = sum(gains) / max(len(gains), 1)
    close = [row for row in accepted if row.repair is not None]
    right = sum(abs(math.log(row.repair / row.after)) <= math.log(1.15) for row in close if row.repair is not None)
    return (
        f"{len(accepted)} of {len(rows)} accepted; worse by plain torch: {len(worse)}; of {len(gains)} with a person's gain, "
        f"{near} reach 80 % of it, {mean:.0%} on average; {right} of {len(close)} predicted repairs are within 15 %; "
        f"most audits: {max((row.audits for row in rows), default=0)}"
    )


def gain_reached(row: Row) -> float:
    """Share of a person's gain in predicted speed-up that the fix reaches, at most 1."""
    assert row.best is not None
    return min((row.after - row.before) / (row.best - row.before), 1.0)


if __name__ == "__main__":
    main(sys.argv[1:])
