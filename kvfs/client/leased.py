"""Blocks that the mount lends for one load or one save; other blocks go by name.

Contract: from `begin` on a thread asks the mount for leases, beside the other work. A load that
copies few blocks asks for none (`BY_NAME`). `open` and `descriptor_for` wait until the mount has
answered for a block. They give a descriptor of it, once; the caller closes it. `end` closes all
other descriptors and gives the leases back. Any number of threads.
"""

import errno
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from kvfs import leasing, prefix
from kvfs.client import files
from kvfs.client.leases import LeaseClient, Lent
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads

log = logging.getLogger(__name__)

# A load that copies at most so many blocks opens them by name: docs/benchmarks.md has the figures.
BY_NAME = 16
FIRST_ASKED = 2  # blocks of the first question
# The factor by which each further question of a reader grows: a lease of some more blocks takes as
# long as reading a few.
MORE_TO_READ = 4
# Blocks of each further question of a writer, and the number of blocks made, with room reserved,
# before they are needed. Not measured against other numbers.
MORE_TO_WRITE, AHEAD = 8, 8
_MODE = 0o666  # of a new file, before the umask
# There is nothing of that name, or something that is no block.
_GONE = {
    *(errno.ENOENT, errno.ESTALE, errno.EFBIG, errno.ENOTDIR),
    *(errno.EISDIR, errno.ELOOP, errno.ESPIPE),
}
_UMASK = re.compile(rb"^Umask:\s*([0-7]+)$", re.MULTILINE)


class _Leased:
    """Blocks of `size` bytes that follow `parent`, below a directory."""

    def __init__(
        self,
        directory: str,
        parent: bytes,
        keys: Sequence[bytes],
        shard: str,
        size: int,
        leases: LeaseClient,
    ) -> None:
        self._above = [parent, *keys]
        self._directory = directory
        self._shard = shard
        self._size = size
        self._leases = leases
        self._more = threading.Condition()
        self._known = len(keys)  # the mount has answered for these; before `begin` for none
        self._lent: dict[int, int] = {}  # block -> descriptor
        self._held: dict[int, int] = {}  # block -> lease

    def __len__(self) -> int:
        return len(self._above) - 1

    def path(self, at: int) -> str:
        above, key = self._above[at : at + 2]
        return f"{self._directory}/{prefix.path(above, key, self._shard)}"

    def _ask(self, most: int, mode: int = -1) -> None:
        """Ask for some of the next blocks, one question at a time."""
        above, *keys = self._above[self._known : self._known + most + 1]
        request = leasing.LeaseRequest(above, keys, self._shard, self._size, mode=mode)
        self._leases.ask(request, partial(self._answered, len(keys)))

    def _answered(self, asked: int, found: Lent) -> None:
        """Take the answer, in the thread that asks.

        All blocks from the first one that the mount does not lend go by name.
        """
        raise NotImplementedError

    def _add(self, found: Lent) -> None:
        for at, (fd, lease) in enumerate(found, self._known):
            self._held[at] = lease
            self._lent[at] = fd

    def _remove(self) -> tuple[Iterable[int], Iterable[int]]:
        """Return and forget all remaining descriptors and leases."""
        lent, self._lent = self._lent, {}
        held, self._held = self._held, {}
        return lent.values(), held.values()


