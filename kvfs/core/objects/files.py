"""Make and open backing files, compare them with their record, and register them for passthrough.

Contract: a call on a slow tier runs in a worker thread with a time limit, never in the loop. A
failed call becomes an error of `kvfs.errors`. `kvfs/fuse` implements `Backings`. `copies` and
`create` choose the file that an object has, not this module.
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
    """The kernel's register of files that it reads and writes without the daemon (passthrough)."""

    def register(self, fd: int) -> int:
        """Register an open file. Return its backing id, or 0 if the daemon must serve its bytes."""
        ...

    def release(self, backing_id: int) -> None:
        """Release a backing id that no handle uses any more."""
        ...


class BackingFiles:
    """Opens and measures backing files. `backings` registers them for passthrough."""

    def __init__(self, records: Records, counters: Counter[str], backings: Backings) -> None:
        self.records = records
        self.counters = counters
        self.backings = backings

    @staticmethod
    async def io(tier: Tier, call: Callable[[], T]) -> T:
        """Run a system call on a tier. For a slow tier: in a worker thread, with a time limit."""
        return await tier.calls.call(call) if tier.slow else call()

    async def on_file(
        self, held: OpenObject, what: str, do: Callable[[int], T], patience: float | None = None
    ) -> T:
        """Run a system call on the backing file of an open object. Raises OSError, TierError.

        Messages name the call `what`. patience: seconds until a call on a slow tier is overdue.
        """
        if not held.tier.slow:
            return do(held.fd)
        return await self.io(held.tier, TierCall.on_file(what, held.fd, do, patience))

    async def make(self, tier: Tier, ino: int, version: int) -> int:
        """Make a backing file; return its descriptor. Raises TierError, NoSpaceError."""
        if not tier.slow:
            return tier.create(ino, version)
        late = partial(tier.uncreate, ino=ino, version=version)
        return await self.io(tier, TierCall("create", lambda: tier.create(ino, version), late))

    def open_at_once(self, inode: Inode, *, lend: bool = False) -> int:
        """Open the copy in RAM for reading, without waiting. Return its descriptor.

        Return -1 if RAM has no copy, or has one that changed since its seal. lend: the descriptor
        is for a client, and must not allow writes. With `lend`, return -1 also if RAM cannot ensure
        this, or if the file has gaps: a client's mapping would take room for them.
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
            return -1  # the caller then calls `Copies.open`, which finds the reason
        if not self.untouched(inode, ram, fd) or (lend and _has_gaps(fd)):
            os.close(fd)
            return -1
        return fd

    def untouched(self, inode: Inode, tier: Tier, fd: int) -> bool:
        """Whether the file has the size and time of its seal, and kvfs does not doubt its bytes.

        kvfs doubts a copy on NVMe if a crash came after its session's seals (`suspect`). It doubts
        any copy for which a daemon has noted a doubt.
        """
        found = os.fstat(fd)
        return (
            found.st_size == inode.size
            and found.st_mtime_ns == inode.backing_mtime_ns
            and (inode.session not in self.records.suspect or tier is self.records.tiers.ram)
            and (inode.ino, inode.version, tier.name) not in self.records.verified.doubted
        )

    def register(self, held: OpenObject) -> int:
        """Register the file of an open object; return its backing id, or 0 if the daemon serves it.

        The daemon serves readers of a file in RAM that has gaps. A read of a gap in a mapping makes
        the kernel allocate a page (shmem_fault, mm/shmem.c), which no account would count.
        """
        served = not held.writable and self.has_gaps(held)
        backing_id = 0 if served else self.backings.register(held.fd)
        self.counters["opens_passthrough" if backing_id else "opens_served"] += 1
        return backing_id

    @staticmethod
    def has_gaps(held: OpenObject) -> bool:
        """Whether the object's file is in RAM and lacks pages for some of its bytes."""
        return not held.tier.slow and _has_gaps(held.fd)

    def measure(self, held: OpenObject) -> None:
        """Copy size, blocks and time from the backing file to the record, while it has a writer."""
        if held.writers and held.fd >= 0:
            found = os.fstat(held.fd)
            inode = held.inode
            inode.size, inode.blocks = found.st_size, found.st_blocks
            if found.st_mtime_ns != inode.backing_mtime_ns:
                inode.mtime_ns = inode.backing_mtime_ns = found.st_mtime_ns
                inode.ctime_ns = max(inode.ctime_ns, found.st_mtime_ns)

    async def set_size(self, held: OpenObject, size: int) -> None:
        """Set the size of the file of a writer. That alone counts as no written bytes."""
        try:
            # Not `measure`: the accounts know the record as it is.
            changed = _content(held.fd) != held.unwritten
            await self.on_file(held, "truncate", partial(_truncate, size=size))
            before, at = held.unwritten
            held.unwritten = (min(before, size), at) if changed else _content(held.fd)
        except OSError as error:
            raise self.failed("truncate", held, error) from error

    @staticmethod
    def failed(verb: str, held: OpenObject, error: OSError) -> KvfsError:
        """Return the error to raise for a failed call on a backing file.

        Log the call only if the tier failed, not if it is full or the file is too large.
        """
        what = f"{held.tier.name} tier: {verb} of {held.path}: {error}"
        if error.errno in {errno.ENOSPC, errno.EDQUOT}:
            return NoSpaceError(what)
        if error.errno == errno.EFBIG:
            return TooLargeError(what)
        return held.tier.failed(verb, held.path, error)


def _has_gaps(fd: int) -> bool:
    found = os.fstat(fd)
    return found.st_blocks * 512 < found.st_size


def _content(fd: int) -> tuple[int, int]:
    """The size of a file and the time of its last change: compare `OpenObject.unwritten`."""
    found = os.fstat(fd)
    return found.st_size, found.st_mtime_ns


def _truncate(fd: int, size: int) -> None:
    """Raises OSError."""
    if failpoints.active:
        failpoints.reach("objects.truncate")
    os.ftruncate(fd, size)
    if failpoints.active:
        failpoints.reach("objects.truncated")
