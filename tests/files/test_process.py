"""Whatever a model does to its process: the answer on stdout stays clean, and the command ends in one line."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from auditor.records.audit import FORMAT_VERSION

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="the process is watched where it can be copied")

MODEL = """
import atexit, ctypes, logging, os, signal, subprocess, sys, threading, time
import torch

class Net(torch.nn.Linear):
    def forward(self, x):
        act()
        return super().forward(x)

def get_model(): torch.manual_seed(0); return Net(4, 4)
def get_inputs(): return torch.ones(2, 4)
"""
LOUD = """
logging.basicConfig(stream=sys.stdout)
atexit.register(lambda: print("at-exit"))
atexit.register(lambda: os.write(1, b"raw-at-exit\\n"))
def beat():
    while True:
        print("from-a-thread")
        time.sleep(0.001)
threading.Thread(target=beat, daemon=True).start()
def act():
    os.write(1, b"raw\\xff\\n")
    ctypes.CDLL(None).puts(b"from-c")
    subprocess.run(["echo", "from-a-child"])
    sys.__stdout__.write("dunder\\n")
    print("printed")
    logging.warning("logged")
Net.__del__ = lambda self: print("deleted")
"""


def command(folder: Path, root: Path, act: str, *words: str, **options: object) -> subprocess.Popen[bytes]:
    (folder / "model.py").write_text(MODEL + act)
    (folder / "tmp").mkdir(exist_ok=True)
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, "-m", "auditor", "model.py", "--formats", "bf16", "--strategies", "cast", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder / "tmp"), "CI": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **options,  # type: ignore[call-overload]
    )


def ended(folder: Path, root: Path, act: str, *words: str) -> tuple[int, str, str]:
    process = command(folder, root, act, *words)
    output, errors = process.communicate(timeout=300)
    return process.returncode, output.decode(), errors.decode(errors="replace")


def test_stdout_is_the_answer_alone_and_stderr_has_the_rest(tmp_path: Path, root: Path) -> None:
    code, output, errors = ended(tmp_path, root, LOUD, "--format", "json", "-q")
    assert code == 0
    assert json.loads(output)["format_version"] == FORMAT_VERSION
    words = "raw from-c from-a-child dunder printed logged deleted at-exit raw-at-exit from-a-thread"
    assert [word for word in words.split() if word not in errors] == []
    assert list((tmp_path / "tmp").glob(".auditor-*")) == []


@pytest.mark.parametrize(
    ("act", "words", "said"),
    [
        ("def act(): os.kill(os.getpid(), signal.SIGSEGV)", (), "was killed by SIGSEGV (at: load)"),
        pytest.param("def act(): os._exit(0)", (), "with exit code 0 (at: load)", marks=pytest.mark.slow),
        pytest.param("def act(): sys.exit(0)", (), "raised SystemExit: 0", marks=pytest.mark.slow),
        pytest.param("sys.exit()", (), "raised SystemExit", marks=pytest.mark.slow),
        ("def act(): time.sleep(1000)", ("--timeout", "3"), "no progress within 3 seconds (at: load)"),
    ],
    ids=["crash", "exit", "sys.exit", "import", "hang"],
)
def test_a_model_that_ends_the_process_is_one_line(
    act: str, words: tuple[str, ...], said: str, tmp_path: Path, root: Path
) -> None:
    code, output, errors = ended(tmp_path, root, act, *words)
    assert (code, output) == (2, "")
    (line,) = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert said in line
    assert "Traceback" not in errors
    assert {path.name for path in tmp_path.iterdir()} == {"model.py", "tmp"}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="where memory is counted as it is asked for")
@pytest.mark.parametrize(
    "mib", [400, *(pytest.param(mib, marks=pytest.mark.slow) for mib in (60, 200, 600, 700, 800, 1_000, 1_500))]
)
def test_little_memory_is_one_line_or_enough(mib: int, tmp_path: Path, root: Path) -> None:
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mib << 20, before[1]))  # of what starts here: a process inherits it
    try:
        process = command(tmp_path, root, "def act(): pass", "--out", "out")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    output, told = process.communicate(timeout=300)
    errors = told.decode(errors="replace")
    assert process.returncode in (0, 2), errors
    lines = [line for line in errors.splitlines() if line.startswith("error: ")]
    assert len(lines) == (process.returncode == 2), errors
    assert all("out of memory" in line for line in lines), errors
    assert "Traceback" not in errors
    assert (output != b"") is (process.returncode == 0)
    assert (tmp_path / "out").exists() is (process.returncode == 0)
    assert list((tmp_path / "tmp").iterdir()) == []


@pytest.mark.slow
def test_a_stdout_that_is_closed_full_or_no_longer_read(tmp_path: Path, root: Path) -> None:
    process = command(tmp_path, root, "def act(): pass", "--dry-run")
    process.stdout.close()
    assert process.wait(timeout=300) == 0
    assert "error:" not in process.stderr.read().decode()
    full = Path("/dev/full")
    if full.exists():
        shell = f'exec "{sys.executable}" -m auditor explain bad-option > {full}'
        environment = {**os.environ, "PYTHONPATH": str(root)}
        done = subprocess.run(["sh", "-c", shell], env=environment, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.startswith("error: standard output cannot be written to (No space left on device)")


def test_a_users_file_that_is_called_as_one_of_pythons_is_not_imported(root: Path, tmp_path: Path) -> None:
    for name in ("signal", "re", "argparse"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('imported')\n")
    environment = {**os.environ, "PYTHONPATH": str(root)}
    words = [sys.executable, "-m", "auditor", "explain", "bad-option"]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_signal_after_the_end_changes_no_exit_code(root: Path) -> None:
    class_ = "class Late:\n    def __del__(self): os.kill(os.getpid(), signal.SIGINT)"
    code = f"import os, signal\nfrom auditor.cli import main\n{class_}\nlate = Late()\nraise SystemExit(main())"
    words = [sys.executable, "-c", code, "explain", "bad-option"]
    assert subprocess.run(words, cwd=root, capture_output=True).returncode == 0


def mine(folder: Path) -> list[int]:
    """Processes that have a folder for their temporary one."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            ours = f"TMPDIR={folder}".encode() in (process / "environ").read_bytes()
            state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if ours and state != "Z":
            found.append(int(process.name))
    return found


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize("kills", [(1,), pytest.param((0, *range(2, 43)), marks=pytest.mark.slow)], ids=["one", "many"])
def test_kills_at_any_moment_leave_nothing(kills: Sequence[int], tmp_path: Path, root: Path) -> None:
    draw, latest = random.Random(0), 6.0 if len(kills) > 3 else 4.0
    expected = {
        signal.SIGTERM: (0, 130, -signal.SIGTERM),
        signal.SIGINT: (0, 130),
        signal.SIGKILL: (0, -signal.SIGKILL),
    }
    for index in kills:
        number = list(expected)[index % 3]
        process = command(tmp_path, root, "def act(): pass", "--out", "out")
        time.sleep(draw.uniform(0.5, latest))
        done = process.poll() is not None
        process.send_signal(number)
        errors = process.communicate(timeout=60)[1].decode()
        assert process.returncode in expected[number], (number, errors)
        assert not (done and process.returncode)
        assert "Traceback" not in errors
        until = time.monotonic() + 30
        while (mine(tmp_path / "tmp") or list((tmp_path / "tmp").iterdir())) and time.monotonic() < until:
            time.sleep(0.1)
        assert mine(tmp_path / "tmp") == []
        assert list((tmp_path / "tmp").iterdir()) == []
        written = (tmp_path / "out").iterdir() if (tmp_path / "out").exists() else ()
        out = {path.name for path in written if not path.name.startswith(".auditor-")}  # a kill hides what it wrote
        assert out in (set(), {"plan.json", "measurements.json", "report.html", "patched_model.py", "findings.sarif"})


