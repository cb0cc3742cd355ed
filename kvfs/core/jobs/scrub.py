"""The scrubber: it reads every sealed copy that has a digest, once a period, to find silent rot.

Contract: a pass goes through the catalog by inode number and spreads its reads over `period`
seconds. A mover reads the bytes; the loop never does. `TierTransfers.still_current` says afterwards
whether a copy still counts, and `TierTransfers.lose_rotten` gets each wrong one. A pass pauses
while a local tier is not healthy. A pass continues after a restart: facts of the catalog have its
position. These facts are written along with other changes, and get a commit of their own every
NOTE_PERIOD.

Processor time is bounded: SHARE of a core for a period of a week or more. A shorter period gets a
share that is larger by the same factor, SHARE_MOST at most. A pass that has too much to read for
its share takes longer than its period.
Not for the bucket: objects are verified when they come, and reading them costs money. Not for
copies without a digest, nor for damage that an open finds (`core/objects/copies.py`).
"""

import errno
import json
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

import trio

from kvfs.catalog import Inode, Named, PackedCopy
from kvfs.core.moves.transfers import TierTransfers
from kvfs.errors import CatalogError, TierError
from kvfs.movement import verifying
from kvfs.movement.movers import MoverPool, patience_for
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

WEEK = 7 * 86400
SHARE = 0.01  # of a core, for a pass of a week or longer
SHARE_MOST = 0.5
RATE = 256 << 20  # bytes/s at most, within a batch too: a tenth of what an NVMe disk reads
# One job: 0.3 s of reading. It costs the loop a few ms, so small copies share one.
BATCH_BYTES = 64 << 20
BATCH_COPIES = 256
STEP = 32  # inodes, or copies, between two turns of the loop
STEPS = 32  # steps in one job at most
BREATH = 600.0  # s at most that a daemon serves before it scrubs: engines begin with it
NOTE_PERIOD = 300.0  # s that a daemon which dies may have to do again
GLANCE = 1.0  # s between two looks whether a tier is well again
PATIENCE = 3600.0  # s without a look at the time of day, which may be set
RETRY = 300.0  # s after the catalog failed

PASS, LAST = "scrub_pass", "scrub_last"  # facts of the catalog


@dataclass
class Pass:
    """One pass; times are seconds since the epoch, bytes are as the tiers account them."""

    began: float
    at: int  # inode numbers up to this one are done
    end: int  # inode numbers from this one on are left to the next pass
    total: int  # bytes that the tiers had at its begin
    passed: int = 0  # bytes that the pass is past, verified or not
    bytes: int = 0  # of the copies that were verified
    objects: int = 0  # those copies
    rotten: int = 0
    unread: int = 0
    without_digest: int = 0
    ended: float = 0.0  # 0: it is under way

    @property
    def progress(self) -> float:
        return 1.0 if self.ended or not self.total else min(1.0, self.passed / self.total)

    @classmethod
    def from_fact(cls, text: str | None) -> "Pass | None":
        """Read a pass from a fact; None without a fact, and for one that makes no sense."""
        times = {"began", "ended"}
        try:
            found = json.loads(text or "null")
            read = {
                item.name: (float if item.name in times else int)(found[item.name])
                for item in fields(cls)
            }
        except (ValueError, TypeError, KeyError, OverflowError):
            return None
        return cls(**read) if all(map(math.isfinite, read.values())) else None  # type: ignore[arg-type]


class _Copy(NamedTuple):
    """A copy that a mover reads, as the catalog had it before the read."""

    ino: int
    version: int
    tier: Tier
    cost: int
    packed: PackedCopy | None

    @property
    def path(self) -> str:
        return self.tier.path(self.ino, self.version)


def pause(cost: int, cpu: float, *, period: float, left: float, passed: int, total: int) -> float:
    """Return the seconds from the begin of a batch to the begin of the next one.

    cost, cpu: bytes and processor seconds of the batch. left: seconds until the period is over.
    passed: bytes that the pass is past, with the batch.
    """
    even = period * cost / max(total, passed, 1)
    to_catch_up = left * cost / max(total - passed + cost, cost, 1)
    share = min(SHARE_MOST, max(SHARE, SHARE * WEEK / period))
    return max(min(even, to_catch_up), cpu / share)


