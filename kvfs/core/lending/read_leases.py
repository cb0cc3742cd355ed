"""Read leases: open many blocks for a client of this machine, without the kernel's lookups.

Contract: `open` opens consecutive blocks for reading, in one step of the loop. Each open counts and
is noted as any other, and keeps its object until `close`, as a handle does. `open` never waits: it
ends before the first block that is not in RAM, not complete, not of the expected size, or not
readable for the caller. It gives no lease where an open may have to wait for its turn. The mode
bits decide: those of the owner, else of the group, else of others. Users with more rights (a second
group, root) open the name instead. One user has a portion of the leases of a mount
(`fairness/portions.py`).

Invariant: `leases` of an object counts its leases here, and they are among its readers. Not for the
questions (`kvfs.leasing`), nor for the callers (`fuse/match_files.py`).
"""

import itertools
import logging
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import trio

from kvfs.catalog import Inode
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.namespaces.blocks import Blocks
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.namespaces.namespaces import Namespaces
from kvfs.core.objects.objects import Objects
from kvfs.errors import StaleError, TooManyOpenError, UserLimitError
from kvfs.fairness.portions import Portions
from kvfs.leasing import LeaseRequest

LEASES_MAX = 1 << 16  # of all users; the daemon also keeps a descriptor of each leased object
CLOSED_AT_ONCE = 32  # leases that end in one step of the loop, some 0.3 ms


log = logging.getLogger(__name__)


class Who(NamedTuple):
    """The user and group of the caller."""

    uid: int
    gid: int

    def may(self, inode: Inode, right: int) -> bool:
        """Whether the caller has a right to an inode. right: stat.S_IROTH or S_IXOTH."""
        if self.uid == inode.uid:
            return bool(inode.mode & right << 6)
        if self.gid == inode.gid:
            return bool(inode.mode & right << 3)
        return bool(inode.mode & right)


NOBODY = Who(-1, -1)  # the caller with the rights of others


def of_blocks(namespaces: Namespaces, ino: int) -> tuple[Namespace, Blocks]:
    """The namespace of a directory whose paths are prefixes. Raises StaleError for another."""
    space = namespaces.own(ino)
    if space is None or space.blocks is None:
        raise StaleError(f"{namespaces.catalog.named(ino)} is no namespace with prefix=on any more")
    return space, space.blocks


class ReadLeases:
    """Lends open blocks to clients.

    `opened(held, began)` counts opens for reading that began at a time of the clock.
    """

    def __init__(
        self, objects: Objects, opened: Callable[[Sequence[OpenObject], float], None]
    ) -> None:
        self.objects = objects
        self.ledger = objects.ledger
        self.catalog = objects.catalog
        self._opened = opened
        self._held: dict[int, tuple[OpenObject, int]] = {}  # lease -> object, uid
        self.portions = Portions("blocks that are lent", LEASES_MAX)
        self._next = time.time_ns()  # no two daemons give the same number: clients keep theirs

    def __len__(self) -> int:
        return len(self._held)

    def numbers(self, count: int) -> int:
        """The first of `count` consecutive numbers that no lease has had."""
        self._next += count
        return self._next - count

    def open(self, ino: int, request: LeaseRequest, who: Who) -> tuple[int, list[int]]:
        """Open the longest leading run of blocks that can be leased. The run may be empty.

        Returns the number of the first lease, and the descriptors. The numbers of the leases follow
        each other. The descriptors are the objects' own, to be handed over before anything is
        awaited. Raises StaleError if the directory is no namespace of blocks.
        """
        space, _ = of_blocks(self.ledger.namespaces, ino)
        began, first, found = time.perf_counter(), self._next, list[OpenObject]()
        if self.ledger.namespaces.limited:
            return first, []
        for inode in self._inodes(space, request, who):
            try:
                self.portions.charge(who.uid)
            except (UserLimitError, TooManyOpenError) as error:
                named = self.ledger.catalog.named(inode.ino)
                log.debug("%s and the next blocks are to be opened by name: %s", named, error)
                break
            held = self.objects.lend(inode)
            if held is None:
                self.portions.add(who.uid, -1)
                break
            self._held[self._next] = held, who.uid
            self._next += 1
            found.append(held)
        self._opened(found, began)
        return first, [held.lent for held in found]

    def _inodes(self, space: Namespace, request: LeaseRequest, who: Who) -> Iterator[Inode]:
        """The inodes of the blocks, up to the first that is not there, or not for `who`.

        Three questions to the catalog are enough for all: a question costs 5 us, and 1 us more a
        block.
        """
        top = self.ledger.table.inode(space.ino)
        if top is None or not who.may(top, stat.S_IXOTH):
            return
        keys = [key.hex().encode() for key in (request.parent, *request.keys)]
        shard = b"." + request.shard.encode() if request.shard else b""
        above = _all(self.catalog.lookups([(space.ino, key) for key in keys[:-1]]))
        names = [key + shard for key in keys[1:]]
        files = _all(self.catalog.lookups(list(zip(above, names, strict=False))))
        inodes = self._known([*above[: len(files)], *files])
        for folder, inode in zip(inodes, inodes[len(files) :], strict=False):
            if folder is None or inode is None or not inode.is_file or not inode.sealed:
                return
            if inode.size != request.size or self.ledger.removals.expire(inode):
                return
            if not who.may(folder, stat.S_IXOTH) or not who.may(inode, stat.S_IROTH):
                return
            yield inode

    def _known(self, inos: list[int]) -> list[Inode | None]:
        """The inodes as `ledger.table.inode` knows them."""
        peek = self.ledger.table.peek
        return [
            inode if (held := peek(ino)) is None else held.inode
            for ino, inode in zip(inos, self.catalog.inodes(inos), strict=True)
        ]

    async def close(self, leases: Iterable[int]) -> None:
        """End leases. Leases that have ended, or are of another daemon, are passed over."""
        for at, lease in enumerate(leases):
            held, uid = self._held.pop(lease, (None, 0))
            if held is None:
                continue
            self.portions.add(uid, -1)
            held.leases -= 1
            await self.objects.sealing.release(held, writable=False)
            if not (at + 1) % CLOSED_AT_ONCE:
                await trio.lowlevel.checkpoint()


def _all(found: list[int | None]) -> list[int]:
    """The inode numbers up to the first name that is not there."""
    return [ino for ino in itertools.takewhile(bool, found) if ino]
