"""Whether the bucket answers: asked now and then, and often while it does not.

Contract: `watch` runs as long as the mount; what it finds is the bucket's health, and who waits for
that is woken. A bucket that answers, but takes nothing, as one that is full, does not become well
by that. One that could not be asked at the mount is asked what it honours first.
Not for what an answer means for objects.
"""

import time

import trio

from kvfs.core.bucket.upload.spill import Spill
from kvfs.errors import ConfigError, TierError
from kvfs.movement.remote import Remote
from kvfs.tiers import Bucket

WELL, ILL = 10.0, 1.0  # s between two questions
GLANCE = 0.5  # s between two looks whether somebody met a failure


class Availability:
    """`identity` of the kvfs that claims the prefix."""

    def __init__(self, remote: Remote, bucket: Bucket, spill: Spill, identity: str) -> None:
        self.remote = remote
        self.bucket = bucket
        self.spill = spill
        self.identity = identity

    async def watch(self) -> None:
        """Ask, for ever."""
        health = self.bucket.health
        while True:
            asked = trio.current_time()
            await self.ask()
            while trio.current_time() < asked + (WELL if health.state == "healthy" else ILL):  # noqa: ASYNC110 (failures are told by whoever meets them)
                await trio.sleep(GLANCE)

    async def ask(self) -> None:
        """Once."""
        health = self.bucket.health
        was = health.state
        try:
            await self.remote.ask(self.identity)
            failure = ""
        except (ConfigError, TierError) as error:  # of which StoreErrors are some
            failure = str(error)
        if failure or health.down or not self.spill.failing:
            health.probed(time.monotonic(), failure)
        if was == "down" and not health.down:
            self.spill.backoff.reset()
        if health.state != was:
            self.spill.dirty.wake()
            self.spill.ledger.work.wake()
