"""One namespace: its settings, its accounts, and its orders of eviction.

Contract: synchronous, no I/O. Bytes are physical, each object counted once. There is an order for
each fate of an object: lost, evicted from RAM only, dropped for a quota. Each object is in the
orders that `order` names, and in `quota_order`. `accesses` shows each access to the policies, once
for all orders. Not for finding the namespace of an object (`Namespaces`), nor for victims
(`Victims`).
"""

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

from kvfs import eviction
from kvfs.catalog import Inode
from kvfs.core.namespaces.blocks import Blocks
from kvfs.core.namespaces.drops import Drops
from kvfs.core.namespaces.guests import Guests
from kvfs.core.namespaces.open_order import OpenOrder
from kvfs.core.namespaces.order import Order, key_of
from kvfs.fairness.token_bucket import LATE, TokenBucket
from kvfs.settings import MEDIA, Settings
from kvfs.tiers import Bucket, OtherNodes, Tier
from kvfs.units import format_size

SECOND = 10**9
ATIME_STEP = 60 * SECOND  # ns: how old a time of use may be before it is noted again
USES_NOTED = 16  # at least so many notes in a lifetime that counts from the last use
FIRST = 512  # entries of a namespace without objects: the ghosts see all keys
READ = {name: f"read_{name}" for name in (*MEDIA, OtherNodes.name)}  # by the place of the bytes
COUNTERS = (*READ.values(), "read_bytes", "written", "written_bytes", "misses", "opens_unreadable")


