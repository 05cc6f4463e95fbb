"""Ranges of the inputs: names, dtypes, shapes, and values that FP16 cannot hold."""

from dataclasses import replace

import torch
from torch import nn

import auditor
from auditor.measure.inputs import input_ranges
from auditor.records import InputRange
from auditor.reporters import html, text


class Reads(nn.Module):
    """A model whose arguments have names, and a container among them."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, pixels, ids, *, masks=()):
        return self.linear(pixels / 1e5) + ids.sum() + sum(mask.sum() for mask in masks)


def batch(scale):
    pixels = torch.tensor([[-2.0, 0.5, 3.0, 1.0]]) * scale
    return (pixels, torch.tensor([7, 70_000])), {"masks": [torch.tensor([True, False])]}


def test_ranges_are_over_all_batches_and_have_the_names_of_arguments():
    pixels, ids, mask = input_ranges(Reads(), [batch(1.0), batch(30_000.0)])
    assert pixels == InputRange("pixels", "float32", (1, 4), -60_000.0, 90_000.0, beyond_fp16=1)
    assert ids == InputRange("ids", "int64", (2,), 7.0, 70_000.0)  # indices stay integers
    assert mask == InputRange("masks_0", "bool", (2,), 0.0, 1.0)


def test_values_that_are_not_finite_or_not_there():
    (one, empty), _ = (torch.tensor([float("nan"), float("inf"), 2.0]), torch.zeros(0, 4)), {}
    first, second = input_ranges(nn.Bilinear(1, 1, 1), [((one, empty), {})])
    assert (first.minimum, first.maximum, first.nonfinite, first.beyond_fp16) == (2.0, 2.0, 2, 0)
    assert (second.minimum, second.maximum, second.shape) == (None, None, (0, 4))


def test_complex_sparse_and_nested_tensors():
    complex_one = torch.tensor([3 - 4j])
    sparse = torch.tensor([[0.0, 5.0]]).to_sparse()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.full((3,), 4.0)], layout=torch.jagged)
    model = nn.Module()
    model.forward = lambda a, b, c: None
    found = input_ranges(model, [((complex_one, sparse, nested), {})])
    assert [(one.minimum, one.maximum) for one in found] == [(-4.0, 3.0), (0.0, 5.0), (1.0, 4.0)]


def test_the_report_has_the_ranges_and_warns_of_values_beyond_fp16():
    torch.manual_seed(0)
    args, kwargs = batch(30_000.0)
    audit = auditor.audit(Reads().eval(), args, kwargs=kwargs, formats="fp16", strategies="autocast", quick=True)
    page = html(audit)
    row = page.partition("<caption>Calibration inputs.")[2].partition("<code>pixels</code>")[2].partition("</tr>")[0]
    assert [cell in row for cell in ("float32", "1 x 4", "-60,000", "90,000")] == [True] * 4
    warning = "Some values of `pixels` are beyond the range of FP16 (65504), and become Inf where they are cast to it"
    without_plan = replace(audit, recommended=None)
    assert f"{warning}: scale the inputs in FP32" in " ".join(text(without_plan, width=300).split())
    planned = replace(audit, recommended="autocast_fp16")
    assert f"{warning}. The recommended plan was run" in " ".join(text(planned, width=300).split())
