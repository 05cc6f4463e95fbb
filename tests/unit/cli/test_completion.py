"""The completion script, sourced by a real shell."""

import shutil
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def shtab(shell: str) -> str:
    """What docs/command-line.md says to run."""
    command = [sys.executable, "-m", "shtab", f"--shell={shell}", "--prog=auditor", "auditor.cli.parser"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    file = tmp_path_factory.mktemp("completion") / "auditor"
    file.write_text(shtab("bash"))
    return file


def offered(script, *words: str) -> list[str]:
    """What bash would offer for the last word."""
    line = f"""
        source {script}
        function=$(complete -p auditor | sed 's/.*-F \\([^ ]*\\).*/\\1/')
        COMP_WORDS=(auditor {" ".join(repr(word) for word in words)}); COMP_CWORD={len(words)}
        $function auditor "${{COMP_WORDS[$COMP_CWORD]}}" "${{COMP_WORDS[$((COMP_CWORD - 1))]}}"
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, cwd=script.parent)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_verbs_options_and_choices_are_offered(script):
    assert "explain" in offered(script, "ex")
    assert "--max-error" in offered(script, "--max")
    assert offered(script, "--fail-on", "wa") == ["warning"]
    assert "--html" in offered(script, "diff", "--h")
    (script.parent / "plan.json").touch()
    assert "plan.json" in offered(script, "apply", "pl")
