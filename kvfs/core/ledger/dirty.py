"""Dirty objects, in the order in which their uploads are due.

Contract: a sealed object is *dirty* while the bucket lacks its bytes or its name. This is
independent of any order of eviction. The catalog stores a mark of each dirty object (`u`). It also
stores a mark of the key and version that the bucket has of an inode (`s`). Each mark changes in the
batch that changes its object. The same batch marks the bucket keys that no object needs any more
(`superseded`). An object that waits until another node gives up its name is not dirty, but
`contested`. The methods `on_...` are called in the batch of the change that they name.
All methods except `load` are synchronous. After a start `load` reads the marks, beside the first
operations. Until `load` has read a mark, `Dirty` asks the catalog for it. `Dirty` asks nothing of a
catalog that never had a bucket (`keeps_marks`).

Invariants, between any two awaits once the marks are loaded:
- An object is in the table if and only if it has a mark `u`.
- `bytes` is the sum of the sizes of the objects whose bytes the bucket lacks.
- An object without a due time has been taken by a task, which returns it by `give_back`.
Not for uploading: `core/bucket/upload/uploader.py`.
"""

import heapq
import logging
import time
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import trio

from kvfs.catalog import Batch, Catalog, Inode, Stored, keys
from kvfs.core.ledger.contested import Contested
from kvfs.core.ledger.superseded import Superseded
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

BUCKET_FACT = "bucket"  # of the catalog: the place of the bucket to which the marks belong
# A fact: "1" once kvfs has looked for all objects that were sealed before the mount had the bucket.
CAUGHT_UP = "bucket_caught_up"
# A fact: "1" once the objects whose names another node has are marked. An older kvfs did not do so.
CONTESTED_MARKED = "bucket_contested"
STEP = 128  # marks between two turns of the loop
SECOND = 10**9
SPARE_AGES = 1024


class _Entry(NamedTuple):
    sealed_ns: int
    size: int


