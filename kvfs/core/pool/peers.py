"""The nodes of the pool: our lease, and the peers that may be read from.

Contract: `run` renews our lease, and calls `lost` when the index has lost its data. A peer is
*usable* if it has a lease with the incarnation of the entry, serves at an address, and has not
failed lately. Leases are believed for LEASE_SEEN seconds. An address comes from a lease only, so
an entry of the index cannot lead kvfs elsewhere.
"""

import ipaddress
import logging
import math
import random
import secrets
import time
from collections.abc import Callable, Iterable, Sequence

import trio

from kvfs.core.pool.news import News
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import PATIENCE, Index, Lease, Owner, PoolEntry

log = logging.getLogger(__name__)

RENEW_S = 3.0
LEASE_SEEN = 3.0  # s for which a lease is believed
BACK_OFF, BACK_OFF_MOST = 1.0, 30.0  # s without requests after a failure; doubled each time
REMEMBERED = 4096  # nodes


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
        self.why = "it was not asked yet"  # why our lease is not renewed; "" if it is
        self._leases: dict[str, tuple[float, Lease | None]] = {}  # when seen, and what
        self._failures: dict[str, tuple[float, float]] = {}  # no request until; the pause after it

    async def run(self) -> None:
        """Renew our lease, for ever."""
        while True:
            await self.renew()
            await trio.sleep(RENEW_S if not self.why else RENEW_S / 6)

    async def renew(self) -> None:
        """Renew our lease once, and look whether the index is still the same."""
        try:
            epoch = await self.index.renew(self.me(), secrets.token_hex(8), time.time())
        except IndexDownError as error:
            if not self.why:
                self.news.tell("index down", why=str(error))
                log.warning("the pool's index is down, other nodes' objects are misses: %s", error)
            self.why = str(error)
            return
        if self.why and self.epoch:
            self.news.tell("index up")
            log.info("the pool's index answers again")
        self.why = ""
        if epoch != self.epoch:
            if self.epoch:
                self.news.tell("index empty")
                log.info("the pool's index has lost its data: objects are announced again")
            self.epoch = epoch
            self.lost()

    async def leave(self) -> None:
        """End our lease: our entries are no entries any more."""
        try:
            await self.index.leave(self.me().node)
        except IndexDownError as error:
            log.info("our lease in the pool ends by itself: %s", error)

    # Peers

    async def have(self, owners: Sequence[Owner]) -> bool:
        """Whether this node, or a peer that may be asked, has an object. Raises IndexDownError."""
        me = self.me()
        if any(one.node == me.node and one.incarnation == me.incarnation for one in owners):
            return True
        return await self.others_have(owners)

    async def others_have(self, owners: Sequence[Owner]) -> bool:
        """Whether a peer that may be asked has an object. Raises IndexDownError."""
        mine = self.me().node
        others = [one for one in owners if one.node != mine and not self._is_out(one.node)]
        await self._look([one.node for one in others])
        return any(self._serves(one) is not None for one in others)

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

        patience: seconds for which the index may take to tell their leases.
        """
        mine = self.me().node
        owners = [one for one in entry.owners if one.node != mine and not self._is_out(one.node)]
        await self._look([one.node for one in owners], patience)
        served = ((owner, self._serves(owner)) for owner in owners)
        found = [(owner, lease) for owner, lease in served if lease is not None]
        random.shuffle(found)  # equal ones share the load
        return sorted(found, key=lambda one: (one[0].tier != "ram", one[1].load))

    def _serves(self, owner: Owner) -> Lease | None:
        """The lease of a node that has been looked up, if it lives on and serves its files."""
        lease = self._leases[owner.node][1]
        if lease is None or lease.incarnation != owner.incarnation or not lease.address:
            return None
        return lease

    async def alive(self, entry: PoolEntry) -> bool:
        """Whether another node with a lease has the object, and did not fail lately.

        Raises IndexDownError.
        """
        mine = self.me().node
        owners = [one for one in entry.owners if one.node != mine and not self._is_out(one.node)]
        await self._look([owner.node for owner in owners])
        leases = [(owner, self._leases[owner.node][1]) for owner in owners]
        return any(
            lease is not None and lease.incarnation == owner.incarnation for owner, lease in leases
        )

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
        return trio.current_time() < self._failures.get(node, (-math.inf, 0.0))[0]

    def failed(self, node: str) -> None:
        """Note that a peer did not give an object: it is not asked for a while."""
        pause = min(BACK_OFF_MOST, 2 * self._failures.get(node, (0.0, BACK_OFF / 2))[1])
        self._failures[node] = (trio.current_time() + pause, pause)

    def gave(self, node: str) -> None:
        """Note that a peer gave an object."""
        self._failures.pop(node, None)

    @property
    def out(self) -> Sequence[str]:
        """The peers that failed lately."""
        return [node for node in self._failures if self._is_out(node)]


def is_address(text: str) -> bool:
    """Whether a text is IP:PORT; an empty text is the address of a node that serves nobody."""
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return not text
    return port.isdecimal() and 0 < int(port) < 1 << 16
