"""An order of eviction: the objects of one namespace in one tier, as they may go.

Contract: synchronous, no I/O. Members are inode numbers. They enter by `touch` with the keys from
their names (`Inode.key`, `Inode.parent_key`), so a policy knows a dropped object again after a new
create. Objects of one key are a group: shards of one block, taken together. Objects from before
the daemon's start enter by `add_past`, oldest first within the hour of their last use. Each takes 8
bytes until it is touched, and goes before all touched ones. A *held* member is not taken until it
is released, touched or discarded. A *late* member was copied here after objects that were used
later than it. It goes before those: its place follows its last use, and the policy does not know it
until it is touched. A touched member takes about 320 bytes, with its place in the
policy (scripts/bench/bookkeeping.py, blocks of prompts). At most `LATELY` touches wait until a
caller asks for anything else: an open only notes them. Not for deciding whether an object may go
now (`Victims`).
"""

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from kvfs.catalog import Inode
from kvfs.eviction import LeafFirst, Policy

EPSILON = 16  # entries, the least that a policy is told to have room for
LATELY = 32  # touches, some 0.1 ms


class Victim(NamedTuple):
    """The group that goes next. It has left the order. `key` is 0 for an object of the past."""

    key: int
    inos: tuple[int, ...]


def last_use(inode: Inode) -> int:
    """When an object was used or written last, in ns since 1970. A use may be a minute later."""
    return max(inode.atime_ns, inode.mtime_ns)


def key_of(inode: Inode) -> int:
    """The key by which a policy knows an object: that of its name, else the inode number."""
    return inode.key or inode.ino


