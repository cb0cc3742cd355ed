"""A limit on a rate, charged for whole objects.

Contract: a request passes when no debt is left, and is charged its whole cost then. So one object
may be larger than any burst: under 10 MiB/s, 64 MiB pass at once, and the next request waits 6.4 s.
Requests pass in the order of arrival. A cancelled request loses only its place. For one trio run.
Not for sharing between competitors: `kvfs.fairness.fair_queue`.

A waiting task wakes late, by 1 ms on a busy machine; 8 MiB take as long at 8 GB/s. The burst
compensates for that: without any, a limit of 755 MB/s gave 690.

The state is the time at which the debt is paid, not a level of tokens. This is the virtual
scheduling form of the generic cell rate algorithm (ITU-T I.371, annex A). There is nothing to
refill, and no rounding decides whether one more wait is needed.
"""

import math

import trio

LATE = 0.05  # s of burst, where it only compensates for late waking


class TokenBucket:
    """`rate` a second, 0 for no limit; an idle time saves up at most `burst` s of it.

    The rate is of the charged unit: bytes, or operations. Raises ValueError for a negative one.
    """

    def __init__(self, rate: float, burst: float = 0.0) -> None:
        _check(rate=rate, burst=burst)
        self._rate = float(rate)
        self._burst = float(burst)
        self._paid_at = -math.inf  # on trio's clock
        self._turn = trio.Lock()  # passes from waiter to waiter in the order of arrival
        self._changed = trio.Event()

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        """Change the rate. The debt stays, and waiting requests go on at the new rate.

        With 0 all requests pass, and the debt is forgotten.
        """
        _check(rate=rate)
        if rate == self._rate:
            return
        if self._rate:
            now = trio.current_time()
            debt = (self._paid_at - now) * self._rate  # below 0: saved up
            self._paid_at = now + debt / rate if rate else -math.inf
        self._rate = float(rate)
        self._changed.set()
        self._changed = trio.Event()

    def try_acquire(self, cost: float) -> bool:
        """Pass now and be charged, or return False: then call `acquire`, which waits.

        Without a limit this is all there is to do, at almost no cost.
        """
        if not self._rate:
            return True
        if self._paid_at > trio.current_time() or self._turn.locked():
            return False
        self.charge(cost)
        return True

    async def acquire(self, cost: float) -> None:
        """Wait until all debt is paid and all earlier requests have passed; then be charged."""
        async with self._turn:
            while self._rate and self._paid_at > trio.current_time():
                with trio.move_on_at(self._paid_at):
                    await self._changed.wait()
            self.charge(cost)

    async def wait(self) -> None:
        """Wait as `acquire` does, before a cost that is known and charged later.

        Uncharged requests do not delay others: writers may begin together, and pay afterwards.
        """
        await self.acquire(0.0)

    def charge(self, cost: float) -> None:
        """Charge at once, without waiting: for a cost that cannot be put off, as of a close."""
        if self._rate:
            saved_up = trio.current_time() - self._burst
            self._paid_at = max(self._paid_at, saved_up) + cost / self._rate


def _check(**values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} {value}: expected 0 or more")
