"""Announces the objects of this node in the index, and takes them back.

Contract: `run` runs as long as the mount. `changing` learns of each record before it changes. A
turn compares what the index was told of an object with what is true now, so it does not matter
which operation changed the object, nor how often. An object is announced once it has its digest; a
mover computes the digest of an object that only RAM has.

- An object that kvfs dropped by itself is *withdrawn*: other nodes keep theirs.
- An object that a program unlinked, renamed or rewrote is *unlinked* for all nodes.
- An object in a namespace with `pool=off` is withdrawn, whatever a program does with it.
- If the index has another object by the name, this node keeps its own to itself (`conflict`). But
  an object that is not fresh goes if the other one is later. If a program unlinks, renames or
  rewrites an object in conflict, the other one loses the name for all nodes.
- If a program changes mode or owner of an object, they replace those in the index.
- An object that was written since the daemon's start is *fresh* until the index has it. Only a
  fresh one, or a later one, may take a name that was unlinked.

While the index is down, changes wait, and the next turn sends them. After the index has lost its
data, all objects are announced again, the newest first, STEP in each turn of the loop.
"""

import logging
import math
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import trio
import trio.lowlevel

from kvfs.catalog import Batch, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.pool.digests import Digests
from kvfs.core.pool.entries import facts_of
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.pool.news import News
from kvfs.core.shared_work import start_task
from kvfs.errors import CatalogError, KvfsError
from kvfs.movement.movers import MoverPool
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import LONG, Announcement, GoneEntry, Owner, Unlinked
from kvfs.s3.keys import escape
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

COLLECT_S = 0.02  # s for which changes are collected: one pipeline for many
AT_ONCE = 256  # objects in one pipeline
STEP = 256  # objects that a rebuild looks at between two turns of the loop
REBUILD_PAUSE = 0.01  # s between two steps: some 20,000 objects/s, and the loop is free
LISTED_S = 60.0  # s for which folders are believed to be in the listings
AGAIN_S = 1.0  # s after a failure of the index
CLOCK_STEP_NS = 10**7  # the clock of files may be a tick behind
DIGEST_SIZE = 16  # bytes; the digest of a file that is mostly holes has one more, and stays here


class _Told(NamedTuple):
    """An object as it was before its record changed, and what the index has by its name."""

    key: str
    version: int
    digest: bytes
    indexed: Unlinked  # the object itself, or the one that it is in conflict with
    link: tuple[int, int]  # the directory and the cookie of its first name
    shared: bool = True  # changes of its name are for all nodes
    there: str = ""  # the key at which another node may have stored it, if this node has not

    @classmethod
    def of(
        cls,
        inode: Inode,
        key: str,
        *,
        shared: bool = True,
        other: Unlinked | None = None,
        there: str = "",
    ) -> "_Told":
        indexed = other or Unlinked(key, inode.digest, inode.backing_mtime_ns)
        return cls(key, inode.version, inode.digest, indexed, inode.links[0], shared, there)

    def is_still(self, inode: Inode, key: str | None) -> bool:
        """Whether an object has the same content and key yet."""
        return (inode.version, inode.digest, key) == (self.version, self.digest, self.key)

    def leaves(self, ino: int, batch: Batch) -> bool:
        """Whether an object loses its content or its name in a batch."""
        inode = batch.inode(ino)
        if inode is None or (inode.version, inode.digest) != (self.version, self.digest):
            return True
        return self.link not in inode.links or batch.renames(*self.link)


class Indexed(NamedTuple):
    """An object of this node, as the index has it."""

    version: int
    size: int
    folder: str  # of its key there; the whole key if it is a hash of a long name


