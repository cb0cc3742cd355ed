"""Lists a directory in the bucket when a program reads it, and enters new names.

Contract: `show` returns within WAIT and raises nothing; the rest of the listing follows in the
background. A listed name is entered here as a stub, without its metadata: one request gives a
thousand names. Names that only the bucket had, and that were not listed, go. Once in
`Bucket.recheck` seconds for a directory, everything that is known here is compared with its
listing. A listing may be old when it comes. So kvfs asks the bucket about each difference
separately. A page is entered some names at a time, with a turn of the loop after each. Not for the
meaning of a name (`remote_entries`), nor for whole trees (`importing`).
"""

import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

import trio

from kvfs.catalog import ROOT_INO, Named
from kvfs.core.bucket.listing.bucket_lookup import BucketLookup, LastSeen
from kvfs.core.bucket.listing.remote_directories import EntryName
from kvfs.core.names.tree import is_name
from kvfs.core.shared_work import SharedWork, WorkByKey
from kvfs.errors import KvfsError, TierError
from kvfs.movement import looking
from kvfs.movement.remote import Remote
from kvfs.s3.store import Entry, ListingPage

log = logging.getLogger(__name__)

T = TypeVar("T")

WAIT = 2.0  # s that an opendir waits: some thousand names
AGAIN = 5.0  # s after which a directory is listed once more
STEP = 8  # names entered between two turns of the loop, each some 60 us


class Pages:
    """A listing, a page at a time. Each step raises StoreError, TierError."""

    def __init__(self, remote: Remote, prefix: str, delimiter: str) -> None:
        self._remote = remote
        self._prefix = prefix
        self._delimiter = delimiter
        self._after: str | None = ""  # None behind the last page

    def __aiter__(self) -> "Pages":
        return self

    async def __anext__(self) -> ListingPage:
        if self._after is None:
            raise StopAsyncIteration
        wanted = (self._prefix, self._after, self._delimiter)
        page = await self._remote.call("list", 0, (), looking.page, *wanted)
        self._after = page.after or None
        return page


