"""Objects of this node whose names the index gives to another object, or to none.

Contract: `meet` does what follows after the index has refused an announcement. `let_go` drops an
object that another node has unlinked or replaced. An object in conflict stays at this node only, as
long as the other one has the name: `IndexedObjects.others` has that one. If a program unlinks,
renames or rewrites an object in conflict, the other one loses the name for all nodes.
"""

import logging
from collections import Counter
from collections.abc import Callable

from kvfs.catalog import Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.pool.indexed import IndexedObjects
from kvfs.core.pool.news import News
from kvfs.core.pool.peers import Peers
from kvfs.errors import KvfsError
from kvfs.pool.index import LONG, Announcement, GoneEntry, Index, Unlinked

log = logging.getLogger(__name__)


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

    async def meet(self, ino: int, wanted: Announcement) -> None:
        """Do what follows if another object has the name. Raises IndexDownError.

        If no live node has that one, or all failed lately, this node frees the name. If this one
        had the name earlier, it goes. Else it stays out of the pool.
        """
        (entry,) = await self.index.find([wanted.key], patience=LONG)
        if isinstance(entry, GoneEntry):
            self.announce(ino)
            return
        if entry is None:  # no entry that kvfs would have written
            self._note(ino, wanted)
            return
        other = Unlinked(wanted.key, entry.facts.digest, entry.facts.mtime_ns)
        if not await self.peers.alive(entry):
            # A node that seems dead may only lack its lease for a moment, and keeps its object.
            await self.index.unlink([other], remembered=0)
            self.announce(ino)
        elif not wanted.fresh and other.mtime_ns > wanted.facts.mtime_ns:
            self.let_go(ino, wanted.facts.digest)
        elif self.objects.others.get(ino) != other:  # else it was counted
            self.objects.others[ino] = other
            self._note(ino, wanted)

    def _note(self, ino: int, wanted: Announcement) -> None:
        """Count an object that stays out of the pool; tell of one in each directory now and then.

        Two nodes with the same names in a directory may have many such objects.
        """
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
        try:
            self._leave_bucket(inode)
            self.ledger.removals.drop(inode, "stale", stored=False)  # the rest of a group stays
        except KvfsError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)

    def _leave_bucket(self, inode: Inode) -> None:
        """Delete an object from the bucket, unless its key has another one by now.

        Its last handle may be closed much later, and must delete nothing then.
        """
        dirty = self.ledger.dirty
        if (stored := dirty.stored(inode.ino)) is not None:
            with self.ledger.catalog.batch() as batch:
                dirty.superseded.delete_of_digest(stored.key, inode.digest, batch)
            self.ledger.records.record_not_in_bucket(inode, delete=False)