class Announcer:
    """Announces the objects of one mount as those of `node`."""

    def __init__(
        self,
        transfers: TierTransfers,
        lookup: PoolLookup,
        movers: MoverPool,
        fetched: dict[int, int],
        news: News,
    ) -> None:
        """fetched: the versions of inodes that came from other nodes in this session."""
        self.ledger: Ledger = transfers.ledger
        self.transfers = transfers
        self.lookup = lookup
        self.entries = lookup.entries
        self.index = lookup.index
        self.peers = lookup.peers
        self.digests = Digests(transfers, movers)
        self.fetched = fetched
        self.news = news
        self.announced: dict[int, Indexed] = {}  # by inode
        self.bytes = 0  # of the announced objects
        self.counters = Counter(
            {"announced": 0, "withdrawn": 0, "unlinked": 0, "conflicts": 0, "stale": 0}
        )
        # Announced before the present change, or loss of the index
        self._earlier: dict[int, Indexed] = {}
        self._folders: dict[str, str] = {}  # each folder of `Indexed` once
        self._changed: dict[int, float] = {}  # when each object changed first; the oldest first
        # Sealed by a FLUSH, and not released yet. No record changes at the release.
        self._flushed: dict[int, float] = {}
        self._told: dict[int, _Told] = {}
        self._taken: set[int] = set()  # lost a name here, and the index does not have the next one
        # Modes and owners before the present changes, also of objects that only other nodes have
        self._attributes: dict[int, tuple[int, int, int]] = {}
        self._others: dict[int, Unlinked] = {}  # what has the names of objects in conflict
        self._began_ns = time.time_ns() - CLOCK_STEP_NS
        self._telling_since = math.inf  # trio's time of the oldest change in this turn
        # Objects whose state the index is being told, and the keys that it gets of them, or "".
        self._in_turn: dict[int, str] = {}
        self._withdrawn: set[int] = set()
        # Folders whose way from the top is in the listings, and trio's time of the first of them.
        # Nodes take folders without names out of the listings.
        self._listed: set[str] = set()
        self._listed_since = -math.inf
        self._wake = trio.Event()
        self._rebuild = False
        self._logged = False  # that changes wait

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest change that the index does not know; 0 without one."""
        first = min(next(iter(self._changed.values()), math.inf), self._telling_since)
        return max(0.0, trio.current_time() - first)

    # What changes

    def changing(self, inode: Inode) -> None:
        """Learn of a record that is about to change."""
        if not inode.is_file:
            return
        ino = inode.ino
        tells = ino not in self._told and self._may_be_indexed(inode)
        notes = inode.sealed and ino not in self._attributes
        known = self.ledger.catalog.inode(ino) if tells or notes else None
        if notes and known is not None:
            self._attributes[ino] = _attributes(known)
        if tells and known is not None:
            self._note_told(known, shared=self.entries.is_shared(known))
        self.announce(ino)

    def _may_be_indexed(self, inode: Inode) -> bool:
        """Whether the index may have an object, perhaps since before the daemon's start."""
        ino = inode.ino
        return (
            inode.in_pool
            or inode.in_bucket  # other nodes may have copies
            or inode.backing_mtime_ns < self._began_ns
            or any(ino in one for one in (self.announced, self._in_turn, self._earlier))
            or ino in self._others
            or ino in self.fetched
        )

    def _note_told(self, known: Inode, *, shared: bool = True) -> None:
        """Note what the index has of an object, before it learns of a change.

        known: its record before the change.
        """
        ino, other = known.ino, self._others.get(known.ino)
        key = self._key_in_index(known) if other is None else other.key
        # A file being written has no digest: the index has nothing of it.
        if ino in self._told or not known.digest or not known.links or key is None:
            return
        there = self._elsewhere(known, key)
        self._told[ino] = _Told.of(known, key, shared=shared, other=other, there=there)
        self.entries.leaving.changes(key, ino)

    def _key_in_index(self, inode: Inode) -> str | None:
        """The key by which the index has an object, or gets it in this turn; else its key now.

        A directory above may have another name since then.
        """
        if key := self._in_turn.get(inode.ino):
            return key
        indexed = self.announced.get(inode.ino) or self._earlier.get(inode.ino)
        if indexed is None:
            return self.entries.key(inode)
        found = self.ledger.catalog.first_name(inode)
        if found is None or not indexed.folder.endswith("/"):
            return indexed.folder if found else None
        return indexed.folder + escape(found[1].name)

    def _is_told(self, ino: int) -> bool:
        """Whether the index has an object of this node, or is being told of it."""
        return ino in self.announced or ino in self._in_turn

    def committing(self, batch: Batch) -> None:
        """Write the names that programs take into their batch: the next daemon must know them."""
        for ino in batch.dropped:
            self._note_dropped(ino, batch)
        for ino in batch.inos() if self._told else ():
            before = self._told.get(ino)
            if before is None or not before.shared or ino in batch.dropped:
                continue
            if ino not in self._withdrawn and before.leaves(ino, batch):
                self.entries.leaving.leaves(before.indexed, batch)
                self._delete_elsewhere(before, batch)
                batch.then(partial(self._told.__setitem__, ino, before._replace(there="")))

    def _elsewhere(self, inode: Inode, key: str) -> str:
        """The key at which another node may have stored an object; "" if this node has, or none."""
        ino, dirty, bucket = inode.ino, self.ledger.dirty, self.ledger.tiers.bucket
        if not bucket.mounted or not bucket.shared or dirty.stored(ino) is not None:
            return ""
        if ino in dirty and ino not in self.fetched and ino not in self._others:
            return ""  # a program has written it here, and no other node uploads it
        if not self.ledger.namespaces.of(inode).takes(bucket):
            return ""
        return self.entries.key_in(bucket.keys, key)

    def _delete_elsewhere(self, left: _Told, batch: Batch) -> None:
        """Delete an object that another node has stored, once: that node may be dead."""
        if left.there:
            digest = left.indexed.digest
            self.ledger.dirty.superseded.delete_of_digest(left.there, digest, batch)

    def _note_dropped(self, ino: int, batch: Batch) -> None:
        """Hide earlier objects of a name that other nodes may have, if kvfs drops a later one."""
        known = self.ledger.catalog.inode(ino)
        if known is None or not known.is_file or known.in_pool or ino in self.fetched:
            return
        key, leaving = self.entries.key(known), self.entries.leaving
        if key is not None and (ino in self._others or leaving.may_be_unseen(key)):
            leaving.drops(key, known.backing_mtime_ns, batch)

    def withdrawn(self, ino: int) -> None:
        """Learn that kvfs itself drops an object: its name is not free for other objects."""
        if ino in self._told or self._is_told(ino):
            self._withdrawn.add(ino)
        if (before := self._told.get(ino)) is not None:
            self.entries.leaving.stays(before.key)

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
                    if inode.ino in self.announced and not self.entries.is_shared(inode):
                        self._note_told(inode, shared=False)
                    self.announce(inode.ino)
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
                    elif inode is not None and not inode.in_pool and self._may_be_indexed(inode):
                        self._note_told(inode)
                        self.announce(inode.ino)
                await trio.lowlevel.checkpoint()

    def settled(self, ino: int, key: str) -> Indexed | None:
        """An announced object as the index has it by this key; None while it changes.

        While a name is taken back and given again, the index says that it is gone.
        """
        waits = any(ino in one for one in (self._changed, self._told, self._in_turn, self._taken))
        indexed = self.announced.get(ino)
        if waits or indexed is None:
            return None
        folder, _ = self.entries.folder_of(key) or (key, "")
        return indexed if indexed.folder == folder else None

    def has_new_attributes(self, ino: int) -> bool:
        """Whether the mode or owner of an object may differ from what the index was told."""
        return ino in self._attributes

    def keep_attributes(self, ino: int) -> None:
        """Learn that the mode and owner of an object are those of the index."""
        self._attributes.pop(ino, None)

    def announce(self, ino: int) -> None:
        """Tell the index of an object again."""
        self._changed.setdefault(ino, trio.current_time())
        self._wake.set()

    def announce_all(self) -> None:
        """Announce all objects again: the index has lost its data, or this is the start."""
        self._rebuild = True
        self._wake.set()

    # Turns

    async def run(self) -> None:
        """Tell the index of changes, for ever."""
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            if self._rebuild:
                self._rebuild = False
                start_task("the announcement of all objects", self._announce_all)
            await trio.sleep(COLLECT_S)
            while self._changed:
                inos = [ino for ino, _ in zip(self._changed, range(AT_ONCE), strict=False)]
                since = {ino: self._changed.pop(ino) for ino in inos}
                self._telling_since = next(iter(since.values()))
                try:
                    await self._turn(inos)
                    self._logged = False
                except IndexDownError as error:
                    level = logging.DEBUG if self._logged else logging.WARNING
                    log.log(level, "the pool learns later of changes here: %s", error)
                    self._logged = True
                    self._changed = {**since, **self._changed}
                    await trio.sleep(AGAIN_S)
                finally:
                    self._telling_since = math.inf
            if self._flushed:
                self._changed, self._flushed = self._flushed, {}
                self._wake.set()

    async def _announce_all(self) -> None:
        """Tell of all names that left, and note all objects as changed, the newest first."""
        start_task("the names that left", self._unlink_again)
        self._earlier |= self.announced
        self.announced.clear()
        self._folders.clear()
        self.bytes = 0
        self._listed.clear()
        inos, at, catalog = array("Q"), 0, self.ledger.catalog
        while found := catalog.inodes_after(at, STEP):
            inos.extend(inode.ino for inode in found if inode.is_file)
            at = found[-1].ino
            await trio.sleep(REBUILD_PAUSE)
        for count, ino in enumerate(reversed(inos), 1):
            self._changed.setdefault(ino, trio.current_time())
            if count % STEP == 0 or count == len(inos):
                self._wake.set()
                await trio.sleep(REBUILD_PAUSE)

    async def _unlink_again(self) -> None:
        """Take back the names that left: other nodes may announce such objects again."""
        left = list(self.entries.leaving.recent())
        while left:
            try:
                await self.index.unlink(left[:AT_ONCE])
                del left[:AT_ONCE]
            except IndexDownError as error:
                log.debug("names that left are told again later: %s", error)
                await trio.sleep(AGAIN_S)

    async def _turn(self, inos: Sequence[int]) -> None:
        """Tell the index of some objects. Raises IndexDownError; then they are told again."""
        told = {ino: self._told.pop(ino) for ino in inos if ino in self._told}
        before = {ino: self._attributes.pop(ino) for ino in inos if ino in self._attributes}
        dropped = self._withdrawn & told.keys()
        self._withdrawn -= dropped
        self._in_turn.update(dict.fromkeys(inos, ""))
        try:
            await self._tell(inos, told, dropped, before)
        except IndexDownError:
            self._attributes.update(before)
            self._told.update(told)  # the index knows these, and none of the later states
            self._withdrawn |= dropped
            raise
        finally:
            self._in_turn.clear()

    async def _tell(
        self,
        inos: Sequence[int],
        told: Mapping[int, _Told],
        dropped: Collection[int],
        attributes: Mapping[int, tuple[int, int, int]],
    ) -> None:
        """Take back what is not true any more, and then announce what is.

        told: the announced states before the changes. dropped: those that kvfs itself dropped.
        attributes: modes and owners before the changes.
        """
        gone: dict[int, _Told] = {}
        here: set[int] = set()
        left: list[str] = []
        new: list[tuple[int, Announcement]] = []
        for ino in inos:
            inode = self.ledger.table.inode(ino)
            if inode is not None:
                here.add(ino)
            before = told.get(ino)
            stays = (
                before is not None
                and inode is not None
                and before.is_still(inode, self.entries.key(inode))
            )
            if before is not None and not stays and before.shared and ino not in dropped:
                gone[ino] = before
                self._taken.add(ino)
            wanted = None if inode is None else self._wanted(inode)
            if before is not None and ino in self.announced and ino not in gone:
                left += [] if stays and wanted is not None else [before.key]
            changed = (
                inode is not None and ino in attributes and attributes[ino] != _attributes(inode)
            )
            if inode is not None and wanted is not None:
                new.append((ino, wanted._replace(changed=changed)))
                self._in_turn[ino] = wanted.key
            elif inode is not None and inode.in_pool and changed:
                self._attributes.setdefault(ino, attributes[ino])  # told with the copy
        unlinked = await self.index.unlink([before.indexed for before in gone.values()])
        await self._unlist([before.key for before in gone.values()], unlinked)
        for ino, before in told.items():
            again = self._told.get(ino)  # it has changed once more meanwhile
            if again is None or again.key != before.key:
                self.entries.leaving.told(before.indexed, ino, gone=ino in gone)
        await self._unlist(left, await self.index.withdraw(self.peers.me().node, left))
        for ino in inos:
            if ino not in here:
                self._forget_object(ino)
        for ino in told:
            if ino in gone:
                self._others.pop(ino, None)
            if (known := self.announced.pop(ino, None)) is not None:
                self.bytes -= known.size
                if ino in here:
                    self._earlier[ino] = known
        self.counters["unlinked"] += len(gone)
        self.counters["withdrawn"] += len(left)
        await self._announce(new)
        self._save_left(gone.values())

    def _save_left(self, gone: Iterable[_Told]) -> None:
        """Write the names that left without a batch of their own, as below a renamed directory."""
        try:
            if elsewhere := [one for one in gone if one.there]:
                with self.ledger.catalog.batch() as batch:
                    for one in elsewhere:
                        self._delete_elsewhere(one, batch)
            self.entries.leaving.save()
        except CatalogError as error:
            log.error("names that left the pool are not in the catalog yet: %s", error)

    def _forget_object(self, ino: int) -> None:
        """Forget an object that is not here any more, of which the index knows."""
        for known in (self.fetched, self._earlier, self._others):
            known.pop(ino, None)
        self._attributes.pop(ino, None)
        self._taken.discard(ino)

    def _wanted(self, inode: Inode) -> Announcement | None:
        """The announcement of an object as it is now; None if it belongs to this node only."""
        ledger = self.ledger
        if not inode.is_file or not inode.sealed or not inode.links or inode.in_pool:
            return None
        if ledger.removals.is_gone(inode) or not self.entries.is_shared(inode):
            return None
        if inode.ino in ledger.table.staging:
            self._flushed[inode.ino] = trio.current_time()
            return None
        tier = self._served(inode)
        if tier is None:
            return None
        if not inode.digest:
            self.digests.begin(inode, tier)
            return None
        key = self.entries.key(inode)
        if key is None or len(inode.digest) != DIGEST_SIZE:
            return None
        _, model = ledger.namespaces.places.models.get(inode.model, ("", ""))
        me = self.peers.me()
        owner = Owner(me.node, me.incarnation, tier.name, f"{inode.ino:x}.{inode.version:x}")
        return Announcement(key, facts_of(inode, model), owner, self._is_fresh(inode))

    def _is_fresh(self, inode: Inode) -> bool:
        """Whether a program has written or renamed the object, and the index does not have it.

        An object is announced again after each change of its record, as after its copy to NVMe.
        Another node may have unlinked it meanwhile. This daemon does not know what the index has
        of objects from before its start.
        """
        ino = inode.ino
        if ino in self._taken:
            return True
        known = [one.version for one in (self.announced.get(ino), self._earlier.get(ino)) if one]
        known.append(self.fetched.get(ino, -1))
        return inode.backing_mtime_ns >= self._began_ns and inode.version not in known

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
                self._note_announced(ino, wanted)
                self._earlier.pop(ino, None)
                self._others.pop(ino, None)
                self.lookup.is_there(wanted.key)
                self.entries.leaving.announced(wanted.key, wanted.facts)
                self.counters["announced"] += 1
                names += self._way(wanted.key)
            elif answer == "gone" or (not wanted.fresh and ino in self.fetched):
                self.let_go(ino, wanted.facts.digest)  # it came from the pool, and is older
            else:
                await self._meet_other(ino, wanted)
        await self.index.list_names(names)

    def _note_announced(self, ino: int, wanted: Announcement) -> None:
        self._taken.discard(ino)
        folder, _ = self.entries.folder_of(wanted.key) or (wanted.key, "")
        version = int(wanted.owner.file.partition(".")[2], 16)
        if (before := self.announced.get(ino)) is not None:
            self.bytes -= before.size
        folder = self._folders.setdefault(folder, folder)
        self.announced[ino] = Indexed(version, wanted.facts.size, folder)
        self.bytes += wanted.facts.size

    def _note_conflict(self, ino: int, wanted: Announcement) -> None:
        """Count an object that stays out of the pool; tell of one in each directory now and then.

        Two nodes with the same names in a directory may have many such objects.
        """
        self.counters["conflicts"] += 1
        catalog, folder = self.ledger.catalog, wanted.key.rpartition("/")[0]
        path, count = catalog.path_of(ino), self.counters["conflicts"]
        told = self.news.tell_seldom("conflict", folder, path=path, conflicts=count)
        level, named = logging.INFO if told else logging.DEBUG, catalog.named(ino)
        log.log(level, "%s is not in the pool: another object has its name there", named)

    async def _meet_other(self, ino: int, wanted: Announcement) -> None:
        """Do what follows if another object has the name.

        If no live node has that one, or all failed lately, this node frees the name. If this one
        had the name earlier, it goes. Else it stays out of the pool.
        """
        (entry,) = await self.index.find([wanted.key], patience=LONG)
        if isinstance(entry, GoneEntry):
            self.announce(ino)
            return
        if entry is None:  # no entry that kvfs would have written
            self._note_conflict(ino, wanted)
            return
        other = Unlinked(wanted.key, entry.facts.digest, entry.facts.mtime_ns)
        if not await self.peers.alive(entry):
            # A node that seems dead may only lack its lease for a moment, and keeps its object.
            await self.index.unlink([other], remembered=0)
            self.announce(ino)
        elif not wanted.fresh and other.mtime_ns > wanted.facts.mtime_ns:
            self.let_go(ino, wanted.facts.digest)
        elif self._others.get(ino) != other:  # else it was counted
            self._others[ino] = other
            self._note_conflict(ino, wanted)

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

    def _way(self, key: str) -> list[tuple[str, str]]:
        """The listings of a key: its own name, and the directories above it that are new."""
        found = self.entries.folder_of(key)
        if found is None:
            return []
        names, (folder, _) = [found], found
        if trio.current_time() - self._listed_since > LISTED_S:
            self._listed.clear()
            self._listed_since = trio.current_time()
        while folder not in self._listed:
            self._listed.add(folder)
            above = self.entries.above(folder)
            if above is None:
                break
            names.append(above)
            folder = above[0]
        return names

    async def _unlist(self, keys: Iterable[str], gone: Iterable[bool]) -> None:
        found = (self.entries.folder_of(key) for key, last in zip(keys, gone, strict=True) if last)
        names = [one for one in found if one is not None]
        if names:
            self._listed.clear()
        await self.index.unlist_names(names)


def _attributes(inode: Inode) -> tuple[int, int, int]:
    return inode.mode, inode.uid, inode.gid
