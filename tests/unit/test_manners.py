"""The manners of the Python interface: formats as people write them, names in `dir`, plans that print, a short help."""

import inspect
import pydoc

import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import reporters
from auditor.emulation.emulate import _emulating
from auditor.errors import AuditorError
from auditor.records import ScopeChoice
from auditor.results import Plan
from auditor.settings import Settings
from tests.support.subjects import normal


@pytest.mark.parametrize(
    "given",
    [
        torch.float16,
        "float16",
        "torch.float16",
        "half",
        "FP16",
        (torch.float16,),
        ["float16", torch.half, "fp16"],
        "fp16,float16",
    ],
)
def test_formats_are_torchs_dtypes_and_their_names_too(given: object) -> None:
    assert Settings(formats=given).formats == ("fp16",)


def test_formats_of_several_kinds_keep_their_order() -> None:
    assert Settings(formats=[torch.float8_e4m3fn, "bfloat16"]).formats == ("fp8_e4m3", "bf16")


@pytest.mark.parametrize("given", [torch.float32, "float32", "int9", 3])
def test_formats_that_nobody_can_audit_are_named_with_those_that_are(given: object) -> None:
    with pytest.raises(AuditorError, match="formats takes fp16, bf16"):
        auditor.audit(nn.Linear(2, 2), torch.ones(1, 2), formats=(given,))


def test_dir_has_every_public_name() -> None:
    assert {*auditor.__all__} <= {*dir(auditor)}


def test_help_begins_with_what_the_function_does_and_editors_still_see_every_option() -> None:
    first, *rest = pydoc.plain(pydoc.render_doc(auditor.audit)).splitlines()[2:]
    assert first == "audit(model, example_inputs, **options) -> Audit"
    assert "Audit a model on example inputs" in rest[0]
    assert {"formats", "max_error", "seed"} <= {*inspect.signature(auditor.audit).parameters}


@pytest.fixture(scope="module")
def audited() -> auditor.Audit:
    return auditor.audit(nn.Linear(4, 4), normal(3, 4), formats=torch.bfloat16, strategies="cast", device="cpu")


def test_an_audit_has_its_recommended_plan(audited: auditor.Audit) -> None:
    assert audited.plan is audited.plans[audited.recommended]
    assert auditor.audit(nn.Linear(4, 4), normal(3, 4), formats="bf16", max_error=1e-9, device="cpu").plan is None


def test_a_plan_prints_its_evidence_and_a_notebook_shows_it(audited: auditor.Audit) -> None:
    shown = repr(audited.plan)
    assert shown.startswith("Plan cast_bf16: BF16 with cast weights, verified\nError ")
    assert "100% of the FLOPs in BF16" in shown
    assert "auditor.apply(model, plan)" in shown
    page = audited.plan._repr_html_()
    assert page.startswith("<div>")
    assert "Plan cast_bf16" in page
    assert len(shown.splitlines()) < 20


def test_a_plan_that_was_never_run_prints_too() -> None:
    assert repr(Plan("cast_bf16", "cast", "bf16", {"": ScopeChoice("bf16")})).startswith("Plan cast_bf16: ")


class Refusing(nn.Linear):
    """What a CPU's kernel does that a GPU's does not: it refuses half precision, unless a GPU is emulated."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float16 and not _emulating:
            raise RuntimeError("could not create a primitive descriptor")
        return super().forward(x)


def test_a_plan_that_the_audits_cpu_cannot_run_says_that_it_is_for_a_gpu(tmp_path) -> None:
    model = nn.Sequential(Refusing(4, 4))
    audit = auditor.audit(model, normal(3, 4), formats="fp16", strategies="cast", device="cpu")
    assert "could not create a primitive descriptor" in audit.plan.gpu_only
    assert "for a GPU" in repr(audit.plan)
    assert 'auditor.emulate("cuda")' in reporters.text(audit).replace("\n", " ")
    assert "gpu_only" in audit.texts(tmp_path)["patched_model.py"]
