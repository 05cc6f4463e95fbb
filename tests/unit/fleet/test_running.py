import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from auditor.fleet import running
from auditor.fleet.running import Task, run, run_all
from auditor.fleet.targets import Target


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
