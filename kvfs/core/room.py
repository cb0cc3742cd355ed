"""Where a new file begins, and what goes when room is needed.

Contract: `reserve` sets bytes of a tier aside or changes nothing but what had to be dropped for
them; they are the caller's to give back. All but `choose` is synchronous: between its look at the
accounts and the reservation nothing else happens. What is dropped goes by `Residency`, record
first, with its names told to the kernel.

Invariants:
- What is open, being written, or behind an inode's lock is no victim, nor is the rest of its group.
  What comes before it in its prompt is none either, but for very long prompts.
- What the bucket lacks, and is to have, is no victim; while the bucket is down it is the last one.
  What the bucket has leaves its tiers only, and keeps its names.
- What RAM alone holds is lost only where no tier below takes it, or where memory itself runs out.
- Who gives is the namespace that has most beyond its share (`Namespace.urgency`), and what it
  gives is said by its policy. What is kept, pinned or never evicted is never given.
- While NVMe is down its copies are no reason to give up those in RAM.
Not for the accounts, nor for making copies so that there will be room (`Flow`).
"""

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from contextlib import suppress
from itertools import chain
from operator import attrgetter
from typing import Literal

import trio

from kvfs.catalog import Inode
from kvfs.core.namespace import Namespace
from kvfs.core.order import Order, Victim, key_of
from kvfs.core.residency import OpenObject, Residency
from kvfs.core.sizes import ExpectedSizes
from kvfs.errors import CatalogError, KvfsError, NoSpaceError, QuotaError, TierError
from kvfs.tiers import Bucket, NvmeTier, Tier

log = logging.getLogger(__name__)

Twins = Literal["uncopy", "spare", "lose"]
Which = Callable[[Namespace], Order]

UNKNOWN_SIZE = 64 << 20  # reserved for a file of which nothing is known; no measurement behind it
FILLED_AT_ONCE = 64  # objects that enter an order in a step of the loop, about 0.5 ms
MEASURED_FOR = 0.1  # s that a look at what the NVMe device has left is good for
AT_ONCE = 16  # groups that a quota drops in a step of the loop, each in some 0.1 ms
PASSED_MAX = 32  # groups in use that keep their places in a search; a policy knows its last 64
HURRY = 1.0  # s that all uploads are due after somebody has waited for one
# Seconds that room is not taken for what nobody waits for: noted times of use may be a minute old
# (`Attributes`), and what was used within the last minute is likely to be used again.
LATELY = 120
BROUGHT_MAX = 65536  # objects fetched ahead of which that is known
_NEVER = (-1, 0.0)
HEADROOM = 16  # a sixteenth of RAM is kept free for files that outgrow their reservation


