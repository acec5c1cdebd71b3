"""Hands test files to workers of xdist, and continues where a test ends its worker.

xdist (3.8) gives such a test to one new worker after the other, and then waits for ever: a worker holds its last test
back until it gets another or is shut down, and where a single one is left of a file, neither happens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from xdist.workermanage import WorkerController


class CrashScheduler(LoadFileScheduling):
    """As `--dist loadfile`; a test that ended its worker counts as done, and a new worker gets the rest of its file."""

    def remove_node(self, node: WorkerController) -> str | None:
        """Remove a worker that has ended, and return the test that it ended in, if any."""
        left = {}
        for file, tests in self.assigned_work.pop(node).items():
            if pending := [name for name, is_done in tests.items() if not is_done]:
                left[file] = pending
        if not left:
            return None
        crashed = next(iter(left.values())).pop(0)
        self.workqueue.update({file: dict.fromkeys(names, False) for file, names in left.items() if names})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed

    def _reschedule(self, node: WorkerController) -> None:
        super()._reschedule(node)
        if not self.workqueue and not node.shutting_down:  # it got the last file: else it keeps one test back
            node.shutdown()
