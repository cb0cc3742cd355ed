"""Creates wait for demotions: until a demotion ends, its objects take room in RAM and on NVMe.

Contract: `under_way` notes a demotion for as long as its block runs. `ended` waits for the next end
of a demotion that may make room for a namespace, for WAIT at most. After the wait the caller checks
its conditions again. While no demotion ends, only the first creates wait for WAIT; creates that
come later have no time left. No create waits while NVMe is down. The caller holds no lock that a
demotion needs.
Not for choosing what to demote (`Demotion`), nor for the room itself (`Room`).
"""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import trio

from kvfs.core.namespaces.namespace import Namespace
from kvfs.tiers import NvmeTier, RamTier

WAIT = 5.0  # s


class Demoting:
    """The demotions that are under way. Times are of trio's clock."""

    def __init__(self, ram: RamTier, nvme: NvmeTier) -> None:
        self.ram = ram
        self.nvme = nvme
        self._bytes: Counter[Namespace] = Counter()
        self._end = trio.Event()  # set at the next end of a demotion, and then replaced
        self._waited_since = -math.inf  # the last end of one, or the beginning of the first

    @property
    def bytes(self) -> int:
        """Bytes on their way to NVMe."""
        return self._bytes.total()

    @contextmanager
    def under_way(self, space: Namespace, size: int) -> Iterator[None]:
        """Note that objects of a namespace, of `size` bytes, are being copied to NVMe."""
        if not self._bytes:
            self._waited_since = trio.current_time()
        self._bytes[space] += size
        try:
            yield
        finally:
            self._bytes = self._bytes - Counter({space: size})
            self._waited_since = trio.current_time()
            self._end.set()
            self._end = trio.Event()

    async def ended(self, space: Namespace, deadline: float) -> bool:
        """Wait until a demotion ends; return False if none helps a namespace before a deadline."""
        if self.nvme.health.down or not self._helps(space):
            return False
        with trio.move_on_at(min(deadline, self._waited_since + WAIT)) as late:
            await self._end.wait()
        return not late.cancelled_caught

    def _helps(self, space: Namespace) -> bool:
        """Whether a namespace gets room in RAM of an object that is being copied to NVMe.

        Its copy in RAM then goes for any namespace (`Room.evict_copies`). With pin=on it stays.
        """
        return space.takes(self.ram) and any(not one.settings.pin for one in self._bytes)
