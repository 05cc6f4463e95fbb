from __future__ import annotations

import sys

import pytest

from auditor import cli
from auditor.errors import AuditorError
from auditor.fleet import running
from auditor.fleet.targets import read


def written(tmp_path, text):
    file = tmp_path / "targets.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_options_become_words_and_a_target_goes_before_the_defaults(tmp_path):
    file = written(
        tmp_path,
        """
[defaults]
formats = ["fp16", "bf16"]
max-error = 0.1

[[target]]
name = "small net"
target = "net.py:Net(width=8)"
max_error = 0.001
quick = true
model-explorer = false
criterion = ["logits: kl <= 0.01", "boxes: max_abs <= 0.5"]
""",
    )
    (target,) = read(file)
    assert target.name == "small net"
    assert target.folder == tmp_path
    assert set(target.words[:-1]) == {
        "--formats=fp16,bf16",
        "--max-error=0.001",
        "--quick",
        "--no-model-explorer",
        "--criterion=logits: kl <= 0.01",
        "--criterion=boxes: max_abs <= 0.5",
    }
    assert target.words[-1] == "net.py:Net(width=8)"


ONE = '[[target]]\nname = "a"\ntarget = "a.py"\n'


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it names no model"),
        ("[[target]\n", "targets.toml: "),
        (ONE + "[[targets]]\n", "there is no table 'targets'"),
        ("[[target]]\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = '../a'\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = '" + "a" * 101 + "'\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = 'a'\n", "target 'a' has no `target`"),
        (ONE + ONE.replace('"a"', '"A"'), "two targets are called 'A'"),
        (ONE + "formatz = 'fp16'\n", "no option of an audit in a fleet 'formatz': did you mean formats?"),
        (ONE + "out = 'b'\n", "target 'a' has no option of an audit in a fleet 'out'"),
        (ONE + "formats = 'fp7'\n", "target 'a': formats takes fp16, bf16"),
        (ONE + "seed = {}\n", "seed takes a whole number"),
        (ONE + "[defaults]\nsed = 1\n", "[defaults] has no option of an audit in a fleet 'sed': did you mean seed?"),
        (ONE + "no-measure-time = true\n", "'no-measure-time': did you mean measure-time?"),
    ],
)
def test_a_file_that_will_not_do_is_refused_in_one_line(tmp_path, text, said):
    with pytest.raises(AuditorError) as raised:
        read(written(tmp_path, text))
    assert raised.value.slug == "bad-fleet"
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


# `auditor fleet` as a user calls it, with audits that are made up.

SCRIPT = """
import pathlib, sys
name, out = sys.argv[1:]
with open("calls", "a") as calls:
    calls.write(name + "\\n")
if name == "bad.py":
    print("error: it cannot be loaded", file=sys.stderr)
    sys.exit(2)
pathlib.Path(out).mkdir(parents=True, exist_ok=True)
pathlib.Path(out, "plan.json").write_bytes(pathlib.Path("plan.json").read_bytes())
"""

FLEET = '[[target]]\nname = "one"\ntarget = "one.py"\n[[target]]\nname = "two"\ntarget = "two.py"\n'
BAD = '[[target]]\nname = "bad"\ntarget = "bad.py"\n'


@pytest.fixture
def fleet(monkeypatch, tmp_path):
    from tests.unit.report.factory import make_audit

    monkeypatch.chdir(tmp_path)
    (tmp_path / "audit.py").write_text(SCRIPT, encoding="utf-8")
    made = make_audit(5)
    made.save(tmp_path / "made")
    (tmp_path / "made" / "plan.json").rename(tmp_path / "plan.json")
    monkeypatch.setattr(
        running,
        "command_of",
        lambda task: [sys.executable, "audit.py", task.target.words[-1], str(task.directory.absolute())],
    )

    def called(text, *options):
        if text is not None:
            (tmp_path / "targets.toml").write_text(text, encoding="utf-8")
        return cli.main(["fleet", "targets.toml", "--out", "out", "--jobs", "1", *options])

    return called


def calls(tmp_path):
    file = tmp_path / "calls"
    return file.read_text().split() if file.exists() else []


def test_what_is_done_is_not_done_again_and_a_failure_is_exit_code_1(fleet, tmp_path, capsys):
    fleet(FLEET)
    assert calls(tmp_path) == ["one.py", "two.py"]
    assert fleet(FLEET + BAD) == 1
    assert fleet(FLEET + BAD) == 1
    assert calls(tmp_path) == ["one.py", "two.py", "bad.py", "bad.py"]
    fleet(FLEET + BAD, "--force")
    assert len(calls(tmp_path)) == 7
    told = capsys.readouterr()
    assert "bad: failed, it cannot be loaded\n" in told.out
    assert "Fleet    out/index.html\n" in told.out
    assert "3 of 3, bad, " in told.err
    assert "it cannot be loaded" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("[[target]]\nname = 'a'\n", (), "target 'a' has no `target`"),
        (FLEET, ("--baseline", "nowhere"), "nowhere is no directory of an earlier fleet"),
        (FLEET, ("--out", "targets.toml"), "targets.toml"),
        (None, (), "cannot be read"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(fleet, tmp_path, capsys, text, options, said):
    assert fleet(text, *options) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("error: ")
    assert told.out == ""
    assert not (tmp_path / "out").exists()
    assert calls(tmp_path) == []
