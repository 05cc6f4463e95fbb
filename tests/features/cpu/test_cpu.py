"""What only an audit for a CPU has: kernels of oneDNN, compiled plans, and the comparison with CUDA."""

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import auditor
from auditor.features.cpu.questions import verbose_lines
from auditor.features.cpu.report import cpu_lines, cpu_section
from auditor.features.timing.stage import _faster
from auditor.numerics import cpus
from auditor.numerics.cpus import isa_in, kernels_in
from auditor.records import TimeAndMemory, Times
from auditor.report.blocks import Grid
from tests.native_cpu.plainly import plain_run

VERBOSE = """
onednn_verbose,v1,info,oneDNN v3.12.0 (commit 80afa71)
onednn_verbose,v1,info,cpu,isa:Intel AVX10.1 and Intel AMX with bfloat16 and 8-bit integer support
onednn_verbose,v1,primitive,exec,cpu,matmul,brg_matmul:avx10_1_512_amx,undef,src:bf16::blocked:ab::f0 wei:bf16::blocked:ba::f0,,,64x64:64x64,26.6
onednn_verbose,v1,primitive,exec,cpu,reorder,jit:uni,undef,src:bf16::blocked:abcd::f0 dst:bf16::blocked:acdb::f0,,,1x16x8x8,0.003
onednn_verbose,exec,cpu,convolution,jit:avx512_core,forward_inference,src_f32::blocked:acdb:f0 wei_f32::blocked,,,mb1,0.1
""".splitlines()


class Squares(nn.Module):
    """Squares sums, which overflow in FP16 on CUDA and on a CPU; a binary cross entropy, which CUDA's autocast refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[batch, 16] -> [batch, 4] and []."""
        y = self.head(self.layer(x).relu())
        p = y.sigmoid()
        return y, nn.functional.binary_cross_entropy(p, torch.full_like(p, 0.5))


@cache
def audit_for_both() -> auditor.Audit:
    torch.manual_seed(0)
    return auditor.audit(
        Squares().eval(), (torch.randn(4, 16),), on="both", formats="bf16", strategies="autocast", measure_time=False
    )


def test_kernels_are_counted_from_what_onednn_says() -> None:
    assert isa_in(VERBOSE) == "Intel AVX10.1 and Intel AMX with bfloat16 and 8-bit integer support"
    assert kernels_in(VERBOSE) == {
        "matmul in BF16: brg_matmul:avx10_1_512_amx": 1,
        "convolution in FP32: jit:avx512_core": 1,
    }


def test_onednn_is_heard_and_standard_output_is_restored(capfd: pytest.CaptureFixture[str]) -> None:
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(64, 64).bfloat16()
    with torch.no_grad(), verbose_lines() as read:
        nn.functional.linear(x, weight)
    print("still here")
    assert capfd.readouterr().out == "still here\n"
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        assert any(key.startswith("matmul in BF16: ") for key in kernels_in(read()))


@pytest.mark.parametrize(
    ("flags", "most", "row"),
    [
        ("avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", "", "CPU with AMX"),
        ("avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", "AVX512_CORE_BF16", "CPU with AVX-512 BF16"),
        ("avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", "AVX512_CORE", "CPU with AVX-512"),
        ("avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16", "AVX2", "CPU"),
        ("avx2 avx512f avx512_bf16 avx512_fp16 amx_tile amx_bf16 amx_fp16", "", "CPU with AMX-FP16"),
        ("avx2 avx512f", "", "CPU with AVX-512"),
        ("asimd fphp", "", "CPU"),
    ],
)
def test_the_row_follows_the_instructions(flags: str, most: str, row: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "_listed", lambda field: flags if field == "flags" else "")
    monkeypatch.setenv(cpus.MAX_ISA, most)
    assert cpus.cpu_row() == row


def test_the_table_says_what_differs_from_cuda() -> None:
    """CUDA's autocast refuses the loss, which stays in FP32 there; the CPU's computes it in FP32 by itself."""
    audit = audit_for_both()
    assert audit.environment.execution == "native"
    assert audit.cpu is not None
    (row,) = audit.cpu.for_both
    assert "" in row.cuda
    assert "" not in row.cpu
    assert row.holds
    grids = [block for block in cpu_section(audit) if isinstance(block, Grid)]
    assert "Only on CUDA" in grids[-1].heads


def test_kernels_of_a_plan_are_in_the_document_and_the_report() -> None:
    audit = audit_for_both()
    assert audit.cpu is not None
    assert audit.cpu.capability == torch.backends.cpu.get_cpu_capability()
    assert set(audit.cpu.runs) == {"fp32", *audit.plans}
    assert cpu_lines(audit)[0].startswith(audit.environment.device)
    assert "cpu" in audit.to_dict()


def test_a_format_that_is_slower_is_named_with_the_reason() -> None:
    audit = audit_for_both()
    (name, plan), cpu = next(iter(audit.plans.items())), audit.cpu
    assert cpu is not None
    slow = TimeAndMemory(Times(2.0, 1.9, 2.1, 7, 0.5, 0.45, 0.55), decides=True)
    low = replace(plan, timed=slow, scopes={"": replace(plan.scopes[""], precision="bf16")})
    for row, reason in (("CPU with AVX-512", "has no BF16 arithmetic"), ("CPU with AVX-512 BF16", "no matrix unit")):
        seen = replace(audit, plans={name: low}, cpu=replace(cpu, row=row))
        (_, line) = cpu_lines(seen)
        assert line.startswith("BF16 is slower than FP32 on this CPU, 0.50x at best: ")
        assert reason in line


def test_the_faster_round_counts() -> None:
    first, second = (TimeAndMemory(Times(t, t, t, 7), memory=memory) for t, memory in ((2.0, 10), (1.0, None)))
    assert _faster(first, second) == replace(first, eager=second.eager)
    assert _faster(first, "failed") is first


def test_for_cuda_alone_nothing_of_it_is_shown() -> None:
    audit = replace(audit_for_both(), cpu=None)
    assert cpu_lines(audit) == []
    assert cpu_section(audit) == []


def test_a_compiled_plan_is_compared_in_a_process_of_its_own_only() -> None:
    from auditor.features.cpu.questions import compiled_outputs
    from auditor.verify.loaders import in_hand
    from auditor.verify.running import FP32, ModelRuns

    model, batch = nn.Linear(4, 4).eval(), ((torch.randn(2, 4),), {})
    runs = ModelRuns(lambda plan: in_hand(model, {}, plan), [batch], "cpu:0")
    assert "given as an object" in str(compiled_outputs(runs, FP32))
    outputs = compiled_outputs(replace(runs, apart=True), FP32)
    assert not isinstance(outputs, str), outputs
    torch.testing.assert_close(outputs, plain_run(model, *batch))
