import pytest

from auditor.errors import AuditorError
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
