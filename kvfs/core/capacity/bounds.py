"""Bounds of open writers: kvfs measures their files, makes room, and cuts off files without room.

Contract: `watch` runs as long as the mount lives. The kernel writes backing files without asking
the daemon, so each look at a file finds the bytes that came since the last look. One call for all
files of a tier (`Tier.exact_taken`) can tell that no file has grown. Reservations follow the
growth, `Room` makes room for it, and `Quota` keeps hard quotas.

If kvfs can give a writer no more bytes, it *cuts off* the file. The object loses its name, and no
program can open it from then on. Each look removes the file's bytes, also those that the writer
still adds. The writer's flush fails with the reason.

If the daemon serves the bytes, `room_for_write` makes room before each write, and no file exceeds a
limit. Otherwise files can exceed a limit by the bytes that come between two looks. One write(2) of
each writer can bring more than that: a truncation waits for the write(2) that is in the file, and
Linux takes at most 2 GiB in a call. The tmpfs of RAM also has a size limit in the kernel.

kvfs does not use these stronger means:
- project quotas: not all users can set them up, and tmpfs may have none;
- the immutable flag, which stops open writers on ext4 only;
- a tmpfs for each namespace: no sealed object could be renamed to another namespace;
- a daemon that serves all files, at a tenth of the speed.

Invariants: kvfs does not cut off a file that is `just_closed`. A cut off file has no `staged`
bytes; the bytes that it still has are `leaving`. When its last writer closes it, the file is empty,
even if it has readers.
Not for choosing victims (`Room`, `Victims`), nor for handles (`Objects`).
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter

import trio

from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.refusals import held_quota, held_room
from kvfs.core.capacity.room import Room
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.namespace import Namespace
from kvfs.errors import CatalogError, KvfsError, NoSpaceError, QuotaError
from kvfs.tiers import Tier
from kvfs.units import human

log = logging.getLogger(__name__)

PERIOD = 0.002  # s between two looks at files that are being written, if a limit is near
# s between two looks, if writers cannot reach a limit meanwhile. Looks at each 2 ms took 10 us of
# each of 8 clients' creates, and a small file is closed before its first look at 20 ms.
CALM = 0.02
RATE = 64 << 30  # bytes/s that no machine's writers write together into its tiers
# Looks at the files of a tier after its file system stopped growing. One is not enough: the file
# system counts a new page before its file does.
LOOKS = 2
RESTING = 0.25  # s between two looks while the file system has not grown
HUGE = 2 << 20  # bytes of a huge page: a lent file may take all of its last page


class Bounds:
    """The looks at open writers. `cut_off(held, why)` removes the names of an object."""

    def __init__(
        self,
        ledger: Ledger,
        room: Room,
        quota: Quota,
        cut_off: Callable[[OpenObject, KvfsError], None],
    ) -> None:
        self.ledger = ledger
        self.room = room
        self.quota = quota
        self._cut_off = cut_off
        self._emptying: set[OpenObject] = set()
        self._failing = False
        self._files: dict[Tier, list[OpenObject]] = {}  # the files with writers
        self._listed_at = -1  # the value of `OpenTable.changes` at the listing of `_files`
        # For each tier: `Tier.exact_taken` at the last look, the number of looks in a row that
        # found the same value, and the time when a look is due anyway, in monotonic s.
        self._states: dict[Tier, tuple[int | None, int, float]] = {}

    async def watch(self) -> None:
        """Look at the open writers while there are any, after `pause` each time."""
        ledger = self.ledger
        async with trio.open_nursery() as nursery:
            while True:
                await ledger.table.writing.wait()
                await trio.sleep(self.pause())
                files = self.may_have_grown()
                try:
                    self.look(files)
                    self._failing = False
                except CatalogError as error:
                    if not self._failing:
                        log.error(
                            "kvfs made no room for files being written, and tries again: %s", error
                        )
                    self._failing = True
                    self._states.clear()
                for held in files:
                    if held.leaving and held not in self._emptying:
                        self._emptying.add(held)
                        nursery.start_soon(self.empty_file, held, os.dup(held.fd))
                if not ledger.table.staging:
                    ledger.table.writing = trio.Event()

    def pause(self) -> float:
        """Seconds until the next look: writers use up at most half of the free bytes meanwhile.

        Bytes are free in a tier, and in a hard quota. So a pause ends before a limit is reached,
        and before the kernel answers a writer with ENOSPC.
        """
        left = 2 * RATE * CALM
        for held in self.ledger.table.staging.values():
            if held.doom is not None:
                return PERIOD
            spare = self.room.headroom if held.tier is self.room.ram else 0
            left = min(left, held.tier.free - spare)
            quota = 0 if held.space is None else held.space.settings.quota_hard
            if held.space is not None and quota:
                left = min(left, quota - held.space.counted)
        return max(PERIOD, left / 2 / RATE)

    def may_have_grown(self) -> list[OpenObject]:
        """Files with writers, without the files of tiers that did not grow at the last looks.

        Limits may change without growth, so each file also gets a look every `RESTING` seconds.
        """
        table, now = self.ledger.table, time.monotonic()
        if table.changes != self._listed_at:
            self._listed_at, self._files = table.changes, {}
            self._states.clear()
            for held in table.staging.values():
                self._files.setdefault(held.tier, []).append(held)
        found: list[OpenObject] = []
        for tier, files in self._files.items():
            taken = tier.exact_taken()
            before, looks, rest_until = self._states.get(tier, (None, 0, 0.0))
            looks = looks + 1 if taken is not None and taken == before else 0
            if looks < LOOKS or now > rest_until:
                found += files
                rest_until = now + RESTING
            self._states[tier] = taken, looks, rest_until
        return found

    def look(self, files: list[OpenObject] | None = None) -> None:
        """Measure files, make room for them, and cut off files without room. Raises CatalogError.

        files: the files to look at; None: all files with writers.
        """
        staging = list(self.ledger.table.staging.values()) if files is None else files
        for held in staging:
            if held.fd >= 0:  # its file could be opened again
                self._weigh_file(held, held.taken)
        for space in {held.space for held in staging if held.space is not None}:
            self._keep_quota(space, [held for held in staging if held.space is space])
        for tier in {held.tier for held in staging}:
            while (found := self.room.make_room(tier)) is not None:
                self._cut_off_file(found, self._held_room(found))

    def look_at_end(self, held: OpenObject) -> None:
        """Look for the last time at a file whose writer closes it, and which was just measured.

        The file may have grown since the last look. After the answer to the close, kvfs may not
        cut off the file, so it could stay beyond a limit. Raises CatalogError, or the file's `doom`
        if the file is cut off.
        """
        self._weigh_file(held, held.measured, ends=True)
        if held.doom is None and held.space is not None:
            self._keep_quota(held.space, [held])
        while held.doom is None and self._is_short(held.tier):
            if (found := self.room.make_room(held.tier)) is None:
                break
            self._cut_off_file(found, self._held_room(found))
        if held.doom is not None:
            raise held.doom

    def _is_short(self, tier: Tier) -> bool:
        """Whether to call `Room.make_room`. An unneeded call would cost a tenth of a create."""
        return tier.free < (self.room.headroom if tier is self.room.ram else 0)

    def _weigh_file(self, held: OpenObject, taken: int, *, ends: bool = False) -> None:
        if held.doom is not None:
            held.leaving = taken
            return
        held.grows = taken > held.staged
        self.ledger.table.weigh(held, taken)
        if taken > held.reserved:
            held.reserve(taken if ends else taken + held.ahead)
        why = _too_much(held, taken)  # its quota may have become smaller
        if why is not None and not held.just_closed:
            self._cut_off_file(held, why)

    def _keep_quota(self, space: Namespace, written: list[OpenObject]) -> None:
        """Keep a hard quota. If no victim is left, cut off growing files, the largest first."""
        while not self.quota.follow(space):
            growing = [held for held in written if held.grows and not held.just_closed]
            if not growing:
                break
            largest = max(growing, key=attrgetter("staged"))
            self._cut_off_file(largest, self._exceeded(space, largest))

    def _exceeded(self, space: Namespace, held: OpenObject) -> QuotaError:
        """The error for a growing file: it says what holds the room of its namespace's quota."""
        error = self.quota.exceeded(space)
        why = held_quota(self.room, space, error, held)
        return QuotaError(f"{error}; {why.text}", because=", ".join(sorted(why.causes)))

    def _cut_off_file(self, held: OpenObject, why: KvfsError) -> None:
        held.grows = False
        self._states.clear()  # the next look finds the bytes that it still has
        self._cut_off(held, why)

    def _held_room(self, held: OpenObject) -> NoSpaceError:
        """The error for a growing file: it says what holds the room of its tier."""
        if held.space is None:
            return _no_room(held.tier, held.staged)
        why = held_room(self.room, held.space, [held.tier], held)
        return NoSpaceError(
            f"{_no_room(held.tier, held.staged)}; {why.text}", because=", ".join(sorted(why.causes))
        )

    async def empty_file(self, held: OpenObject, fd: int) -> None:
        """Empty a cut off file, in a thread: the truncation waits for a running write(2).

        fd: a descriptor that `empty_file` closes.
        """
        try:
            await held.tier.calls.run_unlimited(partial(_truncate_and_close, fd))
        except OSError as error:
            held.tier.failed("truncate", held.path, error)
        finally:
            self._emptying.discard(held)

    @contextmanager
    def room_for_write(self, held: OpenObject, offset: int, length: int) -> Iterator[None]:
        """Make room for a write that the daemon carries out. The block performs the write.

        offset, length: of the write, in bytes. Raises QuotaError, NoSpaceError.
        """
        self._take_room(held, offset, length)
        held.in_flight += 1
        try:
            yield
        finally:
            held.in_flight -= 1
            if not held.in_flight:
                held.promised = 0  # its bytes count as `staged` until the next look
                self._states.clear()

    def _take_room(self, held: OpenObject, offset: int, length: int) -> None:
        if held.doom is not None:
            raise held.doom
        found = os.fstat(held.fd)
        taken, end = held.taken, found.st_size
        if found.st_blocks * 512 >= end:  # the file has no holes that the write could fill
            length = min(length, max(0, offset + length - end))
        if not length:
            return
        wanted = taken + -(-length // 4096) * 4096
        why = _too_much(held, wanted)
        if why is not None:
            raise why
        self.ledger.table.weigh(held, wanted)
        try:
            self._make_way(held, wanted)
        except BaseException:
            self.ledger.table.weigh(held, taken)
            raise
        held.promised = wanted

    def _make_way(self, held: OpenObject, wanted: int) -> None:
        held.grows = True
        if held.space is not None and not self.quota.follow(held.space):
            raise self._exceeded(held.space, held)
        if wanted > held.reserved:
            held.reserve(wanted)
        while (found := self.room.make_room(held.tier)) is not None:
            if found is held:
                raise _no_room(held.tier, wanted)
            self._cut_off_file(found, self._held_room(found))


def _too_much(held: OpenObject, taken: int) -> KvfsError | None:
    """Why a file of so many bytes cannot stay even in an empty tier; None if it can."""
    if held.most and (taken > -(-held.most // HUGE) * HUGE or _size(held) > held.most):
        return NoSpaceError(
            f"it was lent to be {held.most} bytes, and is {_size(held)} in {taken}",
            because="a lease",
        )
    if taken > held.tier.configured_capacity:
        return NoSpaceError(
            f"it takes {human(taken)}, {held.tier.name} has "
            f"{human(held.tier.configured_capacity)}: it needs a larger tier",
            because="a large file",
        )
    quota = 0 if held.space is None else held.space.settings.quota_hard
    if 0 < quota < taken:
        return QuotaError(
            f"it takes {human(taken)}, its namespace may have {human(quota)}: it needs a larger "
            "quota_hard",
            because="a large file",
        )
    return None


def _size(held: OpenObject) -> int:
    return os.fstat(held.fd).st_size


def _no_room(tier: Tier, taken: int) -> NoSpaceError:
    return NoSpaceError(
        f"it takes {human(taken)}, and of the {human(tier.capacity)} of {tier.name} nothing more "
        "may be dropped for it"
    )


def _truncate_and_close(fd: int) -> None:
    """Truncate a file and close its descriptor. Raises OSError."""
    try:
        os.ftruncate(fd, 0)
    finally:
        os.close(fd)
