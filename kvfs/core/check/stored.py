"""Check the bucket against the catalog: the catalog's marks of the bucket, and a listing.

Contract: `MarkCheck` looks at the catalog alone. `check_inode` is called for every inode, and costs
a look-up for those that are in the bucket. `run` looks at the marks: the places of objects, the
objects that wait, and the keys that are to be deleted. If an inode is gone, its object in the
bucket is deleted there.

`ListingCheck.run` lists the bucket prefix once and compares it with the marks. It asks for a
suspect again with the inode held, and only then reports it. If an object is missing or is another
one, another node has unlinked or replaced it: the object loses its names here, too. If no other
node uses the prefix, the object is uploaded again from a copy here, and dropped only without one.
Movers read the bytes, and only if hashes are wanted. A key that no mark means may be another
node's: `kvfs gc` handles those.
"""

from collections.abc import Iterator
from functools import partial

import trio

from kvfs.catalog import Batch, Inode, Stored, audit, keys
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.check.survey import Survey
from kvfs.errors import TierError
from kvfs.movement import looking
from kvfs.movement.remote import Remote
from kvfs.s3.store import Entry, Head

READERS = 4  # objects that are read at once


class MarkCheck:
    """Checks the marks of the objects of a catalog."""

    def __init__(self, survey: Survey) -> None:
        self.survey = survey
        self.catalog = survey.catalog
        self.ledger = survey.ledger

    def check_inode(self, inode: Inode) -> None:
        """Report an inode that is in the bucket, if no mark has its place there."""
        if not inode.in_bucket or self._good(inode.ino):
            return
        here = bool(self.ledger.tiers.holders(inode))
        if inode.ino in self.ledger.table.open or inode.ino in self.ledger.table.busy:
            return  # another check looks at it
        what = "it is in the bucket, but nothing says where"
        cure = "take it for not being there" if here else "drop it with its names"
        self.survey.report_inode("stored", inode, what, cure, partial(self._take, inode, here=here))

    def _good(self, ino: int) -> bool:
        value = self.catalog.record(keys.STORED, keys.number_key(ino))
        return value is not None and audit.stored(value) is not None

    def _take(self, inode: Inode, *, here: bool) -> None:
        self.survey.erase(keys.STORED, keys.number_key(inode.ino))
        if here:
            self.ledger.records.record_not_in_bucket(inode)
        else:
            self.ledger.removals.drop(inode, "lost")

    async def run(self) -> None:
        """Check all marks. A key that is to be deleted may be any text: it is only deleted."""
        survey = self.survey
        survey.begin("bucket", 0)
        for kind in (keys.STORED, keys.UNSTORED, keys.CONTESTED, keys.DELETED):
            for key, _ in self.catalog.records(kind):
                value = self.catalog.record(kind, key)
                if value is not None:
                    self._check_mark(kind, key, value)
                await survey.step()

    def _check_mark(self, kind: bytes, key: bytes, value: bytes) -> None:
        ino = keys.number(key)
        inode = None if ino is None else self.survey.inode(ino)
        good = {
            keys.STORED: audit.stored(value) is not None,
            keys.UNSTORED: len(value) == keys.U64.size,
            keys.CONTESTED: len(value) == keys.U64.size,
            keys.DELETED: audit.deleted(value) is not None,
        }[kind]
        if ino is None or not good:
            what = f"a mark about the bucket is invalid (key {(kind + key).hex()})"
            self._report(ino or 0, inode, what, partial(self.survey.erase, kind, key))
        elif kind != keys.DELETED and ino not in self.survey.unreadable:
            fits = inode is not None and inode.is_file
            if kind != keys.STORED and inode is not None:
                fits = fits and inode.sealed and bool(inode.links)
            if not fits and not self.survey.in_use(ino) and not self.survey.to_be_recovered(ino):
                what = "the bucket has, or is to get, what is no file any more"
                gone = partial(self.ledger.dirty.on_unlink, ino)
                self._report(ino, inode, what, partial(self.survey.change, gone))

    def _report(self, ino: int, inode: Inode | None, what: str, mend: "partial[None]") -> None:
        path = "" if inode is None else self.survey.path(inode)
        self.survey.report("bucket", ino, path, what, "remove the mark", mend)


