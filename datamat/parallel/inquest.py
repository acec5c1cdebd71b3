"""What becomes of the tasks of a worker that has died: who is to blame, who goes to another worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from datamat.parallel.failures import death_error, timeout_error
from datamat.parallel.tasks import split

if TYPE_CHECKING:
    from collections.abc import Sequence

    from datamat.errors import ParallelError
    from datamat.parallel.failures import Autopsy
    from datamat.parallel.tasks import CodeBook, Task

__all__ = ["MAX_UNBEGUN", "Verdict", "hold_inquest"]

# Workers that may die before they begin a task which is next in line there. What kills them may be its sheer size: so
# from then on it is to blame.
MAX_UNBEGUN = 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to be done with the tasks that a worker had not answered.

    Attributes:
        again: to be given to other workers, in this order.
        failed: the task that is given up, if there is one.
        error: why.
        warning: what the log is to say, if anything.
    """

    again: Sequence[Task]
    failed: Task | None = None
    error: ParallelError | None = None
    warning: str | None = None


def hold_inquest(
    lost: Sequence[Task], autopsy: Autopsy, codes: CodeBook, *, timeout_s: float | None, max_retries: int
) -> Verdict:
    """Judge the death of a worker.

    A worker answers its tasks in order, so the first one without an answer is the only suspect; and it is innocent if
    the worker had not begun it.

    Args:
        lost: the unanswered tasks, in order; at least one.
        autopsy: what is known of the death.
        codes: where the parts of a chunk that is taken apart are counted.
        timeout_s: seconds that the suspect was allowed, if it was killed because it took longer.
        max_retries: deaths that a task survives.
    """
    suspect, *others = lost
    if not autopsy.had_begun(suspect):
        suspect.unbegun += 1
        if suspect.unbegun < MAX_UNBEGUN:
            return Verdict(lost)
    if suspect.count > 1:
        return Verdict([*split(suspect, codes), *others])
    suspect.tries += 1
    if timeout_s is not None:
        return Verdict(others, suspect, timeout_error(suspect, autopsy, timeout_s))
    if suspect.tries > max_retries:
        return Verdict(others, suspect, death_error(suspect, autopsy))
    attempts = f"attempt {suspect.tries + 1} of {max_retries + 1}"
    warning = f"{suspect.label}: worker {autopsy.pid} ended by {autopsy.cause()}; {attempts} follows"
    return Verdict(lost, warning=warning)
