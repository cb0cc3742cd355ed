"""From the bucket: the first bytes of what only it has, for who scans a directory.

Contract: `ask` begins to ask for them, `take` gives them when that has ended. They are there only
if something beside the object proves them; if not, and if the object is not what it should be, all
of it has to be fetched, which finds out what that means. A store that fails is a miss. What was
taken keeps its key from being deleted until it is left, and takes no room of a tier.
Not for who scans (`core/objects/scans.py`), nor for how long somebody waits (`hydration`).
"""

import logging
from collections import Counter
from functools import partial

from kvfs.catalog import Inode
from kvfs.core.bucket.download.download import FOR_GOOD, Downloads
from kvfs.core.flights import Flight, SingleFlight
from kvfs.core.ledger.header import Header
from kvfs.errors import KvfsError, TierError
from kvfs.movement import looking
from kvfs.s3.header import LEAST, SIZE

log = logging.getLogger(__name__)

# Headers that handles are served from at a time, 4 KiB each; who keeps more files open than that
# does not look through them one after the other.
MOST = 4096


class Asked(Flight):
    """One question. `data`: b"" if nothing proves them; `problem`: why the store gave nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.data = b""


class Headers:
    """`kept`: how many were taken and not left."""

    def __init__(self, downloads: Downloads) -> None:
        self.downloads = downloads
        self.bucket = downloads.bucket
        self.kept = 0
        self._asked: SingleFlight[tuple[int, int], Asked] = SingleFlight(  # inode and version
            lambda key, error: log.error(
                "inode %d stays in the bucket: a defect of kvfs", key[0], exc_info=error
            )
        )

    def ask(self, inode: Inode) -> Asked | None:
        """None if all of it has to be fetched."""
        stored = self.downloads.stored(inode.ino)
        if inode.size <= LEAST or stored is None or stored.codec != "none" or self.kept >= MOST:
            return None
        key, asked = (inode.ino, inode.version), Asked()
        work = partial(self._ask, inode.copy(), asked)
        return self._asked.get(key) or self._asked.begin(key, asked, work)

    def take(self, inode: Inode, asked: Asked) -> Header | None:
        """None if all of it has to be fetched. Raises NotFoundError."""
        asked.expect_done(inode.ino)
        stored = self.downloads.stored(inode.ino)  # it may have got another name
        if not asked.data or stored is None:
            return None

        def leave() -> None:
            self.kept -= 1
            self.downloads.reading -= Counter({stored.key: 1})

        self.kept += 1
        self.downloads.reading[stored.key] += 1
        self.bucket.counters["headers"] += 1
        return Header(asked.data, stored, leave)

    def stop(self) -> None:
        """Ask for nothing more: it was unmounted."""
        self._asked.stop()

    async def _ask(self, inode: Inode, asked: Asked) -> None:
        """Raises what it has told of."""
        try:
            asked.data = await self._peek(inode)
        except (KvfsError, OSError) as error:
            if isinstance(error, TierError):  # of which StoreErrors are some
                self.bucket.failed("download", error)
            log.warning("inode %d stays in the bucket: %s", inode.ino, error)
            raise

    async def _peek(self, inode: Inode) -> bytes:
        stored = self.downloads.stored(inode.ino)
        if stored is None:
            return b""
        try:
            wanted = (stored, inode.size, inode.digest)
            return await self.downloads.remote.call("down", SIZE, (), looking.peek, *wanted)
        except FOR_GOOD as error:
            log.info("inode %d is to come as a whole: %s", inode.ino, error)
            return b""