class LeasedReader(_Leased):
    """Blocks of one load, opened in their order, and read or mapped side by side.

    The result is contiguous from the first block, whole, of the right size. It ends before the
    first block that is gone, short or fails; bytes read of later blocks do not count.
    """

    _ended = False

    def part(self, start: int, end: int) -> "LeasedReader":
        """Return some of its blocks as a chain of their own."""
        parent, *keys = self._above[start : end + 1]
        return LeasedReader(self._directory, parent, keys, self._shard, self._size, self._leases)

    def read(
        self,
        read: Callable[[int, int], None],
        *,
        threads: Threads,
        stats: Stats,
        counted: str = "blocks_loaded",
        mapped: bool = False,
    ) -> int:
        """Return the number of blocks that were read. read(i, descriptor) reads all of block i.

        mapped: `read` maps the block. Nothing is opened afterwards.
        """
        gone = False

        def one(at: int) -> bool:
            nonlocal gone
            try:
                fd = self.open(at)
                try:
                    read(at, fd)
                finally:
                    os.close(fd)
            except OSError as error:
                if error.errno in _GONE:
                    gone = True
                    log.debug("%s is gone: %s", self.path(at), error)
                else:
                    stats.add(load_errors=1)
                    log.warning("block %s was not loaded: %s", self.path(at), error)
                return False
            return True

        try:
            self.begin(mapped=mapped)
            count = threads.leading(len(self), one)
        finally:
            self.end()
        stats.add(**{counted: count, "blocks_absent": len(self) - count if gone else 0})
        return count

    def begin(self, *, mapped: bool) -> None:
        """Ask for leases. A mapped block has no handle: only a lease makes it count as open."""
        if self._leases.offered and len(self) > (0 if mapped else BY_NAME):
            self._known = 0
            self._ask(FIRST_ASKED)

    def end(self) -> None:
        """End the chain: it opens no other block, and gives leases back."""
        with self._more:
            self._ended = True
            lent, held = self._remove()
        for fd in lent:
            os.close(fd)
        self._leases.give_back(held)

    def open(self, at: int) -> int:
        """Return a descriptor to read a block by. Raises OSError as open(2) does."""
        if at >= self._known:
            with self._more:
                self._more.wait_for(lambda: at < self._known)
        fd = self._lent.pop(at, -1)
        return fd if fd >= 0 else files.open_block(self.path(at))

    def map(self, at: int, fd: int, *, shared: bool = False) -> torch.Tensor:
        """Map a block as `files.map_block` does. Its lease lasts as long as the mapping."""
        lease = self._held.pop(at, None)
        ended = _nothing if lease is None else partial(self._leases.give_back, (lease,))
        try:
            return files.map_block(fd, self._size, shared=shared, unmapped=ended)
        except OSError:
            ended()
            raise

    def _answered(self, asked: int, found: Lent) -> None:
        with self._more:
            ended = self._ended
            if not ended:
                self._add(found)
            self._known = self._known + asked if len(found) == asked else len(self)
            self._more.notify_all()
        if ended:
            for fd, _ in found:
                os.close(fd)
            self._leases.give_back(lease for _, lease in found)
        elif self._known < len(self):
            self._ask(min(MORE_TO_READ * asked, leasing.BLOCKS_MAX))


class LeasedWriter(_Leased):
    """Blocks of one save, which the mount makes many at a time. Never raises OSError.

    `descriptor_for` gives -1 for a block to make by name, and for all after it. `written` says that
    a block is complete and closed. After `end` the mount has sealed the written blocks, and the
    others are gone.
    """

    _mode = 0
    _over = True  # the mount is asked for no more
    _asking = False
    _taken = 0
    _sealing = 0
    count = 0  # blocks lent, from the first
    sealed: frozenset[int] = frozenset()

    def begin(self) -> None:
        """Ask for the first blocks, in the background."""
        if self._leases.makes and len(self) and (mode := _mode()) is not None:
            self._mode, self._known, self._over = mode, 0, False
            self._ask_for(FIRST_ASKED)

    def descriptor_for(self, at: int) -> int:
        """Return a descriptor to write a block by, or -1."""
        with self._more:
            self._taken = max(self._taken, at + 1)
            self._ask_ahead()
            self._more.wait_for(lambda: at < self._known or self._over)
            return self._lent.pop(at, -1)

    def written(self, at: int) -> None:
        with self._more:
            self._sealing += 1
            lease = self._held.pop(at)
        self._leases.done(lease, partial(self._done, at))

    def end(self) -> None:
        """Wait until all written blocks are sealed (`sealed`), and give the rest back."""
        with self._more:
            self._over = True
            self._more.wait_for(lambda: not self._asking and not self._sealing)
            lent, held = self._remove()
        for fd in lent:
            os.close(fd)
        self._leases.drop(held)

    def _ask_ahead(self) -> None:
        if not self._over and not self._asking and self._known < self._taken + AHEAD:
            self._ask_for(MORE_TO_WRITE)

    def _ask_for(self, most: int) -> None:
        self._asking = True
        self._ask(most, self._mode)

    def _answered(self, asked: int, found: Lent) -> None:
        with self._more:
            self._add(found)
            self.count += len(found)
            self._known += len(found)
            self._asking = False
            if len(found) < asked or self._known == len(self):
                self._over = True
            self._ask_ahead()
            self._more.notify_all()

    def _done(self, at: int, sealed: bool) -> None:  # noqa: FBT001 (a callback)
        """Take the result of a seal, in the thread that asks.

        One failure of a question fails all its blocks, so this looks at each.
        """
        if not sealed:
            with suppress(OSError):
                sealed = os.stat(self.path(at)).st_size == self._size
        with self._more:
            if sealed:
                self.sealed |= {at}
            self._sealing -= 1
            self._more.notify_all()


def _nothing() -> None:
    """Do nothing: the file was opened by name."""


def _mode() -> int | None:
    """Return the mode of new files of this process, or None.

    /proc has the umask; umask(2) could only read it by a change.
    """
    try:
        found = _UMASK.search(Path("/proc/self/status").read_bytes())
    except OSError:
        return None
    return None if found is None else _MODE & ~int(found[1], 8)
