"""The pool of a mount: its parts, wired, and their tasks.

Contract: `run` runs as long as the mount; `end` tells the others that this node leaves. Nothing
here raises for a failure of the index, of nginx or of a peer: objects of other nodes are misses
then, and `why` says so.
"""

import logging
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import trio

from kvfs.catalog import ROOT_INO, Batch, Inode
from kvfs.core.capacity.ahead import Ahead
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.moves.transfers import TierTransfers
from kvfs.core.names.tree import Tree
from kvfs.core.pool.announcer import Announcer
from kvfs.core.pool.chunk_digests import ChunkDigests
from kvfs.core.pool.entries import PoolEntries
from kvfs.core.pool.fetch import PoolFetch
from kvfs.core.pool.follow import Follow
from kvfs.core.pool.kernel_lookups import KernelLookups
from kvfs.core.pool.listing import PoolListing
from kvfs.core.pool.lookup import PoolLookup
from kvfs.core.pool.news import News
from kvfs.core.pool.nodes import Nodes, named
from kvfs.core.pool.offering import Offering
from kvfs.core.pool.owners import conflicts, owners
from kvfs.core.pool.peers import Peers
from kvfs.core.pool.reads import PeerReads
from kvfs.core.pool.recheck import Recheck
from kvfs.core.pool.renewal import Renewal
from kvfs.core.pool.switches import NamespaceSwitches
from kvfs.core.pool.taking import Taking
from kvfs.errors import ConfigError, KvfsError
from kvfs.movement.movers import MoverPool
from kvfs.pool import nginx
from kvfs.pool.errors import IndexDownError
from kvfs.pool.index import Index
from kvfs.pool.member import Membership
from kvfs.pool.nginx import Nginx, Served
from kvfs.pool.offers import Offers
from kvfs.pool.records import Lease
from kvfs.pool.servers import Servers

log = logging.getLogger(__name__)

GLANCE = 1.0  # s between two looks whether nginx lives
BACK_OFF_MOST = 60.0  # s between two starts of nginx
LEAVE_S = 2.0  # s for the last words to the index
LOOPBACK = ("127.0.0.0/8", "::1")  # the clients of a node there, without pool_allow
VALID = 1.0  # s that the kernel may keep the facts of an object


