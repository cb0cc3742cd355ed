"""This node's record in the bucket: which namespaces it has, so that others know what is in use.

Contract: `watch` runs as long as the mount. The record is written at the start, when a namespace
comes, goes or changes its version, and once a day, which says that the node lives. What was there
before stays in it as long as an object may yet be at such a key: until all that was dropped or
moved is walked, and copied in the bucket. A store that fails is asked again later.
Not for what others make of it: `kvfs.s3.garbage`.
"""

import logging

import trio

from kvfs import runtime
from kvfs.core.bucket.node import claims
from kvfs.core.ledger.ledger import Ledger
from kvfs.errors import TierError
from kvfs.movement.remote import Remote
from kvfs.s3 import nodes
from kvfs.s3.keys import Space
from kvfs.tiers import Bucket

log = logging.getLogger(__name__)

REFRESH = 86400.0  # s between two records, if nothing changes
LOOK = 10.0  # s between two looks at what nothing tells of, and after a failure


class Announcement:
    """`identity` of this node; `mountpoint` for people."""

    def __init__(
        self, ledger: Ledger, remote: Remote, bucket: Bucket, identity: str, mountpoint: str
    ) -> None:
        self.ledger = ledger
        self.remote = remote
        self.bucket = bucket
        self.identity = identity
        self.mountpoint = mountpoint
        self.published: frozenset[Space] | None = None
        self._at = 0.0
        self._said = ""

    async def watch(self) -> None:
        """Publish, for ever."""
        namespaces = self.ledger.namespaces
        while True:
            changed = namespaces.changed
            await self.look()
            with trio.move_on_after(LOOK):
                await changed.wait()

    async def look(self) -> None:
        """Publish if there is something new, or it is time. Raises CatalogError."""
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
                logging.DEBUG if kind == self._said else logging.WARNING,
                "this node's record is not in %s yet: %s (said once)",
                *(self.bucket.place, error),
            )
            self._said = kind
            return
        self.published, self._at, self._said = written.has, began, ""

    def _wanted(self) -> frozenset[Space]:
        """What there is, and what may yet be in use of what there was."""
        namespaces, dirty = self.ledger.namespaces, self.ledger.dirty
        has = claims.spaces(namespaces)
        went = (self.published or frozenset()) - has
        if not went:
            return has
        if not dirty.loaded or namespaces.unaccounted or namespaces.dropped:
            return has | went
        keys = self.bucket.keys
        if any(
            key.startswith(keys.long) for key in dirty.superseded.claims
        ):  # it may be of any of them
            return has | went
        return has | {
            space
            for space in went
            if any(key.startswith(keys.folder(*space)) for key in dirty.superseded.claims)
        }
