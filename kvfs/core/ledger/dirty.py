"""Dirty objects: the bucket lacks their bytes or names. In the order in which they are due.

Contract: a sealed object whose bytes or name are not yet in the bucket is *dirty*. This is
independent of any order of eviction. The catalog stores a mark of each dirty object (`u`), and a
mark of the key and version that the bucket has of an inode (`s`). Each mark changes in the batch
that changes its object, and so do the keys that become `superseded`. An object that waits until
another node gives up its name is not dirty, but `contested`.
All methods but `load` are synchronous. After a start `load` reads the marks, beside the first
operations. Until `load` has read a mark, the catalog is asked for it.
A catalog that never had a bucket is not asked for anything (`on`).

Invariants, between any two awaits once the marks are loaded:
- An object is in the table if and only if it has a mark `u`.
- `bytes` is the sum of the sizes of the objects whose bytes the bucket lacks.
- An object without a due time has been taken by a task, and comes back by `give_back`.
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

FACT = "bucket"  # of the catalog: the place of the bucket to which the marks belong
# A fact: "1" once kvfs has looked for all objects that were sealed before the bucket was to have
# them.
CAUGHT_UP = "bucket_caught_up"
# A fact: "1" once objects are marked whose names another node has; an older kvfs did not mark them.
TOLD_APART = "bucket_contested"
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
        self.on = bucket.mounted or catalog.fact(FACT) is not None
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
        self.behind = trio.Event()  # set: look for objects that were sealed before
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
        """When the object was sealed that has waited longest, in ns; 0: no object waits."""
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
        """Whether writers have to wait: as many bytes are dirty as may be."""
        return self.bytes >= self.bucket.most

    def wake(self) -> None:
        """Wake the tasks that wait for a change."""
        done, self.changed = self.changed, trio.Event()
        done.set()

    # The state of one inode

    def waits(self, ino: int) -> tuple[int, int] | None:
        """When an object was marked and when it is due, in ns since 1970; None if it is not dirty.

        The due time is 0 while a task has taken the object, or until the mark is loaded.
        """
        entry = self._entries.get(ino)
        if entry is not None:
            return entry.sealed_ns, self._due.get(ino, 0)
        value = None if self.loaded else self.catalog.mark(keys.UNSTORED, ino)
        return None if value is None else (keys.U64.unpack(value)[0], 0)

    def stored(self, ino: int) -> Stored | None:
        """The key and version that the bucket has of an object; either may be an older one."""
        value = self.catalog.mark(keys.STORED, ino) if self.on else None
        return None if value is None else keys.stored(value)

    def key(self, inode: Inode) -> str | None:
        """The key that an object is to have; None if it is to be in no bucket."""
        name = self.namespaces.bucket_name(inode)
        if name is None or not self.wanted(inode):
            return None
        return self.bucket.keys.of(name)

    def wanted(
        self, inode: Inode, directory: Inode | None = None, name: bytes | None = None
    ) -> bool:
        """Whether an object is to be in the bucket, and can be: a file mostly of holes cannot.

        A bucket stores every byte of an object: 1 TiB of holes would be 1 TiB of requests.
        """
        return not self._stays(inode) and self.meant(inode, directory, name)

    @staticmethod
    def _stays(inode: Inode) -> bool:
        return inode.sparse or inode.mostly_holes

    def meant(
        self, inode: Inode, directory: Inode | None = None, name: bytes | None = None
    ) -> bool:
        """Whether an object is to be in the bucket; holes do not count here.

        A file that its connector is about to rename waits for that rename.
        directory, name: the first name of the object, if the catalog does not have it yet.
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

    def sealed(self, inode: Inode, batch: Batch) -> None:
        """Mark an object that was sealed with new bytes."""
        if self.on and (self.wanted(inode) or self.stored(inode.ino) is not None):
            self._mark(inode, time.time_ns(), batch)
        if self._stays(inode) and self.meant(inode):
            log.log(
                logging.DEBUG if self._logged_sparse else logging.WARNING,
                "%s stays on this node only, and %s says 1: it is mostly holes, %d of %d "
                "bytes are data, and a bucket has every byte of an object (said once)",
                *(self.catalog.named(inode.ino), "user.kvfs.dirty", inode.data, inode.size),
            )
            self._logged_sparse = True

    def lacking(self, inode: Inode, batch: Batch, sealed_ns: int = 0) -> None:
        """Mark an object that the bucket lacks. sealed_ns: when it was sealed, if that is known."""
        self._mark(inode, sealed_ns or time.time_ns(), batch)

    def look_back(self, batch: Batch) -> None:
        """Look for objects that are sealed already: the bucket is to have them from now on."""
        if self.on:
            batch.set_fact(CAUGHT_UP, "")
            batch.then(self.behind.set)

    def attributes(self, inode: Inode, batch: Batch) -> None:
        """Mark an object if the bucket has an older mode, owner or time of it."""
        if not self.on or not inode.in_bucket or inode.ino in self:
            return
        stored = self.stored(inode.ino)
        if stored and stored.attributes not in {"", inode.attributes} and self.wanted(inode):
            self._mark(inode, time.time_ns(), batch)

    def is_there(self, inode: Inode, stored: Stored | None, key: str | None) -> bool:
        """Whether the bucket has this version at this key, with the attributes that it has now."""
        if not inode.in_bucket or stored is None or stored.key != key:
            return False
        return stored.attributes in {"", inode.attributes}

    def named(
        self,
        inode: Inode,
        batch: Batch,
        directory: Inode | None = None,
        name: bytes | None = None,
    ) -> None:
        """Mark or unmark an object with a new first name, perhaps in another namespace.

        directory, name: as for `wanted`.
        """
        if not self.on or not inode.is_file or not inode.sealed:
            return
        if self.wanted(inode, directory, name) or self.stored(inode.ino) is not None:
            known = self._entries.get(inode.ino)
            self._mark(inode, known.sealed_ns if known else time.time_ns(), batch)
        elif inode.ino in self or inode.ino in self.contested:
            self._unmark(inode.ino, batch)

    def moved(self, inode: Inode, batch: Batch) -> None:
        """Mark an object if its key changes: a directory above it has another name."""
        if not self.on or not inode.is_file or not inode.sealed or inode.ino in self:
            return
        stored = self.stored(inode.ino)
        if self.key(inode) != (stored.key if stored else None):
            self._mark(inode, time.time_ns(), batch)

    def rewritten(self, inode: Inode, batch: Batch) -> None:
        """Unmark an object that gets new bytes: until the seal there is nothing to upload."""
        inode.in_bucket = False
        if self.on:
            self._unmark(inode.ino, batch)
            if (stored := self.stored(inode.ino)) is not None:
                batch.then(partial(self.superseded.claim, inode.ino, stored.key))

    def unlinked(self, ino: int, batch: Batch, *, delete: bool = True) -> None:
        """Unmark an object that lost its last name. delete: its key is ours, and goes as well."""
        if not self.on:
            return
        stored = self.stored(ino)
        if stored is not None:
            batch.unmark(keys.STORED, ino)
            if delete:
                self.superseded.delete(stored.key, batch)
        self._unmark(ino, batch)
        batch.then(partial(self.superseded.disclaim, ino))

    def uploaded(self, inode: Inode, stored: Stored, batch: Batch, *, clean: bool) -> None:
        """Note that the bucket has this version. clean: under the name that it has now."""
        before = self.stored(inode.ino)
        inode.in_bucket = True
        batch.mark(keys.STORED, inode.ino, keys.stored_value(stored))
        self.superseded.unmark(stored.key, batch)
        if before is not None and before.key != stored.key:
            self.superseded.delete(before.key, batch)
        if clean:
            self._unmark(inode.ino, batch)
            batch.then(partial(self.superseded.disclaim, inode.ino))
        else:
            batch.then(partial(self.superseded.claim, inode.ino, stored.key))
            batch.then(partial(self._lighten, inode.ino))

    def replaced(self, ino: int, stored: Stored, batch: Batch) -> None:
        """Note that the bucket has an older version, so that the next one may replace it."""
        before = self.stored(ino)
        if before is not None and before.key != stored.key:
            self.superseded.delete(before.key, batch)
        batch.mark(keys.STORED, ino, keys.stored_value(stored))
        self.superseded.unmark(stored.key, batch)
        batch.then(partial(self.superseded.claim, ino, stored.key))

    def unmark(self, ino: int, batch: Batch) -> None:
        """Unmark an object that needs no upload after all."""
        self._unmark(ino, batch)

    def contest(self, ino: int, batch: Batch) -> None:
        """Note a conflict: while another node has the name, there is nothing to upload."""
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
        size = 0 if inode.in_bucket else inode.size  # its bytes are there, under another name
        self._entries[inode.ino] = _Entry(sealed_ns, size)
        heapq.heappush(self._ages, (sealed_ns, inode.ino))
        self.bytes += size
        through = self.namespaces.of(inode).settings.write == "through"
        delay = 0.0 if through or self._hurrying() else self.bucket.delay
        self.put_back(inode.ino, sealed_ns + int(delay * SECOND))
        self.wake()

    def _lighten(self, ino: int) -> None:
        """Count no bytes of an object any more: the bucket has these, but lacks its name."""
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
        """Bound the obsolete entries of `_ages`, which gather behind an object that waits long."""
        if len(self._ages) > SPARE_AGES + 2 * len(self._entries):
            self._ages = [(entry.sealed_ns, ino) for ino, entry in self._entries.items()]
            heapq.heapify(self._ages)

    # The order of uploads

    def _hurrying(self) -> bool:
        return trio.current_time() < self._hurry_until

    def hurry(self, seconds: float) -> None:
        """Make all objects due now, for so many seconds: a task waits for the uploads."""
        until = trio.current_time() + seconds
        fresh = until > self._hurry_until and not self._hurrying()
        self._hurry_until = max(self._hurry_until, until)
        if not fresh:
            return  # objects that came since then are due already
        now = time.time_ns()
        waiting = {ino: due for ino, due in self._due.items() if due > now}
        for ino in waiting:
            if self._due[ino] <= self._entries[ino].sealed_ns + int(self.bucket.delay * SECOND):
                self.put_back(ino, now)
        if waiting:
            self.wake()

    def put_back(self, ino: int, due_ns: int) -> None:
        """Make an object due at this time, in ns since 1970."""
        if ino in self._entries:
            self._due[ino] = due_ns
            heapq.heappush(self._queue, (due_ns, ino))

    def give_back(self, ino: int, due_ns: int) -> None:
        """Put back a taken object, unless it was marked again, or is not dirty any more."""
        if ino not in self._due:
            self.put_back(ino, due_ns)

    def take(self) -> int | None:
        """Take the first object that is due. It comes again once it is put back or marked again."""
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
        """Read the marks of objects to upload and of keys to delete. Raises CatalogError."""
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
        """Enter one object. Its mark is read again: other tasks ran since it was listed."""
        value = self.catalog.mark(keys.UNSTORED, ino)
        if value is None or ino in self._entries:
            return
        inode = self.catalog.inode(ino)
        if inode is not None:
            self._add(inode, keys.U64.unpack(value)[0], self.catalog.mark(keys.STORED, ino))
