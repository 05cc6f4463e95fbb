"""The results that users hold: the records of an audit, which here can also be shown and saved.

Records are data, and import nothing above them. What writes and shows them is added once, at the top, in subclasses with
the same fields; everything below takes the records.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import records, reporters
from .artefact.emit import emit
from .artefact.libraries import applicable, files_of
from .document import codec, read
from .facade import contents, returning
from .features import part
from .records import folder
from .records.audit import FILES
from .report.blocks import html, to_terminal
from .report.plans import about_plan

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
        given = contents(audit)
        given["plans"] = {name: Plan(**contents(plan)) for name, plan in audit.plans.items()}
        return cls(**given)

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
            ends = "fp32" if onnx is True else onnx
            return Audit.of(part("onnxfile").with_onnx(self, ends)).save(directory)
        target = folder.path_of(directory, "the directory to save into")
        older = [str(file.relative_to(target)) for file in target.glob("quantized/*/*_config.*")]
        older.extend(read.programs_in(target))
        return folder.write(target, self.texts(target), older)

    def fixes(self, *, safe: bool = False, **options: Any) -> records.Fixes:
        """Search for changes of the source that repair this audit's problems; no file changes.

            found = audit.fixes()
            print(found)  # the table and the patch
            found.apply()  # writes the changes

        safe: only conversions of dtypes, no algebra. options: of the audit, where they differ from the defaults and the
        audit does not store them, such as `metric`. Every change that is returned was run in a fresh process and audited.
        Raises: AuditorError(slug="loaded-audit") if the audit was loaded from files, "not-rebuilt" if a fresh process cannot
        build the model.
        """
        found: records.Fixes = part("facade_of_fixes").find(self, safe=safe, **options)
        return found


load = returning(read.load, Audit)
