"""The nodes that have an object: asks one after the other for its bytes.

Contract: `find` asks the index which live nodes have an object. `bring` has a mover, or a thread
for a small object, fetch it from the first of them that gives it. If none does, it asks the index
once more, since the object may have moved. A node that fails is left alone for a while (`peers`).
The digest is compared before the file has its name (`kvfs.pool.fetching`). Not for room, nor for
the record of the copy (`fetch`).
"""

from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import trio

from kvfs.catalog import Inode
from kvfs.core.bucket.listing.bucket_lookup import LastSeen
from kvfs.core.pool.lookup import PoolLookup
from kvfs.errors import ConfigError, NotFoundError
from kvfs.movement.movers import Moved, MoverPool, patience_for
from kvfs.movement.streams import Ends
from kvfs.pool import fetching
from kvfs.pool.errors import IndexDownError, NoFileError, PeerError, WrongChunkError
from kvfs.pool.fetching import FetchJob
from kvfs.pool.index import PATIENCE
from kvfs.pool.peer_file import PeerFile
from kvfs.pool.records import Lease, Owner
from kvfs.s3.chunks import Chunks
from kvfs.tiers.tier import FANOUT

FETCHES = 16  # under way at once, of small objects and of others
SMALL = 256 << 10  # bytes up to which a thread fetches: a mover takes 1 ms more to begin


class NotIndexedError(NotFoundError):
    """The index has no such object, or another one by its name."""


class Found(NamedTuple):
    """An object in the index: its live owners, the best first, and its chunks if they are known."""

    owners: Sequence[tuple[Owner, Lease]]
    chunks: Chunks | None


class Sources:
    """Fetches the bytes of objects. `failed` counts the requests that failed."""

    def __init__(self, lookup: PoolLookup, movers: MoverPool, tls: Path | None) -> None:
        self.lookup = lookup
        self.peers = lookup.peers
        self.movers = movers
        self.counters = Counter({"failed": 0})
        self.spoiled: LastSeen[bytes] = LastSeen()  # digests of objects that had wrong chunks
        self._tls = "" if tls is None else str(tls)
        self._threads = trio.CapacityLimiter(FETCHES)
        self._limiter = trio.CapacityLimiter(FETCHES)

    async def find(self, key: str, inode: Inode, *, until: float = 0.0) -> Found:
        """Ask the index for the nodes that have an object. Raises NotFoundError, IndexDownError.

        until: trio's time up to which the index is asked again if it does not answer.
        """
        while True:
            try:
                return await self._find(key, inode)
            except IndexDownError:
                if trio.current_time() >= until:
                    raise
                await trio.sleep(PATIENCE)

    async def _find(self, key: str, inode: Inode) -> Found:
        entry = await self.lookup.entry(key)
        if entry is None or entry.facts.digest != inode.digest or entry.facts.size != inode.size:
            raise NotIndexedError("the index has another object by its name, or none")
        found = await self.peers.usable(entry)
        # A client of the index could announce a server of its own, without a certificate.
        usable = [(owner, lease) for owner, lease in found if lease.tls or not self._tls]
        return Found(usable, entry.facts.chunks)

    async def bring(
        self, key: str, inode: Inode, found: Found, destination: str, ends: Ends | None = None
    ) -> Moved:
        """Fetch an object into a file. ends: programs read the object while it comes.

        Raises NotFoundError if no node gives it; IndexDownError, OSError, TierError.
        """
        failures: list[str] = []
        for again in (False, True):
            owners = (await self._find(key, inode)).owners if again else found.owners
            for owner, lease in owners:
                source = PeerFile(lease.address, path_of(owner), self._tls)
                wanted = FetchJob(
                    source, destination, inode.size, inode.digest, inode.backing_mtime_ns
                )
                try:
                    moved = await self._run(wanted, found.chunks, ends)
                except NoFileError as error:
                    failures.append(str(error))
                except (PeerError, ConfigError) as error:  # or our own certificate is wrong
                    if isinstance(error, WrongChunkError):
                        self.spoiled.note(inode.digest)
                    self.peers.failed(owner.node, str(error))
                    self.counters["failed"] += 1
                    failures.append(str(error))
                else:
                    self.peers.gave(owner.node)
                    return moved
            if not self.lookup.forget_answer(key):
                break
        raise NotFoundError("no live node gives it: " + ("; ".join(failures) or "none has it"))

    async def _run(self, wanted: FetchJob, chunks: Chunks | None, ends: Ends | None) -> Moved:
        """Fetch in a thread or a mover. Raises PeerError, OSError, TierError."""
        if wanted.size <= SMALL:
            return await trio.to_thread.run_sync(fetching.fetch, wanted, limiter=self._threads)
        patience, destinations = patience_for(wanted.size), [wanted.destination]
        run = partial(
            self.movers.run, patience=patience, destinations=destinations, limiter=self._limiter
        )
        if chunks is None or ends is None:
            return await run(fetching.fetch, wanted)
        return await run(fetching.stream, wanted, chunks, ends)


def path_of(owner: Owner) -> str:
    """The path at which an owner's nginx serves its file."""
    ino = int(owner.file.partition(".")[0], 16)
    return f"/{owner.tier}/{ino % FANOUT:02x}/{owner.file}"
