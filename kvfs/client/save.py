"""Saving a chain: blocks are written side by side, and named in order.

Contract: a block gets its name after the one before it. There are two ways.

`Renamed`: a block gets its name when it is whole. Its file is written in the directory of the first
block's parent, because the directories of the others do not exist yet. A kvfs namespace with
`prefix` makes each directory with its block; on other file systems this module makes it.

`InPlace`: a block has its name from the beginning, and its file grows with the writes. It counts as
a block only with its full size, so when its last byte is there. That needs a mount of this machine,
because NFS servers may carry out the last write first. It saves a rename and four requests of the
kernel. The mount itself may make the files, many at a time (`kvfs.client.leased`), which saves the
other requests.

An OSError ends the chain, and so does a block that its storage cannot represent. That block and all
after it are not saved, and their files are removed. Not for blocks that are cached already, nor for
the place of tensors.
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
    """Return the number of `keys`, from the first, that have been saved.

    - content(i): gives the bytes of block i while it is written.
    - parent_cached: the parent is there, or is a root.
    - closed: the file system itself makes directories.
    - made: blocks that a mount of this machine makes.
    """
    paths = paths_of(directory, parent, keys, shard)
    begin = f"{directory}/{parent.hex()}"
    chain = (
        InPlace(begin, paths, made)
        if made is not None
        else Renamed(begin, paths, [] if closed else [f"{directory}/{key.hex()}" for key in keys])
    )
    if parent_cached and not os.path.isdir(begin):
        with contextlib.suppress(OSError):  # the first write reports it
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
            if isinstance(error, FileNotFoundError):  # the parent has been dropped
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
    """Return the paths of the blocks of a chain."""
    parents = (parent, *keys)
    return [
        f"{directory}/{prefix.path(above, key, shard)}"
        for above, key in zip(parents, keys, strict=False)
    ]


class _Chain:
    """The files of a chain: `paths`, and temporary ones in the directory `begin`."""

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
    """Renames written files: several threads write, and one at a time gives names.

    directories: of the blocks, if this class has to make them.
    """

    def __init__(self, begin: str, paths: Sequence[str], directories: Sequence[str]) -> None:
        super().__init__(begin, paths)
        self._directories = directories
        self._waiting: dict[int, str] = {}
        self._naming = False

    def write(self, at: int, content: Content) -> bool:
        """Write a block. Raises OSError, also if it could not name this block or another.

        If another thread gives names, this one goes on to the next block. A wait would cost one
        writer for as long as the renames take.
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
        """Return the number of saved blocks."""
        self.end(len(self._paths))
        return self._named

    def _next(self) -> tuple[int, str] | None:
        """Take the next block to name, and its file; without one, this thread stops naming."""
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
    """Writes in place: one thread at a time makes a file, in order; all write side by side."""

    def __init__(self, begin: str, paths: Sequence[str], made: LeasedWriter) -> None:
        super().__init__(begin, paths)
        self._made = made
        self._created: dict[int, int] = {}  # inode numbers
        self._written: set[int] = set()
        self._turns: dict[int, threading.Condition] = {}  # waiting threads, by block

    def write(self, at: int, content: Content) -> bool:
        """Write a block. Raises OSError. Returns False if one before it is not saved.

        It takes the content's memory after the wait: otherwise two calls with few buffers could
        deadlock.
        """
        fd = self._made.descriptor_for(at)
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
            # Another process writes it, or has died before its end. That file may go, with its
            # directory, so this process makes no block after it before it has replaced it.
            files.publish(self._write_temporary(at, content), path)
            self._is_there(at)
        else:
            with files.closing(fd):
                self._created[at] = os.fstat(fd).st_ino  # no request: CREATE has said it
                self._is_there(at)
                with content as data:
                    files.write_all(fd, data, path)
        with self._lock:
            self._written.add(at)
        return True

    def _is_there(self, at: int) -> None:
        """Allow the next block to be made."""
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
        """Unlink all blocks after one that is not saved; return the number of saved ones.

        A file that another process has put in place since stays.
        """
        self._made.end()
        self._written |= self._made.sealed
        saved = next(at for at in count() if at not in self._written)
        for at, inode in sorted(self._created.items(), reverse=True):
            if at >= saved and files.is_inode(self._paths[at], inode):
                files.discard(self._paths[at])
        return saved
