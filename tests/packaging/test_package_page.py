"""What a package index shows: a page whose pictures and links lead somewhere, addresses, and classifiers it knows."""

from __future__ import annotations

import email
import re
import sys
import zipfile
from email.message import Message
from pathlib import Path

import pytest

import auditor
from tests.packaging.conftest import run


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return email.message_from_string(archive.read(name).decode("utf-8"))


def test_both_files_pass_the_check_of_the_index(built: Path) -> None:
    files = sorted(built.iterdir())
    assert [file.suffix for file in files] == [".whl", ".gz"]
    assert all(auditor.__version__ in file.name for file in files)
    assert run([sys.executable, "-m", "twine", "check", "--strict", *files], built).count("PASSED") == 2


def test_every_link_of_the_page_is_absolute_and_leads_to_a_file(metadata: Message, root: Path) -> None:
    text = str(metadata.get_payload())
    assert metadata["Description-Content-Type"] == "text/markdown"
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    repository = next(line.split(", ")[1] for line in metadata.get_all("Project-URL", []) if line.startswith("Repo"))
    pictures = f"{repository.replace('github.com', 'raw.githubusercontent.com')}/main/"
    own = [target for target in targets if target.startswith((repository, pictures))]
    assert len(own) > 10
    assert any(target.startswith(pictures) and target.endswith(".png") for target in own)
    for target in targets:
        assert target.startswith(("https://", "#")), target
    for target in own:
        path = target.removeprefix(f"{repository}/blob/main/").removeprefix(pictures).partition("#")[0]
        assert (root / path).exists(), target
