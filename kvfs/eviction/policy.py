"""What a policy is: the order in which the entries of one cache go.

Contract: a policy counts entries, not bytes, and decides nothing but the next victim. Keys are
positive integers below 2**63 that mean the same object for good (hashes of names), values are the
caller's own and come back with the key. A cache is driven by

    if key in policy:
        policy.touch(key)
    else:
        while len(policy) >= policy.capacity:
            policy.take(key)
        policy.add(key, value)

yet every call may come at any time: a file system makes room when it must, not when a count says
so. Every call is amortised O(1). Not for saying what may go: who gets a victim that cannot go now
gives it back with `put_back`. Not safe for threads.
"""

from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
    """The order of one cache."""

    capacity: int  # entries; may be changed at any time; not every policy needs it

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        """A new entry; what is remembered of it from earlier is found by its key.

        A key that is present begins anew, as if it had been discarded before.

        `parent` is the key of the block before it in its prefix, 0 where that is not known. Only
        `LeafFirst` and `Adaptive` make use of it.
        """

    def touch(self, key: int) -> int | None:
        """An access; its value. None: the key is not here, and nothing has changed."""

    def value(self, key: int) -> int | None:
        """What it was added with, without an access; None: it is not here."""

    def discard(self, key: int) -> int | None:
        """It left for another reason than eviction; its value. None: it was absent."""

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        """The next victim, removed, with its value; None: nothing may go.

        `incoming` is the key that it makes room for, where that is known.
        """

    def put_back(self, key: int, value: int) -> None:
        """What `take` gave cannot go now: it is the next victim again, or nearly so."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """The keys in about the order in which they would go: for looking only."""
