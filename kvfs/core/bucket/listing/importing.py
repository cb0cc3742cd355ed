"""`kvfs import`: enters the names and metadata of everything in the bucket below some paths.

Contract: one import runs at a time, in the background; `look` says how far it is. A known name is
passed over, so that a new import goes on where another was cut short. Each step of the loop enters
a few names. Names that cannot be entered are counted by the reason. It works with s3_shared=off as
well, for a mount whose catalog is new. Not for the meaning of a name
(`core/bucket/listing/remote_entries.py`).
"""

import logging
from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.bucket.listing.bucket_listing import STEP, BucketListing, some
from kvfs.core.bucket.listing.remote_directories import EntryName
from kvfs.core.bucket.listing.remote_entries import is_stub
from kvfs.core.names.tree import is_name
from kvfs.core.shared_work import start_task
from kvfs.errors import ControlError, KvfsError
from kvfs.movement import looking
from kvfs.movement.looking import LookupAnswer, LookupQuestion
from kvfs.movement.remote import LOOKS
from kvfs.s3.errors import MetadataError, StoreError
from kvfs.s3.keys import ObjectName
from kvfs.s3.store import Entry

log = logging.getLogger(__name__)

HEADS = 128  # objects whose metadata one call asks for
_NO_NAME = "no name of kvfs has such a key"


class _Wanted(NamedTuple):
    """An object to import: unknown (`ino` is 0), or a stub."""

    ino: int
    place: EntryName
    key: str


