"""An audit for this machine's CPU against plain runs of torch: what a user gets without the auditor."""

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import auditor
from auditor.isolation.outputs import tensor_outputs
from auditor.isolation.process import reseed
from auditor.numerics.entries import over_tensors
from auditor.numerics.metrics import output_error
from auditor.records import Verification
from auditor.records.audit import Audit

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}

Inputs = tuple[Any, ...]
Named = dict[str, Any]


def plain_run(model: nn.Module, args: Inputs, kwargs: Named) -> list[torch.Tensor]:
    """The outputs of one call, on copies of its inputs, with the random numbers of an audit."""
    args, kwargs = copy.deepcopy((args, kwargs))
    reseed(0)
    with torch.no_grad():
        return [*tensor_outputs(model(*args, **kwargs))]


def low_run(model: nn.Module, args: Inputs, kwargs: Named, strategy: str, fmt: str) -> list[torch.Tensor]:
    """The outputs of a copy of the model, with everything in low precision, as torch's documentation says."""
    model, dtype = copy.deepcopy(model), DTYPES[fmt]
    if strategy == "autocast":
        with torch.autocast("cpu", dtype=dtype):
            return plain_run(model, args, kwargs)
    args, kwargs = over_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, (args, kwargs))
    return plain_run(model.to(dtype), args, kwargs)


def differences(model: nn.Module, args: Inputs, kwargs: Named, audit: Audit) -> list[str]:
    """Where errors that the audit states are not those of plain runs, bit for bit: a line each."""
    reference = plain_run(copy.deepcopy(model), args, kwargs)
    return [
        *_of_baselines(model, args, kwargs, audit, reference),
        *_of_plans(model, args, kwargs, audit, reference),
    ]


def stated(ran: Verification) -> float | None:
    """The relative L2 error of all outputs, also where criteria, such as for discrete outputs, decide."""
    return ran.measured_error if ran.joint is None else ran.joint


def _of_baselines(
    model: nn.Module, args: Inputs, kwargs: Named, audit: Audit, reference: list[torch.Tensor]
) -> Iterator[str]:
    for name, ran in audit.baselines.items():
        strategy, _, fmt = name.partition("_")
        try:
            plain = output_error(reference, low_run(model, args, kwargs, strategy, fmt))
        except (RuntimeError, NotImplementedError) as error:
            if ran.failure is None:
                yield f"{name} raises {error}, and the audit says {ran.measured_error}"
            continue
        if ran.failure is not None and "with gradients enabled" in ran.failure:
            continue  # the plain run has none
        yield from _apart(name, plain, stated(ran))


def _of_plans(
    model: nn.Module, args: Inputs, kwargs: Named, audit: Audit, reference: list[torch.Tensor]
) -> Iterator[str]:
    for name, plan in audit.plans.items():
        if not plan.is_verified or plan.verification is None:
            yield f"{name} was not run: {plan.verification}"
            continue
        patched = auditor.apply(copy.deepcopy(model), plan)
        plain = output_error(reference, plain_run(patched, args, kwargs))
        yield from _apart(f"plan {name}", plain, stated(plan.verification))


def _apart(name: str, plain: float, error: float | None) -> Iterator[str]:
    is_finite = plain < float("inf")
    if error != (plain if is_finite else None):
        yield f"{name}: {plain} plainly, {error} stated"
