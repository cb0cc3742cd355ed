"""Computes the digests of sealed objects, for their announcement.

Contract: `begin` never waits, and computes a version's digests once at a time, in a mover: that of
the whole if only RAM has the object, and those of the chunks of a large object. `announce` learns
of the end. Small objects that wait share a job, and a write of the catalog: a job of its own would
take a millisecond for each, which a writer of small files notices. While a writer has flushed the
file and not closed it yet, an object is tried again for some 4 s. An object that stays without a
digest is not in the pool. A large one that stays without the digests of its chunks comes to other
nodes as a whole.
"""

import logging
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import trio

from kvfs.catalog import Inode
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.pool.chunk_digests import ChunkDigests
from kvfs.core.shared_work import start_task
from kvfs.errors import KvfsError
from kvfs.movement.movers import Moved, MoverPool, SourceChangedError, patience_for
from kvfs.movement.weighing import Weighed, weigh
from kvfs.s3.errors import SourceError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

AT_ONCE = 4  # jobs
SMALL, GROUP = 256 << 10, 64  # bytes of an object that shares a job; objects of a job
TRIES, WRITER_S = 20, 0.02  # of a digest while a writer has the object; some 4 s in all

_Found = Moved | Weighed | Exception


@dataclass(eq=False, slots=True)
class _Pending:
    """An object without digests. `inode` is a copy of its record."""

    inode: Inode
    tier: Tier
    tries: int = 0
    problem: str = "it was written meanwhile"

    @property
    def path(self) -> str:
        return self.tier.path(self.inode.ino, self.inode.version)


class Digests:
    """The digests of one mount that are under way."""

    def __init__(
        self,
        transfers: TierTransfers,
        movers: MoverPool,
        chunks: ChunkDigests,
        announce: Callable[[int], None],
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.movers = movers
        self.chunks = chunks
        self._announce = announce
        # When each began, by inode and version, the oldest first. A dict would find that slowly.
        self._under_way: OrderedDict[tuple[int, int], float] = OrderedDict()
        self._waiting: deque[_Pending] = deque()
        self._jobs = 0

    @property
    def since(self) -> float:
        """Trio's time since when an object waits for its digests; inf if none does."""
        return next(iter(self._under_way.values()), math.inf)

    def begin(self, inode: Inode, tier: Tier) -> None:
        """Compute the digests of an object from its copy in a tier, in the background."""
        if (inode.ino, inode.version) not in self._under_way:
            self._under_way[inode.ino, inode.version] = trio.current_time()
            self._put(_Pending(inode.copy(), tier))

    def _put(self, one: _Pending) -> None:
        self._waiting.append(one)
        if self._jobs < AT_ONCE:
            self._jobs += 1
            start_task("digests for the pool", self._work)

    async def _work(self) -> None:
        """Compute what waits."""
        try:
            while self._waiting:
                await self._compute(self._take())
        finally:
            self._jobs -= 1

    def _take(self) -> list[_Pending]:
        """The objects of one job: those that wait longest."""
        group = [self._waiting.popleft()]
        if group[0].inode.size > SMALL:
            return group
        while self._waiting and len(group) < GROUP and self._waiting[0].inode.size <= SMALL:
            group.append(self._waiting.popleft())
        return group

    async def _compute(self, group: Sequence[_Pending]) -> None:
        wanted = [one for one in group if self._is_wanted(one)]
        try:
            if wanted:
                self._enter(wanted, await self._read(wanted))
        except KvfsError as error:
            for one in wanted:
                self._give_up(one, logging.WARNING, error)

    def _is_wanted(self, one: _Pending) -> bool:
        """Whether an object needs its digests now, and can have them."""
        ino, version = one.inode.ino, one.inode.version
        current = self.transfers.still_current(ino, version)
        if current is None and self._has_version(ino, version):
            self._again(one)  # its writer has flushed it, and not closed it yet
        elif current is None or (current.digest and not self.chunks.lack(current)):
            self._end(ino, version)
        else:
            return True
        return False

    async def _read(self, wanted: Sequence[_Pending]) -> Sequence[_Found]:
        """Read objects through. Raises TierError."""
        first = wanted[0].inode
        if len(wanted) == 1 and self.chunks.lack(first):
            patience = patience_for(first.size)
            try:
                return [await self.movers.run(weigh, wanted[0].path, first.size, patience=patience)]
            except (SourceChangedError, SourceError, OSError) as error:
                return [error]
        items = [(one.path, one.inode.size, one.inode.sparse) for one in wanted]
        return await self.movers.read_all_through(items, [one.inode.data for one in wanted])

    def _enter(self, wanted: Sequence[_Pending], results: Sequence[_Found]) -> None:
        """Record digests, in one batch. The change of a record announces it. CatalogError."""
        with self.ledger.catalog.batch() as batch:
            for one, found in zip(wanted, results, strict=True):
                current = self.transfers.still_current(one.inode.ino, one.inode.version)
                if isinstance(found, Exception):
                    one.problem = str(found)
                    self._again(one)
                elif current is None or found.mtime_ns != current.backing_mtime_ns:
                    self._again(one)
                else:
                    if isinstance(found, Weighed):
                        same = current.digest in {b"", found.digest}
                        self.chunks.note(current, found.chunks if same else None)
                    batch.change(current)
                    current.digest = current.digest or found.digest
                    batch.put(current)
                    batch.then(partial(self._end, current.ino, current.version))

    def _again(self, one: _Pending) -> None:
        """Try an object once more, a while later."""
        one.tries += 1
        if one.tries == TRIES:
            self._give_up(one, logging.INFO, one.problem)
        else:
            start_task("a digest for the pool", partial(self._later, one))

    async def _later(self, one: _Pending) -> None:
        await trio.sleep(one.tries * WRITER_S)
        self._put(one)

    def _give_up(self, one: _Pending, level: int, problem: object) -> None:
        inode = one.inode
        log.log(level, "%s is not in the pool: %s", self.ledger.catalog.named(inode.ino), problem)
        self._end(inode.ino, inode.version)
        if self.chunks.lack(inode):
            self.chunks.note(inode, None)
            current = self.ledger.table.inode(inode.ino)
            if current is not None and current.digest:
                self._announce(inode.ino)

    def _end(self, ino: int, version: int) -> None:
        self._under_way.pop((ino, version), None)

    def _has_version(self, ino: int, version: int) -> bool:
        now = self.ledger.table.inode(ino)
        return now is not None and now.version == version and bool(now.links)
