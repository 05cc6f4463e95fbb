"""Where inputs come from, and how each form is read."""

from collections import UserDict

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from auditor.errors import LoadError
from auditor.loading import cautions, inputs, load
from auditor.loading.inputs import as_batches
from auditor.loading.subject import from_object
from tests.support.refusing import refused

NET = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(3, 4)
    def forward(self, x, scale=None):
        return self.head(x) if scale is None else self.head(x) * scale
model = Net()
"""
A, B = torch.ones(2, 3), torch.zeros(2, 3)


def shapes(batches):
    return [([tuple(a.shape) for a in args], sorted(kwargs)) for args, kwargs in batches]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (A, [([(2, 3)], [])]),
        ((A, B), [([(2, 3), (2, 3)], [])]),
        ([A, B], [([(2, 3), (2, 3)], [])]),
        ({"x": A}, [([], ["x"])]),
        (UserDict(x=A), [([], ["x"])]),
        (((A,), {"scale": B}), [([(2, 3)], ["scale"])]),
        ([(A,), (B,)], [([(2, 3)], []), ([(2, 3)], [])]),
        ([{"x": A}, {"x": B}], [([], ["x"]), ([], ["x"])]),
        (iter([A, B]), [([(2, 3)], []), ([(2, 3)], [])]),
        (np.ones((2, 3), dtype=np.float32), [([(2, 3)], [])]),
    ],
)
def test_forms(value, expected):
    assert shapes(as_batches(value, "inputs")) == expected


@pytest.mark.parametrize("value", [None, 3, "text", [], iter([]), iter([3])])
def test_what_is_no_input(value):
    if value == []:
        assert as_batches(value, "inputs") == (((), {}),)  # a call without arguments
        return
    with refused(LoadError, "bad-inputs", match="return a tensor"):
        as_batches(value, "get_inputs() in model.py")


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        ("nn.Linear(3, 4)", (2, 3)),
        ("nn.Conv1d(3, 4, 3)", (2, 3, 128)),
        ("nn.Conv2d(3, 4, 3)", (2, 3, 32, 32)),
        ("nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(2 * 26 * 26, 5))", (2, 1, 28, 28)),
        ("nn.Embedding(10, 4)", (2, 16)),
        ("nn.LSTM(3, 4)", (2, 3)),
        ("nn.LayerNorm([5, 3])", (2, 5, 3)),
        ("nn.Sequential(nn.ReLU(), nn.Linear(3, 4))", (2, 3)),
    ],
)
def test_made_up_inputs_follow_the_first_weighted_layer(write, layer, shape):
    subject = load(write(f"model = {layer}\n"))
    (tensor,) = subject.batches[0][0]
    assert tensor.shape == shape
    assert subject.synthetic_inputs
    assert any("were generated" in warning for warning in cautions(subject))


def test_a_warning_names_what_looks_like_inputs_but_is_not_read(write):
    code = NET + "prompts = [1]\ndef get_example_inputs(): pass\ndef get_eval_inputs(): return torch.ones(2, 3)\n"
    said = [
        f"model.py defines {name}, which is not read: rename it to get_inputs"
        for name in ("prompts", "get_example_inputs")
    ]
    assert list(load(write(code)).warnings) == said
    assert load(write(code), inputs="x:float32[2,3]").warnings == ()
    assert load(write(code + "example_inputs = torch.ones(2, 3)\n")).warnings == ()


def test_no_inputs_to_be_found(write):
    with refused(LoadError, "no-inputs", match=r"forward\(x, y\)"):
        load(write(NET.replace("scale=None", "y")))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x:float32[2,3]", [([], ["x"])]),
        ("float32[2,3]", [([(2, 3)], [])]),
        ("x:float32[2,3] scale:float32[1]", [([], ["scale", "x"])]),
        ("x:float32[2,3] scale:float32[]", [([], ["scale", "x"])]),
    ],
)
def test_shapes_on_the_command_line(write, text, expected):
    subject = load(write(NET), inputs=text)
    assert shapes(subject.batches) == expected
    assert subject.synthetic_inputs


def test_integers_stay_below_the_limit_or_the_vocabulary(write):
    target = write("model = nn.Embedding(7, 4)\n")
    limited = load(target, inputs="int64[400]<3").batches[0][0][0]
    assert set(limited.tolist()) == {0, 1, 2}
    assert set(load(target, inputs="int64[400]").batches[0][0][0].tolist()) == set(range(7))


def test_files_of_tensors(write, tmp_path):
    target = write(NET)
    torch.save((A, B), tmp_path / "pair.pt")
    save_file({"x": A, "scale": torch.ones(1)}, tmp_path / "named.safetensors")
    save_file({"whatever": A}, tmp_path / "single.safetensors")
    np.savez(tmp_path / "ordered.npz", np.ones((2, 3)), np.ones(1))
    expected = {
        "named.safetensors": [([], ["scale", "x"])],
        "single.safetensors": [([(2, 3)], [])],
        "ordered.npz": [([(2, 3), (1,)], [])],
    }
    for name, forms in expected.items():
        subject = load(target, inputs=str(tmp_path / name))
        assert shapes(subject.batches) == forms, name
        assert not subject.synthetic_inputs
    with pytest.raises(LoadError, match=r"shape|size"):
        load(target, inputs=str(tmp_path / "pair.pt"))  # forward multiplies [2, 4] by [2, 3]


def test_function_in_another_file(write, tmp_path):
    write("from helper_beside import rows\ndef five(): return torch.ones(rows(), 3)\n", "other/data.py")
    write("def rows(): return 5\n", "other/helper_beside.py")
    subject = load(write(NET), inputs=f"{tmp_path}/other/data.py:five")
    assert shapes(subject.batches) == [([(5, 3)], [])]


@pytest.mark.parametrize(
    ("text", "slug", "words"),
    [
        ("absent.pt", "missing-inputs", "absent.pt does not exist"),
        ("absent.py:f", "missing-target", "absent.py does not exist"),
        ("y:float32[2,3] z:float32[1]", "bad-inputs", "forward takes x, scale"),
        ("x:float32[2,3] float32[1]", "bad-inputs", "name all or none"),
        ("x:floaty[2,3]", "bad-inputs", "floaty"),
        ("nonsense", "bad-inputs", "float32[1,3,224,224]"),
        ("x:float32[2,5]", "forward-raises", "(2x5 and 3x4)"),
    ],
)
def test_bad_inputs_argument(write, text, slug, words):
    with refused(LoadError, slug, words):
        load(write(NET), inputs=text)


SOURCES = (
    ("get_inputs", "def get_inputs(): return torch.ones(2, 3)\n"),
    ("example_inputs", "example_inputs = torch.ones(2, 3)\n"),
    ("example_input_array", "model.example_input_array = torch.ones(2, 3)\n"),
    ("dummy_inputs", "model.dummy_inputs = {'input': torch.ones(2, 3)}\n"),
    ("generated for the root", ""),
)


@pytest.mark.parametrize("step", range(len(SOURCES)), ids=[name for name, _ in SOURCES])
def test_of_two_sources_of_inputs_the_earlier_wins(write, step):
    """Each source stands with all that come after it; `--inputs` goes before them all."""
    target = write("model = nn.Linear(3, 4)\n" + "".join(text for _, text in reversed(SOURCES[step:])))
    subject = load(target)
    assert SOURCES[step][0] in subject.inputs_source
    assert subject.synthetic_inputs is (step > 2)
    assert load(target, inputs="float32[5,3]").inputs_source == "--inputs float32[5,3]"


class _Takes(nn.Module):
    """Forward takes one tensor."""

    def forward(self, x):
        return x.sum()


def test_labels_of_a_loader_are_left_out_and_said():
    pairs = (((torch.ones(4, 3), torch.arange(4)), {}), ((torch.ones(2, 3), torch.arange(2)), {}))
    batches, notes = inputs.without_labels(_Takes(), pairs)
    assert [len(args) for args, _ in batches] == [1, 1]
    assert "taken for labels" in notes[0]


PAIRS = """
from torch.utils.data import DataLoader, TensorDataset
def get_inputs(): return DataLoader(TensorDataset(torch.ones(4, 3), torch.arange(4)), batch_size=2)
def get_eval_inputs(): return DataLoader(TensorDataset(torch.zeros(2, 3), torch.arange(2)), batch_size=2)
"""


def test_held_out_batches_lose_their_labels_too_and_the_note_comes_once(write):
    subject = load(
        write(NET.replace(", scale=None", "").replace(" if scale is None else self.head(x) * scale", "") + PAIRS)
    )
    assert [len(args) for args, _ in (*subject.batches, *subject.held_out)] == [1, 1, 1]
    assert sum("taken for labels" in note for note in cautions(subject)) == 1


def test_labels_that_forward_takes_for_something_else_are_asked_about(write):
    with refused(LoadError, "forward-raises", match="If the last tensor holds labels, give the other inputs only"):
        load(write(NET + PAIRS))


def test_a_live_model_takes_a_loader_of_pairs():
    subject = from_object(_Takes(), [(torch.ones(4, 3), torch.arange(4))])
    assert [len(args) for args, _ in subject.batches] == [1]
    assert "taken for labels" in subject.warnings[0]


ALIKE = [torch.ones(4, 3), torch.zeros(4, 3)]


def test_a_list_of_tensors_that_are_alike_holds_batches_if_forward_takes_one():
    subject = from_object(_Takes(), ALIKE)
    assert [len(args) for args, _ in subject.batches] == [1, 1]
    assert subject.warnings == ("The 2 tensors of the list are 2 batches, since forward takes only one argument.",)


@pytest.mark.parametrize("given", [ALIKE[0], ALIKE, (ALIKE[0],), [(ALIKE[0],)]])
def test_keyword_arguments_are_plain_dicts_which_alone_can_be_exported(given):
    assert {type(named) for _, named in from_object(_Takes(), given).batches} == {dict}


@pytest.mark.parametrize("given", [tuple(ALIKE), [ALIKE[0], torch.arange(4)], [ALIKE[0], torch.ones(4, 1)]])
def test_a_tuple_or_a_list_of_different_tensors_is_one_batch_with_labels(given):
    subject = from_object(_Takes(), given)
    assert [len(args) for args, _ in subject.batches] == [1]
    assert "taken for labels" in subject.warnings[0]


def test_alike_lists_of_a_file_are_batches_of_both_kinds(write):
    net = NET.replace(", scale=None", "").replace(" if scale is None else self.head(x) * scale", "")
    lists = """
def get_inputs(): return [torch.ones(2, 3), torch.zeros(2, 3), torch.ones(1, 3)]
def get_eval_inputs(): return [torch.zeros(2, 3), torch.ones(2, 3)]
"""
    subject = load(write(net + lists))
    assert [len(args) for args, _ in subject.batches] == [1, 1, 1]
    assert [len(args) for args, _ in subject.held_out] == [1, 1]


def test_what_is_no_label_stays():
    other_rows = (((torch.ones(4, 3), torch.arange(3)), {}),)
    assert inputs.without_labels(_Takes(), other_rows) == (other_rows, ())
    single = (((torch.ones(4, 3),), {}),)
    assert inputs.without_labels(_Takes(), single) == (single, ())
