"""The results that users hold: the records of an audit and of a rehearsal, which here can also be shown and saved.

Records are data, and import nothing above them. What writes and shows them is added once, at the top, in subclasses with
the same fields; everything below takes the records.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from . import records
from .artefact.emit import emit
from .artefact.libraries import applicable, files_of
from .artefact.strategies import SHIPPED
from .asked import validate
from .document import codec, read
from .features.fix.output import apply_fixes
from .features.fix.search import find_fixes
from .records import folder
from .records.audit import FILES
from .rehearsal import rehearse as rehearsing
from .rehearsal import result as rehearsed
from .report import fixes as fixed
from .report import reporters
from .report.blocks import html, to_terminal
from .report.plans import about_plan
from .report.rehearsal import render
from .settings import Settings

Given = ParamSpec("Given")
Shown = TypeVar("Shown", "Audit", "Rehearsal")

PLAN_WIDTH = 100
"""Maximum number of characters in a line of a printed plan."""


class Plan(records.Plan):
    """A plan that prints itself, and shows itself in a notebook."""

    def __repr__(self) -> str:
        """The plan in a few lines: its evidence, its gain, and what it keeps in FP32."""
        return to_terminal(about_plan(self), PLAN_WIDTH, False).rstrip()

    def _repr_html_(self) -> str:
        """The same as HTML, which a notebook shows."""
        return f"<div>{html(about_plan(self))}</div>\n"


class Audit(records.Audit):
    """The result of an audit: verdicts, findings and plans, which can be printed, shown in a notebook, and saved."""

    @classmethod
    def of(cls, audit: records.Audit) -> Audit:
        """The Audit with the contents of a record; its plans print themselves too."""
        contents = _fields(audit)
        contents["plans"] = {name: Plan(**_fields(plan)) for name, plan in audit.plans.items()}
        return cls(**contents)

    def __repr__(self) -> str:
        """A summary of the audit in a few lines."""
        return reporters.summary(self)

    def _repr_html_(self) -> str:
        """The audit's summary as HTML, which a notebook shows."""
        return f"<div>{html(reporters.overview(self))}</div>\n"

    def to_dict(self) -> dict[str, Any]:
        """The contents of `plan.json`: decisions and their reasons."""
        return codec.to_plan(self)

    def to_measurements(self) -> dict[str, Any]:
        """The contents of `measurements.json`: measurements of every operation, parameter and module."""
        return codec.to_measurements(self)

    def texts(self, directory: str | Path) -> dict[str, str | bytes]:
        """The contents of all files that `save` writes into the directory, by file name; programs as bytes."""
        result: dict[str, str | bytes] = {**codec.texts(self)}
        for name, report in reporters.WRITTEN.items():
            result[name] = report(self)
        for plan in self.quantized_plans:
            result.update(files_of(self, plan))
        result.update(self.programs)
        if self.live is not None:
            result["patched_model.py"] = emit(
                self.live.origin,
                self.parameters,
                self.plans,
                self.recommended,
                Path(directory),
                self.structure,
                applicable(self),
            )
        return {name: result[name] for name in (*FILES, *result) if name in result}

    def save(self, directory: str | Path, *, onnx: bool | str = False) -> tuple[Path, ...]:
        """Write report.html, plan.json, measurements.json, patched_model.py, findings.sarif, programs, and plans of
        quantization schemes for other libraries; returns the paths.

        onnx: write an ONNX model of each program too, checked and run by onnxruntime; "low": with inputs and outputs in
        the plan's format. All files of an older audit are replaced at once; other files in the directory are kept, and
        patched_model.py too if the audit was loaded from files. Raises: AuditorError(slug="bad-output") if writing
        fails, "missing-onnx" or "no-program" if ONNX is impossible.
        """
        if onnx:
            from .graphs.onnxfile import with_onnx  # imports onnx

            ends = "fp32" if onnx is True else onnx
            return Audit.of(with_onnx(self, ends)).save(directory)
        target = folder.path_of(directory, "the directory to save into")
        older = [str(file.relative_to(target)) for file in target.glob("quantized/*/*_config.*")]
        older.extend(read.programs_in(target))
        return folder.write(target, self.texts(target), older)

    def fixes(self, *, safe: bool = False, **options: Any) -> Fixes:
        """Search for changes of the source that repair this audit's problems; no file changes.

            found = audit.fixes()
            print(found)  # the table and the patch
            found.apply()  # writes the changes

        safe: only conversions of dtypes, no algebra. options: of the audit, where they differ from the defaults and the
        audit does not store them, such as `metric`. Every change that is returned was run in a fresh process and audited.
        Raises: AuditorError(slug="loaded-audit") if the audit was loaded from files, "not-rebuilt" if a fresh process cannot
        build the model.
        """
        strategies = dict.fromkeys(name.partition("_")[0] for name in self.baselines)
        own = {
            "formats": self.formats,
            "strategies": tuple(strategies) or SHIPPED,
            "max_error": self.max_error,
            "criteria": self.criteria,
            "use": self.use,
            "seed": self.environment.seed,
        }
        settings = validate(Settings, {**own, **options})
        return Fixes(**_fields(find_fixes(self, settings, only_safe=safe)))


class Fixes(records.Fixes):
    """Verified changes of the source, which can be printed and applied."""

    def __repr__(self) -> str:
        """The table of changes, and the patch."""
        shown = to_terminal(fixed.overview(self, "the audited model"), PLAN_WIDTH, False).rstrip()
        return f"{shown}\n\n{self.patch}".rstrip()

    def apply(self) -> tuple[Path, ...]:
        """Write the changes into the files; returns the files. Raises: AuditorError(slug="changed-source")."""
        return apply_fixes(self)


class Rehearsal(rehearsed.Rehearsal):
    """The results of a rehearsal, which can be saved."""

    @classmethod
    def of(cls, rehearsal: rehearsed.Rehearsal) -> Rehearsal:
        """The Rehearsal with the contents of a record."""
        return cls(**_fields(rehearsal))

    def save(self, directory: str | Path) -> tuple[Path, ...]:
        """Write rehearsal.json and rehearsal.html. Raises: AuditorError(slug="bad-output")."""
        texts = {
            "rehearsal.json": json.dumps(self.to_dict(), indent=1) + "\n",
            "rehearsal.html": render(self),
        }
        return folder.write(folder.path_of(directory, "directory"), texts)


def _showing(function: Callable[Given, Any], shown: type[Shown]) -> Callable[Given, Shown]:
    """The function, with the same arguments, returning its record as one that shows itself."""

    @wraps(function)
    def returning(*args: Given.args, **options: Given.kwargs) -> Shown:
        result: Shown = shown.of(function(*args, **options))
        return result

    return returning


load = _showing(read.load, Audit)
rehearse = _showing(rehearsing.rehearse, Rehearsal)


def _fields(record: Any) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}
