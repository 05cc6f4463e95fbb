"""What is taken from a cache is what would be found again: another model, other inputs, settings or libraries miss."""

from __future__ import annotations

import html
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import auditor
from auditor import cli
from auditor.document.contents import steady
from auditor.errors import AuditorError
from auditor.records import Audit
from tests.unit.cache import models
from tests.unit.cache.models import Small, inputs, known_by, shifted

NONE = "nothing in the cache is of this model with these inputs, formats and settings"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str | None]:
    return known_by(Small(), inputs(), tmp_path_factory.mktemp("cache"))


def test_the_same_model_built_again_is_known(usual: tuple[str, str | None], tmp_path: Path) -> None:
    assert known_by(Small(), inputs(), tmp_path) == usual


def by_one_ulp(x: Tensor) -> None:
    with torch.no_grad():
        x.view(-1)[0] = torch.nextafter(x.view(-1)[0], torch.tensor(torch.inf))


def weight(model: nn.Module) -> None:
    by_one_ulp(model.get_parameter("last.weight"))


def buffer(model: nn.Module) -> None:
    by_one_ulp(model.get_buffer("scale"))


def sign_of_a_zero(model: nn.Module) -> None:
    with torch.no_grad():
        model.get_parameter("last.bias").zero_().neg_()


def tied(model: nn.Module) -> None:
    model.drop = nn.Sequential(model.drop, nn.Linear(16, 16, bias=False))


def strides(model: nn.Module) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach().t().contiguous().t())


@pytest.mark.parametrize("change", [weight, buffer, sign_of_a_zero, tied, strides])
def test_another_parameter_or_buffer_misses(
    change: Callable[[nn.Module], None], usual: tuple[str, str | None], tmp_path: Path
) -> None:
    model = Small()
    if change is sign_of_a_zero:
        with torch.no_grad():
            model.last.bias.zero_()
        usual = known_by(model, inputs(), tmp_path)
    change(model)
    assert known_by(model, inputs(), tmp_path)[0] != usual[0]


def test_one_element_of_the_inputs_makes_another_batch(usual: tuple[str, str | None], tmp_path: Path) -> None:
    x = inputs()
    by_one_ulp(x)
    base, batch = known_by(Small(), x, tmp_path)
    assert base == usual[0]
    assert batch != usual[1]


@pytest.mark.parametrize("model", [lambda: Small(factor=3.0000001), lambda: Small(shift=shifted(2.0))])
def test_a_number_that_python_holds_misses(
    model: Callable[[], nn.Module], usual: tuple[str, str | None], tmp_path: Path
) -> None:
    assert known_by(model(), inputs(), tmp_path)[0] != usual[0]


BY_NAME = """
import torch
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient): return gradient * {}
"""