class Room:
    """`sizes` is to be told how large files have become."""

    def __init__(self, residency: Residency) -> None:
        self.residency = residency
        self.ram = residency.ram
        self.nvme = residency.nvme
        self.sizes = ExpectedSizes()
        self._lose_dirty = False  # nothing else is left, and the bucket is down
        self._gentle = False  # nobody waits for the room
        self._brought: OrderedDict[int, float] = OrderedDict()  # inode -> when, if fetched ahead
        self._stalled_at = _NEVER  # uploads that were done when writers began to wait, and when
        self._said: set[str] = set()

    async def choose(
        self, parent: int, name: bytes, namespace: Namespace | None = None, *, replaces: int = 0
    ) -> tuple[Tier, int]:
        """The tier for a new file, with the bytes reserved there.

        replaces: bytes of the object that it is a new version of, if it is one.
        Raises QuotaError, NoSpaceError, TierError. A file of unknown size begins on NVMe: one that
        outgrows the RAM tier would get ENOSPC from the kernel, where kvfs cannot help it any more.
        """
        residency = self.residency
        namespace = namespace or residency.namespaces.default
        expected = self.sizes.expect(parent, name)
        more = max(0, (expected or 0) - replaces)
        if more > namespace.settings.quota_hard:  # what is expected of it is wrong, or no use
            more = 0
        deadline = trio.current_time() + (residency.bucket.wait if residency.bucket else 0)
        await self._make_quota(namespace, more, 0 if replaces else 1, deadline)
        tiers = [tier for tier in residency.tiers if namespace.takes(tier)]
        if not tiers:
            raise self._homeless(namespace)
        wanted = UNKNOWN_SIZE if expected is None else max(Tier.cost(0), expected)
        if residency.bucket and namespace.takes(residency.bucket):
            await self._wait_until_not_full(residency.bucket, deadline)
        while True:
            last = not self._uploads_help(deadline)
            found = await self._choose_now(tiers, wanted, known=expected is not None, last=last)
            if found is not None:
                return found
            if last:
                break
            await self._upload(deadline)
        raise NoSpaceError(
            f"no tier has room for {wanted} bytes, and nothing more may be dropped: "
            + ", ".join(f"{t.name} {t.used} used + {t.reserved} reserved" for t in tiers)
        )

    async def _make_quota(
        self, namespace: Namespace, more: int, objects: int, deadline: float
    ) -> None:
        """Have its quotas allow so much more, with what may go after an upload. QuotaError."""
        while True:
            try:
                while not self.keep_quota(namespace, more, objects=objects, most=AT_ONCE):
                    await trio.lowlevel.checkpoint()
            except QuotaError:
                if not self._uploads_help(deadline):
                    raise
                await self._upload(deadline)
            else:
                return

    async def _choose_now(
        self, tiers: list[Tier], wanted: int, *, known: bool, last: bool
    ) -> tuple[Tier, int] | None:
        """One of these tiers, and what is reserved there; None if nothing may be dropped for it.

        last: nothing will be different later, so that less than wanted has to do.
        """
        residency = self.residency
        ram = self.ram if self.ram in tiers else None
        while True:
            order = tiers if known else tiers[::-1]
            order = [tier for tier in order if not tier.health.down]
            if not order:
                raise TierError(
                    "no tier takes a new file: " + ", ".join(tier.health.why for tier in tiers)
                )
            for tier in order:
                least = wanted if known else min(wanted, tier.capacity // 4)
                if self.reserve(tier, least):
                    return tier, least
            if residency.census_done.is_set():
                break
            await residency.census_step.wait()  # the estimate leaves no room, what is counted may
        if ram is not None and self._lose_for(wanted):
            return ram, wanted
        if not last:
            return None
        for tier in order:  # others may expect too much as well: begin, and see how it grows
            if self.reserve(tier, Tier.cost(0)):
                return tier, Tier.cost(0)
        if ram is not None and self._lose_for(Tier.cost(0)):
            return ram, Tier.cost(0)
        bucket = residency.bucket
        if bucket is None or not bucket.health.down:
            return None
        self._lose_dirty = True
        try:
            return next(((tier, wanted) for tier in order if self.reserve(tier, wanted)), None)
        finally:
            self._lose_dirty = False

    async def _wait_until_not_full(self, bucket: Bucket, deadline: float) -> None:
        """So much waits for its upload that writers wait, too. Raises NoSpaceError.

        While nothing goes up only the first ones wait: all have one bound, as readers of an object.
        """
        dirty = self.residency.dirty
        while dirty.full:
            self._say_full(bucket)
            done = bucket.counters["uploads"] + bucket.counters["copies"]
            if done != self._stalled_at[0]:
                self._stalled_at = done, trio.current_time()
            with trio.move_on_at(min(deadline, self._stalled_at[1] + bucket.wait)) as late:
                bucket.counters["waits"] += 1
                dirty.hurry(HURRY)
                await dirty.changed.wait()
            if late.cancelled_caught:
                why = f": {bucket.health.why}" if bucket.health.why else ""
                raise NoSpaceError(f"{dirty.bytes} bytes wait for their upload{why}")
        self._stalled_at = _NEVER

    def _say_full(self, bucket: Bucket) -> None:
        what = (
            f"{bucket.place}: {bucket.most} bytes wait for their upload, which is the most: "
            "writers wait for it, too"
        )
        if what not in self._said:
            self._said.add(what)
            log.warning("%s (said once)", what)

    def _uploads_help(self, deadline: float) -> bool:
        """Whether something may be dropped later that may not now, being dirty."""
        bucket = self.residency.bucket
        if bucket is None or bucket.health.down or not len(self.residency.dirty):
            return False
        return trio.current_time() < deadline

    async def _upload(self, deadline: float) -> bool:
        """Until something was uploaded; False if it is not, or is too late."""
        bucket, dirty = self.residency.bucket, self.residency.dirty
        if bucket is None or bucket.health.down:
            return False
        with trio.move_on_at(deadline) as late:
            bucket.counters["waits"] += 1
            dirty.hurry(HURRY)
            await dirty.changed.wait()
        return not late.cancelled_caught

    def too_large(self, inode: Inode, namespace: Namespace) -> KvfsError | None:
        """Why an object that was written cannot stay, whatever makes room for it."""
        cost, quota = Tier.cost(inode.blocks), namespace.settings.quota_hard
        tiers = [tier for tier in self.residency.tiers if namespace.takes(tier)]
        if tiers and all(cost > tier.configured for tier in tiers):
            sizes = " and ".join(f"{tier.name} {tier.configured}" for tier in tiers)
            return NoSpaceError(f"it takes {cost} bytes, its tiers have {sizes}")
        if 0 < quota < cost:
            return QuotaError(f"it takes {cost} bytes, its namespace may have {quota}")
        return None

    def _homeless(self, namespace: Namespace) -> NoSpaceError:
        """Its caller gets no more than ENOSPC: the log says why, once for what it was told."""
        why = namespace.homeless(self.residency.tiers)
        what = f"namespace {self._name(namespace)} takes no new file: {why}"
        if what not in self._said:
            self._said.add(what)
            log.warning("%s", what)
        return NoSpaceError(what)

    def reserve(self, tier: Tier, wanted: int, twins: Twins = "uncopy") -> bool:
        """Set room aside, dropping what was used longest ago. Nothing of RAM alone is lost.

        `twins` says what may happen to objects on NVMe that RAM holds as well. A create throws
        their copy on NVMe away. A demotion spares them, or it would have to make that copy again
        for ever; one that empties RAM loses them, since what it brings is younger.
        """
        spare = self.headroom if tier is self.ram else 0
        if isinstance(tier, NvmeTier) and not tier.health.down:
            stale = time.monotonic() - tier.measured > MEASURED_FOR
            if tier.shortage or stale:
                self._measure(tier)
        while wanted + spare > tier.capacity - tier.reserved:
            if not self._purge_one(tier):
                return False
        while tier.free - spare < wanted:
            if not self._reclaim(tier, twins):
                return False
        tier.reserved += wanted
        return True

    def reserve_gently(self, tier: Tier, wanted: int) -> bool:
        """As `reserve`, for what nobody waits for: what it drops is in the bucket or another tier.

        And was not used lately, nor fetched ahead; of each namespace only what goes first is asked.
        """
        self._gentle = True
        try:
            return self.reserve(tier, wanted)
        finally:
            self._gentle = False

    def brought(self, ino: int) -> None:
        """It is fetched ahead: its time of use says nothing of how it is wanted."""
        self._brought.pop(ino, None)
        self._brought[ino] = time.monotonic()
        if len(self._brought) > BROUGHT_MAX:
            self._brought.popitem(last=False)

    def _cool(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether they may go for what nobody waits for."""
        since, moment = time.time_ns() - LATELY * 10**9, time.monotonic() - LATELY
        return all(
            max(inode.atime_ns, inode.ctime_ns) < since
            and self._brought.get(inode.ino, 0.0) < moment
            and (inode.in_bucket or (tier is self.ram and twins == "uncopy" and inode.on_nvme))
            for inode in inodes
        )

    def _measure(self, nvme: NvmeTier) -> None:
        """Others take room on the device, too; while it is short, each reservation looks anew."""
        try:
            nvme.measure(self.written(nvme))
        except OSError as error:
            nvme.failed("statfs", 0, error)

    def written(self, tier: Tier) -> int:
        """Bytes of what is reserved that its files have: staged, or unlinked and not forgotten."""
        residency = self.residency
        limbo = sum(cost for where, cost in residency.limbo.values() if where is tier)
        return limbo + sum(
            min(held.reserved, _taken(held))
            for held in residency.staging.values()
            if held.tier is tier
        )

    def _lose_for(self, wanted: int) -> bool:
        """No tier below takes what RAM holds: lose the oldest of it."""
        assert self.ram is not None
        if wanted + self.headroom > self.ram.capacity - self.ram.reserved:
            return False
        while not self.reserve(self.ram, wanted):
            if not self._drop_from_ram():
                return False
        return True

    @property
    def headroom(self) -> int:
        """Bytes of RAM that are kept free for files that outgrow their reservation."""
        if self.ram is None:
            return 0
        return self.ram.capacity // HEADROOM

    def make_room(self, tier: Tier) -> None:
        """Writers have outgrown their reservations, or the device has shrunk: drop until it fits.

        In RAM this loses objects that no other tier holds only when memory itself runs out: a
        writer that gets ENOSPC from the kernel is worse off. But not for a file that is on its way
        to be larger than RAM: it gets ENOSPC whatever is lost.
        """
        if tier.health.down:  # its accounts are no guide, and nothing would be won
            return
        least = self.headroom // 2 if tier is self.ram else 0
        if tier is not self.ram and any(
            held.tier is tier and _taken(held) > tier.configured
            for held in self.residency.staging.values()
        ):
            return  # it will not stay
        while tier.free < least and self._reclaim(tier):
            pass
        if tier is self.ram:
            largest = max((held.reserved for held in self.residency.staging.values()), default=0)
            hopeless = largest > self.ram.capacity  # it has half as much, and asks for it again
            while tier.left() < least and (
                self._reclaim(tier) or (not hopeless and self._drop_from_ram())
            ):
                pass

    def keep_quota(
        self, namespace: Namespace, wanted: int, *, objects: int = 0, most: int = AT_ONCE
    ) -> bool:
        """Drop of a namespace, `most` groups, until so much more of it is within its hard quotas.

        Whether it is. Raises QuotaError if nothing of it may go, or if that would be in vain.
        """
        settings = namespace.settings
        if not namespace.has_hard_quota:
            return True
        if 0 < settings.quota_hard < wanted:
            raise QuotaError(
                f"namespace {self._name(namespace)} cannot take {wanted} bytes: its quota is "
                f"{settings.quota_hard}"
            )
        if 0 < settings.quota_objects < objects:
            raise QuotaError(
                f"namespace {self._name(namespace)} cannot take {objects} objects: its quota is "
                f"{settings.quota_objects}"
            )
        staged = [
            max(_taken(held), held.expected if held.expected <= settings.quota_hard else 0)
            for held in self.residency.staging.values()
            if self.residency.namespaces.of(held.inode) is namespace and not held.accounted
        ]
        size, count = wanted + sum(staged), objects + len(staged)
        for _ in range(most):
            if not (
                0 < settings.quota_hard < namespace.bytes + size
                or 0 < settings.quota_objects < namespace.objects + count
            ):
                return True
            if not self._give_one(namespace):
                raise QuotaError(
                    f"namespace {self._name(namespace)} has {namespace.objects} objects of "
                    f"{namespace.bytes} bytes, its quota is {settings.quota_hard or 'any'} bytes, "
                    f"{settings.quota_objects or 'any'} objects, and nothing more may be dropped"
                )
        return False

    def _name(self, namespace: Namespace) -> str:
        return self.residency.namespaces.name(namespace.ino)

    async def take_in(self, arrivals: Callable[[], list[tuple[Namespace, int, int]]]) -> None:
        """Have quotas allow what comes: namespaces, each with bytes and objects more.

        `arrivals` is asked anew after each turn of the loop, and there is none after the last time.
        Raises QuotaError, and what `arrivals` does.
        """
        while not all(self.keep_quota(space, size, objects=n) for space, size, n in arrivals()):
            await trio.lowlevel.checkpoint()

    async def _fill_whole(self, namespace: Namespace) -> None:
        """A quota is new, but not what it is about: what is next to go comes in first."""
        residency = self.residency
        orders = (namespace.on_nvme, namespace.ram_clean, namespace.ram_spare, namespace.ram_only)
        for at, ino in enumerate(list(chain.from_iterable(orders))):
            inode = residency.inode(ino)
            if inode is not None and residency.accounted(inode):
                residency.enter_whole(inode)
            if not at % FILLED_AT_ONCE:
                await trio.lowlevel.checkpoint()
        namespace.whole_filled = True

    async def bring_within(self, namespace: Namespace) -> None:
        """Drop what is beyond the hard quotas of a namespace, as far as it may go."""
        if not namespace.whole_filled:
            await self._fill_whole(namespace)
        with suppress(QuotaError):  # the next create says so
            while not self.keep_quota(namespace, 0):
                await trio.lowlevel.checkpoint()

    def trim(self, namespace: Namespace) -> None:
        """One more object of it was written: bring it within its hard quotas, if that can be."""
        try:
            self.keep_quota(namespace, 0)
        except QuotaError as error:  # the next create says so
            log.debug("after a close: %s", error)
        except CatalogError as error:
            log.error("namespace %d keeps what is beyond its quota: %s", namespace.ino, error)

    def _give_one(self, namespace: Namespace) -> bool:
        """Drop a whole object of a namespace; from the lowest tier if nothing better is known."""
        nvme, ram = self.nvme, self.ram
        if namespace.whole is not None and namespace.whole_filled:
            return self._evict_of(namespace, _whole, None, "lose")
        return (nvme is not None and self._evict_of(namespace, _on_nvme, nvme, "lose")) or (
            ram is not None
            and (
                self._evict_of(namespace, _ram_spare, ram, "lose")
                or self._evict_of(namespace, _ram_only, ram, "lose")
            )
        )

    def _reclaim(self, tier: Tier, twins: Twins = "uncopy") -> bool:
        """Make some room at once; False if that would lose something that fits elsewhere."""
        if self._purge_one(tier):
            return True
        if tier is not self.ram:
            return self._evict(_on_nvme, tier, twins)
        if self.nvme is None:
            return self._drop_from_ram()
        if self.nvme.health.down:  # its copies are no reason to give up the only good one
            return False
        nvme = self.nvme
        spaces = self.residency.namespaces
        stuck = [*spaces.dropped.values(), *(one for one in spaces if not one.takes(nvme))]
        return (
            self._evict(_ram_clean, tier, "uncopy")
            or self._evict(_ram_spare, tier, "lose")
            or self._evict(_ram_only, tier, "lose", stuck)
        )

    def _purge_one(self, tier: Tier) -> bool:
        """Give up what is unlinked, though the kernel has not forgotten it."""
        residency = self.residency
        for ino, (where, _) in residency.limbo.items():
            if where is tier and ino not in residency.busy:
                residency.purge(ino)
                return True
        return False

    def _drop_from_ram(self) -> bool:
        """Lose the oldest that RAM alone can produce: all of it while NVMe is down.

        What NVMe has as well keeps its name then, and is back when NVMe is.
        """
        assert self.ram is not None
        if self.nvme is None or not self.nvme.health.down:
            return self._evict(_ram_only, self.ram, "lose")
        for space in self.by_urgency():
            twin, alone = self._next(space.ram_clean), self._next(space.ram_only)
            if twin is not None and (alone is None or twin.atime_ns <= alone.atime_ns):
                return self._evict_of(space, _ram_clean, self.ram, "uncopy")
            if alone is not None:
                return self._evict_of(space, _ram_only, self.ram, "lose")
        return False

    def by_urgency(self, among: Iterable[Namespace] | None = None) -> list[Namespace]:
        dropped = self.residency.namespaces.dropped
        if among is None:  # what was dropped goes anyway
            among = chain(dropped.values(), self.residency.namespaces)
        return sorted(among, key=lambda one: (one.ino in dropped, *one.urgency), reverse=True)

    def _next(self, order: Order) -> Inode | None:
        """The first of what an order would give up next; it stays the next."""
        assert self.ram is not None
        found = self._victim(order, self.ram, "lose")
        if found is None:
            return None
        order.put_back(found[0])
        return found[1][0]

    def _evict(
        self, which: Which, tier: Tier, twins: Twins, among: Iterable[Namespace] | None = None
    ) -> bool:
        """Drop what goes first, or only its copies; False if nothing may go."""
        return any(
            self._evict_of(space, which, tier, twins)
            for space in self.by_urgency(among)
            if len(which(space))
        )

    def _evict_of(
        self, namespace: Namespace, which: Which, tier: Tier | None, twins: Twins
    ) -> bool:
        order = which(namespace)
        found = self._victim(order, tier, twins)
        if found is None:
            return False
        for at, inode in enumerate(found[1]):
            try:
                if tier and len(self.residency.holders(inode)) > 1 and twins == "uncopy":
                    self.residency.drop_copy(inode, tier)
                elif self.residency.catalog.inode(inode.ino) is not None:  # not with its group
                    self.residency.evict(inode)
            except CatalogError:
                for left in found[1][at:]:
                    order.touch(left)  # it stays; who is tried next is another one
                raise
        return True

    def _victim(
        self, order: Order, tier: Tier | None, twins: Twins
    ) -> tuple[Victim, list[Inode]] | None:
        """Take the group that goes first, if all of it is really there and not in use.

        What comes before a block that is in use is of use as well: it goes after that.
        """
        passed: list[tuple[Victim, list[Inode]]] = []
        before: set[int] = set()  # keys of blocks without which one that is in use is of no use
        found = None
        while (victim := order.take()) is not None:
            inodes = [inode for ino in victim.inos if (inode := self._resident(ino, order, tier))]
            if not inodes or (not victim.key and inodes[0] in order):
                continue  # gone since, or touched since
            useful = len(passed) < PASSED_MAX and key_of(inodes[0]) in before
            if useful or any(map(self._in_use, inodes)):
                before.update(inode.parent_key for inode in inodes)
            elif self._may_go(inodes, tier, twins):
                if not self._gentle or self._cool(inodes, tier, twins):
                    found = victim, inodes
                else:
                    passed.append((victim, inodes))
                break
            passed.append((victim, inodes))
            if self._gentle and len(passed) == PASSED_MAX:
                break
        self._put_back(order, passed)
        return found

    def _may_go(self, inodes: list[Inode], tier: Tier | None, twins: Twins) -> bool:
        """Whether nothing goes that has to stay: what another tier holds, what the bucket lacks."""
        residency = self.residency
        twin = any(len(residency.holders(inode)) > 1 for inode in inodes)
        if twin and twins == "spare":
            return False
        if residency.bucket is None or self._lose_dirty or (tier and twin and twins == "uncopy"):
            return True
        return not any(inode.ino in residency.dirty and not inode.in_bucket for inode in inodes)

    @staticmethod
    def _put_back(order: Order, passed: list[tuple[Victim, list[Inode]]]) -> None:
        """To where they were; many to the young end, or each search would pass them by again."""
        for victim, inodes in reversed(passed):
            if len(passed) <= PASSED_MAX:
                order.put_back(Victim(victim.key, tuple(inode.ino for inode in inodes)))
                continue
            for inode in inodes:
                order.touch(inode)

    def _resident(self, ino: int, order: Order, tier: Tier | None) -> Inode | None:
        """An object if it is still in this order, of copies in one tier or of what is in any."""
        residency = self.residency
        inode = residency.inode(ino)
        if inode is None or not inode.sealed or ino in residency.staging:
            return None
        holders, namespace = residency.holders(inode), residency.namespaces.of(inode)
        if tier is None:
            return inode if holders and namespace.whole is order and not inode.kept else None
        if tier not in holders:
            return None
        return inode if namespace.order(inode, tier, holders) is order else None

    def _in_use(self, inode: Inode) -> bool:
        return inode.ino in self.residency.open or inode.ino in self.residency.busy

    @property
    def reclaimable(self) -> int:
        """Bytes of RAM that a create can have at once: free, or on NVMe as well."""
        if self.ram is None:
            return 0
        free = max(0, self.ram.free - self.headroom)
        if self.nvme is None or self.nvme.health.down:
            return free
        return free + sum(
            0
            if space.settings.pin
            else space.clean_bytes + sum(space.spare.values())
            if space.takes(self.nvme)
            else space.held[self.ram.name]
            for space in self.residency.namespaces
        )


def _taken(held: OpenObject) -> int:
    """Bytes that a file which is being written takes by now: less than was set aside for it."""
    return 0 if held.fd < 0 else os.fstat(held.fd).st_blocks * 512


_whole: Which = attrgetter("whole")
_ram_only: Which = attrgetter("ram_only")
_ram_spare: Which = attrgetter("ram_spare")
_ram_clean: Which = attrgetter("ram_clean")
_on_nvme: Which = attrgetter("on_nvme")