class Dirty:
    """The table of dirty objects. `bytes`: bytes that wait for their upload."""

    def __init__(self, catalog: Catalog, namespaces: Namespaces, bucket: Bucket) -> None:
        self.catalog = catalog
        self.namespaces = namespaces
        self.bucket = bucket
        self.keeps_marks = bucket.mounted or catalog.fact(BUCKET_FACT) is not None
        self.loaded = not bucket.mounted
        self.bytes = 0
        self.changed = trio.Event()  # an object came or went; replaced by a new event each time
        self._entries: dict[int, _Entry] = {}
        self._due: dict[int, int] = {}  # when (ns) it is due; no entry while a task has it
        self._queue: list[tuple[int, int]] = []  # a heap of the due times; some are obsolete
        self._ages: list[tuple[int, int]] = []  # a heap of times of seals; some are obsolete
        self._hurry_until = 0.0
        self.superseded = Superseded(catalog, self.wake if bucket.mounted else None)
        self.contested = Contested(catalog)
        self.look_back_wanted = trio.Event()  # set: look for objects that were sealed before
        self._logged_sparse = False

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, ino: int) -> bool:
        if ino in self._entries:
            return True
        return not self.loaded and self.catalog.mark(keys.UNSTORED, ino) is not None

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._entries))

    @property
    def oldest_ns(self) -> int:
        """The time of the seal of the object that has waited longest, in ns; 0: no object waits."""
        ages = self._ages
        while ages:
            sealed_ns, ino = ages[0]
            entry = self._entries.get(ino)
            if entry is not None and entry.sealed_ns == sealed_ns:
                return sealed_ns
            heapq.heappop(ages)
        return 0

    @property
    def full(self) -> bool:
        """Whether writers have to wait: `bytes` has reached the bucket's `max_dirty_bytes`."""
        return self.bytes >= self.bucket.max_dirty_bytes

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        done, self.changed = self.changed, trio.Event()
        done.set()

    # The state of one inode

    def marked_and_due(self, ino: int) -> tuple[int, int] | None:
        """Return the times, in ns since 1970, of an object's mark and due time; None: not dirty.

        The due time is 0 while a task has taken the object, and until `load` has read the mark.
        """
        entry = self._entries.get(ino)
        if entry is not None:
            return entry.sealed_ns, self._due.get(ino, 0)
        value = None if self.loaded else self.catalog.mark(keys.UNSTORED, ino)
        return None if value is None else (keys.U64.unpack(value)[0], 0)

    def stored(self, ino: int) -> Stored | None:
        """The key and version that the bucket has of an object. Both may be older than its own."""
        value = self.catalog.mark(keys.STORED, ino) if self.keeps_marks else None
        return None if value is None else keys.stored(value)

    def key(self, inode: Inode) -> str | None:
        """The key that an object should have in the bucket; None if it should not be there."""
        name = self.namespaces.bucket_name(inode)
        if name is None or not self.wanted(inode):
            return None
        return self.bucket.keys.of(name)

    def wanted(
        self, inode: Inode, directory: Inode | None = None, name: bytes | None = None
    ) -> bool:
        """Whether an object should be in the bucket. A file that is mostly holes should not.

        A bucket stores every byte of an object: 1 TiB of holes would be 1 TiB of requests.
        directory, name: the first name of the object, if the catalog does not have it yet.
        """
        return not self._is_mostly_holes(inode) and self.wanted_ignoring_holes(
            inode, directory, name
        )

    @staticmethod
    def _is_mostly_holes(inode: Inode) -> bool:
        return inode.sparse or inode.mostly_holes

    def wanted_ignoring_holes(
        self, inode: Inode, directory: Inode | None = None, name: bytes | None = None
    ) -> bool:
        """As `wanted`, but also true for a file that is mostly holes.

        A file with a temporary name waits until its connector renames it.
        """
        namespaces = self.namespaces
        if not namespaces.of(inode).takes(self.bucket):
            return False
        if name is None:
            if (found := self.catalog.first_name(inode)) is None:
                return False
            directory, name = found[0], found[1].name
        return directory is not None and not namespaces.places.is_temporary(directory, name)

    # Changes

    def on_seal(self, inode: Inode, batch: Batch) -> None:
        """Mark an object that was sealed with new bytes."""
        if self.keeps_marks and (self.wanted(inode) or self.stored(inode.ino) is not None):
            self._mark(inode, time.time_ns(), batch)
        if self._is_mostly_holes(inode) and self.wanted_ignoring_holes(inode):
            log.log(
                logging.DEBUG if self._logged_sparse else logging.WARNING,
                "%s stays on this node only, and %s says 1: it is mostly holes, %d of %d "
                "bytes are data, and a bucket has every byte of an object (said once)",
                *(self.catalog.named(inode.ino), "user.kvfs.dirty", inode.data, inode.size),
            )
            self._logged_sparse = True

    def mark(self, inode: Inode, batch: Batch, sealed_ns: int = 0) -> None:
        """Mark an object that the bucket lacks. sealed_ns: the time of its seal; 0: not known."""
        self._mark(inode, sealed_ns or time.time_ns(), batch)

    def look_back(self, batch: Batch) -> None:
        """Look for objects that are sealed already: the bucket should have them from now on."""
        if self.keeps_marks:
            batch.set_fact(CAUGHT_UP, "")
            batch.then(self.look_back_wanted.set)

    def on_new_attributes(self, inode: Inode, batch: Batch) -> None:
        """Mark an object whose attributes changed, if the bucket has its older ones."""
        if not self.keeps_marks or not inode.in_bucket or inode.ino in self:
            return
        stored = self.stored(inode.ino)
        if stored and stored.attributes not in {"", inode.attributes} and self.wanted(inode):
            self._mark(inode, time.time_ns(), batch)

    def is_current_in_bucket(self, inode: Inode, stored: Stored | None, key: str | None) -> bool:
        """Whether the bucket has the object's bytes at this key, with its present attributes.

        stored: what `stored` returns for the object.
        """
        if not inode.in_bucket or stored is None or stored.key != key:
            return False
        return stored.attributes in {"", inode.attributes}

    def on_new_name(
        self,
        inode: Inode,
        batch: Batch,
        directory: Inode | None = None,
        name: bytes | None = None,
    ) -> None:
        """Mark or unmark an object that has a new first name, perhaps in another namespace.

        directory, name: as for `wanted`.
        """
        if not self.keeps_marks or not inode.is_file or not inode.sealed:
            return
        if self.wanted(inode, directory, name) or self.stored(inode.ino) is not None:
            known = self._entries.get(inode.ino)
            self._mark(inode, known.sealed_ns if known else time.time_ns(), batch)
        elif inode.ino in self or inode.ino in self.contested:
            self._unmark(inode.ino, batch)

    def on_new_path(self, inode: Inode, batch: Batch) -> None:
        """Mark an object if its key changes, because a directory above it was renamed."""
        if not self.keeps_marks or not inode.is_file or not inode.sealed or inode.ino in self:
            return
        stored = self.stored(inode.ino)
        if self.key(inode) != (stored.key if stored else None):
            self._mark(inode, time.time_ns(), batch)

    def on_rewrite(self, inode: Inode, batch: Batch) -> None:
        """Unmark an object that a program rewrites: until the seal there is nothing to upload."""
        inode.in_bucket = inode.in_pool = False
        if self.keeps_marks:
            self._unmark(inode.ino, batch)
            if (stored := self.stored(inode.ino)) is not None:
                batch.then(partial(self.superseded.claim, inode.ino, stored.key))

    def on_unlink(self, ino: int, batch: Batch, *, delete: bool = True) -> None:
        """Unmark an object that lost its last name. delete: delete its key, which is this node's.

        Also for an object whose key the bucket does not have any more.
        """
        if not self.keeps_marks:
            return
        stored = self.stored(ino)
        if stored is not None:
            batch.unmark(keys.STORED, ino)
            if delete:
                self.superseded.delete(stored, batch)
        self._unmark(ino, batch)
        batch.then(partial(self.superseded.disclaim, ino))

    def on_upload(self, inode: Inode, stored: Stored, batch: Batch, *, clean: bool) -> None:
        """Record an upload of an object. clean: the key is that of its present name."""
        before = self.stored(inode.ino)
        inode.in_bucket = True
        batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
        self.superseded.unmark(stored.key, batch)
        if before is not None and before.key != stored.key:
            self.superseded.delete(before, batch)
        if clean:
            self._unmark(inode.ino, batch)
            batch.then(partial(self.superseded.disclaim, inode.ino))
        else:
            batch.then(partial(self.superseded.claim, inode.ino, stored.key))
            batch.then(partial(self._lighten, inode.ino))

    def on_older_upload(self, ino: int, stored: Stored, batch: Batch) -> None:
        """Record an upload of an older version, so that the next upload may replace it."""
        before = self.stored(ino)
        if before is not None and before.key != stored.key:
            self.superseded.delete(before, batch)
        batch.mark(keys.STORED, ino, keys.stored_value(stored))
        self.superseded.unmark(stored.key, batch)
        batch.then(partial(self.superseded.claim, ino, stored.key))

    def unmark(self, ino: int, batch: Batch) -> None:
        """Unmark an object that needs no upload after all."""
        self._unmark(ino, batch)

    def contest(self, ino: int, batch: Batch) -> None:
        """Record a conflict: while another node has the name, there is nothing to upload."""
        self._unmark(ino, batch)
        self.contested.enter(ino, batch)

    def _mark(self, inode: Inode, sealed_ns: int, batch: Batch) -> None:
        self.contested.leave(inode.ino, batch)
        batch.mark(keys.UNSTORED, inode.ino, keys.U64.pack(sealed_ns))
        if self.bucket.mounted:
            value = batch.marked(keys.STORED, inode.ino)
            batch.then(partial(self._add, inode, sealed_ns, value))

    def _unmark(self, ino: int, batch: Batch) -> None:
        self.contested.leave(ino, batch)
        batch.unmark(keys.UNSTORED, ino)
        batch.then(partial(self._discard, ino))

    def _add(self, inode: Inode, sealed_ns: int, stored: bytes | None) -> None:
        """Enter an object. stored: the mark of its key and version in the bucket."""
        self._discard(inode.ino)
        if stored is not None:
            self.superseded.claim(inode.ino, keys.stored(stored).key)
        size = 0 if inode.in_bucket else inode.size  # 0: the bucket has the bytes, with an old name
        self._entries[inode.ino] = _Entry(sealed_ns, size)
        heapq.heappush(self._ages, (sealed_ns, inode.ino))
        self.bytes += size
        through = self.namespaces.of(inode).settings.write == "through"
        delay = 0.0 if through or self._hurrying() else self.bucket.delay
        self.set_due(inode.ino, sealed_ns + int(delay * SECOND))
        self.wake()

    def _lighten(self, ino: int) -> None:
        """Count no bytes of an object any more: the bucket has the bytes, but lacks the name."""
        entry = self._entries.get(ino)
        if entry is not None:
            self.bytes -= entry.size
            self._entries[ino] = entry._replace(size=0)
            self.wake()

    def _discard(self, ino: int) -> None:
        entry = self._entries.pop(ino, None)
        self._due.pop(ino, None)
        if entry is not None:
            self.bytes -= entry.size
            self._forget_ages()
            self.wake()

    def _forget_ages(self) -> None:
        """Remove the obsolete entries of `_ages` if there are many: they follow an old entry."""
        if len(self._ages) > SPARE_AGES + 2 * len(self._entries):
            self._ages = [(entry.sealed_ns, ino) for ino, entry in self._entries.items()]
            heapq.heapify(self._ages)

    # The order of uploads

    def _hurrying(self) -> bool:
        return trio.current_time() < self._hurry_until

    def hurry(self, seconds: float) -> None:
        """Make all dirty objects due now, and new ones for so many seconds: a task waits for it."""
        until = trio.current_time() + seconds
        fresh = until > self._hurry_until and not self._hurrying()
        self._hurry_until = max(self._hurry_until, until)
        if not fresh:
            return  # the objects that were marked during the hurry are due already
        now = time.time_ns()
        waiting = {ino: due for ino, due in self._due.items() if due > now}
        for ino in waiting:
            if self._due[ino] <= self._entries[ino].sealed_ns + int(self.bucket.delay * SECOND):
                self.set_due(ino, now)
        if waiting:
            self.wake()

    def set_due(self, ino: int, due_ns: int) -> None:
        """Make an object due at this time, in ns since 1970."""
        if ino in self._entries:
            self._due[ino] = due_ns
            heapq.heappush(self._queue, (due_ns, ino))

    def give_back(self, ino: int, due_ns: int) -> None:
        """Put back a taken object, unless it was marked again, or is not dirty any more."""
        if ino not in self._due:
            self.set_due(ino, due_ns)

    def take(self) -> int | None:
        """Take the first object that is due; None: no object is due.

        `take` gives the object again after `give_back`, or after a new mark.
        """
        now = time.time_ns()
        while self._queue and self._queue[0][0] <= now:
            due, ino = heapq.heappop(self._queue)
            if self._due.get(ino) == due:
                del self._due[ino]
                return ino
        return None

    def next_due(self) -> float:
        """Seconds until the next object is due, infinite if no object waits."""
        if not self._queue:
            return float("inf")
        return max(0.0, (self._queue[0][0] - time.time_ns()) / SECOND)

    # After a start

    async def load(self) -> None:
        """Read the marks of dirty objects and of keys to delete. Raises CatalogError."""
        if self.loaded:
            return
        for count, (number, value) in enumerate(self.catalog.marks(keys.DELETED)):
            if self.catalog.mark(keys.DELETED, number) is not None:
                self.superseded.load(number, value)
            if count % STEP == STEP - 1:
                await trio.lowlevel.checkpoint()
        for count, (ino, _) in enumerate(self.catalog.marks(keys.UNSTORED)):
            self._load_one(ino)
            if count % STEP == STEP - 1:
                await trio.lowlevel.checkpoint()
        for ino in self.catalog.unfinished():
            if not self.superseded.claimed(ino) and (stored := self.stored(ino)) is not None:
                self.superseded.claim(ino, stored.key)
        await self.contested.load()
        self.loaded = True
        self.wake()

    def _load_one(self, ino: int) -> None:
        """Enter one object. Read its mark again, because other tasks ran since the listing."""
        value = self.catalog.mark(keys.UNSTORED, ino)
        if value is None or ino in self._entries:
            return
        inode = self.catalog.inode(ino)
        if inode is not None:
            self._add(inode, keys.U64.unpack(value)[0], self.catalog.mark(keys.STORED, ino))
