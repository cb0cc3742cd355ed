"""One policy takes over from another, in O(1): what it finds goes first, in the order of the old.

An entry that is used meanwhile is the new policy's. Contract: `kvfs.eviction.policy`. Not for good:
the owner uses `new` alone as soon as `past` is empty.
"""

from collections.abc import Iterator
from itertools import chain

from kvfs.eviction.policy import Policy


class Succession:
    """`new`, as long as there is something of the `past`."""

    __slots__ = ("new", "past")

    def __init__(self, new: Policy, past: Policy) -> None:
        self.new = new
        self.past = past

    @property
    def capacity(self) -> int:
        return self.new.capacity

    @capacity.setter
    def capacity(self, entries: int) -> None:
        self.new.capacity = entries

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        self.past.discard(key)
        self.new.add(key, value, parent)

    def touch(self, key: int) -> int | None:
        value = self.past.discard(key)
        if value is not None:
            self.new.add(key, value)
        return self.new.touch(key)

    def value(self, key: int) -> int | None:
        value = self.new.value(key)
        return self.past.value(key) if value is None else value

    def discard(self, key: int) -> int | None:
        value = self.past.discard(key)
        return self.new.discard(key) if value is None else value

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        return self.past.take(incoming) or self.new.take(incoming)

    def put_back(self, key: int, value: int) -> None:
        (self.past if len(self.past) else self.new).put_back(key, value)

    def __contains__(self, key: object) -> bool:
        return key in self.new or key in self.past

    def __len__(self) -> int:
        return len(self.new) + len(self.past)

    def __iter__(self) -> Iterator[int]:
        return chain(self.past, self.new)
