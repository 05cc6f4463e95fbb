import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from auditor import cli, fleet
from auditor.errors import AuditorError
from auditor.fleet import (
    KEPT,
    FleetTarget,
    Outcome,
    earlier_outcomes,
    headline,
    keep,
    read,
    render,
    row_of,
    rows_of,
    run,
    run_all,
)
from auditor.processes import Process
from tests.support.refusing import refused
from tests.unit.report.factory import make_audit


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Tasks whose audit is a script of this test."""

    def task(name, script, **how):
        return FleetTarget(name, (script,), tmp_path, tmp_path / name, **how)

    monkeypatch.setattr(fleet, "Process", lambda command, **how: Process([sys.executable, "-c", command[3]], **how))
    return task


@pytest.mark.parametrize(
    ("script", "tries", "code", "said"),
    [
        ("os.kill(os.getpid(), 9)", 3, -9, "the process was killed by SIGKILL"),
        ("os.kill(os.getpid(), 9) if os.path.getsize('tries') == 1 else sys.exit(1)", 2, 1, ""),
        ("sys.stderr.write('error: killed\\nhint: `auditor explain process-ended`'); sys.exit(2)", 3, 2, "killed"),
        ("sys.stderr.write('warning: w\\nerror: no such file\\nhint: look'); sys.exit(2)", 1, 2, "no such file"),
        ("sys.exit(2)", 1, 2, "it ended with exit code 2 without a message"),
    ],
)
def test_one_that_crashed_is_tried_again_and_others_say_their_error(scripted, tmp_path, script, tries, code, said):
    ended = run(scripted("a", f"import os,sys,time\ntime.sleep(.3)\nopen('tries','a').write('x')\n{script}", retries=2))
    assert (ended.code, ended.said, ended.seconds > 0.3 * tries) == (code, said, True)
    assert (tmp_path / "tries").read_text() == "x" * tries


def test_one_that_cannot_be_started_is_told_and_the_others_run(scripted, tmp_path):
    tasks = [FleetTarget("a", (), tmp_path / "missing", tmp_path / "a"), scripted("b", "")]
    ends = {}
    run_all(tasks, 1, None, lambda task, ended: ends.update({task.name: ended.said}))
    assert ends["a"].startswith("it could not be run, FileNotFoundError: ")
    assert ends["b"] == ""


def test_a_cluster_needs_ray(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with refused(AuditorError, "no-ray", "no Ray cluster at auto"):
        run_all([], 1, "auto", print)


def test_one_that_hangs_is_ended(scripted):
    ended = run(scripted("a", "import time; time.sleep(60)", limit=0.5))
    assert ended.said == "it took longer than 0.5 seconds"
    assert ended.seconds < 30


def test_one_that_is_given_up_leaves_nothing_that_it_started(scripted, tmp_path):
    script = (
        "import signal, subprocess, time\nfrom pathlib import Path\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\nsignal.signal(signal.SIGTERM, signal.SIG_DFL)\n"  # it ignores SIGTERM
        "Path('draft').write_text(str(child.pid))\nPath('draft').rename('child')\ntime.sleep(60)"
    )
    run(scripted("a", script, limit=60), (tmp_path / "child").exists)
    child, states = (tmp_path / "child").read_text(), []
    while len(states) < 100 and states[-1:] not in ([""], ["Z"]):  # a process that is killed takes its time to go
        time.sleep(0.1)
        told = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True)
        states.append(told.stdout.strip()[:1])
    assert states[-1] in ("", "Z")


@pytest.fixture
def interruptible():
    """Ctrl-C is ignored where tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_fleet_leaves_nothing_running(scripted, tmp_path, interruptible):
    script = "import os, time\nopen(f'pid{os.getpid()}', 'w').close()\ntime.sleep(60)"
    tasks = [scripted(name, script) for name in "abc"]

    def interrupt():
        while len([*tmp_path.glob("pid*")]) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        run_all(tasks, 2, None, lambda task, ended: None)
    started = [int(file.name.removeprefix("pid")) for file in tmp_path.glob("pid*")]
    assert len(started) == 2
    assert not [pid for pid in started if subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0]


