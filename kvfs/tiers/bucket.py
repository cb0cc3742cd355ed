"""The daemon's state of the bucket below the other tiers: its place, health and counts.

Contract: plain state without I/O; movers send the requests (`kvfs.movement.remote`). The bucket has
no files, so `Bucket` is no `Tier`. Programs open nothing there: kvfs first hydrates an object that
only the bucket has. `used` is the sum of the sizes of the objects, without compression. Not for
objects that wait for their upload: those are in `core/ledger/dirty.py`.
"""

import time
from collections import Counter

from kvfs.s3.keys import Keys
from kvfs.s3.place import BucketPlace
from kvfs.s3.transfer import Terms
from kvfs.tiers.calls import Health
from kvfs.tiers.tier import PACKING_COUNTERS

COUNTERS = (
    "uploads",
    "upload_bytes",
    "downloads",
    "download_bytes",
    "headers",
    "copies",
    "deletes",
    "spilled",
    "conflicts",
    "conflicts_ended",
    *PACKING_COUNTERS,
    "failures",
    "waits",
    "lookups",
    "found",
    "absent_cached",
    "imported",
    "stale",
    "refused",
    "prefetched",
    "prefetch_used",
    "prefetch_wasted",
    "warmed",
)

WRONG_MOST = 4096  # keys that gave wrong bytes; kvfs forgets older ones, and fetches them once more


class Bucket:
    """The state of one bucket. `hits` counts the opens for which kvfs fetched an object from it.

    `terms` has the request sizes and guarantees of the store; None until kvfs could ask. `delay`,
    `wait`, `recheck` (seconds), `stream` (bytes) and `shared` may change: see `Config`.
    """

    name = "s3"
    mounted = True

    def __init__(
        self,
        place: BucketPlace,
        terms: Terms | None,
        *,
        most: int,
        delay: float = 0.0,
        wait: float = 0.0,
        shared: bool = True,
        exclusive: bool = False,
        identity: str = "",
    ) -> None:
        """most: bytes that may wait for their upload; delay, wait: seconds, see `Config`.

        shared: other nodes may use the prefix. exclusive: kvfs refuses other nodes there. identity:
        the identity of this node.
        """
        self.place = place
        self.keys = Keys(place.prefix)
        self.terms = terms
        self.max_dirty_bytes = most
        self.delay = delay
        self.wait = wait
        self.recheck = 30.0
        self.shared = shared
        self.exclusive = exclusive
        self.identity = identity
        self.stream = 0
        self.used = self.objects = self.hits = 0
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.health = Health(f"s3 tier {place}", time.monotonic())
        self.errors: Counter[str] = Counter()  # the number of `failures` by exception class
        self._wrong: dict[str, str] = {}  # ETags by key that gave wrong bytes; the oldest first

    def failed(self, what: str, error: Exception) -> None:
        """Record that the store failed or did not answer. what: the request."""
        self.counters["failures"] += 1
        self.errors[type(error).__name__] += 1
        self.health.failed(time.monotonic(), f"{what}: {error}")

    def gave_wrong_bytes(self, key: str, etag: str) -> None:
        """Note that a key gave wrong bytes, and treat its object as missing.

        The object stays in the bucket: its bytes may have changed on the way here. The note is
        valid until the key has another ETag, until this node writes the key again, or until the
        daemon ends.
        """
        self._wrong[key] = etag
        if len(self._wrong) > WRONG_MOST:
            del self._wrong[next(iter(self._wrong))]

    def forget_wrong_bytes(self, key: str) -> None:
        """Forget the note of `gave_wrong_bytes`, because this node has written the key again."""
        self._wrong.pop(key, None)

    def gives_wrong_bytes(self, key: str, etag: str | None = None) -> bool:
        """Whether the last fetch of the key gave wrong bytes. etag: of the object; None: of any."""
        known = self._wrong.get(key)
        return known is not None and etag in {None, known}
