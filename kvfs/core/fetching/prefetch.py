"""Prefetch: brings the next blocks of a prefix from afar before programs open them.

Contract: the caller calls `opened` for every open for reading, before the open waits for bytes. If
a program opens two blocks one after the other in a known order, a run begins. kvfs fetches the next
blocks ahead: AT_FIRST blocks, then up to AT_MOST as long as the run goes on. All files of a block
belong together. kvfs skips a block that is useless when its turn comes: the block is gone or here,
or its run has ended or continued with other blocks. If no program opens a fetched block within
UNUSED seconds, the block counts as wasted. Unopened blocks and blocks on their way have at most an
eighth of each tier together.

Two orders are known. If kvfs knows or guesses which block follows which in a prompt, it takes that
order, and the newest of several successors. Otherwise it takes the order in which the blocks were
made, within a model (without one, a directory). Connectors store the blocks of a prompt one after
the other, and a reader asks for them in the same order. The conversation trace of Mooncake has
89,022 steps: the newest successor is right in 99.98 %, the order of making in 94.6 %. The synthetic
trace has 74,423: both are right in 99.8 % (scripts/bench/successors.py). A third order would be
that of the last read. It is right as often, but has a successor for only 53 % and 77 % of the
steps. So kvfs does not use it. Not for fetching (`hydration`, `core/pool/fetch`), nor for the order
of fetches (`budget`).
"""

import logging
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import trio

from kvfs.catalog import Inode
from kvfs.core.fetching.fetch import PrefetchRequest
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.namespaces.order import key_of
from kvfs.errors import CatalogError
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

# An open takes about as long as four fetches side by side. A reader with several threads asks for
# twice that at once. Beyond 16 a wrong guess costs more time than a right one saves.
AT_FIRST, AT_MOST = 4, 16  # blocks
SLACK = 8  # blocks that a reader with several threads may be behind in the order
NEAR = 128  # inodes that are read to find what was made next, about 0.5 ms
CLOSE = 512  # inode numbers, some of them of names and directories
RUNS = 32  # prefixes that are followed at a time
IDLE = 10.0  # s after its last block that a run is followed; an engine reads a prefix in one go
UNUSED = 60.0  # s; a reader on its way to the block would have opened it by then
SHARE = 8  # unopened blocks may take 1/SHARE of a tier
QUEUE_MOST = 256  # fetches that wait for their turn; more would come too late

Id = tuple[int, int]  # of a block: namespace and key


class AheadFetcher(Protocol):
    """Brings objects from a bucket, or from other nodes."""

    @property
    def counters(self) -> Counter[str]:
        """Those of the place, among them `prefetched`, `prefetch_used` and `prefetch_wasted`."""

    @property
    def waiting(self) -> int:
        """The fetches that wait for their turn."""

    def brings(self, inode: Inode) -> bool:
        """Whether its place has an object, and it is not here."""

    def ahead(self, inode: Inode, request: PrefetchRequest) -> bool:
        """Begin to fetch an object. False if a fetch is under way or impossible."""


@dataclass(eq=False, slots=True)
class _Run:
    """A run: the block that was opened last, and the blocks that are expected after it."""

    last: Inode
    moved: float  # the time of the last step
    blocks: int = 1
    ahead: int = 0  # blocks that are to be on their way
    expected: dict[Id, int] = field(default_factory=dict)  # unopened blocks: numbers
    tail: Inode | None = None  # the last file of the last expected block
    given: int = 0  # the last number that an expected block has got
    reached: int = 0  # the greatest number of a block that was opened


@dataclass(slots=True)
class _Taken:
    """The room of an unopened object that was fetched ahead, or is on its way."""

    tier: Tier
    cost: int
    since: float
    counters: Counter[str]


