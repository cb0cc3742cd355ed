"""Saving a chain: blocks are written side by side, and named in order.

Contract: a block gets its name after the one before it. Two ways:
`Renamed`: a block gets it when it is whole. Its file is written in the directory of the first one's
parent, because those of the others are not there yet: a kvfs namespace with `prefix` makes each
with its block, on any other file system it is made here.
`InPlace`: a block has it from the beginning, and is none before it has its size, which is when its
last byte is there: a file grows with what is written. That needs a mount of this machine: servers
of NFS may carry out the last write first. It saves a rename and four questions of the kernel's. The
mount itself may make them, many at a time (`kvfs.client.leased`), which saves the others.
An OSError ends the chain, and so does a block that its storage can not hold: that block and all
after it are not saved, their files are gone. Not for what is cached already, nor for where tensors
are.
"""

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Sequence
from itertools import count

from kvfs import prefix
from kvfs.client import files
from kvfs.client.leased import LeasedWriter
from kvfs.client.memory import Runs
from kvfs.client.stats import Stats
from kvfs.client.storage import UnstorableError
from kvfs.client.threads import Threads

log = logging.getLogger(__name__)
Content = contextlib.AbstractContextManager[Runs]


def save_chain(
    directory: str,
    parent: bytes,
    keys: Sequence[bytes],
    shard: str,
    content: Callable[[int], Content],
    *,
    parent_cached: bool,
    closed: bool,
    made: LeasedWriter | None,
    threads: Threads,
    stats: Stats,
) -> int:
    """Return how many of `keys`, from the first, have been saved.

    content(i): the bytes of block i while it is written. parent_cached: the parent is there, or is
    a root. closed: the file system itself makes directories. made: of a mount of this machine.
    """
    paths = paths_of(directory, parent, keys, shard)
    begin = f"{directory}/{parent.hex()}"
    chain = (
        InPlace(begin, paths, made)
        if made is not None
        else Renamed(begin, paths, [] if closed else [f"{directory}/{key.hex()}" for key in keys])
    )
    if parent_cached and not os.path.isdir(begin):
        with contextlib.suppress(OSError):  # said by the first write
            os.mkdir(begin)
    if made is not None:
        made.begin()

    def write(at: int) -> bool:
        if chain.over(at):
            return False
        try:
            return chain.write(at, content(at))
        except (OSError, UnstorableError) as error:
            stats.add(save_errors=1)
            if isinstance(error, FileNotFoundError):  # what it follows has been dropped
                log.debug("not saved: block %s: %s", keys[at].hex(), error)
            else:
                log.warning("block %s was not saved: %s", keys[at].hex(), error)
            chain.end(at)
            return False

    try:
        threads.leading(len(keys), write, stop=lambda: chain.end(0))
    finally:
        saved = chain.close()
    stats.add(blocks_saved=saved, blocks_unsaved=len(keys) - saved)
    return saved


def paths_of(directory: str, parent: bytes, keys: Sequence[bytes], shard: str) -> list[str]:
    """Of the blocks of a chain."""
    parents = (parent, *keys)
    return [
        f"{directory}/{prefix.path(above, key, shard)}"
        for above, key in zip(parents, keys, strict=False)
    ]


class _Chain:
    """Of which files: `paths`, and temporary ones in the directory `begin`."""

    def __init__(self, begin: str, paths: Sequence[str]) -> None:
        self._begin = begin
        self._paths = paths
        self._end = len(paths)
        self._named = 0
        self._lock = threading.RLock()

    def over(self, at: int) -> bool:
        with self._lock:
            return at >= self._end

    def end(self, at: int) -> None:
        with self._lock:
            self._end = min(self._end, at)

    def _write_temporary(self, at: int, content: Content) -> str:
        with content as data:
            return files.write_temporary(self._begin, os.path.basename(self._paths[at]), data)