def target(name, folder, *words):
    return FleetTarget(name, (*words, f"{name}.py"), folder, folder / name)


def test_rows_link_to_reports_and_say_why_there_is_none(tmp_path):
    audit = make_audit(20)
    audit.save(tmp_path / "good one")
    targets = [target(name, tmp_path) for name in ("good one", "lost", "broken", "later")]
    ends = {
        "good one": Outcome(asked="", code=1, seconds=3.25),
        "lost": Outcome(asked="", code=0),
        "broken": Outcome(asked="", code=2, said="no such <file>"),
    }
    rows = [row_of(target, ends.get(target.name), None) for target in targets]
    assert [row.state for row in rows] == ["findings", "failed", "failed", "not audited yet"]
    assert rows[0].plan.name == audit.recommended
    page = render(rows, None)
    assert 'href="good%20one/report.html"' in page
    assert "no such &lt;file&gt;" in page
    row = row_of(target("good one", tmp_path / "new"), ends["broken"], tmp_path)
    assert (row.state, row.said) == ("failed", ["no such <file>", "audited before, not now"])
    assert headline(rows) == "4 models: 2 failed, 1 not audited yet."
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)


def test_outcomes_that_stand_are_kept_and_a_damaged_file_counts_as_none(tmp_path):
    targets = [target(name, tmp_path) for name in "abc"]
    good = Outcome(asked=targets[0].asked, code=0, seconds=1.5)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").touch()
    other = Outcome(asked=targets[2].asked, code=0)  # whose files are gone
    keep(tmp_path, {"a": good, "b": Outcome(asked=targets[1].asked, code=-9, said="killed"), "c": other})
    assert earlier_outcomes(tmp_path, targets) == {"a": good}
    (tmp_path / KEPT).write_text('{"a": 1}', encoding="utf-8")
    assert earlier_outcomes(tmp_path, targets) == {}


def test_a_changed_file_or_option_is_asked_for_anew(tmp_path):
    (tmp_path / "a.py").write_text("x = 1", encoding="utf-8")
    first = target("a", tmp_path).asked
    assert target("a", tmp_path).asked == first
    assert target("a", tmp_path, "--seed=1").asked != first
    (tmp_path / "a.py").write_text("x = 2", encoding="utf-8")
    assert target("a", tmp_path).asked != first
    symbol = FleetTarget("a", ("a.py:Net(2)",), tmp_path)
    was = symbol.asked
    (tmp_path / "a.py").write_text("x = 3", encoding="utf-8")
    assert symbol.asked != was


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
        ("", "the file names no model"),
        ("[[target]\n", "targets.toml:1: "),
        (ONE + "[[targets]]\n", "unknown table 'targets'"),
        ("[[target]]\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = '../a'\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = '" + "a" * 101 + "'\ntarget = 'a.py'\n", "target 1 needs a name"),
        ("[[target]]\nname = 'a'\n", "target 'a' has no key `target`"),
        (ONE + ONE.replace('"a"', '"A"'), "the targets 'a' and 'A' would have one folder"),
        (ONE + ONE, "the targets 'a' and 'a' would have one folder"),
        (ONE + "formatz = 'fp16'\n", "an unknown option: 'formatz': did you mean formats?"),
        (ONE + "out = 'b'\n", "target 'a' has an unknown option: 'out'"),
        (ONE + "formats = 'fp7'\n", "target 'a': formats takes fp16, bf16"),
        (ONE + "seed = {}\n", "seed takes a whole number"),
        (ONE + "criterion = 'x'\n", "target 'a': cannot parse the criterion 'x'"),
        (ONE + "[defaults]\nsed = 1\n", "[defaults] has an unknown option: 'sed': did you mean seed?"),
        (ONE + "no-measure-time = true\n", "'no-measure-time': did you mean measure-time?"),
    ],
)
def test_a_file_that_will_not_do_is_refused_in_one_line(tmp_path, text, said):
    with refused(AuditorError, "bad-fleet", said):
        read(written(tmp_path, text))


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
def run_fleet(monkeypatch, here):
    (here / "audit.py").write_text(SCRIPT, encoding="utf-8")
    make_audit(5).save(here / "made")
    (here / "made" / "plan.json").rename(here / "plan.json")

    def process(command, **how):
        return Process([sys.executable, "audit.py", *command[-4::2]], **how)

    monkeypatch.setattr(fleet, "Process", process)

    def called(text, *options):
        if text is not None:
            (here / "targets.toml").write_text(text, encoding="utf-8")
        return cli.main(["fleet", "targets.toml", "--out", "out", "--jobs", "1", *options])

    return called


