"""Code to copy: how to run the patched model, and how to keep one module in FP32 by hand."""

from __future__ import annotations

from dataclasses import dataclass

from ..records.audit import Audit


@dataclass(frozen=True)
class Snippet:
    """A few lines to copy, and what they are for."""

    title: str
    code: str


def snippets(audit: Audit) -> tuple[Snippet, ...]:
    """Ways to use the recommended plan; none where no plan is recommended."""
    plan = audit.plans.get(audit.recommended or "")
    if plan is None:
        return ()
    if plan.program is not None:
        load = f"import torch\n\n# {plan.name}, the recommended plan\nprogram = torch.export.load({plan.program.file!r}).module()\n"
        return (Snippet("Run the program", load),)
    return (
        Snippet(
            "Build the model patched",
            f"import patched_model\n\n# {audit.recommended}, the recommended plan\nmodel = patched_model.build()\n",
        ),
        Snippet(
            "Patch a model you already have",
            "import patched_model\n\nmodel = patched_model.apply(model)\n",
        ),
        Snippet(
            "Choose another plan",
            'import auditor\n\nplan = auditor.load_plan("plan.json")\n'
            + f"name = {_other(audit)!r}\nmodel = auditor.apply(model, plan, name)\n",
        ),
    )


def _other(audit: Audit) -> str | None:
    others = (name for name, plan in audit.plans.items() if name != audit.recommended and plan.program is None)
    return next(others, audit.recommended)


def keep_by_hand(owner: str) -> str | None:
    """Code that keeps one module in FP32 under autocast; None for the root, which has no scope of its own to raise."""
    if not owner:
        return None
    return (
        "import torch\n\n"
        "def raised(module, args, kwargs):\n"
        "    up = lambda x: x.float() if torch.is_tensor(x) and x.is_floating_point() else x\n"
        "    return tuple(map(up, args)), {name: up(x) for name, x in kwargs.items()}\n\n"
        f"scope = model.get_submodule({owner!r})\n"
        "scope.register_forward_pre_hook(raised, with_kwargs=True)\n"
        'scope.forward = torch.autocast("cuda", enabled=False)(scope.forward)\n'
    )