@pytest.mark.slow
def test_two_audits_into_the_same_place_at_once(tmp_path: Path, root: Path) -> None:
    shared = str(tmp_path / "out")
    errors = ("0.1", "0.2")
    started = []
    for error in errors:
        (tmp_path / error).mkdir()
        words = ("--out", shared, "--max-error", error)
        started.append(command(tmp_path / error, root, "def act(): pass", *words))
    for process in started:
        told = process.communicate(timeout=300)[1].decode()
        assert process.returncode == 0, told
    files = {path.name: path.read_text() for path in Path(shared).iterdir()}
    assert set(files) == {"plan.json", "measurements.json", "report.html", "patched_model.py", "findings.sarif"}
    ran = str(json.loads(files["plan.json"])["max_error"])
    (other,) = set(errors) - {ran}
    assert f"'../{ran}/" in files["patched_model.py"]
    assert f"'../{other}/" not in files["patched_model.py"]
    assert f"--max-error {ran}" in files["report.html"]
    assert f"--max-error {other}" not in files["report.html"]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_as_good_as_empty_ones(closed: str, root: Path) -> None:
    shell = f'exec "{sys.executable}" -m auditor explain bad-option {closed}'
    done = subprocess.run(["sh", "-c", shell], env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True)
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""


@pytest.mark.slow
def test_an_audit_with_closed_streams_ends_as_others_do(tmp_path: Path, root: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + "def act(): pass")
    shell = f'exec "{sys.executable}" -m auditor model.py --formats bf16 --strategies cast <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", shell], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    assert done.returncode == 0
    assert (tmp_path / "audits" / "model" / "report.html").exists()


