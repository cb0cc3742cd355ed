"""Objects in RAM whose opens for reading are answered without the daemon's loop.

Contract: an object is in the gate's table from its last close until the daemon asks for its open
object, takes its lock or changes its record. After the close of a writer it waits for a `STEP`
before it enters. Each of these calls `take` or `take_record` first. Handles that are open by then
become those of an ordinary open object. So for all other code an object that waits or is in the
table is closed.

Invariant: an inode is in one of the open table, `waiting` and the gate's table at most. `offer`
comes in the same step of the loop as the last close.

`see` tells policies and accounts of the opens, in order; call it before a decision about order of
use. Synchronous, except `run`. Not for the answers: that is the gate (`fuse/fast_open.py`).
"""

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.accounts import Accounts
from kvfs.core.ledger.latencies import Latencies
from kvfs.core.ledger.open_table import OpenObject, OpenObjects, OpenTable
from kvfs.core.ledger.records import Records
from kvfs.core.ledger.uses import Uses
from kvfs.core.namespaces.open_order import caller
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

STEP = 0.02  # s after which objects enter
# s between two looks at the opens. Decisions about order look as well, so only prefetching from
# afar needs the shorter one. A look takes a processor from an engine's next open: with looks
# after 20 ms the 99th percentile of an open was 380 to 580 us, with looks after 1 s 280 to 340.
LOOK, LOOK_WITH_AFAR = 1.0, 0.02
AT_ONCE = 64  # objects taken out, or put in again, in one step of the loop: some 1 ms
SEEN_AT_ONCE = 16  # opens of one object in one look that policies see: more tell them nothing new
FOR_EVER = (1 << 63) - 1  # ns since 1970: no deadline


class ObjectOpens(NamedTuple):
    """Opens of one object that the gate has answered since the last look."""

    ino: int
    opens: int
    first: int  # of them, those that found no handle open
    thread: int  # that opened it last
    spent_ns: int
    accessed_ns: int  # the time of access that programs see since; 0: the record has it


class Taken(NamedTuple):
    """An object that left the gate's table."""

    backing_id: int
    handles: list[int]  # still open
    since: ObjectOpens
    read: bool  # it was ever opened from the table


class Gate(Protocol):
    """Answers opens of the objects in its table, beside the daemon's loop."""

    def offer(self, held: OpenObject, deadline_ns: int, use_step_ns: int) -> bool:
        """Put an object with a backing id into the table. False: it is full, or off.

        An open moves the time of access if that is older than use_step_ns, as relatime does.
        """
        ...

    def take(self, ino: int, *, even_open: bool) -> Taken | bool:
        """Take an object out. False: it is not in the table. True: it is, and stays: it is open."""
        ...

    def has(self, ino: int) -> bool:
        """Whether an object is in the table."""
        ...

    def adopt(self, taken: Taken, held: OpenObject) -> None:
        """Serve the taken handles as those of `held` from now on."""
        ...

    def close(self, backing_id: int) -> None:
        """Close the backing id of an object without handles."""
        ...

    def inode_of(self, handle: int) -> int:
        """The inode of a handle that was opened from the table; 0: no such handle."""
        ...

    def opens(self) -> list[ObjectOpens]:
        """The opens since the last call, in the order of their objects' first ones."""
        ...

    def turn(self, *, on: bool) -> None:
        """Answer opens from the table, or hand all to the daemon. OSError: the first time only."""
        ...

    def answer_lookups(self, *, on: bool) -> None:
        """Answer lookups of absent names as well, while opens are answered.

        OSError: the first time only.
        """
        ...

    def inodes(self, limit: int) -> list[int]:
        """Objects of the table, the longest unused first."""
        ...

    def open_inodes(self) -> list[int]:
        """Objects of the table that programs have open."""
        ...

    def surplus(self) -> int:
        """The object to take out of a full table for another one, or 0."""
        ...

    async def used(self) -> None:
        """Wait until an object was opened from the table."""
        ...


