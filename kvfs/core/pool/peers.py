"""The nodes of the pool: our lease, and the peers that may be read from.

Contract: `run` renews our lease, and calls `lost` when the index has lost its data. An index whose
memory is full takes no new lease, but it keeps the last one of this life. A peer is
*usable* if it has a lease with the incarnation of the entry, serves at an address, and has not
failed lately. Leases are believed for LEASE_SEEN seconds. An owner is *dead* if for DEAD_S seconds
no look found a lease of its node in that life. An address comes from a lease only, so
an entry of the index cannot lead kvfs elsewhere.
"""

import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import trio

from kvfs.core.pool.news import News
from kvfs.pool import addresses
from kvfs.pool.connection import NOT_ASKED
from kvfs.pool.errors import IndexDownError, IndexFullError
from kvfs.pool.index import PATIENCE, Index
from kvfs.pool.records import Lease, Life, Owner, PoolEntry

log = logging.getLogger(__name__)

RENEW_S = 3.0
LEASE_SEEN = 3.0  # s for which a lease is believed
BACK_OFF, BACK_OFF_MOST = 1.0, 30.0  # s without requests after a failure; doubled each time
IDLE = float(64 << 20)  # bytes/s; the loads of nodes with less differ little
REMEMBERED = 4096  # nodes
DEAD_S = 600.0  # s after which owners are taken out of the index
LATELY_S = 600.0  # s for which a failure is shown
WHY_MOST = 200  # characters of a reason


@dataclass(slots=True)
class _Failing:
    """A peer that has given no object since its first failure. Times are trio's."""

    since: float
    at: float = 0.0  # of the last failure
    until: float = 0.0  # no request before
    pause: float = BACK_OFF / 2
    why: str = ""