class ByName(nn.Linear):
    """Comes to a function through the name of its module."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = importlib.import_module("cache_by_name").Doubled.apply(super().forward(x))
        return result


def test_another_derivative_in_a_module_that_only_a_string_names_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    model, found = ByName(4, 4), []
    for factor in (2, 2, 3):
        (tmp_path / "cache_by_name.py").write_text(BY_NAME.format(factor))
        monkeypatch.delitem(sys.modules, "cache_by_name", raising=False)
        importlib.invalidate_caches()
        found.append(known_by(model, torch.ones(2, 4), tmp_path / "cache"))
    assert found[0] == found[1] != found[2]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(_: Any, gradient: Tensor) -> Tensor:
        result: Tensor = importlib.import_module("cache_late").back(gradient)
        return result


class Late(nn.Linear):
    """Comes to a file through its derivative alone."""

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Twice.apply(super().forward(x))
        return result


STEP = {"mode": "training", "loss_fn": nn.functional.mse_loss}


def test_another_file_that_a_derivative_alone_imports_misses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    model, said = Late(4, 4), []
    for factor in (2, 2, 3, 3):
        (tmp_path / "cache_late.py").write_text(f"def back(gradient): return gradient * {factor}\n")
        monkeypatch.delitem(sys.modules, "cache_late", raising=False)
        importlib.invalidate_caches()
        given = torch.ones(2, 4), torch.zeros(2, 4)
        audit = auditor.audit(model, given, formats="fp16", progress=False, cache=tmp_path / "cache", **STEP)
        said.append(audit.environment.reused)
    assert said[0] == said[2] == NONE
    assert said[1] == said[3] != NONE


def test_what_a_closure_holds_is_told_apart(tmp_path: Path) -> None:
    found = [known_by(Small(shift=shifted(by)), inputs(), tmp_path)[0] for by in (2.0, 2.0, 2.5)]
    assert found[0] == found[1] != found[2]


def test_a_global_misses(usual: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "SLOPE", 2.5)
    assert known_by(Small(), inputs(), tmp_path)[0] != usual[0]


def test_a_function_that_was_replaced_misses(
    usual: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = nn.functional.linear
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight, bias=None: exact(x * 1.0, weight, bias))
    assert known_by(Small(), inputs(), tmp_path)[0] != usual[0]


def test_a_method_of_the_instance_misses(usual: tuple[str, str | None], tmp_path: Path) -> None:
    model = Small()
    model.last.forward = lambda x: nn.functional.linear(x, model.last.weight)  # type: ignore[method-assign]
    assert known_by(model, inputs(), tmp_path)[0] != usual[0]


@contextmanager
def setting(read: Callable[[], Any], put: Callable[[Any], Any], value: Any) -> Iterator[None]:
    before = read()
    put(value)
    try:
        yield
    finally:
        put(before)


SETTINGS = {
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "threads": (torch.get_num_threads, torch.set_num_threads, torch.get_num_threads() + 1),
    "subnormal": (lambda: False, torch.set_flush_denormal, True),
    "mkldnn": (lambda: True, lambda on: torch.backends.mkldnn.set_flags(on), False),
    "attention": (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, False),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_misses(name: str, usual: tuple[str, str | None], tmp_path: Path) -> None:
    with setting(*SETTINGS[name]):
        assert known_by(Small(), inputs(), tmp_path)[0] != usual[0]
    assert known_by(Small(), inputs(), tmp_path) == usual


def test_flags_that_an_audit_sets_itself_do_not_matter(tmp_path: Path) -> None:
    first = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
    with setting(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "high"):
        second = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
    assert "what they do to the outputs" in str(second.environment.reused)
    assert texts(first) == texts(second)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MKL_CBWR", "COMPATIBLE"),
        ("GLIBC_TUNABLES", "glibc.cpu.hwcaps=-FMA"),
        ("LD_PRELOAD", "libm.so"),
        ("LD_LIBRARY_PATH", "/x"),
    ],
)
def test_a_variable_that_libraries_read_misses(
    name: str, value: str, usual: tuple[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    assert known_by(Small(), inputs(), tmp_path)[0] != usual[0]


@pytest.mark.parametrize(
    ("where", "named", "version"),
    [(torch, "__version__", "99.0"), (numpy, "__version__", "99.0"), (os, "confstr", lambda name: "glibc 99")],
)
def test_another_version_of_a_library_misses(
    where: Any,
    named: str,
    version: object,
    usual: tuple[str, str | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(where, named, version)
    assert known_by(Small(), inputs(), tmp_path)[0] != usual[0]


def texts(audit: Audit) -> tuple[str, str]:
    """Both files, but for times, what was reused, and flags that were set."""
    document = steady(audit.to_json())
    document["environment"].pop("flags", None)
    measured = {
        name: value for name, value in audit.to_measurements().items() if name != "plan"
    }  # a digest of the other
    return json.dumps(document), json.dumps(measured)


class Attending(nn.Module):
    """Sharp enough for some of it to need FP32: runs are made, regions tried and plans searched for."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.inner, self.norm, self.outer = nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.inner(x))
        return self.outer(torch.softmax(hidden * 40, -1) @ hidden.T @ hidden)


class Choosing(Attending):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).argmax(-1)


def largest(reference: list[Tensor], candidate: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(reference, candidate, strict=True))


def x(count: int = 3) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(5))


AGAIN: dict[str, tuple[type[nn.Module], Any, dict[str, Any], dict[str, Any], str]] = {
    "nothing": (Attending, x(), {}, {}, "what each format does to {n} operations, what they do to the outputs, "),
    "budget": (Attending, x(), {}, {"max_error": 1e-4}, "{n} operations, what they do to the outputs"),
    "strategy": (Attending, x(), {"strategies": "cast"}, {"strategies": "autocast"}, "what they do to the outputs"),
    "objective": (Attending, x(), {}, {"objective": "memory"}, "what they do to the outputs"),
    "criterion": (Attending, x(), {}, {"criteria": "*: max_abs <= 0.01"}, "what each format does to {n} operations"),
    "metric": (Attending, x(), {}, {"metric": largest}, "what they do to the outputs"),
    "choices": (Choosing, x(), {}, {"objective": "flops"}, "what they do to the outputs"),
    "batches": (Attending, [(x(),), (x() * 2,)], {}, {"max_error": 0.1}, "what they do to the outputs"),
    "training": (Attending, (x(), torch.ones(3, 4)), STEP, {**STEP, "max_error": 0.1}, "the backward passes of "),
    "quick": (Attending, x(), {"formats": "bf16"}, {"formats": "bf16", "quick": True}, "what they do to the outputs"),
}


