"""The bucket below the other tiers, as the daemon knows it: its place, health and content.

Contract: plain state without I/O; movers make the calls (`kvfs.movement.remote`). It has no files,
so it is no `Tier`. kvfs opens nothing in it, and hydrates an object first if only the bucket has
it. `used` is the sizes of the objects as their readers see them. Not for objects that wait for
their upload: those are in `core/ledger/dirty.py`.
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

WRONG_MOST = 4096  # keys; kvfs fetches an object once more if its key was forgotten


class Bucket:
    """`terms`: what the store honours, None until kvfs could ask. `hits`: opens it served.

    `delay`, `wait`, `recheck` (seconds), `stream` (bytes) and `shared` may change: see `Config`.
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

        shared: other nodes may use the prefix; exclusive: kvfs refuses other nodes there. identity:
        of the kvfs that uses it.
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
        self.errors: Counter[str] = Counter()  # of `failures`, by the name of the class
        self._wrong: dict[str, str] = {}  # ETags by key; the oldest first

    def failed(self, what: str, error: Exception) -> None:
        """Record that the store failed or did not answer a request."""
        self.counters["failures"] += 1
        self.errors[type(error).__name__] += 1
        self.health.failed(time.monotonic(), f"{what}: {error}")

    def gave_wrong_bytes(self, key: str, etag: str) -> None:
        """Note that a key gave wrong bytes, and treat its object as missing.

        The object stays in the bucket, because a cause between may have changed the bytes. The note
        ends when another object is there, when this node writes the key again, or when the daemon
        ends.
        """
        self._wrong[key] = etag
        if len(self._wrong) > WRONG_MOST:
            del self._wrong[next(iter(self._wrong))]

    def forget_wrong_bytes(self, key: str) -> None:
        """Forget a note, because this node has written the key again."""
        self._wrong.pop(key, None)

    def gives_wrong_bytes(self, key: str, etag: str | None = None) -> bool:
        """Whether the last fetch of the key gave wrong bytes. etag None: of any object there."""
        known = self._wrong.get(key)
        return known is not None and etag in {None, known}
