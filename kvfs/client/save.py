"""Saving a chain: blocks are written side by side under temporary names, and named in order.

Contract: a block gets its name after the one before it, whole or not at all. Files are written in
the directory of the first one's parent, because those of the others are not there yet; a kvfs
namespace with `prefix` makes each with its block, on any other file system it is made here. An
OSError ends the chain, and so does a block that its storage can not hold: that block and all after
it are not saved, their files are gone. Not for what is cached already, nor for where tensors are.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence

from kvfs import prefix
from kvfs.client import files
from kvfs.client.memory import Runs
from kvfs.client.stats import Stats
from kvfs.client.storage import UnstorableError
from kvfs.client.threads import Threads

log = logging.getLogger(__name__)


def save_chain(
    directory: str,
    parent: bytes,
    keys: Sequence[bytes],
    shard: str,
    content: Callable[[int], contextlib.AbstractContextManager[Runs]],
    *,
    parent_cached: bool,
    closed: bool,
    threads: Threads,
    stats: Stats,
) -> int:
    """Return how many of `keys`, from the first, have been saved.

    content(i): the bytes of block i while it is written. parent_cached: the parent is there, or is
    a root. closed: the file system itself makes directories.
    """
    chain = _Chain(directory, parent, keys, shard, closed=closed)
    begin = f"{directory}/{parent.hex()}"
    if parent_cached and not os.path.isdir(begin):
        with contextlib.suppress(OSError):  # said by the first write
            os.mkdir(begin)

    def write(at: int) -> bool:
        if chain.over(at):
            return False
        try:
            with content(at) as data:
                temporary = files.write_temporary(begin, prefix.name(keys[at], shard), data)
            chain.written(at, temporary)
        except (OSError, UnstorableError) as error:
            chain.end(at)
            stats.add(save_errors=1)
            if isinstance(error, FileNotFoundError):  # what it follows has been dropped
                log.debug("not saved: block %s: %s", keys[at].hex(), error)
            else:
                log.warning("block %s was not saved: %s", keys[at].hex(), error)
            return False
        return True

    try:
        threads.leading(len(keys), write)
    finally:
        chain.end(len(keys))
    stats.add(blocks_saved=chain.named, blocks_unsaved=len(keys) - chain.named)
    return chain.named


class _Chain:
    """Gives names in order. Threads come with what they have written; one at a time gives names."""

    def __init__(
        self, directory: str, parent: bytes, keys: Sequence[bytes], shard: str, *, closed: bool
    ) -> None:
        self.named = 0
        self._directory = directory
        self._parents = (parent, *keys)
        self._keys = keys
        self._shard = shard
        self._closed = closed
        self._end = len(keys)
        self._waiting: dict[int, str] = {}
        self._lock = threading.Lock()

    def written(self, at: int, temporary: str) -> None:
        """Raises OSError if a name could not be given, be it that of another block."""
        with self._lock:
            self._waiting[at] = temporary
            while self.named < self._end and self.named in self._waiting:
                self._name(self.named)
                self.named += 1
            self._drop()

    def over(self, at: int) -> bool:
        """Whether block `at` can not be saved any more."""
        with self._lock:
            return at >= self._end

    def end(self, at: int) -> None:
        """Block `at` will not come."""
        with self._lock:
            self._end = min(self._end, at)
            self._drop()

    def _name(self, at: int) -> None:
        key = self._keys[at]
        path = prefix.path(self._parents[at], key, self._shard)
        try:
            files.publish(self._waiting.pop(at), f"{self._directory}/{path}")
            if not self._closed:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(f"{self._directory}/{key.hex()}")
        except OSError:
            self._end = at
            self._drop()
            raise

    def _drop(self) -> None:
        for at in [at for at in self._waiting if at >= self._end]:
            files.discard(self._waiting.pop(at))
