"""Code to copy: how to run the patched model, and how to keep one module in FP32 by hand."""

from __future__ import annotations

from ..records.audit import Audit
from ..snippets import TOOLS
from ..snippets import snippets as for_tools
from .blocks import Block, Code, Fold


def more_ways(audit: Audit) -> list[Block]:
    """Another plan, and the recommended plan for other tools."""
    if not audit.plans:
        return []
    return [
        *snippets(audit)[2:],
        *(Fold(TOOLS[key].title, (Code("", text),)) for key, text in for_tools(audit).items()),
    ]


def snippets(audit: Audit) -> tuple[Code, ...]:
    """Ways to use the recommended plan; none where no plan is recommended."""
    plan = audit.plans.get(audit.recommended or "")
    if plan is None:
        return ()
    about = f"# {plan.name}, the recommended plan\n"
    if plan.program is not None:
        load = f"import torch\n\n{about}program = torch.export.load({plan.program.file!r}).module()\n"
        return (Code("Run the program", load),)
    others = (name for name, other in audit.plans.items() if name != plan.name and other.program is None)
    chosen = f"name = {next(others, plan.name)!r}\nmodel = auditor.apply(model, plan, name)\n"
    return (
        Code("Build the model patched", f"import patched_model\n\n{about}model = patched_model.build()\n"),
        Code("Patch a model you already have", "import patched_model\n\nmodel = patched_model.apply(model)\n"),
        Code("Choose another plan", f'import auditor\n\nplan = auditor.load_plan("plan.json")\n{chosen}'),
    )


def keep_alone(audit: Audit, owner: str) -> str | None:
    """Code that runs a model low under the recommended plan's strategy, but for one module; None where no plan is recommended
    or it is a program, and for the root."""
    plan = audit.plans.get(audit.recommended or "")
    if plan is None or plan.program is not None or not owner:
        return None
    scopes = {"": {"precision": plan.format}, owner: {"precision": "fp32"}}
    made = {"strategy": plan.strategy, "format": plan.format, "scopes": scopes}
    return f"import auditor\n\nmodel = auditor.apply(model, {made!r})\n"
