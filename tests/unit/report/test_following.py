"""The line that says what to do next: for every outcome one, and doing it does what it says."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import auditor
from auditor.errors import AuditorError
from auditor.records import Audit, NodeError, Verdict, Verification
from auditor.report.view import next_step, view
from tests.support.refusing import refused
from tests.support.subjects import seeded
from tests.unit.report.factory import make_audit

HERE = Path("audits/net")


def net() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)))


def audited(**how: Any) -> Audit:
    options = {"formats": "bf16", "strategies": "cast", "device": "cpu", **how}
    return auditor.audit(net(), torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), **options)


def test_a_budget_that_is_named_is_enough() -> None:
    tight = audited(max_error=1e-5)
    assert tight.recommended is None
    said = next_step(replace(tight, findings=()), HERE)
    budget = re.search(r"--max-error (\S+):", said)
    assert budget is not None, said
    found = audited(max_error=float(budget[1]))
    assert found.plans[found.recommended].measured_error <= float(budget[1])


def test_a_cause_that_is_named_is_the_first_and_can_be_explained(capsys: pytest.CaptureFixture[str]) -> None:
    audit = make_audit(60, recommended=None)
    said = next_step(audit, HERE)
    code = re.match(r"repair (\w+) at \S+, and audit again; `python -m auditor explain (\w+)`", said)
    assert code is not None, said
    assert code[1] == code[2] in {finding.rule for finding in audit.findings if finding.severity != "info"}


def test_random_weights_come_first_where_a_checkpoint_would_load() -> None:
    audit = make_audit(20)
    random = replace(audit, subject=replace(audit.subject, random_weights=True))
    assert "--weights FILE" in next_step(random, HERE)
    assert "--weights" not in next_step(replace(random, parameters=0), HERE)
    assert "--weights" not in next_step(audit, HERE)


def test_training_that_can_be_low_has_a_loop_in_the_report() -> None:
    data = [(torch.randn(8, 8), torch.randn(8, 4)) for _ in range(2)]
    found = auditor.audit(
        net(), data, mode="training", loss_fn=nn.MSELoss(), formats="bf16", strategies="autocast", device="cpu"
    )
    assert found.training.format == "bf16"
    assert next_step(found, HERE) == "train with the loop in audits/net/report.html, section Training."
    from auditor.report.reporters import REPORTERS

    assert "train_step(model, scaler" in REPORTERS["html"](found)


@pytest.mark.parametrize(
    ("change", "verdict"),
    [
        ({}, "verified"),
        ({"verification": None}, "not run"),
        ({"verification": Verification(0.02)}, "over budget"),
        ({"verification": Verification(0.002)}, "not verified"),
        ({"verification": Verification(None, False, "audited", "native", "KeyError: x")}, "failed"),
        ({"verification": Verification(None, False, "audited", "native")}, "non-finite"),
        ({"verification": Verification(0.001, True, "audited", "native", with_gradients=0.02)}, "over budget"),
    ],
)
def test_plan_verdicts(change, verdict):
    audit = make_audit()
    plans = {**audit.plans, "autocast_fp16": replace(audit.plans["autocast_fp16"], **change)}
    chosen = view(replace(audit, plans=plans)).chosen
    assert chosen.verdict == verdict


@pytest.mark.parametrize(("what", "name"), [("format", "e6m9"), ("strategy", "frugal")])
def test_an_audit_of_what_is_no_longer_registered_says_so(what: str, name: str, tmp_path: Path) -> None:
    audit = make_audit()
    if what == "format":
        gone = replace(audit, formats=(*audit.formats, name))
    else:
        first = next(iter(audit.plans.values()))
        gone = replace(audit, plans={**audit.plans, f"{name}_fp16": replace(first, strategy=name)})
    for shown in (gone._repr_html_, lambda: gone.save(tmp_path / "saved")):
        with refused(AuditorError, f"bad-{what}", match=f"the {what} '{name}' of this audit is no longer registered"):
            shown()
    assert not (tmp_path / "saved").exists()


def test_cautions_are_sentences() -> None:
    audit = make_audit(20)
    cautioned = replace(audit, warnings=("the model is stored in bfloat16: the reference is the same values in FP32",))
    assert "The model is stored in bfloat16: the reference is the same values in FP32." in view(cautioned).limits
    assert all(limit[0].isupper() and limit.endswith(".") for limit in view(cautioned).limits)


def test_what_was_not_tested_is_not_said_to_be_neither() -> None:
    audit = make_audit(20, formats=("bf16",))
    safe, untested = Verdict("safe", ""), Verdict("untested", "it computes in float64")
    for number, words in (
        (0, "BF16: none of the 20 operations is unsafe or sensitive."),
        (1, "BF16: none of the 19 operations tested is unsafe or sensitive; 1 was not tested."),
        (3, "BF16: none of the 17 operations tested is unsafe or sensitive; 3 were not tested."),
        (20, "BF16 was not tested on any operation."),
    ):
        verdicts = [untested] * number + [safe] * (20 - number)
        nodes = tuple(replace(n, verdicts={"bf16": v}) for n, v in zip(audit.nodes, verdicts, strict=True))
        assert view(replace(audit, nodes=nodes)).contrast == (words,)


def test_what_limits_a_format_names_missing_kernels_beside_precision() -> None:
    audit = make_audit(20, formats=("bf16",))
    first, second, *others = audit.nodes
    rounded = replace(first, verdicts={"bf16": Verdict("sensitive", "alone it takes half", "precision")})
    missing = replace(
        second,
        verdicts={"bf16": Verdict("unsafe", "no kernel")},
        errors={"bf16": NodeError(unsupported="stft has no bfloat16 kernel")},
        exposed={"bf16": ("cast",)},
    )
    safe = [replace(node, verdicts={"bf16": Verdict("safe", "")}) for node in others]
    mixed = replace(missing, errors={"bf16": NodeError(unsupported="bmm got float32 and bfloat16 together")})
    for nodes, limit in (
        ((mixed, *safe), "operations that raise"),
        ((missing, *safe), "missing kernels"),
        ((rounded, missing, *safe), "precision and missing kernels"),
    ):
        seen = view(replace(audit, nodes=nodes))
        assert seen.tallies[0].limit == limit
        assert any(
            f"1 unsafe (only with cast weights) and {len(nodes) - len(safe) - 1} sensitive" in said
            for said in seen.contrast
        )