@pytest.mark.parametrize("name", AGAIN)
def test_with_a_cache_the_audit_is_the_same_to_the_byte(name: str, tmp_path: Path) -> None:
    model, given, before, now, expected = AGAIN[name]
    options = {"device": "cpu"} | now
    without = auditor.audit(model(), given, **options)
    first = auditor.audit(model(), given, cache=tmp_path, device="cpu", **before)
    second = auditor.audit(model(), given, cache=tmp_path, **options)
    assert (without.environment.reused, first.environment.reused) == (None, NONE)
    assert second.environment.reused is not None
    assert expected.format(n=len(without.nodes)) in second.environment.reused
    assert texts(second) == texts(without)


def test_what_was_taken_is_counted(tmp_path: Path) -> None:
    one = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
    both = auditor.audit(Attending(), [(x(),), (x(2).repeat(2, 1)[:3],)], cache=tmp_path, device="cpu")
    found = both.environment.reused
    assert found is not None
    assert f"what each format does to {len(one.nodes)} operations (on 1 of 2 batches)" in found
    assert "what they do to the outputs (on 1 of 2 batches)" in found


def test_other_seeds_and_formats_are_measured(tmp_path: Path) -> None:
    auditor.audit(Attending(), x(), cache=tmp_path, device="cpu", formats="bf16")
    for options in ({"seed": 1, "formats": "bf16"}, {"formats": "fp16"}):
        found = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu", **options)
        assert "what each format does" not in str(found.environment.reused)
        assert texts(found) == texts(auditor.audit(Attending(), x(), device="cpu", **options))


@torch.library.custom_op("cache_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    return x * 2


def test_operations_of_others_are_not_kept(tmp_path: Path) -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return doubled(x).softmax(-1)

    found = auditor.audit(Doubling(), x(), cache=tmp_path / "cache", device="cpu").environment.reused
    assert found is not None
    assert "nothing was taken from the cache or kept there" in found
    assert "cache_tests.doubled" in found
    assert not (tmp_path / "cache").exists()


def test_a_full_disk_costs_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("auditor.cache.store.json.dump", full)
    audit = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
    assert audit.environment.reused == f"{NONE}; nothing more could be kept there: No space left on device"
    assert list(tmp_path.iterdir()) == []
    assert texts(audit) == texts(auditor.audit(Attending(), x(), device="cpu"))


def test_entries_that_anyone_spoilt_are_passed_over(tmp_path: Path) -> None:
    good = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
    whole = {file: file.read_bytes() for file in tmp_path.iterdir()}
    for spoil in (lambda held: held[: len(held) // 2], lambda held: b"\x80\x04.", lambda held: b"[" * 100_000):
        for file, held in whole.items():
            file.write_bytes(spoil(held))
        found = auditor.audit(Attending(), x(), cache=tmp_path, device="cpu")
        assert found.environment.reused == NONE
        assert texts(found) == texts(good)


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(AuditorError, match="cannot keep measurements") as caught:
            auditor.audit(Attending(), x(), cache=place)
        assert caught.value.slug == "bad-cache"


def test_the_line_of_the_summary_and_the_report_is_that_of_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pyproject.toml").write_text('[tool.auditor]\ncache = "kept/here"\n')
    below = tmp_path / "below"
    below.mkdir()
    source = "import torch\n\n\ndef get_model():\n    torch.manual_seed(0)\n    return torch.nn.Linear(4, 4)\n\n\n"
    (below / "model.py").write_text(f"{source}def example_inputs():\n    return (torch.ones(2, 4),)\n")
    monkeypatch.chdir(below)
    said = []
    for _ in range(2):
        assert cli.main(["model.py", "--quick", "--device", "cpu", "--out", "out", "-q"]) in (0, 1)
        line = capsys.readouterr().out.partition("\nCache")[2].partition("\n\n")[0].partition(":  ")[0]
        reused = json.loads((below / "out" / "plan.json").read_text())["environment"]["reused"]
        assert reused[1:30] in " ".join(line.split())
        assert html.escape(reused) in (below / "out" / "report.html").read_text()
        said.append(reused)
    assert said[0] == NONE
    assert said[1].startswith("taken from the cache: what each format does to 1 operation")
    assert list((tmp_path / "kept" / "here").iterdir())  # counted from the file that names it


def test_only_an_audit_with_a_folder_imports_what_checks_its_entries() -> None:
    code = "import sys, auditor.flow, auditor.cli.audit; print('pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]
