"""Decide whether an object that leaves RAM is worth a write to NVMe, to limit wear of the flash.

Contract: `decide` answers for one object and counts the answer. Every refusal is counted, because
an invisible admission filter is worse than none. Without a budget nothing is refused. With a
budget, of bytes in a day of UTC:

- Never more than the budget is admitted, except for objects that must not be lost.
- An object that was used again is admitted: touched since it was stored, or stored anew after a
  refusal. A ghost cache remembers the keys that were refused last.
- An object without later use is admitted while the day's writes are at most an hour ahead of a
  steady pace.

So under a tight budget, objects that are written once and never read are refused; under a loose one
none. Pure; the clock is passed in. Not for making room on NVMe: that is eviction's.
"""

from collections import Counter, OrderedDict
from typing import Literal

DAY = 86400  # s
BURST = 3600  # s that writes may be ahead of the steady pace
GHOSTS = 1 << 16  # keys, about 100 bytes each beside the key itself

AdmissionResult = Literal["admitted", "obliged", "refused_budget", "refused_adaptive"]


class Admission:
    """`budget` in bytes a day, 0 for none; it may change at any time.

    A daemon that starts again on the same day passes the result of `spent`; else the count starts
    at 0.
    """

    def __init__(self, budget: int, *, spent: tuple[int, int] = (0, 0)) -> None:
        self.budget = budget
        self.counters: Counter[AdmissionResult] = Counter()
        self._day, self._used = spent
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    @property
    def spent(self) -> tuple[int, int]:
        """The day, counted from 1970, and the bytes admitted on it."""
        return self._day, self._used

    def decide(
        self, key: int, size: int, now: float, *, touched: bool, obliged: bool = False
    ) -> bool:
        """Return whether to write these `size` bytes; if so, they are charged.

        - `key`: stays the same when the object is stored anew, so a hash of its name, not its
          inode.
        - `now`: Unix time.
        - `touched`: opened since it was stored.
        - `obliged`: it must not be lost, as in a namespace that is pinned or never evicts.
        """
        answer = self._answer(key, size, now, touched=touched, obliged=obliged)
        self.counters[answer] += 1
        if answer in {"admitted", "obliged"}:
            self._used += size
            self._ghosts.pop(key, None)
            return True
        self._ghosts[key] = None
        self._ghosts.move_to_end(key)
        if len(self._ghosts) > GHOSTS:
            self._ghosts.popitem(last=False)
        return False

    def _answer(
        self, key: int, size: int, now: float, *, touched: bool, obliged: bool
    ) -> AdmissionResult:
        day, elapsed = divmod(now, DAY)
        if day > self._day:  # a clock that is set back begins no new day
            self._day, self._used = int(day), 0
        if obliged:
            return "obliged"
        if not self.budget:
            return "admitted"
        if self._used + size > self.budget:
            return "refused_budget"
        pace = (elapsed + BURST) / DAY * self.budget
        if touched or key in self._ghosts or self._used <= pace:
            return "admitted"
        return "refused_adaptive"
