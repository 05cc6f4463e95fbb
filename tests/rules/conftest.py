"""Rules about collectives need a process group."""

import pytest


@pytest.fixture(scope="module", autouse=True)
def _process_group(process_group: None) -> None:
    """The group of this process alone, for every test here."""
