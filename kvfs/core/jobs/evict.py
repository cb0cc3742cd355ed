"""Evict objects from their tiers on request: the visitor behind `kvfs evict`.

Contract: with `to="nvme"` an object leaves RAM; if NVMe has no copy, one is made before. With
`to="s3"` an object leaves every local tier if the bucket has this version. An object that no other
tier would hold is refused and counted with its reason. With `drop` such an object is dropped with
its names, and its group with it, as in eviction. `log_dropped` tells what was dropped.

An object that is in use, pinned or kept is always refused. An object is also refused if the copy
that would stay is in a tier that is down. `dry` only counts. The record changes first, and nothing
is read before an await and changed after it. Not for making room (`Room`).
"""

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.room import Room
from kvfs.core.jobs.job import Reasons
from kvfs.core.jobs.tree_jobs import Deferred
from kvfs.core.moves.transfers import PERIOD, TierTransfers
from kvfs.errors import ConfigError, KvfsError, TierError
from kvfs.movement.movers import SourceChangedError
from kvfs.tiers import Tier
from kvfs.units import human

log = logging.getLogger(__name__)

NO_ROOM = "nvme has no room for it"


class Evict:
    """`jobs` are inodes that movers work on."""

    def __init__(
        self,
        transfers: TierTransfers,
        room: Room,
        jobs: set[int],
        *,
        to: str = "",
        drop: bool = False,
        dry: bool = False,
    ) -> None:
        """to: nvme or s3; "": s3 with `drop`, else the next tier that the mount has.

        Raises ConfigError.
        """
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.room = room
        self._jobs = jobs
        self.to = to or self._default(drop=drop)
        self.drop, self.dry = drop, dry
        self._check()
        self.counts = Counter(dict.fromkeys(("evicted", "dropped", "already", "refused"), 0))
        self.freed = 0  # bytes in local tiers
        # Objects and bytes that were dropped, with their groups, by namespace.
        self._dropped: Counter[str] = Counter()
        self._dropped_bytes = 0
        self._planned = 0  # bytes on NVMe of copies that a dry run would make
        self.why = Reasons()

    def _default(self, *, drop: bool) -> str:
        if drop:
            return "s3"
        tiers = self.ledger.tiers
        if not tiers.nvme.mounted and not tiers.bucket.mounted:
            raise ConfigError("the mount has neither nvme= nor s3=; --drop loses what only is here")
        return "nvme" if tiers.nvme.mounted else "s3"

    def _check(self) -> None:
        tiers = self.ledger.tiers
        if self.to not in {"nvme", "s3"}:
            raise ConfigError(f"to={self.to}: expected nvme or s3")
        if self.to == "nvme" and not (tiers.nvme.mounted and tiers.ram.mounted):
            raise ConfigError("to=nvme: expected a mount with ram= and nvme=; use s3, or --drop")
        if self.to == "nvme" and self.drop:
            raise ConfigError("to=nvme loses nothing: --drop goes with --to s3, or alone")
        if self.to == "s3" and not tiers.bucket.mounted and not self.drop:
            raise ConfigError("to=s3: the mount has no bucket; --drop loses what only is here")

    def describe(self) -> dict[str, Any]:
        return {"to": self.to, **self.counts, "freed_bytes": self.freed, "why": dict(self.why)}

    def log_dropped(self) -> None:
        """Log what was dropped, if anything was."""
        if self._dropped:
            spaces = ", ".join(f"{n} of namespace {name}" for name, n in self._dropped.items())
            log.info(
                "kvfs evict --drop dropped %d objects of %s: %s",
                *(self._dropped.total(), human(self._dropped_bytes), spaces),
            )

    def failed(self, inode: Inode, error: Exception) -> None:
        if self._is_gone(inode.ino):
            self.counts["already"] += 1  # the failed visit had nothing to work on any more
        else:
            self._refuse(str(error))

    def _is_gone(self, ino: int) -> bool:
        """Whether the object was unlinked or dropped, so that nothing of it stays."""
        inode = self.ledger.table.inode(ino)
        return inode is None or not inode.links or self.ledger.removals.is_gone(inode)

    def _refuse(self, why: str) -> None:
        self.counts["refused"] += 1
        self.why.note(why)

    def visit(self, inode: Inode) -> Deferred | None:
        """Evict one object now, or return the work that takes longer. Raises CatalogError."""
        ledger = self.ledger
        leaves = ledger.tiers.holders(inode)
        if self.to == "nvme":
            leaves = [tier for tier in leaves if tier is ledger.tiers.ram]
        if not leaves or ledger.removals.is_gone(inode):
            self.counts["already"] += 1
            return None
        if why := self._stays(inode):
            self._refuse(why)
            return None
        if self.to == "s3":
            self._leave_all(inode, leaves)
            return None
        return self._leave_ram(inode)

    def _stays(self, inode: Inode) -> str:
        """Return why the object must stay, no matter which tiers hold it; "" if it may go."""
        ledger, space = self.ledger, self.ledger.namespaces.of(inode)
        if not inode.sealed or inode.ino in ledger.table.staging:
            return "being written"
        if inode.ino in ledger.table.open:
            return "open"
        if inode.ino in ledger.table.busy:
            return "being opened or moved"
        if space.settings.pin:
            return f"pinned: namespace {ledger.namespaces.name(space.ino)} has pin=on"
        if self.to == "s3" and (inode.unevictable or space.settings.eviction == "never"):
            return "never dropped: kvfs pin, its connector or eviction=never keeps it here"
        return ""

    def _leave_all(self, inode: Inode, leaves: list[Tier]) -> None:
        ledger, bucket = self.ledger, self.ledger.tiers.bucket
        if inode.in_bucket and bucket.mounted:
            if bucket.health.down:
                self._refuse(f"{bucket.place} is down")
            else:
                self._done("evicted", inode, leaves, partial(ledger.removals.evict, inode))
        elif self.drop:
            self._done("dropped", inode, leaves, partial(self._drop, inode))
        elif inode.ino in ledger.dirty:
            self._refuse("s3 lacks it yet: kvfs flush --wait uploads it")
        elif inode.ino in ledger.dirty.contested:
            self._refuse("it is only here, since another file has its name in s3: --drop loses it")
        else:
            self._refuse("it is only here, and s3 is not to have it: --drop loses it")

    def _drop(self, inode: Inode) -> None:
        namespaces = self.ledger.namespaces
        name = namespaces.name(namespaces.of(inode).ino)
        for dropped in self.ledger.removals.drop(inode, "asked"):
            self._dropped[name] += 1
            self._dropped_bytes += dropped.size

    def _leave_ram(self, inode: Inode) -> Deferred | None:
        ledger, nvme, ram = self.ledger, self.ledger.tiers.nvme, self.ledger.tiers.ram
        bucket = ledger.tiers.bucket
        if nvme.health.down:
            self._refuse("nvme is down")
        elif inode.on_nvme:
            self._done("evicted", inode, [ram], partial(ledger.records.remove_copy, inode, ram))
        elif ledger.namespaces.of(inode).takes(nvme):
            if not self.dry:
                return partial(self._copy, inode.ino)
            self._planned += nvme.cost(inode.blocks)
            if not bucket.mounted and self._planned > nvme.free:
                self._refuse(NO_ROOM)
            else:
                self._done("evicted", inode, [ram])
        elif inode.in_bucket and bucket.mounted and not bucket.health.down:
            self._done("evicted", inode, [ram], partial(ledger.removals.evict, inode))
        else:
            self._refuse("its namespace keeps it out of nvme (media=), and nothing else has it")
        return None

    def _done(
        self, what: str, inode: Inode, leaves: list[Tier], do: Callable[[], object] | None = None
    ) -> None:
        """Take the object out of these tiers now, by `do`, and count it."""
        size = sum(self.ledger.tiers.cost(inode, tier) for tier in leaves)
        if do is not None and not self.dry:
            do()
        self.counts[what] += 1
        self.freed += size

    async def _copy(self, ino: int) -> None:
        """Copy the object to NVMe, then evict it from RAM."""
        ram, nvme = self.ledger.tiers.ram, self.ledger.tiers.nvme
        while ino in self._jobs:  # noqa: ASYNC110 (as short as a copy; no event tells its end)
            await trio.sleep(PERIOD)
        inode = self.transfers.still_current(ino)
        if inode is not None and not inode.on_nvme and ram in self.ledger.tiers.holders(inode):
            with self.room.victims.keeping_names():  # no other object is lost for it
                room = self.room.reserve(nvme, nvme.cost(inode.blocks), "spare")
            if room is None:
                self._refuse(NO_ROOM)
                return
            self._jobs.add(ino)
            try:
                with room:
                    await self.transfers.wait_for_trash(nvme, ino, inode.version)
                    await self.transfers.copy([inode], ram, nvme, "demoted")
            except SourceChangedError as error:
                raise TierError(f"the copy to nvme failed: {error}") from error
            finally:
                self._jobs.discard(ino)
                self.ledger.wakeup.wake()
        self._leave_copied(ino)

    def _leave_copied(self, ino: int) -> None:
        ram, inode = self.ledger.tiers.ram, self.transfers.still_current(ino)
        if self._is_gone(ino):
            self.counts["already"] += 1
        elif inode is None or ram not in self.ledger.tiers.holders(inode):
            self._refuse("it was written or moved meanwhile")
        elif why := self._stays(inode):
            self._refuse(why)
        elif not inode.on_nvme:
            raise KvfsError("the copy to nvme failed: the log has more")
        else:
            self._done(
                "evicted", inode, [ram], partial(self.ledger.records.remove_copy, inode, ram)
            )
