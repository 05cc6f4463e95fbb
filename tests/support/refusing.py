"""What a user is told who asks for what cannot be done: one line, under a name."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from auditor.errors import AuditorError


@contextmanager
def refused(
    kind: type[AuditorError], slug: str, *words: str, match: str | None = None
) -> Iterator[pytest.ExceptionInfo[AuditorError]]:
    """The body raises an error of this kind and slug, in one line that has these words."""
    with pytest.raises(kind, match=match) as caught:
        yield caught
    said = str(caught.value)
    assert caught.value.slug == slug, said
    assert [word for word in words if word not in said] == [], said
    assert "\n" not in said