def calls(tmp_path):
    file = tmp_path / "calls"
    return file.read_text().split() if file.exists() else []


def test_what_is_done_is_not_done_again_and_a_failure_is_exit_code_1(run_fleet, tmp_path, capsys):
    run_fleet(FLEET)
    assert calls(tmp_path) == ["one.py", "two.py"]
    assert run_fleet(BAD + FLEET) == 1
    assert run_fleet(BAD + FLEET) == 1
    assert calls(tmp_path) == ["one.py", "two.py", "bad.py", "bad.py"]
    run_fleet(BAD + FLEET, "--force")
    assert len(calls(tmp_path)) == 7
    told = capsys.readouterr()
    assert "bad: failed, it cannot be loaded\n" in told.out
    assert "Fleet    out/index.html\n" in told.out
    assert "1 of 3, bad, " in told.err
    assert "it cannot be loaded" in (tmp_path / "out" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("[[target]]\nname = 'a'\n", (), "target 'a' has no key `target`"),
        (FLEET, ("--baseline", "nowhere"), "--baseline takes the --out directory of an earlier run, not 'nowhere'"),
        (FLEET, ("--out", "targets.toml"), "cannot write to 'targets.toml' (Not a directory)"),
        (None, (), "cannot read"),
    ],
)
def test_wrong_input_is_one_line_and_writes_nothing(run_fleet, tmp_path, capsys, text, options, said):
    assert run_fleet(text, *options) == 2
    told = capsys.readouterr()
    assert said in told.err
    assert told.err.startswith("error: ")
    assert told.out == ""
    assert not (tmp_path / "out").exists()
    assert calls(tmp_path) == []


def test_a_pipeline_has_a_row_for_each_component_and_is_not_repeated(tmp_path):
    task = FleetTarget("sd", ("hf:sd",), tmp_path, tmp_path / "sd")
    for name in ("unet", "vae"):
        make_audit().save(tmp_path / "sd" / name)
    outcome = Outcome(task.asked, 0)
    rows = rows_of(task, outcome, None)
    assert [row.target.name for row in rows] == ["sd/unet", "sd/vae"]
    assert all(row.findings is not None for row in rows)
    assert 'href="sd/unet/report.html"' in render(rows, None)
    keep(tmp_path, {"sd": outcome})
    assert set(earlier_outcomes(tmp_path, [task])) == {"sd"}
    *others, failed = rows_of(task, Outcome(task.asked, 2, "hf:sd/text_encoder: no such weight"), None)
    assert [row.target.name for row in others] == ["sd/unet", "sd/vae"]
    assert (failed.state, failed.target.name, failed.said) == ("failed", "sd", ["hf:sd/text_encoder: no such weight"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the death signal is Linux's")
def test_an_audit_whose_fleet_has_ended_ends_before_the_command_line_is_imported(root):
    fleet = subprocess.Popen([sys.executable, "-c", ""])
    fleet.wait()
    environment = {**os.environ, "AUDITOR_PARENT": str(fleet.pid), "PYTHONPATH": str(root)}
    command = [sys.executable, "-X", "importtime", "-m", "auditor", "--help"]
    audit = subprocess.run(command, env=environment, capture_output=True)
    assert audit.returncode == -signal.SIGKILL
    assert b"auditor.processes" in audit.stderr
    assert b"auditor.cli" not in audit.stderr
