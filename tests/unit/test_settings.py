"""What an audit can be asked, where it may be said, and on which device it then runs."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from auditor.asked import Command, command_of, validate
from auditor.errors import AuditorError
from auditor.numerics.devices import choose, follow, is_native, is_spread, libraries, name_of, row_of, type_of
from auditor.records.measure import Ignore
from auditor.settings import Option, Settings, options_of, split_names
from tests.support.refusing import refused


def options(**asked: Any) -> Settings:
    return validate(Settings, asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"formats": ("fp16", "int3")}, "mxfp4 or nvfp4, not int3"),
        ({"formats": ()}, "none"),
        ({"strategies": ("prune",)}, "strategies takes autocast, cast or graph, not prune"),
        (
            {"mode": "training", "formats": "fp8_e4m3"},
            "mode='training' supports fp16 or bf16, not fp8_e4m3: change `formats`",
        ),
        ({"max_error": 0.0}, "positive"),
        ({"max_error": math.nan}, "positive"),
        ({"gpu": "abacus"}, "gpu takes T4, A100"),
        ({"max_drop": 0.1}, "`max_drop` and `better` need `evaluate`"),
        ({"select": ["norms"]}, "select takes codes such as NRM001, or the letters of a family, not 'norms'"),
        ({"max_eror": 1}, "there is no argument 'max_eror'"),
    ],
    ids=str,
)
def test_what_cannot_be_asked_is_said_in_one_line(asked: dict[str, Any], words: str) -> None:
    with refused(AuditorError, "bad-option", match=words):
        options(**asked)


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("bf16", ("bf16",)),
        ("fp16, bf16,fp16", ("fp16", "bf16")),
        (("fp16", "bf16"), ("fp16", "bf16")),
        ([], ()),
        (iter(["cast"]), ("cast",)),
    ],
)
def test_names_are_given_one_by_one_or_together(given: Any, names: tuple[str, ...]) -> None:
    assert split_names(given) == names


def test_quick_takes_the_first_of_what_was_asked_for() -> None:
    found = options(formats=("bf16", "fp16"), strategies=("cast", "autocast"), quick=True)
    assert (found.formats, found.strategies) == (("bf16",), ("cast",))
    with pytest.raises(AuditorError, match="int3"):  # what is left aside is checked all the same
        options(formats=("bf16", "int3"), quick=True)


def test_schemes_are_set_apart_from_the_formats() -> None:
    found = options(formats="fp16,nvfp4,fp8")
    assert (found.formats, found.schemes) == (("fp16",), ("nvfp4", "fp8"))
    found = options(formats="int8")
    assert (found.formats, found.schemes) == (("bf16",), ("int8",))  # the other layers run in BF16
    assert options().schemes == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [("4GB", 4 * 10**9), ("512MiB", 2**29), ("1.5g", 1_500_000_000), ("650 mb", 650_000_000), (10**9, 10**9)],
)
def test_memory_is_a_size_as_people_write_it(text: object, size: int) -> None:
    assert options(memory=text).memory == size


@pytest.mark.parametrize("text", ["", "0", "-1GB", "4 apples", "GB", "1e9"])
def test_what_is_no_size_is_one_line(text: object) -> None:
    with pytest.raises(AuditorError, match="memory takes a size such as 4GB or 512MiB, not"):
        options(memory=text)


def test_text_is_read_as_the_command_line_and_toml_have_it() -> None:
    found = validate(
        Command, {"max_error": "0.5", "seed": "7", "select": "NRM,SFT001", "mode": "training", "out": "a b"}
    )
    assert (found.max_error, found.seed, found.select, found.use) == (0.5, 7, ("NRM", "SFT001"), "training")
    assert found.out == Path("a b")


def test_every_option_says_what_it_takes() -> None:
    for name, option in options_of(Command).items():
        free = Command.model_fields[name].annotation in (str | None, Any)
        assert option.help
        assert option.takes != Option().takes or option.choices or free, name


# `[tool.auditor]`: where it is looked for and what it may say.


@pytest.fixture
def selection(monkeypatch):
    def selected(folder):
        monkeypatch.chdir(folder)
        return command_of({}, Command)

    return selected


def test_nearest_table_counts(tmp_path, selection):
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\nmax-error = 0.5\nformats = ["bf16"]\n')
    (tmp_path / "a" / "pyproject.toml").write_text("tool = 3\n[project]\nname = 'x'\n")
    assert (selection(inner).max_error, selection(inner).formats, selection(inner).out) == (0.5, ("bf16",), None)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.auditor]\nout = 'reports'\n")
    assert (selection(inner).max_error, selection(inner).out) == (0.01, tmp_path / "a" / "reports")


def test_criteria_in_a_list_are_read_one_by_one(tmp_path, selection):
    written = 'criterion = ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]'
    (tmp_path / "pyproject.toml").write_text(f"[tool.auditor]\n{written}\n")
    given = selection(tmp_path).criteria
    assert [str(one) for one in given] == ["logits: topk(5, dim=1) >= 0.9", "boxes: max_abs <= 0.5"]


ENTRY = '[[tool.auditor.per-module-ignores]]\nmodule = "a"\ncode = "NRM001"\nreason = "b"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[tool.auditor]\nmax-eror = 1\n", "did you mean max-error?"),
        ("[tool.auditor]\nquick = 'yes'\n", "[tool.auditor]: quick takes True or False, not 'yes'"),
        ("[tool.auditor]\nmax-error = -1\n", "max-error takes a positive number, not -1"),
        ("[tool.auditor]\nper-module-ignore = []\n", "did you mean per-module-ignores?"),
        ("[tool.auditor\n", "pyproject.toml"),
        ("[tool]\nauditor = 3\n", "[tool.auditor] must be a table"),
        ("[tool.auditor]\nweights = 5\n", "weights takes a string, not 5"),
        (
            '[tool.auditor]\nignore = ["norms"]\n',
            "ignore takes codes such as NRM001, or the letters of a family, not 'norms'",
        ),
        ("[tool.auditor]\nper-module-ignores = 3\n", "takes a list of tables: module, code and reason"),
        (ENTRY.replace('reason = "b"\n', ""), "reason"),
        (ENTRY.replace('"b"', '" "'), "reason"),
        (ENTRY.replace('"NRM001"', '"N1"'), "not 'N1'"),
        (ENTRY + "since = 3\n", "not 3"),
    ],
)
def test_mistakes_are_named(tmp_path, text, words, selection):
    (tmp_path / "pyproject.toml").write_text(text)
    with refused(AuditorError, "bad-config", words, match=r"pyproject\.toml"):
        selection(tmp_path)


CHOICES = """[tool.auditor]
max-error = 0.5
select = ["NRM", "SFT001"]
ignore = ["NRM003"]

