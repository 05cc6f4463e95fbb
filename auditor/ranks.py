"""The processes that torchrun started: the first one leads, and batches are shared between all of them.

Every rank goes the same way, on the same numbers: what they share is gathered in one order, by all. Importing this needs
no torch.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import reduce
from typing import Any, TypeVar

from .errors import RankError, first_line

T = TypeVar("T")
R = TypeVar("R")

TOGETHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
"""What torchrun tells each process that it starts."""

PATIENCE = timedelta(days=7)
"""How long a rank waits for another: a rank that dies is noticed at once, one at work is not to be hurried."""


@dataclass(frozen=True)
class _Job:
    """What one rank brings to a gathering: the results of its items, up to the first that raised.

    what: the work, which is the same on all ranks unless they went apart. raised: what the item after the results raised, and
    lost: why the rank ends here, each in one line.
    """

    what: str
    results: Sequence[Any] = ()
    raised: str = ""
    lost: str | None = None


_gathered: Callable[[_Job], list[_Job]] | None = None
"""How the ranks exchange what they bring, in the order of the ranks; None for a process alone."""


def rank() -> int:
    """Which of the processes that torchrun started this is; 0 for a process alone."""
    return int(os.environ["RANK"]) if launched() else 0


def together() -> bool:
    """Whether this process shares its work with others."""
    return _gathered is not None


def leads() -> bool:
    """Whether this process speaks, and writes what comes out."""
    return rank() == 0


@contextmanager
def joined() -> Iterator[None]:
    """In the body, work is shared between the processes that torchrun started; elsewhere this does nothing.

    Raises: RankError where another rank ends, with what it said of that.
    """
    global _gathered
    if not launched() or int(os.environ["WORLD_SIZE"]) == 1:
        yield
        return
    import torch
    from torch import distributed

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    distributed.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    _gathered = _gather
    try:
        yield
        _exchanged(_Job("the end"))
    except BaseException as error:
        if not leads() and not isinstance(error, RankError):
            _gather_quietly(_Job("", lost=_worded(error)))
        raise
    finally:
        _gathered = None
        distributed.destroy_process_group()


def shared(
    what: str,
    items: Sequence[T],
    work: Callable[[T], R],
    *,
    enough: Callable[[R], bool] = lambda result: False,
) -> list[R]:
    """`work` of every item, in their order, up to and with the first that is `enough`; each rank does its share.

    what: a word for the work. Raises: what the first item that raises does; RankError.
    """
    if not together() or len(items) < 2:
        done, error = _worked(items, work, enough)
        if error is not None:
            raise error
        return done
    size = int(os.environ["WORLD_SIZE"])
    done, error = _worked(part(items), work, enough)
    brought = _exchanged(_Job(what, done, _worded(error) if error else ""))
    results: list[R] = []
    for index, item in enumerate(items):
        there = brought[index % size]
        if index // size >= len(there.results):  # its work raised
            if error is not None and index % size == rank():
                raise error
            work(item)  # which raises here as well, unless it is about that rank alone
            raise RankError(f"rank {index % size} could not run a batch that others can: {there.raised}", "rank-lost")
        results.append(there.results[index // size])
        if enough(results[-1]):
            break
    return results


def _worked(
    items: Sequence[T], work: Callable[[T], R], enough: Callable[[R], bool]
) -> tuple[list[R], Exception | None]:
    """Results up to and with the first that is enough, or up to what the next item raised."""
    results: list[R] = []
    for item in items:
        try:
            results.append(work(item))
        except Exception as error:
            return results, error
        if enough(results[-1]):
            break
    return results, None


def from_first(what: str, work: Callable[[], R]) -> R:
    """What the leader makes of it, for all: of work that is done once, or that no two processes do alike."""
    if not together():
        return work()
    error: Exception | None = None
    brought: list[Any] = []
    if leads():
        try:
            brought = [work()]
        except Exception as raised:
            error = raised
    found = _exchanged(_Job(what, brought))[0].results
    if error is not None:
        raise error
    if not found:
        raise RankError(f"rank 0 failed at {what}", "rank-lost")
    result: R = found[0]
    return result


def part(items: Sequence[T]) -> Sequence[T]:
    """Those of the items that are this rank's: every one that `shared` would give it."""
    return items[rank() :: int(os.environ["WORLD_SIZE"])] if together() else items


def each_rank(what: str, result: R) -> list[R]:
    """What every rank brings, in their order. Raises: RankError."""
    return [job.results[0] for job in _exchanged(_Job(what, [result]))] if together() else [result]


def folded(what: str, items: Sequence[T], work: Callable[[T], R], join: Callable[[R, R], R]) -> R:
    """The results of `work` joined in the order of the items, of which there is at least one; alone, each as it comes.

    Raises: what `shared` does.
    """
    if not together():
        return reduce(join, map(work, items))
    return reduce(join, shared(what, items, work))


def _worded(error: BaseException) -> str:
    return f"{type(error).__name__}: {first_line(error)}"


def launched() -> bool:
    """Whether torchrun started this process."""
    return all(name in os.environ for name in TOGETHER)


def _exchanged(job: _Job) -> list[_Job]:
    """What every rank brings. Raises: RankError where one is gone, or came with other work."""
    assert _gathered is not None
    try:
        jobs = _gathered(job)
    except RuntimeError as error:  # the connection to a process that died is closed
        said = "another rank of this audit died, and nothing was written: what it said last says why"
        raise RankError(said, "rank-lost") from error
    for index, other in enumerate(jobs):
        if other.lost is not None:
            raise RankError(f"rank {index} ended, and nothing was written: {other.lost}", "rank-lost")
    if len({other.what for other in jobs}) > 1:
        ways = ", ".join(f"rank {index} at {other.what!r}" for index, other in enumerate(jobs))
        raise RankError(
            f"the ranks went different ways ({ways}): does the model draw random numbers of its own, or read a clock or a "
            "file that changes? Audit it in one process",
            "rank-lost",
        )
    return jobs


def _gather(job: _Job) -> list[_Job]:
    from torch import distributed

    jobs: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(jobs, job)
    return jobs


def _gather_quietly(job: _Job) -> None:
    """Tell the others, if they are still there."""
    with suppress(RuntimeError):
        _gather(job)
