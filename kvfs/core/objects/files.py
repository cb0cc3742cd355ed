"""Backing files of objects: made, measured, and called where a disk may take its time.

Contract: a call on a slow tier waits in a worker thread, never in the loop and never for ever. A
failed call becomes a domain error. Not for which file an object has (`copies`, `versions`).
"""

import errno
import os
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from kvfs import failpoints
from kvfs.core.ledger.ledger import Ledger
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.objects.backings import Backings
from kvfs.errors import KvfsError, NoSpaceError, TooLargeError
from kvfs.tiers import Job, Tier

T = TypeVar("T")


class BackingFiles:
    """`backings` is the kernel's face: it registers files for passthrough."""

    def __init__(self, ledger: Ledger, backings: Backings) -> None:
        self.ledger = ledger
        self.backings = backings

    @staticmethod
    async def io(tier: Tier, call: Callable[[], T]) -> T:
        """Run a tier's system call where it may take its time, but not for ever."""
        return await tier.calls.call(call) if tier.slow else call()

    async def on_file(
        self, held: OpenObject, what: str, do: Callable[[int], T], patience: float | None = None
    ) -> T:
        """A system call on an open backing file. Raises OSError, TierError."""
        if not held.tier.slow:
            return do(held.fd)
        return await self.io(held.tier, Job.on_file(what, held.fd, do, patience))

    async def make(self, tier: Tier, ino: int, version: int) -> int:
        late = partial(tier.uncreate, ino=ino, version=version)
        return await self.io(tier, Job("create", lambda: tier.create(ino, version), late))

    def register(self, held: OpenObject) -> int:
        """A backing id for its file; 0 if the daemon must serve it."""
        backing_id = self.backings.register(held.fd)
        self.ledger.counters["opens_passthrough" if backing_id else "opens_served"] += 1
        return backing_id

    def measure(self, held: OpenObject) -> None:
        """Bring the record of an object that is being written up to what its file says now."""
        if held.writers and held.fd >= 0:
            found = os.fstat(held.fd)
            inode = held.inode
            inode.size, inode.blocks = found.st_size, found.st_blocks
            if found.st_mtime_ns != inode.backing_mtime_ns:
                inode.mtime_ns = inode.backing_mtime_ns = found.st_mtime_ns
                inode.ctime_ns = max(inode.ctime_ns, found.st_mtime_ns)

    async def set_size(self, held: OpenObject, size: int) -> None:
        try:
            await self.on_file(held, "truncate", partial(_truncate, size=size))
        except OSError as error:
            raise self.failed("truncate", held, error) from error

    @staticmethod
    def failed(verb: str, held: OpenObject, error: OSError) -> KvfsError:
        """What a failed call on a backing file means. Only a tier's own failure is logged."""
        what = f"{held.tier.name} tier: {verb} of inode {held.inode.ino}: {error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return NoSpaceError(what)
        if error.errno == errno.EFBIG:
            return TooLargeError(what)
        return held.tier.failed(verb, held.inode.ino, error)


def _truncate(fd: int, size: int) -> None:
    """Raises OSError."""
    if failpoints.active:
        failpoints.reach("objects.truncate")
    os.ftruncate(fd, size)
    if failpoints.active:
        failpoints.reach("objects.truncated")
