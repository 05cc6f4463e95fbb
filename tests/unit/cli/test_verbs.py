"""Verbs that explain: rules, and errors by name."""

from __future__ import annotations

import json

from auditor import cli
from auditor.resources import errors


def test_rules_and_explain(capsys):
    assert cli.main(["rules", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert rows
    assert cli.main(["rules"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert cli.main(["rules", "--format", "md"]) == 0
    document = capsys.readouterr().out
    assert all(f"### {row['code']}: {row['name']}\n" in document for row in rows)
    assert cli.main(["explain", rows[0]["code"].lower()]) == 0
    assert rows[0]["name"] in capsys.readouterr().out


def test_errors_are_explained_by_name(capsys):
    for slug, text in errors().items():
        assert cli.main(["explain", slug]) == 0
        assert capsys.readouterr().out == f"{slug}\n\n{text}\n"
    assert "missing-target" in errors()
    assert cli.main(["explain", "mising-target"]) == 2
    assert "did you mean missing-target?" in capsys.readouterr().err
    assert cli.main(["explain", "sft01"]) == 2
    assert "did you mean SFT001?" in capsys.readouterr().err
