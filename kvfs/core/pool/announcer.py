"""Announces the objects of this node in the index, and takes them back.

Contract: `run` runs as long as the mount. `changes` knows what changed. A turn compares what the
index was told of an object with what is true now, so it does not matter which operation changed the
object, nor how often. An object is announced once it has its digest; a
mover computes the digest of an object that only RAM has.

- An object that kvfs dropped by itself is *withdrawn*: other nodes keep theirs.
- An object that a program unlinked, renamed or rewrote is *unlinked* for all nodes.
- An object in a namespace with `pool=off` is withdrawn, whatever a program does with it.
- If a program changes mode or owner of an object, they replace those in the index.
- `pool/conflicts` does what follows if the index has another object by the name.

While the index is down, changes wait, and the next turn sends them. If its memory is full, the
announcements of a turn wait, and the next changes have their turn: withdrawals make room. After
the index has lost its data, all objects are announced again, the newest first, STEP in each turn of
the loop.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import trio
import trio.lowlevel

from kvfs.catalog import Inode, keys
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.pool.changes import Changes, Turn, attributes_of
from kvfs.core.pool.chunk_digests import ChunkDigests
from kvfs.core.pool.conflicts import Conflicts
from kvfs.core.pool.digests import Digests
from kvfs.core.pool.entries import facts_of
from kvfs.core.pool.indexed import IndexedObjects
from kvfs.core.pool.listed import ListedNames
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.pool.news import News
from kvfs.core.pool.told import Told
from kvfs.core.shared_work import start_task
from kvfs.errors import CatalogError, KvfsError
from kvfs.movement.movers import MoverPool
from kvfs.pool.errors import IndexDownError, IndexFullError
from kvfs.pool.records import Announcement, Lease, Owner
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

COLLECT_S = 0.02  # s for which changes are collected: one pipeline for many
TURNS = 8  # that may overlap
AT_ONCE = 64  # objects in one pipeline: with 256, opens beside a rebuild waited twice as long
STEP = 64  # objects that a rebuild looks at between two turns of the loop
REBUILD_PAUSE = 0.002  # s between two steps: turns announce 15,000 objects/s, and the loop is free
AGAIN_S = 1.0  # s after a failure of the index
REFUSED_S = 0.05  # s after a turn that a full index refused, to the next 64 changes
DIGEST_SIZE = 16  # bytes; the digest of a file that is mostly holes has one more, and stays here


class Announcer:
    """Announces the objects of one mount as those of `node`."""

    def __init__(
        self,
        transfers: TierTransfers,
        lookup: PoolLookup,
        movers: MoverPool,
        fetched: dict[int, int],
        chunks: ChunkDigests,
        news: News,
    ) -> None:
        """fetched: the versions of inodes that came from other nodes in this session."""
        self.ledger: Ledger = transfers.ledger
        self.transfers = transfers
        self.lookup = lookup
        self.entries = lookup.entries
        self.index = lookup.index
        self.peers = lookup.peers
        self.chunks = chunks
        self.objects = IndexedObjects(self.entries, fetched)
        self.changes = Changes(self.ledger, self.entries, self.objects)
        self.digests = Digests(transfers, movers, chunks, self.changes.announce)
        self.listed = ListedNames(self.index, self.entries)
        self.conflicts = Conflicts(
            self.ledger, self.index, self.peers, self.objects, news, self.changes.announce
        )
        self.counters = Counter({"announced": 0, "withdrawn": 0, "unlinked": 0})
        self._turns: list[Turn] = []  # those that the index is being told
        self._problem: IndexDownError | None = None  # why one of them failed
        self._rebuild = False
        self._logged = False  # that changes wait

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest change that the index does not know; 0 without one.

        An object counts while it waits for its digest. One that can have none does not count.
        """
        first = min(self.digests.since, self.changes.oldest(self._turns))
        return max(0.0, trio.current_time() - first)

    def moved(self, directory: int) -> None:
        """Learn that a directory has another path."""
        start_task("the new names of a directory", partial(self._follow, directory))

    def switched(self, namespace: int) -> None:
        """Learn that a namespace takes part in the pool, or does not any more."""
        start_task("a namespace that joins or leaves the pool", partial(self._switch, namespace))

    async def _switch(self, namespace: int) -> None:
        """Announce or withdraw the objects of a namespace, and forget names of other nodes."""
        at, catalog = 0, self.ledger.catalog
        while found := catalog.inodes_after(at, STEP):
            at = found[-1].ino
            for inode in found:
                if inode.namespace != namespace or not inode.is_file:
                    continue
                if inode.in_pool and not self.entries.is_shared(inode):
                    await self._forget(inode.ino)
                elif self.entries.key(inode) is not None:
                    if inode.ino in self.objects.announced and not self.entries.is_shared(inode):
                        self.changes.note_told(inode, shared=False)
                    self.changes.announce(inode.ino)
            await trio.sleep(REBUILD_PAUSE)

    async def _forget(self, ino: int) -> None:
        """Forget the name of an object that only other nodes have."""
        try:
            async with self.ledger.table.locked(ino):
                self.entries.forget(ino)
        except KvfsError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)

    async def _follow(self, directory: int) -> None:
        """Note all objects below a directory as changed that the index has by another key."""
        catalog, waiting = self.ledger.catalog, [directory]
        while waiting:
            at, cookie = waiting.pop(), 0
            while entries := catalog.entries_after(at, cookie, STEP):
                cookie = entries[-1].cookie
                for entry in entries:
                    inode = self.ledger.table.inode(entry.ino)
                    if inode is not None and inode.is_dir:
                        waiting.append(inode.ino)
                    elif inode is not None and not inode.in_pool and self.objects.may_have(inode):
                        self.changes.note_told(inode)
                        self.changes.announce(inode.ino)
                await trio.lowlevel.checkpoint()

    def announce_all(self) -> None:
        """Announce all objects again: the index has lost its data, or this is the start."""
        self._rebuild = True
        self.changes.wake()

    # Turns

    async def run(self) -> None:
        """Tell the index of changes, for ever."""
        while True:
            await self.changes.wait()
            if self._rebuild:
                self._rebuild = False
                start_task("the announcement of all objects", self._announce_all)
            await trio.sleep(COLLECT_S)
            while self.changes.waiting:
                await self._take_turns()
                problem, self._problem = self._problem, None
                if problem is None:
                    self._logged = self._logged and bool(self.changes.refused)
                    continue
                level = logging.DEBUG if self._logged else logging.WARNING
                log.log(level, "the pool learns later of changes here: %s", problem)
                self._logged = True
                await trio.sleep(REFUSED_S if isinstance(problem, IndexFullError) else AGAIN_S)
            self.changes.try_again(TURNS * AT_ONCE)

    async def _take_turns(self) -> None:
        """Tell the index of some changes, in one turn or in several that overlap.

        While one waits for the index, the next one reads the catalog: a rebuild is a quarter
        faster. A turn that takes something back is alone: its names may have other objects now.
        """
        async with trio.open_nursery() as nursery:
            for _ in range(TURNS):
                inos = list(islice(self.changes.waiting, AT_ONCE))
                overlaps = not self.objects.in_turn.keys().isdisjoint(inos)
                if self._turns and (self.changes.told or overlaps):
                    break
                turn = self._next_turn(inos)
                self._turns.append(turn)
                nursery.start_soon(self._tell, turn)
                await trio.lowlevel.checkpoint()
                if not self.changes.waiting or turn.told or self._problem is not None:
                    break

    def _next_turn(self, inos: Sequence[int]) -> Turn:
        """Take changed objects, and compare what the index has of them with what is true."""
        turn = self.changes.take(inos)
        self.objects.in_turn.update(dict.fromkeys(inos, ""))
        self._plan(turn)
        return turn

    async def _tell(self, turn: Turn) -> None:
        """Tell the index of one turn. After a failure, the next turns tell the same again."""
        failed = True
        try:
            await self._send(turn)
            for ino in turn.since if self.changes.refused else ():
                self.changes.refused.pop(ino, None)
            failed = False
        except IndexDownError as error:
            self._problem = error
            self.changes.put_back(turn, refused=isinstance(error, IndexFullError))
        finally:
            self._turns.remove(turn)
            self.objects.end_turn(turn.since, failed=failed)

    async def _announce_all(self) -> None:
        """Tell of all names that left, and note all objects as changed, the newest first."""
        start_task("the names that left", self._unlink_again)
        self.objects.lost(self.peers.epoch)
        self.listed.lost()
        at, catalog = keys.LAST, self.ledger.catalog
        while found := catalog.numbers_before(at, STEP):
            at, now = found[-1], trio.current_time()
            for ino in found:
                self.changes.waiting.setdefault(ino, now)
            self.changes.wake()
            await trio.sleep(REBUILD_PAUSE)

    async def _unlink_again(self) -> None:
        """Take back the names that left: other nodes may announce such objects again."""
        left = list(self.entries.leaving.recent())
        while left:
            try:
                some = self.entries.leaving.still_left(left[:AT_ONCE])
                await self.index.unlink(some, again=True)
                del left[:AT_ONCE]
            except IndexDownError as error:
                log.debug("names that left are told again later: %s", error)
                await trio.sleep(AGAIN_S)
        self.entries.leaving.retold()

    def _plan(self, turn: Turn) -> None:
        """Find what is not true any more, and what is."""
        me, inodes = self.peers.me(), self.ledger.table.inodes(list(turn.since))
        keys_now = self.entries.keys_of(inode for inode in inodes.values() if inode is not None)
        for ino, inode in inodes.items():
            if inode is None:
                turn.lost.append(ino)
            before = turn.told.get(ino)
            stays = (
                before is not None
                and inode is not None
                and before.is_still(inode, keys_now.get(ino))
            )
            if before is not None and _is_gone(before, stays=stays, dropped=ino in turn.dropped):
                turn.gone[ino] = before
                self.objects.takes_back(ino)
            wanted = None if inode is None else self._wanted(inode, me, keys_now.get(ino))
            if before is not None and self.objects.may_be_there(ino) and ino not in turn.gone:
                turn.left += [] if stays and wanted is not None else [before.key]
            attributes = turn.attributes.get(ino)
            changed = (
                inode is not None and attributes is not None and attributes != attributes_of(inode)
            )
            if inode is not None and wanted is not None:
                other = None if ino in turn.gone else self.objects.others.get(ino)
                if other is not None and other.key != wanted.key:  # since before a kill
                    other = None
                if changed or other is not None:  # else a tenth of a rebuild's time
                    wanted = wanted._replace(changed=changed, other=other)
                turn.new.append((ino, wanted))
                self.objects.in_turn[ino] = wanted.key
            elif inode is not None and inode.in_pool and changed:
                self.changes.attributes.setdefault(ino, turn.attributes[ino])  # told with the copy

    async def _send(self, turn: Turn) -> None:
        """Take back what is not true any more, and then announce what is. IndexDownError."""
        node, gone, left = self.peers.me().node, turn.gone, turn.left
        taken = [one for before in gone.values() for one in before.all_left]
        unlinked = await self.index.unlink(taken)
        await self.listed.unlist([one.key for one in taken], unlinked)
        for ino, before in turn.told.items():
            again = self.changes.told.get(ino)  # it has changed once more meanwhile
            for one in before.all_left:
                if again is None or again.key != one.key:
                    self.entries.leaving.told(one, ino, gone=ino in gone)
        await self.listed.unlist(left, await self.index.withdraw(node, left))
        for ino in gone:
            self.objects.end_conflict(ino)
        for ino in turn.told:
            self.objects.is_no_more(ino)
        for ino in turn.lost:
            self.objects.forget(ino)
            self.chunks.forget(ino)
            self.changes.attributes.pop(ino, None)
        self.counters["unlinked"] += len(gone)
        self.counters["withdrawn"] += len(left)
        await self._announce(turn.new)
        self._save(gone.values())

    def _save(self, gone: Iterable[Told]) -> None:
        """Write the names that left without a batch of their own, as below a renamed directory.

        Also conflicts that began or ended.
        """
        try:
            if elsewhere := [one for one in gone if one.there]:
                with self.ledger.catalog.batch() as batch:
                    for one in elsewhere:
                        self.changes.delete_elsewhere(one, batch)
            self.entries.leaving.save()
            self.objects.save()
        except CatalogError as error:
            log.error("names that left the pool are not in the catalog yet: %s", error)

    def _wanted(self, inode: Inode, me: Lease, key: str | None) -> Announcement | None:
        """The announcement of an object as it is now; None if it belongs to this node only."""
        ledger = self.ledger
        if not inode.is_file or not inode.sealed or not inode.links or inode.in_pool:
            return None
        if ledger.removals.is_gone(inode) or not self.entries.is_shared(inode):
            return None
        if inode.ino in ledger.table.staging:
            self.changes.flushed(inode.ino)
            return None
        tier = self._served(inode)
        if tier is None:
            return None
        if not inode.digest or (self.objects.is_new(inode) and self.chunks.lack(inode)):
            self.digests.begin(inode, tier)
            return None
        if key is None or len(inode.digest) != DIGEST_SIZE:
            return None
        _, model = ledger.namespaces.places.models.get(inode.model, ("", ""))
        owner = Owner(me.node, me.incarnation, tier.name, f"{inode.ino:x}.{inode.version:x}")
        facts = facts_of(inode, model, self.chunks.of(inode))
        later = self.entries.leaving.announces(key, facts)
        return Announcement(key, facts, owner, self.objects.is_fresh(inode), later=later)

    def _served(self, inode: Inode) -> Tier | None:
        """The tier with a copy that nginx can serve, the fastest first."""
        tiers = self.ledger.tiers
        for tier in tiers.holders(inode):
            if not tiers.is_packed_in(inode, tier) and not tier.health.down:
                return tier
        return None

    async def _announce(self, new: list[tuple[int, Announcement]]) -> None:
        if not new:
            return
        answers = await self.index.announce([wanted for _, wanted in new])
        names: list[tuple[str, str]] = []
        for (ino, wanted), answer in zip(new, answers, strict=True):
            if answer == "here":
                self.objects.is_here(ino, wanted)
                self.lookup.is_there(wanted.key)
                self.entries.leaving.announced(wanted.key, wanted.facts)
                self.counters["announced"] += 1
                names += self.listed.way(wanted.key)
            elif answer == "gone" or (not wanted.fresh and self.objects.came(ino)):
                self.conflicts.let_go(ino, wanted.facts.digest)  # it is older
            else:
                await self.conflicts.meet(ino, wanted)
        await self.index.list_names(names)


def _is_gone(before: Told, *, stays: bool, dropped: bool) -> bool:
    """Whether the index is to take an object back for all nodes."""
    if not before.shared:
        return False
    return bool(before.also) or (not stays and (before.left or not dropped))