class FastOpens:
    """The objects of the gate's table. Without a gate there are none.

    `opened(inode, thread)` learns of each object that was opened.
    """

    def __init__(
        self,
        table: OpenTable,
        accounts: Accounts,
        records: Records,
        uses: Uses,
        latencies: Latencies,
        counters: Counter[str],
    ) -> None:
        self.table = table
        self.accounts = accounts
        self.records = records
        self.uses = uses
        self.latencies = latencies
        self.counters = counters
        self.tiers = records.tiers
        self.namespaces = table.namespaces
        self.gate: Gate | None = None
        self.opened: Callable[[Inode, int], None] = lambda _inode, _thread: None
        self._open = False  # the gate answers
        self._emptied = trio.Event()
        self._seen: deque[ObjectOpens] = deque()  # of objects that were taken out
        self._accessed: dict[int, int] = {}  # times of access (ns) that no record has yet
        self._again: dict[int, None] = {}  # closed objects that were taken out lately, in order
        # Objects with a backing id that enter after a STEP: their writer has closed them, or their
        # record has changed. Most writers rename a file at once, and a rename took 1.4 times as
        # long for an object of the table.
        self.waiting: dict[int, OpenObject] = {}
        self._some_again = trio.Event()
        # Opens an object's copy in RAM for the kernel alone, if an open would get it at once.
        self.reopen: Callable[[Inode], OpenObject | None] = lambda _: None

    def start(self, gate: Gate) -> None:
        """Let the gate answer. Call it once the handles of a takeover are claimed.

        Raises OSError, with nothing changed, if the gate cannot have its table or its thread.
        """
        self._answer_lookups(gate)
        gate.turn(on=True)
        self.gate = gate
        self.table.open = OpenObjects(self.table.open, self.take)
        self.table.take = self.records.verified.doubting = self.take
        self.table.catalog.watchers.append(self.take_record)
        self.namespaces.follow(self.see, self.empty)
        self._open = True

    def _answer_lookups(self, gate: Gate) -> None:
        """The access log notes each lookup of an absent name: then the daemon answers them."""
        gate.answer_lookups(on=not self.namespaces.access_log.on)

    def stop(self) -> None:
        """Take all objects out, for good."""
        if self.gate is None:
            return
        self.gate.turn(on=False)
        while self.waiting:
            self._close(self.waiting.popitem()[1])
        while inodes := self.gate.inodes(AT_ONCE):
            for ino in inodes:
                self.take(ino)
        self.see()
        self.record_times()
        self.gate, self._open = None, False

    # In and out

    def offer(self, held: OpenObject, *, written: bool) -> bool:
        """Put an object that was just closed into the table, with its backing id; False: refused.

        Its open object went in the same step of the loop. written: a writer has closed it.
        """
        if written and held.tier is self.tiers.ram and self.gate is not None and self._open:
            self._wait(held)
            return True
        return self._offer(held)

    def _offer(self, held: OpenObject) -> bool:
        if held.reopened:
            self._try_again(held.inode.ino)  # soon, with another backing id
        if self.gate is None or not self._open:
            return False
        # Its last close may have dropped it for a quota: the record of `held` does not know that.
        inode = self.table.inode(held.inode.ino)
        if inode is None or inode.version != held.inode.version:
            return False
        held.inode = inode
        if not self._may_enter(held):
            return False
        space = self.namespaces.of(inode)
        lives = space.ttl_remaining(inode, math.inf)
        deadline = FOR_EVER if lives == math.inf else time.time_ns() + int(lives * 10**9)
        while surplus := self.gate.surplus():
            self.take(surplus)
            self._again.pop(surplus, None)
        return self.gate.offer(held, deadline, space.use_step)

    def _may_enter(self, held: OpenObject) -> bool:
        """Whether the daemon would answer each open of it at once, from RAM, and refuse none."""
        inode, ram = held.inode, self.tiers.ram
        return (
            held.backing_id > 0
            and held.tier is ram
            and inode.ram_epoch == ram.epoch
            and inode.sealed
            and bool(inode.links)
            and inode.blocks * 512 >= inode.size  # no gaps: `BackingFiles.register`
            and not (held.refused or held.direct or held.reopened or held.mapped)
            and inode.ino not in self.table.busy
            and inode.ino not in self.records.stale_in_kernel
            and (inode.ino, inode.version, ram.name) not in self.records.verified.doubted
            and not self.namespaces.limited
            and not self.namespaces.access_log.on
            and not self.namespaces.is_dropped(inode)
        )

    def take(self, ino: int) -> None:
        """Take an object out; its open handles become those of an open object."""
        if self.waiting and (held := self.waiting.pop(ino, None)) is not None:
            self._close(held)
            self._try_again(ino)
        elif self.gate is not None and (taken := self.gate.take(ino, even_open=False)):
            # The record is read first: if that fails, nothing has changed.
            inode = self.table.catalog.inode(ino) if taken is True else None
            self._take(ino, taken, inode)

    def take_record(self, inode: Inode) -> None:
        """Take an object out whose record, in memory this one, is about to change.

        Opens of objects that were taken out count first: their records may be about to go. A copy
        of an open object's record must not change: the object's close would undo it.
        """
        self._take_record(inode)
        held = self.table.peek(inode.ino)
        assert held is None or held.inode is inode, f"{inode} is a copy, not the record of {held}"
        if self._seen:
            self.see()

    def _take_record(self, inode: Inode) -> None:
        if self.waiting and inode.ino in self.waiting:
            if not inode.links:
                self._close(self.waiting.pop(inode.ino))
        elif self.gate is not None and (taken := self.gate.take(inode.ino, even_open=False)):
            self._take(inode.ino, taken, inode, enters_again=bool(inode.links))

    def _wait(self, held: OpenObject) -> None:
        """Let an object enter after a STEP."""
        assert held.inode.ino not in self.waiting, "a backing id that nobody closes"
        self.waiting[held.inode.ino] = held
        self._some_again.set()

    def _close(self, held: OpenObject) -> None:
        assert self.gate is not None
        self.gate.close(held.backing_id)

    def take_handle(self, handle: int) -> None:
        """Take the object out that has this handle."""
        if self.gate is not None and (ino := self.gate.inode_of(handle)):
            self.take(ino)

    def _take(
        self, ino: int, found: "bool | Taken", inode: Inode | None, *, enters_again: bool = False
    ) -> None:
        """enters_again: with the same backing id, if it is not open."""
        assert self.gate is not None
        taken = self.gate.take(ino, even_open=True) if isinstance(found, bool) else found
        assert isinstance(taken, Taken)
        if taken.since.opens:
            self._seen.append(taken.since)
        if taken.read:
            self.records.trash.read.add(ino)
        earlier = self._accessed.pop(ino, 0)
        accessed = taken.since.accessed_ns or earlier
        if accessed and inode is not None:
            inode.atime_ns = accessed
        if not taken.handles and enters_again and inode is not None:
            self._wait(self._held(inode, taken))
            return
        if not taken.handles:
            self.gate.close(taken.backing_id)
            if accessed and inode is None:
                self._record_times({ino: accessed})
            self._try_again(ino)
            return
        assert inode is not None, f"inode {ino} is open and has no record"
        held = self._held(inode, taken)
        self.table.open[ino] = held
        self.gate.adopt(taken, held)
        if accessed:
            self.uses.note([inode], accessed)

    def _held(self, inode: Inode, taken: Taken) -> OpenObject:
        return OpenObject(
            inode,
            self.tiers.ram,
            -1,
            writable=False,
            backing_id=taken.backing_id,
            readers=len(taken.handles),
            accounted=True,
        )

    def _try_again(self, ino: int) -> None:
        self._again[ino] = None
        self._some_again.set()

    def open_inodes(self) -> list[Inode]:
        """The records of the table's objects that programs have open. They stay in the table."""
        if self.gate is None:
            return []
        inodes = self.table.catalog.inodes(self.gate.open_inodes())
        return [inode for inode in inodes if inode is not None]

    def empty(self) -> None:
        """Have the daemon decide about each open anew: what the opens depend on has changed."""
        if self.gate is not None and self._open:
            self._open = False
            self.gate.turn(on=False)
            self._emptied.set()

    # Uses

    def see(self) -> None:
        """Tell policies, accounts and counters of all opens so far."""
        if self.gate is None:
            return
        seen = [*self._seen, *self.gate.opens()]
        self._seen.clear()
        ram = self.tiers.ram
        for opens in seen:
            inode = self.table.inode(opens.ino)
            ram.hits += opens.opens
            self.counters["opens_passthrough"] += opens.first
            self.counters["opens_fast"] += opens.opens
            if inode is None:
                continue
            if opens.accessed_ns and self.gate.has(opens.ino):
                self._accessed[opens.ino] = opens.accessed_ns
            self._count(inode, opens, ram)

    def _count(self, inode: Inode, opens: ObjectOpens, ram: Tier) -> None:
        space, seconds = self.namespaces.of(inode), opens.spent_ns / 10**9
        caller.set(opens.thread)
        space.opens_timed += opens.opens
        space.open_seconds += seconds
        self.latencies.open[ram.name].observe(seconds / opens.opens, opens.opens)
        # An object without a name, or with a writer, has no place in the orders of eviction.
        in_order = bool(inode.links) and self.accounts.accounted(inode)
        seen = min(opens.first, SEEN_AT_ONCE) if in_order else 0
        self.namespaces.read(inode, ram, opens.opens, seen=seen)
        if not seen:
            return
        self.accounts.touch(inode)
        self.opened(inode, opens.thread)

    async def run(self) -> None:
        """Look at the opens soon after each, and fill the table anew after `empty`."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._look)
            nursery.start_soon(self._enter_again)
            while True:
                await self._emptied.wait()
                self._emptied = trio.Event()
                while self.gate is not None and (inodes := self.gate.inodes(AT_ONCE)):
                    for ino in inodes:
                        self.take(ino)
                    await trio.lowlevel.checkpoint()
                if self.gate is not None:
                    self._open = True
                    self._answer_lookups(self.gate)
                    self.gate.turn(on=True)

    async def _enter_again(self) -> None:
        """Put objects in after a STEP: a writer has closed them, or a mover has copied them."""
        while self.gate is not None:
            await self._some_again.wait()
            await trio.sleep(STEP)
            if not self._open:  # `run` is emptying the table
                continue
            self._some_again = trio.Event()
            waiting, again, self._again = [*self.waiting], [*self._again], {}
            for at, (enter, ino) in enumerate(
                [(self._enter, ino) for ino in waiting] + [(self._reopen, ino) for ino in again]
            ):
                if not at % AT_ONCE:
                    await trio.lowlevel.checkpoint()
                enter(ino)

    def _enter(self, ino: int) -> None:
        held = self.waiting.pop(ino, None)
        if held is not None and not self._offer(held):
            self._close(held)

    def _reopen(self, ino: int) -> None:
        if self.gate is None or self.gate.has(ino) or self.table.peek(ino) or ino in self.waiting:
            return
        if self.gate.surplus():  # the table is full of objects that were used later
            return
        inode = self.table.inode(ino)
        if inode is None or not inode.is_file:
            return
        held = self.reopen(inode)
        if held is not None and not self._offer(held):
            self._close(held)

    async def _look(self) -> None:
        while self.gate is not None:
            await self.gate.used()
            await trio.sleep(LOOK_WITH_AFAR if self.tiers.has_afar else LOOK)
            self.see()
            self.record_times()

    def record_times(self) -> None:
        """Record the times of access of the opens seen so far, in one batch.

        They wait while NVMe is down: the catalog is there, and its commit would block the loop.
        """
        if self.tiers.nvme.health.down:
            return
        accessed, self._accessed = self._accessed, {}
        if accessed:
            self._record_times(accessed)

    def _record_times(self, accessed: Mapping[int, int]) -> None:
        try:
            with self.table.catalog.batch() as batch:
                for ino, accessed_ns in accessed.items():
                    inode = self.table.catalog.inode(ino)
                    if inode is not None:
                        inode.atime_ns = accessed_ns
                        batch.put(inode, accessed=True)
        except CatalogError as error:  # a time is no reason to refuse anything
            log.debug("times of access of %d objects stay: %s", len(accessed), error)