class Limits:
    """Limits of opens and bytes a second in a namespace. `on` says whether there are any.

    Bytes do not pass the daemon, so an object is charged whole: a read at its open, a write at its
    close. The reader or writer waits there, never in the middle of a file. No writer waits at the
    create, since the kernel locks the directory for all programs until its answer. Not for the
    bandwidth that namespaces share (`kvfs.fairness.fair_queue`).
    """

    def __init__(self, settings: Settings) -> None:
        self._opens = {write: TokenBucket(0, LATE) for write in (False, True)}
        self._bytes = {write: TokenBucket(0, LATE) for write in (False, True)}
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Set new rates. Tasks that wait continue at these."""
        self._opens[False].rate, self._opens[True].rate = settings.read_iops, settings.write_iops
        self._bytes[False].rate, self._bytes[True].rate = settings.read_bytes, settings.write_bytes
        self.on = any(b.rate for b in (*self._opens.values(), *self._bytes.values()))

    async def acquire(self, size: int, *, written: bool) -> None:
        """Wait until an object of so many bytes may pass, read or written, and charge it."""
        for bucket, cost in ((self._opens[written], 1), (self._bytes[written], size)):
            if not bucket.try_acquire(cost):
                await bucket.acquire(cost)


class Namespace:
    """The state of one namespace. `ino` is the inode number of its directory."""

    def __init__(self, ino: int, settings: Settings, *, tiered: bool = False) -> None:
        """tiered: the mount has more than one tier."""
        self.ino = ino
        self.tiered = tiered
        self.settings = settings
        self.use_step = _use_step(settings)
        self.bytes = self.objects = 0
        self.staged = 0  # bytes that its open writers have by now, beside `bytes`
        self.ahead = 0  # bytes set aside for the next writes of those writers
        self.unlinked = 0  # bytes of its files that have no name any more
        self.spilled = 0  # objects that only the bucket has
        self.doubled_bytes = self.doubled_objects = 0  # in RAM, and on NVMe as well
        self.held: Counter[str] = Counter()  # bytes by tier
        self.held_objects: Counter[str] = Counter()
        self.kept_bytes: Counter[str] = Counter()  # of unevictable objects, by their lowest tier
        self.kept_objects = 0  # unevictable objects
        self.models: Counter[int] = Counter()  # objects by number, see `Namespaces.models`
        self.model_bytes: Counter[int] = Counter()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        # What a command drops here at the moment: a drop, a new version, or a lower hard quota.
        self.drops: Drops | None = None
        self.opens_timed, self.open_seconds = 0, 0.0  # opens to read, and how long they took
        self.refused: dict[int, int] = {}  # inode -> bytes, of the objects in `ram_spare`
        self.crowded_out: set[int] = set()  # of these: they go to NVMe once it has free room
        self.too_large: set[int] = set()  # inodes that only RAM has: they are too large for NVMe
        self.guests: Guests | None = None  # made for the first one
        self.limits = Limits(settings)
        self.opens = OpenOrder()
        entries = settings.quota_objects or FIRST  # until `resize_policies` has measured
        self.would_be = eviction.WhatIf(entries)
        self._counted_with = settings.quota_objects  # its capacity as it began to count; 0: a guess
        self.choice = eviction.PolicySelector(entries)  # the policy by which objects go
        # The policy by which objects leave RAM. Without a lower tier it is the same one.
        self.ram_choice = eviction.PolicySelector(entries) if tiered else self.choice
        self._watch()
        self._seeds: eviction.Seeds | None = eviction.Seeds()
        drops, moves = _policies(settings)
        self.ram_only = self._order(drops, self.ram_choice)
        self.ram_clean = self._order(moves, self.ram_choice)
        self.on_nvme = self._order(drops, self.choice)
        self.ram_kept = _unevictable()  # unevictable objects that only RAM holds
        self.nvme_kept = _unevictable()
        # Not worth a write to NVMe, or crowded out.
        self.ram_spare = self._order(drops, self.ram_choice)
        # The order in which objects of all tiers go for a hard quota. With an order for each tier,
        # a block of RAM would go before the blocks that follow it on NVMe. It exists only if there
        # is a quota and more than one tier.
        self.quota_order: Order | None = None
        self.quota_order_filled = True  # with all objects from before the quota
        self._arrange_quota_order()
        self.blocks = Blocks(self.release) if settings.prefix else None

    def _arrange_quota_order(self) -> None:
        quota = self.settings.quota_hard or self.settings.quota_objects
        if not (self.tiered and quota):
            self.quota_order = None
        elif self.quota_order is None:
            self.quota_order = self._order(_policies(self.settings)[0], self.choice)
            self.quota_order_filled = not self.objects

    def _watch(self) -> None:
        """Show accesses to the policies that use them, and to no others."""
        choices = {self.choice, self.ram_choice} if "adaptive" in _policies(self.settings) else ()
        self.accesses = eviction.Accesses(self.would_be, *choices)

    def _order(self, name: str, choice: eviction.PolicySelector) -> Order:
        return Order(self._policy(name, choice), evictable=name != "never")

    @staticmethod
    def _policy(name: str, choice: eviction.PolicySelector) -> eviction.Policy:
        if name == "adaptive":
            return eviction.SwitchingPolicy(choice, choice.capacity)
        return eviction.make(name, choice.capacity, leaf_first=True)

    @property
    def orders(self) -> tuple[Order, ...]:
        return (
            *(self.ram_only, self.ram_clean, self.ram_spare, self.on_nvme),
            *(self.ram_kept, self.nvme_kept),
            *((self.quota_order,) if self.quota_order is not None else ()),
        )

    def order(self, inode: Inode, tier: Tier, holders: list[Tier]) -> Order:
        """The order in which a copy of an object has its place."""
        if tier.slow:
            return self.nvme_kept if inode.unevictable else self.on_nvme
        if len(holders) > 1:
            return self.ram_clean
        if inode.unevictable:
            return self.ram_kept
        return self.ram_spare if inode.ino in self.refused else self.ram_only

    def add_guest(self, ino: int, tier: str) -> None:
        """Note that a tier has a copy that came from another node."""
        if self.guests is None:
            self.guests = Guests()
        self.guests.came(ino, tier)

    def release(self, key: int) -> None:
        """Let a held back group go, as far as this namespace knows."""
        for order in self.orders:
            order.release(key)

    def refuse(self, inode: Inode) -> None:
        """Move an object that only RAM has to `ram_spare`: it is not worth a write to NVMe.

        The next touch moves it back.
        """
        self.crowded_out.discard(inode.ino)
        self.ram_only.discard(inode)
        self.refused[inode.ino] = Tier.cost(inode.blocks)
        self.ram_spare.touch(inode)

    def crowd_out(self, inode: Inode) -> bool:
        """Move an object to `ram_spare`, because NVMe is full of objects that were used later.

        Returns False, and changes nothing, for an object that kvfs must keep.
        """
        if inode.ino in self.crowded_out:
            return True
        if not self.ram_only.evictable or inode not in self.ram_only:
            return False
        self.refuse(inode)
        self.crowded_out.add(inode.ino)
        return True

    def refuse_too_large(self, inode: Inode) -> None:
        """Note that an object is too large for NVMe. After its next touch kvfs tries again."""
        self.too_large.add(inode.ino)
        if inode in self.ram_only and self.ram_only.evictable:
            self.refuse(inode)

    def take_back(self, inode: Inode) -> None:
        """Undo `refuse`: the object was touched, or leaves."""
        self.too_large.discard(inode.ino)
        self.crowded_out.discard(inode.ino)
        if self.refused and self.refused.pop(inode.ino, None) is not None:
            self.ram_spare.discard(inode)

    def stored(self, inode: Inode) -> None:
        """Show a store to the policies and to the what-if of other capacities.

        If a block's name does not tell its predecessor, the opens of the calling process may.
        """
        if inode.model and not inode.parent_key and (before := self.opens.follows(key_of(inode))):
            inode.parent_key = before
            for order in self.orders:
                if inode in order:
                    order.discard(inode)
                    order.touch(inode)
        self.accesses.stored(key_of(inode), inode.parent_key, self.parent)

    def describe(self) -> dict[str, Any]:
        """The contents and the results of its opens, for people, in bytes and counts."""
        self.accesses.count()
        measured = bool(self._counted_with)  # else the accesses so far are for a guess
        answers = self.would_be.answers() if measured else {}
        return {
            "settings": self.settings.to_text(),
            "bytes": self.bytes,
            "staging_bytes": self.staged,
            "objects": self.objects,
            "spilled": self.spilled,
            "tiers": {
                name: {"bytes": size, "objects": self.held_objects[name]}
                for name, size in self.held.items()
            },
            "counters": {name: count for name, count in self.counters.items() if count},
            "opens": {"count": self.opens_timed, "sum_s": round(self.open_seconds, 6)},
            "following": self.winner,
            "capacity_objects": self.would_be.capacity,
            "hit_ratio_at": {f"{at:g}": share for at, share in answers.items()},
            "hit_ratio_sample": {
                "seen": self.would_be.seen if measured else 0,
                "needed": self.would_be.needed,
            },
        }

    def came(self, inode: Inode) -> None:
        """Show the policies and the what-if an object that was stored by another name."""
        self.accesses.stored(key_of(inode), inode.parent_key, self.parent)

    def went(self, inode: Inode) -> None:
        """Show the what-if that an object is gone, which a cache of any size would not have."""
        self.would_be.forget(key_of(inode))

    def met(self, inode: Inode) -> None:
        """Note an object from before the daemon's start."""
        if self._seeds is not None:
            self._seeds.add(key_of(inode), inode.parent_key)

    def all_met(self, tiers: list[Tier]) -> Iterator[None]:
        """Have the what-if of other capacities know the objects from before the daemon's start.

        Yields after each step of some 1 ms.
        """
        self.resize_policies(tiers)
        seeds, self._seeds = self._seeds, None
        if seeds is not None:
            yield from seeds.sow(self.would_be, self.parent)

    def parent(self, key: int) -> int:
        """The key of the block before a block in its prompt; 0: not known."""
        return next(filter(None, (order.parent(key) for order in self.orders)), 0)

    def resize_policies(self, tiers: list[Tier]) -> None:
        """Set the capacity of its policies: the objects that have room, at their mean size.

        The room is its own bytes and the free ones. Bytes of other namespaces do not count, even if
        those may have to give them.
        """
        most = 0
        for tier in tiers:
            bytes_, objects = self.held[tier.name], self.held_objects[tier.name]
            if not self.takes(tier) or not objects:
                continue
            room = bytes_ + max(0, tier.free)
            if self.settings.quota_hard:
                room = min(room, self.settings.quota_hard)
            entries = max(1, room * objects // max(1, bytes_))
            if self.settings.quota_objects:
                entries = min(entries, self.settings.quota_objects)
            most = max(most, entries)
            for order in (self.on_nvme,) if tier.slow else (self.ram_only, self.ram_clean):
                order.give_room_for(entries)
            if not tier.slow:
                self.ram_choice.capacity = entries
        if most:
            self.would_be.capacity = self.choice.capacity = most
            if not self._counted_with <= 2 * most <= 4 * self._counted_with:
                self._counted_with = most
                self.accesses.count()
                self.would_be.count_anew()
            if self.quota_order is not None:
                self.quota_order.give_room_for(most)
        drops = _policies(self.settings)[0]
        self.would_be.follow(self.winner or ("lru" if drops == "never" else drops))
        self.accesses.update_mask()

    @property
    def winner(self) -> str:
        """The policy that `adaptive` follows at the moment; "" with another policy."""
        return self.choice.winner if _policies(self.settings)[0] == "adaptive" else ""

    def change(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        self.use_step = _use_step(settings)
        self.limits.change(settings)
        self._arrange_quota_order()
        if before.prefix != settings.prefix:  # it is empty
            self.blocks = Blocks(self.release) if settings.prefix else None
        if (before.eviction, before.pin) != (settings.eviction, settings.pin):
            drops, moves = _policies(settings)
            for order, name, choice in (
                (self.ram_only, drops, self.ram_choice),
                (self.ram_clean, moves, self.ram_choice),
                (self.ram_spare, drops, self.ram_choice),
                (self.on_nvme, drops, self.choice),
                (self.quota_order, drops, self.choice),
            ):
                if order is not None:
                    order.change(self._policy(name, choice), evictable=name != "never")
            self._watch()

    def members(self, inode: Inode) -> set[int]:
        """The inodes of an object's group that are in its orders."""
        return self.members_of(key_of(inode))

    def members_of(self, key: int) -> set[int]:
        """The inodes of a key's group that were used since the start."""
        return {ino for order in self.orders for ino in order.members(key)}

    @property
    def gives_nothing(self) -> bool:
        """Whether kvfs evicts none of its objects."""
        return self.settings.pin or self.settings.eviction == "never"

    def held_in(self, tiers: Iterable[Tier]) -> int:
        """Bytes of its copies in some tiers. A copy in RAM of what NVMe has as well is none."""
        held = {
            tier.name: self.held[tier.name] - (0 if tier.slow else self.doubled_bytes)
            for tier in tiers
        }
        return max(0, sum(held.values()))

    def kept(self, tiers: Iterable[Tier]) -> int:
        """Bytes of these tiers that its objects keep, because kvfs evicts none of them."""
        if self.settings.pin:  # in RAM as well, if NVMe has them
            return sum(self.held[tier.name] for tier in tiers)
        if self.gives_nothing:
            return self.held_in(tiers)
        return sum(self.kept_bytes[tier.name] for tier in tiers)

    def takes(self, tier: Tier | Bucket) -> bool:
        """Whether its objects may be in a tier."""
        return takes(self.settings, tier)

    @property
    def has_hard_quota(self) -> bool:
        """Whether it has a hard quota of bytes or objects."""
        return bool(self.settings.quota_hard or self.settings.quota_objects)

    def homeless(self, tiers: Iterable[Tier]) -> str:
        """Why it has no place for a new object on these tiers; "" if it has one."""
        names = [tier.name for tier in tiers]
        media = self.settings.media
        if not media or set(media) & set(names):
            return ""
        return (
            f"its objects may be in media={'+'.join(media)}, and the mount has "
            f"{'+'.join(names)} only: mount with {media[0]}=, or kvfs ns set media=all"
        )

    def note(self, tiers: Iterable[Tier]) -> str:
        """Notes for people on settings that do less than they say; "" if there are none."""
        tiers = list(tiers)
        notes = (self._note_quota(tiers), self._note_compression(tiers), self._note_media())
        return "; ".join(filter(None, notes))

    def _note_quota(self, tiers: list[Tier]) -> str:
        room = sum(tier.configured_capacity for tier in tiers if self.takes(tier))
        return "; ".join(
            f"{name}={format_size(quota)} is more than its tiers have, {format_size(room)}: they "
            "are full before"
            for name, quota in (
                ("quota_hard", self.settings.quota_hard),
                ("quota_soft", self.settings.quota_soft),
            )
            if quota > room
        )

    def _note_media(self) -> str:
        if set(self.settings.media) != {"ram"}:
            return ""
        although = ", although eviction=never" if self.settings.eviction == "never" else ""
        return f"media=ram: each unmount loses its objects{although}"

    def _note_compression(self, tiers: list[Tier]) -> str:
        if self.settings.compression != "nvme":
            return ""
        missing = {"ram", "nvme"} - {tier.name for tier in tiers if self.takes(tier)}
        if missing:
            return (
                "compression=nvme compresses no copy on NVMe here: mount or media lack "
                f"{' and '.join(sorted(missing))}; with s3 it is as compression=s3"
            )
        return (
            "compression=nvme: what only NVMe has is read through RAM where it is compressed, "
            "not by passthrough from NVMe"
        )

    @property
    def counted(self) -> int:
        """Bytes that count against its hard quota by now."""
        return self.bytes + self.staged + self.unlinked

    @property
    def urgency(self) -> tuple[bool, float]:
        """The rank of the namespace: that with the greatest gives first.

        A namespace beyond its soft quota gives before others; then its bytes divided by its share
        count. Written bytes count, so a growing namespace cannot take from those with less.
        """
        soft, has = self.settings.quota_soft, self.counted + self.ahead
        return 0 < soft < has, has / self.settings.weight

    def expired(self, inode: Inode) -> bool:
        """Whether the lifetime of an object has ended."""
        return self.ttl_remaining(inode, 1.0) <= 0

    def ttl_remaining(self, inode: Inode, most: float) -> float:
        """Seconds until an object's lifetime ends, at most `most`."""
        ttl = self.settings.ttl
        if not ttl or not inode.is_file:
            return most
        if not inode.sealed:  # its lifetime has not begun
            return min(most, ttl)
        at = inode.mtime_ns if self.settings.ttl_from == "write" else inode.atime_ns
        return min(most, ttl - (time.time_ns() - at) / SECOND)


def takes(settings: Settings, tier: Tier | Bucket) -> bool:
    """Whether objects of a namespace with these settings may be in a tier."""
    return tier.mounted and (not settings.media or tier.name in settings.media)


def _use_step(settings: Settings) -> int:
    """How old (ns) a time of use may be before it is noted again."""
    if not settings.ttl or settings.ttl_from != "use":
        return ATIME_STEP
    return min(ATIME_STEP, settings.ttl * SECOND // USES_NOTED)


def _policies(settings: Settings) -> tuple[str, str]:
    """The policy by which objects go, and the one by which their copies in RAM go."""
    if settings.pin:
        return "never", "never"
    drops = settings.eviction
    return drops, "lru" if drops in {"never", "ttl"} else drops


def _unevictable() -> Order:
    return Order(eviction.make("never", 1), evictable=False)
