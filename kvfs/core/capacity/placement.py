"""Placement: the tier where a new file begins, and whether a written file can stay.

Contract: `choose` returns a `Reservation`, which the caller owns, or raises. Between the last look
at the accounts and the reservation no other task runs. `choose` first makes room in the namespace's
quotas. If only uploads or demotions that are under way would make room, `choose` waits for them, up
to a deadline, and then begins its search again. A tier that is down takes no new file.
Not for making room in a tier: `Room`.
"""

import logging

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.backpressure import Backpressure
from kvfs.core.capacity.demoting import WAIT
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.refusals import Refusals
from kvfs.core.capacity.room import Room
from kvfs.core.capacity.sizes import (
    UNKNOWN_SIZE,
    Expectation,
    ExpectedSizes,
    is_one_block,
    kind_of,
)
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import KvfsError, NoSpaceError, QuotaError, TierError
from kvfs.tiers import Reservation, Tier
from kvfs.units import human

log = logging.getLogger(__name__)

# Where a block of unknown size may begin in RAM: it may take four times its guess, and all such
# blocks together twice theirs, before RAM is full.
GUESS_PART, GUESSES_PART = 4, 2


class Placement:
    """The choice of tiers for new files. Callers report the sizes of written files (`learn`)."""

    def __init__(self, room: Room, quota: Quota) -> None:
        self.ledger = room.ledger
        self.ram = room.ram
        self.room = room
        self.quota = quota
        self.backpressure = Backpressure(room.ledger.dirty)
        self.sizes = ExpectedSizes()
        self.refusals = Refusals(room)
        self._logged: set[str] = set()

    def expect(self, directory: Inode, name: bytes) -> Expectation:
        """The kind of a new file of this name, and the bytes that it is expected to take."""
        block = self.ledger.namespaces.places.block_of(directory, name)
        kind = kind_of(block, directory.ino, name)
        space = self.ledger.namespaces.of(directory)
        return Expectation(kind, self.sizes.expect(space.ino, kind), is_one_block(block))

    def expect_version(self, inode: Inode) -> Expectation:
        """The same for a new version of an object, by its first name."""
        found = self.ledger.catalog.first_name(inode)
        return Expectation(()) if found is None else self.expect(found[0], found[1].name)

    def learn(self, held: OpenObject, size: int) -> None:
        """Learn that files of an open object's kind take `size` bytes."""
        kind = held.kind or self.expect_version(held.inode).kind
        if kind:
            self.sizes.learn(self.ledger.namespaces.of(held.inode).ino, kind, size)

    async def choose(
        self, namespace: Namespace, expected: Expectation, *, replaces: int = 0
    ) -> Reservation:
        """Reserve room for a new file in the tier where it begins.

        If no file of its kind is known, a block begins in RAM, and any other file on NVMe: in RAM
        it could outgrow the tier. Then the kernel would answer its writer with ENOSPC before kvfs
        could make room.

        expected: from `expect`.
        replaces: bytes of the present version, if the file is a new version of an object; else 0.
        Raises QuotaError, NoSpaceError, TierError.
        """
        if not replaces and (room := self._choose_free(namespace, expected)) is not None:
            return room
        if not any(map(namespace.takes, self.ledger.tiers.local)):
            raise self._homeless(namespace)
        try:
            return await self._choose_twice(namespace, expected, replaces)
        except (QuotaError, NoSpaceError) as error:
            self.refusals.log_refusal(namespace, error)
            raise

    async def _choose_twice(
        self, namespace: Namespace, expected: Expectation, replaces: int
    ) -> Reservation:
        """Choose, and again if files that were just closed had the room."""
        demoted_by = trio.current_time() + WAIT
        try:
            return await self._choose(namespace, expected, replaces, demoted_by)
        except (QuotaError, NoSpaceError):
            if not await self.ledger.table.closed():
                raise
            return await self._choose(namespace, expected, replaces, demoted_by)

    def _choose_free(self, namespace: Namespace, expected: Expectation) -> Reservation | None:
        """Reserve room in RAM if it is free there, and no quota or bucket has a say; else None.

        This is the usual create. It takes 4 us less than `_choose`, which decides alike.
        """
        if (
            expected.size is None
            or namespace.has_hard_quota
            or self.ram.health.down
            or not namespace.takes(self.ram)
            or namespace.takes(self.ledger.tiers.bucket)
        ):
            return None
        return self.room.reserve_free(self.ram, max(Tier.cost(0), expected.size))

    async def _choose(
        self, namespace: Namespace, expected: Expectation, replaces: int, demoted_by: float
    ) -> Reservation:
        """Choose, and wait for demotions until `demoted_by`, in trio's seconds."""
        ledger, size = self.ledger, expected.size
        more = max(0, (size or 0) - replaces)
        if more > namespace.settings.quota_hard:  # the expectation is wrong, or the file cannot fit
            more = 0
        deadline = trio.current_time() + ledger.tiers.bucket.wait
        expects = more if expected.block else 0  # other files of one kind differ in size
        objects = 0 if replaces else 1
        await self._make_quota(namespace, more, expects, objects, deadline)
        tiers = [tier for tier in ledger.tiers.local if namespace.takes(tier)]
        if not tiers:
            raise self._homeless(namespace)
        wanted = UNKNOWN_SIZE if size is None else max(Tier.cost(0), size)
        if namespace.takes(ledger.tiers.bucket):
            await self.backpressure.until_not_full(deadline)
        while True:
            last = not self.backpressure.helps(deadline)
            found = await self._choose_now(namespace, tiers, wanted, expected, last=last)
            if found is not None:
                return found
            if not await self.room.demoting.ended(namespace, demoted_by):
                if last:
                    break
                await self.backpressure.upload(deadline)
            # Others may have used up the quota meanwhile.
            await self._make_quota(namespace, more, expects, objects, deadline)
        guess = f" ({human(size)} expected from earlier files of this kind)" if size else ""
        raise NoSpaceError(
            f"no tier has room for a new file{guess}, and nothing more may be dropped: "
            + ", ".join(map(self._filled, tiers))
        )

    def _filled(self, tier: Tier) -> str:
        """Say how full a tier is, for an error."""
        found = f"{tier.name} {human(tier.used)} used + {human(tier.reserved)} reserved"
        found += f" of {human(tier.capacity)}"
        if tier is not self.room.ram:
            return found
        return f"{found} ({human(self.room.headroom)} of it stay free for files that grow)"

    def choose_at_once(self, namespace: Namespace, size: int) -> Reservation | None:
        """Reserve room in RAM for a file of `size` bytes; None if there is none now.

        At most half of RAM is set aside after that. Callers make such files ahead of their use, and
        the bytes that are set aside for them are missing to present writers.
        """
        ram = self.ram
        if ram.health.down or not namespace.takes(ram):
            return None
        if namespace.takes(self.ledger.tiers.bucket) and self.ledger.dirty.full:
            return None
        try:
            if not self.quota.keep(namespace, Tier.cost(0), objects=1, expected=size):
                return None
        except QuotaError:
            return None
        wanted = Tier.cost(-(-size // 4096) * 8)
        aside = max(ram.reserved, sum(held.expected for held in self.ledger.table.staging.values()))
        if aside + wanted > ram.capacity // 2:
            return None
        return self.room.reserve_for_file(ram, wanted, namespace)

    async def _make_quota(
        self, namespace: Namespace, more: int, expected: int, objects: int, deadline: float
    ) -> None:
        """Make room in a namespace's quotas for `more` bytes and `objects` objects.

        expected: see `Quota.keep`. Waits for uploads until `deadline`, in trio's seconds.
        Raises QuotaError.
        """
        while True:
            try:
                while not self.quota.keep(
                    namespace, min(more, Tier.cost(0)), objects=objects, expected=expected
                ):
                    await trio.lowlevel.checkpoint()
            except QuotaError:
                if not self.backpressure.helps(deadline):
                    raise
                await self.backpressure.upload(deadline)
            else:
                return

    async def _choose_now(
        self,
        space: Namespace,
        tiers: list[Tier],
        wanted: int,
        expected: Expectation,
        *,
        last: bool,
    ) -> Reservation | None:
        """Reserve room in one of these tiers; None if no object may go for it.

        last: waiting would not help, so a reservation of fewer bytes than `wanted` suffices. Raises
        TierError if each tier is down.
        """
        ledger, known = self.ledger, expected.size is not None
        ram = self.ram if self.ram in tiers else None
        while True:
            order = [tier for tier in self._order(tiers, expected) if not tier.health.down]
            if not order:
                raise TierError(
                    "no tier takes a new file: " + ", ".join(tier.health.why for tier in tiers)
                )
            for tier in order:
                least = wanted if known else min(wanted, tier.capacity // 4)
                found = self.room.reserve_for_file(tier, least, space)
                if found is None and tier is ram and self.room.ram_goes_first(space, least):
                    found = self.room.reserve_for_file(ram, least, space, lose=True)
                if found is not None:
                    return found
            if ledger.accounts.census_done.is_set():
                break
            # The estimate leaves no room. The counted objects may leave some.
            await ledger.accounts.census_step.wait()
        if ram is not None:
            if self.room.evict_copies(wanted + self.room.headroom) and (
                found := self.room.reserve_for_file(ram, wanted, space)
            ):
                return found
            if found := self.room.reserve_for_file(ram, wanted, space, lose=True):
                return found
        if tiers == [self.ram]:
            self.room.note_ram_lacks()
        if not last:
            return None
        for tier in order:  # the expected sizes of other files may be too large: begin anyway
            if (found := self.room.reserve_for_file(tier, Tier.cost(0), space)) is not None:
                return found
        if ram is not None and (
            found := self.room.reserve_for_file(ram, Tier.cost(0), space, lose=True)
        ):
            return found
        if not ledger.tiers.bucket.health.down:
            return None
        with self.room.victims.losing_dirty():
            for tier in order:
                if (found := self.room.reserve_for_file(tier, wanted, space)) is not None:
                    return found
        return None

    def _order(self, tiers: list[Tier], expected: Expectation) -> list[Tier]:
        """The tiers in the order in which a new file asks them for room."""
        if expected.size is not None:
            fits = expected.size + self.room.headroom <= self.ram.capacity
            return tiers if fits else tiers[::-1]
        if 0 < expected.guess <= self.ram.capacity // GUESS_PART:
            guesses = sum(held.guess for held in self.ledger.table.staging.values())
            if guesses + expected.guess <= self.ram.capacity // GUESSES_PART:
                return tiers
        return tiers[::-1]

    def first_choice(self, expected: Expectation, space: Namespace) -> Tier | None:
        """The tier where a new file would begin at present if it had room there; None: nowhere."""
        tiers = [one for one in self.ledger.tiers.local if space.takes(one) and one.works]
        for tier in self._order(tiers, expected):
            spare = self.room.headroom if tier is self.ram else 0
            if (expected.size or 0) + spare <= tier.capacity:
                return tier
        return None

    def too_large(self, inode: Inode, namespace: Namespace) -> KvfsError | None:
        """Why an object cannot stay even in an empty tier or namespace; None if it can."""
        cost, quota = Tier.cost(inode.blocks), namespace.settings.quota_hard
        local = self.ledger.tiers.local
        tiers = [t for t in local if cost > t.configured_capacity and namespace.takes(t)]
        if tiers and not any(t not in tiers and namespace.takes(t) for t in local):
            sizes = " and ".join(f"{one.name} {human(one.configured_capacity)}" for one in tiers)
            return NoSpaceError(f"it takes {human(cost)}, its tiers have {sizes}")
        if 0 < quota < cost:
            return QuotaError(f"it takes {human(cost)}, its namespace may have {human(quota)}")
        return None

    def _homeless(self, namespace: Namespace) -> NoSpaceError:
        """The error for a namespace that no mounted tier takes. Logs each reason once.

        Programs see only ENOSPC.
        """
        why = namespace.homeless(self.ledger.tiers.local)
        name = self.ledger.namespaces.name(namespace.ino)
        what = f"namespace {name} takes no new file: {why}"
        if what not in self._logged:
            self._logged.add(what)
            log.warning("%s", what)
        return NoSpaceError(what)
