"""What an audit on the command line answers with: the text on stdout, the list of files, the summary of a job."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AuditorError

if TYPE_CHECKING:
    from ..records.audit import Audit


LABELS = {
    "report.html": "Report",
    "plan.json": "Plan",
    "measurements.json": "Measured",
    "patched_model.py": "Patched",
    "findings.sarif": "SARIF",
}
"""What each file of an audit is called."""

ENDINGS = {".pt2": "Program", ".onnx": "ONNX"}
"""The same of files that plans name, by how their names end; all others are for Google's Model Explorer."""


def extra(audit: Audit, wanted: bool) -> dict[str, str]:
    """Further files beside those of every audit, by their path: what `--model-explorer` asks for."""
    if not wanted:
        return {}
    from ..report import model_explorer

    return {f"model_explorer/{name}": text for name, text in model_explorer.files(audit).items()}


def rendered(audit: Audit, form: str) -> str:
    """The audit as `--format` asks for it."""
    from ..report import reporters

    return reporters.rendered(form, audit)


def about(audit: Audit, layer: str) -> str:
    """What `--explain-layer` asks for. Raises: AuditorError(slug="no-such-layer")."""
    from ..report.layer import explain_layer

    owners = {report.node.name: report.node.owner for report in audit.nodes}
    return explain_layer(audit.plans, audit.recommended, owners, layer) + "\n"


def append_summary(audit: Audit) -> None:
    """The Markdown summary on the page of the job, where GitHub runs this and names a file for it.

    Raises: AuditorError(slug="bad-output").
    """
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if not file:
        return
    try:
        with Path(file).open("a", encoding="utf-8") as page:
            page.write(rendered(audit, "md"))
    except OSError as error:
        raise AuditorError(f"GITHUB_STEP_SUMMARY names {file}: {error.strerror}", slug="bad-output") from error


def following(audit: Audit, directory: Path) -> str:
    """The line that says what to do next."""
    from ..report.blocks import Lines, looks, to_terminal
    from ..report.following import following as words

    return to_terminal([Lines("Next", (words(audit, directory),))], looks())


def show(report: Path) -> None:
    """The report in the user's browser; where there is none, a line on stderr says so."""
    if not webbrowser.open(report.resolve().as_uri()):
        print(f"warning: no browser could be opened: {report} is the report", file=sys.stderr)


def listing(files: Iterable[Path]) -> str:
    """One line per file that was written."""
    return "\n".join(f"{LABELS.get(file.name) or ENDINGS.get(file.suffix, 'Explorer'):<8} {file}" for file in files)
