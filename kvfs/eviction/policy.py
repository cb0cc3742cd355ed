"""The interface of a policy: the order in which the entries of one cache go.

Contract: a policy counts entries, not bytes, and decides nothing but the next victim. Keys are
positive integers below 2**63 that mean the same object for good (hashes of names). Values are the
caller's own and come back with the key. A cache uses a policy so:

    if key in policy:
        policy.touch(key)
    else:
        while len(policy) >= policy.capacity:
            policy.take(key)
        policy.add(key, value)

But every call may come at any time: a file system makes room when it must, not when a count says
so. Every call is amortised O(1). Not for deciding whether a victim may go: the caller returns one
that cannot go now with `put_back`. Not safe for threads.
"""

from collections.abc import Iterator
from typing import Protocol


class Policy(Protocol):
    """The order of one cache."""

    capacity: int  # entries; may be changed at any time; not every policy needs it

    def add(self, key: int, value: int = 0, parent: int = 0) -> None:
        """Add a new entry; the policy finds its history of the entry by its key.

        A key that is present begins anew, as if it had been discarded before.

        `parent` is the key of the block before it in its prefix, 0 where that is not known. Only
        `LeafFirst` and `Adaptive` make use of it.
        """

    def touch(self, key: int) -> int | None:
        """Note an access; return the value. None: the key is not here, and nothing has changed."""

    def value(self, key: int) -> int | None:
        """Return the value of an entry, without an access; None: it is not here."""

    def discard(self, key: int) -> int | None:
        """Remove an entry without eviction; return its value. None: it was absent."""

    def take(self, incoming: int | None = None) -> tuple[int, int] | None:
        """Remove and return the next victim with its value; None: nothing may go.

        `incoming` is the key that it makes room for, where that is known.
        """

    def put_back(self, key: int, value: int) -> None:
        """Return a victim that cannot go now: it is the next victim again, or nearly so."""

    def __contains__(self, key: object) -> bool: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[int]:
        """Yield the keys in about the order in which they would go: for looking only."""
