"""Removal of objects: evicted, expired, lost, dropped with all names, forgotten by the kernel.

Contract: synchronous; the record first, its consequences after, as in `records`. Each removal of a
name calls `invalidate_name(parent, name, ino)`, which invalidates its kernel entry. An open object
goes as an unlinked one does: its handles read on. `trash` unlinks the backing files. Not for
choosing victims (`Victims`).
"""

import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import get_args

import trio

from kvfs.catalog import Batch, Dentry, Inode, keys
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.dirty import Dirty
from kvfs.core.ledger.open_table import OpenObject, OpenTable
from kvfs.core.ledger.orphans import Orphans
from kvfs.core.ledger.records import Records
from kvfs.core.ledger.retries import Retries
from kvfs.core.ledger.tiers import Tiers
from kvfs.core.ledger.trash import Trash
from kvfs.core.namespaces.drops import OfCommand, Reason
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.errors import CatalogError, KvfsError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

FORGOTTEN_AT_ONCE = 8  # inodes removed in one batch: a commit costs as much as all the rest
NOWHERE = bytes(8)  # in a mark of a cut off file, in place of the directory that it will be in
Away = Callable[[Tier, int, int], None]
InvalidateName = Callable[[int, bytes, int], None]


class Removals:
    """`invalidate_name(parent, name, ino)` is called for each name that goes."""

    def __init__(
        self,
        tiers: Tiers,
        table: OpenTable,
        accounts: Accounts,
        orphans: Orphans,
        records: Records,
        retries: Retries,
        namespaces: Namespaces,
        dirty: Dirty,
        trash: Trash,
        counters: Counter[str],
        invalidate_name: InvalidateName,
    ) -> None:
        self.catalog = table.catalog
        self.tiers = tiers
        self.table = table
        self.accounts = accounts
        self.orphans = orphans
        self.records = records
        self.retries = retries
        self.namespaces = namespaces
        self.dirty = dirty
        self.trash = trash
        self.counters = counters
        self.invalidate_name = invalidate_name
        self.verified = records.verified
        self.appeared = trio.Event()  # set once the kernel has forgotten an orphan
        # Called with each object that kvfs drops by itself: other nodes of the pool keep it.
        self.withdrawn: Callable[[int], None] = lambda _: None
        self._forgotten_inos: set[int] = set()  # inodes to remove for that
        self._losing: set[tuple[int, int, str]] = set()  # copies that wait in `retries` to be lost

    def is_gone(self, inode: Inode) -> bool:
        """Whether no program may find it: its namespace was dropped, or its lifetime has ended."""
        namespaces = self.namespaces
        return namespaces.is_dropped(inode) or namespaces.of(inode).expired(inode)

    def expire(self, inode: Inode) -> bool:
        """Drop an object whose lifetime has ended, unless it is in use; return `is_gone`."""
        if self.namespaces.is_dropped(inode):
            return True
        if not self.namespaces.of(inode).expired(inode):
            return False
        if inode.ino not in self.table.open and inode.ino not in self.table.busy:
            self.drop(inode, "expired")
        return True

    def lose(self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = "") -> None:
        """Remove a missing or wrong copy: no open is served from it any more.

        The object goes with its last copy, even while a program has it open or is about to open
        it. Handles that read this copy read on, and no other open succeeds until they are closed:
        with another backing file the kernel would refuse the open (EIO). `quarantine` and `why` are
        those of `throw_away`.

        Raises CatalogError. Then kvfs tries again until the catalog takes the change; no open is
        served from the copy meanwhile.
        """
        self.table.take(inode.ino)  # its record is then the open object's, if it is open
        current = self.table.inode(inode.ino)
        if (
            current is None
            or current.version != inode.version
            or tier not in self.tiers.holders(current)
            or inode.ino in self.table.staging
        ):
            return
        self.verified.forget(inode.ino)
        self.records.distrust(inode, tier)
        told = why and f"{why} (a copy of {self.catalog.named(inode.ino)})"
        try:
            if current.in_bucket or len(self.tiers.holders(current)) > 1:
                self.records.stale_in_kernel.add(inode.ino)
                self.records.remove_copy(current, tier, quarantine=quarantine, why=told)
            else:
                self.drop(current, "lost", quarantine=quarantine, why=told)
        except CatalogError as error:
            again = partial(self._lose_again, inode.copy(), tier, quarantine=quarantine, why=why)
            self._lose_when_it_can((inode.ino, inode.version, tier.name), again, error)
            raise
        self.verified.end_doubt(inode.ino, inode.version, tier.name)

    async def _lose_again(
        self, inode: Inode, tier: Tier, *, quarantine: bool = False, why: str = ""
    ) -> None:
        self.lose(inode, tier, quarantine=quarantine, why=why)
        self._losing.discard((inode.ino, inode.version, tier.name))

    def _lose_when_it_can(
        self, copy: tuple[int, int, str], again: Callable[[], Awaitable[None]], error: CatalogError
    ) -> None:
        if copy in self._losing:  # each open of the object may lose the copy again
            return
        log.error(
            "the copy of %s, version %d, on %s is wrong, and no open is served from it; its "
            "record goes when the catalog works: %s",
            *(self.catalog.named(copy[0]), *copy[1:], error),
        )
        self._losing.add(copy)
        self.retries.add(again)

    def let_go(self, inode: Inode, *, delete: bool = False) -> None:
        """Drop a stale object: the bucket has another object by its name, or none.

        delete: its own key elsewhere in the bucket is ours, and goes as well.
        """
        self._drop(inode, "stale", stored=delete)
        self.tiers.bucket.counters["stale"] += 1

    def forget_remote(self, inode: Inode) -> None:
        """Forget an object that only other nodes of the pool have. Nothing is lost."""
        with self.catalog.batch() as batch:
            names = self._unlink_all(inode, batch)
            self.forget(inode, batch)
        self.withdrawn(inode.ino)
        for parent, entry in names:
            self.invalidate_name(parent, entry.name, inode.ino)

    def evict(self, inode: Inode, reason: Reason = "evicted") -> list[Inode]:
        """Evict an object from all local tiers. If the bucket has it, it keeps its names.

        Returns what it dropped.
        """
        if not inode.in_bucket:
            return self.drop(inode, reason)
        with self.catalog.batch() as batch:
            before = batch.change(inode)
            for tier in self.tiers.holders(before):
                self.tiers.set_holder(inode, tier, holds=False)
                batch.then(partial(self._away(inode), tier, inode.ino, inode.version))
            batch.put(inode)
            batch.then(partial(self.accounts.account_changed_copies, before, inode))
        self.tiers.bucket.counters["spilled"] += 1
        self.namespaces.left(before, "spilled")
        return []

    def _away(self, inode: Inode, *, quarantine: bool = False, why: str = "") -> Away:
        space = self.namespaces.of(inode)
        return partial(self.trash.throw_away, space=space, keep=quarantine, why=why)

    def drop(
        self,
        inode: Inode,
        reason: Reason,
        *,
        quarantine: bool = False,
        why: str = "",
        stored: bool = True,
    ) -> list[Inode]:
        """Drop an object with all its names, and the other files of its group that are here.

        stored: their keys in the bucket go as well. Returns what it dropped. Does nothing if the
        object is gone: a listing may meet it again by another of its names.
        """
        if self.catalog.inode(inode.ino) is None:
            return []
        self._drop(inode, reason, quarantine=quarantine, why=why, stored=stored)
        dropped = [inode]
        if not inode.model:  # no layout knows its name, so it is a group of its own
            return dropped
        rest = reason if reason in get_args(OfCommand) else "incomplete"  # half a group is a miss
        for ino in self.namespaces.of(inode).members(inode):
            other = self.table.inode(ino)
            if other is None or self.namespaces.places.is_pinned(other):
                continue
            if ino not in self.table.open and ino not in self.table.busy:
                self._drop(other, rest, stored=stored)
                dropped.append(other)
        return dropped

    def _drop(
        self,
        inode: Inode,
        reason: Reason,
        *,
        quarantine: bool = False,
        why: str = "",
        stored: bool = True,
    ) -> None:
        """Drop one object and invalidate its kernel entries. An open one goes as if unlinked.

        The caller may have read the record while the fast opens had the object. Then the open
        object has another one in memory, and its close writes that one: so that one changes.
        """
        if (held := self.table.open.get(inode.ino)) is not None:
            inode = held.inode
        away = self._away(inode, quarantine=quarantine, why=why)
        access_log = self.namespaces.access_log
        with self.catalog.batch() as batch:
            if access_log.on:
                access_log.dropped(inode, self._counted_as(inode, reason), batch)
            names = self._unlink_all(inode, batch)
            if held is not None and reason == "lost":
                self._drop_open(held, batch, away)
            elif held is not None:  # the next daemon may have to open its file again
                batch.change(inode)
                inode.links = ()
                self.orphans.unlinked_open(inode, batch)
            else:
                self.forget(inode, batch, stored=stored, away=away)
        self.count(inode, reason)
        for parent, entry in names:
            self.invalidate_name(parent, entry.name, inode.ino)

    def _unlink_all(self, inode: Inode, batch: Batch) -> list[tuple[int, Dentry]]:
        """Remove all names of an inode; return them. Other nodes of a pool keep theirs.

        A rename over a name keeps the cookie. So a damaged record may give the name of another.
        """
        batch.dropped.add(inode.ino)
        found = ((parent, self.catalog.dentry(parent, cookie)) for parent, cookie in inode.links)
        names = [
            (parent, entry)
            for parent, entry in found
            if entry is not None and entry.ino == inode.ino
        ]
        for name in names:
            batch.unlink(*name)
        return names

    def count(self, inode: Inode, reason: Reason) -> None:
        """Count a dropped object."""
        self.withdrawn(inode.ino)
        space, reason = self.namespaces.of(inode), self._counted_as(inode, reason)
        if space.drops is not None and space.drops.reason == reason:
            space.drops.add(inode)
        self.counters["dropped"] += 1
        self.counters[f"dropped_{reason}"] += 1
        self.namespaces.left(inode, f"dropped_{reason}")
        # The others are not in a larger cache, either.
        if reason not in {"evicted", "incomplete", "quota", "shrunk"}:
            space.went(inode)

    def _counted_as(self, inode: Inode, reason: Reason) -> Reason:
        """The reason of a drop. In a dropped namespace, it is that of the namespace's drop."""
        space = self.namespaces.of(inode)
        if space.drops is not None and space.ino in self.namespaces.dropped:
            return space.drops.reason
        return reason

    def _drop_open(self, held: OpenObject, batch: Batch, away: Away) -> None:
        """Drop an open object's copies, which may be wrong; its record goes when it is closed."""
        inode = held.inode
        before = batch.change(inode)
        self.trash.read.add(inode.ino)
        inode.links, inode.in_bucket = (), False
        for tier in self.tiers.holders(before):
            self.tiers.set_holder(inode, tier, holds=False)
            batch.then(partial(away, tier, inode.ino, inode.version))
        if held.accounted:
            batch.then(partial(self.accounts.dismiss, before))
            batch.then(partial(setattr, held, "accounted", False))  # noqa: FBT003 (setattr's)
        self.orphans.unlinked_open(inode, batch)

    def forget(
        self,
        inode: Inode,
        batch: Batch,
        *,
        accounted: bool | None = None,
        stored: bool = True,
        away: Away | None = None,
    ) -> None:
        """Remove the record and all copies of an inode; its names are the caller's.

        away: throws its files away.
        """
        batch.delete(inode)
        self.dirty.on_unlink(inode.ino, batch, delete=stored)
        batch.mark_finished(inode.ino)
        if not inode.links:
            batch.unmark(keys.UNPUBLISHED, inode.ino)
        if inode.ino in self.namespaces.unaccounted:
            self.namespaces.end_account_anew(inode.ino, batch)
        known = inode.is_file and (inode.sealed if accounted is None else accounted)
        away = away or self._away(inode)
        batch.then(partial(self._forgotten, inode, accounted=known, away=away))

    def _forgotten(self, inode: Inode, *, accounted: bool, away: Away) -> None:
        if inode.ino in self.orphans.rooms:
            self.orphans.leave(inode.ino)
        elif accounted:
            self.accounts.dismiss(inode)
        self.namespaces.hot.discard(inode.ino)
        for tier in self.tiers.holders(inode):
            away(tier, inode.ino, inode.version)
        self.trash.read.discard(inode.ino)

    def take_names(self, held: OpenObject, why: bytes) -> None:
        """Remove all names of an open object, which its writer keeps. why: for the next daemon.

        Raises CatalogError; then nothing has changed.
        """
        inode = held.inode
        found = bool(inode.links or held.publish)
        with self.catalog.batch() as batch:
            batch.change(inode)
            names = self._unlink_all(inode, batch)
            inode.links = ()
            batch.mark(keys.UNPUBLISHED, inode.ino, NOWHERE + why)
            self.orphans.unlinked_open(inode, batch)
        held.publish = None
        if found:
            self.count(inode, "too_large")
        for parent, entry in names:
            self.invalidate_name(parent, entry.name, inode.ino)

    def purge(self, ino: int) -> bool:
        """Remove an orphan: its room is needed, or no process can know it. Return whether it went.

        Raises CatalogError.
        """
        return self._purge([ino])

    def forgotten(self, ino: int) -> None:
        """Note that the kernel has forgotten an inode. An orphan goes a moment later, with others.

        `Watch` calls `purge_forgotten` that moment after `appeared`.
        """
        if ino not in self.orphans.rooms:
            return
        self._forgotten_inos.add(ino)
        self.appeared.set()
        if len(self._forgotten_inos) == FORGOTTEN_AT_ONCE:
            self.purge_forgotten()

    def purge_forgotten(self) -> None:
        """Remove the orphans that the kernel has forgotten. Logs each that cannot be removed."""
        if not self.appeared.is_set():
            return
        inos, self._forgotten_inos = self._forgotten_inos, set()
        self.appeared = trio.Event()
        try:
            self._purge(inos)
        except KvfsError:  # one record that makes no sense must not keep the others
            for ino in inos:
                try:
                    self._purge([ino])
                except KvfsError as error:
                    named = self.catalog.named(ino)
                    log.error("%s is not removed yet, its room stays taken: %s", named, error)

    def _purge(self, inos: Iterable[int]) -> bool:
        """Remove orphans; return whether any went.

        Raises CatalogError; then no orphan with a record went.
        """
        may_go = [ino for ino in inos if ino in self.orphans.rooms and ino not in self.table.busy]
        inodes = []
        for ino in may_go:
            inode = self.catalog.inode(ino)
            if inode is None:  # it is damaged, or was never there: the sweep finds its files
                self.orphans.leave(ino)
            else:
                inodes.append(inode)
        if inodes:
            with self.catalog.batch() as batch:
                for inode in inodes:
                    self.forget(inode, batch)
        return bool(may_go)
