"""The completion script, sourced by a real shell."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from auditor import cli

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    from contextlib import redirect_stdout
    from io import StringIO

    text = StringIO()
    with redirect_stdout(text):
        assert cli.main(["completion", "bash"]) == 0
    file = tmp_path_factory.mktemp("completion") / "auditor"
    file.write_text(text.getvalue())
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


def test_paths_are_offered_for_a_plan(script):
    (script.parent / "plan.json").touch()
    assert "plan.json" in offered(script, "apply", "pl")


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script_too(shell, capsys):
    assert cli.main(["completion", shell]) == 0
    assert "explain" in capsys.readouterr().out


def test_an_unknown_shell_is_one_line(capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["completion", "powershell"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: ")
