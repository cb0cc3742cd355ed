"""The changes here that the index does not know, and what the index had before them.

Contract: `changing` learns of each record before it changes, and `committing` of each batch before
it commits: names that programs take go into that batch. `take` hands changes to a turn, the oldest
first. `put_back` takes those of a turn that failed; a later change of the same object keeps what
the index had first. An object is in `waiting`, in `refused` or in a turn, or the index knows it.
Synchronous, except for `wait`. Not for what the index is told (`announcer`).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import trio

from kvfs.catalog import Batch, Inode
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.pool.entries import PoolEntries
from kvfs.core.pool.indexed import Indexed, IndexedObjects
from kvfs.core.pool.leaving import NO_DIGEST
from kvfs.core.pool.told import Told
from kvfs.pool.records import Announcement, Unlinked


@dataclass(eq=False, slots=True)
class Turn:
    """The changes that the index is told in one turn.

    since: its objects, and when each changed. told: the announced states before the changes.
    attributes: modes and owners before these. dropped: those that kvfs itself dropped. gone: names
    to take back for all nodes. left: keys of objects that other nodes may keep. lost: objects that
    are not here. new: those to announce.
    """

    since: dict[int, float]
    told: dict[int, Told]
    attributes: dict[int, tuple[int, int, int]]
    dropped: set[int]
    gone: dict[int, Told] = field(default_factory=dict)
    left: list[str] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    new: list[tuple[int, Announcement]] = field(default_factory=list)


class Changes:
    """The changes of one mount that its index does not know.

    told: what the index had of an object before. attributes: modes and owners before the changes
    that wait, also of objects that only other nodes have.
    """

    def __init__(self, ledger: Ledger, entries: PoolEntries, objects: IndexedObjects) -> None:
        self.ledger = ledger
        self.entries = entries
        self.objects = objects
        self.waiting: dict[int, float] = {}  # when each object changed first; the oldest first
        self.told: dict[int, Told] = {}
        self.attributes: dict[int, tuple[int, int, int]] = {}
        # By a full index, the oldest first. Few of them try again, after all other changes.
        self.refused: dict[int, float] = {}
        # Sealed by a FLUSH, and not released yet. No record changes at the release.
        self._flushed: dict[int, float] = {}
        self._withdrawn: set[int] = set()
        self._wake = trio.Event()

    async def wait(self) -> None:
        """Wait for a change, or for `wake`."""
        await self._wake.wait()
        self._wake = trio.Event()

    def wake(self) -> None:
        """End `wait`."""
        self._wake.set()

    def oldest(self, turns: Iterable["Turn"]) -> float:
        """The time of the oldest change that waits or is in a turn; infinity without one."""
        changes = [self.waiting, self.refused, *(turn.since for turn in turns)]
        return min(next(iter(since.values()), math.inf) for since in changes)

    def changing(self, inode: Inode) -> None:
        """Learn of a record that is about to change."""
        if not inode.is_file:
            return
        ino = inode.ino
        if not inode.sealed:
            self.objects.writes(ino)
        # Else a seal would pay for a read of the catalog.
        may_have = self.objects.may_have(inode) or self._uploads(inode)
        tells = may_have and ino not in self.told
        notes = may_have and inode.sealed and ino not in self.attributes
        known = self.ledger.catalog.inode(ino) if tells or notes else None
        if notes and known is not None:
            self.attributes[ino] = attributes_of(known)
        if tells and known is not None:
            self.note_told(known, shared=self.entries.is_shared(known))
        self.announce(ino)

    def note_told(self, known: Inode, *, shared: bool = True) -> None:
        """Note what the index has of an object, before it learns of a change.

        known: its record before the change.
        """
        ino, other = known.ino, self.objects.others.get(known.ino)
        key = self.objects.key(known)
        if ino in self.told or not known.sealed or not known.links or key is None:
            return
        if not known.digest:  # the index has nothing of it, and other nodes at most the bucket's
            if not self._uploads(known):
                return
            other = Unlinked(key, NO_DIGEST, known.backing_mtime_ns + 1)
        there = self._elsewhere(known, key)
        self.told[ino] = Told.of(known, key, shared=shared, other=other, there=there)
        self.entries.leaving.changes(key, ino)

    def committing(self, batch: Batch) -> None:
        """Write the names that programs take into their batch: the next daemon must know them."""
        if self.objects.others or self.entries.leaving.any_unseen:  # else an eviction is cheaper
            for ino in batch.dropped:
                self._note_dropped(ino, batch)
        for ino in batch.inos() if self.told else ():
            before = self.told.get(ino)
            if before is None or not before.shared or ino in batch.dropped:
                continue
            if ino in self._withdrawn:
                continue
            if before.leaves(ino, batch):
                self.entries.leaving.leaves(before.indexed, batch)
                self.objects.leaves(ino, batch)
                self.delete_elsewhere(before, batch)
                before = before._replace(there="", left=True)
                batch.then(partial(self.told.__setitem__, ino, before))
            if (later := self._stored_since(ino, before, batch)) is not None:
                self.entries.leaving.leaves(later, batch)
                batch.then(partial(self.entries.leaving.changes, later.key, ino))
                before = before._replace(also=(*before.also, later))
                batch.then(partial(self.told.__setitem__, ino, before))

    def _stored_since(self, ino: int, before: Told, batch: Batch) -> Unlinked | None:
        """A later state that leaves in a batch, too, and that the bucket may have; or None.

        The index has not learned of it yet. But another node may have read it from the bucket.
        """
        bucket = self.ledger.tiers.bucket
        known = self.ledger.catalog.inode(ino) if bucket.mounted and bucket.shared else None
        if known is None or not known.sealed or not known.links:
            return None
        key = self.entries.key(known)
        if key is None or before.is_still(known, key):
            return None
        if not (known.in_bucket or self._uploads(known)):
            return None
        state = Told.of(known, key)
        later = state.indexed
        if not known.digest:
            later = Unlinked(key, NO_DIGEST, known.backing_mtime_ns + 1)
        return later if state.leaves(ino, batch) and later not in before.also else None

    def _uploads(self, inode: Inode) -> bool:
        """Whether other nodes may have an object from the bucket before its upload has ended."""
        bucket, superseded = self.ledger.tiers.bucket, self.ledger.dirty.superseded
        if not superseded.deletes or not bucket.shared or not inode.is_file or not inode.links:
            return False
        key = self.ledger.dirty.key(inode)
        return key is not None and superseded.uploads(key)

    def _elsewhere(self, inode: Inode, key: str) -> str:
        """The key at which another node may have stored an object; "" if this node has, or none."""
        ino, dirty, bucket = inode.ino, self.ledger.dirty, self.ledger.tiers.bucket
        if not bucket.mounted or not bucket.shared or dirty.stored(ino) is not None:
            return ""
        if ino in dirty and not (self.objects.came(ino) or ino in self.objects.others):
            return ""  # a program has written it here, and no other node uploads it
        if not self.ledger.namespaces.of(inode).takes(bucket):
            return ""
        return self.entries.key_in(bucket.keys, key)

    def delete_elsewhere(self, left: Told, batch: Batch) -> None:
        """Delete an object that another node has stored, once: that node may be dead."""
        if left.there:
            digest = left.indexed.digest
            self.ledger.dirty.superseded.delete_of_digest(left.there, digest, batch)

    def _note_dropped(self, ino: int, batch: Batch) -> None:
        """Hide earlier objects of a name that other nodes may have, if kvfs drops a later one."""
        known = self.ledger.catalog.inode(ino)
        if known is None or not known.is_file or known.in_pool or self.objects.came(ino):
            return
        key, leaving = self.entries.key(known), self.entries.leaving
        if key is not None and (ino in self.objects.others or leaving.may_be_unseen(key)):
            leaving.drops(key, known.backing_mtime_ns, batch)

    def withdrawn(self, ino: int) -> None:
        """Learn that kvfs itself drops an object: its name is not free for other objects."""
        if ino in self.told or self.objects.is_told(ino):
            self._withdrawn.add(ino)
        if (before := self.told.get(ino)) is not None:
            self.entries.leaving.stays(before.key)

    def announce(self, ino: int) -> None:
        """Tell the index of an object again."""
        self.waiting.setdefault(ino, trio.current_time())
        self.wake()

    def settled(self, ino: int, key: str) -> Indexed | None:
        """An announced object as the index has it by this key; None while it changes.

        While a name is taken back and given again, the index says that it is gone.
        """
        waits = ino in self.waiting or ino in self.told
        return None if waits else self.objects.settled(ino, key)

    def has_new_attributes(self, ino: int) -> bool:
        """Whether the mode or owner of an object may differ from what the index was told."""
        return ino in self.attributes

    def keep_attributes(self, ino: int) -> None:
        """Learn that the mode and owner of an object are those of the index."""
        self.attributes.pop(ino, None)

    def flushed(self, ino: int) -> None:
        """Learn that an object is sealed but not released: it waits for `try_again`."""
        self._flushed[ino] = trio.current_time()

    def try_again(self, count: int) -> None:
        """Let `count` of the refused objects wait again, and the flushed ones."""
        if self.refused:  # an unlink waits for these at most
            self.waiting.update(islice(self.refused.items(), count))
            self.wake()
        if self._flushed:
            self.waiting.update(self._flushed)
            self._flushed = {}
            self.wake()

    # Turns

    def take(self, inos: Sequence[int]) -> "Turn":
        """Begin a turn with changed objects."""
        told = {ino: self.told.pop(ino) for ino in inos if ino in self.told}
        turn = Turn(
            since={ino: self.waiting.pop(ino) for ino in inos},
            told=told,
            attributes={ino: self.attributes.pop(ino) for ino in inos if ino in self.attributes},
            dropped=self._withdrawn & told.keys(),
        )
        self._withdrawn -= turn.dropped
        return turn

    def put_back(self, turn: "Turn", *, refused: bool) -> None:
        """Let the changes of a failed turn wait. refused: a full index has refused them."""
        if refused:
            for ino, since in turn.since.items():
                self.refused.setdefault(ino, since)
        else:
            self.waiting = {**turn.since, **self.waiting}
        self.attributes.update(turn.attributes)
        for ino, before in turn.told.items():  # it knows these, and perhaps some later states
            later = self.told.get(ino)
            self.told[ino] = before if later is None else before.before(later)
        self._withdrawn |= turn.dropped


def attributes_of(inode: Inode) -> tuple[int, int, int]:
    """Mode and owner of an object."""
    return inode.mode, inode.uid, inode.gid
