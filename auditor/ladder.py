"""Where a GPU has too little memory, an audit begins again and gets by with less, a step at a time; at last on the CPU."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

from .devices import CPU, let_go, name_of
from .errors import AuditorError, first_line
from .loading.halved import halved, samples
from .options import Options
from .raised import device_failed, device_is_full, gave_up, origin_of
from .records import Audit, Subject
from .sparing import Sparing, sparing

SHORT = 1 << 18
"""Entries of a tensor that are compared at a time where memory is short."""

CHUNKS = "comparisons in short runs"
SINGLY = "one format at a time"
HOST = "values kept on the host"
INSTEAD = "the CPU"


def climbed(once: Callable[[Subject, Options], Audit], subject: Subject, options: Options) -> Audit:
    """`once(subject, options)`, begun again with less need of memory where the GPU has none left.

    Raises: AuditorError(slug="out-of-memory") where the last step does not fit either and the device was asked for by name.
    """
    if not options.native:
        return once(subject, options)
    taken: tuple[str, ...] = ()
    said = ""
    for how, smaller in _steps(subject, options):
        try:
            with sparing(how):
                return once(smaller, options)
        except Exception as error:
            if device_failed(error) and not isinstance(error, AuditorError):
                raise gave_up(error) from error
            if not device_is_full(error):
                raise
            taken, said = how.taken, first_line(origin_of(error))[:200]
        gc.collect()  # what the error's frames held
        let_go(options.where)
    if options.device != "auto":
        raise AuditorError(
            f"out of memory on {options.where} ({name_of(options.where)}), with {', '.join(taken)} ({said}): use the CPU "
            "(--device cpu), smaller inputs, or a GPU with more memory",
            slug="out-of-memory",
        )
    with sparing(Sparing(taken=(*taken, INSTEAD))):
        return once(subject, replace(options, device=CPU))


def _steps(subject: Subject, options: Options) -> Iterator[tuple[Sparing, Subject]]:
    """How sparing each attempt is, and what it audits; a batch is halved where its samples are independent."""
    yield Sparing(), subject
    how = Sparing(run=SHORT, taken=(CHUNKS,))
    yield how, subject
    if len(options.formats) > 1:
        how = replace(how, singly=True, taken=(*how.taken, SINGLY))
        yield how, subject
    total, before, smaller = samples(subject), how.taken, halved(subject, options.seed)
    if smaller is not None:
        subject = smaller
        how = replace(how, taken=(*before, _share(subject, total)))
        yield how, subject
    how = replace(how, host=True, taken=(*how.taken, HOST))
    yield how, subject
    while smaller is not None and (smaller := halved(subject, options.seed)) is not None:
        subject = smaller
        yield replace(how, taken=(*before, _share(subject, total), HOST)), subject


def _share(subject: Subject, total: int) -> str:
    return f"{samples(subject)} of {total} samples"
