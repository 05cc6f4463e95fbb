"""The generated document of all rules: whole, in order, with links that lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

from auditor.rulebook.explain import reference
from auditor.rulebook.load import load_rules
from tests.rule_files import write


def test_two_families_in_one_document(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, family="early", stem="ABC001-bad-thing")
    text = reference(load_rules([tmp_path]))
    headings = re.findall(r"(?m)^(##?) ([A-Z].+)$", text)
    assert headings == [
        ("#", "Rules"),
        *(("##", name) for name in ("Early", "Tests", "Facts")),
    ]
    # The overview is by code, and each line leads to a heading two levels below its family's.
    rows = re.findall(r"(?m)^\| \[(\w+)\]\(#([\w-]+)\) \| bad-thing \| (\w+) \|", text)
    assert rows == [("ABC001", "abc001-bad-thing", "early"), ("TST001", "tst001-bad-thing", "tests")]
    for code in ("ABC001", "TST001"):
        assert f"\n### {code}: bad-thing\n" in text
    assert text.index("### ABC001") < text.index("## Tests") < text.index("### TST001")
    assert "\n#### What it looks for\n" in text
