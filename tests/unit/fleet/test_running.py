from __future__ import annotations

import copy
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from auditor.document.codec import to_document
from auditor.document.read import audit_of
from auditor.fleet import running
from auditor.fleet.index import headline, render, rows_of, worse
from auditor.fleet.running import KEPT, Outcome, Task, asked_of, keep, run, run_all, standing
from auditor.fleet.targets import Target
from tests.unit.report.factory import make_audit


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """Tasks whose audit is a script of this test."""

    def task(name, script, **how):
        return Task(Target(name, (script,), tmp_path), tmp_path / name, **how)

    monkeypatch.setattr(running, "command_of", lambda task: [sys.executable, "-c", task.target.words[0]])
    return task


def test_findings_are_an_audit_and_an_error_says_its_line(scripted):
    assert run(scripted("a", "import sys; sys.exit(1)")).has_audit
    script = "import sys; print('warning: w\\nerror: no such file\\nhint: look', file=sys.stderr); sys.exit(2)"
    ended = run(scripted("b", script))
    assert not ended.has_audit
    assert ended.said == "no such file"


def test_one_that_a_signal_ended_is_tried_again_and_others_are_not(scripted):
    killed = run(scripted("a", "import os; os.kill(os.getpid(), 9)", retries=2))
    assert (killed.tries, killed.said) == (3, "the process was killed by SIGKILL")
    assert not killed.has_audit
    assert run(scripted("b", "import sys; sys.exit(2)", retries=2)).tries == 1


def test_one_that_hangs_is_ended(scripted):
    ended = run(scripted("a", "import time; time.sleep(60)", limit=0.5))
    assert ended.said == "it took longer than 0.5 seconds"
    assert ended.seconds < 30


def test_one_that_is_given_up_leaves_nothing_that_it_started(scripted, tmp_path):
    script = (
        "import subprocess, sys, time\nfrom pathlib import Path\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "Path('draft').write_text(str(child.pid))\nPath('draft').rename('child')\ntime.sleep(60)"
    )
    run(scripted("a", script, limit=60), (tmp_path / "child").exists)
    child, states = (tmp_path / "child").read_text(), []
    while len(states) < 100 and states[-1:] not in ([""], ["Z"]):  # a process that is killed takes its time to go
        time.sleep(0.1)
        told = subprocess.run(["ps", "-o", "stat=", "-p", child], capture_output=True, text=True)
        states.append(told.stdout.strip()[:1])
    assert states[-1] in ("", "Z")


def test_a_fleet_goes_on_where_one_fails(scripted):
    ends = {}
    tasks = [scripted("a", "import os; os.abort()"), scripted("b", "pass"), scripted("c", "import sys; sys.exit(2)")]
    run_all(tasks, 2, lambda task, ended: ends.update({task.target.name: ended.has_audit}))
    assert ends == {"a": False, "b": True, "c": False}


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
        run_all(tasks, 2, lambda task, ended: None)
    started = [int(file.name.removeprefix("pid")) for file in tmp_path.glob("pid*")]
    assert len(started) == 2
    assert not [pid for pid in started if subprocess.run(["ps", "-p", str(pid)], capture_output=True).returncode == 0]


@pytest.fixture(scope="module")
def audit():
    return make_audit(20)


@pytest.fixture(scope="module")
def document(audit):
    return json.loads(json.dumps(to_document(audit)))


def target(name, folder, *words):
    return Target(name, (*words, f"{name}.py"), folder)


def test_rows_link_to_reports_and_say_why_there_is_none(tmp_path, audit):
    audit.save(tmp_path / "good one")
    targets = [target(name, tmp_path) for name in ("good one", "lost", "broken", "later")]
    ends = {
        "good one": Outcome(asked="", code=1, seconds=3.25),
        "lost": Outcome(asked="", code=0),
        "broken": Outcome(asked="", code=2, said="no such <file>"),
    }
    rows = {row.name: row for row in rows_of(targets, ends, tmp_path, None)}
    assert [row.state for row in rows.values()] == ["findings", "failed", "failed", "waiting"]
    assert rows["good one"].plan == audit.recommended
    page = render([*rows.values()], None)
    assert 'href="good%20one/report.html"' in page
    assert "no such &lt;file&gt;" in page
    (row,) = rows_of([target("good one", tmp_path)], {"good one": ends["broken"]}, tmp_path / "new", tmp_path)
    assert (row.state, row.worse) == ("failed", ["there was an audit before"])
    assert headline([*rows.values()]) == "4 models: 2 failed, 1 not audited yet."
    assert not re.search(r"""(src|href)=["'](https?:)?//""", page)


def test_what_got_worse_is_told_and_what_did_not_is_not(document):
    before = audit_of(document, "before")
    assert worse(before, audit_of(copy.deepcopy(document), "after")) == []
    after = copy.deepcopy(document)
    name = after["recommended"]
    after["plans"][name]["measured_error"] *= 5
    after["plans"][name]["predicted_speedup"] *= 0.5
    told = worse(before, audit_of(after, "after"))
    assert [line.split()[0] for line in told] == ["error", "speed-up"]
    assert worse(audit_of(after, "after"), before) == []
    after["recommended"] = None
    assert f"{name} was recommended, and no plan is" in worse(before, audit_of(after, "after"))


def test_outcomes_that_stand_are_kept_and_a_damaged_file_counts_as_none(tmp_path):
    targets = [target(name, tmp_path) for name in "abc"]
    good = Outcome(asked=asked_of(targets[0]), code=0, seconds=1.5)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "plan.json").touch()
    other = Outcome(asked=asked_of(targets[2]), code=0)  # whose files are gone
    keep(tmp_path, {"a": good, "b": Outcome(asked=asked_of(targets[1]), code=-9, said="killed", tries=2), "c": other})
    assert standing(tmp_path, targets) == {"a": good}
    (tmp_path / KEPT).write_text('{"a": 1}', encoding="utf-8")
    assert standing(tmp_path, targets) == {}


def test_a_changed_file_or_option_is_asked_for_anew(tmp_path):
    (tmp_path / "a.py").write_text("x = 1", encoding="utf-8")
    first = asked_of(target("a", tmp_path))
    assert asked_of(target("a", tmp_path)) == first
    assert asked_of(target("a", tmp_path, "--seed=1")) != first
    (tmp_path / "a.py").write_text("x = 2", encoding="utf-8")
    assert asked_of(target("a", tmp_path)) != first
    symbol = Target("a", ("a.py:Net(2)",), tmp_path)
    was = asked_of(symbol)
    (tmp_path / "a.py").write_text("x = 3", encoding="utf-8")
    assert asked_of(symbol) != was
