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
from kvfs.movement import asking, downloading, stores, streaming, uploading
from kvfs.movement.movers import Moved, Movers, patience_for
from kvfs.movement.uploading import About, Target, Uploaded
from kvfs.s3.errors import StoreError
from kvfs.tiers import Bucket

P = ParamSpec("P")
T = TypeVar("T")
Lane = Literal["up", "down", "ask"]

ASK_PATIENCE = 60.0  # s


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
        }

    async def _run(
        self, lane: Lane, patience: float, destinations: Sequence[str], do: Callable[..., T],
        *arguments: object,
    ) -> T:  # fmt: skip
        terms = self.bucket.terms
        if terms is None:
            raise TierError(f"{self.bucket.place} could not be asked yet what it honours")
        return await self.movers.run(
            stores.run,
            *(self.bucket.place, terms, do, *arguments),
            limiter=self._lanes[lane],
            patience=patience,
            destinations=destinations,
        )

    async def upload(
        self, source: str, touched_ns: int, about: About, target: Target, notes: str
    ) -> Uploaded:
        """See `uploading.upload`."""
        patience = patience_for(2 * about.size)
        job = uploading.upload
        return await self._run("up", patience, (), job, source, touched_ns, about, target, notes)

    async def copy(self, source: Stored, about: About, target: Target) -> Uploaded:
        """See `uploading.copy`."""
        return await self._run(
            "up", patience_for(about.size), (), uploading.copy, source, about, target
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

    async def ask(self, identity: str) -> None:
        """Whether it answers; at the first time, what it honours. Raises why not."""
        lane, place = self._lanes["ask"], self.bucket.place
        if self.bucket.terms is not None:
            await self.movers.run(asking.alive, place, limiter=lane, patience=ASK_PATIENCE)
            return
        self.bucket.terms = await self.movers.run(
            asking.check, place, identity, limiter=lane, patience=ASK_PATIENCE
        )
