"""Writers wait for uploads: when too much is dirty, or when only an upload would make room.

Contract: a writer that waits hurries the uploads. It wakes after an upload, or another change of
the dirty objects. After the await the caller checks its conditions again. Each wait ends at the
deadline of its writer. No writer waits for a bucket that is down. While no upload ends, only the
first writers wait for the bound; writers that come later have no time left.
Not for evicting objects once they are uploaded: `Room`, `Quota`.
"""

import logging

import trio

from kvfs.core.ledger.dirty import Dirty
from kvfs.errors import NoSpaceError

log = logging.getLogger(__name__)

HURRY = 1.0  # s that all uploads are due at once after a writer began to wait
_NEVER = (-1, 0.0)


class Backpressure:
    """The waits for uploads. Deadlines are of trio's clock."""

    def __init__(self, dirty: Dirty) -> None:
        self.bucket = dirty.bucket
        self.dirty = dirty
        self._stalled_at = _NEVER  # uploads that were done when writers began to wait, and when
        self._logged: set[str] = set()

    async def until_not_full(self, deadline: float) -> None:
        """Wait while too many bytes are dirty. Raises NoSpaceError.

        While no upload ends, only the first writers wait: all writers share one bound, as the
        readers of an object do.
        """
        bucket, dirty = self.bucket, self.dirty
        while dirty.full:
            self._say_full()
            done = bucket.counters["uploads"] + bucket.counters["copies"]
            if done != self._stalled_at[0]:
                self._stalled_at = done, trio.current_time()
            with trio.move_on_at(min(deadline, self._stalled_at[1] + bucket.wait)) as late:
                bucket.counters["waits"] += 1
                dirty.hurry(HURRY)
                await dirty.changed.wait()
            if late.cancelled_caught:
                why = f": {bucket.health.why}" if bucket.health.why else ""
                raise NoSpaceError(f"{dirty.bytes} bytes wait for their upload{why}")
        self._stalled_at = _NEVER

    def _say_full(self) -> None:
        bucket = self.bucket
        what = (
            f"{bucket.place}: {bucket.max_dirty_bytes} bytes wait for their upload, the most "
            "that s3_dirty allows: writers wait, too"
        )
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s (said once)", what)

    def helps(self, deadline: float) -> bool:
        """Whether an upload before the deadline can make objects evictable that are dirty now."""
        if self.bucket.health.down or not len(self.dirty):
            return False
        return trio.current_time() < deadline

    async def upload(self, deadline: float) -> None:
        """Wait until the dirty objects change, or the deadline has passed."""
        bucket, dirty = self.bucket, self.dirty
        if bucket.health.down:
            return
        with trio.move_on_at(deadline):
            bucket.counters["waits"] += 1
            dirty.hurry(HURRY)
            await dirty.changed.wait()
