"""Rule files of several directories together: codes, families, and rules that supersede others."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from auditor.errors import AuditorError
from auditor.rulebook.explain import reference
from auditor.rulebook.load import load_rules
from tests.support.rule_files import RULE, write


def test_codes_are_unique_and_families_share_a_prefix(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, family="others")
    with pytest.raises(AuditorError) as twice:
        load_rules([tmp_path])
    assert twice.value.slug == "rule-code-twice"
    (tmp_path / "others" / "TST001-bad-thing.toml").unlink()
    write(tmp_path, stem="ABC001-bad-thing")
    with pytest.raises(AuditorError) as prefix:
        load_rules([tmp_path])
    assert prefix.value.slug == "rule-prefix"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ('supersedes = ["TST002"]', 'formats = ["fp16", "bf16"]', "TST002 also speaks of bf16, which TST001 does not"),
        ('supersedes = ["TST002"]', 'formats = ["fp16"]\nsupersedes = ["TST001"]', "TST002 supersedes TST001 in turn"),
        ('supersedes = ["TST001"]', 'formats = ["fp16"]', "TST001 supersedes TST001 in turn"),
    ],
)
def test_a_rule_supersedes_only_what_it_can_stand_for(tmp_path: Path, first: str, second: str, words: str) -> None:
    path = write(tmp_path, RULE.replace('formats = ["fp16"]', f'formats = ["fp16"]\n{first}'))
    write(tmp_path, RULE.replace('formats = ["fp16"]', second), stem="TST002-bad-thing")
    with pytest.raises(AuditorError) as caught:
        load_rules([tmp_path])
    assert str(caught.value) == f"{path}:4: supersedes: {words}"


def test_a_directory_without_rules_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AuditorError, match="holds no rule"):
        load_rules([tmp_path])


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