class Scrub:
    """Scrubs the copies of a mount. Run `run()` as long as the mount lives.

    period: seconds of a pass, 0 for none. on_event: takes events. clock: the time of day.
    """

    def __init__(
        self,
        transfers: TierTransfers,
        movers: MoverPool,
        period: int,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.ledger = transfers.ledger
        self.transfers = transfers
        self.movers = movers
        self.on_event: Callable[..., None] = lambda *_, **__: None
        self.counters = {tier.name: Counter[str]() for tier in self.ledger.tiers.local}
        self.cpu_seconds = 0.0
        self._period = period
        self._clock = clock
        self._limiter = trio.CapacityLimiter(1)  # of its own: no caller waits for its reads
        self._changed = trio.Event()
        self._scope = trio.CancelScope()
        self._pass: Pass | None = None
        self._last: Pass | None = None
        self._started = 0.0  # this and the next are of trio's clock
        self._not_before = 0.0
        # The last batch: its begin, by trio's clock and by the day's; bytes, processor seconds.
        self._batch = (0.0, 0.0, 0, 0.0)
        self._batch_cpu = 0.0
        self._noted = 0.0
        self._recalled = False
        self._why = ""

    @property
    def period(self) -> int:
        return self._period

    @period.setter
    def period(self, seconds: int) -> None:
        """Set the period, from now on."""
        if seconds != self._period:
            self._period = seconds
            self._changed.set()

    def stop(self) -> None:
        """Stop for the unmount, and give up the reads under way."""
        self._scope.cancel()

    async def run(self) -> None:
        """Scrub until `stop`. Raises CatalogError; called again it continues."""
        with trio.CancelScope() as self._scope:
            await self.ledger.accounts.census_done.wait()
            self._recall()
            while True:
                wait = self._wait()
                if wait > 0:
                    changed = self._changed = trio.Event()
                    with trio.move_on_after(min(wait, PATIENCE)):
                        await changed.wait()
                elif self._hindrance():
                    await trio.sleep(GLANCE)
                else:
                    await self._next()

    def _recall(self) -> None:
        """Read the notes of the previous daemon."""
        if self._recalled:
            return
        catalog, now = self.ledger.catalog, trio.current_time()
        self._pass = Pass.from_fact(catalog.fact(PASS))
        self._last = Pass.from_fact(catalog.fact(LAST))
        if self._pass is not None and self._pass.ended:
            self._pass = None
        self._started = self._noted = now
        self._recalled = True

    # When

    def _wait(self) -> float:
        """Return the seconds until the next batch is due."""
        if not self._period:
            return math.inf
        now, today = trio.current_time(), self._clock()
        for one in filter(None, (self._pass, self._last)):
            one.began = min(one.began, today)  # or a clock that was set back would hold it up
        breath = max(self._not_before, self._started + min(BREATH, self._period / 100)) - now
        if self._pass is None:
            left = self._last.began + self._period - today if self._last else 0.0
            return max(breath, left)
        began, at, cost, cpu = self._batch
        due = began + pause(
            cost,
            cpu,
            period=self._period,
            left=max(0.0, self._pass.began + self._period - at),
            passed=self._pass.passed,
            total=self._pass.total,
        )
        return max(breath, due - now)

    def _hindrance(self) -> str:
        ill = [tier for tier in self.ledger.tiers.local if tier.health.state != "healthy"]
        self._why = "; ".join(f"{tier.name} tier is {tier.health.state}" for tier in ill)
        return self._why

    # A batch

    async def _next(self) -> None:
        """Verify the next batch of copies. If the catalog fails, wait RETRY before the next."""
        began, at, self._batch_cpu = trio.current_time(), self._clock(), 0.0
        before = 0 if self._pass is None else self._pass.passed
        try:
            current = self._pass or self._begin()
            copies, to, over = await self._collect(current)
            if copies:
                await self._verify(current, copies)
            with self._working():
                current.at = to
                if over:
                    self._end(current)
                self._note(current)
        except (CatalogError, OSError) as error:
            self._not_before = trio.current_time() + RETRY
            self._why = str(error)
            log.error("the scrubber goes on in %.0f s after: %s", RETRY, error)
        finally:
            passed = 0 if self._pass is None else self._pass.passed - before
            self._batch = (began, at, max(0, passed), self._batch_cpu)
            self.cpu_seconds += self._batch_cpu

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Count the loop's own work as processor time. Not across an await."""
        begun = time.thread_time()
        try:
            yield
        finally:
            self._batch_cpu += time.thread_time() - begun

    def _begin(self) -> Pass:
        total = sum(tier.used for tier in self.ledger.tiers.local)
        end = self.ledger.catalog.counter
        self._pass = Pass(began=self._clock(), at=0, end=end, total=total)
        return self._pass

    async def _collect(self, current: Pass) -> tuple[list[tuple[_Copy, verifying.Copy]], int, bool]:
        """Return the copies of the next job, its last inode, and whether that ends the pass."""
        found: list[tuple[_Copy, verifying.Copy]] = []
        at, cost = current.at, 0
        for _ in range(STEPS):
            with self._working():
                inodes = self.ledger.catalog.inodes_after(at, STEP)
                for inode in inodes:
                    if inode.ino >= current.end:
                        return found, at, True
                    at = inode.ino
                    more = self._copies(current, inode)
                    found += more
                    cost += sum(copy.cost for copy, _ in more)
                    if len(found) >= BATCH_COPIES or cost >= BATCH_BYTES:
                        after = self.ledger.catalog.inodes_after(at, 1)
                        return found, at, not after or after[0].ino >= current.end
            if not inodes:
                return found, at, True
            await trio.lowlevel.checkpoint()
        return found, at, False

    def _copies(self, current: Pass, read: Inode) -> list[tuple[_Copy, verifying.Copy]]:
        """Return the copies of an inode, with the contents that each may have."""
        if not read.is_file or not read.sealed or not self.ledger.tiers.holders(read):
            return []
        inode = self.transfers.still_current(read.ino)
        found = []
        for tier in () if inode is None else self.ledger.tiers.holders(inode):
            assert inode is not None
            cost = self.ledger.tiers.cost(inode, tier)
            forms = [(inode.size, inode.digest)] if inode.digest else []
            packed = inode.packed if self.ledger.tiers.is_packed_in(inode, tier) else None
            if packed is not None:
                # If a daemon died before it changed the record, a plain file is in its place.
                forms = [(packed.size, packed.digest), *forms]
            if not forms:
                current.without_digest += 1
                current.passed += cost
                continue
            path = tier.path(inode.ino, inode.version)
            found.append(
                (
                    _Copy(inode.ino, inode.version, tier, cost, packed),
                    verifying.Copy(path, tuple(forms), direct=tier.slow),
                )
            )
        return found

    async def _verify(self, current: Pass, copies: list[tuple[_Copy, verifying.Copy]]) -> None:
        """Let a mover read the copies, and judge each. Raises CatalogError."""
        size = sum(copy.cost for copy, _ in copies)
        batch = verifying.VerifyBatch(tuple(copy for _, copy in copies))
        try:
            found = await self.movers.run(
                *(verifying.verify, batch, float(RATE)),
                limiter=self._limiter,
                patience=patience_for(size),
            )
        except TierError as error:  # the movers died over it, or the disk does not answer
            self.transfers.breaker.failed("scrub", self._named(copies[0][0]), error)
            for copy, _ in copies:
                self._count(current, copy, "unread")
            return
        self._batch_cpu += found.cpu_seconds
        gone: list[_Copy] = []
        judged = list(zip(copies, found.results, strict=True))
        for start in range(0, len(judged), STEP):
            with self._working():
                for (copy, _), result in judged[start : start + STEP]:
                    if isinstance(result, FileNotFoundError) and self._means(copy):
                        gone.append(copy)
                    self._judge(current, copy, result)
            await trio.lowlevel.checkpoint()
        if gone:
            log.warning(
                "the scrubber did not find %d copies, the first is of %s, %s: kvfs fsck tells more",
                *(len(gone), self._named(gone[0]), gone[0].path),
            )

    def _named(self, copy: _Copy) -> Named:
        return self.ledger.catalog.named(copy.ino)

    def _means(self, copy: _Copy) -> Inode | None:
        """Return the object if the copy that was read is still one of its copies, else None."""
        inode = self.transfers.still_current(copy.ino, copy.version)
        if inode is None or copy.tier not in self.ledger.tiers.holders(inode):
            return None
        packed = inode.packed if self.ledger.tiers.is_packed_in(inode, copy.tier) else None
        return inode if packed == copy.packed else None

    def _judge(self, current: Pass, copy: _Copy, result: str | OSError) -> None:
        """Count the result of a read, and report a wrong copy that still counts.

        Raises CatalogError.
        """
        inode = self._means(copy)
        if inode is None:
            current.passed += copy.cost
        elif isinstance(result, OSError):
            self._count(current, copy, "unread")
            if result.errno not in {errno.ENOENT, errno.EAGAIN}:  # EAGAIN: written to, or lent
                copy.tier.failed("scrub", copy.path, result)
        elif result:
            self._count(current, copy, "rotten")
            self.on_event("rotten", tier=copy.tier.name, inode=copy.ino, file=copy.path, why=result)
            self.transfers.lose_rotten(inode, copy.tier)
        else:
            self._count(current, copy, "objects")
            current.bytes += copy.cost
            self.counters[copy.tier.name]["bytes"] += copy.cost

    def _count(self, current: Pass, copy: _Copy, what: str) -> None:
        current.passed += copy.cost
        setattr(current, what, getattr(current, what) + 1)
        self.counters[copy.tier.name][what] += 1

    # The end and the notes of a pass

    def _end(self, current: Pass) -> None:
        current.ended = self._clock()
        self._last, self._pass = current, None
        self.ledger.catalog.carried[LAST] = json.dumps(asdict(current))
        facts = _facts(current)
        if current.objects or current.rotten or current.unread:
            log.info(
                "the scrubber has verified %d copies of %d bytes in %.0f s: %d rotten, %d unread",
                *(current.objects, current.bytes, facts["seconds"]),
                *(current.rotten, current.unread),
            )
        self.on_event("scrub", **facts)

    def _note(self, current: Pass) -> None:
        """Note the position for the next daemon. Raises CatalogError."""
        catalog, now = self.ledger.catalog, trio.current_time()
        catalog.carried[PASS] = json.dumps(asdict(current))
        if now - self._noted >= NOTE_PERIOD:
            self._noted = now
            with catalog.batch():
                pass  # with what it carries

    def describe(self) -> dict[str, Any]:
        """Return the state and progress as plain values."""
        current, last = self._pass, self._last
        names = ("bytes", "objects", "rotten", "unread")
        shown = current or last
        return {
            "period_s": self._period,
            "state": self._state,
            "why": self._why,
            "began": 0.0 if shown is None else round(shown.began, 3),
            "progress": 0.0 if shown is None else round(shown.progress, 4),
            "pass": None if current is None else _facts(current),
            "last": None if last is None else _facts(last),
            "tiers": {
                tier: {name: found[name] for name in names} for tier, found in self.counters.items()
            },
            "cpu_s": round(self.cpu_seconds, 3),
        }

    @property
    def _state(self) -> str:
        if not self._period:
            return "off"
        if self._why:
            return "paused"
        return "waiting" if self._pass is None else "running"


def _facts(one: Pass) -> dict[str, Any]:
    """Return the facts of a pass as plain values."""
    return {
        "began": round(one.began, 3),
        "ended": round(one.ended, 3),
        "seconds": round(max(0.0, one.ended - one.began), 3) if one.ended else 0.0,
        "total_bytes": one.total,
        "passed_bytes": one.passed,
        "bytes": one.bytes,
        "objects": one.objects,
        "rotten": one.rotten,
        "unread": one.unread,
        "without_digest": one.without_digest,
    }