class Prefetch:
    """Follows runs of opens. It is the `PrefetchRequest` of its fetches."""

    def __init__(self, ledger: Ledger, fetchers: Sequence[AheadFetcher]) -> None:
        self.ledger = ledger
        self.catalog = ledger.catalog
        self._fetchers = fetchers
        self._runs: list[_Run] = []  # the one that moved last is at the end
        self._expecting: dict[Id, _Run] = {}
        self._early: OrderedDict[int, None] = OrderedDict()  # inodes noted by `opening`
        self._unused: OrderedDict[int, _Taken] = OrderedDict()
        self._coming: set[int] = set()  # the inodes of `_unused` that are on their way

    # Opens

    def opening(self, inode: Inode) -> None:
        """Note an open before it waits for its fetch. Its later call of `opened` counts no more."""
        self.opened(inode)
        self._early[inode.ino] = None
        if len(self._early) > QUEUE_MOST:
            self._early.popitem(last=False)

    def opened(self, inode: Inode) -> None:
        """Note an open for reading, and fetch ahead if it continues a run."""
        if inode.ino in self._early:
            del self._early[inode.ino]
            return
        if inode.ino in self._unused and inode.ino not in self._coming:
            self.expire()
            if (taken := self._unused.pop(inode.ino, None)) is not None:
                taken.counters["prefetch_used"] += 1
        accounts = self.ledger.accounts
        if not accounts.spilled and not accounts.remote and not self._runs:
            return
        if not self.ledger.namespaces.of(inode).settings.prefetch:
            return
        try:
            self._see(inode)
        except CatalogError as error:  # the next use of the catalog reports it
            what = self.ledger.catalog.named(inode.ino)
            log.debug("after %s nothing is fetched ahead: %s", what, error)

    def _see(self, inode: Inode) -> None:
        self._end_idle()
        run = self._expecting.get(_id(inode)) or self._followed(inode)
        if run is None:
            self._runs.append(_Run(inode.copy(), trio.current_time()))
            if len(self._runs) > RUNS:
                self._end(self._runs[0])
        elif _id(inode) != _id(run.last):
            self._step(run, inode)

    def _followed(self, inode: Inode) -> _Run | None:
        """The run of an inode that no run expects: a file of its last block, or another branch."""
        for run in reversed(self._runs):
            last = run.last
            if last.namespace != inode.namespace:
                continue
            if key_of(inode) == key_of(last):
                return run if inode.ino != last.ino else None
            if inode.parent_key == key_of(last):
                return run  # another branch of the same prompt, or nothing was expected
            if _made_after(inode, last) and _id(inode) in map(_id, self._made_next(last, AT_FIRST)):
                return run
        return None

    def _step(self, run: _Run, inode: Inode) -> None:
        """Continue a run with the block that a program opens now."""
        run.blocks += 1
        run.moved = trio.current_time()
        self._runs.remove(run)
        self._runs.append(run)
        number = self._forget(run, _id(inode))
        if 0 < number < run.reached:
            return  # a slower thread opened it
        if not number:  # the first step, or another branch
            self._expect_nothing(run)
        run.reached = max(run.reached, number)
        run.last = inode.copy()
        for late in [one for one, at in run.expected.items() if at < run.reached - SLACK]:
            self._forget(run, late)
        pending = run.given - run.reached
        if pending <= run.ahead // 2:
            run.ahead = min(AT_MOST, max(AT_FIRST, 2 * run.ahead))
            self._expect_more(run, run.ahead - pending)

    # Expected blocks

    def _expect_more(self, run: _Run, blocks: int) -> None:
        for files in self._next(run.tail or run.last, blocks):
            run.tail = files[-1]
            block = _id(files[0])
            if block in self._expecting:
                continue
            run.given += 1
            run.expected[block] = run.given
            self._expecting[block] = run
            for inode in files:
                fetcher = self._fetcher(inode)
                if fetcher is not None and fetcher.waiting < QUEUE_MOST:
                    fetcher.ahead(inode, self)

    def _fetcher(self, inode: Inode) -> AheadFetcher | None:
        """The fetcher of an object that is not here."""
        return next((one for one in self._fetchers if one.brings(inode)), None)

    def _next(self, inode: Inode, blocks: int) -> list[list[Inode]]:
        """The files of the next blocks, a list for each block."""
        found: list[list[Inode]] = []
        while len(found) < blocks:
            files = self._after(inode)
            if not files:
                made = self._made_next(inode, blocks - len(found))
                return found + _by_block(made)
            found.append(files)
            inode = files[-1]
        return found

    def _after(self, inode: Inode) -> list[Inode]:
        """Absent files of the block after this one in its prompt, the newest of several."""
        inos = self.ledger.accounts.followers.after(inode.namespace, key_of(inode))
        current = filter(None, map(self.ledger.table.inode, inos[-NEAR:]))
        files = [one for one in current if one.parent_key == key_of(inode) and self._fetcher(one)]
        if not files:
            return []
        newest = max(files, key=lambda one: one.ino)
        return [one for one in files if _id(one) == _id(newest)]

    def _made_next(self, inode: Inode, blocks: int) -> list[Inode]:
        """The files of the blocks made after this one, until one is of another prompt."""
        found: list[Inode] = []
        seen = {_id(inode)}
        before = inode
        for one in self.catalog.inodes_after(inode.ino, NEAR):
            if not one.is_file or not one.sealed or not one.links or not _alike(one, inode):
                continue
            if _id(one) not in seen:
                if one.parent_key not in {0, key_of(before)}:
                    continue
                if len(seen) > blocks:
                    break
                seen.add(_id(one))
                before = one
            if _id(one) != _id(inode):
                found.append(one)
        return found

    # Ends of runs

    def _forget(self, run: _Run, block: Id) -> int:
        """Forget an expected block. Returns its number; 0 if it was not expected."""
        number = run.expected.pop(block, 0)
        if number:
            del self._expecting[block]
        return number

    def _expect_nothing(self, run: _Run) -> None:
        """Give up the expected blocks. The next step finds blocks anew after the last one.

        Fetches of them that have not begun are given up.
        """
        for block in list(run.expected):
            self._forget(run, block)
        run.ahead, run.tail, run.reached = 0, None, run.given

    def _end(self, run: _Run) -> None:
        self._expect_nothing(run)
        self._runs.remove(run)

    def _end_idle(self) -> None:
        while self._runs and self._runs[0].moved < trio.current_time() - IDLE:
            self._end(self._runs[0])

    def end(self) -> None:
        """End all runs, and expect nothing more."""
        for run in list(self._runs):
            self._end(run)

    def expire(self) -> None:
        """Count the objects that no program has opened in time as wasted."""
        since = trio.current_time() - UNUSED
        for ino, taken in list(self._unused.items()):
            if taken.since >= since:
                break
            if ino not in self._coming:
                del self._unused[ino]
                taken.counters["prefetch_wasted"] += 1

    # The `PrefetchRequest`

    def wanted(self, inode: Inode) -> bool:
        self._end_idle()
        return _id(inode) in self._expecting

    def admit(self, inode: Inode, tier: Tier, cost: int) -> bool:
        self.expire()
        taken = sum(one.cost for one in self._unused.values() if one.tier is tier)
        if taken + cost > tier.capacity // SHARE:
            return False
        fetcher = self._fetcher(inode)
        if fetcher is None:
            return False
        self._unused.pop(inode.ino, None)
        self._unused[inode.ino] = _Taken(tier, cost, trio.current_time(), fetcher.counters)
        self._coming.add(inode.ino)
        return True

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:
        if inode.ino not in self._coming:
            return  # the fetch did not begin, or an open took it over before
        self._coming.remove(inode.ino)
        taken = self._unused[inode.ino]
        if problem is None:
            taken.counters["prefetched"] += 1
            taken.counters["prefetch_used"] += joined
        if joined or problem is not None:
            del self._unused[inode.ino]


def _id(inode: Inode) -> Id:
    return inode.namespace, key_of(inode)


def _alike(one: Inode, other: Inode) -> bool:
    """Whether two files may be blocks of one prompt."""
    if (one.namespace, one.model) != (other.namespace, other.model):
        return False
    return bool(one.model) or (one.links[0][0] == other.links[0][0] if other.links else False)


def _made_after(inode: Inode, last: Inode) -> bool:
    return 0 < inode.ino - last.ino <= CLOSE and inode.parent_key in {0, key_of(last)}


def _by_block(files: list[Inode]) -> list[list[Inode]]:
    """The files grouped by block, in the order of the first file of each."""
    found: dict[Id, list[Inode]] = {}
    for one in files:
        found.setdefault(_id(one), []).append(one)
    return list(found.values())
