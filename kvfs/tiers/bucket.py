"""The bucket below the other tiers, as the daemon knows it: where it is, how it is, what it holds.

Contract: plain state without I/O; calls are made by movers (`kvfs.movement.remote`). It has no
files, so it is no `Tier`: nothing is opened in it, and what only it holds is brought up first.
`used` is the sizes of the objects as their readers see them. Not for what waits for its upload:
that is `core/ledger/dirty.py`.
"""

import time
from collections import Counter

from kvfs.s3.keys import Keys
from kvfs.s3.place import Place
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

WRONG_MOST = 4096  # keys that are remembered; what is forgotten is fetched once more


class Bucket:
    """`terms`: what its store honours; None until it could be asked. `hits`: opens it served.

    `delay`, `wait`, `recheck` (seconds), `stream` (bytes) and `shared` may change: see `Config`.
    """

    name = "s3"
    mounted = True

    def __init__(
        self,
        place: Place,
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

        shared: others may use the prefix; exclusive: they are refused there.
        identity: of the kvfs that uses it.
        """
        self.place = place
        self.keys = Keys(place.prefix)
        self.terms = terms
        self.most = most
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
        self.errors: Counter[str] = Counter()  # those of `failures`, by the name of their class
        self._wrong: dict[str, str] = {}  # ETags by key; the oldest first

    def failed(self, what: str, error: Exception) -> None:
        """A request was answered with a failure that is the store's, or not at all."""
        self.counters["failures"] += 1
        self.errors[type(error).__name__] += 1
        self.health.failed(time.monotonic(), f"{what}: {error}")

    def gave_wrong_bytes(self, key: str, etag: str) -> None:
        """It is left there, as what is between may have made it so, and is not found here.

        Until something else is there, this node writes it anew, or the daemon ends.
        """
        self._wrong[key] = etag
        if len(self._wrong) > WRONG_MOST:
            del self._wrong[next(iter(self._wrong))]

    def wrote(self, key: str) -> None:
        """This node has put it there anew."""
        self._wrong.pop(key, None)

    def gives_wrong_bytes(self, key: str, etag: str | None = None) -> bool:
        """Whether it did when it was last fetched; etag: None: whatever is there."""
        known = self._wrong.get(key)
        return known is not None and etag in {None, known}
