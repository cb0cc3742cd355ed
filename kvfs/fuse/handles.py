"""File handles: small numbers for open objects.

Contract: a number is a slot of the session file, in which the next daemon finds what is open. It
is given out again only after the reply to its RELEASE: a RELEASE that comes again must not meet
another object. What was found at a takeover is claimed by the OPEN or CREATE that comes again.
"""

import heapq
from collections.abc import Callable
from typing import NamedTuple, Protocol

from kvfs import failpoints
from kvfs.core.ledger.open_table import OpenObject
from kvfs.errors import TooManyOpenError
from kvfs.fuse.passthrough import Slot, State


class Handle(NamedTuple):
    """An open object, and in which way it was opened."""

    held: OpenObject
    writable: bool


class Table(Protocol):
    """Where slots are written down."""

    def bind(self, slot: Slot, *, noflush: bool) -> None: ...
    def set_state(self, handle: int, state: State, /) -> None: ...


class Handles:
    """Raises TooManyOpenError beyond `slots` handles."""

    def __init__(self, slots: int, table: Table) -> None:
        self._slots = slots
        self._table = table
        self._taken: dict[int, Handle] = {}
        self._free: list[int] = []
        self._next = 1  # 0 is what some tools print for "none"
        self._claims: dict[int, int] = {}  # request -> handle, of the predecessor
        self._unanswered: set[int] = set()
        self._ended: list[int] = []
        self._releasing: set[int] = set()

    def __len__(self) -> int:
        """Those that are being released are among them: their object is open until that is over."""
        return len(self._taken) + len(self._releasing)

    def add(self, held: OpenObject, *, writable: bool, request: int) -> int:
        if self._free:
            handle = heapq.heappop(self._free)
        elif self._next < self._slots:
            handle, self._next = self._next, self._next + 1
        else:
            raise TooManyOpenError(f"all {self._slots - 1} file handles are in use")
        self._taken[handle] = Handle(held, writable)
        slot = Slot(
            handle,
            held.inode.ino,
            request,
            held.backing_id,
            State.BOUND,
            writable,
            held.tier.number,
            held.direct,
        )
        self._table.bind(slot, noflush=not writable)
        if failpoints.active:
            failpoints.reach("fuse.handle.bound")
        return handle

    def __getitem__(self, handle: int) -> Handle:
        return self._taken[handle]

    def begin_release(self, handle: int) -> Handle | None:
        """None if there is no such handle, which is right only for a RELEASE that comes again."""
        found = self._taken.pop(handle, None)
        if found is not None:
            self._releasing.add(handle)
            self._table.set_state(handle, State.RELEASING)
            if failpoints.active:
                failpoints.reach("fuse.handle.releasing")
        return found

    def end_release(self, handle: int) -> None:
        """The last thing before the reply: no await may come between."""
        self._releasing.remove(handle)
        self._table.set_state(handle, State.FREE)
        heapq.heappush(self._free, handle)
        if failpoints.active:
            failpoints.reach("fuse.handle.released")

    # Takeover

    def adopt(
        self, slots: list[Slot], end: int, held: Callable[[int], OpenObject | None]
    ) -> list[Handle]:
        """Take over the predecessor's handles; return those whose release is to be finished.

        Their numbers, and all below `end` that are free, are given out once `end_claims` was
        called: the RELEASE of any of them may come again, its reply was perhaps not sent.
        """
        ending = []
        self._next = max(self._next, end)
        for slot in slots:
            found = held(slot.handle)
            if found is None or slot.state == State.RELEASING:
                self._ended.append(slot.handle)
                if found is not None:
                    ending.append(Handle(found, slot.writable))
                continue
            self._taken[slot.handle] = Handle(found, slot.writable)
            if slot.state != State.OPEN:
                self._claims[slot.request] = slot.handle
            if slot.state == State.BOUND:
                self._unanswered.add(slot.handle)
        return ending

    def claim(self, request: int) -> int | None:
        """The handle that the predecessor gave to this very request."""
        handle = self._claims.pop(request, None)
        if handle is not None:
            self._unanswered.discard(handle)
        return handle

    def end_claims(self) -> list[int]:
        """All that comes again has come: return the handles that nobody was told of."""
        for handle in self._ended:
            self._table.set_state(handle, State.FREE)
        self._ended.clear()
        self._claims.clear()
        used = self._taken.keys() | self._releasing
        self._free = [handle for handle in range(1, self._next) if handle not in used]
        orphans, self._unanswered = sorted(self._unanswered), set()
        return orphans
