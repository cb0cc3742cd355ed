"""The order of fetches from a bucket or from nodes: those of waiting opens begin before others.

Contract: at most `slots` fetches are under way, with `most` bytes together. A larger fetch counts
as `most` bytes. Fetches ahead are those for which no open waits. None of them begins while a fetch
of an open waits for its turn. They have at most half of the bytes and of the slots, so that opens
always have the other half. Fetches of opens begin in the order of `ask`, and so do fetches ahead.
`hurry` makes a fetch ahead urgent: it then counts as the fetch of an open, even if it is under way.
Synchronous. Not for the fetch itself.
"""

from collections import deque
from dataclasses import dataclass, field

import trio

AHEAD = 2  # fetches ahead have at most 1/AHEAD of the bytes and slots


@dataclass(eq=False, slots=True)
class FetchTurn:
    """The turn of one fetch of `cost` bytes; `urgent` if an open waits for it."""

    cost: int
    urgent: bool
    come: trio.Event = field(default_factory=trio.Event)
    counted: int = 0  # the bytes that it takes of the budget, after `come`


class Budget:
    """Bounds the fetches under way.

    `bytes`, `count`: of all fetches under way. `ahead_bytes`, `ahead_count`: of those ahead.
    """

    def __init__(self, most: int, slots: int) -> None:
        self.most = most
        self.slots = slots
        self.bytes = self.count = 0
        self.ahead_bytes = self.ahead_count = 0
        self._opens: deque[FetchTurn] = deque()
        self._ahead: deque[FetchTurn] = deque()

    @property
    def waiting(self) -> int:
        return len(self._opens) + len(self._ahead)

    def ask(self, turn: FetchTurn) -> None:
        """Ask for a turn; `turn.come` is set when it begins. The caller must call `leave` later."""
        self._queue(turn).append(turn)
        self._admit()

    def leave(self, turn: FetchTurn) -> None:
        """End a turn: the fetch is over, or is not needed any more."""
        if turn.come.is_set():
            self.bytes -= turn.counted
            self.count -= 1
            if not turn.urgent:
                self._uncount_ahead(turn)
        else:
            self._queue(turn).remove(turn)
        self._admit()

    def hurry(self, turn: FetchTurn) -> None:
        """Make a turn urgent: from now on an open waits for its fetch."""
        if turn.urgent:
            return
        if turn.come.is_set():
            self._uncount_ahead(turn)
        else:
            self._ahead.remove(turn)
            self._opens.append(turn)
        turn.urgent = True
        self._admit()

    def _uncount_ahead(self, turn: FetchTurn) -> None:
        self.ahead_bytes -= turn.counted
        self.ahead_count -= 1

    def _queue(self, turn: FetchTurn) -> deque[FetchTurn]:
        return self._opens if turn.urgent else self._ahead

    def _admit(self) -> None:
        while self._opens and self._fits(self._opens[0]):
            self._begin(self._opens.popleft())
        while not self._opens and self._ahead and self._fits(self._ahead[0]):
            self._begin(self._ahead.popleft())

    def _counts(self, turn: FetchTurn) -> int:
        return min(turn.cost, self.most if turn.urgent else self.most // AHEAD)

    def _fits(self, turn: FetchTurn) -> bool:
        size = self._counts(turn)
        if self.count >= self.slots or self.bytes + size > self.most:
            return False
        return turn.urgent or (
            self.ahead_count < max(1, self.slots // AHEAD)
            and self.ahead_bytes + size <= self.most // AHEAD
        )

    def _begin(self, turn: FetchTurn) -> None:
        turn.counted = self._counts(turn)
        self.bytes += turn.counted
        self.count += 1
        if not turn.urgent:
            self.ahead_bytes += turn.counted
            self.ahead_count += 1
        turn.come.set()
