"""Write leases: create many blocks for a client of this machine, which then writes them directly.

Contract: `make` creates consecutive blocks, and commits each before the next. It ends at the first
block that exists already, or that RAM cannot take now without waiting. A block is an object with a
writer, as any created file. `done` closes blocks, and seals those that have their size. A block
without its size goes with its name, and so does a block that ends without `done` (`close`). A
client stays a writer of its block until it closes its descriptor, as a mapping does (`mappings`).
Rights are those of `read_leases`. `make` creates nothing where a create may have to wait for its
turn, or where a file gets its name at its close. It also creates nothing on a mount with a bucket,
which may have blocks that this node does not know.

Not for the questions (`kvfs.leasing`), nor for the callers (`fuse/match_files.py`).
"""

import logging
import os
import stat
from collections.abc import Callable, Iterable
from itertools import pairwise

import trio

from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.lending.read_leases import LEASES_MAX, Who, of_blocks
from kvfs.core.names.tree import Tree
from kvfs.core.namespaces.namespace import Namespace
from kvfs.core.objects.objects import Objects
from kvfs.errors import KvfsError, StaleError
from kvfs.fairness.portions import Portions
from kvfs.leasing import LeaseRequest

log = logging.getLogger(__name__)

AT_ONCE = 4  # blocks that are created, or end, in a step of the loop


class WriteLeases:
    """Lends new blocks to clients.

    `numbers(count)` gives the first of `count` consecutive leases; `changed(ino)` tells the kernel.
    """

    def __init__(
        self,
        tree: Tree,
        objects: Objects,
        numbers: Callable[[int], int],
        changed: Callable[[int], None],
    ) -> None:
        self.tree = tree
        self.objects = objects
        self.ledger = objects.ledger
        self._numbers = numbers
        self._changed = changed
        # lease -> object, its final size, uid
        self._held: dict[int, tuple[OpenObject, int, int]] = {}
        self.portions = Portions("blocks that are being made", LEASES_MAX)

    def __len__(self) -> int:
        return len(self._held)

    async def make(self, ino: int, request: LeaseRequest, who: Who) -> tuple[int, list[int]]:
        """Create the longest leading run of blocks that can be leased. The run may be empty.

        Returns the first lease, and the descriptors. The leases follow each other. The caller
        closes the descriptors. Raises StaleError if the directory is no namespace of blocks.
        """
        space, _ = of_blocks(self.ledger.namespaces, ino)
        first, found = self._numbers(len(request.keys)), list[int]()
        if not self._lends(space):
            return first, found
        names = [key.hex().encode() for key in (request.parent, *request.keys)]
        try:
            for lease, (above, name) in enumerate(pairwise(names), first):
                if len(found) % AT_ONCE == AT_ONCE - 1:
                    await trio.lowlevel.checkpoint()
                found.append(await self._make(space, above, name, request, who, lease))
        except KvfsError as error:
            told = (len(found), len(names) - 1, self.ledger.catalog.named(ino), error)
            log.debug("block %d of %d in %s is to be made by name: %s", *told)
        except BaseException:
            for fd in found:
                os.close(fd)
            await self.close(range(first, first + len(found)))
            raise
        return first, found

    def _lends(self, space: Namespace) -> bool:
        ledger = self.ledger
        return (
            not ledger.tiers.bucket.mounted
            and not ledger.namespaces.limited
            and space.settings.publish != "close"
        )

    async def _make(
        self,
        space: Namespace,
        above: bytes,
        name: bytes,
        request: LeaseRequest,
        who: Who,
        lease: int,
    ) -> int:
        """Create one block, and return a descriptor to write it. Raises KvfsError."""
        top, directory = self.tree.directory(space.ino), self.tree.lookup(space.ino, above)
        may = who.may(top, stat.S_IXOTH) and who.may(directory, stat.S_IXOTH)
        if not directory.is_dir or not may or not who.may(directory, stat.S_IWOTH):
            raise StaleError(
                f"uid {who.uid} may make nothing in {self.ledger.catalog.named(directory.ino)}"
            )
        if request.shard:
            name += b"." + request.shard.encode()
        mode = stat.S_IFREG | request.mode
        directory, make = self.tree.maker(directory.ino, name, mode, who.uid, who.gid)
        self.portions.charge(who.uid)
        try:
            held = await self.objects.creation.create_at_once(directory, name, make, request.size)
            if held is None:
                raise StaleError("RAM has no room for it now")
        except BaseException:
            self.portions.add(who.uid, -1)
            raise
        held.most = request.size
        self._held[lease] = held, request.size, who.uid
        self._changed(directory.ino)
        try:  # a separate open, so that kvfs sees when the client closes it
            return held.tier.open(held.inode.ino, held.inode.version, writable=True)
        except BaseException:
            await self.close([lease])
            raise

    async def done(self, leases: Iterable[int]) -> bool:
        """End the leases of blocks that the client has written. True if all of them were sealed."""
        whole = True
        for at, lease in enumerate(leases, 1):
            held, size = self._pop(lease)
            whole &= held is not None and await self._seal(held, size)
            if not at % AT_ONCE:
                await trio.lowlevel.checkpoint()
        return whole

    async def close(self, leases: Iterable[int]) -> None:
        """End leases, and remove their unfinished blocks. Unknown leases are passed over."""
        for at, lease in enumerate(leases, 1):
            held, _ = self._pop(lease)
            if held is None:
                continue
            await self._drop(held)
            if not at % AT_ONCE:
                await trio.lowlevel.checkpoint()

    def _pop(self, lease: int) -> tuple[OpenObject | None, int]:
        """End a lease. Returns its object, and the size that the client asked for."""
        held, size, uid = self._held.pop(lease, (None, 0, 0))
        if held is not None:
            self.portions.add(uid, -1)
        return held, size

    async def _seal(self, held: OpenObject, size: int) -> bool:
        self.objects.files.measure(held)
        if held.inode.size != size or not held.inode.links:
            await self._drop(held)
            return False
        try:
            await self.objects.sealing.close_lent(held)
        except KvfsError as error:
            named = self.ledger.catalog.named(held.inode.ino)
            log.debug("%s is not saved, its client gets an error: %s", named, error)
            return False
        return True

    async def _drop(self, held: OpenObject) -> None:
        inode, catalog = held.inode, self.ledger.catalog
        names = [(parent, catalog.dentry(parent, cookie)) for parent, cookie in inode.links]
        try:
            with catalog.batch() as batch:
                for parent, entry in names:
                    if entry is not None:
                        self.tree.remove_name(parent, entry, inode, batch)
        except KvfsError as error:  # the file stays, too short to be a block
            log.error("%s was not written, and keeps its name: %s", catalog.named(inode.ino), error)
        else:
            for parent, entry in names:
                if entry is not None:
                    self.ledger.invalidate_name(parent, entry.name, inode.ino)
        try:
            await self.objects.sealing.close_lent(held)
        except KvfsError as error:
            log.debug("%s is closed with an error: %s", catalog.named(inode.ino), error)
