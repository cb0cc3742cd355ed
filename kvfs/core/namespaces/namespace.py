"""One namespace: what it was told to be, what it holds, and in which order that goes.

Contract: synchronous, no I/O. Bytes are physical, each object counted once. Orders are by what may
become of an object: lost, left by RAM only, dropped for a quota; each object is in those that
`order` names, and in `whole`. What a policy needs to see of accesses it is shown here, once for all
orders. Not for finding the namespace of an object (`Namespaces`), nor for victims (`Victims`).
"""

import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvfs import eviction
from kvfs.catalog import Inode
from kvfs.core.namespaces.blocks import Blocks
from kvfs.core.namespaces.open_order import OpenOrder
from kvfs.core.namespaces.order import Order, key_of
from kvfs.fairness.token_bucket import LATE, TokenBucket
from kvfs.settings import MEDIA, Settings
from kvfs.tiers import Bucket, Tier

SECOND = 10**9
ATIME_STEP = 60 * SECOND  # ns: how old a time of use may be before it is noted anew
USES_NOTED = 16  # times in a life, at least, if it is counted from the last use
SMALLEST = 16  # entries
READ = {name: f"read_{name}" for name in MEDIA}  # by tier
COUNTERS = (*READ.values(), "read_bytes", "written", "written_bytes", "misses")


class Limits:
    """What a namespace may open and move in a second. `on` says whether there are any.

    Bytes do not pass the daemon, so an object is charged whole: read when it is opened, written
    when it is closed, and there its reader or writer waits, never in the middle of a file. Not at
    the create: the kernel holds the directory until that is answered, against everybody. Not for
    what namespaces compete for together (`kvfs.fairness.fair_queue`).
    """

    def __init__(self, settings: Settings) -> None:
        self._opens = {write: TokenBucket(0, LATE) for write in (False, True)}
        self._bytes = {write: TokenBucket(0, LATE) for write in (False, True)}
        self.change(settings)

    def change(self, settings: Settings) -> None:
        """Those who wait go on at the new rates."""
        self._opens[False].rate, self._opens[True].rate = settings.read_iops, settings.write_iops
        self._bytes[False].rate, self._bytes[True].rate = settings.read_bytes, settings.write_bytes
        self.on = any(b.rate for b in (*self._opens.values(), *self._bytes.values()))

    async def take(self, size: int, *, written: bool) -> None:
        """Wait until an object of so many bytes may pass, read or written, and charge it."""
        for bucket, cost in ((self._opens[written], 1), (self._bytes[written], size)):
            if not bucket.try_take(cost):
                await bucket.take(cost)