[[tool.auditor.per-module-ignores]]
module = "blocks.*.norm"
code = "NRM001"
reason = "its input is normalized before"
"""


def test_a_selection_names_codes_modules_reasons_and_lines(tmp_path, selection):
    (tmp_path / "pyproject.toml").write_text(CHOICES)
    (tmp_path / "deep").mkdir()
    found = selection(tmp_path / "deep")
    assert found.select == ("NRM", "SFT001")
    assert found.ignores == (
        Ignore("NRM003", source="pyproject.toml:4"),
        Ignore("NRM001", "blocks.*.norm", "its input is normalized before", "pyproject.toml:7"),
    )
    assert command_of({}, Command).max_error == 0.5
    with refused(AuditorError, "bad-option", match="^--max-error takes a positive number"):
        command_of({"max_error": "x"}, Command)  # the file sets it too, but not this value
    assert command_of({"ignore": "SFT"}, Command).ignores[0] == Ignore("SFT")


# Which device an audit runs on, for what was asked for; refused in one line where there is none.


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("asked", "device"),
    [("auto", "cuda:1"), ("cuda", "cuda:1"), ("cuda:0", "cuda:0"), (torch.device("cuda:0"), "cuda:0"), ("cpu", "cpu")],
)
def test_devices_have_a_number(asked: object, device: str) -> None:
    assert choose(asked) == device
    assert is_native(device) == (type_of(device) == "cuda")


@pytest.mark.usefixtures("two")
def test_a_gpu_that_is_not_there_is_told_from_those_that_are() -> None:
    with refused(AuditorError, "no-cuda", match="sees cuda:0, cuda:1 only"):
        choose("cuda:2")


@pytest.mark.parametrize("asked", ["mps", "xpu:0", "gpu", "cuda:", "cuda:x", "cpu:1", 0])
def test_what_is_no_device_of_an_audit(asked: object) -> None:
    with pytest.raises(AuditorError, match="device takes auto, cpu, cuda or cuda:N"):
        validate(Settings, {"device": asked})


def test_without_a_gpu_it_is_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose("auto") == "cpu" == name_of("cpu")
    with pytest.raises(AuditorError, match="sees no CUDA device"):
        choose("cuda:1")


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize(
    ("asked", "found", "device"),
    [
        ("auto", {"cpu"}, "cuda:1"),
        ("auto", {"cuda:0", "cpu"}, "cuda:0"),
        ("auto", {"cuda:1", "cuda:0"}, "cuda:0,cuda:1"),
        ("cuda", {"cuda:1", "cuda:0"}, "cuda:0,cuda:1"),
        ("cuda:0", {"cuda:1", "cuda:0"}, "cuda:0"),
        ("cpu", {"cuda:1", "cuda:0"}, "cpu"),
    ],
)
def test_an_audit_follows_its_model_unless_told_where_to_go(asked: str, found: set[str], device: str) -> None:
    chosen_one = follow(asked, found)
    assert chosen_one == device
    assert is_spread(chosen_one) == ("," in device) and is_native(chosen_one) == (device != "cpu")


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", None),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("cpu", None),
    ],
)
def test_the_figures_of_a_gpu_go_by_its_name(name: str, row: str | None) -> None:
    assert row_of(name) == row


def test_libraries_are_those_of_the_device() -> None:
    assert libraries("cpu")["onednn"].count(".") >= 1
    assert "onednn" not in libraries("cuda:0")
