"""File handles: small numbers for open objects.

Contract: a number is a slot of the session file, in which the next daemon finds the open objects.
The number is free again only after the reply to its RELEASE, because a repeated RELEASE must not
meet another object. After a takeover, the repeated OPEN or CREATE claims its handle of the previous
daemon.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvfs import failpoints
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import TooManyOpenError
from kvfs.fuse.passthrough import Slot, SlotState


class Handle(NamedTuple):
    """An open object, and whether it is open for writing."""

    held: OpenObject
    writable: bool


class Table(Protocol):
    """The session file, which has the slots."""

    def bind(self, slot: Slot, *, noflush: bool) -> None: ...
    def set_state(self, handle: int, state: SlotState, /) -> None: ...


class Handles:
    """The open handles of a mount. Raises TooManyOpenError beyond `slots` handles."""

    def __init__(self, slots: int, table: Table) -> None:
        self._slots = slots
        self._table = table
        self._taken: dict[int, Handle] = {}
        self._free: list[int] = []
        self._next = 1  # not 0: some tools print that for "none"
        self._claims: dict[int, int] = {}  # request -> handle, of the previous daemon
        self._unanswered: set[int] = set()
        self._ended: list[int] = []
        self._releasing: set[int] = set()
        # Takes an object with this handle out of the fast opens: core/ledger/fast_opens.py.
        self.take_fast: Callable[[int], None] = lambda _: None

    def __len__(self) -> int:
        """The number of handles. One that is being released counts: its object is still open."""
        return len(self._taken) + len(self._releasing)

    def add(self, held: OpenObject, *, writable: bool, request: int) -> int:
        handle = self.lend()
        self._taken[handle] = Handle(held, writable)
        slot = Slot(
            handle,
            held.inode.ino,
            request,
            held.backing_id,
            SlotState.BOUND,
            writable,
            held.tier.number,
            held.direct,
        )
        self._table.bind(slot, noflush=not writable)
        if failpoints.active:
            failpoints.reach("fuse.handle.bound")
        return handle

    def lend(self) -> int:
        """A free number. Fast opens use it until `take_back`. Raises TooManyOpenError."""
        if self._free:
            return heapq.heappop(self._free)
        if self._next == self._slots:
            raise TooManyOpenError(f"all {self._slots - 1} file handles are in use")
        self._next += 1
        return self._next - 1

    def take_back(self, handle: int, held: OpenObject) -> None:
        """Serve a handle of a fast open from now on."""
        self._taken[handle] = Handle(held, writable=False)

    def held(self, handle: int) -> OpenObject | None:
        found = self._taken.get(handle)
        return None if found is None else found.held

    def __getitem__(self, handle: int) -> Handle:
        if handle not in self._taken:
            self.take_fast(handle)
        return self._taken[handle]

    def taken(self) -> dict[int, Handle]:
        """Return the handles that are open, by number."""
        return dict(self._taken)

    def begin_release(self, handle: int) -> Handle | None:
        """Begin a RELEASE. None: no such handle; that is right only for a repeated RELEASE."""
        found = self._taken.pop(handle, None)
        if found is not None:
            self._releasing.add(handle)
            self._table.set_state(handle, SlotState.RELEASING)
            if failpoints.active:
                failpoints.reach("fuse.handle.releasing")
        return found

    def end_release(self, handle: int) -> None:
        """End a RELEASE. This is the last step before the reply: no await may come between."""
        self._releasing.remove(handle)
        self._table.set_state(handle, SlotState.FREE)
        heapq.heappush(self._free, handle)
        if failpoints.active:
            failpoints.reach("fuse.handle.released")

    # Takeover

    def adopt(
        self, slots: list[Slot], end: int, held: Callable[[int], OpenObject | None]
    ) -> list[Handle]:
        """Take over the previous daemon's handles; return those whose release is unfinished.

        Their numbers, and all free ones below `end`, are given out only after `end_claims`. Until
        then the RELEASE of any of them may come again, because its reply was perhaps not sent.
        """
        ending = []
        self._next = max(self._next, end)
        for slot in slots:
            found = held(slot.handle)
            if found is None or slot.state == SlotState.RELEASING:
                self._ended.append(slot.handle)
                if found is not None:
                    ending.append(Handle(found, slot.writable))
                continue
            self._taken[slot.handle] = Handle(found, slot.writable)
            if slot.state != SlotState.OPEN:
                self._claims[slot.request] = slot.handle
            if slot.state == SlotState.BOUND:
                self._unanswered.add(slot.handle)
        return ending

    def claim(self, request: int) -> int | None:
        """The handle that the previous daemon gave to this very request."""
        handle = self._claims.pop(request, None)
        if handle is not None:
            self._unanswered.discard(handle)
        return handle

    def end_claims(self) -> list[int]:
        """End the takeover's claims; return the handles whose programs never learned of them."""
        for handle in self._ended:
            self._table.set_state(handle, SlotState.FREE)
        self._ended.clear()
        self._claims.clear()
        used = self._taken.keys() | self._releasing
        self._free = [handle for handle in range(1, self._next) if handle not in used]
        orphans, self._unanswered = sorted(self._unanswered), set()
        return orphans