class Importing:
    """Imports names from one bucket."""

    def __init__(self, bucket_listing: BucketListing) -> None:
        self.bucket_listing = bucket_listing
        self.remote_entries = bucket_listing.remote_entries
        self.remote = bucket_listing.remote
        self._ended = True
        self._failed = ""
        self._new = self._known = 0
        self._refused: Counter[str] = Counter()
        self._missing: list[str] = []

    # Requests of clients

    async def start(self, paths: Sequence[str], *, again: bool = False) -> dict[str, Any]:
        """Begin to import everything below these paths; without paths, all. Raises ControlError."""
        bucket = self.bucket_listing.bucket
        if not self._ended:
            if again:
                return {}
            raise ControlError("an import is running already: wait for it")
        if bucket.terms is None or bucket.health.down:
            raise ControlError(f"{bucket.place} is down: {bucket.health.why}")
        self._failed, self._ended = "", False
        self._new = self._known = 0
        self._refused, self._missing = Counter(), []
        raw = [path.encode("utf-8", "surrogateescape").strip(b"/") for path in paths] or [b""]
        start_task("an import", partial(self._run, raw))
        return {}

    async def look(self) -> dict[str, Any]:
        """The progress of the import."""
        return {
            "names": self._new,
            "known": self._known,
            "refused": dict(self._refused),
            "missing": list(self._missing),
            "ended": self._ended,
            "failed": self._failed,
            "place": str(self.bucket_listing.bucket.place),
        }

    # Import

    async def _run(self, paths: list[bytes]) -> None:
        try:
            for path in paths:
                refused = self._refused.total()
                await self._import(path)
                if refused == self._refused.total() and not self._leads_somewhere(path):
                    self._missing.append(path.decode("utf-8", "surrogateescape"))
        except KvfsError as error:
            self._failed = str(error)
        except Exception as error:
            self._failed = f"{error!r}; the daemon's log has more"
            log.exception("import: a defect of kvfs")
        finally:
            self._ended = True

    async def _import(self, path: bytes) -> None:
        dirty, keys = self.remote_entries.dirty, self.remote_entries.keys
        while not dirty.loaded:
            await dirty.changed.wait()
        await self.bucket_listing.namespaces()
        folder, key = self._keys(path)
        async for page in self.bucket_listing.pages(folder):
            await self._enter([named for entry in page.entries for named in self._named(entry)])
        if key:
            first = (await anext(self.bucket_listing.pages(key))).entries[:1]
            if first and first[0].key == key:
                await self._enter(self._named(first[0]))
        async for page in self.bucket_listing.pages(keys.long):
            await self._enter(await self._read_names(page.entries, path))

    def _leads_somewhere(self, path: bytes) -> bool:
        """Whether a path now names something here."""
        at = ROOT_INO
        for name in filter(None, path.split(b"/")):
            if (entry := self.remote_entries.catalog.lookup(at, name)) is None:
                return False
            at = entry.ino
        return True

    def _keys(self, path: bytes) -> tuple[str, str]:
        """The prefix of the keys below a path, and the key of a file there ("" if impossible)."""
        keys = self.remote_entries.keys
        if not path:
            return keys.prefix, ""
        top, _, rest = path.partition(b"/")
        entry = self.remote_entries.catalog.lookup(ROOT_INO, top)
        own = None if entry is None else self.remote_entries.namespaces.own(entry.ino)
        if own is None:
            return keys.folder(b"", 0, path), keys.of(ObjectName(b"", 0, path))
        version = own.settings.version
        return keys.folder(top, version, rest), keys.of(
            ObjectName(top, version, rest)
        ) if rest else ""

    def _named(self, entry: Entry) -> list[tuple[ObjectName, str]]:
        """The entry's name and key, in a list; an empty list if the key is no name."""
        keys = self.remote_entries.keys
        if entry.key.startswith((keys.own, keys.long)):
            return []
        if (name := keys.parse(entry.key)) is None:
            self._refused[_NO_NAME] += 1
            return []
        return [(name, entry.key)]

    async def _read_names(self, entries: list[Entry], path: bytes) -> list[tuple[ObjectName, str]]:
        """The names below a path that are too long for keys."""
        keys = self.remote_entries.keys
        records = {record: entry for entry in entries if (record := keys.record_of(entry.key))}
        found = []
        for page in some(list(records), HEADS):
            contents = await self.remote.call("list", 0, (), looking.records, page)
            for key, content in zip(page, contents, strict=True):
                try:
                    if isinstance(content, StoreError):
                        raise content
                    name = keys.parse_record(key, content)
                except (StoreError, MetadataError):
                    self._refused["nothing says its name"] += 1
                    continue
                whole = b"/".join(filter(None, (name.namespace, name.path)))
                if not path or whole == path or whole.startswith(path + b"/"):
                    found.append((name, records[key].key))
        return found

    async def _enter(self, named: list[tuple[ObjectName, str]]) -> None:
        """Enter the unknown names, with their metadata. Raises StoreError, CatalogError."""
        wanted: list[_Wanted] = []
        for page in some(named, STEP):
            for name, key in page:
                wanted += self._wanted(name, key)
            await trio.lowlevel.checkpoint()
        chunks = list(some(wanted, HEADS))
        failures: list[KvfsError] = []

        async def work() -> None:
            try:
                while chunks and not failures:
                    await self._ask(chunks.pop(0))
            except KvfsError as error:
                failures.append(error)

        async with trio.open_nursery() as nursery:
            for _ in range(LOOKS):
                nursery.start_soon(work)
        if failures:
            raise failures[0]

    def _wanted(self, name: ObjectName, key: str) -> list[_Wanted]:
        """The object to import, in a list; an empty list if it is known, or impossible."""
        directory = self.remote_entries.remote_directories.reach(name)
        if not isinstance(directory, Inode):
            self._refused[directory] += 1
            return []
        place = EntryName(directory.ino, name.path.rpartition(b"/")[2])
        if not is_name(place.name, place.parent):
            self._refused[_NO_NAME] += 1
            return []
        known = self.remote_entries.catalog.lookup(*place)
        inode = None if known is None else self.remote_entries.ledger.table.inode(known.ino)
        if known is None or inode is None:
            return [_Wanted(0, place, key)]
        if is_stub(inode):
            return [_Wanted(inode.ino, place, key)]
        self._known += 1
        return []

    async def _ask(self, wanted: list[_Wanted]) -> None:
        with self.remote_entries.dirty.superseded.watching() as gone:
            asks = [LookupQuestion(one.key) for one in wanted]
            answers = await self.remote.call("list", 0, (), looking.look, asks)
            for one, ask, answer in zip(wanted, asks, answers, strict=True):
                self._take(one, ask, answer, gone)
                await trio.lowlevel.checkpoint()

    def _take(
        self,
        wanted: _Wanted,
        ask: LookupQuestion,
        answer: LookupAnswer | StoreError,
        gone: set[str],
    ) -> None:
        if isinstance(answer, StoreError):
            self._refused[f"not answered: {type(answer).__name__}"] += 1
            return
        if wanted.ino:
            verdict = self.remote_entries.renew(wanted.ino, ask, answer, gone)
        else:
            verdict = self.remote_entries.enter_answer(wanted.place, ask, answer, gone)
        if verdict == "here":
            self._new += 1
        elif answer.strange:
            self._refused["no object of this kvfs: its metadata or codec"] += 1
        elif verdict == "unsure":
            self._refused["deleted, moved or written here at this moment"] += 1
        else:
            self._refused["deleted meanwhile, or expired"] += 1
