"""What is asked of the bucket, seen from the daemon: calls that worker processes make.

Contract: as `Movers`, in lanes of their own: nothing local waits for a store that does not answer,
and what somebody waits for does not wait behind uploads. What fails is a StoreError, an OSError of
the local file, or a TierError of the movers. Not for deciding what to ask.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, ParamSpec, TypeVar

import trio

from kvfs.catalog import Stored
from kvfs.errors import TierError
from kvfs.movement import (
    asking,
    downloading,
    finding,
    looking,
    renaming,
    stores,
    streaming,
    uploading,
)
from kvfs.movement.finding import Answer, Ask
from kvfs.movement.movers import Moved, Movers, patience_for
from kvfs.movement.publishing import About, Target, Uploaded
from kvfs.s3.errors import StoreError
from kvfs.s3.nodes import Node
from kvfs.s3.store import Head, Page
from kvfs.tiers import Bucket

P = ParamSpec("P")
T = TypeVar("T")
Lane = Literal["up", "down", "ask", "look", "list"]

ASK_PATIENCE = 60.0  # s
LOOK_PATIENCE = 15.0  # s; of a worker that has yet to begin: who waits does so for less
LOOKS = 2  # workers that look names up, each many at once


class Remote:
    """Calls about one bucket."""

    def __init__(self, movers: Movers, bucket: Bucket) -> None:
        self.movers = movers
        self.bucket = bucket
        self.uploads = self.downloads = 2 * movers.workers
        self._lanes: dict[Lane, trio.CapacityLimiter] = {
            "up": trio.CapacityLimiter(self.uploads),
            "down": trio.CapacityLimiter(self.downloads),
            "ask": trio.CapacityLimiter(2),
            "look": trio.CapacityLimiter(LOOKS),
            "list": trio.CapacityLimiter(LOOKS),
        }

    async def _run(
        self, lane: Lane, patience: float, destinations: Sequence[str], do: Callable[..., T],
        *arguments: object,
    ) -> T:  # fmt: skip
        terms = self.bucket.terms
        if terms is None:
            raise TierError(f"{self.bucket.place} could not be asked yet what it honours")
        return await self.movers.run(
            stores.glance if lane == "look" else stores.run,
            *(self.bucket.place, terms, do, *arguments),
            limiter=self._lanes[lane],
            patience=patience,
            destinations=destinations,
        )

    async def upload(
        self,
        source: str,
        touched_ns: int,
        about: About,
        target: Target,
        notes: str,
        scratch: str | None,
    ) -> Uploaded:
        """See `uploading.upload`."""
        patience = patience_for(2 * about.size)
        wanted = (source, touched_ns, about, target, notes, scratch)
        return await self._run("up", patience, (), uploading.upload, *wanted)

    async def copy(self, source: Stored, about: About, target: Target, notes: str) -> Uploaded:
        """See `renaming.copy`."""
        return await self._run(
            "up", patience_for(about.size), (), renaming.copy, source, about, target, notes
        )

    async def remove(
        self, keys: Sequence[str], attempts: Mapping[str, tuple[str, ...]]
    ) -> dict[str, StoreError]:
        """See `uploading.remove`."""
        return await self._run("ask", ASK_PATIENCE, (), uploading.remove, keys, attempts)

    async def sweep(self, notes: str) -> int:
        """See `uploading.sweep`."""
        return await self._run("ask", ASK_PATIENCE, (), uploading.sweep, notes)

    async def download(
        self, stored: Stored, destination: str, size: int, digest: bytes, touched_ns: int
    ) -> Moved:
        """See `downloading.download`."""
        job = downloading.download
        patience = patience_for(2 * size)
        return await self._run(
            *("down", patience, [destination], job, stored, destination, size, digest, touched_ns)
        )

    async def stream(
        self,
        stored: Stored,
        destination: str,
        size: int,
        digest: bytes,
        touched_ns: int,
        ends: streaming.Ends,
    ) -> Moved:
        """See `streaming.stream`."""
        job = streaming.stream
        wanted = (stored, destination, size, digest, touched_ns, ends)
        return await self._run("down", patience_for(2 * size), [destination], job, *wanted)

    async def look(self, asks: Sequence[Ask], *, bulk: bool = False) -> list[Answer | StoreError]:
        """See `finding.look`. `bulk`: nobody waits for it, and it may take its time."""
        if bulk:
            return await self._run("list", ASK_PATIENCE, (), finding.look, asks)
        return await self._run("look", LOOK_PATIENCE, (), finding.look, asks)

    async def listed(self, prefix: str, after: str, delimiter: str = "") -> Page:
        """See `finding.page`."""
        return await self._run("list", ASK_PATIENCE, (), finding.page, prefix, after, delimiter)

    async def records(self, keys: Sequence[str]) -> list[bytes | StoreError]:
        """See `finding.records`."""
        return await self._run("list", ASK_PATIENCE, (), finding.records, keys)

    async def page(self, after: str) -> Page:
        """What is below the prefix, see `Store.list`."""
        prefix = self.bucket.place.prefix
        return await self._run("ask", ASK_PATIENCE, (), looking.page, prefix, after)

    async def heads(self, keys: Sequence[str]) -> list[Head | None]:
        """See `looking.heads`."""
        return await self._run("ask", ASK_PATIENCE, (), looking.heads, keys)

    async def verify(self, stored: Stored, size: int, digest: bytes) -> str:
        """See `looking.verify`."""
        patience = patience_for(2 * stored.size)
        return await self._run("down", patience, (), looking.verify, stored, size, digest)

    async def announce(self, node: Node, *, keep: bool) -> Node:
        """See `asking.announce`."""
        prefix = self.bucket.place.prefix
        return await self._run("ask", ASK_PATIENCE, (), asking.announce, prefix, node, keep)

    async def ask(self, identity: str) -> None:
        """Whether it answers; at the first time, what it honours. Raises why not."""
        lane, place = self._lanes["ask"], self.bucket.place
        if self.bucket.terms is not None:
            await self.movers.run(asking.alive, place, limiter=lane, patience=ASK_PATIENCE)
            return
        self.bucket.terms = await self.movers.run(
            *(asking.check, place, identity, self.bucket.exclusive),
            limiter=lane,
            patience=ASK_PATIENCE,
        )