class Peers:
    """The nodes of one pool. `me`: describes this node, at any time."""

    def __init__(
        self, index: Index, me: Callable[[], Lease], lost: Callable[[], None], news: News
    ) -> None:
        self.index = index
        self.news = news
        self.me = me
        self.lost = lost
        self.epoch = ""  # of the index, as far as is known
        self.why = NOT_ASKED  # why our lease is not renewed; "" if it is
        self.full = ""  # why the index takes no new objects; "" if it does
        self.asked = False  # a try to reach the index has ended, well or not
        self._leases: dict[str, tuple[float, Lease | None]] = {}  # when seen, and what
        self._failures: dict[str, _Failing] = {}
        # Nodes and their incarnations without a lease, and since when a look found none.
        self._without: dict[tuple[str, str], float] = {}
        self._renewed = math.inf  # trio's time of the last renewal of our lease

    async def run(self) -> None:
        """Renew our lease, for ever."""
        while True:
            await self.renew()
            await trio.sleep(RENEW_S if not self.why else RENEW_S / 6)

    async def renew(self) -> None:
        """Renew our lease once, and look whether the index is still the same."""
        try:
            epoch, full = await self._renew()
        except IndexDownError as error:
            self.asked = self.asked or self.index.servers.tried
            if not self.asked:  # the daemon has just begun, and connects
                return
            if self.why in {"", NOT_ASKED}:
                self.news.tell("index down", why=str(error))
                log.warning("the pool's index is down, other nodes' objects are misses: %s", error)
            self.why, self.full = str(error), ""
            return
        self.asked = True
        if self.why and self.epoch:
            self.news.tell("index up")
            log.info("the pool's index answers again")
        if full and not self.full:
            told = self.news.tell_seldom("index full", "index full", why=full)
            level = logging.WARNING if told else logging.DEBUG
            log.log(level, "the pool's index takes no new objects: %s", full)
        self.why, self.full = "", full
        if epoch is None:
            return
        away, self._renewed = trio.current_time() - self._renewed, trio.current_time()
        if epoch == self.epoch and away > DEAD_S / 2:
            self.lost()  # others may have taken this node out
        if epoch != self.epoch:
            if self.epoch:
                self.news.tell("index empty")
                log.info("the pool's index has lost its data: objects are announced again")
            self.epoch = epoch
            self.lost()

    async def _renew(self) -> tuple[str | None, str]:
        """Renew our lease, or keep it in a full index, and return its epoch and why it is full.

        The epoch is None if a full index has no lease of ours. Raises IndexDownError.
        """
        me = self.me()
        try:
            return await self.index.renew(me, secrets.token_hex(8), time.time()), ""
        except IndexFullError as error:
            return await self.index.keep(me), str(error)

    async def leave(self) -> None:
        """End our lease: our entries are no entries any more."""
        try:
            await self.index.leave(self.me().node)
        except IndexDownError as error:
            log.info("our lease in the pool ends by itself: %s", error)

    # Peers

    async def that_serve(self, lives: Collection[Life]) -> set[Life]:
        """Which of these are this node, or a peer that may be asked. Raises IndexDownError."""
        me = self.me()
        others = {one for one in lives if one.node != me.node and not self._is_out(one.node)}
        await self._look({one.node for one in others})
        return {one for one in others if self._serves(one)} | {Life(me.node, me.incarnation)}

    async def leases(self, nodes: Iterable[str]) -> list[Lease]:
        """The leases of those nodes that live, serve and did not fail lately.

        Raises IndexDownError.
        """
        asked = [one for one in nodes if not self._is_out(one)]
        await self._look(asked)
        found = [self._leases[one][1] for one in asked if one in self._leases]
        return [lease for lease in found if lease is not None and lease.address]

    async def usable(
        self, entry: PoolEntry, *, patience: float = PATIENCE
    ) -> list[tuple[Owner, Lease]]:
        """The owners that may be asked for an object, the best first. Raises IndexDownError.

        An owner with a copy in RAM comes before the others, and mostly one with less load.
        patience: seconds for which the index may take to tell their leases.
        """
        mine = self.me().node
        owners = [one for one in entry.owners if one.node != mine and not self._is_out(one.node)]
        await self._look([one.node for one in owners], patience)
        served = ((owner, self._serves(owner)) for owner in owners)
        found = [(owner, lease) for owner, lease in served if lease is not None]
        return sorted(found, key=lambda one: (one[0].tier != "ram", _turn(one[1])))

    def dead(self, entry: PoolEntry) -> list[Owner]:
        """The dead owners of an entry, whose leases have just been looked up."""
        now, found = trio.current_time(), []
        for owner in entry.owners:
            if owner.node not in self._leases or owner.node == self.me().node:
                continue
            life, lease = (owner.node, owner.incarnation), self._leases[owner.node][1]
            if lease is not None and lease.incarnation == owner.incarnation:
                self._without.pop(life, None)
            elif now - self._without.setdefault(life, now) >= DEAD_S:
                found.append(owner)
        while len(self._without) > REMEMBERED:
            del self._without[next(iter(self._without))]
        return found

    def _serves(self, owner: Owner | Life) -> Lease | None:
        """The lease of a node that has been looked up, if it lives on and serves its files."""
        lease = self._lease(owner.node)
        if lease is None or lease.incarnation != owner.incarnation or not lease.address:
            return None
        return lease

    async def alive(self, entry: PoolEntry) -> bool:
        """Whether another node with a lease has the object. Raises IndexDownError.

        One that failed lately has it, too: perhaps this node lacks the network, or it only hangs.
        """
        owners = [one for one in entry.owners if one.node != self.me().node]
        await self._look([owner.node for owner in owners])
        leases = [(owner, self._lease(owner.node)) for owner in owners]
        return any(
            lease is not None and lease.incarnation == owner.incarnation for owner, lease in leases
        )

    def _lease(self, node: str) -> Lease | None:
        """The lease of a node that was looked up. A look for too many others may forget it."""
        return self._leases.get(node, (0.0, None))[1]

    async def _look(self, nodes: Iterable[str], patience: float = PATIENCE) -> None:
        now = trio.current_time()
        old = (float("-inf"), None)
        wanted = [one for one in nodes if now - self._leases.get(one, old)[0] > LEASE_SEEN]
        if not wanted:
            return
        if len(self._leases) + len(wanted) > REMEMBERED:
            self._leases.clear()
        leases = await self.index.leases(wanted, patience=patience)
        for node, lease in zip(wanted, leases, strict=True):
            good = lease if lease is not None and is_address(lease.address) else None
            self._leases[node] = (now, good)

    def _is_out(self, node: str) -> bool:
        failing = self._failures.get(node)
        return failing is not None and trio.current_time() < failing.until

    def failed(self, node: str, why: str) -> None:
        """Note that a peer did not give an object: it is not asked for a while."""
        now, why = trio.current_time(), why[:WHY_MOST]
        first = node not in self._failures
        failing = self._failures.setdefault(node, _Failing(now))
        failing.at, failing.why = now, why
        failing.pause = min(BACK_OFF_MOST, 2 * failing.pause)
        failing.until = now + failing.pause
        if len(self._failures) > REMEMBERED:
            del self._failures[next(iter(self._failures))]
        if first:
            name = self._name(node)
            told = self.news.tell_seldom("node fails", f"peer {node}", nodes=name, why=why)
            level = logging.INFO if told else logging.DEBUG
            log.log(level, "node %s of the pool gives no object: %s", name, why)

    def gave(self, node: str) -> None:
        """Note that a peer gave an object."""
        self._failures.pop(node, None)

    @property
    def out(self) -> Sequence[str]:
        """The peers that failed lately."""
        return [node for node in self._failures if self._is_out(node)]

    @property
    def failing(self) -> list[dict[str, Any]]:
        """The peers that failed lately, and gave no object since then, for people."""
        now = trio.current_time()
        return [
            {
                "node": node,
                "name": self._name(node),
                "since_s": now - one.since,
                "last_s": now - one.at,
                "why": one.why,
            }
            for node, one in self._failures.items()
            if now - one.at < LATELY_S
        ]

    def _name(self, node: str) -> str:
        """The name of a node by its last lease, or else its number."""
        lease = self._leases.get(node, (0.0, None))[1]
        return node if lease is None else lease.name


def _turn(lease: Lease) -> float:
    """A random place in the order of owners: the first is a node with a chance of 1 / load.

    All nodes see the same leases for seconds, and would all ask the least loaded owner.
    """
    return random.expovariate(1.0) * (IDLE + lease.load)


def is_address(text: str) -> bool:
    """Whether a text is IP:PORT; an empty text is the address of a node that serves nobody."""
    return not text or addresses.parse(text) is not None
