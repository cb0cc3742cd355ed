"""Offers the objects that this node evicts next, and no other node has, to a node with room.

Contract: `run` runs as long as the mount; with `keep` off it does nothing. No eviction waits for an
offer: an object that nobody has taken when it is evicted is dropped, as without `keep`. A look at
the next victims comes each LOOK_S. It asks the index which of them other live nodes have, and
offers the others: to the node with the most room, of SAMPLE nodes. An offer that nobody has taken
within OFFER_S is over, and the object is offered again AGAIN_S later. A node that takes nothing for
OFFER_S is doubted: it cannot read from here, or it hangs. It gets one object each AGAIN_S until it
takes one; the others go to other nodes at once. An object that a program has unlinked, renamed or
rewritten meanwhile tells nothing about a node. At most OFFERED objects and OFFERED_BYTES are on
offer.

An object is not offered if the bucket has it or is to get it, its namespace has `pool=off`, or the
index does not know it from here. Nor is a copy from another node that no program here has opened,
so no object goes to and fro. The read of a node that takes an object over is no use of it
(`leaves`), so what was handed over still goes first here.
"""

import logging
import math
import random
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.ahead import Ahead
from kvfs.core.pool.announcer import Announcer
from kvfs.core.pool.nodes import Nodes
from kvfs.errors import KvfsError
from kvfs.pool.offers import MOST, OFFER_S, Offers

log = logging.getLogger(__name__)

LOOK_S = 0.25  # s between two looks at the next victims
AGAIN_S = 30.0  # s
SAMPLE = 16  # nodes whose leases one look reads
OFFERED, OFFERED_BYTES = MOST, 256 << 20
ELSEWHERE_S = 10.0  # s for which another node is believed to keep an object
DOWN_S = 1.0  # s after a failure of the index
AT_ONCE = 64  # objects in one question

_Id = tuple[int, int]  # an inode and its version


class _Offer(NamedTuple):
    """An object on offer until `ends`, of trio's clock."""

    key: str
    cost: int
    node: str
    ends: float