class Namespace:
    """`ino` is its directory."""

    def __init__(self, ino: int, settings: Settings, *, tiered: bool = False) -> None:
        """`tiered`: the mount has more than one tier."""
        self.ino = ino
        self.tiered = tiered
        self.settings = settings
        self.use_step = _use_step(settings)
        self.bytes = self.objects = 0
        self.staged = 0  # bytes that its open writers have by now, beside those
        self.ahead = 0  # and what is set aside for what comes next
        self.unlinked = 0  # bytes of its files that have no name any more
        self.spilled = 0  # objects that only the bucket has
        self.clean_bytes = self.clean_objects = 0  # in RAM, but on NVMe as well
        self.held: Counter[str] = Counter()  # bytes by tier
        self.held_objects: Counter[str] = Counter()
        self.models: Counter[int] = Counter()  # objects by number, see `Namespaces.models`
        self.model_bytes: Counter[int] = Counter()
        self.counters = Counter(dict.fromkeys(COUNTERS, 0))
        self.opens_timed, self.open_seconds = 0, 0.0  # opens to read, and how long they took
        self.spare: dict[int, int] = {}  # inode -> bytes
        self.too_large: set[int] = set()  # that only RAM has: NVMe has no file of their size
        self.limits = Limits(settings)
        self.opens = OpenOrder()
        entries = max(SMALLEST, settings.quota_objects)  # until something is known (`fit`)
        self.would_be = eviction.WhatIf(entries)
        self.choice = eviction.PolicySelector(entries)  # by which objects go
        # By which they leave RAM: where there is nothing below, that is the same.
        self.ram_choice = eviction.PolicySelector(entries) if tiered else self.choice
        self._watch()
        goes, moves = _policies(settings)
        self.ram_only = self._order(goes, self.ram_choice)
        self.ram_clean = self._order(moves, self.ram_choice)
        self.on_nvme = self._order(goes, self.choice)
        self.ram_kept = _kept()  # what only its owner unlinks, and only RAM holds
        self.nvme_kept = _kept()
        self.ram_spare = self._order(goes, self.ram_choice)  # not worth a write to NVMe
        # What a hard quota drops next, in whatever tier: one order, or a block of RAM would go
        # before those that follow it on NVMe. Only where there is a quota, and more than one tier.
        self.whole: Order | None = None
        self.whole_filled = True  # with all that was here before there was a quota
        self._arrange_whole()
        self.blocks = Blocks(self.release) if settings.prefix else None

    def _arrange_whole(self) -> None:
        quota = self.settings.quota_hard or self.settings.quota_objects
        if not (self.tiered and quota):
            self.whole = None
        elif self.whole is None:
            self.whole = self._order(_policies(self.settings)[0], self.choice)
            self.whole_filled = not self.objects

    def _watch(self) -> None:
        """Only what is followed needs to see accesses."""
        choices = {self.choice, self.ram_choice} if "adaptive" in _policies(self.settings) else ()
        self.accesses = eviction.Accesses(self.would_be, *choices)

    def _order(self, name: str, choice: eviction.PolicySelector) -> Order:
        return Order(self._policy(name, choice), goes=name != "never")

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
            *((self.whole,) if self.whole is not None else ()),
        )

    def order(self, inode: Inode, tier: Tier, holders: list[Tier]) -> Order:
        """Where a copy of an object has its place."""
        if tier.slow:
            return self.nvme_kept if inode.kept else self.on_nvme
        if len(holders) > 1:
            return self.ram_clean
        if inode.kept:
            return self.ram_kept
        return self.ram_spare if inode.ino in self.spare else self.ram_only

    def release(self, key: int) -> None:
        """A group that was held back may go now, as far as that is known here."""
        for order in self.orders:
            order.release(key)

    def refuse(self, inode: Inode) -> None:
        """What only RAM has is not worth a write to NVMe, until it is touched."""
        self.ram_only.discard(inode)
        self.spare[inode.ino] = Tier.cost(inode.blocks)
        self.ram_spare.touch(inode)

    def refuse_too_large(self, inode: Inode) -> None:
        """NVMe cannot have what only RAM has: that is tried again when it is touched."""
        self.too_large.add(inode.ino)
        if inode in self.ram_only and self.ram_only.goes:
            self.refuse(inode)

    def take_back(self, inode: Inode) -> None:
        """It is worth that after all, or leaves."""
        self.too_large.discard(inode.ino)
        if self.spare and self.spare.pop(inode.ino, None) is not None:
            self.ram_spare.discard(inode)

    def see(self, inode: Inode) -> None:
        """It was opened or stored: what another capacity would have made of that is known later.

        Where a connector's name does not say what it follows, the opens of its process may.
        """
        if inode.model and not inode.parent_key and (before := self.opens.follows(key_of(inode))):
            inode.parent_key = before
            for order in self.orders:
                if inode in order:
                    order.discard(inode)
                    order.touch(inode)
        self.accesses.see(key_of(inode), inode.parent_key, self.parent)

    def describe(self) -> dict[str, Any]:
        """What it holds and what became of what was asked of it, for people; bytes and counts."""
        return {
            "settings": self.settings.to_text(),
            "bytes": self.bytes,
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
            "hit_ratio_at": {f"{at:g}": share for at, share in self.would_be.answers().items()},
        }

    def parent(self, key: int) -> int:
        """The key of the block before it in its prompt; 0: not known."""
        return next(filter(None, (order.parent(key) for order in self.orders)), 0)

    def fit(self, tiers: list[Tier]) -> None:
        """Tell its policies how many objects there is room for, at their mean size.

        What others have is not counted as room, but neither is what they may have to give.
        """
        most = 0
        for tier in tiers:
            bytes_, objects = self.held[tier.name], self.held_objects[tier.name]
            if not self.takes(tier) or not objects:
                continue
            room = bytes_ + max(0, tier.free)
            if self.settings.quota_hard:
                room = min(room, self.settings.quota_hard)
            entries = max(SMALLEST, room * objects // max(1, bytes_))
            if self.settings.quota_objects:
                entries = min(entries, self.settings.quota_objects)
            most = max(most, entries)
            for order in (self.on_nvme,) if tier.slow else (self.ram_only, self.ram_clean):
                order.give_room_for(entries)
            if not tier.slow:
                self.ram_choice.capacity = entries
        if most:
            self.would_be.capacity = self.choice.capacity = most
            if self.whole is not None:
                self.whole.give_room_for(most)
        self.would_be.follow(self.winner or "lru")
        self.accesses.fit()

    @property
    def winner(self) -> str:
        """The policy that its adaptive one follows at the moment; "" if it has another."""
        return self.choice.winner if _policies(self.settings)[0] == "adaptive" else ""

    def change(self, settings: Settings) -> None:
        before, self.settings = self.settings, settings
        self.use_step = _use_step(settings)
        self.limits.change(settings)
        self._arrange_whole()
        if before.prefix != settings.prefix:  # it is empty
            self.blocks = Blocks(self.release) if settings.prefix else None
        if (before.eviction, before.pin) != (settings.eviction, settings.pin):
            goes, moves = _policies(settings)
            for order, name, choice in (
                (self.ram_only, goes, self.ram_choice),
                (self.ram_clean, moves, self.ram_choice),
                (self.ram_spare, goes, self.ram_choice),
                (self.on_nvme, goes, self.choice),
                (self.whole, goes, self.choice),
            ):
                if order is not None:
                    order.change(self._policy(name, choice), goes=name != "never")
            self._watch()

    def members(self, inode: Inode) -> set[int]:
        """What is here of an object's group."""
        return self.members_of(key_of(inode))

    def members_of(self, key: int) -> set[int]:
        """What is here of the group of this key, as far as it was used since the start."""
        return {ino for order in self.orders for ino in order.members(key)}

    def takes(self, tier: Tier | Bucket) -> bool:
        """Whether its objects may be there."""
        return takes(self.settings, tier)

    @property
    def has_hard_quota(self) -> bool:
        """Whether there is a limit to what it may have."""
        return bool(self.settings.quota_hard or self.settings.quota_objects)

    def homeless(self, tiers: Iterable[Tier]) -> str:
        """Why it has no place for anything new on these tiers; "" if it has."""
        names = [tier.name for tier in tiers]
        media = self.settings.media
        if not media or set(media) & set(names):
            return ""
        return (
            f"its objects may be in media={'+'.join(media)}, and the mount has "
            f"{'+'.join(names)} only: mount with {media[0]}=, or kvfs ns set media=all"
        )

    def note(self, tiers: Iterable[Tier]) -> str:
        """What compressed copies on NVMe mean here, for people; "" if it has none."""
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
        """Who has most beyond what is his gives first: by soft quota, then by share.

        What is being written counts: who grows may not take from those who have less.
        """
        soft, has = self.settings.quota_soft, self.counted + self.ahead
        return 0 < soft < has, has / self.settings.weight

    def expired(self, inode: Inode) -> bool:
        """Whether its time to live is over."""
        return self.ttl_remaining(inode, 1.0) <= 0

    def ttl_remaining(self, inode: Inode, most: float) -> float:
        """Seconds until its time is over, `most` of them if it lives longer, or for ever."""
        ttl = self.settings.ttl
        if not ttl or not inode.is_file:
            return most
        if not inode.sealed:  # its time has not begun
            return min(most, ttl)
        at = inode.mtime_ns if self.settings.ttl_from == "write" else inode.atime_ns
        return min(most, ttl - (time.time_ns() - at) / SECOND)


def takes(settings: Settings, tier: Tier | Bucket) -> bool:
    """Whether objects of a namespace that is told this may be there."""
    return tier.mounted and (not settings.media or tier.name in settings.media)


def _use_step(settings: Settings) -> int:
    """How old (ns) a time of use may be before it is noted anew."""
    if not settings.ttl or settings.ttl_from != "use":
        return ATIME_STEP
    return min(ATIME_STEP, settings.ttl * SECOND // USES_NOTED)


def _policies(settings: Settings) -> tuple[str, str]:
    """By which objects go, and by which their copies in RAM do."""
    if settings.pin:
        return "never", "never"
    goes = settings.eviction
    return goes, "lru" if goes in {"never", "ttl"} else goes


def _kept() -> Order:
    return Order(eviction.make("never", 1), goes=False)
