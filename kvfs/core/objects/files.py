"""Backing files of objects: made, opened, compared with their record, measured, registered.

Contract: a call on a slow tier waits in a worker thread, never in the loop and never for ever. A
failed call becomes a domain error. The kernel's face keeps `Backings`. Not for which file an object
has (`copies`, `create`).
"""

import errno
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from kvfs import failpoints
from kvfs.catalog import Inode
from kvfs.core.ledger.open_table import OpenObject
from kvfs.core.ledger.records import Records
from kvfs.errors import KvfsError, NoSpaceError, TooLargeError
from kvfs.tiers import Tier, TierCall

T = TypeVar("T")


class Backings(Protocol):
    """Lets the kernel read and write a backing file by itself."""

    def register(self, fd: int) -> int:
        """Return an id > 0 for the open file, or 0 if the daemon must serve its bytes."""
        ...

    def release(self, backing_id: int) -> None:
        """Release an id that no handle uses any more."""
        ...


class BackingFiles:
    """Opens and measures backing files. `backings` registers them for passthrough."""

    def __init__(self, records: Records, counters: Counter[str], backings: Backings) -> None:
        self.records = records
        self.counters = counters
        self.backings = backings

    @staticmethod
    async def io(tier: Tier, call: Callable[[], T]) -> T:
        """Run a tier's system call: in a worker thread, with a time limit, if the tier is slow."""
        return await tier.calls.call(call) if tier.slow else call()

    async def on_file(
        self, held: OpenObject, what: str, do: Callable[[int], T], patience: float | None = None
    ) -> T:
        """Run a system call on an open backing file. Raises OSError, TierError."""
        if not held.tier.slow:
            return do(held.fd)
        return await self.io(held.tier, TierCall.on_file(what, held.fd, do, patience))

    async def make(self, tier: Tier, ino: int, version: int) -> int:
        late = partial(tier.uncreate, ino=ino, version=version)
        return await self.io(tier, TierCall("create", lambda: tier.create(ino, version), late))

    def open_at_once(self, inode: Inode, *, lend: bool = False) -> int:
        """Open a copy in RAM for reading without waiting; -1 if it is not there as it was sealed.

        lend: the descriptor must not allow writes. -1 also if RAM cannot ensure this, or if a
        mapping of gaps would take room in RAM.
        """
        ram = self.records.tiers.ram
        if inode.ram_epoch != ram.epoch:
            return -1
        try:
            if lend:
                fd = ram.lend(inode.ino, inode.version)
            else:
                fd = ram.open(inode.ino, inode.version, writable=False)
        except KvfsError:
            return -1  # `Copies.open` finds out the reason
        if not self.untouched(inode, ram, fd) or (lend and _has_gaps(fd)):
            os.close(fd)
            return -1
        return fd

    def untouched(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Whether the file looks as it was sealed, with no crash in between and no doubt noted."""
        found = os.fstat(fd)
        return (
            found.st_size == inode.size
            and found.st_mtime_ns == inode.backing_mtime_ns
            and (inode.session not in self.records.suspect or tier is self.records.tiers.ram)
            and (inode.ino, inode.version, tier.name) not in self.records.verified.doubted
        )

    def register(self, held: OpenObject) -> int:
        """Return a backing id for its file; 0 if the daemon must serve it.

        The daemon serves readers of a file in RAM that has gaps. A read of a gap in a mapping makes
        the kernel allocate a page (shmem_fault, mm/shmem.c), which no account would count.
        """
        served = not held.writable and self.has_gaps(held)
        backing_id = 0 if served else self.backings.register(held.fd)
        self.counters["opens_passthrough" if backing_id else "opens_served"] += 1
        return backing_id

    @staticmethod
    def has_gaps(held: OpenObject) -> bool:
        """Whether it is a file in RAM that does not have a page for each byte."""
        return not held.tier.slow and _has_gaps(held.fd)

    def measure(self, held: OpenObject) -> None:
        """Update the record of an object that is being written from its file."""
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
        """Turn a failed call on a backing file into an error. Only a tier's failure is logged."""
        what = f"{held.tier.name} tier: {verb} of {held.path}: {error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return NoSpaceError(what)
        if error.errno == errno.EFBIG:
            return TooLargeError(what)
        return held.tier.failed(verb, held.path, error)


def _has_gaps(fd: int) -> bool:
    found = os.fstat(fd)
    return found.st_blocks * 512 < found.st_size


def _truncate(fd: int, size: int) -> None:
    """Raises OSError."""
    if failpoints.active:
        failpoints.reach("objects.truncate")
    os.ftruncate(fd, size)
    if failpoints.active:
        failpoints.reach("objects.truncated")