class Pool:
    """The pool of one mount."""

    def __init__(
        self,
        member: Membership,
        transfers: TierTransfers,
        room: Room,
        quota: Quota,
        tree: Tree,
        movers: MoverPool,
        jobs: set[int],
    ) -> None:
        self.member = member
        self.ledger = transfers.ledger
        self.servers = Servers.of_member(member)
        self.nginx = Nginx(member.folder)
        self._ended = False
        self.serves = False  # nginx answers
        self.starting = True  # nginx was not started yet
        self.why_not = "it was not started yet"  # why nginx does not serve
        index = Index(self.servers)
        self.entries = PoolEntries(tree)
        self.news = News()
        self.peers = Peers(index, self.lease, self._index_lost, self.news)
        self.lookup = PoolLookup(index, self.entries, self.peers)
        chunks = ChunkDigests(self.ledger.tiers.nodes)
        self.fetcher = PoolFetch(
            transfers, room, quota, movers, self.lookup, jobs, chunks, tls=member.tls
        )
        self.announcer = Announcer(
            transfers, self.lookup, movers, self.fetcher.fetched, chunks, self.news
        )
        self.switches = NamespaceSwitches(index, self.ledger.namespaces, self.entries.tokens)
        self.recheck = Recheck(self.announcer)
        self.listing = PoolListing(self.lookup, self.recheck)
        self.follow = Follow(self.lookup)
        self.kernel_lookups = KernelLookups()
        self.ledger.tiers.has_afar = True
        self.ledger.dirty.superseded.others_replace = True
        self.nodes = Nodes(index, member.node, self._nodes_changed)
        self.lookup.few_nodes = self.nodes.few
        ahead, offers = Ahead(room), Offers(index)
        self.offering = Offering(ahead, self.announcer, self.nodes, offers)
        self.taking = Taking(ahead, self.fetcher, self.follow, offers)
        self.ledger.latencies.add_origin(self.ledger.tiers.nodes.name)
        self.reads = PeerReads(self.ledger, member.folder / "reports", self.offering.leaves)
        self.renewal = Renewal(member, self.servers, self.news, self.nginx.reload)

    def lease(self) -> Lease:
        """This node, as other nodes see it now."""
        member, announcer = self.member, self.announcer
        return Lease(
            node=member.node,
            incarnation=member.incarnation,
            address=member.address if self.serves else "",
            tls=member.tls is not None,
            host=member.host,
            machine=member.machine,
            mountpoint=member.mountpoint,
            room=self.taking.room,
            objects=len(announcer.objects.announced),
            bytes=announcer.objects.bytes,
            lag_s=round(self.lag_s, 3),
            load=round(self.reads.load),
        )

    @property
    def lag_s(self) -> float:
        """Seconds since the oldest change or drop that the index does not know; 0 without one."""
        return max(self.announcer.lag_s, self.entries.tokens.lag_s)

    def set_copies(self, copies: str) -> None:
        """Keep last copies in the pool, or drop them: the option `pool_copies`."""
        self.offering.keep = self.taking.keep = copies == "keep"

    def _index_lost(self) -> None:
        self.announcer.announce_all()

    def _namespace_dropped(self, name: str, batch: Batch) -> None:
        batch.then(partial(self.entries.dropped.note, name))
        self.switches.dropped(name, batch)

    def _nodes_changed(self, how: str, names: list[str]) -> None:
        self.news.tell(f"node {how}", nodes=named(names), live=1 + len(self.nodes))
        log.info("nodes of the pool have %s: %s", how, named(names))

    # Life

    async def run(self) -> None:
        """Be a member of the pool, for ever."""
        self.ledger.catalog.watchers.append(self.announcer.changes.changing)
        self.ledger.catalog.committing = self.announcer.changes.committing
        self.ledger.removals.withdrawn = self.announcer.changes.withdrawn
        self.ledger.namespaces.pool_switched = self.announcer.switched
        self.ledger.namespaces.pool_dropped = self._namespace_dropped
        self.ledger.namespaces.pool_made = self.entries.tokens.made
        self.ledger.namespaces.pool_making = self.making
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.servers.run)
            nursery.start_soon(self.reads.run)
            await self._serve_once()
            nursery.start_soon(self.peers.run)
            nursery.start_soon(self.announcer.run)
            nursery.start_soon(self.announcer.conflicts.run)
            nursery.start_soon(self.nodes.run)
            nursery.start_soon(self.switches.run)
            nursery.start_soon(self.offering.run)
            nursery.start_soon(self.taking.run)
            nursery.start_soon(self.renewal.run)
            nursery.start_soon(self._keep_serving)

    async def _serve_once(self) -> None:
        member, tiers = self.member, self.ledger.tiers.local
        served = Served(
            member.address,
            {tier.name: tier.root / "objects" for tier in tiers},
            allow=member.allow or (() if member.tls else LOOPBACK),
            tls=member.tls,
            reports=self.reads.path,
        )
        try:
            await trio.to_thread.run_sync(self._start, served)
        except (ConfigError, KvfsError, OSError) as error:
            self.serves, self.why_not = False, str(error)
            log.warning("this node serves no other node of the pool: %s", error)
        else:
            self.serves, self.why_not = True, ""
        self.starting = False

    def _start(self, served: Served) -> None:
        account = nginx.account()
        for tier in self.ledger.tiers.local:
            tier.let_read(account.pw_uid)
        self.nginx.start(replace(served, user=account.pw_name))

    async def _keep_serving(self) -> None:
        pause = GLANCE
        while True:
            await trio.sleep(pause)
            if self._ended:
                return
            if self.serves and self.nginx.alive:
                pause = GLANCE
                continue
            if self.serves:
                self.news.tell("nginx ended")
                log.warning("the nginx of the pool has ended, and is started again")
            await self._serve_once()
            if self.serves:
                self.news.tell("nginx started")
            pause = GLANCE if self.serves else min(BACK_OFF_MOST, 2 * pause)

    async def end(self) -> None:
        """Leave the pool: its entries of this node are dead at once."""
        self._ended = True
        self.fetcher.stop()
        with trio.move_on_after(LEAVE_S):
            await self.peers.leave()
        await trio.to_thread.run_sync(self.nginx.stop)

    # Names

    async def look_up(self, parent: int, name: bytes) -> None:
        """Look a name up that is not known here; compare one that is, in the background."""
        entry = self.ledger.catalog.lookup(parent, name)
        if entry is None:
            await self.lookup.find(parent, name)
        elif (inode := self.ledger.table.inode(entry.ino)) is not None:
            self.recheck.look(inode)

    @asynccontextmanager
    async def making(self, parent: int, name: bytes) -> AsyncIterator[None]:
        """Give a directory that a program makes here the token of the drop before it.

        Each later drop is for the directory as well, whenever this node learns of it.
        """
        text, token = name.decode("utf-8", "surrogateescape"), None
        if parent == ROOT_INO and self.lookup.may_ask():
            try:
                token = await self.switches.last_drop(text)
            except IndexDownError as error:
                self.lookup.failed(error)
        with self.entries.tokens.of_next(text, token):
            yield

    @contextmanager
    def following(self, *names: tuple[int, bytes] | None) -> Iterator[None]:
        """Announce the objects with these names, or below them, anew after their rename.

        A rename within a directory changes no record of an inode.
        """
        found = (self.ledger.catalog.lookup(*name) for name in names if name is not None)
        inodes = (self.ledger.table.inode(entry.ino) for entry in found if entry is not None)
        directories: list[int] = []
        for inode in inodes:
            if inode is not None and inode.is_file:
                self.announcer.changes.changing(inode)
            elif inode is not None:
                directories.append(inode.ino)
        yield
        for ino in directories:
            self.announcer.moved(ino)

    async def match(self, top: int, paths: Sequence[bytes], keys: Sequence[str]) -> list[int]:
        """The sizes of the first of these files that live nodes have: see `PoolLookup.sizes`."""
        found = await self.lookup.sizes(keys)
        self.follow.matched(top, paths[: len(found)], keys[: len(found)])
        return found

    def opened(self, inode: Inode) -> None:
        """Note that a program has opened an object for reading; compare it with the index."""
        self.follow.opened(inode)
        if not inode.in_pool:  # else the open asks a node for the bytes
            self.recheck.look(inode)

    def forgotten(self, ino: int, lookups: int) -> None:
        """Forget a remote object if the kernel has given back all lookups of it."""
        if self.kernel_lookups.given_back(ino, lookups) and ino not in self.ledger.table.busy:
            self.entries.forget(ino)

    def ttl_remaining(self, inode: Inode, most: float) -> float:
        """The seconds that the kernel may keep the facts of an inode."""
        return min(most, VALID) if inode.is_file else most

    async def describe(self, *, with_conflicts: bool = False) -> dict[str, Any]:
        """The state, with the nodes of the pool; without other nodes if the index is down."""
        index, found = self.lookup.index, dict(self.status())
        if with_conflicts:
            others, wait = self.announcer.objects.others, self.ledger.tiers.nodes.wait
            found["conflicts"] = await conflicts(self.lookup, others, wait)
        try:
            seen = await index.nodes()
            leases = await index.leases(list(seen))
            names = await index.node_names()
        except IndexDownError as error:
            found["nodes"], down = [], {"up": False, "full": False, "why": str(error)}
            found["index"] = {**found["index"], **down}
            return found
        now = time.time()
        found["nodes"] = [
            {
                **asdict(lease or _without_lease(node, *names.get(node, ("", "")))),
                "live": lease is not None,
                "seen_s": max(0.0, now - at),
            }
            for (node, at), lease in zip(seen.items(), leases, strict=True)
        ]
        found["nodes_live"] = sum(one["live"] for one in found["nodes"])  # later than `Nodes` knows
        return found

    async def owners(self, inode: Inode) -> Mapping[str, Any]:
        """The nodes that have a file, for `kvfs stat`. It waits for the index as an open does."""
        leaves = self.announcer.conflicts.leaves
        return await owners(self.lookup, leaves, inode, self.ledger.tiers.nodes.wait)

    def status(self) -> Mapping[str, Any]:
        """The state, for `kvfs status`."""
        return {
            "place": str(self.member.place),
            "node": self.member.node,
            "address": self.member.address,
            "serves": self.serves,
            "starting": self.starting,
            "why_not": self.why_not,
            "nodes_live": 1 + len(self.nodes),
            "hits": self.ledger.tiers.nodes.hits,
            "index": {
                "up": not self.peers.why,
                "full": bool(self.peers.full),
                "why": self.peers.why or self.peers.full,
                "asked": self.peers.asked,
            },
            "objects": len(self.announcer.objects.announced),
            "bytes": self.announcer.objects.bytes,
            "lag_s": self.lag_s,
            "certificate": self.renewal.describe(),
            "password_problem": self.renewal.password_problem,
            "files_refused": self.renewal.refused,
            "in_conflict": len(self.announcer.objects.others),
            "out": list(self.peers.out),
            "failing": self.peers.failing,
            "streaming": self.fetcher.streaming,
            "counters": {
                **self.lookup.counters,
                **self.fetcher.counters,
                **self.fetcher.sources.counters,
                **self.announcer.counters,
                **self.announcer.conflicts.counters,
                **self.reads.counters,
                **self.offering.counters,
                **self.taking.counters,
            },
            "fetch_seconds": self.fetcher.seconds.describe(),
        }


def _without_lease(node: str, host: str, mountpoint: str) -> Lease:
    return Lease(node, "", "", host=host, mountpoint=mountpoint)
