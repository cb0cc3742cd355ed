"""What one tier holds of one namespace, in the order in which it may go.

Contract: synchronous, no I/O. Members are inode numbers; they enter by `touch` with what their
name said of them (`Inode.key`, `Inode.parent_key`), so that a policy knows an object again that was
dropped and is made anew. Objects of one key are a group: shards of one block, taken together. What
was there before the daemon started comes in by `add_past`, oldest first within the hour of its last
use, at 8 bytes each until it is touched, and goes before all that was. About 300 bytes for a member
that was touched, by the sizes of its dicts, beside what the policy remembers.
Not for saying whether an object may go now: that is `Room`.
"""

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.eviction import Adaptive, LeafFirst, Policy

EPSILON = 16  # entries, the least that a policy is told to have room for


class Victim(NamedTuple):
    """A group that is next to go. It has left the order; `key` is 0 for one of the past."""

    key: int
    inos: tuple[int, ...]


def key_of(inode: Inode) -> int:
    """What a policy knows an object by; for those without a name that was read, their number."""
    return inode.key or inode.ino


class Order:
    """`policy` says who goes first of those that were touched."""

    def __init__(self, policy: Policy, *, goes: bool = True) -> None:
        """`goes`: whether anything here may ever be taken."""
        self.policy = policy
        self.goes = goes
        self._members: dict[int, int | tuple[int, ...]] = {}  # by key
        self._before: list[Policy] = []  # who said so before, as long as they have something
        self._past: dict[int, array[int]] = {}  # by hour
        self._reversed: int | None = None  # the hour that is being used up, from its end

    def __len__(self) -> int:
        """Groups, and objects of the past, which may be there in vain."""
        return len(self._members) + sum(map(len, self._past.values()))

    def members(self, key: int) -> tuple[int, ...]:
        found = self._members.get(key, ())
        return found if isinstance(found, tuple) else (found,)

    def touch(self, inode: Inode) -> None:
        """It was used, or is new here."""
        key = inode.key or inode.ino
        found = self._members.get(key)
        if found is None:
            self._members[key] = inode.ino
            self.policy.add(key, 0, inode.parent_key)
            return
        if found != inode.ino and inode.ino not in self.members(key):
            self._members[key] = (*self.members(key), inode.ino)
        if self._discard_before(key):
            self.policy.add(key, 0, inode.parent_key)
        else:
            self.policy.touch(key)

    def parent(self, key: int) -> int:
        """Of the block before it in its prompt; 0: not known."""
        policies = (self.policy, *self._before)
        able = (policy for policy in policies if isinstance(policy, LeafFirst | Adaptive))
        return next(filter(None, (policy.parent(key) for policy in able)), 0)

    def discard(self, inode: Inode) -> None:
        """One of the past cannot be taken out: who takes it finds that it is not here any more."""
        key = key_of(inode)
        left = tuple(ino for ino in self.members(key) if ino != inode.ino)
        if left:
            self._members[key] = left
        elif self._members.pop(key, None) is not None and not self._discard_before(key):
            self.policy.discard(key)

    def _discard_before(self, key: int) -> bool:
        return any(policy.discard(key) is not None for policy in self._before)

    def __contains__(self, inode: Inode) -> bool:
        """Whether it has been touched here."""
        return inode.ino in self.members(key_of(inode))

    def add_past(self, ino: int, hour: int) -> None:
        self._past.setdefault(hour, array("q")).append(ino)

    def take(self, incoming: int | None = None) -> Victim | None:
        """The next to go; None: nothing may. `incoming` is the key that room is made for.

        One of the past may have been touched, rewritten or dropped since: the caller looks.
        """
        while self._past and self.goes:
            hour = min(self._past)
            inos = self._past[hour]
            if hour != self._reversed:
                inos.reverse()  # they came in oldest first, and are taken from the end
                self._reversed = hour
            if inos:
                return Victim(0, (inos.pop(),))
            del self._past[hour]
        key = self._take(incoming) if self.goes else None
        if key is None:
            return None
        victim = Victim(key, self.members(key))
        del self._members[key]
        return victim

    def _take(self, incoming: int | None) -> int | None:
        while self._before:
            before = self._before[0]
            taken = before.take(incoming)
            if taken is not None:
                return taken[0]
            key = next(iter(before), None)  # it never gave anything
            if key is not None:
                before.discard(key)
                return key
            del self._before[0]
        taken = self.policy.take(incoming)
        return None if taken is None else taken[0]

    def put_back(self, victim: Victim) -> None:
        """It cannot go now: it is the next again, or nearly so."""
        if victim.key:
            self._members[victim.key] = victim.inos if len(victim.inos) > 1 else victim.inos[0]
            (self._before[0] if self._before else self.policy).put_back(victim.key, 0)
        else:
            hour = min(self._past, default=0)
            self._reversed = hour
            self._past.setdefault(hour, array("q")).append(victim.inos[0])

    def change(self, policy: Policy, *, goes: bool) -> None:
        """Another policy from now on; what is here goes first, as it would have gone.

        Of any size in no time: what is touched from now on is the new policy's.
        """
        self._before = [one for one in (*self._before, self.policy) if len(one)]
        self.policy, self.goes = policy, goes

    def give_room_for(self, entries: int) -> None:
        """How many groups there is room for at their mean size."""
        self.policy.capacity = max(EPSILON, entries)

    def __iter__(self) -> Iterator[int]:
        """All members, in about the order in which they would go, for looking only."""
        for hour in sorted(self._past):
            inos = self._past[hour]
            yield from reversed(inos) if hour == self._reversed else inos
        for key in chain(*self._before, self.policy):
            yield from self.members(key)
