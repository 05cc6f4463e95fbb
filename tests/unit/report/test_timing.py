"""FP32 as it is set, and times, in words: numbers with their unit and spread, and what they say nothing of."""

import math
from dataclasses import replace

import pytest

from auditor.records import TimeAndMemory, Times, Timing, Today
from auditor.report import words
from auditor.report.plans import times
from auditor.report.reporters import html as render
from tests.unit.report.factory import make_audit


@pytest.mark.parametrize(
    ("measured", "words"),
    [
        (Times(0.0012, 0.0011, 0.0013, 20, 2.0, 1.8, 2.2), "1.2 ms (1.1 to 1.3), 2.00x"),
        (Times(2.5, 2.25, 3.0, 7), "2.5 s (2.25 to 3)"),
        (Times(5e-4, 4e-4, 1.432e-3, 7), "500 µs (400 to 1432)"),
        (
            Times(0.00002, 0.00001, 0.00004, 7, 1.1, 0.9, 1.3),
            "20 µs (10 to 40), 1.10x, not measurably different from FP32",
        ),
    ],
)
def test_times_have_a_unit_and_a_spread(measured: Times, words: str) -> None:
    timing = Timing("cpu", 8, 2, TimeAndMemory(eager=measured), TimeAndMemory(eager=measured))
    assert times(replace(make_audit(), timing=timing))[1] == f"FP32: {words}"


def test_fp32_that_failed_is_no_number() -> None:
    for today, said in ((Today((), None, "RuntimeError: no"), "fails to run"), (Today((), None), "non-finite")):
        assert f">{said}</td>" in render(replace(make_audit(recommended="autocast_bf16"), fp32_today=today))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "not measured"),
        (0.0, "0"),
        (math.nan, "NaN"),
        (math.inf, "non-finite"),
        (0.00083, "8.3e-4"),
        (0.000994, "9.9e-4"),
        (0.000996, "0.0010"),
        (0.0010, "0.0010"),
        (0.31, "0.31"),
        (12.4, "12"),
        (123.4, "123"),
        (99_999.0, "99999"),
        (1e5, "1.0e5"),
        (9.9e28, "9.9e28"),
    ],
)
def test_ratio(value, text):
    assert words.ratio(value) == text


def test_percent_says_all_only_when_it_is_all():
    assert [words.percent(x) for x in (1.0, 0.9999, 0.5, 0.0001, 0.0)] == ["100%", ">99%", "50%", "<1%", "0%"]


def test_magnitude_and_compact():
    assert [words.magnitude(x) for x in (0.0, 0.5, 65504.0, 3.39e38)] == ["0", "0.5", "65,504", "3.39e38"]
    assert [words.compact(n) for n in (7, 1500, 124_439_808, 3 * 10**12)] == ["7", "1.5k", "124M", "3T"]
    assert [words.in_bytes(n) for n in (7, 512.0, 15 * 10**6, 3_040_000_000)] == ["7B", "512B", "15MB", "3.04GB"]


def test_printable_disarms_control_and_bidirectional_characters():
    assert words.printable("a\x1b[31m\n\u202eb é") == "a\\x1b[31m\\n\\u202eb é"


@pytest.mark.parametrize(
    ("paths", "said"),
    [
        (["layers.3.mlp"], "layers.3.mlp"),
        (["layers.7.mlp", "layers.3.mlp"], "layers.{3,7}.mlp"),
        ([f"layers.{i}.mlp" for i in range(8)], "layers.{0-7}.mlp"),
        (["b.0", "b.1", "b.2", "b.5", "b.9", "b.10"], "b.{0-2,5,9,10}"),
        (["a.0.b.0", "a.0.b.1", "a.1.b.0"], "a.*.b.* x3"),
        (["a.0.b.0", "a.0.b.2", "a.1.b.0", "a.1.b.2"], "a.{0,1}.b.{0,2}"),
        ([f"b.{i}" for i in range(0, 80, 2)], "b.* x40"),
        (
            ["self_attention_output_projection.0", "self_attention_output_projection.1"],
            "self_attention_output_projection.{0,1}",
        ),
        (["head", "head"], "head x2"),
        ([""], "the model's forward"),
    ],
)
def test_modules_of_one_shape_are_one(paths, said):
    assert words.fold_paths(paths) == said


def test_what_differs_in_block_numbers_alone_is_together():
    found = words.fold(["a.0.x", "b", "a.1.x", "a.0.y"], str)
    assert found == [["a.0.x", "a.1.x"], ["b"], ["a.0.y"]]
    assert words.list_paths(["a.0", "a.1", "b", "c", "d"], 2) == "a.{0,1}, b and 2 more modules"
    assert words.list_paths(["a.0", "a.1", "b", "c"], 2) == "a.{0,1}, b, c"


def test_a_text_of_a_rule_is_paragraphs_and_code():
    text = "Say\nwhat.\n\n    x = 1\n\n    y = 2\n\nAnd `why`:"
    assert words.parts(text) == [("Say what.", False), ("x = 1\n\ny = 2", True), ("And `why`:", False)]
    assert words.summary(text) == "Say what. And `why`."
    assert words.remedy("Do this. Or that.") == "Do this."
    assert [words.sentence(said) for said in ("", "a  thing", "Why?")] == ["", "A thing.", "Why?"]
