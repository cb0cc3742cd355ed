"""Least recently used, with a cheap past.

Contract: `touch` puts a key at the young end, `oldest` yields keys from the old end. Keys that
were there before the daemon started come in by `add_past`, oldest first within the hour of their
last use: they cost 8 bytes each until they are touched or dropped, against about 130 for a key in
the ordered dict.
"""

from array import array
from collections import OrderedDict
from collections.abc import Iterator


class LeastRecentlyUsed:
    """Keys are positive integers below 2**63."""

    def __init__(self) -> None:
        self._young: OrderedDict[int, None] = OrderedDict()
        self._past: dict[int, array[int]] = {}  # by hour
        self._reversed: int | None = None  # the hour that is being used up, from its end

    def __len__(self) -> int:
        return len(self._young) + sum(map(len, self._past.values()))

    def touch(self, key: int) -> None:
        self._young[key] = None
        self._young.move_to_end(key)

    def put_back(self, key: int) -> None:
        """A key that was taken as the oldest is the oldest again."""
        self._young[key] = None
        self._young.move_to_end(key, last=False)

    def discard(self, key: int) -> None:
        """A key of the past cannot be taken out; its owner no longer answers for it."""
        self._young.pop(key, None)

    def add_past(self, key: int, hour: int) -> None:
        if key not in self._young:
            self._past.setdefault(hour, array("q")).append(key)

    def take_oldest(self) -> int | None:
        """Remove and return the key that was used longest ago.

        A key can come twice, from the past and again after a touch; the caller checks what it
        gets against what it knows of the object.
        """
        while self._past:
            hour = min(self._past)
            keys = self._past[hour]
            if hour != self._reversed:
                keys.reverse()  # they came in oldest first, and are taken from the end
                self._reversed = hour
            while keys:
                key = keys.pop()
                if key not in self._young:
                    return key
            del self._past[hour]
        if self._young:
            return self._young.popitem(last=False)[0]
        return None

    def __iter__(self) -> Iterator[int]:
        """All keys, oldest first, for looking only."""
        for hour in sorted(self._past):
            keys = self._past[hour]
            for key in reversed(keys) if hour == self._reversed else keys:
                if key not in self._young:
                    yield key
        yield from self._young
