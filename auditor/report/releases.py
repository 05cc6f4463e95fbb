"""Says when an audit used a release of torch with which the auditor was not tested."""

from __future__ import annotations

from collections.abc import Iterator

from ..resources import release, table


def untested_words(torch: str) -> Iterator[str]:
    """A sentence if a release of torch, such as "2.16.0+cu130", is newer than all that were tested, or older."""
    oldest, newest = table("tested")["torch"]
    used = release(torch)
    tested = f"{oldest} to {newest}"
    if used > release(newest):
        yield (
            f"torch {torch} is newer than the releases with which this auditor was tested ({tested}): operators that it "
            "adds or changes may be judged by older rules."
        )
    if used < release(oldest):
        yield f"torch {torch} is older than the releases with which this auditor was tested ({tested})."
