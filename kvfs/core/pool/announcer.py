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

    @classmethod
    def of(
        cls, inode: Inode, key: str, *, shared: bool = True, other: Unlinked | None = None
    ) -> "_Told":
        itself = Unlinked(key, inode.digest, inode.backing_mtime_ns)
        return cls(key, inode.version, inode.digest, other or itself, inode.links[0], shared)

    def is_still(self, inode: Inode, key: str | None) -> bool:
        """Whether an object has the same content and key yet."""
        return (inode.version, inode.digest, key) == (self.version, self.digest, self.key)

    def leaves(self, ino: int, batch: Batch) -> bool:
        """Whether an object loses its content or its name in a batch."""
        inode = batch.inode(ino)
        if inode is None or (inode.version, inode.digest) != (self.version, self.digest):
            return True
        return self.link not in inode.links or batch.renames(*self.link)


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
        self.announced: dict[int, int] = {}  # inodes, and which version of each
        self.bytes = 0  # of the announced objects
        self.counters = Counter(
            {"announced": 0, "withdrawn": 0, "unlinked": 0, "conflicts": 0, "stale": 0}
        )
        self._sizes: dict[int, int] = {}
        # Announced before the present change, or loss of the index
        self._earlier: dict[int, int] = {}
        self._changed: dict[int, float] = {}  # when each object changed first; the oldest first
        # Sealed by a FLUSH, and not released yet. No record changes at the release.
        self._flushed: dict[int, float] = {}
        self._told: dict[int, _Told] = {}
        # Modes and owners before the present changes, also of objects that only other nodes have
        self._attributes: dict[int, tuple[int, int, int]] = {}
        self._others: dict[int, Unlinked] = {}  # what has the names of objects in conflict
        self._began_ns = time.time_ns() - CLOCK_STEP_NS
        self._telling_since = math.inf  # trio's time of the oldest change in this turn
        self._in_turn: set[int] = set()  # objects whose state the index is being told
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
        ours = ino in self.announced or ino in self._in_turn
        other = self._others.get(ino)
        tells = (ours or other or inode.in_pool or ino in self.fetched) and ino not in self._told
        notes = inode.sealed and ino not in self._attributes
        known = self.ledger.catalog.inode(ino) if tells or notes else None
        if notes and known is not None:
            self._attributes[ino] = _attributes(known)
        if tells:
            key = None if known is None else self.entries.key(known)
            # A file being written has no digest: the index has nothing of it.
            if known is not None and known.digest and key is not None:
                shared = self.entries.is_shared(known)
                self._told[ino] = _Told.of(known, key, shared=shared, other=other)
                self.entries.leaving.changes(key, ino)
        self._changed.setdefault(ino, trio.current_time())
        self._wake.set()

    def committing(self, batch: Batch) -> None:
        """Write the names that programs take into their batch: the next daemon must know them."""
        for ino in batch.inos() if self._told else ():
            before = self._told.get(ino)
            if before is None or not before.shared or ino in batch.dropped:
                continue
            if ino not in self._withdrawn and before.leaves(ino, batch):
                self.entries.leaving.leaves(before.indexed, batch)

    def withdrawn(self, ino: int) -> None:
        """Learn that kvfs itself drops an object: its name is not free for other objects."""
        if ino in self._told or ino in self.announced or ino in self._in_turn:
            self._withdrawn.add(ino)
        if (before := self._told.get(ino)) is not None:
            self.entries.leaving.stays(before.key)

    def moved(self, directory: int, folder: str) -> None:
        """Learn that a directory whose names `folder` listed has another path."""
        start_task("the new names of a directory", partial(self._follow, directory, folder))

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
                elif (key := self.entries.key(inode)) is not None:
                    if inode.ino in self.announced and not self.entries.is_shared(inode):
                        told = _Told.of(inode, key, shared=False)
                        self._told.setdefault(inode.ino, told)
                    self.announce(inode.ino)
            await trio.sleep(REBUILD_PAUSE)

    async def _forget(self, ino: int) -> None:
        """Forget the name of an object that only other nodes have."""
        try:
            async with self.ledger.table.locked(ino):
                self.entries.forget(ino)
        except KvfsError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)

    async def _follow(self, directory: int, folder: str) -> None:
        """Note all announced objects below a directory as changed, with their keys of before."""
        catalog, waiting = self.ledger.catalog, [(directory, folder)]
        while waiting:
            at, before = waiting.pop()
            cookie = 0
            while entries := catalog.entries_after(at, cookie, STEP):
                cookie = entries[-1].cookie
                for entry in entries:
                    inode, name = self.ledger.table.inode(entry.ino), escape(entry.name)
                    if inode is not None and inode.is_dir:
                        waiting.append((inode.ino, f"{before}{name}/"))
                    elif inode is not None and inode.ino in self.announced:
                        told = _Told.of(inode, f"{before}{name}")
                        self._told.setdefault(inode.ino, told)
                        self.entries.leaving.changes(told.key, inode.ino)
                        self.announce(inode.ino)
                await trio.lowlevel.checkpoint()

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
        self._sizes.clear()
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
        self._in_turn.update(inos)
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
        inos: Iterable[int],
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
            if inode is None:
                self.fetched.pop(ino, None)
                self._earlier.pop(ino, None)
                self._attributes.pop(ino, None)
            else:
                here.add(ino)
            before = told.get(ino)
            wanted = None if inode is None else self._wanted(inode, before)
            if before is not None:
                stays = inode is not None and before.is_still(inode, self.entries.key(inode))
                if not stays and before.shared and ino not in dropped:
                    gone[ino] = before
                elif not (stays and wanted is not None) and ino in self.announced:
                    left.append(before.key)
            if inode is None or ino not in attributes:
                changed = False
            else:
                changed = attributes[ino] != _attributes(inode)
            if wanted is not None:
                new.append((ino, wanted._replace(changed=changed)))
            elif inode is not None and inode.in_pool and changed:
                self._attributes.setdefault(ino, attributes[ino])  # told with the copy
        unlinked = await self.index.unlink([before.indexed for before in gone.values()])
        await self._unlist([before.key for before in gone.values()], unlinked)
        for ino, before in told.items():
            again = self._told.get(ino)  # it has changed once more meanwhile
            if again is None or again.key != before.key:
                self.entries.leaving.told(before.indexed, ino, gone=ino in gone)
        await self._unlist(left, await self.index.withdraw(self.peers.me().node, left))
        for ino in told:
            if ino in gone or ino not in here:
                self._others.pop(ino, None)
            if (version := self.announced.pop(ino, None)) is not None and ino in here:
                self._earlier[ino] = version
            self.bytes -= self._sizes.pop(ino, 0)
        self.counters["unlinked"] += len(gone)
        self.counters["withdrawn"] += len(left)
        await self._announce(new)
        self._save_left()

    def _save_left(self) -> None:
        """Write the names that left without a batch of their own, as below a renamed directory."""
        try:
            self.entries.leaving.save()
        except CatalogError as error:
            log.error("names that left the pool are not in the catalog yet: %s", error)

    def _wanted(self, inode: Inode, before: _Told | None) -> Announcement | None:
        """The announcement of an object as it is now; None if it belongs to this node only.

        before: the announced state before the change.
        """
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
        fresh = self._is_fresh(inode) or (before is not None and before.key != key)
        return Announcement(key, facts_of(inode, model), owner, fresh)

    def _is_fresh(self, inode: Inode) -> bool:
        """Whether a program has written the object here, and the index has never had it.

        An object is announced again after each change of its record, as after its copy to NVMe.
        Another node may have unlinked it meanwhile. This daemon does not know what the index has
        of objects from before its start.
        """
        known = (self.fetched, self.announced, self._earlier)
        return inode.backing_mtime_ns >= self._began_ns and not any(
            versions.get(inode.ino) == inode.version for versions in known
        )

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
                self.announced[ino] = int(wanted.owner.file.partition(".")[2], 16)
                self._earlier.pop(ino, None)
                self._others.pop(ino, None)
                self.lookup.is_there(wanted.key)
                self.entries.leaving.announced(wanted.key, wanted.facts)
                self.bytes += wanted.facts.size - self._sizes.get(ino, 0)
                self._sizes[ino] = wanted.facts.size
                self.counters["announced"] += 1
                names += self._way(wanted.key)
            elif answer == "gone" or (not wanted.fresh and ino in self.fetched):
                self.let_go(ino, wanted.facts.digest)  # it came from the pool, and is older
            else:
                await self._meet_other(ino, wanted)
        await self.index.list_names(names)

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
            self.ledger.removals.drop(inode, "stale")
        except KvfsError as error:
            log.error("%s keeps its name: %s", self.ledger.catalog.named(ino), error)

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