class BucketListing:
    """Lists the directories of one bucket."""

    def __init__(self, bucket_lookup: BucketLookup) -> None:
        self.bucket_lookup = bucket_lookup
        self.remote_entries = bucket_lookup.remote_entries
        self.remote = bucket_lookup.remote
        self.bucket = bucket_lookup.bucket
        # The names of a directory that may have left the pool: only the metadata of each tells.
        self.doubted: Callable[[int, Sequence[bytes]], Awaitable[Collection[bytes]]] | None = None
        self._listed: LastSeen[int] = LastSeen()
        self._compared: LastSeen[int] = LastSeen()  # with the catalog
        self._running: WorkByKey[int, SharedWork] = WorkByKey(
            lambda ino, error: log.error(
                "%s is not listed in the bucket: a defect of kvfs",
                self._named(ino),
                exc_info=error,
            )
        )

    async def show(self, ino: int) -> None:
        """List a directory that a program is about to read or remove."""
        if not self.bucket.shared or not self.bucket_lookup.may_ask():
            return
        if self._listed.age(ino) < AGAIN:
            return
        running = self._running.get(ino)
        if running is None:
            if self.remote_entries.remote_directories.directory(ino) is None:
                return
            running = self._running.begin(ino, SharedWork(), partial(self._list, ino))
        with trio.move_on_after(WAIT):
            await running.ended.wait()

    async def show_below(self, ino: int) -> bool:
        """List everything below a directory before its rename. False if WAIT was too short.

        If the bucket cannot be asked, the result is True: objects of other nodes stay where they
        are.
        """
        if not self.bucket.shared or not self.bucket_lookup.may_ask():
            return True
        with trio.move_on_after(WAIT):
            try:
                await self._enter_below(ino)
            except TierError as error:
                self.bucket_lookup.failed(error)
            return True
        return False

    async def _enter_below(self, ino: int) -> None:
        """Enter all names below a directory. Raises StoreError, TierError, CatalogError."""
        remote_entries = self.remote_entries
        while not self.bucket_lookup.dirty.loaded:
            await self.bucket_lookup.dirty.changed.wait()
        prefix = remote_entries.remote_directories.prefix(ino)
        if not prefix:
            return
        with self.bucket_lookup.dirty.superseded.watching() as gone:
            async for page in self.pages(prefix):
                for entries in some(page.entries, STEP):
                    for entry in entries:
                        if entry.key not in gone:
                            remote_entries.take_below(entry)
                    await trio.lowlevel.checkpoint()

    async def _list(self, ino: int) -> None:
        compare = self._compared.age(ino) >= self.bucket.recheck
        try:
            doubtful = await self._enter(ino, compare=compare)
            self._listed.note(ino)
            if compare:
                await self.bucket_lookup.ask_of(doubtful)
                self._compared.note(ino)
        except TierError as error:  # of which StoreErrors are some
            self.bucket_lookup.failed(error)
        except KvfsError as error:
            log.error(
                "%s is not listed in the bucket, names may be missing: %s", self._named(ino), error
            )

    def _named(self, ino: int) -> Named:
        return self.remote_entries.catalog.named(ino)

    async def _enter(self, ino: int, *, compare: bool) -> list[int]:
        """Enter the names of a directory. Returns the inodes that its listing leaves in doubt.

        compare: also return listed inodes that differ from the listing. Raises StoreError,
        TierError, CatalogError.
        """
        dirty, remote_entries = self.bucket_lookup.dirty, self.remote_entries
        doubtful: list[int] = []
        while not dirty.loaded:
            await dirty.changed.wait()
        prefix = remote_entries.remote_directories.prefix(ino)
        if not prefix:
            return doubtful
        before, names = remote_entries.catalog.counter, set[bytes]()
        with dirty.superseded.watching() as gone:
            async for page in self.pages(prefix, "/"):
                doubted = await self._doubted(ino, page)
                for entries in some(page.entries, STEP):
                    if remote_entries.remote_directories.prefix(ino) != prefix:
                        return []  # the directory has another name now
                    named = [(name, entry) for entry in entries if (name := self._name(entry))]
                    named_yet = [one for one in named if one[1].key not in gone]
                    if compare:
                        doubtful += self._otherwise(ino, named_yet)
                    sure = [one for one in named_yet if one[0] not in doubted]
                    remote_entries.enter_listed(ino, sure)
                    names.update(name for name, _ in named)
                    await trio.lowlevel.checkpoint()
                for name in doubted:
                    await self.bucket_lookup.find(ino, name)
                await self._directories(ino, prefix, page.folders)
            if ino == ROOT_INO:
                await self.namespaces()
            if remote_entries.remote_directories.prefix(ino) == prefix:
                doubtful += await self._forget(ino, prefix, before, names, gone)
        return doubtful

    async def _doubted(self, ino: int, page: ListingPage) -> Collection[bytes]:
        """The new names of a page whose objects may have left the pool."""
        if self.doubted is None:
            return ()
        names = [name for entry in page.entries if (name := self._name(entry))]
        new = [one for one in names if self.remote_entries.catalog.lookup(ino, one) is None]
        return await self.doubted(ino, new)

    def _otherwise(self, ino: int, named: Sequence[tuple[bytes, Entry]]) -> Iterator[int]:
        """The known inodes that differ from the listing; the others are confirmed."""
        for name, entry in named:
            known = self.remote_entries.catalog.lookup(ino, name)
            if known is None:
                continue
            verdict = self.remote_entries.compare(known.ino, entry)
            if verdict == "absent":
                yield known.ino
            elif verdict == "here":
                self.bucket_lookup.confirmed.note(known.ino)

    def pages(self, prefix: str, delimiter: str = "") -> Pages:
        """List the keys below a prefix, in pages."""
        return Pages(self.remote, prefix, delimiter)

    def _name(self, entry: Entry) -> bytes:
        """The last part of an entry's name; b"" if its key is no name of kvfs."""
        name = self.remote_entries.keys.parse(entry.key)
        last = b"" if name is None else name.path.rpartition(b"/")[2]
        if not is_name(last):
            self.remote_entries.refuse(f"{entry.key}: no name of kvfs has this key")
            return b""
        return last

    async def _directories(self, ino: int, prefix: str, remote_directories: Sequence[str]) -> None:
        """Make the listed directories that are new here.

        If a key of this node in a directory is about to go, it may be the last one there. Then the
        bucket is asked about the directory.
        """
        remote_entries = self.remote_entries
        leaving = remote_entries.superseded.folders(prefix)
        for step in some(remote_directories, STEP):
            for folder in step:
                found = remote_entries.keys.parse_folder(folder)
                name = b"" if found is None else found.path.rpartition(b"/")[2]
                if not name or remote_entries.catalog.lookup(ino, name) is not None:
                    continue
                if folder in leaving:
                    await self.bucket_lookup.find(ino, name)
                elif remote_entries.remote_directories.prefix(ino) == prefix:
                    remote_entries.remote_directories.make_directory(EntryName(ino, name))
            await trio.lowlevel.checkpoint()

    async def namespaces(self) -> None:
        """Enter the namespaces that are not known yet, each in its greatest version."""
        versions: dict[bytes, list[str]] = {}
        async for page in self.pages(self.remote_entries.keys.prefix, "/"):
            for folder in page.folders:
                found = self.remote_entries.keys.parse_folder(folder)
                if found is not None and found.namespace:
                    versions.setdefault(found.namespace, []).append(folder)
        for name, told in versions.items():
            if self.remote_entries.catalog.lookup(ROOT_INO, name) is None:
                self.remote_entries.remote_directories.enter_namespace(name, told)
            await trio.lowlevel.checkpoint()

    async def _forget(
        self, ino: int, prefix: str, before: int, names: set[bytes], gone: set[str]
    ) -> list[int]:
        """Forget objects that only the bucket had, and that were not listed.

        Returns unlisted objects that have a copy here.
        """
        catalog, cookie = self.remote_entries.catalog, 0
        left: list[int] = []
        while entries := catalog.entries_after(ino, cookie, STEP):
            for entry in entries:
                if entry.name in names or entry.ino >= before:
                    continue
                link = (ino, entry.cookie)
                if self.remote_entries.forget_unlisted(link, entry.ino, prefix, gone):
                    left.append(entry.ino)
            cookie = entries[-1].cookie
            await trio.lowlevel.checkpoint()
        return left


def some(items: Sequence[T], count: int) -> Iterator[list[T]]:
    """Yield the items in lists of `count`."""
    left = iter(items)
    while found := list(islice(left, count)):
        yield found
