"""Blocks of a prefix made at once for a client on this machine, and written past the kernel.

Contract: `make` is some creates, of blocks that follow each other, each committed before the next:
what cannot be had in RAM now, without waiting, ends it, as does what is there already. A block is
an object with a writer, as any that is created; `done` closes it, and seals what has its size.
What has not, or ends without that (`close`), goes with its name. Where whoever has written it has
not closed its descriptor, he stays a writer until then, as a mapping does (`mappings`).
Rights are those of `leases`. Nothing is made where a create may have to wait for its turn,
where a name is given with the close, or where a bucket may have what is not known here.

Not for the questions (`kvfs.leasing`), nor for who asks (`fuse/match_files.py`).
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
from kvfs.leasing import Request

log = logging.getLogger(__name__)

AT_ONCE = 4  # blocks that are made, or end, in a step of the loop


class WriteLeases:
    """`numbers(count)` gives the first of so many leases; `changed(ino)` tells the kernel."""

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
        # lease -> object, its size in the end, uid
        self._held: dict[int, tuple[OpenObject, int, int]] = {}
        self.portions = Portions("blocks that are being made", LEASES_MAX)

    def __len__(self) -> int:
        return len(self._held)

    async def make(self, ino: int, request: Request, who: Who) -> tuple[int, list[int]]:
        """(the first one's lease, descriptors): as many blocks as can be had in this way.

        Leases follow each other, descriptors are the caller's to close. Raises StaleError if the
        directory is no namespace of blocks.
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
            log.debug("block %d of %d is to be made by name: %s", len(found), len(names), error)
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
        self, space: Namespace, above: bytes, name: bytes, request: Request, who: Who, lease: int
    ) -> int:
        """A descriptor to write the block by. Raises KvfsError."""
        top, directory = self.tree.directory(space.ino), self.tree.lookup(space.ino, above)
        may = who.may(top, stat.S_IXOTH) and who.may(directory, stat.S_IXOTH)
        if not directory.is_dir or not may or not who.may(directory, stat.S_IWOTH):
            raise StaleError(f"uid {who.uid} makes nothing in directory {directory.ino}")
        if request.shard:
            name += b"." + request.shard.encode()
        mode = stat.S_IFREG | request.mode
        make = self.tree.maker(directory.ino, name, mode, who.uid, who.gid)
        self.portions.take(who.uid)
        try:
            held = await self.objects.creation.create_at_once(
                directory.ino, name, make, request.size
            )
            if held is None:
                raise StaleError("RAM has no room for it now")
        except BaseException:
            self.portions.add(who.uid, -1)
            raise
        held.most = request.size
        self._held[lease] = held, request.size, who.uid
        self._changed(directory.ino)
        try:  # an open of its own: that it is closed can be seen
            return held.tier.open(held.inode.ino, held.inode.version, writable=True)
        except BaseException:
            await self.close([lease])
            raise

    async def done(self, leases: Iterable[int]) -> bool:
        """They have been written, and end; whether all have been sealed."""
        whole = True
        for at, lease in enumerate(leases, 1):
            held, size = self._pop(lease)
            whole &= held is not None and await self._seal(held, size)
            if not at % AT_ONCE:
                await trio.lowlevel.checkpoint()
        return whole

    async def close(self, leases: Iterable[int]) -> None:
        """They end; what they have not written goes. Of others nothing is known."""
        for at, lease in enumerate(leases, 1):
            held, _ = self._pop(lease)
            if held is None:
                continue
            await self._drop(held)
            if not at % AT_ONCE:
                await trio.lowlevel.checkpoint()

    def _pop(self, lease: int) -> tuple[OpenObject | None, int]:
        """What it is of, and the size that was asked for. It ends."""
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
            log.debug("inode %d is not saved: %s", held.inode.ino, error)
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
        except KvfsError as error:  # it stays, too short to be a block
            log.error("inode %d was not written, and stays: %s", inode.ino, error)
        else:
            for parent, entry in names:
                if entry is not None:
                    self.ledger.gone(parent, entry.name, inode.ino)
        try:
            await self.objects.sealing.close_lent(held)
        except KvfsError as error:
            log.debug("inode %d: %s", inode.ino, error)