class Offering:
    """Offers the objects of one mount. `keep` may change at any time."""

    def __init__(self, ahead: Ahead, announcer: Announcer, nodes: Nodes, offers: Offers) -> None:
        self.ahead = ahead
        self.ledger = announcer.ledger
        self.announcer = announcer
        self.entries = announcer.entries
        self.index = announcer.index
        self.peers = announcer.peers
        self.nodes = nodes
        self.offers = offers
        self.keep = False
        self.counters = Counter({"handed_over": 0})
        self._offered: dict[_Id, _Offer] = {}
        self._took: dict[str, float] = {}  # when each node took an object last
        self._doubted: dict[str, float] = {}  # when each doubted node gets an object again
        self._settled: dict[_Id, float] = {}  # objects with which nothing is to be done, until when
        self._logged = False  # that no offers are made

    async def run(self) -> None:
        """Look again and again, for ever."""
        while True:
            await trio.sleep(LOOK_S)
            if not self.keep:
                continue
            try:
                await self.look()
                self._logged = False
            except KvfsError as error:  # of the index, or of the catalog, which others report
                level = logging.DEBUG if self._logged else logging.INFO
                log.log(level, "no node is asked to take objects over for a moment: %s", error)
                self._logged = True
                await trio.sleep(DOWN_S)

    def leaves(self, inode: Inode) -> bool:
        """Whether an object is on offer, or went to another node lately."""
        one = inode.ino, inode.version
        return one in self._offered or one in self._settled

    async def look(self) -> None:
        """Look once. Raises IndexDownError, CatalogError."""
        now = trio.current_time()
        self._settled = {one: until for one, until in self._settled.items() if until > now}
        new = self._next()
        if not new and not self._offered:
            return
        asked = {one: offer.key for one, offer in self._offered.items()}
        asked |= {one: key for one, (key, _) in new.items()}
        for one, nodes in (await self._elsewhere(asked)).items():
            self._settled[one] = now + ELSEWHERE_S
            new.pop(one, None)
            if (offer := self._offered.pop(one, None)) is not None:
                self.counters["handed_over"] += 1
                if offer.node in nodes:
                    self._took[offer.node] = now
                    self._doubted.pop(offer.node, None)
        for one in [one for one, offer in self._offered.items() if offer.ends <= now]:
            offer = self._offered.pop(one)
            took = self._took.get(offer.node, -math.inf) >= offer.ends - OFFER_S
            if took or self.entries.leaving.knows(offer.key):
                self._settled[one] = now + AGAIN_S
                new.pop(one, None)
            else:
                self._doubted[offer.node] = now + AGAIN_S
        await self._offer({one: told for one, told in new.items() if one not in self._offered})

    def _next(self) -> dict[_Id, tuple[str, int]]:
        """The next victims that may be offered: key and cost of each."""
        found: dict[_Id, tuple[str, int]] = {}
        for inode in self.ahead.next_to_go():
            one = inode.ino, inode.version
            if one not in self._settled and (key := self._key(inode)) is not None:
                found[one] = key, self.ahead.lowest.cost(inode.blocks)
                if len(found) == OFFERED:
                    break
        return found

    def _key(self, inode: Inode) -> str | None:
        """The key of an object that may be offered; None for any other."""
        space = self.ledger.namespaces.of(inode)
        if inode.in_bucket or inode.ino in self.ledger.dirty or not self.entries.is_shared(inode):
            return None
        indexed = self.announcer.objects.announced.get(inode.ino)
        if indexed is None or indexed.version != inode.version:
            return None
        if space.guests is not None and space.guests.is_unused(inode.ino):
            return None
        if self.ledger.removals.is_gone(inode):
            return None
        key = self.entries.key(inode)
        return None if key is None or self.entries.keys.parse(key) is None else key

    async def _elsewhere(self, asked: dict[_Id, str]) -> dict[_Id, set[str]]:
        """Those objects that other live nodes have, and these nodes. Raises IndexDownError."""
        found: dict[_Id, set[str]] = {}
        ones = list(asked)
        for start in range(0, len(ones), AT_ONCE):
            some = ones[start : start + AT_ONCE]
            told = await self.index.held([asked[one] for one in some])
            mine = self.peers.me().node
            lives = {life for held in told if held is not None for life in held.owners}
            others = {one for one in await self.peers.that_serve(lives) if one.node != mine}
            for one, held in zip(some, told, strict=True):
                if held is not None and (nodes := {life.node for life in others & {*held.owners}}):
                    found[one] = nodes
        return found

    async def _offer(self, new: dict[_Id, tuple[str, int]]) -> None:
        """Offer objects, the first to go first; the last one to a doubted node. IndexDownError."""
        if not new or len(self._offered) >= OFFERED:
            return
        rooms = await self._rooms()
        now, live = trio.current_time(), {*self.nodes.live}
        self._doubted = {node: at for node, at in self._doubted.items() if node in live}
        for node in [node for node, at in self._doubted.items() if node in rooms and at <= now]:
            if new:
                self._doubted[node] = now + AGAIN_S
                await self._offer_to(node, rooms[node], dict([new.popitem()]))
        trusted = rooms.keys() - self._doubted.keys()
        if new and trusted:
            node = max(trusted, key=lambda one: rooms[one])
            await self._offer_to(node, rooms[node], new)

    async def _offer_to(self, node: str, room: float, new: dict[_Id, tuple[str, int]]) -> None:
        """Offer a node as many objects as it has room for. Raises IndexDownError."""
        free = OFFERED - len(self._offered)
        on_offer = sum(offer.cost for offer in self._offered.values())
        taken: dict[_Id, _Offer] = {}
        ends = trio.current_time() + OFFER_S
        for one, (key, cost) in new.items():
            if len(taken) == free or (on_offer and on_offer + cost > OFFERED_BYTES):
                break
            if cost <= room:
                taken[one] = _Offer(key, cost, node, ends)
                room -= cost
                on_offer += cost
        if taken:
            self._offered |= taken  # before the call: a reply that is lost changes nothing
            await self.offers.offer(node, [offer.key for offer in taken.values()])

    async def _rooms(self) -> dict[str, float]:
        """The room of some nodes, without what they are offered already. Raises IndexDownError."""
        live: Sequence[str] = self.nodes.live
        if len(live) > SAMPLE:
            live = random.sample(live, SAMPLE)
        tls = self.peers.me().tls
        able = [one for one in await self.peers.leases(live) if one.tls == tls]
        offered: Counter[str] = Counter()
        for offer in self._offered.values():
            offered[offer.node] += offer.cost
        # A client of the index could tell any number, even an infinite one.
        return {lease.node: lease.room - offered[lease.node] for lease in able}
