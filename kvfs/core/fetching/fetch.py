"""Objects that are fetched from a bucket or from other nodes: for an open, or ahead of it.

Contract: a fetch for which an open waits may evict as a create does, also for the hard quotas of
its namespace. A fetch for a `PrefetchRequest` takes no room from recently used objects, and ends
when no request wants it any more (UnwantedError). Synchronous. Not for the fetches
(`core/bucket/download`, `core/pool/fetch`), nor for the choice of objects to fetch ahead
(`prefetch`), nor for their order (`budget`).
"""

from contextlib import nullcontext
from typing import Protocol

import trio

from kvfs.catalog import Inode
from kvfs.core.capacity.quota import Quota
from kvfs.core.capacity.room import Room
from kvfs.core.fetching.budget import FetchTurn
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.stream import Stream
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.shared_work import SharedWork
from kvfs.errors import NoSpaceError, NotFoundError, QuotaError
from kvfs.tiers import Reservation, Tier

STREAMED = 32 << 20  # bytes: about those that are on their way to a stream at a time


class PrefetchRequest(Protocol):
    """A request for objects that no program has opened yet."""

    def wanted(self, inode: Inode) -> bool:
        """Whether the request still wants the object. Called before the fetch does anything."""

    def admit(self, inode: Inode, tier: Tier, cost: int) -> bool:
        """Count `cost` bytes of a tier for the object, until `ended`. False: too many bytes."""

    def ended(self, inode: Inode, problem: Exception | None, *, joined: bool) -> None:
        """The object is here, or `problem` says why not.

        joined: an open has joined the fetch meanwhile.
        """


class UnwantedError(NotFoundError):
    """The object is not fetched ahead: no request wants it any more, or no tier has room."""


class Fetch(SharedWork):
    """A fetch under way. `inode` is a copy of the object's record at the request.

    cost: the bytes of a tier that it takes. A stream counts as STREAMED bytes at most among the
    fetches under way: it may take minutes, and opens of other objects must not wait for it.

    streamed: programs may read the object during its download. ready: the object can be read, or
    the fetch has ended. `stream` may be None even then.
    """

    def __init__(
        self,
        inode: Inode,
        cost: int,
        request: PrefetchRequest | None = None,
        *,
        streamed: bool = False,
    ) -> None:
        super().__init__()
        self.inode = inode
        self.began = trio.current_time()
        self.cost = cost
        self.turn = FetchTurn(min(cost, STREAMED) if streamed else cost, urgent=request is None)
        self.request = request
        self.ready = trio.Event()
        self.streamed = streamed
        self.stream: Stream | None = None

    def begin_stream(self, stream: Stream) -> None:
        """Note that programs can read the object from now on."""
        stream.join()
        self.stream = stream
        self.ready.set()

    def end(self) -> None:
        """Tell all waiting callers of the end, and then the request."""
        if self.stream is not None:
            self.stream.end(self.problem)
            self.stream.leave()
        super().end()
        self.ready.set()
        if self.request is not None:
            self.request.ended(self.inode, self.problem, joined=self.turn.urgent)


def reserve(
    ledger: Ledger,
    room: Room,
    quota: Quota,
    inode: Inode,
    cost: int,
    request: PrefetchRequest | None,
) -> Reservation:
    """Reserve room for a copy of `cost` bytes in the fastest tier that has room.

    request: None if an open waits. Raises NoSpaceError, UnwantedError.
    """
    namespace = ledger.namespaces.of(inode)
    _keep(quota, namespace, inode, request)
    for tier in tiers_for(room, namespace, cost):
        if tier.health.down:
            continue
        if request is None:
            found = room.reserve(tier, cost)
        elif request.admit(inode, tier, cost):
            found = room.reserve_gently(tier, cost, inode.ino)
        else:
            found = None
        if found is not None:
            return found
    if request is not None:
        raise UnwantedError("no tier has room that is free, or was not used lately")
    raise NoSpaceError(f"no tier has room for {cost} bytes")


def tiers_for(room: Room, namespace: Namespace, cost: int) -> list[Tier]:
    """The tiers that a fetch may bring `cost` bytes to once they have room, the fastest first."""
    found, local = list[Tier](), room.ledger.tiers.local
    for tier in local:
        most = tier.capacity if tier is local[-1] else tier.capacity // 2
        spare = room.headroom if tier is room.ram else 0
        if namespace.takes(tier) and cost <= min(most, tier.capacity - spare):
            found.append(tier)
    return found


def _keep(
    quota: Quota, namespace: Namespace, inode: Inode, request: PrefetchRequest | None
) -> None:
    """Drop objects until the hard quotas allow one more. Raises NoSpaceError, UnwantedError."""
    wanted = Tier.cost(-(-inode.size // 4096) * 8)
    try:
        with nullcontext() if request is None else quota.victims.gently():
            while not quota.keep(namespace, wanted, objects=1):
                pass
    except QuotaError as error:
        if request is not None:
            raise UnwantedError(str(error)) from error
        raise NoSpaceError(str(error)) from error
