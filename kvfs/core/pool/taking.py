"""Takes objects over that other nodes offer before they evict them.

Contract: `run` runs as long as the mount; with `keep` off it takes nothing. This node fetches one
offered object after the other, at RATE, into room that is free (`Ahead.room`), so nothing here goes
for it. The fetch is the usual one: a live node must give the bytes, and a mover compares the
digest. The copy is a guest, as any copy from another node. An offer that cannot be taken is
forgotten: the object is in no directory that this node may make, or is gone by now. A namespace
that is here has to have the same version; one that is not here is made.
"""

import logging
from collections import Counter

import trio

from kvfs.catalog import ROOT_INO, Inode
from kvfs.core.capacity.ahead import Ahead
from kvfs.core.names.tree import is_name
from kvfs.core.pool.fetch import PoolFetch
from kvfs.core.pool.follow import Follow
from kvfs.errors import KvfsError
from kvfs.pool.index import LONG
from kvfs.pool.offers import Offers
from kvfs.pool.records import PoolEntry, Switch
from kvfs.s3.keys import ObjectName, escape
from kvfs.tiers import Tier

log = logging.getLogger(__name__)

LOOK_S = 0.5  # s between two questions whether there are offers
AT_ONCE = 16  # offers that one question takes
RATE = 256 << 20  # bytes/s
FETCH_S = 30.0  # s for which this node waits for an object


class _Wanted:
    """The request for one object, as a `PrefetchRequest`."""

    def __init__(self, ahead: Ahead) -> None:
        self.ahead = ahead
        self.done = trio.Event()
        self.came = False
        self.given_up = False

    def wanted(self, _inode: Inode) -> bool:
        return not self.given_up

    def admit(self, inode: Inode, tier: Tier, cost: int) -> bool:
        return tier is self.ahead.lowest and self.ahead.takes(inode, cost)

    def ended(self, _inode: Inode, problem: Exception | None, *, joined: bool) -> None:  # noqa: ARG002 (of the protocol)
        self.came = problem is None
        self.done.set()


class Taking:
    """Takes objects over for one mount. `keep` may change at any time."""

    def __init__(self, ahead: Ahead, fetcher: PoolFetch, follow: Follow, offers: Offers) -> None:
        self.ahead = ahead
        self.ledger = fetcher.ledger
        self.fetcher = fetcher
        self.lookup = fetcher.lookup
        self.entries = fetcher.entries
        self.peers = fetcher.peers
        self.follow = follow
        self.offers = offers
        self.keep = False
        self.counters = Counter({"taken_over": 0})

    @property
    def room(self) -> int:
        """Bytes that this node offers to others."""
        return self.ahead.room if self.keep else 0

    async def run(self) -> None:
        """Take what is offered, for ever."""
        keys: list[str] = []
        while True:
            if len(keys) < AT_ONCE:
                await trio.sleep(LOOK_S)
            keys = []
            if not self.room or not self.lookup.may_ask():
                continue
            try:
                keys = await self.offers.take(self.peers.me().node, AT_ONCE)
                for key in keys:
                    await trio.sleep(await self._take(key) / RATE)
            except KvfsError as error:
                keys = []
                log.debug("no objects are taken over for a moment: %s", error)

    async def _take(self, key: str) -> int:
        """Take an object over, and return its bytes; 0 if it does not come.

        Raises IndexDownError, CatalogError.
        """
        name = self.entries.keys.parse(key)
        top = b"" if name is None else name.namespace
        (switch,) = await self.lookup.index.switches([escape(top)]) if top else (Switch(0, ""),)
        (entry,) = await self.lookup.index.find([key], patience=LONG)
        if name is None or not isinstance(entry, PoolEntry) or entry.facts.size > self.room:
            return 0
        if not await self.peers.usable(entry, patience=LONG):
            return 0
        inode = self._enter(name, key, entry, switch)
        if inode is None or not inode.in_pool:
            return 0
        self.lookup.remember(key, entry)
        request = _Wanted(self.ahead)
        if self.fetcher.ahead(inode, request):
            with trio.move_on_after(FETCH_S):
                await request.done.wait()
            request.given_up = True
        if not request.came:
            self.follow.keep(inode.ino)
            return 0
        self.counters["taken_over"] += 1
        return inode.size

    def _enter(self, name: ObjectName, key: str, entry: PoolEntry, switch: Switch) -> Inode | None:
        """The object by its name here; None if this node cannot have the name.

        Raises CatalogError.
        """
        catalog, at = self.entries.catalog, ROOT_INO
        *folders, last = name.path.split(b"/")
        if name.namespace:
            folders.insert(0, name.namespace)
        for part in folders:
            if not is_name(part, at):
                return None
            found = catalog.lookup(at, part)
            if found is None:
                known = switch._replace(version=name.version) if at == ROOT_INO else None
                if not self.entries.make_directory(at, part, known):
                    return None
                found = catalog.lookup(at, part)
            if found is None or not key.startswith(self.entries.folder(found.ino) or "\0"):
                return None
            at = found.ino
        if is_name(last, at):
            self.entries.enter(at, last, key, entry)
        entered = catalog.lookup(at, last)
        return None if entered is None else self.ledger.table.inode(entered.ino)
