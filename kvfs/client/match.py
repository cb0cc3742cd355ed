"""How many blocks of a prompt are cached: one question to the mount, else bisection over stat.

Contract: an answer is what was there at some moment; `load` finds out what still is. Bisection
takes at most log2(blocks) + 2 stats for each shard, and is exact where prefixes are closed, as a
kvfs namespace with `prefix` keeps names. Where a hole can be (another file system, a block that is
being written in place), it finds the end of one of the runs, but none that a load has found to have
a hole.
The mount answers by a hidden file of the namespace, in the format of `kvfs.matching`. What other
nodes have put into a bucket that it shares it does not know before somebody has looked: that is
left to stats, behind the end of its answer. Not for the order of keys (`kvfs.prefix`).
"""

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Sequence
from typing import NamedTuple

from kvfs import matching, prefix
from kvfs.matching import KEYS_MAX

log = logging.getLogger(__name__)

HOLES_MAX = 1 << 16


class TierBytes(NamedTuple):
    """Bytes of what matched: in RAM, on NVMe and not in RAM, only in the bucket."""

    ram: int
    nvme: int
    bucket: int

    def plus(self, other: "TierBytes") -> "TierBytes":
        return TierBytes(*map(sum, zip(self, other, strict=True)))


class Found(NamedTuple):
    """How many of the keys asked for, from the first; where they are, if the mount has said so."""

    blocks: int
    bytes: TierBytes | None


class Question:
    """The namespace's `.match`, kept open. Any number of threads may ask; they take turns."""

    def __init__(self, directory: str) -> None:
        self._path = f"{directory}/{matching.NAME}"
        self._lock = threading.Lock()
        self._fd = -1  # closed with the last reference, if not before
        self.offered = True  # until it turns out not to be
        with self._lock:
            self._open()

    def ask(
        self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str], size: int
    ) -> Found | None:
        """Return what is cached as files of `size` each; None if the mount does not say."""
        blocks, where = 0, TierBytes(0, 0, 0)
        for start in range(0, len(keys), KEYS_MAX):
            part = keys[start : start + KEYS_MAX]
            found = self._ask(keys[start - 1] if start else parent, part, shards, size)
            if found is None or found.bytes is None:
                return None
            blocks, where = blocks + found.blocks, where.plus(found.bytes)
            if found.blocks < len(part):
                break
        return Found(blocks, where)

    def _ask(
        self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str], size: int
    ) -> Found | None:
        question = matching.pack_request(parent, keys, shards, details=True)
        with self._lock:
            if not self.offered or (self._fd < 0 and not self._open()):
                return None
            try:
                os.pwrite(self._fd, question, 0)
                data = os.pread(self._fd, matching.answer_size(len(keys), details=True), 0)
            except OSError as error:
                log.info("%s: %s; asking by stat", self._path, error)
                self._close()
                return None
        answer = _parse(data, len(keys))
        if answer is None:
            log.warning(
                "%s gave %d bytes that are no answer: asking by stat", self._path, len(data)
            )
            self.offered = False
            return None
        wanted = size * len(shards)
        fitting = next((at for at, found in enumerate(answer.sizes) if found != wanted), None)
        if fitting is None:
            return Found(answer.blocks, TierBytes(answer.ram, answer.nvme, answer.bucket))
        return self._ask(parent, keys[:fitting], shards, size)

    def close(self) -> None:
        with self._lock:
            self.offered = False
            self._close()

    def __del__(self) -> None:
        self._close()

    def _open(self) -> bool:
        try:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            log.debug("%s: %s; asking by stat", self._path, error)
            self.offered = False
        return self.offered

    def renew(self) -> None:
        """What it says is not what is there: another namespace may have its name by now."""
        with self._lock:
            self._close()

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            with contextlib.suppress(OSError):  # of a mount that is gone; the number is free again
                os.close(fd)


def _parse(data: bytes, keys: int) -> matching.Answer | None:
    """The answer about so many keys: a network file system might give one's own question back."""
    try:
        answer = matching.unpack_answer(data)
    except ValueError:
        return None
    return answer if len(answer.sizes) == answer.blocks <= keys else None


class Bisection:
    """Stats of one directory, for files of one size. Any number of threads.

    Where a prefix may have a hole, its end is found by who loads: `missed` says so, and a match
    ends there until the block is there again.
    """

    def __init__(self, directory: str, size: int) -> None:
        self._directory = directory
        self._size = size
        self._holes: set[bytes] = set()
        self._lock = threading.Lock()

    def ask(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> Found:
        """Look whether the first is there, and the last; then between them."""

        def there(at: int) -> bool:
            return self._is_there(keys[at - 1] if at else parent, keys[at], shards)

        keys = keys[: self.before_hole(parent, keys, shards)]
        if not keys or not there(0):
            return Found(0, None)
        if there(len(keys) - 1):
            return Found(len(keys), None)
        low, high = 0, len(keys) - 1  # the first is there, the last is not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if there(middle) else (low, middle)
        return Found(low + 1, None)

    def before_hole(self, parent: bytes, keys: Sequence[bytes], shards: Sequence[str]) -> int:
        """How many come before the first that was missed, and still is."""
        with self._lock:
            holes = [at for at, key in enumerate(keys) if key in self._holes] if self._holes else []
        for at in holes:
            if not self._is_there(keys[at - 1] if at else parent, keys[at], shards):
                return at
            with self._lock:
                self._holes.discard(keys[at])
        return len(keys)

    def _is_there(self, above: bytes, key: bytes, shards: Sequence[str]) -> bool:
        paths = (prefix.path(above, key, shard) for shard in shards)
        return all(_is_block(f"{self._directory}/{path}", self._size) for path in paths)

    def missed(self, key: bytes) -> None:
        """A block that was believed to be there is not."""
        with self._lock:
            if len(self._holes) >= HOLES_MAX:
                self._holes.clear()  # they will be found again
            self._holes.add(key)


def _is_block(path: str, size: int) -> bool:
    with contextlib.suppress(OSError):
        found = os.stat(path, follow_symlinks=False)
        return stat.S_ISREG(found.st_mode) and found.st_size == size
    return False