class ListingCheck:
    """Checks the objects of one bucket by a listing."""

    def __init__(self, survey: Survey, remote: Remote) -> None:
        self.survey = survey
        self.remote = remote
        self.catalog = survey.catalog
        self.ledger = survey.ledger
        self.dirty = survey.ledger.dirty
        # By the hash of a key: a million keys would take memory. Two with one hash are suspects.
        self._expected: dict[int, int] = {}
        self._deletes: dict[int, list[int]] = {}
        self._sound: list[int] = []
        self._suspects: list[int] = []
        self._failure: TierError | None = None  # a nursery would put it into a group
        self._reading = trio.CapacityLimiter(READERS)

    async def run(self) -> None:
        """Check the bucket. Raises StoreError, TierError if the bucket cannot be read."""
        await self._expect()
        self.survey.begin("objects in the bucket", len(self._expected))
        await self._compare()
        self.survey.notes["in_bucket"] += len(self._sound)
        for ino in self._suspects:
            await self._judge(ino)
            await self.survey.step(0)
        if self.survey.hashes:
            await self._read_all()
        self._end_deletes()

    async def _expect(self) -> None:
        for key, _ in self.catalog.records(keys.STORED):
            ino = keys.number(key)
            found = None if ino is None else self._current(ino)
            if ino is not None and found is not None:
                at = hash(found[1].key)
                if at in self._expected:
                    self._suspects.append(self._expected[at])
                self._expected[at] = ino
            await self.survey.step(0)
        if self.survey.live:  # the daemon deletes by itself
            return
        for number, value in self._deletions():
            to_delete = value.decode().partition("\0")[0]
            self._deletes.setdefault(hash(to_delete), []).append(number)
            await self.survey.step(0)

    def _deletions(self) -> Iterator[tuple[int, bytes]]:
        for key, value in self.catalog.records(keys.DELETED):
            number = keys.number(key)
            if number is not None and audit.deleted(value) is not None:
                yield number, value

    def _current(self, ino: int) -> tuple[Inode, Stored] | None:
        """Return the object and its place in the bucket at this moment, or None."""
        inode = self.survey.sealed(ino)
        if inode is None or is_stub(inode):  # of a stub only the listing's facts are known
            return None
        value = self.catalog.record(keys.STORED, keys.number_key(ino))
        stored = None if value is None else audit.stored(value)
        return (inode, stored) if inode.in_bucket and stored is not None else None

    # The listing

    async def _compare(self) -> None:
        """List the prefix, and sort the objects into sound ones and suspects."""
        after, prefix = "", self.remote.bucket.place.prefix
        while True:
            page = await self.remote.call("ask", 0, (), looking.page, prefix, after)
            for entry in page.entries:
                self._deletes.pop(hash(entry.key), None)
                ino = self._expected.pop(hash(entry.key), None)
                if ino is not None:
                    (self._sound if self._fits(ino, entry) else self._suspects).append(ino)
                    await self.survey.step()
            if not (after := page.after):
                break
        self._suspects += self._expected.values()

    def _fits(self, ino: int, entry: Entry) -> bool:
        current = self._current(ino)
        if current is None:
            return False
        _, stored = current
        return (stored.key, stored.etag, stored.size) == (entry.key, entry.etag, entry.size)

    async def _read_all(self) -> None:
        self.survey.begin("bytes in the bucket", len(self._sound))
        async with trio.open_nursery() as nursery:
            for ino in self._sound:
                await self._reading.acquire_on_behalf_of(ino)
                if self._failure is not None:
                    break
                nursery.start_soon(self._read, ino)
        if self._failure is not None:
            raise self._failure

    async def _read(self, ino: int) -> None:
        try:
            current = self._current(ino)
            if current is not None:
                inode, stored = current
                if await self._verify(stored, inode):
                    self.survey.notes["in_bucket"] -= 1
                    await self._judge(ino)
        except TierError as error:
            self._failure = error
        finally:
            self._reading.release_on_behalf_of(ino)
        await self.survey.step()

    async def _verify(self, stored: Stored, inode: Inode) -> str:
        wanted = (stored, inode.size, inode.digest)
        return await self.remote.call("down", stored.size, (), looking.verify, *wanted)

    # A suspect

    async def _judge(self, ino: int) -> None:
        """Ask for a suspect again, with its inode held, and report it."""
        async with self.survey.hold(ino):
            before = self._current(ino)
            if before is None:
                return
            inode, stored = before
            head = await self.remote.call("ask", 0, (), looking.head, stored.key)
            why = ""
            if head is not None and self.survey.hashes:
                there = stored._replace(etag=head.etag)
                why = await self._verify(there, inode)
            current = self._current(ino)
            if current is None or current[1] != stored or current[0].version != inode.version:
                return  # renamed or unlinked meanwhile
            self._report(current[0], stored, head, why)

    def _report(self, inode: Inode, stored: Stored, head: Head | None, why: str) -> None:
        if head is None:
            what = f"the bucket does not have it ({stored.key})"
            self._lost(inode, "absent", what, ours=False)
        elif not looking.is_same(head, stored, inode.size, inode.digest):
            what = f"the bucket has another object there ({stored.key}: {head.size} bytes)"
            self._lost(inode, "altered", what, ours=False)
        elif why:
            self._lost(inode, "altered", f"{why} ({stored.key})", ours=True)
        elif head.etag != stored.etag:
            what = f"the bucket has it with ETag {head.etag}, expected {stored.etag}"
            there = keys.stored_value(stored._replace(etag=head.etag))
            take = partial(Batch.mark, kind=keys.STORED, ino=inode.ino, value=there)
            mend = partial(self.survey.change, take)
            self.survey.report_inode("altered", inode, what, "take the ETag that it has", mend)

    def _lost(self, inode: Inode, kind: str, what: str, *, ours: bool) -> None:
        """Report an object that the bucket lost. `ours`: its key there is to be deleted."""
        ledger, report = self.ledger, partial(self.survey.report_inode, kind, inode, what)
        # An object with a mark UNSTORED was renamed here since: its key is this node's.
        marked = self.catalog.mark(keys.UNSTORED, inode.ino) is not None
        others = self.remote.bucket.shared and not ours and not marked
        if ledger.tiers.holders(inode) and not others:
            mend = partial(ledger.records.record_not_in_bucket, inode, dirty=True, delete=ours)
            report("upload it again", mend)
        elif inode.ino in ledger.table.open:
            report("somebody has it open", None)
        else:
            drop = partial(ledger.removals.drop, inode, "lost", stored=ours)
            report(
                "drop it with its names",
                partial(ledger.removals.let_go, inode) if others else drop,
            )

    def _end_deletes(self) -> None:
        """Remove the marks of keys that were to be deleted and are not there."""
        numbers = [number for found in self._deletes.values() for number in found]
        self.survey.notes["deletes_done"] += len(numbers)
        if self.survey.repair and numbers:
            with self.catalog.batch() as batch:
                for number in numbers:
                    batch.unmark(keys.DELETED, number)
