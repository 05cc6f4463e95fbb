"""Code to copy: how to run the patched model, and how to keep one module in FP32 by hand."""

from __future__ import annotations

from ..artefact.strategies import strategy_of
from ..numerics.formats import dtype_of
from ..paths import within
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


AUTOCAST = """
def up(x):
    return x.float() if torch.is_tensor(x) and x.is_floating_point() else x


def raised(module, args, kwargs):
    return tree_map(up, args), tree_map(up, kwargs)


scope = model.get_submodule({owner!r})
scope.register_forward_pre_hook(raised, with_kwargs=True)
scope.forward = torch.autocast("cuda", enabled=False)(scope.forward)
"""

CAST = """
def to(dtype):
    return lambda x: x.to(dtype) if torch.is_tensor(x) and x.is_floating_point() else x


def raised(module, args, kwargs):
    return tree_map(to(torch.float32), args), tree_map(to(torch.float32), kwargs)


def lowered(module, args, outputs):
    return tree_map(to({dtype}), outputs)


scope = model.get_submodule({owner!r})
exact = [x.detach().clone() for x in (*scope.parameters(), *scope.buffers())]
model.to({dtype})
for x, kept in zip((*scope.parameters(), *scope.buffers()), exact):
    x.data = to(torch.float32)(kept)
scope.register_forward_pre_hook(raised, with_kwargs=True)
scope.register_forward_hook(lowered)
"""


def keep_by_hand(audit: Audit, owner: str) -> str | None:
    """Code that keeps one module in FP32 under the recommended plan's strategy.

    None where there is none to give: no plan is recommended, or it is a program; the root has no scope of its own to raise; with
    cast weights, a module outside reads one of its weights.
    """
    plan = audit.plans.get(audit.recommended or "")
    if plan is None or plan.program is not None or not owner:
        return None
    stores = strategy_of(plan.strategy).stores
    inside = [[within(name, owner) for name in group] for group in audit.tied_parameters]
    if stores and any(any(group) and not all(group) for group in inside):
        return None
    code = (CAST if stores else AUTOCAST).format(owner=owner, dtype=dtype_of(plan.format))
    return f"import torch\nfrom torch.utils._pytree import tree_map\n\n{code}"
