"""Loading a chain: blocks are opened and read side by side, or mapped one after the other.

Contract: what counts is contiguous from the first block, whole, of the right size. The first one
that is gone, short or fails ends it; what was read of it is of no account. Not for what is cached
(`kvfs.client.match`), nor for what the bytes mean.
"""

import errno
import logging
import os
from collections.abc import Callable, Sequence

import torch

from kvfs.client import files
from kvfs.client.spec import Spec
from kvfs.client.stats import Stats
from kvfs.client.threads import Threads

_log = logging.getLogger(__name__)
_GONE = {errno.ENOENT, errno.ESTALE, errno.EFBIG, errno.ENOTDIR, errno.ELOOP}


def read_chain(
    paths: Sequence[str],
    read: Callable[[int, int, str], None],
    size: int,
    *,
    threads: Threads,
    stats: Stats,
) -> int:
    """Return how many blocks were read. read(i, descriptor, path) reads block i, all of it."""

    def one(at: int) -> bool:
        try:
            fd = files.open_block(paths[at], size)
            try:
                read(at, fd, paths[at])
            finally:
                os.close(fd)
        except OSError as error:
            _failed(error, paths[at], stats)
            return False
        return True

    count = threads.leading(len(paths), one)
    stats.add(blocks_loaded=count)
    return count


def map_chain(paths: Sequence[str], spec: Spec, *, stats: Stats) -> list[torch.Tensor]:
    """Return tensors over the files themselves. Nothing is read."""
    found: list[torch.Tensor] = []
    for path in paths:
        try:
            fd = files.open_block(path, spec.stored_bytes)
            try:
                pages = files.map_block(fd, spec.stored_bytes)
            finally:
                os.close(fd)
        except OSError as error:
            _failed(error, path, stats)
            break
        found.append(pages.view(spec.torch_dtype).view(spec.shape))
    stats.add(blocks_loaded=len(found))
    return found


def _failed(error: OSError, path: str, stats: Stats) -> None:
    if error.errno in _GONE:
        stats.add(blocks_vanished=1)
        _log.debug("not loaded: %s: %s", path, error)
    else:
        stats.add(load_errors=1)
        _log.warning("not loaded: %s: %s", path, error)
