"""A Python function that a criterion on the command line names by its file."""

from __future__ import annotations

from ..errors import LoadError
from .criterion import Function


def loaded(text: str) -> Function:
    """The function that `f.py:name` or `package.module:name` names.

    Raises: LoadError, those of importing a target and slug="bad-criterion" where that is nothing to call.
    """
    from ..loading.sandbox import user_code
    from ..loading.target import import_target, parse

    target = parse(text)
    with user_code(target.folders, 0, target.script):
        module = import_target(target)
    found = getattr(module, target.symbol or "", None)
    if not callable(found):
        raise LoadError(
            f"{target.label} has no function {target.symbol!r}: a criterion names one as f.py:name, called as "
            "name(reference, candidate)",
            slug="bad-criterion",
        )
    return found  # type: ignore[no-any-return]