class Order:
    """One order. `policy` says which touched group goes first."""

    def __init__(self, policy: Policy, *, evictable: bool = True) -> None:
        """evictable: whether a member may ever be taken."""
        self._policy = policy
        self.evictable = evictable
        self._lately: list[tuple[int, int, int]] = []  # key, inode and parent's key
        self._groups: dict[int, tuple[int, ...]] = {}  # by key, if there ever was a second object
        self._held: dict[int, tuple[int, ...]] = {}  # by key
        self._late: OrderedDict[int, tuple[int, int]] = OrderedDict()  # by key: inode, last use
        self._newest = 0  # ns: the last use of the last object that was stored here
        self._before: list[Policy] = []  # former policies, as long as they have members
        self._past: dict[int, array[int]] = {}  # by hour
        self._reversed: int | None = None  # the hour whose members are being taken, from the end

    @property
    def policy(self) -> Policy:
        """The policy, with all touches so far."""
        self._flush_touches()
        return self._policy

    def __len__(self) -> int:
        """The number of groups and of objects of the past; some of the latter may be obsolete."""
        policies = sum(len(policy) for policy in (self.policy, *self._before))
        return policies + len(self._late) + sum(map(len, self._past.values()))

    def members(self, key: int) -> tuple[int, ...]:
        self._flush_touches()
        group = self._groups.get(key) or self._held.get(key)
        if group is not None:
            return group
        if key in self._late:
            return (self._late[key][0],)
        for policy in (self.policy, *self._before):
            ino = policy.value(key)
            if ino is not None:
                return (ino,)
        return ()

    def touch(self, inode: Inode) -> None:
        """Note that an object was used, or is new here."""
        lately = self._lately
        lately.append((inode.key or inode.ino, inode.ino, inode.parent_key))
        if len(lately) == LATELY:
            self._flush_touches()

    def note_stored(self, inode: Inode) -> None:
        """Note that an object was written here: objects that were used earlier are late here."""
        self._newest = max(self._newest, last_use(inode))

    def copy(self, inode: Inode) -> None:
        """Note that an object was copied here, without a use: its place follows its last use."""
        used, key = last_use(inode), key_of(inode)
        # A policy that is leaf-first must know the blocks of a prompt.
        if used >= self._newest or inode.parent_key or self.members(key):
            self.touch(inode)
        else:
            self._late[key] = inode.ino, used

    def _flush_touches(self) -> None:
        """Give the noted touches to the policy."""
        if self._lately:
            lately, self._lately = self._lately, []
            for key, ino, parent in lately:
                self._touch(key, ino, parent)

    def _touch(self, key: int, ino: int, parent: int) -> None:
        policy = self._policy
        if self._held:
            self.release(key)
        if self._late and (late := self._late.pop(key, None)) is not None:
            policy.add(key, late[0], parent)
        found = policy.touch(key)
        if found == ino and key not in self._groups:
            return
        if found is None:
            found = self._discard_before(key)
            policy.add(key, ino if found is None else found, parent)
        if found is not None and ino not in (group := self._groups.get(key, (found,))):
            self._groups[key] = (*group, ino)

    def parent(self, key: int) -> int:
        """The key of the block before a block in its prompt; 0: not known."""
        policies = (self.policy, *self._before)
        able = (policy for policy in policies if isinstance(policy, LeafFirst))
        return next(filter(None, (policy.parent(key) for policy in able)), 0)

    def discard(self, inode: Inode) -> None:
        """Remove a touched object. One of the past stays: the caller that takes it looks again."""
        self._flush_touches()
        key = key_of(inode)
        if self._held:
            self.release(key)
        group = self._groups.get(key)
        if group is None:
            if key in self._late:
                if self._late[key][0] == inode.ino:
                    del self._late[key]
            elif self.policy.value(key) == inode.ino:
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
        """Whether an object has been touched here."""
        return inode.ino in self.members(key_of(inode))

    def add_past(self, ino: int, hour: int) -> None:
        self._past.setdefault(hour, array("q")).append(ino)

    def take(self, used: Callable[[int], int] = lambda _: sys.maxsize) -> Victim | None:
        """Take the next group; None if none may go. used: returns the last use of an inode, in ns.

        Without `used`, late members go before the members that the policy knows.

        An object of the past may have been touched, rewritten or dropped since: the caller looks.
        """
        self._flush_touches()
        while self._past and self.evictable:
            hour = min(self._past)
            inos = self._past[hour]
            if hour != self._reversed:
                inos.reverse()  # they entered oldest first, and are taken from the end
                self._reversed = hour
            if inos:
                return Victim(0, (inos.pop(),))
            del self._past[hour]
        taken = self._take(used) if self.evictable else None
        if taken is None:
            return None
        key, ino = taken
        return Victim(key, self._groups.pop(key, (ino,)))

    def _take(self, used: Callable[[int], int]) -> tuple[int, int] | None:
        while self._before:
            before = self._before[0]
            taken = before.take()
            if taken is not None:
                return taken
            key = next(iter(before), None)  # its policy never gives a member
            ino = None if key is None else before.discard(key)
            if key is not None and ino is not None:
                return key, ino
            del self._before[0]
        if self._late:
            key, (ino, late) = next(iter(self._late.items()))
            other = self.policy.value(next(iter(self.policy), 0))
            if other is None or late < used(other):
                del self._late[key]
                return key, ino
        return self.policy.take()

    def put_back(self, victim: Victim) -> None:
        """Put back a group that cannot go now: it is the next again, or nearly so."""
        self._flush_touches()
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
        """Hold a taken group until it is released or used. key: its key, for the past as well."""
        self._flush_touches()
        self._held[key] = victim.inos

    def release(self, key: int) -> None:
        """Let a held group go again: it is the next."""
        self._flush_touches()
        inos = self._held.pop(key, None)
        if inos is not None:
            self.put_back(Victim(key, inos))

    def change(self, policy: Policy, *, evictable: bool) -> None:
        """Follow another policy. The present members go first, in the order of the former policy.

        The change takes no time at any size: members come to the new policy by their next touch.
        """
        self._before = [one for one in (*self._before, self.policy) if len(one)]
        self._policy, self.evictable = policy, evictable

    def give_room_for(self, entries: int) -> None:
        """Tell the policy for how many groups there is room, at their mean size."""
        self.policy.capacity = max(EPSILON, entries)

    def __iter__(self) -> Iterator[int]:
        """Yield all members, in about the order in which they would go; nothing is taken."""
        for hour in sorted(self._past):
            inos = self._past[hour]
            yield from reversed(inos) if hour == self._reversed else inos
        for key in chain(*self._before, self._late, self.policy, self._held):
            yield from self.members(key)
