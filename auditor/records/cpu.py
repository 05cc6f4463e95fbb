"""The records of an audit for a CPU: the kernels that ran, plans under torch.compile, and plans for CUDA as well."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from .written import FileField, empty


@dataclass(frozen=True)
class CpuRun:
    """What the CPU ran in one forward, in FP32 or under a plan, and the error under torch.compile."""

    kernels: Annotated[
        Mapping[str, int],
        FileField("by kernel of oneDNN, such as `matmul in BF16: brg_matmul:avx10_1_512_amx`: calls in one forward"),
    ] = empty()
    kernels_failure: Annotated[str | None, FileField("why the run that names `kernels` failed")] = None
    compiled_error: Annotated[
        float | None, FileField("error of the compiled model on the first batch; `null`: not measured, or not finite")
    ] = None
    compiled_failure: Annotated[str | None, FileField("why `compiled_error` is `null`")] = None


@dataclass(frozen=True)
class ForBoth:
    """A strategy and format on both targets: what each keeps in FP32, and the plan that keeps what either keeps."""

    plan: Annotated[str, FileField("name of the plan")]
    cpu: Annotated[tuple[str, ...], FileField("modules and functions in FP32 under the plan for the CPU")]
    cuda: Annotated[tuple[str, ...], FileField("modules and functions in FP32 under the plan for CUDA")]
    error_of_cpu: Annotated[float | None, FileField("error of the plan for the CPU, on the CPU; `null`: no result")]
    error_of_cuda: Annotated[float | None, FileField("error of the plan for CUDA, emulated; `null`: no result")]
    error_on_cpu: Annotated[float | None, FileField("error of the plan for both, on the CPU; `null`: no result")]
    error_on_cuda: Annotated[float | None, FileField("error of the plan for both, emulated; `null`: no result")]
    holds: Annotated[bool, FileField("whether the plan for both is within the error budget on both targets")]

    @property
    def both(self) -> tuple[str, ...]:
        """Modules and functions that stay in FP32 on either target."""
        return tuple(sorted({*self.cpu, *self.cuda}))


@dataclass(frozen=True)
class CpuTarget:
    """The CPU for which a model was audited, and what it ran."""

    capability: Annotated[str, FileField("instructions of torch's own kernels, such as `AVX512`")]
    isa: Annotated[str, FileField("instructions of oneDNN's kernels, as oneDNN names them; empty without oneDNN")]
    row: Annotated[str, FileField("the kind of CPU that predicted times are for, a row of devices.toml")]
    threads: Annotated[int, FileField("number of threads of torch", least=1)]
    runs: Annotated[Mapping[str, CpuRun], FileField("by plan, and `fp32`: what ran")] = empty()
    for_both: Annotated[tuple[ForBoth, ...], FileField("by plan: what differs from CUDA; empty unless asked for")] = ()
