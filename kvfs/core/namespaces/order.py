"""What one tier holds of one namespace, in the order in which it may go.

Contract: synchronous, no I/O. Members are inode numbers; they enter by `touch` with what their
name said of them (`Inode.key`, `Inode.parent_key`), so that a policy knows an object again that was
dropped and is made anew. Objects of one key are a group: shards of one block, taken together. What
was there before the daemon started comes in by `add_past`, oldest first within the hour of its last
use, at 8 bytes each until it is touched, and goes before all that was. What is *held* is a member
that is not taken, until it is released, touched or discarded. About 320 bytes for a member
that was touched, with its place in the policy (scripts/bench/bookkeeping.py, blocks of prompts).
The last touches wait, `LATELY` at most, until somebody asks for anything else: an open only notes
them. Not for saying whether an object may go now: that is `Victims`.
"""

from array import array
from collections.abc import Iterator
from itertools import chain
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.eviction import LeafFirst, Policy

EPSILON = 16  # entries, the least that a policy is told to have room for
LATELY = 32  # touches, some 0.1 ms


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
        self._policy = policy
        self.goes = goes
        self._lately: list[tuple[int, int, int]] = []  # key, inode and parent's key
        self._groups: dict[int, tuple[int, ...]] = {}  # by key, where there ever was a second one
        self._held: dict[int, tuple[int, ...]] = {}  # by key
        self._before: list[Policy] = []  # who said so before, as long as they have something
        self._past: dict[int, array[int]] = {}  # by hour
        self._reversed: int | None = None  # the hour that is being used up, from its end

    @property
    def policy(self) -> Policy:
        """With every touch that there was."""
        self._settle()
        return self._policy

    def __len__(self) -> int:
        """Groups, and objects of the past, which may be there in vain."""
        policies = sum(len(policy) for policy in (self.policy, *self._before))
        return policies + sum(map(len, self._past.values()))

    def members(self, key: int) -> tuple[int, ...]:
        self._settle()
        group = self._groups.get(key) or self._held.get(key)
        if group is not None:
            return group
        for policy in (self.policy, *self._before):
            ino = policy.value(key)
            if ino is not None:
                return (ino,)
        return ()

    def touch(self, inode: Inode) -> None:
        """It was used, or is new here."""
        lately = self._lately
        lately.append((inode.key or inode.ino, inode.ino, inode.parent_key))
        if len(lately) == LATELY:
            self._settle()

    def _settle(self) -> None:
        """Give each that was touched its place."""
        if self._lately:
            lately, self._lately = self._lately, []
            for key, ino, parent in lately:
                self._touch(key, ino, parent)

    def _touch(self, key: int, ino: int, parent: int) -> None:
        policy = self._policy
        if self._held:
            self.release(key)
        found = policy.touch(key)
        if found == ino and key not in self._groups:
            return
        if found is None:
            found = self._discard_before(key)
            policy.add(key, ino if found is None else found, parent)
        if found is not None and ino not in (group := self._groups.get(key, (found,))):
            self._groups[key] = (*group, ino)

    def parent(self, key: int) -> int:
        """Of the block before it in its prompt; 0: not known."""
        policies = (self.policy, *self._before)
        able = (policy for policy in policies if isinstance(policy, LeafFirst))
        return next(filter(None, (policy.parent(key) for policy in able)), 0)

    def discard(self, inode: Inode) -> None:
        """One of the past cannot be taken out: who takes it finds that it is not here any more."""
        self._settle()
        key = key_of(inode)
        if self._held:
            self.release(key)
        group = self._groups.get(key)
        if group is None:
            if self.policy.value(key) == inode.ino:
                self.policy.discard(key)
            elif self._before and inode.ino in self.members(key):
                self._discard_before(key)
        elif left := tuple(ino for ino in group if ino != inode.ino):
            self._groups[key] = left
        else:
            del self._groups[key]
            if self._discard_before(key) is None:
                self.policy.discard(key)

    def _discard_before(self, key: int) -> int | None:
        found = (policy.discard(key) for policy in self._before)
        return next((ino for ino in found if ino is not None), None)

    def __contains__(self, inode: Inode) -> bool:
        """Whether it has been touched here."""
        return inode.ino in self.members(key_of(inode))

    def add_past(self, ino: int, hour: int) -> None:
        self._past.setdefault(hour, array("q")).append(ino)

    def take(self, incoming: int | None = None) -> Victim | None:
        """The next to go; None: nothing may. `incoming` is the key that room is made for.

        One of the past may have been touched, rewritten or dropped since: the caller looks.
        """
        self._settle()
        while self._past and self.goes:
            hour = min(self._past)
            inos = self._past[hour]
            if hour != self._reversed:
                inos.reverse()  # they came in oldest first, and are taken from the end
                self._reversed = hour
            if inos:
                return Victim(0, (inos.pop(),))
            del self._past[hour]
        taken = self._take(incoming) if self.goes else None
        if taken is None:
            return None
        key, ino = taken
        return Victim(key, self._groups.pop(key, (ino,)))

    def _take(self, incoming: int | None) -> tuple[int, int] | None:
        while self._before:
            before = self._before[0]
            taken = before.take(incoming)
            if taken is not None:
                return taken
            key = next(iter(before), None)  # it never gave anything
            ino = None if key is None else before.discard(key)
            if key is not None and ino is not None:
                return key, ino
            del self._before[0]
        return self.policy.take(incoming)

    def put_back(self, victim: Victim) -> None:
        """It cannot go now: it is the next again, or nearly so."""
        self._settle()
        if victim.key:
            if len(victim.inos) > 1:
                self._groups[victim.key] = victim.inos
            policy = self._before[0] if self._before else self.policy
            policy.put_back(victim.key, victim.inos[0])
        else:
            hour = min(self._past, default=0)
            self._reversed = hour
            self._past.setdefault(hour, array("q")).append(victim.inos[0])

    def hold(self, victim: Victim, key: int) -> None:
        """It is not to be taken before it is released, or used; `key` also of one of the past."""
        self._settle()
        self._held[key] = victim.inos

    def release(self, key: int) -> None:
        """It may be taken, if it was held: it is the next."""
        self._settle()
        inos = self._held.pop(key, None)
        if inos is not None:
            self.put_back(Victim(key, inos))

    def change(self, policy: Policy, *, goes: bool) -> None:
        """Another policy from now on; what is here goes first, as it would have gone.

        Of any size in no time: what is touched from now on is the new policy's.
        """
        self._before = [one for one in (*self._before, self.policy) if len(one)]
        self._policy, self.goes = policy, goes

    def give_room_for(self, entries: int) -> None:
        """How many groups there is room for at their mean size."""
        self.policy.capacity = max(EPSILON, entries)

    def __iter__(self) -> Iterator[int]:
        """All members, in about the order in which they would go, for looking only."""
        for hour in sorted(self._past):
            inos = self._past[hour]
            yield from reversed(inos) if hour == self._reversed else inos
        for key in chain(*self._before, self.policy, self._held):
            yield from self.members(key)
