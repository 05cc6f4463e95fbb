"""The fixes of an audit as an object that prints itself, and that writes its changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ... import records
from ...artefact.strategies import SHIPPED
from ...asked import validate
from ...facade import contents
from ...report.blocks import to_terminal
from ...report.fixes import overview
from ...settings import Settings
from .output import apply_fixes
from .search import find_fixes

WIDTH = 100
"""Maximum number of characters in a line of the printed table."""


class Fixes(records.Fixes):
    """Verified changes of the source, which can be printed and applied."""

    def __repr__(self) -> str:
        """The table of changes, and the patch."""
        shown = to_terminal(overview(self, "the audited model"), WIDTH, False).rstrip()
        return f"{shown}\n\n{self.patch}".rstrip()

    def apply(self) -> tuple[Path, ...]:
        """Write the changes into the files; returns the files. Raises: AuditorError(slug="changed-source")."""
        return apply_fixes(self)


def find(audit: records.Audit, *, safe: bool, **options: Any) -> Fixes:
    """See `Audit.fixes`."""
    strategies = dict.fromkeys(name.partition("_")[0] for name in audit.baselines)
    own = {
        "formats": audit.formats,
        "strategies": tuple(strategies) or SHIPPED,
        "max_error": audit.max_error,
        "criteria": audit.criteria,
        "use": audit.use,
        "seed": audit.environment.seed,
    }
    settings = validate(Settings, {**own, **options})
    return Fixes(**contents(find_fixes(audit, settings, only_safe=safe)))
