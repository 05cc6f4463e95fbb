"""The public `rehearse`, whose result can be saved."""

from __future__ import annotations

import json
from pathlib import Path

from ...facade import contents, returning
from ...records import folder
from . import rehearse as rehearsing
from . import result
from .page import render


class Rehearsal(result.Rehearsal):
    """The results of a rehearsal, which can be saved."""

    @classmethod
    def of(cls, rehearsal: result.Rehearsal) -> Rehearsal:
        """The Rehearsal with the contents of a record."""
        return cls(**contents(rehearsal))

    def save(self, directory: str | Path) -> tuple[Path, ...]:
        """Write rehearsal.json and rehearsal.html. Raises: AuditorError(slug="bad-output")."""
        texts = {
            "rehearsal.json": json.dumps(self.to_dict(), indent=1) + "\n",
            "rehearsal.html": render(self),
        }
        return folder.write(folder.path_of(directory, "directory"), texts)


rehearse = returning(rehearsing.rehearse, Rehearsal)
