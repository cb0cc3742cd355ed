"""Loading a chain: blocks are opened, and read or mapped, side by side.

Contract: what counts is contiguous from the first block, whole, of the right size. The first one
that is gone, short or fails ends it; what was read of it is of no account. Not for what is cached
(`kvfs.client.match`), nor for what the bytes mean.
"""

import errno
import logging
import os
from collections.abc import Callable

import torch

from kvfs.client import files
from kvfs.client.leased import LeasedReader
from kvfs.client.spec import Spec
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads

log = logging.getLogger(__name__)
# There is nothing of that name, or what is no block.
_GONE = {
    *(errno.ENOENT, errno.ESTALE, errno.EFBIG, errno.ENOTDIR),
    *(errno.EISDIR, errno.ELOOP, errno.ESPIPE),
}


def read_chain(
    chain: LeasedReader,
    read: Callable[[int, int], None],
    *,
    threads: Threads,
    stats: Stats,
    counted: str = "blocks_loaded",
) -> int:
    """Return how many blocks were read. read(i, descriptor) reads block i, all of it.

    The chain has ended then.
    """

    def one(at: int) -> bool:
        try:
            fd = chain.open(at)
            try:
                read(at, fd)
            finally:
                os.close(fd)
        except OSError as error:
            _failed(error, chain.path(at), stats)
            return False
        return True

    try:
        chain.begin()
        count = threads.leading(len(chain), one)
    finally:
        chain.end()
    stats.add(**{counted: count})
    return count


def map_chain(
    chain: LeasedReader, spec: Spec, *, threads: Threads, stats: Stats
) -> list[torch.Tensor]:
    """Return tensors over the files themselves. Nothing is read."""
    found: dict[int, torch.Tensor] = {}

    def map_one(at: int, fd: int) -> None:
        pages = chain.map(at, fd)
        found[at] = pages.view(spec.torch_dtype).view(spec.shape)

    count = read_chain(chain, map_one, threads=threads, stats=stats)
    return [found[at] for at in range(count)]


def open_chain(chain: LeasedReader, size: int, *, threads: Threads, stats: Stats) -> int:
    """Return how many could be opened: their bytes have been brought to where they are read."""

    def check(_at: int, fd: int) -> None:
        files.check_size(fd, size)

    return read_chain(chain, check, threads=threads, stats=stats, counted="blocks_prefetched")


def _failed(error: OSError, path: str, stats: Stats) -> None:
    if error.errno in _GONE:
        stats.add(blocks_vanished=1)
        log.debug("%s is gone: %s", path, error)
    else:
        stats.add(load_errors=1)
        log.warning("block %s was not loaded: %s", path, error)
