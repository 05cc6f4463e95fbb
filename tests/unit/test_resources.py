"""Where the data that ships with the package lies, and what is said if it is not there."""

from __future__ import annotations

import pytest

from auditor.errors import AuditorError
from auditor.resources import resource_dir


def test_a_missing_resource_says_what_to_do() -> None:
    with pytest.raises(AuditorError, match="reinstall"):
        resource_dir("no-such-directory")
