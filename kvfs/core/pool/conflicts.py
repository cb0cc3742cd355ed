"""Objects of this node whose names the index gives to another object, or to none.

Contract: `meet` does what follows after the index has refused an announcement. `let_go` drops an
object that another node has unlinked or replaced. An object in conflict stays at this node only, as
long as the other one has the name: `IndexedObjects.others` has that one. `run` asks the index about
AT_ONCE objects in conflict every AGAIN_S seconds, in turn, and `compare` judges an answer:

- If no live node has the other one, the object is announced again, and gets the name.
- If a program has unlinked, renamed or rewritten the other one, the object goes as well: it was
  written before that. So does one that is earlier than any object that left the name. It stays if
  a node tells an index that has lost its data of an earlier unlink.
- After a loss of the index, the object counts as one that had the name. The later one stands then.

If a program here unlinks, renames or rewrites an object in conflict, the other one loses the name
for all nodes. The object that it writes then has no conflict, whatever its time.
"""

import logging
from collections import Counter
from collections.abc import Callable
from itertools import islice

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.pool.indexed import IndexedObjects
from kvfs.core.pool.news import News
from kvfs.core.pool.peers import Peers
from kvfs.errors import KvfsError
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LONG, Index
from kvfs.pool.records import Announcement, GoneEntry, PoolEntry, Unlinked

log = logging.getLogger(__name__)

AGAIN_S = 2.0  # s between two questions about objects in conflict
AT_ONCE = 64  # objects in one question: 32 requests/s of a node, however many are in conflict


class Conflicts:
    """The conflicts of one node. announce(ino): tells the index of an object again."""

    def __init__(
        self,
        ledger: Ledger,
        index: Index,
        peers: Peers,
        objects: IndexedObjects,
        news: News,
        announce: Callable[[int], None],
    ) -> None:
        self.ledger = ledger
        self.index = index
        self.peers = peers
        self.objects = objects
        self.news = news
        self.announce = announce
        self.counters = Counter({"conflicts": 0, "stale": 0})

    async def run(self) -> None:
        """Ask the index about objects in conflict, for ever."""
        while True:
            await trio.sleep(AGAIN_S)
            try:
                await self._ask()
            except IndexDownError as error:
                log.debug("objects in conflict are compared later: %s", error)

    async def _ask(self) -> None:
        """Compare some objects in conflict with the index. Raises IndexDownError."""
        others = self.objects.others
        inos = list(islice(others, AT_ONCE))
        for ino in inos:
            others[ino] = others.pop(ino)  # the others come first next time
            if self.ledger.table.inode(ino) is None:  # the daemon before this one dropped it
                self.announce(ino)
        asked = [ino for ino in inos if self._is_shared(ino)]
        entries = await self.index.find([others[ino].key for ino in asked], patience=LONG)
        for ino, entry in zip(asked, entries, strict=True):
            await self.compare(ino, entry)

    def _is_shared(self, ino: int) -> bool:
        inode = self.ledger.table.inode(ino)
        return inode is not None and self.objects.entries.is_shared(inode)

    async def compare(self, ino: int, entry: PoolEntry | GoneEntry | None) -> None:
        """Announce an object in conflict again if the other one may have lost the name.

        The index decides, as at its first announcement. Raises IndexDownError.
        """
        other, inode = self.objects.others.get(ino), self.ledger.table.inode(ino)
        if other is None or inode is None:
            return
        if not (
            isinstance(entry, PoolEntry)
            and entry.facts.digest == other.digest != inode.digest
            and await self.peers.alive(entry)
        ):
            self.announce(ino)

    def leaves(self, inode: Inode, gone: GoneEntry) -> bool:
        """Whether this node lets an object go that the index has unlinked or replaced."""
        covers = gone.covers(inode.digest, inode.backing_mtime_ns)
        if (other := self.objects.others.get(inode.ino)) is not None:
            return covers or gone.digest == other.digest
        return covers and not self.objects.is_fresh(inode)

    async def meet(self, ino: int, wanted: Announcement) -> None:
        """Do what follows if another object has the name. Raises IndexDownError.

        If no live node has that one, this node frees the name. If that one is later, this one goes
        if it had the name earlier, or was in conflict with a third one. Else it stays out of the
        pool.
        """
        (entry,) = await self.index.find([wanted.key], patience=LONG)
        if isinstance(entry, GoneEntry):
            self.announce(ino)
            return
        mine = Unlinked(wanted.key, wanted.facts.digest, wanted.facts.mtime_ns)
        if entry is None:  # it has just been withdrawn, or is none that kvfs would have written
            self._enter(ino, wanted, mine)
            return
        other = Unlinked(wanted.key, entry.facts.digest, entry.facts.mtime_ns)
        if not await self.peers.alive(entry):
            # A node that seems dead may only lack its lease for a moment, and keeps its object.
            await self.index.unlink([other], remembered=0)
            self.announce(ino)
            return
        known = self.objects.others.get(ino, other)
        later = (other.mtime_ns, other.digest) > (mine.mtime_ns, mine.digest)
        if later and not (wanted.fresh and known in {mine, other}):
            self.let_go(ino, wanted.facts.digest)
        else:
            self._enter(ino, wanted, other)

    def _enter(self, ino: int, wanted: Announcement, other: Unlinked) -> None:
        """Count an object that stays out of the pool; tell of one in each directory now and then.

        Two nodes with the same names in a directory may have many such objects.
        """
        if self.objects.others.get(ino) == other:  # it was counted
            return
        self.objects.begin_conflict(ino, other)
        self.counters["conflicts"] += 1
        catalog, folder = self.ledger.catalog, wanted.key.rpartition("/")[0]
        path, count = catalog.path_of(ino), self.counters["conflicts"]
        told = self.news.tell_seldom("conflict", folder, path=path, conflicts=count)
        level, named = logging.INFO if told else logging.DEBUG, catalog.named(ino)
        log.log(level, "%s is not in the pool: another object has its name there", named)

    def let_go(self, ino: int, digest: bytes) -> None:
        """Drop an object with this digest, because another node has unlinked or replaced it."""
        inode = self.ledger.table.inode(ino)
        if inode is None or inode.digest != digest:
            return
        if ino in self.ledger.table.busy:
            self.announce(ino)  # the answer will be the same
            return
        log.info("%s: another node has unlinked or replaced it", self.ledger.catalog.named(ino))
        self.counters["stale"] += 1
        other = self.objects.end_conflict(ino)  # the drop is to hide no later object
        try:
            self._leave_bucket(inode)
            self.ledger.removals.drop(inode, "stale", stored=False)  # the rest of a group stays
        except KvfsError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)
            if other is not None:
                self.objects.begin_conflict(ino, other)

    def _leave_bucket(self, inode: Inode) -> None:
        """Delete an object from the bucket, unless its key has another one by now.

        Its last handle may be closed much later, and must delete nothing then.
        """
        dirty = self.ledger.dirty
        if (stored := dirty.stored(inode.ino)) is not None:
            with self.ledger.catalog.batch() as batch:
                dirty.superseded.delete_of_digest(stored.key, inode.digest, batch)
            self.ledger.records.record_not_in_bucket(inode, delete=False)
