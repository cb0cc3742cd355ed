"""This node and its bucket: asks for the bucket's health, and publishes this node's record.

Contract: `Availability.watch` and `NodeRecord.watch` run as long as the mount. `Availability` sets
the bucket's health, and wakes the tasks that wait for it. If a bucket answers but takes no uploads,
for example because it is full, the answer does not make it healthy. If the bucket did not answer at
the mount, kvfs first tests whether the bucket carries out conditional requests (`Terms`).

`NodeRecord` writes this node's record at the start, and when a namespace comes, goes or changes its
version. It also writes the record once a day, which says that the node lives. The record keeps a
former namespace as long as an object may be at one of its keys. That ends when kvfs has visited all
objects that were dropped or moved, and has copied the moved ones in the bucket. After a failure of
the store, kvfs writes the record later.

`describe` answers `kvfs gc`. Most objects are in the bucket at a key of their namespace. An object
with a new name has an old key until the store has copied it. `strays` are these old keys, and all
keys that do not tell their namespace. Not for the use of records by other nodes
(`kvfs.s3.garbage`). Not for the meaning of a store's answer about objects.
"""

import logging
import time
from dataclasses import asdict
from typing import Any

import trio

from kvfs import runtime
from kvfs.catalog import ROOT_INO, Catalog, audit, keys
from kvfs.core.bucket.upload.uploader import Uploader
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.errors import ConfigError, TierError
from kvfs.movement.remote import Remote
from kvfs.s3 import nodes
from kvfs.s3.keys import Keys, Space
from kvfs.tiers import Bucket

WELL, ILL = 10.0, 1.0  # s between two questions to a healthy bucket, and to any other
GLANCE = 0.5  # s between two checks whether a request has failed


class Availability:
    """Watches the health of the bucket. `identity`: of this node, which claims the prefix."""

    def __init__(self, remote: Remote, uploader: Uploader, identity: str) -> None:
        self.remote = remote
        self.bucket = remote.bucket
        self.uploader = uploader
        self.identity = identity

    async def watch(self) -> None:
        """Ask the bucket again and again, for ever."""
        health = self.bucket.health
        while True:
            asked = trio.current_time()
            await self.ask()
            while trio.current_time() < asked + (WELL if health.state == "healthy" else ILL):  # noqa: ASYNC110 (no event tells of failures)
                await trio.sleep(GLANCE)

    async def ask(self) -> None:
        """Ask the bucket once, and update its health."""
        health = self.bucket.health
        was = health.state
        try:
            await self.remote.ask(self.identity)
            failure = ""
        except (ConfigError, TierError) as error:  # of which StoreErrors are some
            failure = str(error)
        if failure or health.down or not self.uploader.failing:
            health.probed(time.monotonic(), failure)
        if was == "down" and not health.down:
            self.uploader.backoff.reset()
        if health.state != was:
            self.uploader.dirty.wake()
            self.uploader.ledger.wakeup.wake()


log = logging.getLogger(__name__)

REFRESH = 86400.0  # s between two records, if nothing changes
LOOK = 10.0  # s between two checks of a state that signals no change, and after a failure


class NodeRecord:
    """Publishes the record of this node in the bucket. `mountpoint`: only for human readers."""

    def __init__(self, dirty: Dirty, remote: Remote, identity: str, mountpoint: str) -> None:
        self.dirty = dirty
        self.remote = remote
        self.bucket = remote.bucket
        self.identity = identity
        self.mountpoint = mountpoint
        self.published: frozenset[Space] | None = None
        self._at = 0.0
        self._logged = ""

    async def watch(self) -> None:
        """Publish the record whenever it changes, for ever."""
        namespaces = self.dirty.namespaces
        while True:
            changed = namespaces.changed
            await self.look()
            with trio.move_on_after(LOOK):
                await changed.wait()

    async def look(self) -> None:
        """Publish the record if it has changed, or after REFRESH seconds. Raises CatalogError."""
        has = self._wanted()
        due = trio.current_time() >= self._at + REFRESH
        if (has == self.published and not due) or self.bucket.health.down or not self.bucket.terms:
            return
        host = runtime.machine().partition(":")[2]
        node = nodes.Node(self.identity, host, self.mountpoint, has)
        began = trio.current_time()
        try:
            written = await self.remote.call(
                "ask", 0, (), nodes.publish, self.bucket.keys, node, keep=self.published is None
            )
        except TierError as error:  # of which StoreErrors are some
            kind = type(error).__name__
            log.log(
                logging.DEBUG if kind == self._logged else logging.WARNING,
                "this node's record is not in %s yet, kvfs tries again: %s (said once)",
                *(self.bucket.place, error),
            )
            self._logged = kind
            return
        self.published, self._at, self._logged = written.has, began, ""

    def _wanted(self) -> frozenset[Space]:
        """The namespaces for the record: present ones, and former ones with keys in use."""
        namespaces, dirty = self.dirty.namespaces, self.dirty
        has = spaces(namespaces)
        went = (self.published or frozenset()) - has
        if not went:
            return has
        if not dirty.loaded or namespaces.unaccounted or namespaces.dropped:
            return has | went
        keys = self.bucket.keys
        if any(
            key.startswith(keys.long) for key in dirty.superseded.claims
        ):  # a long key may be of any namespace
            return has | went
        return has | {
            space
            for space in went
            if any(key.startswith(keys.folder(*space)) for key in dirty.superseded.claims)
        }


STEP = 128  # marks that are read at a time, before other tasks run
STEPS = 100  # in one answer


def spaces(namespaces: Namespaces) -> frozenset[Space]:
    """All namespaces with their versions, except the namespace of the mount's root."""
    return frozenset(
        Space(name.encode("utf-8", "surrogateescape"), one.settings.version)
        for one in namespaces
        if one.ino != ROOT_INO and (name := namespaces.name(one.ino))
    )


def strays_after(
    catalog: Catalog, bucket_keys: Keys, has: frozenset[Space], after: int
) -> tuple[list[str], int]:
    """Find strays among the STEP marks after an inode. Returns their keys, and the last inode.

    The last inode is 0 when all marks are done. Damaged marks are skipped: fsck finds them.
    """
    marks = catalog.marks(keys.STORED, after=after, limit=STEP)
    found = []
    for _, value in marks:
        stored = audit.stored(value)
        if stored is None:
            continue
        name = bucket_keys.parse(stored.key)
        own = name is not None and not name.namespace
        if name is None or not (own or Space(name.namespace, name.version) in has):
            found.append(stored.key)
    return found, marks[-1][0] if len(marks) == STEP else 0


async def describe(
    namespaces: Namespaces, bucket: Bucket, identity: str, notes: str, after: int
) -> dict[str, Any]:
    """The answer to `kvfs gc`, with some of the strays: the first ones after inode `after`."""
    has = spaces(namespaces)
    found: list[str] = []
    for _ in range(STEPS):
        more, after = strays_after(namespaces.catalog, bucket.keys, has, after)
        found += more
        if not after:
            break
        await trio.lowlevel.checkpoint()
    return {
        "place": asdict(bucket.place),
        "identity": identity,
        "notes": notes,
        "namespaces": sorted(map(str, has)),
        "strays": found,
        "after": after,
    }