class Renamed(_Chain):
    """Threads come with what they have written; one at a time gives names.

    directories: of the blocks, if they are to be made.
    """

    def __init__(self, begin: str, paths: Sequence[str], directories: Sequence[str]) -> None:
        super().__init__(begin, paths)
        self._directories = directories
        self._waiting: dict[int, str] = {}
        self._naming = False

    def write(self, at: int, content: Content) -> bool:
        """Raises OSError, also if a name could not be given, be it that of another block.

        Who finds that names are being given goes on to the next block: to wait would be one writer
        less for as long as renames take.
        """
        temporary = self._write_temporary(at, content)
        with self._lock:
            self._waiting[at] = temporary
            self._drop()
            if self._naming:
                return True
            self._naming = True
        while (ready := self._next()) is not None:
            self._name(*ready)
        return True

    def end(self, at: int) -> None:
        with self._lock:
            super().end(at)
            self._drop()

    def close(self) -> int:
        """Return how many are saved."""
        self.end(len(self._paths))
        return self._named

    def _next(self) -> tuple[int, str] | None:
        """The block whose name is next, and where it is; nobody gives names if there is none."""
        with self._lock:
            temporary = self._waiting.pop(self._named, None)
            if temporary is None:
                self._naming = False
                return None
            return self._named, temporary

    def _name(self, at: int, temporary: str) -> None:
        try:
            files.publish(temporary, self._paths[at])
            if self._directories:
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self._directories[at])
        except BaseException:
            with self._lock:
                self._naming = False
            self.end(at)
            raise
        with self._lock:
            self._named += 1

    def _drop(self) -> None:
        for at in [at for at in self._waiting if at >= self._end]:
            files.discard(self._waiting.pop(at))


class InPlace(_Chain):
    """One thread at a time makes a file, in order; they are written side by side."""

    def __init__(self, begin: str, paths: Sequence[str], made: LeasedWriter) -> None:
        super().__init__(begin, paths)
        self._made = made
        self._created: dict[int, int] = {}  # inode numbers
        self._written: set[int] = set()
        self._turns: dict[int, threading.Condition] = {}  # of who waits to make which block

    def write(self, at: int, content: Content) -> bool:
        """Raises OSError. False if one before it is not saved.

        Its memory is taken after the wait: two calls that share few buffers would wait for ever.
        """
        fd = self._made.take(at)
        if fd >= 0:
            with files.closing(fd):
                if self.over(at):
                    return False
                with content as data:
                    files.write_all(fd, data, self._paths[at])
            self._made.written(at)
            return True
        with self._lock:
            self._named = max(self._named, self._made.count)
            turn = self._turns[at] = threading.Condition(self._lock)
            turn.wait_for(lambda: at == self._named or at >= self._end)
            del self._turns[at]
            if at >= self._end:
                return False
        path = self._paths[at]
        try:
            fd = files.create(path)
        except FileExistsError:
            # Another one writes it, or has not come to its end. That may go, with its directory:
            # no block is made after it before it is replaced.
            files.publish(self._write_temporary(at, content), path)
            self._is_there(at)
        else:
            with files.closing(fd):
                self._created[at] = os.fstat(fd).st_ino  # asks nobody: the CREATE has said it
                self._is_there(at)
                with content as data:
                    files.write_all(fd, data, path)
        with self._lock:
            self._written.add(at)
        return True

    def _is_there(self, at: int) -> None:
        """The next one may be made."""
        with self._lock:
            self._named = at + 1
            if at + 1 in self._turns:
                self._turns[at + 1].notify()

    def end(self, at: int) -> None:
        with self._lock:
            super().end(at)
            for turn in self._turns.values():
                turn.notify()

    def close(self) -> int:
        """Unlink what follows a block that is not saved; return how many are.

        Not what another one has put in its place since.
        """
        self._made.end()
        self._written |= self._made.sealed
        saved = next(at for at in count() if at not in self._written)
        for at, inode in sorted(self._created.items(), reverse=True):
            if at >= saved and files.is_inode(self._paths[at], inode):
                files.discard(self._paths[at])
        return saved