ENTRY = "import sys; from auditor.__main__ import main; sys.exit(main())"
"""The command `auditor`, as installers write it."""


@pytest.mark.parametrize("after", [0.15, 0.4])
def test_an_interruption_during_imports_is_one_line(after: float, root: Path) -> None:
    """The interpreter's own start takes less than a tenth of a second; what follows is the command's."""
    process = subprocess.Popen(
        [sys.executable, "-c", f"import time; {ENTRY.replace('main; ', 'main; print(flush=True); ')}", "rules"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    process.stdout.readline()
    time.sleep(after / 4)
    process.send_signal(signal.SIGINT)
    errors = process.communicate(timeout=60)[1].decode()
    assert (process.returncode, errors) in ((130, "interrupted\n"), (0, ""))


DEAF = """
def act():
    Path(os.environ["TMPDIR"], "here").touch()
    while True:
        try:
            time.sleep(1000)
        except BaseException:
            pass
from pathlib import Path
"""
"""A model whose code catches every exception, an interruption's too."""


def at_work(folder: Path) -> None:
    """Wait until the model of DEAF is called."""
    until = time.monotonic() + 120
    while not (folder / "tmp" / "here").exists():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.mark.parametrize(("signals", "seconds"), [((signal.SIGINT,), 2.5), ((signal.SIGINT,) * 2, 1.0)])
def test_ctrl_c_ends_a_command_whose_model_catches_it_and_a_second_one_does_at_once(
    signals: Sequence[int], seconds: float, tmp_path: Path, root: Path
) -> None:
    process = command(tmp_path, root, DEAF, start_new_session=True)
    at_work(tmp_path)
    begun = time.monotonic()
    for number in signals:
        os.killpg(process.pid, number)
        time.sleep(0.05)
    errors = process.communicate(timeout=60)[1].decode()
    assert time.monotonic() - begun < seconds  # under a second on an idle machine
    assert process.returncode == 130
    assert errors.splitlines()[-1] == "interrupted"
    assert "Traceback" not in errors
    assert "error" not in errors


STEP = """
model = get_model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)

def step(x):
    optimizer.zero_grad()
    loss = model(x).sum()
    loss.backward()
    optimizer.step()
    return loss
"""
FLEET = '[[target]]\nname = "a"\ntarget = "model.py"\n'


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks into /proc")
@pytest.mark.parametrize(
    "words",
    [("model.py",), ("fleet", "fleet.toml", "--out", "out"), ("rehearse", "model.py:step", "--steps", "2")],
    ids=["audit", "fleet", "rehearsal"],
)
def test_no_process_outlives_a_killed_parent(words: Sequence[str], tmp_path: Path, root: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL + DEAF + STEP)
    (tmp_path / "fleet.toml").write_text(FLEET)
    (tmp_path / "tmp").mkdir()
    environment = {**os.environ, "PYTHONPATH": str(root), "TMPDIR": str(tmp_path / "tmp"), "CI": "1"}
    silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", "auditor", *words], cwd=tmp_path, env=environment, **silent)
    at_work(tmp_path)
    process.kill()
    process.wait()
    until = time.monotonic() + 3  # under a second on an idle machine; they stayed for ever
    while mine(tmp_path / "tmp") and time.monotonic() < until:
        time.sleep(0.02)
    assert mine(tmp_path / "tmp") == []
